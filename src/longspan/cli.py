"""The command line: `longspan COMMAND --help` says the rest.

A command is a module with a frozen dataclass, whose docstrings are the help, and a `run(config)` that returns the exit
code. Only the command that is asked for is imported, and none of them imports torch before it runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import errno
import importlib
import inspect
import os
import re
import signal
import sys
import typing
from collections.abc import Iterator, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal

from longspan.core.errors import LongspanError, require
from longspan.core.sections import make, options, replace, values
from longspan.core.validation import check_text, format_value, means_a_path, nearest, path_of, read_toml

#: Command: (module, its config class, what it does).
COMMANDS = {
    "train": ("longspan.train", "TrainConfig", "train a causal LM on long sequences"),
    "generate": ("longspan.generate", "GenerateConfig", "continue a text, or answer a question about a long one"),
    "score": ("longspan.generate.score", "ScoreConfig", "perplexity and log-probabilities of a long text"),
    "verify": ("longspan.verify", "VerifyConfig", "prove on your model that the sharded run computes the same"),
    "plan": ("longspan.plan.command", "PlanConfig", "what fits, which mesh, and what it costs; needs no torch"),
    "bench": ("longspan.bench", "BenchConfig", "measure your machines: the links between ranks, and one rank's speed"),
}

_NEEDS = {
    "train": ("transformers", "safetensors", "datasets", "tensorboard", "pyarrow"),
    **dict.fromkeys(("generate", "score", "verify"), ("transformers", "safetensors")),
}

_USAGE = """usage: longspan COMMAND [--from FILE.toml] [--flag value ...]

Train and run Transformers on sequences longer than one GPU can hold, exactly.

{commands}

