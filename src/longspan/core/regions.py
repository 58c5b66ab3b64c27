"""Masks as regions: rectangles with a diagonal band, a few integers instead of an S x S tensor.

Every mask but a `mask_mod` is a set of regions. From them follow the ring blocks that need each other, the tiles of a
block to compute, and the amount of work. `core/routes.py` says what of it is sent.
Standard library only: the planner uses it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, Literal

from longspan.core.layout import Span

TILE = (256, 1024)
"""Largest tile (queries, keys) whose mask is materialized; it bounds the memory per head."""

_NARROW = 128
"""Tiles with fewer queries or keys than this cost more in calls than they save in work."""


@dataclass(frozen=True, slots=True)
class Region:
    """Queries [q0, q1) attend to keys [k0, k1) wherever lo <= i - j <= hi. None: no limit on that side.

    Positions count from the start of the sequence. Causal is lo = 0, a sliding window of W is hi = W - 1.
    """

    q0: int
    q1: int
    k0: int
    k1: int
    lo: int | None = None
    hi: int | None = None

    def within(self, q: Span, k: Span) -> Region | None:
        """Intersect with these queries and keys, trimmed to nonempty rows and columns; None if nothing is left."""
        q0, q1, k0, k1 = max(self.q0, q[0]), min(self.q1, q[1]), max(self.k0, k[0]), min(self.k1, k[1])
        lo, hi = self.lo, self.hi
        if lo is not None:
            q0, k1 = max(q0, k0 + lo), min(k1, q1 - lo)
        if hi is not None:
            q1, k0 = min(q1, k1 + hi), max(k0, q0 - hi)
        if q0 >= q1 or k0 >= k1:
            return None
        return Region(q0, q1, k0, k1, lo, hi)

    @property
    def lo_binds(self) -> bool:
        """Whether the lower border (causality) hides any pair of the rectangle."""
        return self.lo is not None and self.q0 - (self.k1 - 1) < self.lo

    @property
    def hi_binds(self) -> bool:
        """Whether the upper border (a window) hides any pair of the rectangle."""
        return self.hi is not None and self.q1 - 1 - self.k0 > self.hi

    @property
    def is_triangle(self) -> bool:
        """Whether the region is a square under its diagonal: what kernels call causal."""
        square = self.q1 - self.q0 == self.k1 - self.k0
        return square and not self.hi_binds and self.lo is not None and self.q0 - self.k0 == self.lo

    @property
    def pairs(self) -> int:
        """Number of attending (query, key) pairs: the work, in dot products per head."""
        everything = (self.q1 - self.q0) * (self.k1 - self.k0)
        above_lo = everything if self.lo is None else self._pairs_from(self.lo)
        above_hi = 0 if self.hi is None else self._pairs_from(self.hi + 1)
        return above_lo - above_hi

    def _pairs_from(self, lo: int) -> int:
        """Count the pairs of the rectangle with i - j >= lo."""
        keys = self.k1 - self.k0
        # Query i has min(k1, i - lo + 1) - k0 keys, from 0 at i = k0 + lo - 1 to all of them at i = k1 + lo - 1.
        first, full = max(self.q0, self.k0 + lo), max(self.q0, min(self.q1, self.k1 + lo - 1))
        rising = 0
        if first < full:
            a, b = first - lo + 1 - self.k0, full - lo - self.k0
            rising = (a + b) * (full - first) // 2
        return rising + max(0, self.q1 - full) * keys


TileKind = Literal["full", "causal", "masked"]


@dataclass(frozen=True, slots=True)
class Tile:
    """A region for one kernel call: without a mask ("full"), a triangle ("causal"), or with its band ("masked")."""

    region: Region
    kind: TileKind


def tiles(region: Region, *, materialized: bool = False) -> Iterator[Tile]:
    """Cut a region that `Region.within` returned into tiles: as few and as large as possible without a materialized
    mask.

    With `materialized`, every tile's scores or mask are (a bias, a softcap, a mask_mod), so no tile is larger than
    `TILE`.
    """
    if materialized:
        yield from _masked_tiles(region)
    elif region.hi_binds:
        yield from _band(region)
    elif not region.lo_binds:
        yield Tile(region, "full")
    elif region.is_triangle:
        yield Tile(region, "causal")
    else:
        yield from _trapezium(region)


def _trapezium(r: Region) -> Iterator[Tile]:
    """Cut a rectangle with a causal border: keys that all queries see, a triangle, keys that later queries see."""
    assert r.lo is not None
    corner = max(r.k0, r.q0 - r.lo)  # the last key that the first query sees
    if corner > r.k0:
        yield Tile(Region(r.q0, r.q1, r.k0, corner, r.lo, r.hi), "full")
    size = min(r.k1 - corner, r.q1 - r.q0)
    yield from _tiles_within(r, (r.q0, r.q0 + size), (corner, corner + size))
    yield from _tiles_within(r, (r.q0 + size, r.q1), (corner, r.k1))


def _tiles_within(r: Region, q: Span, k: Span) -> Iterator[Tile]:
    part = r.within(q, k)
    if part is not None:
        yield from tiles(part)


def _band(r: Region) -> Iterator[Tile]:
    """Cut a window into query blocks about as long as it: their edges are masked, their middle is full."""
    assert r.hi is not None
    width = r.hi - (r.lo if r.lo is not None else -r.hi) + 1
    step = max(_NARROW, min(width, TILE[1]))
    for start in range(r.q0, r.q1, step):
        block = r.within((start, min(start + step, r.q1)), (r.k0, r.k1))
        if block is None:
            continue
        left = min(max(block.q1 - 1 - r.hi, block.k0), block.k1)  # the first key that every query of the block sees
        right = block.k1 if r.lo is None else max(left, min(block.k1, block.q0 - r.lo + 1))
        if right - left < _NARROW:
            yield from _masked_tiles(block)
            continue
        for keys in ((block.k0, left), (left, right), (right, block.k1)):
            part = block.within((block.q0, block.q1), keys)
            if part is not None and part.hi_binds:
                yield from _masked_tiles(part)
            elif part is not None:
                yield from tiles(part)


def _masked_tiles(r: Region) -> Iterator[Tile]:
    for q in range(r.q0, r.q1, TILE[0]):
        for k in range(r.k0, r.k1, TILE[1]):
            part = r.within((q, q + TILE[0]), (k, k + TILE[1]))
            if part is not None:
                yield Tile(part, "masked")


def intersections(
    regions: Iterable[Region], q_spans: Sequence[Span], k_spans: Sequence[Span]
) -> Iterator[tuple[int, int, Region]]:
    """Yield (m, n, part) for each region and each query span m and key span n (disjoint, sorted) that it intersects."""
    # Binary search: there may be thousands of regions.
    q_starts, k_starts = [start for start, _ in q_spans], [start for start, _ in k_spans]
    for region in regions:
        for m in range(max(0, bisect_right(q_starts, region.q0) - 1), bisect_left(q_starts, region.q1)):
            for n in range(max(0, bisect_right(k_starts, region.k0) - 1), bisect_left(k_starts, region.k1)):
                part = region.within(q_spans[m], k_spans[n])
                if part is not None:
                    yield m, n, part


# ---------------------------------------------------------------------------------------------------------------------
# Kernel calls: tiles by their indices in the tensors, merged to as few as possible.


@dataclass(frozen=True, slots=True)
class Call:
    """One kernel call: a tile by its indices in the local tensors."""

    rows: Span  # batch rows [start, stop)
    queries: Span  # indices in the local queries [start, stop)
    keys: Span  # indices in the KV block [start, stop)
    kind: TileKind  # of the tile; "causal" is a square in which query number m sees keys 0 to m
    # of a "masked" tile, by positions, which its mask is made from. None for other tiles, which may join tokens from
    # distant parts of the sequence.
    region: Region | None = None

    @property
    def at_queries(self) -> tuple[slice, slice, slice]:
        """Index of the queries in `[B, heads, Q, ...]`."""
        return slice(*self.rows), slice(None), slice(*self.queries)

    @property
    def at_keys(self) -> tuple[slice, slice, slice]:
        """Index of the keys in `[B, heads, T, ...]`."""
        return slice(*self.rows), slice(None), slice(*self.keys)


def merge_calls(calls: Iterable[Call]) -> list[Call]:
    """Merge calls that are adjacent in the tensors into one rectangle or triangle; return them sorted.

    Neighbours in a tensor need not be neighbours in the sequence. A zigzag block has an early and a late span. With its
    own keys these are a triangle, a rectangle below it and a triangle: by their indices, one larger triangle. With
    another block's keys, both query spans see the early keys, or the late queries see both key spans: one rectangle.
    Calls with a mask stay as they are.
    """
    merged = list(calls)
    if any(call.kind == "full" for call in merged):  # not for documents, perhaps thousands, which are triangles only
        before = len(merged) + 1
        while len(merged) < before:  # a triangle that has grown may continue the previous one
            before = len(merged)
            merged = _merge_along("queries", _merge_along("keys", _merge_triangles(merged)))
    if len({call.rows for call in merged}) > 1:
        merged = _merge_along("rows", merged)
    return sorted(merged, key=attrgetter("rows", "queries", "keys"))


def _merge_triangles(calls: list[Call]) -> list[Call]:
    """Merge a triangle into the previous one if its queries also see all keys of the previous one."""
    out: dict[tuple[Span, int, int], Call] = {}  # triangles by where they end
    full: dict[tuple[Span, Span], list[Call]] = defaultdict(list)
    for call in calls:
        if call.kind == "full":
            full[call.rows, call.queries].append(call)
    for call in sorted((c for c in calls if c.kind == "causal"), key=lambda c: (c.rows, c.queries)):
        before = out.get((call.rows, call.queries[0], call.keys[0]))
        if before is not None:
            same_queries = full[call.rows, call.queries]
            under = [c for c in same_queries if before.keys[0] <= c.keys[0] and c.keys[1] <= before.keys[1]]
            if sum(c.keys[1] - c.keys[0] for c in under) == before.keys[1] - before.keys[0]:
                del out[call.rows, call.queries[0], call.keys[0]]
                full[call.rows, call.queries] = [c for c in same_queries if c not in under]
                queries, keys = (before.queries[0], call.queries[1]), (before.keys[0], call.keys[1])
                call = replace(call, queries=queries, keys=keys)
        out[call.rows, call.queries[1], call.keys[1]] = call
    rest = [call for calls_of in full.values() for call in calls_of]
    return [*out.values(), *rest, *(call for call in calls if call.kind == "masked")]


def _merge_along(axis: str, calls: list[Call]) -> list[Call]:
    """Merge calls that differ along one axis alone and are adjacent there."""
    kinds = ("full", "causal") if axis == "rows" else ("full",)
    same, span = attrgetter("kind", *({"rows", "queries", "keys"} - {axis})), attrgetter(axis)
    out: list[Call] = []
    for call in sorted(calls, key=lambda call: (same(call), span(call))):
        last = out[-1] if out and call.kind in kinds else None
        if last is not None and same(last) == same(call) and span(last)[1] == span(call)[0]:
            longer: Any = {axis: (span(last)[0], span(call)[1])}
            out[-1] = replace(last, **longer)
        else:
            out.append(call)
    return out
