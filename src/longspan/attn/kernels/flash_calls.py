"""Turn a mask into few calls of flash attention, once per batch, with their index tensors on the device.

Flash attention has one mask: a band that ends at the last query and the last key. Query i of Q sees key j of T if
`i + (T - Q) - left <= j <= i + (T - Q) + right`; -1 means no limit. A region trimmed to nonempty rows and columns
(`Region.within`) is such a band: from `k1 <= q1 - lo` and `q1 <= k1 + hi` follow `right = q1 - k1 - lo >= 0` and
`left = hi - q1 + k1 >= 0`, and every query sees at least one key. Sequences with the same window share a call
("varlen"), so all documents of a batch are one call, in forward and backward.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from longspan.attn.kernels.base import BlockRegion, Blocks
from longspan.compat.torch_api import not_compiled, to_device
from longspan.core.layout import Lengths, Span
from longspan.core.regions import Region

Window = tuple[int, int]
"""How many keys a query sees to the left and to the right of its diagonal; -1: no limit."""


@dataclass(frozen=True, slots=True)
class FlashSequence:
    """One sequence of a call, in each of some batch rows."""

    rows: Span  # batch rows
    region: Region  # by indices in the local queries and in the KV block, not by positions
    window: Window = (-1, -1)  # flash attention's


@dataclass(frozen=True, eq=False, slots=True)
class Tokens:
    """The tokens of `[B, heads, S, ...]` that a call computes: a rectangle, which is a view, or a list."""

    rows: Span  # batch rows of the rectangle
    columns: Span  # tokens of each row of the rectangle
    at: Tensor | None  # if they are no rectangle: indices in `[B * S]`, int64 [n]
    packed: bool  # whether the call takes one row, `[n, heads, ...]`, instead of `[rows, columns, heads, ...]`

    def take(self, x_BHSD: Tensor) -> Tensor:
        """Select the tokens, in flash attention's layout."""
        x_BSHD = x_BHSD.transpose(1, 2)
        if self.at is not None:
            return x_BSHD.flatten(0, 1).index_select(0, self.at)
        x_BSHD = x_BSHD[slice(*self.rows), slice(*self.columns)]
        return x_BSHD.flatten(0, 1) if self.packed else x_BSHD

    def put(self, y: Tensor, shape: Sequence[int], fill: float = 0.0) -> tuple[Tensor, Span | None, Span | None]:
        """Undo `take`: return `[rows, heads, columns, ...]` and its rows and columns (None: all, others get `fill`)."""
        if self.at is None:
            y = y.unflatten(0, (self.rows[1] - self.rows[0], -1)) if self.packed else y
            return y.transpose(1, 2), self.rows, self.columns
        B, _, S = shape[:3]
        out = y.new_full((B * S, *y.shape[1:]), fill).index_copy_(0, self.at, y)
        return out.unflatten(0, (B, S)).transpose(1, 2), None, None


@dataclass(frozen=True, eq=False, slots=True)
class FlashCall:
    """One call."""

    window: Window  # of all its sequences
    queries: Tokens  # its query tokens, as `keys`
    keys: Tokens
    longest: Lengths  # length of the longest sequence of queries, and of keys
    # `cu_seqlens` of queries and of keys, int32 [sequences + 1]; None for a call on batch rows.
    ends: tuple[Tensor, Tensor] | None

    @property
    def causal(self) -> bool:
        """Whether the window is the causal one."""
        return self.window == (-1, 0)


@not_compiled
def flash_calls(blocks: Blocks) -> list[tuple[FlashCall, ...]]:
    """Return the calls of each KV block."""
    queries = sum(stop - start for start, stop in blocks.q_spans)
    out = []
    for block, parts in enumerate(blocks.parts):
        spans = zip(blocks.k_spans, blocks.source_ranks, strict=True)
        keys = sum(stop - start for (start, stop), source in spans if source == block)
        groups = group_by_window(flash_sequences(parts))
        out.append(tuple(_call(window, group, (queries, keys), blocks.device) for window, group in groups))
    return out


