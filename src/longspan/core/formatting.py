"""Counts, sizes, times, ranks and their differences as text."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence


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


_SHOWN = 3  # differences in a message


def odd_ones(seen: Sequence[Hashable]) -> list[int]:
    """Return the indices of the values that differ from the most frequent one; in a tie, from the first value."""
    usual = max(Counter(seen).items(), key=lambda item: (item[1], item[0] == seen[0]))[0]
    return [i for i, value in enumerate(seen) if value != usual]


def differences(facts: Sequence[Mapping[str, str]], ranks: Sequence[int]) -> list[str]:
    """Return a text for every key whose values differ over the ranks: the odd values first, then the usual one."""
    keys = dict.fromkeys(key for each in facts for key in each)
    texts = []
    for key in keys:
        values = [each.get(key) for each in facts]
        if len(set(values)) > 1:
            holders: dict[str | None, list[int]] = {}
            for rank, value in zip(ranks, values, strict=True):
                holders.setdefault(value, []).append(rank)
            odd_ranks = odd_ones(values)
            usual = next(value for i, value in enumerate(values) if i not in odd_ranks)
            odd = [value for value in holders if value != usual][:_SHOWN]
            sides = [f"{_format_value(value)} on {format_ranks(holders[value])}" for value in [*odd, usual]]
            texts.append(f"{key} is {', '.join(sides)}")
    return texts


def _format_value(value: str | None) -> str:
    if value is None:
        return "missing"
    return value if len(value) <= 120 else f"{value[:106]}... #{zlib.crc32(value.encode(errors='replace')):08x}"


def listed(texts: Sequence[str], most: int = _SHOWN) -> str:
    """Join the first texts, and count the rest."""
    more = f"; and {len(texts) - most} more" if len(texts) > most else ""
    return "; ".join(texts[:most]) + more


def format_ranks(ranks: Sequence[int]) -> str:
    """Format as "rank 2" or "ranks 0, 1, 3"; of many, name eight and count the rest."""
    shown = ", ".join(map(str, ranks[:8]))
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"
