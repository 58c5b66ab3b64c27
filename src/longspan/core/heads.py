"""Which heads a rank computes inside an attention. Standard library only: the planner uses it without torch."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from longspan.core.errors import LongspanError


@dataclass(frozen=True)
class HeadShard:
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
    def kv_head_index(self) -> tuple[int, ...] | None:
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


def split_heads(q_heads: int, kv_heads: int, ranks: int, *, kv_replication: bool = True) -> tuple[HeadShard, ...]:
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
        One `HeadShard` per rank.

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


def split_groups(q_heads: int, kv_heads: int, ranks: int) -> tuple[HeadShard, ...]:
    """Cut the heads of one attention layer along KV groups: no rank has part of two groups.

    With fewer ranks than KV heads each rank has whole groups; with more, each has query heads of one group.

    Args:
        q_heads: query heads of the model.
        kv_heads: KV heads of the model; divides `q_heads`.
        ranks: of the tensor group.

    Returns:
        One `HeadShard` per rank. A rank has no head if there are more ranks than query heads.
    """
    check_heads(q_heads, kv_heads)
    group = q_heads // kv_heads
    cut = _cut_along_groups(kv_heads, group, ranks)
    return tuple(_share(start, stop, group) for start, stop in itertools.pairwise(cut))


def split_head_chunks(shards: tuple[HeadShard, ...], chunks: int) -> tuple[tuple[HeadShard, ...], ...]:
    """Cut every rank's heads into runs of whole KV groups, so that each KV head of a rank is in one run.

    Args:
        shards: the heads of each rank (`split_heads`).
        chunks: how many runs; where no rank has so many KV heads, or for 0, as many as the rank with the most has.

    Returns:
        For every run the shard of each rank; ranks with fewer KV heads than there are runs have no head in the last.
    """
    most = max(shard.kv_heads for shard in shards)
    count = min(chunks, most) if chunks else most
    cuts = [_even_cut(shard.kv_heads, count) for shard in shards]
    return tuple(
        tuple(_run(shard, cut[i], cut[i + 1]) for shard, cut in zip(shards, cuts, strict=True)) for i in range(count)
    )


def split_overlap_chunks(shards: tuple[HeadShard, ...], pieces: int) -> tuple[tuple[tuple[HeadShard, ...], ...], ...]:
    """Cut every rank's heads into about so many pieces: along KV groups as far as there are any, and then the query
    heads of each KV head, which need it one after the other.

    Args:
        shards: the heads of each rank (`split_heads`).
        pieces: how many are wanted. At most every query head of the widest group is a piece of its own.

    Returns:
        Runs of KV heads; for every run its pieces; for every piece the shard of each rank. A rank that has fewer heads
        has none in the last pieces. In a run of several pieces there is one KV head a rank, and all of them need it.
    """
    most = max(shard.kv_heads for shard in shards)
    runs = split_head_chunks(shards, min(pieces, most))
    widest = max(max(shard.group_sizes, default=1) for shard in shards)
    each = 1 if pieces <= most else min(-(-pieces // most), widest)
    return tuple(tuple(_queries(run, i, each) for i in range(each)) for run in runs)


def _queries(run: tuple[HeadShard, ...], part: int, parts: int) -> tuple[HeadShard, ...]:
    if parts == 1:
        return run
    found = []
    for shard in run:
        cut = [shard.q_start + at for at in _even_cut(shard.q_heads, parts)]
        start, stop = cut[part], cut[part + 1]
        found.append(HeadShard(start, stop, shard.kv_start, shard.kv_stop, (stop - start,) * shard.kv_heads))
    return tuple(found)


def _run(shard: HeadShard, start: int, stop: int) -> HeadShard:
    """KV heads [start, stop) of a rank's, with the query heads that use them there."""
    q_start, q_stop = (shard.q_start + sum(shard.group_sizes[:kv]) for kv in (start, stop))
    return HeadShard(q_start, q_stop, shard.kv_start + start, shard.kv_start + stop, shard.group_sizes[start:stop])


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


def _share(start: int, stop: int, group: int) -> HeadShard:
    if start == stop:
        kv = start // group
        return HeadShard(start, stop, kv, kv, ())
    kv_start, kv_stop = start // group, -(-stop // group)
    sizes = tuple(min(stop, (kv + 1) * group) - max(start, kv * group) for kv in range(kv_start, kv_stop))
    return HeadShard(start, stop, kv_start, kv_stop, sizes)