# ---------------------------------------------------------------------------------------------------------------------
# Regions to windows.


def flash_sequences(parts: Sequence[BlockRegion]) -> list[FlashSequence]:
    """Merge regions that are adjacent in the tensors, and give each the window that flash attention needs."""
    regions = [(rows, part) for rows, region in _joined(parts) for part in split_for_window(region)]
    binding = frozenset(_left(region) for _, region in regions if region.hi_binds)
    return [FlashSequence(rows, region, window_of(region, binding)) for rows, region in regions]


def window_of(region: Region, lefts: frozenset[int | None] = frozenset()) -> Window:
    """Return the window of a region from `split_for_window`.

    A border that hides nothing is dropped, because the kernel without a mask is faster. But a document shorter than its
    window keeps the window of the longer ones, and one of a single token stays causal, so that they share a call.

    Args:
        region: trimmed.
        lefts: left limits of other regions.
    """
    left, right, limit = -1, -1, _left(region)
    if region.lo is not None and (region.lo_binds or region.q1 - region.k1 == region.lo):
        right = region.q1 - region.k1 - region.lo
    if limit is not None and (region.hi_binds or (limit in lefts and not (right < 0 and _too_short(region)))):
        left = limit
    return left, right


def _left(region: Region) -> int | None:
    return None if region.hi is None else region.hi - region.q1 + region.k1


def _too_short(region: Region) -> bool:
    """Whether there are so few keys that the kernel, given a left limit alone, would limit the right side too."""
    return region.q1 - region.q0 > region.k1 - region.k0 + 1


def split_for_window(region: Region) -> Iterator[Region]:
    """Cut a trimmed region where the kernel would misread its window: many queries with few keys.

    The kernel reads a right limit of at least as many tokens as there are keys as no limit.
    """
    if region.lo is not None and region.lo_binds and region.q1 - region.k1 - region.lo >= region.k1 - region.k0:
        at = region.k1 + region.lo  # from this query on, the border hides no key
    elif region.hi is not None and region.hi_binds and not region.lo_binds and _too_short(region):
        at = region.k0 + region.hi + 1  # up to this query
    else:
        yield region
        return
    for queries in ((region.q0, at), (at, region.q1)):
        part = region.within(queries, (region.k0, region.k1))
        if part is not None:
            yield from split_for_window(part)


def _joined(parts: Sequence[BlockRegion]) -> list[tuple[Span, Region]]:
    """Convert positions to indices in the tensors, and merge regions that are one region there.

    Tokens that are apart in the sequence may be adjacent in the tensors: two zigzag spans are one causal region.
    """
    joined: list[tuple[Span, Region]] = []
    for part in parts:
        r, apart = part.region, part.q_at - part.k_at
        lo, hi = (None if limit is None else limit + apart for limit in (r.lo, r.hi))
        last = Region(r.q0 + part.q_at, r.q1 + part.q_at, r.k0 + part.k_at, r.k1 + part.k_at, lo, hi)
        while joined and joined[-1][0] == part.rows:
            both = merge_regions(joined[-1][1], last)
            if both is None:
                break
            joined.pop()
            last = both
        joined.append((part.rows, last))
    return joined


def merge_regions(a: Region, b: Region) -> Region | None:
    """Merge two disjoint trimmed regions if their bounding region contains no further pair; otherwise None."""
    q0, q1, k0, k1 = min(a.q0, b.q0), max(a.q1, b.q1), min(a.k0, b.k0), max(a.k1, b.k1)
    box = Region(q0, q1, k0, k1, min(_nearest(a), _nearest(b)), max(_farthest(a), _farthest(b)))
    return box if box.pairs == a.pairs + b.pairs else None


def _nearest(r: Region) -> int:
    """Return the smallest i - j of a trimmed region."""
    return r.lo if r.lo is not None and r.lo_binds else r.q0 - (r.k1 - 1)


