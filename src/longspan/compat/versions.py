"""Warn of untested versions of torch and transformers, and raise if they lack a name that longspan uses."""

from __future__ import annotations

import re
from importlib.metadata import version
from typing import Any

from longspan.core.errors import LongspanError

#: The oldest and the newest version that the tests pass with: pyproject.toml's lower bound, constraints.txt's pin.
TESTED = {"torch": ("2.11", "2.13"), "transformers": ("5.5", "5.24")}


def untested(library: str) -> str | None:
    """Return a warning that names both versions if the installed one is newer than the newest tested; else None."""
    found, newest = version(library), TESTED[library][1]
    minor = re.match(r"(\d+)\.(\d+)", found)
    if minor is None or (int(minor[1]), int(minor[2])) <= tuple(map(int, newest.split("."))):
        return None
    return f"{library} {found} is newer than {newest}, the newest version that longspan was tested with"


def missing(library: str, name: str, use: str, hint: str = "", since: str | None = None) -> LongspanError:
    """Return the error for a missing name: what longspan needs it for, versions that have it, an alternative."""
    oldest, newest = TESTED[library]
    versions = dict.fromkeys((since or oldest, newest))
    tested, alternative = " to ".join(versions), f", or {hint}" if hint else ""
    return LongspanError(
        f"{library} {version(library)} has no {name}, which longspan needs for {use}; use {library} "
        f"{tested}{alternative}"
    )


def needed(library: str, owner: Any, name: str, where: str, use: str, hint: str = "") -> Any:
    """Return an attribute of `owner`, which errors call `where`; raise `missing` if it is gone."""
    found = getattr(owner, name, None)
    if found is None:
        raise missing(library, f"{where}.{name}", use, hint)
    return found
