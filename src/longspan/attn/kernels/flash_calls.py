"""Which calls of flash attention a mask is: few, made once a batch, with all their index tensors on the device.

Flash attention knows one mask: a band whose end lies at the last query and the last key. Query i of Q sees key j of T
where `i + (T - Q) - left <= j <= i + (T - Q) + right`; -1 means no limit. A region of a mask that is trimmed to rows
and columns which are not empty is just that (`Region.within`): from `k1 <= q1 - lo` and `q1 <= k1 + hi` follow
`right = q1 - k1 - lo >= 0` and `left = hi - q1 + k1 >= 0`, and every query sees at least one key. Sequences of one
window go into one call with borders ("varlen"), so that all documents of a batch are one call, forward and backward.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from longspan.attn.kernels.base import BlockRegion, Blocks
from longspan.compat.torch_api import not_compiled
from longspan.core.layout import Span
from longspan.core.regions import Region

Window = tuple[int, int]
"""TileScores far a query sees to the left and to the right of its diagonal; -1: without limit."""


@dataclass(frozen=True, slots=True)
class FlashSequence:
    """One sequence of a call, in every one of some rows of the batch.

    Attributes:
        rows: of the batch.
        region: by places in my queries' tensor and in the block's, not by positions.
        window: as flash attention takes it.
    """

    rows: Span
    region: Region
    window: Window = (-1, -1)


@dataclass(frozen=True, eq=False, slots=True)
class Tokens:
    """The tokens of `[B, heads, S, ...]` that a call takes.

    Attributes:
        rows: of the batch, and
        places: in each of them: a rectangle, which is a view.
        at: places in `[B * S]` instead, int64 [n], where they are no rectangle.
        packed: whether they go in one row, `[n, heads, ...]`, and not in `[rows, places, heads, ...]`.
    """

    rows: Span
    places: Span
    at: Tensor | None
    packed: bool

    def take(self, x_BHSD: Tensor) -> Tensor:
        """They, as flash attention takes them."""
        x_BSHD = x_BHSD.transpose(1, 2)
        if self.at is not None:
            return x_BSHD.flatten(0, 1).index_select(0, self.at)
        x_BSHD = x_BSHD[slice(*self.rows), slice(*self.places)]
        return x_BSHD.flatten(0, 1) if self.packed else x_BSHD

    def put(self, y: Tensor, like_BHSD: Tensor, fill: float = 0.0) -> tuple[Tensor, Span | None, Span | None]:
        """The inverse: `[rows, heads, places, ...]`, and the rows and places it is of (None: all, the rest filled)."""
        if self.at is None:
            y = y.unflatten(0, (self.rows[1] - self.rows[0], -1)) if self.packed else y
            return y.transpose(1, 2), self.rows, self.places
        B, _, S = like_BHSD.shape[:3]
        whole = y.new_full((B * S, *y.shape[1:]), fill).index_copy_(0, self.at, y)
        return whole.unflatten(0, (B, S)).transpose(1, 2), None, None


@dataclass(frozen=True, eq=False, slots=True)
class FlashCall:
    """One call.

    Attributes:
        window: of all its sequences.
        queries: that it takes.
        keys: that it takes.
        longest: tokens of the longest sequence of queries, and of keys.
        ends: where sequences of queries, and of keys, begin and end, int32 [sequences + 1]; None for a call without
            borders, of rows of the batch.
    """

    window: Window
    queries: Tokens
    keys: Tokens
    longest: Span
    ends: tuple[Tensor, Tensor] | None

    @property
    def causal(self) -> bool:
        """Whether the window is the causal one."""
        return self.window == (-1, 0)


@not_compiled
def flash_calls(blocks: Blocks) -> list[tuple[FlashCall, ...]]:
    """For every block of keys its calls. A compiler, which the ring keeps out of itself, is kept out of this too."""
    queries = sum(stop - start for start, stop in blocks.q_spans)
    out = []
    for block, parts in enumerate(blocks.parts):
        spans = zip(blocks.k_spans, blocks.owners, strict=True)
        keys = sum(stop - start for (start, stop), owner in spans if owner == block)
        groups = group_by_window(flash_sequences(parts))
        out.append(tuple(_call(window, group, (queries, keys), blocks.device) for window, group in groups))
    return out


# ---------------------------------------------------------------------------------------------------------------------
# Regions to windows.


def flash_sequences(parts: Sequence[BlockRegion]) -> list[FlashSequence]:
    """What flash attention computes in one sequence each: parts that are one region joined, their windows said."""
    found = [FlashSequence(rows, part) for rows, region in _joined(parts) for part in split_for_window(region)]
    binding = frozenset(_left(piece.region) for piece in found if piece.region.hi_binds)
    return [FlashSequence(piece.rows, piece.region, window_of(piece.region, binding)) for piece in found]


def window_of(region: Region, lefts: frozenset[int | None] = frozenset()) -> Window:
    """The window of a region that `split_for_window` gave.

    A border that hides nothing is none: the kernel without a mask is faster. But a document that is shorter than its
    window goes with the longer ones, and one of a single token with the causal ones.

    Args:
        region: trimmed.
        lefts: lower limits that others have.
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
    """Whether there are so few keys that the kernel, told of a left limit alone, would limit the right side too: it
    then looks no further to the right than there are keys.
    """
    return region.q1 - region.q0 > region.k1 - region.k0 + 1


