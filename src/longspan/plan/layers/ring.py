"""How KV blocks go round a ring: how far each is sent, what each rank sends, and what each rank computes.

The same layout, regions and routes as `longspan.attn.methods.ring`, for the masks that the planner knows. No table of
ranks x ranks is built, so that rings of thousands cost nothing.
"""

from __future__ import annotations

import dataclasses
import functools
from bisect import bisect_left, bisect_right
from dataclasses import dataclass

from longspan.core.layout import Layout, Span
from longspan.core.routes import Routes, ring_routes
from longspan.plan.layers.attended_keys import AttendedKeys


@dataclass(frozen=True)
class RingSchedule:
    """How KV blocks go round a ring in one attention.

    Attributes:
        routes: how far each block is sent, and so what each rank sends and receives.
        pairs: (query, key) pairs that each rank computes.
        own: fraction of the pairs of the rank with most pairs that lie in its own block, which it computes before any
            other block arrives.
    """

    routes: Routes
    pairs: tuple[int, ...]
    own: float


@functools.lru_cache(maxsize=4096)
def ring_schedule(layout: Layout, n: int, keys: AttendedKeys) -> RingSchedule:
    """Return the schedule of one attention over `n` tokens, padding left out."""
    # How many Ulysses ranks share a block matters only if it changes the block's length: then the cache hits more.
    alone = dataclasses.replace(layout, ulysses=1)
    same = alone.local_length(n) == layout.local_length(n) * layout.ulysses
    return _schedule(alone if same else layout, n, keys.limited_to(n))


@functools.lru_cache(maxsize=4096)
def _schedule(layout: Layout, n: int, keys: AttendedKeys) -> RingSchedule:
    size = layout.ring
    blocks = [layout.block(n, rank) for rank in range(size)]
    pairs = tuple(sum(_pairs(run, (0, n), n, keys) for run in runs) for runs in blocks)
    slowest = max(range(size), key=pairs.__getitem__)
    own = sum(_pairs(q, k, n, keys) for q in blocks[slowest] for k in blocks[slowest])
    return RingSchedule(ring_routes(_readers(layout, blocks, n, keys)), pairs, own / pairs[slowest])


def _pairs(queries: Span, in_keys: Span, n: int, keys: AttendedKeys) -> int:
    parts = (region.within(queries, in_keys) for region in keys.regions(queries, n))
    return sum(part.pairs for part in parts if part is not None)


def _readers(layout: Layout, blocks: list[tuple[Span, ...]], n: int, keys: AttendedKeys) -> list[set[int]]:
    """Return for each block the ranks whose queries attend to any of its keys."""
    runs, owners = layout.runs(n)
    starts = [start for start, _ in runs]
    everyone = set(owners)
    last_run_of = {rank: at for at, rank in enumerate(owners)}
    all_follow = min(last_run_of.values())  # from this run to the end every rank owns one
    readers: list[set[int]] = []
    for block in blocks:
        ranks: set[int] = set()
        for run in block:
            for region in keys.regions(run, n):
                part = region.within((0, n), run)
                if part is None:
                    continue
                # The queries that attend to a run form one interval, for causal masks, windows and chunks alike.
                first, stop = bisect_right(starts, part.q0) - 1, bisect_left(starts, part.q1)
                to_the_end = first <= all_follow and stop == len(owners)
                ranks = everyone if to_the_end else ranks | set(owners[first:stop])
            if len(ranks) == len(everyone):
                break
        readers.append(ranks)
    return readers
