"""How far keys and values travel round a ring, and how they are sent. Standard library only."""

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
    """How far each block of keys and values travels round the ring: no further than the last rank that needs it.

    Attributes:
        right: hops of block j towards higher ranks, by j.
        left: hops of block j towards lower ranks.
    """

    right: tuple[int, ...]
    left: tuple[int, ...]

    @property
    def rounds(self) -> int:
        """Hops of the block that travels furthest."""
        return max(*self.right, *self.left)

    @cached_property
    def sends(self) -> tuple[int, ...]:
        """KV blocks that each rank sends on, its own included, by rank."""
        left = ((j - hops + 1, hops) for j, hops in enumerate(self.left))
        return _covered([*enumerate(self.right), *left], len(self.right))

    @cached_property
    def received(self) -> tuple[int, ...]:
        """KV blocks of others that come to each rank, by rank."""
        right = ((j + 1, hops) for j, hops in enumerate(self.right))
        left = ((j - hops, hops) for j, hops in enumerate(self.left))
        return _covered([*right, *left], len(self.right))

    def sends_right(self, rank: int, hop: int) -> bool:
        """Whether `rank` sends a block to rank + 1 as that block's hop number `hop`."""
        return self.right[(rank - hop + 1) % len(self.right)] >= hop

    def sends_left(self, rank: int, hop: int) -> bool:
        """Whether `rank` sends a block to rank - 1 as that block's hop number `hop`."""
        return self.left[(rank + hop - 1) % len(self.left)] >= hop


def ring_routes(needs: Sequence[Sequence[bool]]) -> Routes:
    """The shortest ways of all blocks to all ranks that need them.

    A block that every rank needs goes once round to the right. Where few need it (a sliding window), it may be shorter
    to go to both sides: under zigzag a window needs the neighbours on both.

    Args:
        needs: `needs[i][j]`: whether the queries of rank i attend to anything in block j.
    """
    return routes_to([[i for i, row in enumerate(needs) if row[j]] for j in range(len(needs))])


def routes_to(readers: Sequence[Collection[int]]) -> Routes:
    """`ring_routes` from lists: `readers[j]` are the ranks that need block j, rank j itself among them or not."""
    size = len(readers)
    ways = [_shortest_way(j, ranks, size) for j, ranks in enumerate(readers)]
    return Routes(tuple(right for right, _ in ways), tuple(left for _, left in ways))


def _shortest_way(block: int, ranks: Collection[int], size: int) -> tuple[int, int]:
    """Hops of a block to the right and to the left that reach all `ranks`."""
    if len(ranks) == size:
        return size - 1, 0
    stops = [0, *sorted([(rank - block) % size for rank in ranks if rank != block]), size]
    # Right up to one of them, and left for the others: what need not be travelled is the gap between. The widest; of
    # equal ones the last, which goes further to the right.
    gaps = list(map(operator.sub, stops[1:], stops))
    widest = len(gaps) - 1 - gaps[::-1].index(max(gaps))
    return stops[widest], size - stops[widest + 1]


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


OVERLAPPED_CHUNKS = 4
"""Chunks of heads under `overlap_chunks="auto"`: of an exchange that computing covers a quarter stays exposed."""

CHUNK_START_S = 1e-4
"""Seconds that each further chunk costs besides its message: more starts of kernels and copies."""

WORTH_CHUNKS = 8
"""Send an exchange in chunks if it takes at least this many times as long as the starts that chunks add. If nothing
overlaps with it, at most an eighth of its time is lost; if enough does, three quarters are hidden.
"""


@dataclass(frozen=True)
class AllToAllLink:
    """How long an All-to-All of a Ulysses group takes, as measured.

    Attributes:
        start_s: seconds of an empty message.
        per_byte_s: seconds of each byte of a rank's buffer, its own part included.
    """

    start_s: float
    per_byte_s: float


def choose_overlap_chunks(sent_bytes: int, link: AllToAllLink | None) -> int:
    """Return the chunks of `overlap_chunks="auto"`: several if the exchange takes long on this link.

    Args:
        sent_bytes: q, k and v of a rank's tokens.
        link: between the ranks of a Ulysses group; None inside one host, where chunks gain nothing.
    """
    if link is None:
        return 1
    added = (OVERLAPPED_CHUNKS - 1) * (link.start_s + CHUNK_START_S)
    takes = link.start_s + sent_bytes * link.per_byte_s
    return OVERLAPPED_CHUNKS if takes >= WORTH_CHUNKS * added else 1


SMALL = 1 << 20
"""Bytes of the ring's keys and values together below which messages cost their start and not their length."""


def choose_ring_impl(asked: str, kv_bytes: int, routes: Routes | None) -> str:
    """The rule for `ring_impl="auto"`, the planner's too: "p2p" hides what it sends behind the attention to the block
    at hand, and sends a block only where it is needed; all-gathering saves nothing but the start of R - 2 messages.

    So it is worth it only where all keys and values of the ring together are small (`SMALL` bytes) and every rank
    needs every block.

    Args:
        asked: "auto", "p2p" or "allgather".
        kv_bytes: keys and values of the whole ring.
        routes: how far blocks travel; None for all the way.
    """
    if asked != "auto":
        return asked
    if kv_bytes > SMALL:
        return "p2p"
    everywhere = routes is None or all(
        sum(hops) == len(routes.right) - 1 for hops in zip(routes.right, routes.left, strict=True)
    )
    return "allgather" if everywhere else "p2p"
