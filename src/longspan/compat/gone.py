"""What is said where torch or transformers no longer has what longspan uses."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

from longspan.core.errors import LongspanError

#: The oldest and the newest version that the tests pass with: pyproject.toml's lower bound, constraints.txt's pin.
TESTED = {"torch": ("2.11", "2.13"), "transformers": ("5.5", "5.24")}


def _installed(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:  # a build that was put in place by hand
        return "of an unknown version"


def untested(library: str) -> str | None:
    """Return a warning if the installed version is newer than any that was tested, naming both versions; else None."""
    found, newest = _installed(library), TESTED[library][1]
    minor = re.match(r"(\d+)\.(\d+)", found)
    if minor is None or (int(minor[1]), int(minor[2])) <= tuple(map(int, newest.split("."))):
        return None
    return f"{library} {found} is newer than {newest}, the newest version that longspan was tested with"


def gone(library: str, name: str, use: str, way_out: str = "") -> LongspanError:
    """The error for a name that is no longer there.

    Args:
        library: "torch" or "transformers".
        name: what is missing.
        use: what longspan needs it for.
        way_out: what else can be done, beside another version.
    """
    installed = _installed(library)
    tested, other = " to ".join(TESTED[library]), f", or {way_out}" if way_out else ""
    return LongspanError(
        f"{library} {installed} has no {name}, which longspan needs for {use}; use {library} {tested}{other}"
    )
