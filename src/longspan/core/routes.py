"""How far each KV block is sent around a ring. Standard library only: the planner uses it without torch."""

from __future__ import annotations

import itertools
import operator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence


@dataclass(frozen=True)
class Routes:
    """How far each KV block is sent around the ring: no further than the last rank that needs it."""

    right: tuple[int, ...]  # hops of block j towards higher ranks, by j
    left: tuple[int, ...]  # hops of block j towards lower ranks

    @property
    def steps(self) -> int:
        return max(*self.right, *self.left)

    @cached_property
    def sends(self) -> tuple[int, ...]:
        """Number of KV blocks that each rank sends, its own included, by rank."""
        left = ((j - hops + 1, hops) for j, hops in enumerate(self.left))
        return _covered([*enumerate(self.right), *left], len(self.right))

    @cached_property
    def received(self) -> tuple[int, ...]:
        """Number of remote KV blocks that each rank receives, by rank."""
        right = ((j + 1, hops) for j, hops in enumerate(self.right))
        left = ((j - hops, hops) for j, hops in enumerate(self.left))
        return _covered([*right, *left], len(self.right))

    def hops(self, block: int, direction: int) -> int:
        """Return the hops of a block towards higher (+1) or lower ranks (-1)."""
        return (self.right if direction > 0 else self.left)[block]

    def has_hop(self, rank: int, direction: int, hop: int) -> bool:
        """Whether `rank` sends a block to rank + `direction` as the block's hop number `hop`."""
        return self.hops((rank - direction * (hop - 1)) % len(self.right), direction) >= hop


def ring_routes(readers: Sequence[Collection[int]]) -> Routes:
    """Return the shortest routes of all blocks to the ranks that need them.

    A block that every rank needs goes right, once around. If few ranks need it (a sliding window), it may be shorter to
    send it both ways: under zigzag a window needs the neighbours on both sides. `readers[j]` are the ranks whose
    queries attend to anything in block j, with or without rank j.
    """
    size = len(readers)
    hops = [_fewest_hops(j, ranks, size) for j, ranks in enumerate(readers)]
    return Routes(tuple(right for right, _ in hops), tuple(left for _, left in hops))


def _fewest_hops(block: int, ranks: Collection[int], size: int) -> tuple[int, int]:
    if len(ranks) == size:
        return size - 1, 0
    stops = [0, *sorted([(rank - block) % size for rank in ranks if rank != block]), size]
    # Send right up to the last rank before the widest gap, and left for the ranks after it. Of equal gaps the last,
    # which sends further right.
    gaps = list(map(operator.sub, stops[1:], stops))
    widest = len(gaps) - 1 - gaps[::-1].index(max(gaps))
    return stops[widest], size - stops[widest + 1]


def _covered(runs: Iterable[tuple[int, int]], size: int) -> tuple[int, ...]:
    """Count for each rank of a ring of `size` the runs (first rank, number of ranks) that contain it."""
    change = [0] * (size + 1)
    for start, length in runs:
        first, stop = start % size, start % size + length
        change[first] += 1
        change[min(stop, size)] -= 1
        if stop > size:
            change[0] += 1
            change[stop - size] -= 1
    return tuple(itertools.accumulate(change[:size]))
