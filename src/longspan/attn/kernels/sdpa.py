"""Kernel "sdpa": torch's `scaled_dot_product_attention`, called once for each segment.

Documents and chunks are separate calls, so that the cost follows the mask; a short window runs as blocks of queries
with two blocks of keys each. Autograd computes the gradients.

Shape suffixes: B batch, S tokens, H query heads, K KV heads, D head_dim of q and k, V of v.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from longspan.attn.kernels.base import AutogradKernel, Blocks, KernelRequest, register
from longspan.attn.score import Scores
from longspan.attn.segments import Segments, chunk_segments
from longspan.core.layout import Span

SHORT_WINDOW = 256
"""The longest window for which "auto" uses sdpa, which computes twice the attending pairs. Up to here that costs no
more than the many small tiles of "tiled" (`benchmarks/mask_cost.py`)."""

_FILLED = 1.25  # longest / shortest segment of a bucket: at most a fifth is padding
_MANY = 4  # calls that one bucket must save
_GATHERED_BYTES = 1 << 15  # q, k and v of the mean segment; above, gathering costs more than a call saves


def segments_with_chunks(blocks: Blocks) -> Segments | None:
    """Return the segments, cut at the borders of `chunk_size`."""
    mask, length = blocks.mask, blocks.lengths[1]
    if mask.chunk_size is None or mask.kv_segments is not None:
        return mask.segments
    rows = mask.segments or (((0, length),),) * blocks.batch
    starts = tuple(tuple(start for start, _ in row) for row in rows)  # chunks count from the sequence's start
    return chunk_segments(rows, mask.chunk_size, starts)


Splits = tuple[tuple[int, ...], tuple[bool, ...]]
"""Tokens of all parts of a batch row in order, and whether each is a segment; padding between them returns zeros."""


def _splits(row: tuple[Span, ...], length: int) -> Splits:
    borders = sorted({0, length, *(i for segment in row for i in segment)})
    starts = {start for start, stop in row if start < stop}
    sizes = tuple(stop - start for start, stop in itertools.pairwise(borders))
    return sizes, tuple(start in starts for start in borders[:-1])


@dataclass(frozen=True, eq=False, slots=True)
class Bucket:
    """Segments of similar length, which run in one call: n segments of L tokens.

    Shorter ones are padded with their last token. Under a causal mask no real query sees the padding.
    """

    at: Tensor  # indices in `[B * S]`, int64 [n, L]
    real: Tensor | None  # which of the n * L tokens are real, int64; None for all
    to: Tensor  # indices of the real tokens in `[B * S]`, int64


@dataclass(frozen=True, eq=False, slots=True)
class SdpaCalls:
    """All calls of a batch."""

    causal: bool  # whether each is causal
    window: int | None  # tokens of a causal window; None for none
    # For each batch row; one entry if all rows are split in the same way; None for one call.
    cuts: tuple[Splits, ...] | None
    buckets: tuple[Bucket, ...] | None = None  # instead of cuts, if there are many segments


class SdpaKernel(AutogradKernel):
    """Causal or not, causal windows, segments and chunks."""

    name = "sdpa"
    computes = frozenset({"window", "chunk_size", "documents"})

    def refuses(self, request: KernelRequest) -> str | None:
        return None

    def describe(self, request: KernelRequest) -> str:
        return "torch's scaled_dot_product_attention, one call per segment"

    def prepare_batch(self, blocks: Blocks) -> SdpaCalls:
        """Return the calls of the batch."""
        segments, mask = segments_with_chunks(blocks), blocks.mask
        if segments is None:
            return SdpaCalls(mask.causal, mask.window, None)
        buckets = None if mask.window is not None else in_buckets(segments, blocks)
        if buckets is not None:
            return SdpaCalls(mask.causal, None, None, buckets)
        rows = segments[:1] if len(set(segments)) == 1 else segments
        return SdpaCalls(mask.causal, mask.window, tuple(_splits(row, blocks.lengths[0]) for row in rows))

    def to_kernel_layout(
        self, q_BSHD: Tensor, k_BTKD: Tensor, v_BTKV: Tensor, prepared: SdpaCalls
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `AutogradKernel`: heads first on a CPU, for one call of all tokens."""
        windowed = prepared.window is not None and prepared.window < q_BSHD.shape[1]
        if windowed or prepared.cuts is not None or prepared.buckets is not None:
            return q_BSHD, k_BTKD, v_BTKV  # each segment is copied by itself
        q, k, v = (x.transpose(1, 2) for x in _heads_first(q_BSHD, k_BTKD, v_BTKV))
        return q, k, v

    def run(self, q_BSHD: Tensor, k_BSKD: Tensor, v_BSKV: Tensor, prepared: SdpaCalls, scores: Scores) -> Tensor:
        """See `AutogradKernel`."""
        if prepared.buckets is not None:
            return _bucketed(q_BSHD, k_BSKD, v_BSKV, prepared, scores)
        if prepared.cuts is None:
            return _one(q_BSHD, k_BSKD, v_BSKV, prepared, scores)
        if len(prepared.cuts) == 1:  # the same splits in all rows
            return _row(q_BSHD, k_BSKD, v_BSKV, prepared.cuts[0], prepared, scores)
        rows = zip(q_BSHD.split(1), k_BSKD.split(1), v_BSKV.split(1), prepared.cuts, strict=True)
        return torch.cat([_row(q, k, v, cut, prepared, scores) for q, k, v, cut in rows])