longspan COMMAND --help   all flags of a command
longspan --version
"""


_VERSION = ("--version", "-V", "version")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    0 done; 1 the command's own "no" (verify), or a rank that died; 2 bad input, said in one line on stderr; 143 and
    130 ended early by SIGTERM or Ctrl-C.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    if args[:1] == ["help"]:
        args = [*args[1:2], "--help"]
    if args and args[0] not in ("-h", "--help", *_VERSION):
        return _run(args[0], args[1:])
    try:
        _say_about(args[:1] != [] and args[0] in _VERSION)
        sys.stdout.flush()
    except BrokenPipeError:
        return _nobody_reads()
    return 0 if args else 2


def _say_about(version: bool) -> None:
    """Print the version, or what commands there are."""
    from longspan.cli_help import indented, paragraphs

    if version:
        from longspan import __version__

        print(f"longspan {__version__}")
        return
    column = max(map(len, COMMANDS)) + 4
    commands = "\n".join(indented(name, text, column) for name, (_, _, text) in COMMANDS.items())
    print(paragraphs(_USAGE).format(commands=commands))


def _run(command: str, args: list[str]) -> int:
    from longspan.ranks.launch import RankFailed, Stopped, is_first_rank_here, let_first_rank_speak

    code, why = 0, ""
    origins: dict[str, str] = {}
    try:
        if command not in COMMANDS:
            raise LongspanError(_no_command(command))
        module_name, config_name, text = COMMANDS[command]
        module = importlib.import_module(module_name)
        config_class = getattr(module, config_name)
        config, origins = _parse(config_class, args, prog=f"longspan {command}", summary=text)
        require(f"longspan {command}", *_NEEDS.get(command, ()))
        code = int(module.run(config))
        sys.stdout.flush()
    except BrokenPipeError:
        return _nobody_reads()
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        _nobody_reads()
        code, why = (
            2,
            f"longspan: error: the disk is full: {error}; make room, and run it again\n",
        )
    except LongspanError as error:
        code, why = 2, f"longspan: error: {error}{_origin(str(error), origins)}\n"
    except RankFailed as error:
        code, why = 1, f"{error.details}longspan: error: {error}\n"
    except Stopped as stop:  # nobody waits: an agent that was told to stop would wait for them
        if is_first_rank_here():
            print(f"longspan: stopped by {signal.Signals(stop.signum).name}", file=sys.stderr)
        return 128 + stop.signum
    except SystemExit as end:  # after --help or wrong flags, said by tyro; with a text it means that and a 1
        if isinstance(end.__context__, BrokenPipeError):  # as rich ends
            return _nobody_reads()
        code, why = (1, f"{end.code}\n") if isinstance(end.code, str) else (end.code or 0, "")
    except KeyboardInterrupt:
        return 130
    if code:
        let_first_rank_speak()
    sys.stderr.write(why)
    return code


def _no_command(command: str) -> str:
    if not command.startswith("-"):
        return f"there is no command {format_value(command)}; {nearest(command, COMMANDS)}"
    close = difflib.get_close_matches(command, ["--version", "--help"], n=1, cutoff=0.7)
    hint = f"did you mean {close[0]!r}?" if close else f"the command comes first: longspan {'|'.join(COMMANDS)} ..."
    return f"there is no option {format_value(command)} before a command; {hint}"


def _nobody_reads() -> int:
    """Whoever read stdout has gone (`longspan plan ... | head -1`): end as any program of a pipe does, quietly."""
    with contextlib.suppress(OSError, ValueError):  # what is still in the buffer has nowhere to go
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 128 + signal.SIGPIPE


def _origin(message: str, origins: dict[str, str]) -> str:
    """Where a value stands that an error names by its flag, if a file gave it."""
    named = re.match(r"--([a-z][a-z-]*)", message)
    found = origins.get(named[1]) if named else None
    return f" (given in {found})" if found else ""


def parse(config_class: type[Any], args: list[str], *, prog: str, summary: str) -> Any:
    """Make a config from flags, and from the file that `--from` names; flags win over the file.

    Integers may be written with k (1024) or M (1024 * 1024): `--context 128k`.

    Raises:
        LongspanError: for a file that cannot be read, has unknown or doubled keys, or values of another type.
        SystemExit: with code 2 for wrong flags, said by tyro; with 0 after --help.
    """
    return _parse(config_class, args, prog=prog, summary=summary)[0]


def _parse(config_class: type[Any], args: list[str], *, prog: str, summary: str) -> tuple[Any, dict[str, str]]:
    """`parse`, and where in the file the values stand that it gave, by flag."""
    import tyro

    from longspan.cli_help import documented, wrapped
    from longspan.ranks.launch import is_first_rank_here

    path, flags = _take_from(args)
    for flag in flags:
        check_text("the argument", flag)
    in_file, origins = ({}, {}) if path is None else _values_of_file(config_class, path, prog)
    _refuse_unknown_options(config_class, flags, prog)
    registry = tyro.constructors.ConstructorRegistry()
    registry.primitive_rule(_plain_rule)
    registry.struct_rule(documented(config_class))
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
                        help="Read values from this file: a table for each section, a key for each flag.",
                    ),
                ],
                dataclasses.field(default=None),
            ),
        ],
        frozen=True,
    )
    # What a file gives takes the place of the defaults, as values and not as words: so no text in it can be a flag.
    required = [
        field.name
        for field in dataclasses.fields(config_class)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]
    defaults = make(config_class, **{**dict.fromkeys(required, tyro.MISSING), **in_file})
    said_here = is_first_rank_here()
    with registry, wrapped():
        found = tyro.cli(
            whole,
            args=flags,
            default=whole(config=defaults),
            prog=prog,
            description=description,
            console_outputs=said_here,
        )
    config = _at_home(found.config)
    given = {re.sub(r"^--(no-)?|=.*$", "", arg, flags=re.DOTALL).replace("_", "-") for arg in flags}
    return config, {name: where for name, where in origins.items() if name not in given}


_SOURCES = ("data", "model", "tokenizer", "gpu", "resume")
"""Fields that hold a path or a name."""

_NAMES = {"data": ("pydoc",), "tokenizer": ("bytes",), "resume": ("auto", "never")}
"""Words in them that are no path, whatever lies beside."""


def _at_home(config: Any) -> Any:
    """`~` is the home folder in what may be a path or a name, too: a shell expands it in `--data ~/x` only."""
    texts = {name: value for name, value in values(config).items() if name in _SOURCES}
    changed = {name: str(path_of(f"--{name}", text)) for name, text in texts.items() if text and text.startswith("~")}
    return replace(config, **changed) if changed else config


def _doc(config_class: type[Any]) -> str:
    _, _, rest = inspect.cleandoc(config_class.__doc__ or "").partition("\n\n")
    return rest


def _take_from(args: list[str]) -> tuple[Path | None, list[str]]:
    path, rest = None, list(args)
    for index, arg in enumerate(args):
        if arg == "--from":
            if index + 1 == len(args):
                raise LongspanError("--from needs a file: --from run.toml")
            path, rest = path_of("--from", args[index + 1]), args[:index] + args[index + 2 :]
        elif arg.startswith("--from="):
            path, rest = path_of("--from", arg.removeprefix("--from=")), args[:index] + args[index + 1 :]
    if any(arg == "--from" or arg.startswith("--from=") for arg in rest):
        raise LongspanError("--from is given twice; give one file")
    return path, rest


def _refuse_unknown_options(config_class: type[Any], args: list[str], prog: str) -> None:
    """Raise on an option that the command does not have, and suggest the closest one.

    The argument after an option that takes a value is its value, even if it looks like an option.

    Raises:
        LongspanError: naming the option.
    """
    from longspan.cli_help import meant

    names = {option.flag: option.kind is bool for option in options(config_class).values()}
    known = {"help": True, **names, **{f"no-{name}": True for name, switch in names.items() if switch}}
    takes_value = False
    for arg in args:
        option = re.fullmatch(r"--([A-Za-z][\w-]*)(=.*)?", arg, flags=re.DOTALL)
        if option and not takes_value:
            name = option[1].replace("_", "-")
            if name not in known:
                raise LongspanError(f"{prog} has no option --{option[1]}; {meant(name, list(names), prog, '--')}")
            takes_value = not known[name] and option[2] is None
            continue
        if not takes_value and arg.endswith(".toml"):
            raise LongspanError(f"{prog} takes no file {format_value(arg)} by itself; did you mean --from {arg}?")
        takes_value = False


def _values_of_file(config_class: type[Any], path: Path, prog: str) -> tuple[dict[str, Any], dict[str, str]]:
    """The file's values by field, and where each stands by flag."""
    from longspan.cli_help import meant

    file = read_toml("--from", path)
    known = {option.flag: option for option in options(config_class).values()}
    sections = {option.section for option in known.values() if option.section}
    found: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for keys, value in _pairs(file.values, sections):
        *table, key = keys
        flag = key.replace("_", "-")
        option = known.get(flag)
        if option is None:
            raise file.error(f"unknown key {format_value(key)}; {meant(flag, list(known), prog)}", *keys)
        if table != [option.section][: bool(option.section)]:
            right = f"in the table [{option.section}]" if option.section else "above all tables"
            raise file.error(f"{key} belongs {right}; move it there", *keys)
        if flag in origins:
            raise file.error(f"{key} is also set in {origins[flag]}, spelled differently; keep one", *keys)
        try:
            found[option.name] = _beside(path, option.name, _typed(option.kind, value))
        except ValueError as error:
            raise file.error(f"{key} = {format_value(value)} will not do: {error}", *keys) from error
        origins[flag] = file.where(*keys)
    return found, origins


