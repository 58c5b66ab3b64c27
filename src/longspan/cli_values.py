"""Values of flags, from the command line and from TOML: integers as 128k, and words in place of numbers."""

from __future__ import annotations

import re
import typing
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal

from longspan.core.validation import check_text, format_value, path_of


def from_toml(kind: Any, value: Any) -> Any:
    """Convert a TOML value to the type of its field. Raise ValueError with what the field takes."""
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


def value_rule(info: Any) -> Any:
    """Return tyro's spec for integers with suffixes, words in place of integers, and optional values (without None)."""
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
    """Return tyro's spec for an integer or one of the words."""
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
