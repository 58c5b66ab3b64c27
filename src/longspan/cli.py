"""The command line: `longspan COMMAND --help` lists the flags.

A command is a module with a frozen dataclass, whose docstrings are the help, and a function `run(config)` that returns
the exit code. Only the module of the command is imported, and it does not import torch before it runs.
"""

from __future__ import annotations

import dataclasses
import importlib
import re
import sys
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from longspan import __version__
from longspan.core.errors import LongspanError, require
from longspan.core.sections import make, options
from longspan.core.validation import check_text, format_value, nearest, path_of
from longspan.ranks import launch

#: Command: (module, its config class, what it does).
COMMANDS = {
    "train": ("longspan.train", "", "train on long sequences by TRL: sft, dpo, reward"),
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

_NEEDS = {
    **dict.fromkeys(("generate", "score", "verify"), ("transformers", "safetensors")),
}

_USAGE = """usage: longspan COMMAND [--from FILE.toml] [--flag value ...]

Train and run Transformers on sequences longer than one GPU can hold, exactly.

{}

longspan COMMAND --help   all flags of a command
longspan --version
""".format("\n".join(f"  {name:<10}{text}" for name, (_, _, text) in COMMANDS.items()))


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    0: done. 1: the verification failed, or a rank died. 2: bad input, with one line on stderr. 143, 130: ended early by
    SIGTERM or Ctrl-C.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    if args[:1] == ["help"]:
        args = [*args[1:2], "--help"]
    origins: dict[str, str] = {}

    def run() -> int:
        if args and args[0] not in ("-h", "--help", "--version", "-V", "version"):
            return _run(args[0], args[1:], origins)
        print(f"longspan {__version__}" if args and "v" in args[0].lower() else _USAGE)
        return 0 if args else 2

    return launch.exit_code(run, lambda message: _where_given(message, origins))


def _run(command: str, args: list[str], origins: dict[str, str]) -> int:
    """Run a command; add to `origins`, by flag, the place of its value in the file of `--from`."""
    if command not in COMMANDS:
        hint = nearest(command, COMMANDS) if command[:1] != "-" else f"give one first: {', '.join(COMMANDS)}"
        raise LongspanError(f"there is no command {format_value(command)}; {hint}")
    module_name, config_name, text = COMMANDS[command]
    if not config_name:  # it parses its own arguments, TRL's
        from longspan.train import run

        return run(args)
    module = importlib.import_module(module_name)
    config, found = _parse(getattr(module, config_name), args, prog=f"longspan {command}", summary=text)
    origins.update(found)
    require(f"longspan {command}", *_NEEDS.get(command, ()))
    return int(module.run(config))


def _where_given(message: str, origins: dict[str, str]) -> str:
    """Return " (given in ...)" if the flag that the error names came from a file."""
    flag = re.match(r"--([a-z][a-z-]*)", message)
    origin = origins.get(flag[1]) if flag else None
    return f" (given in {origin})" if origin else ""


def parse(config_class: type[Any], args: list[str], *, prog: str, summary: str) -> Any:
    """Make a config from flags and from the file of `--from`; flags win over the file.

    Integers may have a suffix k (1024) or M (1024 * 1024): `--context 128k`.

    Raises:
        LongspanError: for a file that cannot be read, or has unknown or repeated keys or values of a wrong type.
        SystemExit: by tyro, with code 2 for wrong flags and 0 after --help.
    """
    return _parse(config_class, args, prog=prog, summary=summary)[0]


def _parse(config_class: type[Any], args: list[str], *, prog: str, summary: str) -> tuple[Any, dict[str, str]]:
    """As `parse`; also return, by flag, the place of its value in the file."""
    import tyro

    from longspan.cli_help import description, documented
    from longspan.cli_values import expand_home, read_flags, value_rule

    path, flags = _split_from(args)
    for flag in flags:
        check_text("the argument", flag)
    from_file, origins = ({}, {}) if path is None else read_flags(config_class, path, prog)
    _check_options(config_class, flags, prog)
    registry = tyro.constructors.ConstructorRegistry()
    registry.primitive_rule(value_rule)
    registry.struct_rule(documented(config_class))
    file = tyro.conf.arg(
        name="from",
        metavar="FILE.toml",
        help="Read values from this file: a table for each section, a key for each flag.",
        help_behavior_hint="",
    )
    fields: list[Any] = [
        ("config", Annotated[config_class, tyro.conf.arg(name="")]),
        ("file", Annotated[Path | None, file], dataclasses.field(default=None)),  # removed above; listed in the help
    ]
    arguments = dataclasses.make_dataclass("Arguments", fields, frozen=True)
    # Values of the file replace the defaults, so that no text in it is parsed as a flag.
    missing = (dataclasses.MISSING, dataclasses.MISSING)
    required = [f.name for f in dataclasses.fields(config_class) if (f.default, f.default_factory) == missing]
    defaults = make(config_class, **{**dict.fromkeys(required, tyro.MISSING), **from_file})
    with registry:
        parsed = tyro.cli(
            arguments,
            args=flags,
            default=arguments(config=defaults),
            prog=prog,
            description=description(config_class, summary),
            console_outputs=launch.is_first_local_rank(),
        )
    given = {re.sub(r"^--(no-)?|=.*$", "", arg, flags=re.DOTALL).replace("_", "-") for arg in flags}
    return expand_home(parsed.config), {flag: origin for flag, origin in origins.items() if flag not in given}


def _split_from(args: list[str]) -> tuple[Path | None, list[str]]:
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


def _positional(config_class: type[Any]) -> str:
    """Return the argument that a command takes without a flag, or ""."""
    marked = typing.get_type_hints(config_class, include_extras=True).items()
    return next((name for name, kind in marked if "Positional" in repr(getattr(kind, "__metadata__", ""))), "")


def _check_options(config_class: type[Any], args: list[str], prog: str) -> None:
    """Raise on an unknown option, or an unknown word for one that takes only some, and suggest the closest one.

    The argument after an option that takes a value is its value, even if it looks like an option.
    """
    from longspan.cli_help import suggest_option
    from longspan.cli_values import check_choice

    kinds = {option.flag: option.kind for option in options(config_class).values()}
    names = {flag: kind is bool for flag, kind in kinds.items()}
    known = {"help": True, **names, **{f"no-{name}": True for name, switch in names.items() if switch}}
    takes_value, taken_by = False, ""
    for at, arg in enumerate(args):
        option = re.fullmatch(r"--([A-Za-z][\w-]*)(=.*)?", arg, flags=re.DOTALL)
        if option and not takes_value:
            name = option[1].replace("_", "-")
            if name not in known:
                raise LongspanError(
                    f"{prog} has no option --{option[1]}; {suggest_option(name, list(names), prog, '--')}"
                )
            takes_value, taken_by = not known[name] and option[2] is None, name
            if option[2] is not None:
                check_choice(f"--{name}", kinds.get(name), option[2][1:])
            continue
        if takes_value:
            check_choice(f"--{taken_by}", kinds.get(taken_by), arg)
        elif at == 0 and (positional := _positional(config_class)):  # later ones may be further values of a flag
            check_choice(positional, kinds[positional], arg)
        if not takes_value and arg.endswith(".toml"):
            raise LongspanError(f"{prog} takes no file {format_value(arg)} by itself; did you mean --from {arg}?")
        takes_value = False
