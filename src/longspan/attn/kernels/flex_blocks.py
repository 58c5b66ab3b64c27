"""FlexAttention's BlockMask from a mask's regions: the key blocks that each query block sees.

`create_block_mask` evaluates the mask at all S^2 pairs, once per batch. Regions (`longspan.core.regions`) give it in
closed form: in one row of blocks a region touches one run of key blocks, and covers one run of them completely. So the
work is one row of arithmetic for each pair of a region and a query block that intersect, and the memory is that of the
lists of blocks.

A block that several regions touch (at a border of a prefix, a document or a ring's spans) is full if their pairs add up
to all of its pairs: regions are disjoint.

Shape suffixes: B rows of the batch, R rows of blocks, W longest list of blocks, N regions, or their parts in the rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from longspan.attn.kernels.base import BlockRegion
from longspan.core.layout import Span

_FAR = 1 << 40  # a border that binds nothing; far from the ends of int64, so that it can be added to


def block_lists(
    parts: Sequence[BlockRegion], rows: int, counts: Span, size: int, *, opaque: bool, device: torch.device
) -> tuple[Tensor | None, ...]:
    """Return the blocks of a mask in which some pairs attend (partial), and those in which all do (full).

    Args:
        parts: disjoint regions, with their batch rows and indices in the tensors.
        rows: batch rows; 1 if all have the same mask.
        counts: blocks of queries and blocks of keys.
        size: queries, and keys, of a block.
        opaque: whether a mask_mod hides further pairs, so that no block is known to be full.
        device: of the lists.

    Returns:
        BlockMask's tensors: of each query block the number of partial key blocks, int32 [B, 1, R], and their indices,
        ascending, int32 [B, 1, R, W] (W is at least 2; those after the count are ignored); likewise the full ones,
        None if `opaque`; then the query blocks of each key block, for the gradients of keys and values.
    """
    regions_N7 = torch.tensor([_edges(part) for part in parts], dtype=torch.int64).reshape(-1, 7)
    first_of_row = torch.arange(rows)
    for part in parts:
        if rows > 1:
            first_of_row[slice(*part.rows)] = part.rows[0]
    lists: list[Tensor | None] = []
    for regions, sizes in ((regions_N7, counts), (_transposed(regions_N7), counts[::-1])):
        partial, full = _runs(regions, sizes, size, opaque)
        if opaque:
            lists += [*_listed(partial, first_of_row, sizes, device), None, None]
            continue
        both = [_listed(runs, first_of_row, sizes, device) for runs in (partial, full)]
        # FlexAttention's GPU kernels read the full blocks with the strides of the partial ones.
        width = max(indices.shape[-1] for _, indices in both)
        lists += [x for n, indices in both for x in (n, F.pad(indices, (0, width - indices.shape[-1])))]
    return tuple(lists)


def _edges(part: BlockRegion) -> tuple[int, ...]:
    """Return a region's first batch row, queries, keys and band, by indices in the tensors."""
    r, shift = part.region, part.q_at - part.k_at
    lo, hi = (-_FAR if r.lo is None else r.lo + shift), (_FAR if r.hi is None else r.hi + shift)
    return part.rows[0], r.q0 + part.q_at, r.q1 + part.q_at, r.k0 + part.k_at, r.k1 + part.k_at, lo, hi


def _transposed(regions_N7: Tensor) -> Tensor:
    """Swap keys and queries: lo <= i - j <= hi is -hi <= j - i <= -lo."""
    b, q0, q1, k0, k1, lo, hi = regions_N7.unbind(1)
    return torch.stack([b, k0, k1, q0, q1, -hi, -lo], 1)


