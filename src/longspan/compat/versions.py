"""The version of transformers that longspan is tested with; in another one, names that longspan replaces may differ."""

from __future__ import annotations

from importlib.metadata import version

TRANSFORMERS = "5.24"


def untested() -> str | None:
    """Return a warning if another minor version of transformers is installed; else None."""
    found = version("transformers")
    if found.startswith(f"{TRANSFORMERS}."):
        return None
    return f"transformers {found} is installed, and longspan is tested with {TRANSFORMERS}: check a model by `verify`"
