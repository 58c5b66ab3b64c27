"""Counts as people say them."""

from __future__ import annotations


def parameters(count: float) -> str:
    """How many parameters, to three digits: "8.03B parameters", "0.12M parameters", "4,160 parameters"."""
    if count < 10_000:
        return f"{count:,.0f} parameter{'' if count == 1 else 's'}"
    unit, name = next((u, n) for u, n in ((1e12, "T"), (1e9, "B"), (1e6, "M")) if count >= 0.9995 * u or n == "M")
    return f"{count / unit:.3g}{name} parameters"
