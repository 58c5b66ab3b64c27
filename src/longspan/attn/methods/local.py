"""Attention on one device: all tokens, my heads. Kernels by name, or any callable.

`eager` is the plain reference: the formula written out, every mask, every option, S x S memory. `block` does the same
by tiles, with the cost that the mask has. `sdpa` is whatever kernel torch picks under `scaled_dot_product_attention`,
with windows, chunks and documents cut into calls.

Shape suffixes: B batch, S tokens, T keys, H query heads, K KV heads, D head_dim.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from longspan.attn.kernels.choice import Kernel, import_flash_attn, keywords_of
from longspan.attn.kernels.flex import Places, flex, with_sinks
from longspan.attn.mask import Mask
from longspan.attn.methods.ring import Ring, reference_ring, ring_attention
from longspan.attn.score import Scores
from longspan.core.errors import LongspanError
from longspan.core.layout import Layout
from longspan.core.segments import chunk_segments


def local_attention(
    q_BSHD: Tensor,
    k_BTKD: Tensor,
    v_BTKD: Tensor,
    mask: Mask,
    scores: Scores,
    kernel: Kernel,
    kv_head_index: tuple[int, ...] | None = None,
) -> Tensor:
    """Exact attention of all tokens on this device's heads.

    Args:
        q_BSHD: queries. Any strides with a contiguous last dimension.
        k_BTKD: keys; K divides H.
        v_BTKD: values; their head_dim may differ.
        mask: who attends to whom. A query that may attend to nothing gives zero.
        scores: scale, softcap, sinks, biases.
        kernel: "sdpa", "block", "flash_attn", "flex" or "eager", as `choose_kernel` found it to fit; or a callable
            `f(q, k, v, *, causal, scale, **more)` on `[B, S, heads, D]`; `more` holds `window`, `rows`, `softcap`,
            `sinks`, `mask_mod`, `alibi`, `bias` when they are set, and a callable that has no such keyword is refused.
        kv_head_index: for every query head its KV head, where they are not in equal groups.

    Returns:
        `[B, S, H, Dv]`.
    """
    if q_BSHD.shape[2] == 0:
        return scores.nothing(q_BSHD, v_BTKD)
    if kv_head_index is not None:
        index = torch.tensor(kv_head_index, device=k_BTKD.device)
        k_BTKD, v_BTKD = k_BTKD.index_select(2, index), v_BTKD.index_select(2, index)
    if kernel in ("block", "eager"):
        ring = Ring(None, 0, Layout(), (q_BSHD.shape[1], k_BTKD.shape[1]))
        by_tiles = ring_attention if kernel == "block" else reference_ring
        q, k, v = (x.transpose(1, 2) for x in (q_BSHD, k_BTKD, v_BTKD))
        return by_tiles(q, k, v, ring, mask, scores).transpose(1, 2)
    mask = _chunks_as_rows(mask.limited_to(k_BTKD.shape[1]), q_BSHD.shape[0], k_BTKD.shape[1])
    if not isinstance(kernel, str):
        return _call(kernel, q_BSHD, k_BTKD, v_BTKD, mask, scores)
    kernels = {"sdpa": _sdpa, "flash_attn": _flash_attn, "flex": _flex}
    return kernels[kernel](q_BSHD, k_BTKD, v_BTKD, mask, scores)


@functools.lru_cache(maxsize=16)
def _chunks_as_rows(mask: Mask, batch: int, length: int) -> Mask:
    """Chunks are runs of tokens that attend among themselves, as documents are: cut every document at their borders."""
    if mask.chunk is None or mask.kv_segments is not None:
        return mask
    rows = mask.segments or (((0, length),),) * batch
    starts = tuple(tuple(start for start, _ in row) for row in rows)  # chunks count from the sequence's start
    return dataclasses.replace(mask, chunk=None, segments=chunk_segments(rows, mask.chunk, starts))


# ---------------------------------------------------------------------------------------------------------------------
# sdpa: one call per run of tokens, so that the cost follows the mask.


def _sdpa(q_BSHD: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, mask: Mask, scores: Scores) -> Tensor:
    if mask.segments is None:
        return _sdpa_run(q_BSHD, k_BSKD, v_BSKD, mask, scores)
    if len(set(mask.segments)) == 1:  # every row is cut alike: cut the batch as one
        return _sdpa_row(q_BSHD, k_BSKD, v_BSKD, mask.segments[0], mask, scores)
    per_row = [
        _sdpa_row(q, k, v, row, mask, scores)
        for q, k, v, row in zip(q_BSHD.split(1), k_BSKD.split(1), v_BSKD.split(1), mask.segments, strict=True)
    ]
    return torch.cat(per_row)


def _sdpa_row(q: Tensor, k: Tensor, v: Tensor, row: tuple[tuple[int, int], ...], mask: Mask, scores: Scores) -> Tensor:
    """Each run of tokens on its own, zeros between them (padding)."""
    S = q.shape[1]
    cut = sorted({0, S, *(i for run in row for i in run)})
    sizes = [stop - start for start, stop in itertools.pairwise(cut)]
    # One split, not many slices: the gradient of a split is one concatenation, that of a slice a whole zero tensor.
    parts = zip(cut, q.split(sizes, 1), k.split(sizes, 1), v.split(sizes, 1), strict=False)
    starts = {start for start, _ in row}
    out = [
        _sdpa_run(qi, ki, vi, mask, scores) if at in starts else qi.new_zeros(*qi.shape[:3], vi.shape[3])
        for at, qi, ki, vi in parts
    ]
    return torch.cat(out, 1)


def _sdpa_run(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scores: Scores) -> Tensor:
    if mask.window is not None and mask.window < q.shape[1]:
        return _sdpa_window(q, k, v, mask.window, scores)
    k_BKSD, v_BKSD = k.transpose(1, 2), v.transpose(1, 2)
    if q.device.type == "cpu":
        # The CPU kernel reads K and V again for every block of queries: rows of a head side by side are worth a copy.
        k_BKSD, v_BKSD = k_BKSD.contiguous(), v_BKSD.contiguous()
    out_BHSD = _sdpa_call(q.transpose(1, 2), k_BKSD, v_BKSD, is_causal=mask.causal, scale=scores.scale)
    return out_BHSD.transpose(1, 2)


def _sdpa_call(q_BHSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, **options: Any) -> Tensor:
    if q_BHSD.shape[1] != k_BKSD.shape[1]:  # a branch and not a value: compiled, a comparison of sizes may be symbolic
        options["enable_gqa"] = True
    out: Tensor = F.scaled_dot_product_attention(q_BHSD, k_BKSD, v_BKSD, **options)
    return out


def _sdpa_window(q: Tensor, k: Tensor, v: Tensor, window: int, scores: Scores) -> Tensor:
    """A causal sliding window in blocks of `window` queries, each with its own and the previous block of keys.

    Costs O(S * window) time and memory. All blocks run as one batched call: B * blocks rows of `window` queries.
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
    out = _sdpa_call(
        q.flatten(0, 1).transpose(1, 2),
        k.flatten(0, 1).transpose(1, 2),
        v.flatten(0, 1).transpose(1, 2),
        attn_mask=masks.repeat(B, 1, 1)[:, None],
        scale=scores.scale,
    )
    blocks_BSHD: Tensor = out.transpose(1, 2).unflatten(0, (B, blocks)).flatten(1, 2)
    return blocks_BSHD[:, :S]


