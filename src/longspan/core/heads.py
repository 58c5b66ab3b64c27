"""Which heads each rank computes in an attention. Standard library only: the planner uses it without torch.

A KV group is a KV head with the query heads that use it: `per_kv` of them.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from longspan.core.errors import LongspanError


@dataclass(frozen=True)
class HeadShard:
    """The heads of one rank: query heads [q_start, q_stop) and the KV heads [kv_start, kv_stop) they need.

    `group_sizes[i]` is the number of this rank's query heads that use its i-th KV head. They are equal in plain GQA;
    they differ if a rank's query heads begin or end inside a KV group.
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
        """Whether every KV head has the same number of query heads, as a GQA kernel needs."""
        return len(set(self.group_sizes)) <= 1

    @property
    def kv_head_index(self) -> tuple[int, ...] | None:
        """The local KV head of every local query head; None if groups are equal."""
        if self.is_regular:
            return None
        return tuple(head for head, queries in enumerate(self.group_sizes) for _ in range(queries))


def check_heads(q_heads: int, kv_heads: int) -> None:
    """Raise if a count is below 1, or the query heads are no multiple of the KV heads."""
    if q_heads < 1 or kv_heads < 1:
        raise LongspanError(f"attention needs at least 1 query head and 1 KV head, got {q_heads} and {kv_heads}")
    if q_heads % kv_heads:
        raise LongspanError(
            f"{q_heads} query heads do not divide into groups over {kv_heads} KV heads; "
            f"the query heads must be a multiple of the KV heads (remainder {q_heads % kv_heads})"
        )


def split_heads(q_heads: int, kv_heads: int, ranks: int) -> tuple[HeadShard, ...]:
    """Split the heads of one attention layer over `ranks` ranks; query heads stay in order.

    No rank gets more than ceil(q_heads / ranks) query heads, as the slowest sets the pace. Among the splits that reach
    this, one along KV groups is preferred. With more ranks than KV heads, or uneven groups, a KV head is in the shards
    of several ranks: `longspan.comm.all_to_all` copies it into each rank's message (`_pack`), and sums the gradients
    that return (`_unpack`; for heads in chunks `write_heads`).

    Args:
        q_heads: a multiple of `kv_heads`.
        kv_heads: KV heads of the model.
        ranks: size of the Ulysses group. If it exceeds `q_heads`, some ranks compute no head.

    Raises:
        LongspanError: on impossible head counts.
    """
    check_heads(q_heads, kv_heads)
    per_kv = q_heads // kv_heads
    even = _even_cut(q_heads, ranks)
    grouped = _cut_along_groups(kv_heads, per_kv, ranks)
    cut = grouped if max(_sizes(grouped)) <= max(_sizes(even)) else even
    return tuple(_shard(start, stop, per_kv) for start, stop in itertools.pairwise(cut))


def split_groups(q_heads: int, kv_heads: int, ranks: int) -> tuple[HeadShard, ...]:
    """Split the heads of one attention layer over the ranks of a tensor axis: no rank has parts of two KV groups.

    With more ranks than query heads, some have none.
    """
    check_heads(q_heads, kv_heads)
    per_kv = q_heads // kv_heads
    cut = _cut_along_groups(kv_heads, per_kv, ranks)
    return tuple(_shard(start, stop, per_kv) for start, stop in itertools.pairwise(cut))


MOST_SLICES = 8
"""Slices of heads of an attention layer, unless a number is given: each reads the layer's input, and smaller matmuls
are slower."""


def slices_of(asked: int, q_heads: int, ulysses: int) -> int:
    """Return the number of slices in which an attention layer runs (`Memory.head_slices`)."""
    return max(1, min(asked or MOST_SLICES, q_heads // ulysses))


def split_head_chunks(
    shards: tuple[HeadShard, ...], chunks: int, overlap_chunks: int = 1
) -> tuple[tuple[tuple[HeadShard, ...], ...], ...]:
    """Split every rank's heads into chunks: along KV groups, and for many `overlap_chunks` within each group.

    Args:
        shards: the heads of each rank (`split_heads`).
        chunks: number of chunks, at most the largest number of KV heads on any rank; 0 for that number.
        overlap_chunks: least number of chunks; at most one chunk per query head of the largest group.

    Returns:
        Groups of chunks, by the KV heads that they share; for every chunk the shard of each rank. Ranks with few heads
        have none in the last chunks.
    """
    most = max(shard.kv_heads for shard in shards)
    count = max(min(chunks, most) if chunks else most, overlap_chunks)
    cuts = [_even_cut(shard.kv_heads, min(count, most)) for shard in shards]
    groups = [
        tuple(_kv_slice(shard, cut[i], cut[i + 1]) for shard, cut in zip(shards, cuts, strict=True))
        for i in range(min(count, most))
    ]
    widest = max(max(shard.group_sizes, default=1) for shard in shards)
    parts = 1 if count <= most else min(-(-count // most), widest)
    return tuple(tuple(_query_part(group, i, parts) for i in range(parts)) for group in groups)


def _query_part(group: tuple[HeadShard, ...], part: int, parts: int) -> tuple[HeadShard, ...]:
    """Return one of `parts` equal parts of each rank's query heads, with all of its KV heads."""
    if parts == 1:
        return group
    shards = []
    for shard in group:
        cut = [shard.q_start + at for at in _even_cut(shard.q_heads, parts)]
        start, stop = cut[part], cut[part + 1]
        shards.append(HeadShard(start, stop, shard.kv_start, shard.kv_stop, (stop - start,) * shard.kv_heads))
    return tuple(shards)


def _kv_slice(shard: HeadShard, start: int, stop: int) -> HeadShard:
    """Return a rank's KV heads [start, stop), with their query heads."""
    q_start, q_stop = (shard.q_start + sum(shard.group_sizes[:kv]) for kv in (start, stop))
    return HeadShard(q_start, q_stop, shard.kv_start + start, shard.kv_start + stop, shard.group_sizes[start:stop])


def _sizes(cut: list[int]) -> list[int]:
    return [stop - start for start, stop in itertools.pairwise(cut)]


def _even_cut(total: int, parts: int) -> list[int]:
    """Return the boundaries of `parts` runs over `total` items; sizes differ by at most one, larger runs first."""
    base, extra = divmod(total, parts)
    cut = [0]
    for i in range(parts):
        cut.append(cut[-1] + base + (i < extra))
    return cut


def _cut_along_groups(kv_heads: int, per_kv: int, ranks: int) -> list[int]:
    """Return boundaries (in query heads) such that no rank has parts of two KV groups."""
    if ranks <= kv_heads:  # whole groups to each rank
        return [head * per_kv for head in _even_cut(kv_heads, ranks)]
    cut = [0]  # several ranks to each group
    ranks_cut = _even_cut(ranks, kv_heads)
    for head, members in enumerate(_sizes(ranks_cut)):
        cut += [head * per_kv + stop for stop in _even_cut(per_kv, members)[1:]]
    return cut


def _shard(start: int, stop: int, per_kv: int) -> HeadShard:
    if start == stop:
        kv = start // per_kv
        return HeadShard(start, stop, kv, kv, ())
    kv_start, kv_stop = start // per_kv, -(-stop // per_kv)
    sizes = tuple(min(stop, (kv + 1) * per_kv) - max(start, kv * per_kv) for kv in range(kv_start, kv_stop))
    return HeadShard(start, stop, kv_start, kv_stop, sizes)