def split_for_window(region: Region) -> Iterator[Region]:
    """Cut a trimmed region where the kernel would misread its window, which only many queries of few keys need.

    A limit to the right of at least as many tokens as there are keys is read as none.
    """
    if region.lo is not None and region.lo_binds and region.q1 - region.k1 - region.lo >= region.k1 - region.k0:
        at = region.k1 + region.lo  # from here on all keys are seen, as far as this border goes
    elif region.hi is not None and region.hi_binds and not region.lo_binds and _too_short(region):
        at = region.k0 + region.hi + 1  # up to here
    else:
        yield region
        return
    for queries in ((region.q0, at), (at, region.q1)):
        part = region.within(queries, (region.k0, region.k1))
        if part is not None:
            yield from split_for_window(part)


def _joined(parts: Sequence[BlockRegion]) -> list[tuple[Span, Region]]:
    """Parts by their places in the tensors; those that are one region there are one.

    What lies apart in the sequence may be side by side in the tensors: a rank's two runs under zigzag are causal as
    one.
    """
    found: list[tuple[Span, Region]] = []
    for part in parts:
        r, apart = part.region, part.q_at - part.k_at
        lo, hi = (None if limit is None else limit + apart for limit in (r.lo, r.hi))
        last = Region(r.q0 + part.q_at, r.q1 + part.q_at, r.k0 + part.k_at, r.k1 + part.k_at, lo, hi)
        while found and found[-1][0] == part.rows:
            both = merge_regions(found[-1][1], last)
            if both is None:
                break
            found.pop()
            last = both
        found.append((part.rows, last))
    return found


def merge_regions(a: Region, b: Region) -> Region | None:
    """Two disjoint trimmed regions as one, if they are one: if what encloses both holds no further pair."""
    q0, q1, k0, k1 = min(a.q0, b.q0), max(a.q1, b.q1), min(a.k0, b.k0), max(a.k1, b.k1)
    box = Region(q0, q1, k0, k1, min(_nearest(a), _nearest(b)), max(_farthest(a), _farthest(b)))
    return box if box.pairs == a.pairs + b.pairs else None


def _nearest(r: Region) -> int:
    """The smallest i - j of a trimmed region."""
    return r.lo if r.lo is not None and r.lo_binds else r.q0 - (r.k1 - 1)


def _farthest(r: Region) -> int:
    """The largest."""
    return r.hi if r.hi is not None and r.hi_binds else r.q1 - 1 - r.k0


