"""One attention round a ring, counted: how far blocks travel, what each rank sends, what each rank computes.

The arithmetic is that of `longspan.attn.methods.ring` (the same layout, regions and routes), for the causal masks that
the planner knows, without a tensor and without a table of ranks x ranks, so that rings of thousands cost nothing.
"""

from __future__ import annotations

import dataclasses
import functools
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING

from longspan.core.layout import Layout, Span
from longspan.core.routes import Routes, routes_to

if TYPE_CHECKING:
    from longspan.plan.layers.attended_keys import Reach


@dataclass(frozen=True)
class RingSchedule:
    """How KV blocks go round a ring of R ranks, in one attention.

    Attributes:
        routes: how far each block travels, and so what each rank sends and receives.
        pairs: pairs (query, key) that each rank computes.
        own: of the busiest rank's pairs, the share that lies in its own block: what it computes before any other
            block is there.
    """

    routes: Routes
    pairs: tuple[int, ...]
    own: float

    @property
    def sends(self) -> tuple[int, ...]:
        """KV blocks that each rank sends on in one forward or backward, its own included."""
        return self.routes.sends

    @property
    def received(self) -> tuple[int, ...]:
        """KV blocks of others that come to each rank. In the backward it sends a gradient for each: on to where the
        block goes next, or straight home.
        """
        return self.routes.received


@functools.lru_cache(maxsize=4096)
def ring_schedule(layout: Layout, n: int, reach: Reach) -> RingSchedule:
    """The schedule of one causal attention over `n` tokens.

    Args:
        layout: of the tokens.
        n: tokens of the sequence, padding left out.
        reach: what its queries see.
    """
    # How many ranks share a block matters only where it changes the block's length.
    alone = dataclasses.replace(layout, ulysses=1)
    same = alone.local_length(n) == layout.local_length(n) * layout.ulysses
    return _schedule(alone if same else layout, n, reach.limited_to(n))


@functools.lru_cache(maxsize=4096)
def _schedule(layout: Layout, n: int, reach: Reach) -> RingSchedule:
    size = layout.ring
    blocks = [layout.block(n, rank) for rank in range(size)]
    pairs = tuple(sum(_pairs(run, (0, n), n, reach) for run in runs) for runs in blocks)
    busiest = max(range(size), key=pairs.__getitem__)
    own = sum(_pairs(q, k, n, reach) for q in blocks[busiest] for k in blocks[busiest])
    return RingSchedule(routes_to(_readers(layout, blocks, n, reach)), pairs, own / pairs[busiest])


def _pairs(queries: Span, keys: Span, n: int, reach: Reach) -> int:
    parts = (region.within(queries, keys) for region in reach.regions(queries, n))
    return sum(part.pairs for part in parts if part is not None)


def _readers(layout: Layout, blocks: list[tuple[Span, ...]], n: int, reach: Reach) -> list[set[int]]:
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
            for region in reach.regions(run, n):
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
