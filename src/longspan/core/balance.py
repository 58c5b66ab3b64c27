"""Share out work of uneven cost over ranks. Standard library only."""

from __future__ import annotations

from collections.abc import Sequence

from longspan.core.layout import Span


def split_by_cost(costs: Sequence[int], ranks: int) -> tuple[Span, ...]:
    """Split a row of items into one span [start, stop) per rank, in order, so that the most expensive span costs least.

    With few items some ranks get an empty span.
    """
    low, high = max(costs, default=0), sum(costs)
    while low < high:  # the smallest limit per rank with which the items fit
        limit = (low + high) // 2
        if len(_fill(costs, limit)) <= ranks:
            high = limit
        else:
            low = limit + 1
    spans = _fill(costs, high)
    return (*spans, *[(len(costs), len(costs))] * (ranks - len(spans)))


def _fill(costs: Sequence[int], limit: int) -> list[Span]:
    """Give each rank as many of the next items as `limit` allows."""
    spans, start, cost = list[Span](), 0, 0
    for i, more in enumerate(costs):
        if cost + more > limit and i > start:
            spans.append((start, i))
            start, cost = i, 0
        cost += more
    return [*spans, (start, len(costs))]