# ---------------------------------------------------------------------------------------------------------------------
# Windows to calls.


@dataclass(slots=True)
class _Group:
    """Pieces of one call: no query and no key occurs twice, so that what they give may be put back side by side."""

    flash_sequences: list[FlashSequence] = field(default_factory=list)
    taken: dict[tuple[str, int], list[Span]] = field(default_factory=dict)

    def takes(self, piece: FlashSequence) -> bool:
        """Add a piece, if nothing of it is there."""
        r = piece.region
        wanted = [
            ((of, row), span)
            for row in range(*piece.rows)
            for of, span in (("queries", (r.q0, r.q1)), ("keys", (r.k0, r.k1)))
        ]
        if any(_meets(self.taken.get(key, []), span) for key, span in wanted):
            return False
        for key, span in wanted:
            insort(self.taken.setdefault(key, []), span)
        self.flash_sequences.append(piece)
        return True


def _meets(taken: list[Span], span: Span) -> bool:
    at = bisect_left(taken, span)
    return (at > 0 and taken[at - 1][1] > span[0]) or (at < len(taken) and taken[at][0] < span[1])


def group_by_window(found: Iterable[FlashSequence]) -> list[tuple[Window, list[FlashSequence]]]:
    """Pieces of one window together, as many as fit into a call."""
    groups: dict[Window, list[_Group]] = {}
    for piece in found:
        of_window = groups.setdefault(piece.window, [])
        if not any(group.takes(piece) for group in of_window):
            of_window.append(_Group())
            of_window[-1].takes(piece)
    return [(window, group.flash_sequences) for window, of_window in groups.items() for group in of_window]


def _call(window: Window, found: list[FlashSequence], sizes: Span, device: torch.device) -> FlashCall:
    """One call of these flash_sequences.

    Args:
        window: of all of them.
        found: the flash_sequences.
        sizes: tokens of my queries' tensor, and of the block's, in a row of the batch.
        device: of the index tensors.
    """
    if len(found) == 1:
        rows, r = found[0].rows, found[0].region
        queries, keys = (Tokens(rows, places, None, packed=False) for places in ((r.q0, r.q1), (r.k0, r.k1)))
        return FlashCall(window, queries, keys, (r.q1 - r.q0, r.k1 - r.k0), None)
    sequences = sorted(
        (row, r.q0, r.q1, r.k0, r.k1) for piece in found for r in (piece.region,) for row in range(*piece.rows)
    )
    row, q0, q1, k0, k1 = torch.tensor(sequences).unbind(1)
    queries, keys = _tokens(row, q0, q1, sizes[0], device), _tokens(row, k0, k1, sizes[1], device)
    lengths = q1 - q0, k1 - k0
    ends_q, ends_k = (torch.cat([n.new_zeros(1), n.cumsum(0)]).to(torch.int32).to(device) for n in lengths)
    return FlashCall(window, queries, keys, (int(lengths[0].max()), int(lengths[1].max())), (ends_q, ends_k))


def _tokens(row: Tensor, start: Tensor, stop: Tensor, size: int, device: torch.device) -> Tokens:
    """Tokens [start, stop) of each row of the batch, one sequence after the other; `row` ascends."""
    n = stop - start
    before = n.cumsum(0) - n
    rows, places = (int(row[0]), int(row[-1]) + 1), (int(start[0]), int(stop[-1]))
    width = places[1] - places[0]
    inside = bool(((start >= places[0]) & (stop <= places[1])).all())
    side_by_side = torch.equal(before, (row - rows[0]) * width + start - places[0])
    if inside and side_by_side and int(n.sum()) == (rows[1] - rows[0]) * width:
        return Tokens(rows, places, None, packed=True)
    first = row * size + start - before
    at = torch.repeat_interleave(first, n) + torch.arange(int(n.sum()))
    return Tokens((0, 0), (0, 0), at.to(device), packed=True)
