"""Write values (`ParallelConfig`, `Memory`, `CacheConfig`, ...) as the YAML that `--config` reads."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any

_PLAIN = re.compile(r"(?!(?:true|false|null|yes|no|on|off|y|n)$)[A-Za-z][\w./+-]*", re.IGNORECASE)


def changed(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass, all of which have defaults, that differ from them."""
    defaults = type(value)()
    given = ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))
    return {name: mine for name, mine in given if mine != getattr(defaults, name)}


def to_yaml(settings: Mapping[str, Any]) -> str:
    """Format a mapping as YAML, one key a line."""
    return "".join(f"{name}: {_format(value)}\n" for name, value in settings.items())


def _format(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{name}: {_format(each)}' for name, each in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_format, value))}]"
    # YAML reads JSON; a plain word needs no quotes.
    return value if isinstance(value, str) and _PLAIN.fullmatch(value) else json.dumps(value)