def in_buckets(segments: Segments, blocks: Blocks) -> tuple[Bucket, ...] | None:
    """Group many segments into a few calls; None if that saves too few calls to be worth gathering their tokens."""
    S = blocks.lengths[0]
    spans = [(b * S + start, b * S + stop) for b, row in enumerate(segments) for start, stop in row if start < stop]
    runs = sorted((stop - start, start) for start, stop in spans)
    if not runs or sum(size for size, _ in runs) * blocks.token_bytes > _GATHERED_BYTES * len(runs):
        return None
    filled = _FILLED if blocks.mask.causal else 1.0
    groups: list[list[tuple[int, int]]] = []
    for run in reversed(runs):  # the longest of a bucket first
        if not groups or run[0] * filled < groups[-1][0][0]:
            groups.append([])
        groups[-1].append(run)
    calls = len(runs) if len(set(segments)) > 1 else len(segments[0])
    if calls < _MANY * len(groups):
        return None
    return tuple(_bucket(group, blocks.device) for group in groups)


def _bucket(group: list[tuple[int, int]], device: torch.device) -> Bucket:
    sizes, starts = torch.tensor(group).unbind(1)
    step = torch.arange(int(sizes[0]))
    at = starts[:, None] + torch.minimum(step, sizes[:, None] - 1)
    real = (step < sizes[:, None]).flatten()
    is_real = None if bool(real.all()) else real.nonzero().flatten().to(device)
    return Bucket(at.to(device), is_real, at.flatten()[real].to(device))


def _bucketed(q_BSHD: Tensor, k_BSKD: Tensor, v_BSKV: Tensor, calls: SdpaCalls, scores: Scores) -> Tensor:
    """Gather each bucket, compute it in one call, and scatter the result; padding between segments is zero."""
    assert calls.buckets is not None
    B, S, H = q_BSHD.shape[:3]
    flat = [x.flatten(0, 1) for x in (q_BSHD, k_BSKD, v_BSKV)]
    outs = []
    for bucket in calls.buckets:
        q, k, v = (x.index_select(0, bucket.at.flatten()).unflatten(0, bucket.at.shape) for x in flat)
        out = _one(q, k, v, calls, scores).flatten(0, 1)
        outs.append(out if bucket.real is None else out.index_select(0, bucket.real))
    out = q_BSHD.new_zeros(B * S, H, v_BSKV.shape[3])
    to = torch.cat([bucket.to for bucket in calls.buckets])
    merged: Tensor = out.index_copy(0, to, torch.cat(outs)).unflatten(0, (B, S))
    return merged