def _pairs(tables: dict[str, Any], sections: set[str]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the keys that lead to each value, and the value."""
    for key, value in tables.items():
        if key in sections and isinstance(value, dict):
            yield from (((key, inner), value[inner]) for inner in value)
        else:
            yield (key,), value


def _beside(file: Path, field: str, value: Any) -> Any:
    """A path of a file of flags, as seen from the file's folder. Raises ValueError for what may mean two things."""
    text = str(value)
    name = field in _SOURCES and text not in _NAMES.get(field, ())
    if not text or text.startswith("~") or not (isinstance(value, Path) or name or field == "offload_folder"):
        return value
    path = Path(text)
    there = file.parent / path  # an absolute one stays what it is
    if name and not there.exists() and not means_a_path(text):
        if path.exists():  # a flag of the same words means this one
            raise ValueError(
                f"paths in a file are relative to the file, and {there} does not exist, but {path.absolute()} does; "
                f"write {os.path.relpath(path, file.parent)!r}"
            )
        return value
    plain = Path(os.path.normpath(there))
    there = plain if plain.resolve() == there.resolve() else there  # ".." behind a link is not the folder above
    return there if isinstance(value, Path) else str(there)


def _typed(kind: Any, value: Any) -> Any:
    """A value of a TOML file as the type of its field. Raises ValueError with what is wanted."""
    arguments = [t for t in typing.get_args(kind) if t is not type(None)]
    origin = typing.get_origin(kind)
    if origin is Literal:
        if not isinstance(value, str) or value not in arguments:
            raise ValueError(f"choose one of {', '.join(map(repr, arguments))}")
        return value
    if origin is tuple:
        several = arguments[-1] is Ellipsis
        if not isinstance(value, list) or not value or not (several or len(value) == len(arguments)):
            raise ValueError(f"give a list of {'' if several else f'{len(arguments)} '}numbers")
        return tuple(_typed(arguments[0], item) for item in value)
    words = [word for t in arguments if typing.get_origin(t) is Literal for word in typing.get_args(t)]
    if words and len(arguments) > 1:  # a number, or a word that stands for one
        if value in words:
            return value
        return _typed(next(t for t in arguments if typing.get_origin(t) is not Literal), value)
    if len(arguments) == 1:  # what may be left out
        return _typed(arguments[0], value)
    if kind is bool and isinstance(value, bool):
        return value
    if kind is int and isinstance(value, int | str) and not isinstance(value, bool):
        return parse_integer(value) if isinstance(value, str) else value
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if kind in (str, Path) and isinstance(value, str):
        return check_text("the value", value) if kind is str else path_of("the path", value)
    wanted = {bool: "true or false", int: 'a whole number (or "8k")', float: "a number", str: "text", Path: "a path"}
    raise ValueError(f"give {wanted[kind]}")


def _plain_rule(info: Any) -> Any:
    """tyro's rule for integers, which also takes 128k and 1M, and for what may be left out, without naming None."""
    import tyro

    kind = info.type
    words = [word for t in typing.get_args(kind) if typing.get_origin(t) is Literal for word in typing.get_args(t)]
    if words and int in typing.get_args(kind):
        return _integer_or(words)
    inner = [t for t in typing.get_args(kind) if t is not type(None)]
    if len(inner) == 1 and len(typing.get_args(kind)) == 2:
        kind = inner[0]
    elif kind not in (int, Path):
        return None
    readers: dict[Any, tuple[str, Any]] = {
        int: ("INT", parse_integer),
        float: ("FLOAT", float),
        str: ("STR", str),
        Path: ("PATH", lambda text: path_of("the path", text)),
    }
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


def _integer_or(words: list[str]) -> Any:
    """Return tyro's spec for an integer, or a word in place of one."""
    import tyro

    def read(given: list[str]) -> int | str:
        if given[0] in words:
            return given[0]
        try:
            return parse_integer(given[0])
        except ValueError as error:
            raise ValueError(f"{error}, and not {' or '.join(words)}") from None

    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar=f"INT|{{{','.join(words)}}}",
        instance_from_str=read,
        is_instance=lambda value: isinstance(value, int) or value in words,
        str_from_instance=lambda value: [str(value)],
    )


def parse_integer(text: str) -> int:
    """An integer, with k for 1024 and M for 1024 * 1024, or as 1e6 or 1.5e6.

    Raises:
        ValueError: for anything else.
    """
    plain = text.strip()
    match = re.fullmatch(r"([+-]?[0-9]+(?:_[0-9]+)*)([kKmM]?)", plain)
    if match is not None and len(match[1]) <= 30:
        return int(match[1]) * {"": 1, "k": 1 << 10, "m": 1 << 20}[match[2].lower()]
    if re.fullmatch(r"[+-]?[0-9]{1,30}(\.[0-9]{1,30})?[eE]\+?[0-9]{1,2}", plain):
        number = Decimal(plain)
        if number == number.to_integral_value():
            return int(number)
    raise ValueError(f"{format_value(text)} is not an integer (128k and 1M are 131072 and 1048576, 1e6 is 1000000)")
