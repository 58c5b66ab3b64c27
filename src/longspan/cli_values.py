"""Values of flags, from the command line and from the TOML file of `--from`: 128k, words in place of numbers."""

from __future__ import annotations

import os
import re
import typing
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal

from longspan.cli_help import suggest_option
from longspan.core.errors import LongspanError
from longspan.core.sections import options, replace, values
from longspan.core.validation import check_text, format_value, means_a_path, path_of, read_toml, suggest_choice


def from_toml(kind: Any, value: Any) -> Any:
    """Convert a TOML value to the type of its field. Raise ValueError with what the field takes."""
    arguments = [t for t in typing.get_args(kind) if t is not type(None)]
    origin = typing.get_origin(kind)
    if origin is Literal:
        if not isinstance(value, str) or value not in arguments:
            raise ValueError(suggest_choice(value, arguments))
        return value
    if origin is tuple:
        several = arguments[-1] is Ellipsis
        if arguments[0] is str and isinstance(value, str):
            value = [value]
        if not isinstance(value, list) or not value or not (several or len(value) == len(arguments)):
            what = "texts" if arguments[0] is str else "numbers"
            raise ValueError(f"give a list of {'' if several else f'{len(arguments)} '}{what}")
        return tuple(from_toml(arguments[0], item) for item in value)
    words = [word for t in arguments if typing.get_origin(t) is Literal for word in typing.get_args(t)]
    if words and len(arguments) > 1:  # a number or a word
        if value in words:
            return value
        return from_toml(next(t for t in arguments if typing.get_origin(t) is not Literal), value)
    if len(arguments) == 1:  # optional
        return from_toml(arguments[0], value)
    if kind is bool and isinstance(value, bool):
        return value
    if kind is int and isinstance(value, int | str) and not isinstance(value, bool):
        return parse_integer(value) if isinstance(value, str) else value
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if kind in (str, Path) and isinstance(value, str):
        return check_text("the value", value) if kind is str else path_of("the path", value)
    accepted = {bool: "true or false", int: 'a whole number (or "8k")', float: "a number", str: "text", Path: "a path"}
    raise ValueError(f"give {accepted[kind]}")


def check_choice(name: str, kind: Any, text: str) -> None:
    """Raise LongspanError if the type of a flag has only words, and `text` is none of them."""
    kinds = [part for part in typing.get_args(kind) if part is not type(None)]
    only = kinds[0] if len(kinds) == 1 else kind  # optional
    words = typing.get_args(only) if typing.get_origin(only) is Literal else ()
    if words and text not in words:
        raise LongspanError(f"{name} {format_value(text)} is unknown; {suggest_choice(text, words)}")


def value_rule(info: Any) -> Any:
    """Return tyro's spec for integers with suffixes, words in place of integers, and optional values (without None)."""
    import tyro

    kind = info.type
    inner = [t for t in typing.get_args(kind) if t is not type(None)]
    words = [word for t in inner if typing.get_origin(t) is Literal for word in typing.get_args(t)]
    if words and int in inner:
        kind = int
    elif len(inner) == 1 and len(typing.get_args(kind)) == 2:
        words, kind = [], inner[0]
    elif kind not in (int, Path):
        return None
    readers: dict[Any, tuple[str, Any]] = {
        int: (f"INT|{{{','.join(words)}}}" if words else "INT", parse_integer),
        float: ("FLOAT", float),
        str: ("STR", str),
        Path: ("PATH", lambda text: path_of("the path", text)),
    }
    if kind not in readers:
        return None
    metavar, read = readers[kind]

    def parse(given: list[str]) -> Any:
        if given[0] in words:
            return given[0]
        try:
            return read(given[0])
        except ValueError as error:
            raise ValueError(f"{error}, and not {' or '.join(words)}" if words else str(error)) from None

    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=parse,
        is_instance=lambda value: value is None or value in words or isinstance(value, kind),
        str_from_instance=lambda value: [str(value)],
    )


