"""One attention round a ring, counted: how far blocks travel, what each rank sends, what each rank computes.

The arithmetic is that of `longspan.attn.methods.ring` (the same layout, regions and routes), for the causal masks that
the planner knows, without a tensor and without a table of ranks x ranks, so that rings of thousands cost nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from longspan.core.layout import Layout, Span
from longspan.core.regions import Region
from longspan.core.routes import Routes, routes_to


@dataclass(frozen=True)
class Lap:
    """The blocks' way round a ring of R ranks, in one attention.

    Attributes:
        routes: how far each block travels.
        sends: blocks of keys and values that each rank sends on in one direction (forward or backward), its own
            included.
        visits: blocks of others that come by each rank. In the backward it sends a gradient for each: on to where the
            block goes next, or straight home.
        pairs: pairs (query, key) that each rank computes.
        own: of the busiest rank's pairs, the share that lies in its own block: what it computes before any other
            block is there.
    """

    routes: Routes
    sends: tuple[int, ...]
    visits: tuple[int, ...]
    pairs: tuple[int, ...]
    own: float


@functools.lru_cache(maxsize=4096)
def lap(layout: Layout, n: int, kind: str, window: int | None) -> Lap:
    """The lap of one causal attention over `n` tokens.

    Args:
        layout: of the tokens.
        n: tokens of the sequence, padding left out.
        kind: of the layer: "full", "sliding" or "chunked".
        window: tokens of its window or chunk, None for no limit.
    """
    # How many ranks share a block matters only where it changes the block's length.
    alone = dataclasses.replace(layout, ulysses=1)
    same = alone.local_length(n) == layout.local_length(n) * layout.ulysses
    return _lap(alone if same else layout, n, kind, None if window is None or window >= n else window)


@functools.lru_cache(maxsize=4096)
def _lap(layout: Layout, n: int, kind: str, limit: int | None) -> Lap:
    size = layout.ring
    blocks = [layout.block(n, rank) for rank in range(size)]
    routes = routes_to(_readers(layout, blocks, n, kind, limit))
    right, left = routes.right, routes.left
    pairs = tuple(sum(_pairs(run, (0, n), n, kind, limit) for run in runs) for runs in blocks)
    busiest = max(range(size), key=pairs.__getitem__)
    own = sum(_pairs(q, k, n, kind, limit) for q in blocks[busiest] for k in blocks[busiest])
    return Lap(
        routes,
        _covered([*enumerate(right), *((j - hops + 1, hops) for j, hops in enumerate(left))], size),
        _covered([*((j + 1, hops) for j, hops in enumerate(right)), *((j - h, h) for j, h in enumerate(left))], size),
        pairs,
        own / pairs[busiest],
    )


def _regions(run: Span, n: int, kind: str, window: int | None) -> Iterator[Region]:
    """The parts of the mask that tokens of `run` may lie in, as queries or as keys."""
    if window is None or kind != "chunked":
        yield Region(0, n, 0, n, 0, None if window is None else window - 1)
        return
    for start in range(run[0] // window * window, min(run[1], n), window):
        yield Region(start, min(start + window, n), start, min(start + window, n), 0)


def _pairs(queries: Span, keys: Span, n: int, kind: str, window: int | None) -> int:
    parts = (region.within(queries, keys) for region in _regions(queries, n, kind, window))
    return sum(part.pairs for part in parts if part is not None)


def _readers(layout: Layout, blocks: list[tuple[Span, ...]], n: int, kind: str, window: int | None) -> list[set[int]]:
    """For each block the ranks whose queries attend to any of its keys."""
    runs, owners = layout.runs(n)
    starts = [start for start, _ in runs]
    everyone = set(owners)
    last_of_each = {rank: at for at, rank in enumerate(owners)}
    all_behind = min(last_of_each.values())  # from this run on every rank has one
    readers: list[set[int]] = []
    for of_rank in blocks:
        found: set[int] = set()
        for run in of_rank:
            for region in _regions(run, n, kind, window):
                part = region.within((0, n), run)
                if part is None:
                    continue
                # Which queries attend is an interval, since masks are causal, windows of it, or chunks.
                first, stop = bisect_right(starts, part.q0) - 1, bisect_left(starts, part.q1)
                whole = first <= all_behind and stop == len(owners)
                found = everyone if whole else found | set(owners[first:stop])
            if len(found) == len(everyone):
                break
        readers.append(found)
    return readers


def _covered(runs: Iterable[tuple[int, int]], size: int) -> tuple[int, ...]:
    """How many of the runs (first rank, number of ranks), round a ring of `size`, each rank lies in."""
    change = [0] * (size + 1)
    for start, length in runs:
        first, stop = start % size, start % size + length
        change[first] += 1
        change[min(stop, size)] -= 1
        if stop > size:
            change[0] += 1
            change[stop - size] -= 1
    return tuple(itertools.accumulate(change[:size]))
