"""Which rank holds which tokens, and which heads. Standard library only: the planner uses it without torch.

Three facts decide every exchange: the tokens a rank holds between the attentions (`Layout`), how far they travel round
a ring (`Routes`), and the heads it computes inside an attention (`split_heads`).
"""

from __future__ import annotations

import itertools
import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from longspan.errors import LongspanError

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

Span = tuple[int, int]
"""A run of tokens [start, stop)."""


Kind = Literal["contiguous", "zigzag"]


@dataclass(frozen=True)
class Layout:
    """One sequence cut over ring x ulysses ranks, in blocks and then in parts.

    The ring holds one block of the sequence per ring rank; the Ulysses ranks of a block hold it in equal parts, in
    order, so that their exchange restores the block.

    - `contiguous`: block i is the i-th of R equal runs of tokens.
    - `zigzag`: of 2R equal runs, block i is the i-th from the front and the i-th from the back. Under a causal mask a
      late token costs more than an early one, and so every block costs the same (Zhu, "ring-flash-attention", 2024;
      Llama 3, arXiv:2407.21783, section 3.3.2).

    Every rank holds the same number of tokens; what is missing is padding, at the end of the sequence. Equal parts keep
    every collective regular, and padding at the end is the one place where a causal mask already hides it.

    Attributes:
        ring: number of blocks.
        ulysses: parts of a block.
        kind: how blocks lie in the sequence.
    """

    ring: int = 1
    ulysses: int = 1
    kind: Kind = "contiguous"

    @property
    def size(self) -> int:
        """Ranks that share the sequence."""
        return self.ring * self.ulysses

    def local_length(self, n: int) -> int:
        """Tokens per rank for a sequence of `n` tokens, padding included."""
        if n < 1:
            raise LongspanError(f"a sequence needs at least 1 token, this one has {n}")
        local = -(-n // self.size)
        # Zigzag's two runs of a block are equal, so a block needs an even number of tokens.
        odd = self.kind == "zigzag" and self.ring > 1 and local * self.ulysses % 2
        return local + odd

    def padded_length(self, n: int) -> int:
        """Tokens of all ranks together, padding included."""
        return self.local_length(n) * self.size

    def block(self, n: int, ring_rank: int) -> tuple[Span, ...]:
        """The runs of tokens [start, stop) of one block, in order; they reach into the padding."""
        size = self.local_length(n) * self.ulysses
        if self.kind == "contiguous" or self.ring == 1:
            return ((ring_rank * size, (ring_rank + 1) * size),)
        half, mirrored = size // 2, 2 * self.ring - 1 - ring_rank
        front, back = (ring_rank * half, (ring_rank + 1) * half), (mirrored * half, (mirrored + 1) * half)
        return ((front[0], back[1]),) if front[1] == back[0] else (front, back)

    def runs(self, n: int) -> tuple[tuple[Span, ...], tuple[int, ...]]:
        """The runs of tokens of all blocks in the sequence's order, and whose block each belongs to."""
        held = sorted((run, rank) for rank in range(self.ring) for run in self.block(n, rank))
        return tuple(run for run, _ in held), tuple(rank for _, rank in held)

    def padded_spans(self, n: int, rank: int) -> tuple[Span, ...]:
        """The runs of tokens [start, stop) of `rank`, in the order in which it holds them; they reach into the
        padding.
        """
        ring_rank, part = divmod(rank, self.ulysses)
        local = self.local_length(n)
        return _cut_runs(self.block(n, ring_rank), part * local, (part + 1) * local)

    def spans(self, n: int, rank: int) -> tuple[Span, ...]:
        """The real tokens [start, stop) of `rank`, out of `n`; runs of padding alone are left out."""
        clipped = ((start, min(stop, n)) for start, stop in self.padded_spans(n, rank))
        return tuple((start, stop) for start, stop in clipped if start < stop)


def _cut_runs(runs: tuple[Span, ...], start: int, stop: int) -> tuple[Span, ...]:
    """Items start to stop of the runs laid end to end, as runs."""
    out, at = [], 0
    for a, b in runs:
        first, last = max(start, at), min(stop, at + b - a)
        if first < last:
            out.append((a + first - at, a + last - at))
        at += b - a
    return tuple(out)


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

    def messages(self, rank: int) -> int:
        """Blocks that `rank` sends on, its own included."""
        return sum(self.sends_right(rank, hop) + self.sends_left(rank, hop) for hop in range(1, self.rounds + 1))

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


SMALL = 1 << 20
"""Bytes of the ring's keys and values together below which messages cost their start and not their length."""


def choose_impl(asked: str, kv_bytes: int, routes: Routes | None) -> str:
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


@dataclass(frozen=True)
class HeadShare:
    """The heads one rank computes: query heads [q_start, q_stop) and the KV heads [kv_start, kv_stop) they need.

    `group_sizes[i]` is the number of this rank's query heads that use its i-th KV head. Usually they are equal
    (plain GQA); they differ where a rank's query heads begin or end inside a KV group.
    """

    q_start: int
    q_stop: int
    kv_start: int
    kv_stop: int
    group_sizes: tuple[int, ...]

    @property
    def q_heads(self) -> int:
        return self.q_stop - self.q_start

    @property
    def kv_heads(self) -> int:
        return self.kv_stop - self.kv_start

    @property
    def is_regular(self) -> bool:
        """Whether every KV head serves the same number of query heads, so that a GQA kernel applies as it is."""
        return len(set(self.group_sizes)) <= 1

    @property
    def spread(self) -> tuple[int, ...] | None:
        """For every query head of this rank its KV head, both counted from 0 here; None where groups are equal."""
        if self.is_regular:
            return None
        return tuple(head for head, queries in enumerate(self.group_sizes) for _ in range(queries))


def check_heads(q_heads: int, kv_heads: int) -> None:
    """Refuse head counts that no grouped-query attention has.

    Raises:
        LongspanError: if a count is below 1, or the query heads are no multiple of the KV heads.
    """
    if q_heads < 1 or kv_heads < 1:
        raise LongspanError(f"attention needs at least 1 query head and 1 KV head, got {q_heads} and {kv_heads}")
    if q_heads % kv_heads:
        raise LongspanError(
            f"{q_heads} query heads do not divide into groups over {kv_heads} KV heads; "
            f"the query heads must be a multiple of the KV heads (remainder {q_heads % kv_heads})"
        )


def split_heads(q_heads: int, kv_heads: int, ranks: int, *, kv_replication: bool = True) -> tuple[HeadShare, ...]:
    """Deal the heads of one attention layer to `ranks` ranks.

    The slowest rank sets the pace, so the largest number of query heads on any rank is made as small as it can
    be, ceil(q_heads / ranks). Among the cuts that reach it, one along KV groups is preferred: it sends no KV
    head twice (or, with more ranks than KV heads, each rank exactly one). Query heads stay in order, so the way
    back is a concatenation.

    Args:
        q_heads: query heads of the model.
        kv_heads: KV heads of the model; divides `q_heads`.
        ranks: size of the Ulysses group. It may exceed `q_heads`: then some ranks compute no head.
        kv_replication: whether one KV head may be sent to several ranks.

    Returns:
        One `HeadShare` per rank.

    Raises:
        LongspanError: on impossible head counts, or if `kv_replication` is refused and `ranks > kv_heads`.
    """
    check_heads(q_heads, kv_heads)
    if not kv_replication and ranks > kv_heads:
        raise LongspanError(
            f"`ulysses={ranks}` needs at least {ranks} KV heads when KV replication is refused, the model has "
            f"{kv_heads}; try `ulysses={kv_heads}`, or allow `kv_replication=True`"
        )
    group = q_heads // kv_heads
    even = _even_cut(q_heads, ranks)
    grouped = _cut_along_groups(kv_heads, group, ranks)
    aligned = max(_sizes(grouped)) <= max(_sizes(even)) or not kv_replication
    cut = grouped if aligned else even
    return tuple(_share(start, stop, group) for start, stop in itertools.pairwise(cut))


def _sizes(cut: list[int]) -> list[int]:
    return [stop - start for start, stop in itertools.pairwise(cut)]


def _even_cut(total: int, parts: int) -> list[int]:
    """Boundaries of `parts` runs over `total` items, sizes differing by at most one, larger runs first."""
    base, extra = divmod(total, parts)
    cut = [0]
    for i in range(parts):
        cut.append(cut[-1] + base + (i < extra))
    return cut


def _cut_along_groups(kv_heads: int, group: int, ranks: int) -> list[int]:
    """Boundaries (in query heads) that never make a rank straddle two KV groups only in part."""
    if ranks <= kv_heads:  # whole groups to each rank
        return [head * group for head in _even_cut(kv_heads, ranks)]
    cut = [0]  # several ranks to each group
    ranks_cut = _even_cut(ranks, kv_heads)
    for head, members in enumerate(_sizes(ranks_cut)):
        cut += [head * group + stop for stop in _even_cut(group, members)[1:]]
    return cut


def _share(start: int, stop: int, group: int) -> HeadShare:
    if start == stop:
        kv = start // group
        return HeadShare(start, stop, kv, kv, ())
    kv_start, kv_stop = start // group, -(-stop // group)
    sizes = tuple(min(stop, (kv + 1) * group) - max(start, kv * group) for kv in range(kv_start, kv_stop))
    return HeadShare(start, stop, kv_start, kv_stop, sizes)