# ---------------------------------------------------------------------------------------------------------------------
# flex and flash_attn.


def _flex(q_BSHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, mask: Mask, scores: Scores) -> Tensor:
    S, T = q_BSHD.shape[1], k_BTKD.shape[1]
    i = torch.arange(mask.q_start, mask.q_start + S, device=q_BSHD.device)
    j = torch.arange(T, device=q_BSHD.device)
    q, k, v = (x.transpose(1, 2) for x in (q_BSHD, k_BTKD, v_BTKD))
    out, lse = flex(q, k, v, Places(i, j, (mask.q_start + S, T)), mask, scores)
    if scores.sinks is not None:
        out = with_sinks(out, lse, scores.sinks)
    return out.transpose(1, 2)


def _flash_attn(q_BSHD: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, mask: Mask, scores: Scores) -> Tensor:
    flash = import_flash_attn()
    B, S = q_BSHD.shape[:2]
    options = {
        "softmax_scale": scores.scale,
        "causal": mask.causal,
        "window_size": _window_size(mask),
        "softcap": scores.softcap or 0.0,
    }
    if mask.segments is None:
        out: Tensor = flash.flash_attn_func(q_BSHD, k_BSKD, v_BSKD, **options)
        return out
    runs = [(b * S + start, b * S + stop) for b, row in enumerate(mask.segments) for start, stop in row]
    at = torch.cat([torch.arange(start, stop, device=q_BSHD.device) for start, stop in runs])
    sizes = torch.tensor([0, *(stop - start for start, stop in runs)], device=q_BSHD.device)
    ends = sizes.cumsum(0).to(torch.int32)
    q, k, v = (x.flatten(0, 1).index_select(0, at) for x in (q_BSHD, k_BSKD, v_BSKD))
    longest = int(max(stop - start for start, stop in runs))
    packed = flash.flash_attn_varlen_func(q, k, v, ends, ends, longest, longest, **options)
    whole: Tensor = packed.new_zeros(B * S, *packed.shape[1:]).index_copy(0, at, packed).unflatten(0, (B, S))
    return whole


def _window_size(mask: Mask) -> tuple[int, int]:
    """Keys to the left and to the right of a query, -1 for all."""
    if mask.window is None:
        return -1, -1
    return mask.window - 1, 0 if mask.causal else mask.window - 1


# ---------------------------------------------------------------------------------------------------------------------
# Any callable.


def _call(kernel: Any, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scores: Scores) -> Tensor:
    out: Tensor = kernel(q, k, v, causal=mask.causal, scale=scores.scale, **keywords_of(kernel, mask, scores))
    expected = (*q.shape[:3], v.shape[3])
    if tuple(out.shape) != expected:
        raise LongspanError(
            f"the kernel returned the shape {tuple(out.shape)}, [B, S, heads, D] = {expected} is needed"
        )
    return out
