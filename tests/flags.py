"""Configs of commands, by flag."""

from __future__ import annotations

from typing import Any, TypeVar

from longspan.core.reading import convert, flags_of, is_one_flag, with_values

Config = TypeVar("Config")


def make(config_class: type[Config], /, **flags: Any) -> Config:
    """Return a config with these flags; values that are one flag may be given as text."""
    return replace(config_class(), **flags)


def replace(config: Config, /, **flags: Any) -> Config:
    """Return a copy with other values of some flags."""
    kinds = {name: kind for name, (_, kind) in flags_of(type(config)).items()}
    read = {n: convert(kinds[n], v) if is_one_flag(kinds[n]) and isinstance(v, str) else v for n, v in flags.items()}
    return with_values(config, read)
