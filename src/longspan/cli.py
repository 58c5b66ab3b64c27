"""The command line: `longspan COMMAND --help` lists the flags.

A command is a module with a frozen dataclass, whose docstrings are the help, and a function `run(config)` that returns
the exit code. Fields that are dataclasses (`ParallelConfig`, `Model`) are shared by commands; their flags have no
prefix. Only the module of the command is imported, and it does not import torch before it runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
import os
import shutil
import signal
import sys
import textwrap
import time
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, TypeVar

from longspan import __version__
from longspan.core.errors import LongspanError, is_full, require
from longspan.core.reading import (
    convert,
    field_texts,
    fields_of,
    flags_of,
    is_one_flag,
    parse_integer,
    read_yaml,
    split_config,
    suggestion,
    with_values,
)
from longspan.core.validation import check_text, format_value, nearest, path_of
from longspan.ranks import launch

Config = TypeVar("Config")

#: Command: (module, its config class, what it does).
COMMANDS = {
    "train": ("longspan.train", "", "train on long sequences by TRL: sft, dpo, gkd, ..."),
    "generate": (
        "longspan.generate",
        "GenerateConfig",
        "answer a question, also about a long text; continue a text",
    ),
    "score": ("longspan.generate.score", "ScoreConfig", "compute perplexity and log-probabilities of a long text"),
    "verify": ("longspan.verify", "VerifyConfig", "prove on your model that the sharded run computes the same"),
    "plan": ("longspan.plan.command", "PlanConfig", "say what fits, on which mesh, and what it costs"),
    "bench": (
        "longspan.bench",
        "BenchConfig",
        "measure links and one rank's speed, for `plan --gpu FILE`",
    ),
}

_NEEDS = dict.fromkeys(("generate", "score", "verify"), ("transformers", "safetensors"))

_USAGE = """usage: longspan COMMAND [--config FILE.yaml] [--flag value ...]

Train and run Transformers on sequences longer than one GPU can hold, exactly.

{}

longspan COMMAND --help   all flags of a command
longspan --version
""".format("\n".join(f"  {name:<10}{text}" for name, (_, _, text) in COMMANDS.items()))

#: Seconds that a rank with an error waits for the machine's first rank to print it, under torchrun.
_FIRST_RANK_S = 30

_FILE = "--config FILE.yaml reads flags from a file, a key for each; those of the command line win."


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code (`exit_code`); 1 also if a verification failed, or nothing fits."""
    args = list(sys.argv[1:] if argv is None else argv)
    return exit_code(lambda: _run([*args[1:2], "--help"] if args[:1] == ["help"] else args))


def _run(given: list[str]) -> int:
    if not given or given[0] in ("-h", "--help"):
        print(_USAGE)
        return 0 if given else 2
    command, *args = given
    if command in ("-V", "--version", "version"):
        if args:
            raise LongspanError(f"longspan {command} takes no argument, got {format_value(args[0])}; leave it out")
        print(f"longspan {__version__}")
        return 0
    if command not in COMMANDS:
        hint = nearest(command, COMMANDS) if command[:1] != "-" else f"give one first: {', '.join(COMMANDS)}"
        raise LongspanError(f"there is no command {format_value(command)}; {hint}")
    module_name, config_name, _ = COMMANDS[command]
    module = importlib.import_module(module_name)
    if not config_name:  # it parses its own arguments, TRL's
        return int(module.run(args))
    config = parse(getattr(module, config_name), args, prog=f"longspan {command}")
    require(f"longspan {command}", *_NEEDS.get(command, ()))
    return int(module.run(config))


def exit_code(run: Callable[[], int]) -> int:
    """Run a command; print why it fails on the machine's first rank, and return its exit code.

    0: done. 1: `run` says so, or a rank died. 2: bad input. 143, 130: ended early by SIGTERM or Ctrl-C.
    """
    code, why = 0, ""
    launch.silence_imports()
    try:
        code = run()
        sys.stdout.flush()
    except BrokenPipeError:
        return _end_broken_pipe()
    except OSError as error:
        if not is_full(error):
            raise
        _end_broken_pipe()
        code, why = 2, f"longspan: error: the disk is full: {error}; make room, and run it again\n"
    except LongspanError as error:
        code, why = 2, f"longspan: error: {error}\n"
    except launch.RankFailed as error:
        code, why = 1, f"{error.details}longspan: error: {error}\n"
    except launch.Stopped as stop:  # without waiting: a stopped torchrun agent would wait for the ranks
        if launch.is_first_local_rank():
            why = f": {stop.not_saved}" if stop.not_saved else ""
            print(f"longspan: stopped by {signal.Signals(stop.signum).name}{why}", file=sys.stderr)
        return 128 + stop.signum
    except SystemExit as end:  # by tyro after --help or wrong flags; a text is a message and means code 1
        if isinstance(end.__context__, BrokenPipeError):  # raised by rich
            return _end_broken_pipe()
        code, why = (1, f"{end.code}\n") if isinstance(end.code, str) else (end.code or 0, "")
    except KeyboardInterrupt:
        return 130
    if code and not launch.is_first_local_rank() and "TORCHELASTIC_RUN_ID" in os.environ:
        # torchrun ends all ranks once one has failed: let the first one print the cause. An error that was not that of
        # all ranks is printed after the wait.
        time.sleep(_FIRST_RANK_S)
    sys.stderr.write(why)
    return code


