"""Convert what a user writes, on a command line or in YAML, to the types of a dataclass's fields.

A value such as the memory options is one flag. On the command line it is `WORD,key=value,...`, where the word is its
first field: `--memory auto,offload=host`. In YAML it is the same text, or a mapping of all fields.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import difflib
import inspect
import itertools
import re
import textwrap
import typing
from collections.abc import Collection, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

from longspan.core.errors import LongspanError
from longspan.core.validation import check_text, format_value, nearest, path_of, read_text, suggest_choice

Config = TypeVar("Config")


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


def convert(kind: Any, value: Any) -> Any:
    """Convert text or a value of YAML to the type of a field. Raise ValueError with what the field accepts."""
    parts = [part for part in typing.get_args(kind) if part is not type(None)]
    if typing.get_origin(kind) is Literal:
        if isinstance(value, str) and value in parts:
            return value
        raise ValueError(suggest_choice(value, parts))
    if typing.get_origin(kind) is tuple:
        return tuple(convert(parts[0], item) for item in (value if isinstance(value, list | tuple) else [value]))
    if parts:  # an optional value, or a number or a word
        if value is None and type(None) in typing.get_args(kind):
            return None
        words = [word for part in parts if typing.get_origin(part) is Literal for word in typing.get_args(part)]
        if words and (value in words or len(parts) == 1):
            return convert(Literal[tuple(words)], value)
        try:
            return convert(parts[0], value)
        except ValueError as error:
            raise ValueError(" or ".join([str(error), *map(str, words)])) from error
    if is_one_flag(kind):
        return kind.read(value)
    text = isinstance(value, str)
    if kind is bool and (isinstance(value, bool) or value in ("true", "false")):
        return value in (True, "true")
    if kind is int and (text or type(value) is int):
        return parse_integer(value) if text else value
    if kind is float and (text or type(value) in (int, float)):
        with contextlib.suppress(ValueError):
            return float(value)  # YAML reads 1e-5 as text
    if kind in (str, Path) and text:
        return check_text("the value", value) if kind is str else path_of("the path", value)
    accepted = {bool: "true or false", int: 'a whole number (or "8k")', float: "a number", str: "text", Path: "a path"}
    raise ValueError(f"give {accepted[kind]}")


class OneFlag:
    """A dataclass that is one flag: `WORD,key=value,...`, or in YAML a mapping. The word is its first field."""

    @classmethod
    def keys(cls) -> dict[str, Any]:
        """Return the keys, with their types."""
        return fields_of(cls)

    @classmethod
    def of(cls, **given: Any) -> Self:
        """Make a value from its keys."""
        return cls(**given)

    def given(self) -> dict[str, Any]:
        """Return the first key, and each that differs from its default, with their values."""
        fields: Any = dataclasses.fields(self)  # type: ignore[arg-type]
        first, *others = [field for field in fields if field.init]
        return {
            f.name: getattr(self, f.name) for f in (first, *others) if f is first or getattr(self, f.name) != f.default
        }

    @classmethod
    def read(cls, given: object) -> Self:
        """Make a value from what a user writes.

        Raises:
            LongspanError: for unknown keys, and values that the class refuses.
        """
        kinds = cls.keys()
        first, what = next(iter(kinds)), ", ".join(kinds)
        pairs: dict[str, Any] = {}
        if isinstance(given, str):
            for at, part in enumerate(given.split(",")):
                key, equals, text = part.strip().partition("=")
                if not equals and at > 0:
                    raise LongspanError(f"{format_value(given)}: write key=value after the first word; keys are {what}")
                key, text = (key, text) if equals else (first, key)
                if key in pairs:
                    raise LongspanError(f"{format_value(given)}: {key} is set twice; keep one")
                pairs[key] = text
        elif isinstance(given, Mapping):
            pairs = {str(key): value for key, value in given.items()}
        else:
            raise LongspanError(f"{format_value(given)} is neither a word nor a mapping; the keys are {what}")
        for key, value in pairs.items():
            if key not in kinds:
                raise LongspanError(f"there is no key {format_value(key)}; {nearest(key, kinds)}")
            several = isinstance(value, str) and typing.get_origin(kinds[key]) is tuple
            if several and not all(value.split("+")):
                raise LongspanError(f"{key}={format_value(value)}: an item is empty; give one, or several as a+b")
            try:
                pairs[key] = convert(kinds[key], value.split("+") if several else value)
            except ValueError as error:
                raise LongspanError(f"{key}={format_value(value)}: {error}") from error
        return cls.of(**pairs)

    def __str__(self) -> str:
        """Return the text that `read` reads."""
        first = next(iter(self.keys()))
        words = {key: as_word(value) for key, value in self.given().items() if value is not None}
        return ",".join(word if key == first else f"{key}={word}" for key, word in words.items())


def as_word(value: Any) -> str:
    """Format a value of a key of an `OneFlag`."""
    if isinstance(value, bool):
        return str(value).lower()
    return "+".join(map(str, value)) if isinstance(value, tuple) else str(value)


def fields_of(kind: Any) -> dict[str, Any]:
    """Return the fields of a dataclass that a caller sets, with their types."""
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind) if field.init}


def field_texts(kind: type[Any]) -> dict[str, str]:
    """Return the docstring of every field of a dataclass, as one line."""
    texts: dict[str, str] = {}
    for cls in filter(dataclasses.is_dataclass, reversed(kind.__mro__)):
        body: Any = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
        for statement, after in itertools.pairwise(body.body):
            if isinstance(statement, ast.AnnAssign) and isinstance(after, ast.Expr):
                target: Any = statement.target
                texts[target.id] = " ".join(ast.literal_eval(after.value).split())
    return texts


def is_one_flag(kind: Any) -> bool:
    """Return whether the type of a field is an `OneFlag`."""
    return isinstance(kind, type) and issubclass(kind, OneFlag)


def flags_of(config_class: type[Any]) -> dict[str, tuple[str, Any]]:
    """Return for each flag of a command the field that holds its value ("": the command itself), and its type."""
    flags: dict[str, tuple[str, Any]] = {}
    for name, kind in fields_of(config_class).items():
        if dataclasses.is_dataclass(kind) and not is_one_flag(kind):
            flags |= {inner: (name, inner_kind) for inner, inner_kind in fields_of(kind).items()}
        else:
            flags[name] = ("", kind)
    return flags


def with_values(config: Config, values: Mapping[str, Any]) -> Config:
    """Return a copy of a command with other values of some flags, whatever field holds them."""
    flags = flags_of(type(config))
    by_holder: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        by_holder.setdefault(flags[name][0], {})[name] = value
    changes = by_holder.pop("", {})
    changes |= {holder: dataclasses.replace(getattr(config, holder), **own) for holder, own in by_holder.items()}
    return dataclasses.replace(config, **changes)  # type: ignore[type-var]


def values(config: Any) -> dict[str, Any]:
    """Return the value of every flag of a command."""
    found: dict[str, Any] = {}
    for name in fields_of(type(config)):
        value = getattr(config, name)
        shared = dataclasses.is_dataclass(value) and not isinstance(value, OneFlag)
        found |= values(value) if shared else {name: value}
    return found


def split_config(args: Sequence[str]) -> tuple[list[str], Path | None]:
    """Return the arguments without `--config FILE`, and the file."""
    words = [part for arg in args for part in (arg.split("=", 1) if arg.startswith("--config=") else [arg])]
    if "--config" not in words:
        return words, None
    at = words.index("--config")
    if "--config" in words[at + 1 :]:
        raise LongspanError("--config is given twice; give one file")
    if at + 1 == len(words):
        raise LongspanError("--config needs a file: --config run.yaml")
    return words[:at] + words[at + 2 :], path_of("--config", words[at + 1])


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the keys of the file of `--config`, with their values. Raise for a file that has no keys."""
    import yaml

    text = read_text("--config", path)
    try:
        found, root = yaml.safe_load(text), yaml.compose(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise LongspanError(f"--config {path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(found, dict):
        got = "but it is empty" if found is None else f"got {format_value(found)}"
        raise LongspanError(f"--config {path} must be a mapping of keys to values, {got}; write lines such as ring: 2")
    for node in (root, *(value for _, value in root.value)):  # and the mappings of values such as `memory`
        keys = [key.value for key, _ in node.value] if isinstance(node, yaml.MappingNode) else []
        if twice := next((key for key in keys if keys.count(key) > 1), None):
            raise LongspanError(f"--config {path}: {format_value(twice)} is set twice; keep one")
    return {str(key): value for key, value in found.items()}


def suggestion(name: str, known: Collection[str], command: str, prefix: str = "") -> str:
    """Return a hint for a key that does not exist: the closest one."""
    close = difflib.get_close_matches(name.lstrip("-").replace("-", "_"), list(known), n=1, cutoff=0.6)
    return f"did you mean {prefix}{close[0]}?" if close else f"{command} --help lists all"
