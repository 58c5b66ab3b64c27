"""The command line: `longspan COMMAND --help` says the rest.

A command is a module with a frozen dataclass, whose docstrings are the help, and a `run(config)` that returns the exit
code. Only the command that is asked for is imported, and none of them imports torch before it runs.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import inspect
import re
import signal
import sys
import tomllib
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from longspan.errors import LongspanError

#: Command: (module, its config class, what it does).
COMMANDS = {
    "train": ("longspan.train", "TrainConfig", "train a causal LM on long sequences"),
    "verify": ("longspan.verify", "VerifyConfig", "prove on your model that the sharded run computes the same"),
    "plan": ("longspan.plan.command", "PlanConfig", "what fits, which mesh, and what it costs; needs no torch"),
    "bench": ("longspan.bench", "BenchConfig", "measure your machines: the links between ranks, and one rank's speed"),
}

_USAGE = """usage: longspan COMMAND [--from FILE.toml] [--flag value ...]

Train and run Transformers on sequences longer than one GPU can hold, exactly.

{commands}

longspan COMMAND --help   all flags of a command
longspan --version
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    0 done; 1 the command's own "no" (verify), or a rank that died; 2 bad input, said in one line on stderr; 143 and
    130 ended early by SIGTERM or Ctrl-C.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help"):
        width = max(map(len, COMMANDS))
        commands = "\n".join(f"  {name:{width}}  {text}" for name, (_, _, text) in COMMANDS.items())
        print(_USAGE.format(commands=commands))
        return 0 if args else 2
    if args[0] == "--version":
        from longspan import __version__

        print(f"longspan {__version__}")
        return 0
    return _run(args[0], args[1:])


def _run(command: str, args: list[str]) -> int:
    from longspan.launch import RankFailed, Stopped, is_first_rank_here, let_first_rank_speak

    code, why = 0, ""
    try:
        if command not in COMMANDS:
            raise LongspanError(f"there is no command {command!r}; {_nearest(command, COMMANDS)}")
        module_name, config_name, text = COMMANDS[command]
        module = importlib.import_module(module_name)
        config = parse(getattr(module, config_name), args, prog=f"longspan {command}", summary=text)
        code = int(module.run(config))
    except LongspanError as error:
        code, why = 2, f"longspan: error: {error}\n"
    except RankFailed as error:
        code, why = 1, f"{error.details}longspan: error: {error}\n"
    except Stopped as stop:  # nobody waits: an agent that was told to stop would wait for them
        if is_first_rank_here():
            print(f"longspan: stopped by {signal.Signals(stop.signum).name}", file=sys.stderr)
        return 128 + stop.signum
    except SystemExit as end:  # after --help or wrong flags, said by tyro; with a text it means that and a 1
        code, why = (1, f"{end.code}\n") if isinstance(end.code, str) else (end.code or 0, "")
    except KeyboardInterrupt:
        return 130
    if code:
        let_first_rank_speak()
    sys.stderr.write(why)
    return code


def parse(config_class: type[Any], args: list[str], *, prog: str, summary: str) -> Any:
    """Make a config from flags, and from the file that `--from` names; flags win over the file.

    Integers may be written with k (1024) or M (1024 * 1024): `--context 128k`.

    Raises:
        LongspanError: for a file that cannot be read or has unknown keys.
        SystemExit: with code 2 for wrong flags, said by tyro; with 0 after --help.
    """
    import tyro

    from longspan.launch import is_first_rank_here

    path, flags = _take_from(args)
    in_file = _flags_of_file(config_class, path, given=flags) if path is not None else []
    registry = tyro.constructors.ConstructorRegistry()
    registry.primitive_rule(_plain_rule)
    description = f"{summary[0].upper()}{summary[1:]}.\n\n{_doc(config_class)}"
    # `--from` is taken out above; it stands here for the help.
    whole = dataclasses.make_dataclass(
        "Arguments",
        [
            ("config", Annotated[config_class, tyro.conf.arg(name="")]),
            (
                "file",
                Annotated[
                    Path | None,
                    tyro.conf.arg(
                        name="from",
                        metavar="FILE.toml",
                        help="Take values from this file: its keys are the flags' names.",
                    ),
                ],
                dataclasses.field(default=None),
            ),
        ],
        frozen=True,
    )
    said_here, given = is_first_rank_here(), flags + in_file
    with registry:
        return tyro.cli(whole, args=given, prog=prog, description=description, console_outputs=said_here).config


def _doc(config_class: type[Any]) -> str:
    _, _, rest = inspect.cleandoc(config_class.__doc__ or "").partition("\n\n")
    return rest


def _take_from(args: list[str]) -> tuple[Path | None, list[str]]:
    path, rest = None, list(args)
    for index, arg in enumerate(args):
        if arg == "--from":
            if index + 1 == len(args):
                raise LongspanError("--from needs a file: --from run.toml")
            path, rest = Path(args[index + 1]), args[:index] + args[index + 2 :]
        elif arg.startswith("--from="):
            path, rest = Path(arg.removeprefix("--from=")), args[:index] + args[index + 1 :]
    if any(arg == "--from" or arg.startswith("--from=") for arg in rest):
        raise LongspanError("--from is given twice; give one file")
    return path, rest


def _flags_of_file(config_class: type[Any], path: Path, given: list[str]) -> list[str]:
    """The file's values as flags, but for those that the command line gives itself."""
    try:
        values = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise LongspanError(f"--from {path} cannot be read: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise LongspanError(f"--from {path} is not TOML: {error}") from error
    names = [field.name.replace("_", "-") for field in dataclasses.fields(config_class)]
    overridden = {re.sub(r"^--(no-)?|=.*$", "", arg).replace("_", "-") for arg in given if arg.startswith("--")}
    flags: list[str] = []
    for key, value in values.items():
        name = key.replace("_", "-")
        if name not in names:
            raise LongspanError(f"--from {path}: unknown key {key!r}; {_nearest(name, names)}")
        if name not in overridden:
            flags += _as_flag(name, value, path)
    return flags


def _as_flag(name: str, value: Any, path: Path) -> list[str]:
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    if isinstance(value, list):
        return [f"--{name}", *map(str, value)]
    if isinstance(value, str | int | float):
        return [f"--{name}", str(value)]
    raise LongspanError(
        f"--from {path}: {name} is a {type(value).__name__}; give text, a number, true, false or a list"
    )


def _nearest(name: str, known: Any) -> str:
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"there are {', '.join(known)}"


def _plain_rule(info: Any) -> Any:
    """tyro's rule for integers, which also takes 128k and 1M, and for what may be left out, without naming None."""
    import tyro

    kind = info.type
    inner = [t for t in typing.get_args(kind) if t is not type(None)]
    if len(inner) == 1 and len(typing.get_args(kind)) == 2:
        kind = inner[0]
    elif kind is not int:
        return None
    readers: dict[Any, tuple[str, Any]] = {int: ("INT", parse_integer), str: ("STR", str), Path: ("PATH", Path)}
    if kind not in readers:
        return None
    metavar, read = readers[kind]
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=lambda words: read(words[0]),
        is_instance=lambda value: value is None or isinstance(value, kind),
        str_from_instance=lambda value: [str(value)],
    )


def parse_integer(text: str) -> int:
    """An integer, with k for 1024 and M for 1024 * 1024.

    Raises:
        ValueError: for anything else.
    """
    match = re.fullmatch(r"([+-]?[\d_]+)([kKmM]?)", text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not an integer (128k and 1M are 131072 and 1048576)")
    return int(match[1]) * {"": 1, "k": 1 << 10, "m": 1 << 20}[match[2].lower()]
