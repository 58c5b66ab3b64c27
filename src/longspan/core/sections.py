"""Configs of sections: nested dataclasses whose fields are the flags of a command and the tables of its TOML file.

A flag is named after its field alone (`--ulysses`), so names are unique within a config. A command that has only some
flags of a section lists them in the field's metadata: `field(default_factory=Section, metadata={"only": (...)})`.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

Config = TypeVar("Config")


@dataclass(frozen=True)
class Option:
    """A flag of a command: the name of its field, the field of the config that is its section ("": none), its type."""

    name: str
    section: str
    kind: Any

    @property
    def flag(self) -> str:
        return self.name.replace("_", "-")


def _options(config_class: Any) -> dict[str, Option]:
    by_name: dict[str, Option] = {}
    kinds = typing.get_type_hints(config_class)
    for field in dataclasses.fields(config_class):
        if not is_section(kinds[field.name]):
            by_name[field.name] = Option(field.name, "", kinds[field.name])
            continue
        inner = typing.get_type_hints(kinds[field.name])
        for part in shown(field, kinds[field.name]):
            assert part.name not in by_name, f"two fields of {config_class.__name__} are called {part.name}"
            by_name[part.name] = Option(part.name, field.name, inner[part.name])
    return by_name


options: Callable[[Any], dict[str, Option]] = functools.cache(_options)
"""Return all flags of a command (its config class), by the name of their field."""


def is_section(kind: Any) -> bool:
    """Return whether the type of a field is a section."""
    return isinstance(kind, type) and dataclasses.is_dataclass(kind)


def shown(field: dataclasses.Field[Any], kind: type[Any]) -> list[dataclasses.Field[Any]]:
    """Return the fields of the section `field` that are flags."""
    only = field.metadata.get("only") or ()
    return [part for part in dataclasses.fields(kind) if not only or part.name in only]


def make(config_class: type[Config], /, **values: Any) -> Config:
    """Return a config from the values of its flags, whatever sections they are in."""
    own = {name: value for name, value in values.items() if not _section_of(config_class, name)}
    config = config_class(**own)
    return replace(config, **{name: value for name, value in values.items() if name not in own})


def replace(config: Config, /, **values: Any) -> Config:
    """Return a copy with other values of some flags, as `dataclasses.replace`."""
    by_section: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        by_section.setdefault(_section_of(type(config), name), {})[name] = value
    changes = by_section.pop("", {})
    for name, changed in by_section.items():
        changes[name] = dataclasses.replace(getattr(config, name), **changed)
    return dataclasses.replace(config, **changes)  # type: ignore[type-var]


def values(config: Any) -> dict[str, Any]:
    """Return the value of every flag, by the name of its field."""
    return {
        name: getattr(getattr(config, option.section) if option.section else config, name)
        for name, option in options(type(config)).items()
    }


def _section_of(config_class: type[Any], name: str) -> str:
    option = options(config_class).get(name)
    return option.section if option else ""
