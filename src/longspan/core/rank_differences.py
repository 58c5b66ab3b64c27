"""Compare facts of all ranks, and format the differences. Standard library only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

_SHOWN = 3  # differences in a message


def odd_ones(seen: Sequence[Hashable]) -> list[int]:
    """Return the indices of the values that differ from the most frequent one; in a tie, from the first value."""
    usual = max(Counter(seen).items(), key=lambda item: (item[1], item[0] == seen[0]))[0]
    return [i for i, value in enumerate(seen) if value != usual]


def differences(facts: Sequence[Mapping[str, str]], ranks: Sequence[int]) -> list[str]:
    """Return a text for every key whose values differ over the ranks: the odd values first, then the usual one.

    Args:
        facts: of each rank, by key.
        ranks: their numbers in the job.
    """
    keys = dict.fromkeys(key for each in facts for key in each)
    texts = []
    for key in keys:
        values = [each.get(key) for each in facts]
        if len(set(values)) > 1:
            odd = odd_ones(values)
            usual = [i for i in range(len(values)) if i not in odd]
            parts = [*_parts(values, odd), (usual[0], usual)]
            sides = [f"{_format_value(values[i])} on {format_ranks([ranks[j] for j in some])}" for i, some in parts]
            texts.append(f"{key} is {', '.join(sides)}")
    return texts


def _parts(values: Sequence[Any], odd: list[int]) -> list[tuple[int, list[int]]]:
    """Group the odd indices by value: the first index of each value, and all of them."""
    return [
        (i, [j for j in odd if values[j] == values[i]])
        for n, i in enumerate(odd)
        if all(values[j] != values[i] for j in odd[:n])
    ][:_SHOWN]


def _format_value(value: str | None) -> str:
    if value is None:
        return "missing"
    return value if len(value) <= 120 else f"{value[:117]}..."


def listed(texts: Sequence[str], most: int = _SHOWN) -> str:
    """Join the first texts, and count the rest."""
    more = f"; and {len(texts) - most} more" if len(texts) > most else ""
    return "; ".join(texts[:most]) + more


def format_ranks(ranks: Sequence[int]) -> str:
    """Format as "rank 2" or "ranks 0, 1, 3"; of many, name eight and count the rest."""
    shown = ", ".join(map(str, ranks[:8]))
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"