def _farthest(r: Region) -> int:
    """Return the largest i - j of a trimmed region."""
    return r.hi if r.hi is not None and r.hi_binds else r.q1 - 1 - r.k0


# ---------------------------------------------------------------------------------------------------------------------
# Windows to calls.


@dataclass(slots=True)
class _Group:
    """Sequences of one call: no query and no key occurs twice, so that results can be scattered back."""

    sequences: list[FlashSequence] = field(default_factory=list)
    used: dict[tuple[str, int], list[Span]] = field(default_factory=dict)

    def add(self, sequence: FlashSequence) -> bool:
        """Add a sequence if none of its queries and keys is in the group; return whether it was added."""
        r = sequence.region
        spans = [
            ((of, row), span)
            for row in range(*sequence.rows)
            for of, span in (("queries", (r.q0, r.q1)), ("keys", (r.k0, r.k1)))
        ]
        if any(_overlaps(self.used.get(key, []), span) for key, span in spans):
            return False
        for key, span in spans:
            insort(self.used.setdefault(key, []), span)
        self.sequences.append(sequence)
        return True


def _overlaps(used: list[Span], span: Span) -> bool:
    at = bisect_left(used, span)
    return (at > 0 and used[at - 1][1] > span[0]) or (at < len(used) and used[at][0] < span[1])


def group_by_window(sequences: Iterable[FlashSequence]) -> list[tuple[Window, list[FlashSequence]]]:
    """Group sequences of one window into as few calls as possible."""
    groups: dict[Window, list[_Group]] = {}
    for sequence in sequences:
        of_window = groups.setdefault(sequence.window, [])
        if not any(group.add(sequence) for group in of_window):
            of_window.append(_Group())
            of_window[-1].add(sequence)
    return [(window, group.sequences) for window, of_window in groups.items() for group in of_window]


def _call(window: Window, sequences: list[FlashSequence], sizes: Span, device: torch.device) -> FlashCall:
    """Make one call; `sizes` are the tokens per batch row of the local queries and of the KV block."""
    if len(sequences) == 1:
        rows, r = sequences[0].rows, sequences[0].region
        queries, keys = (Tokens(rows, columns, None, packed=False) for columns in ((r.q0, r.q1), (r.k0, r.k1)))
        return FlashCall(window, queries, keys, (r.q1 - r.q0, r.k1 - r.k0), None)
    edges = sorted(
        (row, s.region.q0, s.region.q1, s.region.k0, s.region.k1) for s in sequences for row in range(*s.rows)
    )
    row, q0, q1, k0, k1 = torch.tensor(edges).unbind(1)
    queries, keys = _tokens(row, q0, q1, sizes[0], device), _tokens(row, k0, k1, sizes[1], device)
    lengths = q1 - q0, k1 - k0
    ends_q, ends_k = (to_device(torch.cat([n.new_zeros(1), n.cumsum(0)]).int(), device) for n in lengths)
    return FlashCall(window, queries, keys, (int(lengths[0].max()), int(lengths[1].max())), (ends_q, ends_k))


def _tokens(row: Tensor, start: Tensor, stop: Tensor, size: int, device: torch.device) -> Tokens:
    """Return tokens [start, stop) of the batch rows `row`, one sequence after the other; `row` ascends."""
    n = stop - start
    before = n.cumsum(0) - n
    rows, columns = (int(row[0]), int(row[-1]) + 1), (int(start[0]), int(stop[-1]))
    width = columns[1] - columns[0]
    inside = bool(((start >= columns[0]) & (stop <= columns[1])).all())
    adjacent = torch.equal(before, (row - rows[0]) * width + start - columns[0])
    if inside and adjacent and int(n.sum()) == (rows[1] - rows[0]) * width:
        return Tokens(rows, columns, None, packed=True)
    first = row * size + start - before
    at = torch.repeat_interleave(first, n) + torch.arange(int(n.sum()))
    return Tokens((0, 0), (0, 0), to_device(at, device), packed=True)