def _row(q: Tensor, k: Tensor, v: Tensor, cut: Splits, calls: SdpaCalls, scores: Scores) -> Tensor:
    """Compute each segment by itself; padding between them is zero."""
    # One split, not many slices: the gradient of a split is one concatenation, that of each slice a full zero tensor.
    sizes, is_segment = cut
    parts = zip(is_segment, q.split(sizes, 1), k.split(sizes, 1), v.split(sizes, 1), strict=True)
    out = [
        _one(qi, ki, vi, calls, scores) if real else qi.new_zeros(*qi.shape[:3], vi.shape[3])
        for real, qi, ki, vi in parts
    ]
    return torch.cat(out, 1)


def _one(q: Tensor, k: Tensor, v: Tensor, calls: SdpaCalls, scores: Scores) -> Tensor:
    if calls.window is not None and calls.window < q.shape[1]:
        return _windowed(q, k, v, calls.window, scores)
    out_BHSV = _call(*_heads_first(q, k, v), is_causal=calls.causal, scale=scores.scale)
    return out_BHSV.transpose(1, 2)


def _heads_first(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return `[B, S, H, D]` as `[B, H, S, D]`: views, or copies on a CPU where they pay off."""
    q_BHSD, k_BKSD, v_BKSV = (x.transpose(1, 2) for x in (q, k, v))
    if q.device.type == "cpu":
        # The CPU kernel reads K and V again for every block of queries: contiguous heads are worth a copy.
        k_BKSD, v_BKSV = k_BKSD.contiguous(), v_BKSV.contiguous()
        if q.requires_grad and _within_a_row(q):
            # `q` is a view of the packed QKV buffer. Copy it, so that saving `q` does not keep K and V alive.
            q_BHSD = q_BHSD.contiguous()
    return q_BHSD, k_BKSD, v_BKSV


def _within_a_row(x_BSHD: Tensor) -> bool:
    """Whether the heads are a slice of wider rows, by strides, which a compiler knows."""
    B, _, H, D = x_BSHD.shape
    wider = x_BSHD.stride(1) > H * D and (B == 1 or x_BSHD.stride(0) > H * D)
    return wider and (H == 1 or x_BSHD.stride(2) == D)


def _call(q_BHSD: Tensor, k_BKSD: Tensor, v_BKSV: Tensor, **options: Any) -> Tensor:
    if q_BHSD.shape[1] != k_BKSD.shape[1]:  # a branch, because the comparison may be symbolic when compiled
        options["enable_gqa"] = True
    out: Tensor = F.scaled_dot_product_attention(q_BHSD, k_BKSD, v_BKSV, **options)
    return out


def _windowed(q: Tensor, k: Tensor, v: Tensor, window: int, scores: Scores) -> Tensor:
    """Compute a causal window in blocks of `window` queries, each with its own and the previous block of keys.

    O(S * window) time and memory. All blocks run in one batched call: B * blocks rows of `window` queries.
    """
    B, S = q.shape[:2]
    w = max(window, min(S, 128))  # very small windows would make very many tiny blocks
    blocks = -(-S // w)
    pad = blocks * w - S
    q, k, v = (F.pad(x, (0, 0, 0, 0, 0, pad)).unflatten(1, (blocks, w)) for x in (q, k, v))
    k, v = (torch.cat([F.pad(x, (0, 0, 0, 0, 0, 0, 1, 0))[:, :-1], x], 2) for x in (k, v))  # [B, blocks, 2w, K, D]
    i = torch.arange(w, device=q.device)[:, None] + w
    j = torch.arange(2 * w, device=q.device)[None]
    allowed = (j <= i) & (i - j < window)
    masks = allowed.expand(blocks, w, 2 * w).clone()
    masks[0, :, :w] = False  # the first block has no block before it
    out = _call(
        q.flatten(0, 1).transpose(1, 2),
        k.flatten(0, 1).transpose(1, 2),
        v.flatten(0, 1).transpose(1, 2),
        attn_mask=masks.repeat(B, 1, 1)[:, None],
        scale=scores.scale,
    )
    blocks_BSHD: Tensor = out.transpose(1, 2).unflatten(0, (B, blocks)).flatten(1, 2)
    return blocks_BSHD[:, :S]


SDPA = register(SdpaKernel())
