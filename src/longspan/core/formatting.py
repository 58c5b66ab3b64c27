"""Counts, sizes and times as text."""

from __future__ import annotations


def parameters(count: float) -> str:
    """Format a number of parameters with three digits: "8.03B parameters", "4,160 parameters"."""
    if count < 10_000:
        return f"{count:,.0f} parameter{'' if count == 1 else 's'}"
    unit, name = next((u, n) for u, n in ((1e12, "T"), (1e9, "B"), (1e6, "M")) if count >= 0.9995 * u or n == "M")
    return f"{count / unit:.3g}{name} parameters"


def size(number: float) -> str:
    """Format bytes in a suitable unit, powers of 1000: "6.91 kB", "78.21 GB"."""
    for limit, factor, unit in ((1e3, 1.0, "B"), (1e6, 1e3, "kB"), (1e9, 1e6, "MB")):
        if number < 0.9995 * limit:  # above it, three digits round to 1e+03
            return f"{number / factor:.3g} {unit}"
    gb = number / 1e9
    return f"{number / 1e12:.3g} TB" if gb >= 1e4 else f"{gb:,.0f} GB" if gb >= 1000 else f"{gb:.2f} GB"


def seconds(value: float) -> str:
    """Format a time in a suitable unit: "15 us", "2.5 min"."""
    for limit, factor, unit in ((1e-3, 1e6, "us"), (1.0, 1e3, "ms"), (120.0, 1.0, "s"), (7200.0, 1 / 60, "min")):
        if value < limit:
            return f"{value * factor:.3g} {unit}"
    return f"{value / 3600:.3g} h"