def _events(regions_N7: Tensor, rows: int, size: int) -> Tensor:
    """Return the parts of regions in rows of blocks, int64 [N, 11].

    Row of blocks, counted through all batch rows; first and last query (one past it) of the region in the row; the
    region's keys and band; the run of key blocks [first, stop) that it touches, and the one that it covers completely
    (first = stop for none).
    """
    batch_row, q0, q1, k0, k1, lo, hi = regions_N7.unbind(1)
    q0, q1 = torch.maximum(q0, k0 + lo), torch.minimum(q1, k1 + hi)  # the queries that see any key of it
    which, block = _spread(q0 // size, -(-q1 // size))
    batch_row, q0, q1, k0, k1, lo, hi = (x[which] for x in (batch_row, q0, q1, k0, k1, lo, hi))
    a, b = torch.maximum(q0, block * size), torch.minimum(q1, (block + 1) * size)
    # Query i sees keys i - hi to i - lo. Touched: keys that any query sees; covered: keys that every query sees.
    touched = torch.maximum(k0, a - hi) // size, -(-torch.minimum(k1, b - lo) // size)
    first, stop = -(-torch.maximum(k0, b - 1 - hi) // size), torch.minimum(k1, a - lo + 1) // size
    whole = (b - a == size) & (first < stop)
    covered = torch.where(whole, first, touched[0]), torch.where(whole, stop, touched[0])
    return torch.stack([batch_row * rows + block, a, b, k0, k1, lo, hi, *touched, *covered], 1)


def _spread(first: Tensor, stop: Tensor) -> tuple[Tensor, Tensor]:
    """Return all numbers of the runs [first, stop), and the run of each."""
    sizes = (stop - first).clamp(min=0)
    which = torch.repeat_interleave(torch.arange(len(first)), sizes)
    return which, first[which] + torch.arange(len(which)) - (sizes.cumsum(0) - sizes)[which]


_Runs = tuple[Tensor, Tensor, Tensor]
"""Rows, and their sorted, disjoint runs of blocks [first, stop)."""


def _runs(regions_N7: Tensor, sizes: Span, size: int, opaque: bool) -> tuple[_Runs, _Runs]:
    """Return the partial and the full blocks; `sizes` are the numbers of rows and columns of blocks."""
    rows, columns = sizes
    events = _events(regions_N7, rows, size)
    row, *_, first, stop, first_covered, stop_covered = events.unbind(1)
    if opaque:
        return _swept((row, first, stop), [], columns)
    return _swept((row, first, stop), [(row, first_covered, stop_covered), _shared(events, columns, size)], columns)


def _shared(events: Tensor, columns: int, size: int) -> _Runs:
    """Return blocks that several regions cover together: their pairs add up to all pairs of the block."""
    row = events[:, 0]
    events = events[torch.bincount(row)[row] > 1] if len(row) else events
    *_, first, stop, first_covered, stop_covered = events.unbind(1)
    left, at_left = _spread(first, first_covered)
    right, at_right = _spread(torch.maximum(stop_covered, first), stop)
    column = torch.cat([at_left, at_right])
    row, a, b, k0, k1, lo, hi, *_ = events[torch.cat([left, right])].unbind(1)
    k0, k1 = torch.maximum(k0, column * size), torch.minimum(k1, (column + 1) * size)
    pairs = _pairs_from(lo, a, b, k0, k1) - _pairs_from(hi + 1, a, b, k0, k1)
    block, of = torch.unique(row * columns + column, return_inverse=True)
    total = torch.zeros_like(block).index_add_(0, of, pairs)
    block = block[total == size * size]
    return block // columns, block % columns, block % columns + 1


def _pairs_from(lo: Tensor, a: Tensor, b: Tensor, k0: Tensor, k1: Tensor) -> Tensor:
    """Count pairs with i - j >= lo of queries [a, b) and keys [k0, k1): query i sees the first i - (k0 + lo - 1)."""
    keys = k1 - k0

    def below(x: Tensor) -> Tensor:
        """Count the pairs of the first x queries that see any key: they see 1, 2, ..., and then all keys."""
        rising = torch.minimum(x.clamp(min=0), keys)
        return rising * (rising + 1) // 2 + (x - keys).clamp(min=0) * keys

    before = k0 + lo - 1
    return below(b - 1 - before) - below(a - 1 - before)


def _swept(touched: _Runs, covered: Sequence[_Runs], columns: int) -> tuple[_Runs, _Runs]:
    """Return runs of blocks that are touched but not covered, and covered runs, by a sweep over all borders."""
    places, steps = [], []
    for kind, (row, first, stop) in [(0, touched), *((1, runs) for runs in covered)]:
        for border, sign in ((first, 1), (stop, -1)):
            places.append(row * (columns + 1) + border)
            step = torch.zeros(len(row), 2, dtype=torch.int64)
            step[:, kind] = sign
            steps.append(step)
    place, order = torch.cat(places).sort()
    open_ = torch.cat(steps)[order].cumsum(0)[:-1] > 0  # between a border and the next one
    row, first = place[:-1] // (columns + 1), place[:-1] % (columns + 1)
    stop = first + place.diff()
    some = stop > first
    partial, full = open_[:, 0] & ~open_[:, 1] & some, open_[:, 1] & some
    return (row[partial], first[partial], stop[partial]), (row[full], first[full], stop[full])


def _listed(runs: _Runs, first_of_row: Tensor, sizes: Span, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the number of blocks of each row's runs, and their indices."""
    (row, first, stop), (own, other) = runs, sizes
    total = len(first_of_row) * own
    counts = torch.zeros(total, dtype=torch.int64).index_add_(0, row, stop - first)
    place = (stop - first).cumsum(0) - (stop - first) - (counts.cumsum(0) - counts)[row]  # in the row's list
    # A list increases by 1 within a run, and by the gap at the start of a run: compute it as the sum of its steps.
    ends = torch.cat([stop[:1] * 0, stop[:-1]])
    step = torch.where(place > 0, first - ends + 1, first)
    indices_RW = torch.ones(total, max(2, int(counts.max())), dtype=torch.int32, device=device)
    indices_RW[row.to(device), place.to(device)] = step.to(device, torch.int32)
    indices_RW = indices_RW.cumsum_(1).clamp_(max=other - 1)  # entries after the count must be valid blocks
    of_row = first_of_row.to(device)
    indices, counts = indices_RW.view(-1, own, indices_RW.shape[1]), counts.to(device, torch.int32).view(-1, own)
    if len(of_row) > 1:
        indices, counts = indices[of_row], counts[of_row]
    return counts[:, None].contiguous(), indices[:, None].contiguous()
