"""Numbers with the unit that suits them."""

from __future__ import annotations

from longspan.core.formatting import size

__all__ = ["seconds", "size"]


def seconds(value: float) -> str:
    """A time with the unit that suits it."""
    for limit, factor, unit in ((1e-3, 1e6, "us"), (1.0, 1e3, "ms"), (120.0, 1.0, "s"), (7200.0, 1 / 60, "min")):
        if value < limit:
            return f"{value * factor:.3g} {unit}"
    return f"{value / 3600:.3g} h"
