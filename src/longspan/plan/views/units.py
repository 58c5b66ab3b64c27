"""Numbers with the unit that suits them."""

from __future__ import annotations

GB = 1e9


def gb(size: float) -> str:
    """Bytes in GB (1e9), with as many digits as are worth reading."""
    value = size / GB
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}" if 0 < abs(value) < 0.1 else f"{value:.2f}"


def size(number: float) -> str:
    """Bytes with the unit that suits them, powers of 1000."""
    for limit, factor, unit in ((1e3, 1.0, "B"), (1e6, 1e3, "kB"), (1e9, 1e6, "MB")):
        if number < limit:
            return f"{number / factor:.3g} {unit}"
    return f"{gb(number)} GB" if number < 1e13 else f"{number / 1e12:.3g} TB"


def seconds(value: float) -> str:
    """A time with the unit that suits it."""
    for limit, factor, unit in ((1e-3, 1e6, "us"), (1.0, 1e3, "ms"), (120.0, 1.0, "s"), (7200.0, 1 / 60, "min")):
        if value < limit:
            return f"{value * factor:.3g} {unit}"
    return f"{value / 3600:.3g} h"