def _end_broken_pipe() -> int:
    """Return the exit code after the reader of stdout has closed it (`longspan plan ... | head -1`); print nothing."""
    with contextlib.suppress(OSError, ValueError):  # drop what is still in the buffer
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 128 + signal.SIGPIPE


def parse(config_class: type[Config], args: list[str], *, prog: str) -> Config:
    """Make a config from flags and from the YAML file of `--config`; flags win over the file.

    Raises:
        LongspanError: for a file that cannot be read, or has unknown keys or values of a wrong type.
        SystemExit: by tyro, with code 2 for wrong flags and 0 after --help.
    """
    import tyro

    for arg in args:
        check_text("the argument", arg)
    args, path = split_config(args)
    registry = tyro.constructors.ConstructorRegistry()
    registry.primitive_rule(_value)
    registry.struct_rule(_fields)
    columns = shutil.get_terminal_size().columns - 2
    texts = [*inspect.cleandoc(config_class.__doc__ or "").strip().split("\n\n"), _FILE]
    with registry:
        return tyro.cli(
            config_class,
            prog=prog,
            description="\n\n".join(
                textwrap.fill(" ".join(text.split()), columns, subsequent_indent="  ") for text in texts
            ),
            args=args,
            default=config_class() if path is None else from_file(config_class(), path, prog),
            config=(tyro.conf.OmitArgPrefixes,),
            console_outputs=launch.is_first_local_rank(),
        )


def _value(info: Any) -> Any:
    """Return tyro's spec for integers with suffixes or a word, paths, optional values, and values that are one flag."""
    import tyro

    spec = tyro.constructors.PrimitiveConstructorSpec
    if info.type == tuple[Path, ...]:
        return spec(
            nargs="*",
            metavar="PATH [PATH ...]",
            instance_from_str=_paths,
            is_instance=lambda value: isinstance(value, tuple),
            str_from_instance=lambda value: [str(path) for path in value],
        )
    kinds = [part for part in typing.get_args(info.type) if part is not NoneType]
    kind = kinds[0] if len(kinds) == 1 and NoneType in typing.get_args(info.type) else info.type
    readers: dict[Any, Any] = {
        int: ("INT", parse_integer),
        float: ("FLOAT", float),
        str: ("STR", str),
        Path: ("PATH", lambda text: path_of("the path", text)),
    }
    words = [word for part in kinds if typing.get_origin(part) is Literal for word in typing.get_args(part)]
    if words and int in kinds:
        readers[kind] = (f"INT|{{{','.join(words)}}}", lambda text: convert(kind, text))
    if is_one_flag(kind):
        readers[kind] = ("WORD,KEY=VALUE", kind.read)
    if kind not in readers:
        return None
    metavar, read = readers[kind]
    return spec(
        nargs=1,
        metavar=metavar,
        instance_from_str=lambda given: read(given[0]),
        is_instance=lambda value: value is None or value in words or isinstance(value, int if words else kind),
        str_from_instance=lambda value: [str(value)],
    )


def _paths(given: list[str]) -> tuple[Path, ...]:
    if not given:
        raise ValueError("give one path or more")
    return tuple(path_of("the path", text) for text in given)


def _fields(info: Any) -> Any:
    """Return tyro's spec for a command: its own flags first, and those of values that it shares with others last."""
    import tyro

    kind: Any = info.type
    if not dataclasses.is_dataclass(info.type) or is_one_flag(kind):
        return None
    texts, kinds = field_texts(kind), fields_of(kind)
    own, shared = inspect.get_annotations(kind), dataclasses.is_dataclass
    fields: list[Any] = []
    for name in sorted(kinds, key=lambda name: (shared(kinds[name]) and not is_one_flag(kinds[name]), name not in own)):
        default = getattr(info.default, name)
        # The text says what happens without a value.
        hint = tyro.conf.arg(help_behavior_hint="") if str(default) in ("None", "", "()") else tyro.conf.arg()
        marked: Any = Annotated[kinds[name], hint]
        fields.append(tyro.constructors.StructFieldSpec(name, marked, default, texts.get(name)))
    return tyro.constructors.StructConstructorSpec(instantiate=kind, fields=tuple(fields))


def from_file(config: Config, path: Path, prog: str) -> Config:
    """Return a config with the values of a YAML file.

    Raises:
        LongspanError: for a file that cannot be read, or has unknown keys or values of a wrong type.
    """
    flags = flags_of(type(config))
    given: dict[str, Any] = {}
    for key, value in read_yaml(path).items():
        name = key.replace("-", "_")
        if name not in flags:
            hint = suggestion(name, flags, prog)
            raise LongspanError(f"--config {path}: there is no key {format_value(key)}; {hint}")
        if name in given:
            raise LongspanError(f"--config {path}: {key} is set twice, spelled differently; keep one")
        try:
            given[name] = convert(flags[name][1], value)
        except ValueError as error:
            raise LongspanError(f"--config {path}: {key}: {format_value(value)} is invalid: {error}") from error
    try:
        return with_values(config, given)
    except LongspanError as error:
        raise LongspanError(f"--config {path}: {error}") from error
