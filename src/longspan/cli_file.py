"""The file of flags that `--from` names: its values, and the place of each."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from longspan.cli_help import suggest_option
from longspan.cli_values import from_toml
from longspan.core.sections import options, replace, values
from longspan.core.validation import format_value, means_a_path, path_of, read_toml

_PATHS_OR_NAMES = ("data", "model", "tokenizer", "gpu", "resume")
"""Flags that take a path or a name."""

_WORDS = {"data": ("pydoc",), "tokenizer": ("bytes",), "resume": ("auto", "never")}
"""Values of these flags that are never paths."""


def expand_home(config: Any) -> Any:
    """Expand `~` in flags that take a path or a name: a shell does not expand it in `--data=~/x`."""
    texts = {name: value for name, value in values(config).items() if name in _PATHS_OR_NAMES}
    changed = {name: str(path_of(f"--{name}", text)) for name, text in texts.items() if text and text.startswith("~")}
    return replace(config, **changed) if changed else config


def read_flags(config_class: type[Any], path: Path, prog: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the values of a file by field, and the place of each by flag.

    Raises:
        LongspanError: for a file that cannot be read, or has unknown or repeated keys or values of a wrong type.
    """
    file = read_toml("--from", path)
    known = {option.flag: option for option in options(config_class).values()}
    sections = {option.section for option in known.values() if option.section}
    given: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for keys, value in _pairs(file.values, sections):
        *table, key = keys
        flag = key.replace("_", "-")
        option = known.get(flag)
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