def parse_integer(text: str) -> int:
    """Parse an integer, with a suffix k (1024) or M (1024 * 1024), or as 1e6 or 1.5e6.

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


_PATHS_OR_NAMES = ("text", "model", "tokenizer", "gpu", "resume")
"""Flags that take a path or a name."""

_WORDS = {"text": ("pydoc",), "tokenizer": ("bytes",), "resume": ("auto", "never")}
"""Values of these flags that are never paths."""


def expand_home(config: Any) -> Any:
    """Expand `~` in flags that take a path or a name: a shell does not expand it in `--data=~/x`."""
    given = {name: value for name, value in values(config).items() if name in _PATHS_OR_NAMES and value}
    changed = {}
    for name, value in given.items():
        texts = value if isinstance(value, tuple) else (value,)
        if any(text.startswith("~") for text in texts):
            expanded = tuple(str(path_of(f"--{name}", text)) if text.startswith("~") else text for text in texts)
            changed[name] = expanded if isinstance(value, tuple) else expanded[0]
    return replace(config, **changed) if changed else config


def read_flags(
    config_class: type[Any], path: Path, prog: str, given_by: str = "--from"
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the values of a file by field, and the place of each by flag. `given_by` is the flag that names the file.

    Raises:
        LongspanError: for a file that cannot be read, or has unknown or repeated keys or values of a wrong type.
    """
    file = read_toml(given_by, path)
    known = {option.flag: option for option in options(config_class).values()}
    sections = {option.section for option in known.values() if option.section}
    given: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for keys, value in _pairs(file.values, sections):
        *table, key = keys
        flag = key.replace("_", "-")
        option = known.get(flag)
        if option is None and isinstance(value, dict) and not table:
            raise file.error(f"unknown table [{key}]; {suggest_choice(key, sorted(sections))}", *keys)
        if option is None:
            raise file.error(f"unknown key {format_value(key)}; {suggest_option(flag, list(known), prog)}", *keys)
        if table != [option.section][: bool(option.section)]:
            right = f"in the table [{option.section}]" if option.section else "above all tables"
            raise file.error(f"{key} belongs {right}; move it there", *keys)
        if flag in origins:
            raise file.error(f"{key} is also set in {origins[flag]}, spelled differently; keep one", *keys)
        try:
            given[option.name] = _relative_to_file(path, option.name, from_toml(option.kind, value))
        except ValueError as error:
            raise file.error(f"{key} = {format_value(value)} is invalid: {error}", *keys) from error
        origins[flag] = file.where(*keys)
    return given, origins


def _pairs(tables: dict[str, Any], sections: set[str]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the keys that lead to each value, and the value."""
    for key, value in tables.items():
        if key in sections and isinstance(value, dict):
            yield from (((key, inner), value[inner]) for inner in value)
        else:
            yield (key,), value


def _relative_to_file(file: Path, field: str, value: Any) -> Any:
    """Resolve a path in a file relative to the file's folder. Raise ValueError if it is ambiguous."""
    if isinstance(value, tuple):
        return tuple(_relative_to_file(file, field, item) for item in value)
    text = str(value)
    name = field in _PATHS_OR_NAMES and text not in _WORDS.get(field, ())
    if not text or text.startswith("~") or not (isinstance(value, Path) or name or field == "offload_folder"):
        return value
    path = Path(text)
    resolved = file.parent / path  # an absolute path does not change
    if name and not resolved.exists() and not means_a_path(text):
        if path.exists():  # the same flag on the command line would mean this path
            raise ValueError(
                f"paths in a file are relative to the file, and {resolved} does not exist, but {path.absolute()} does; "
                f"write {os.path.relpath(path, file.parent)!r}"
            )
        return value
    plain = Path(os.path.normpath(resolved))
    resolved = plain if plain.resolve() == resolved.resolve() else resolved  # after a symlink, ".." is not the parent
    return resolved if isinstance(value, Path) else str(resolved)
