"""Attention on one device: all tokens, my heads. Kernels by name, or any callable.

`eager` is the plain reference: the formula written out, every mask, every option, S x S memory. `sdpa` is the default:
whatever kernel torch picks under `scaled_dot_product_attention`, with windows and documents cut into calls whose cost
follows the mask.

Shape suffixes: B batch, S tokens, H query heads, K KV heads, D head_dim.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from longspan.attention.mask import Mask
from longspan.errors import LongspanError

Kernel = str | Callable[..., Tensor]


@dataclass(frozen=True)
class Scores:
    """How scores are made from Q and K: scale * q.k, then softcap; sinks join the softmax's denominator.

    Attributes:
        scale: None for 1/sqrt(head_dim).
        softcap: scores become softcap * tanh(scores / softcap) (Gemma-2).
        sinks: one learnt logit per query head, [H]; it takes weight from the keys and adds no value (gpt-oss).
    """

    scale: float | None = None
    softcap: float | None = None
    sinks: Tensor | None = None

    def __post_init__(self) -> None:
        if self.softcap is not None and self.softcap <= 0:
            raise LongspanError(f"softcap={self.softcap} must be above 0; leave it out for no softcap")


def local_attention(
    q_BSHD: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, mask: Mask, scores: Scores, kernel: Kernel = "auto"
) -> Tensor:
    """Exact attention of all tokens on this device's heads.

    Args:
        q_BSHD: queries. Any strides with a contiguous last dimension.
        k_BSKD: keys; K divides H.
        v_BSKD: values; their head_dim may differ.
        mask: who attends to whom. A query that may attend to nothing gives zero.
        scores: scale, softcap, sinks.
        kernel: "auto" (= "sdpa"), "sdpa", "flash_attn", "flex", "eager", or a callable
            `f(q, k, v, *, causal, scale, **more)` on `[B, S, heads, D]`; `more` holds `window`, `rows`, `softcap`,
            `sinks` when they are set, and a callable that has no such keyword is refused.

    Returns:
        `[B, S, H, Dv]`.

    Raises:
        LongspanError: for an unknown kernel, one that is not installed, or one that cannot take the mask or scores.
    """
    if q_BSHD.shape[2] == 0:  # a rank without heads still belongs to the graph, or its exchange would have no backward
        return q_BSHD.new_empty(*q_BSHD.shape[:3], v_BSKD.shape[3]) + q_BSHD.sum()
    mask = mask.limited_to(q_BSHD.shape[1])
    if not isinstance(kernel, str):
        return _call(kernel, q_BSHD, k_BSKD, v_BSKD, mask, scores)
    kernels = {"auto": _sdpa, "sdpa": _sdpa, "flash_attn": _flash_attn, "flex": _flex, "eager": _eager}
    return kernels[kernel](q_BSHD, k_BSKD, v_BSKD, mask, scores)


def check_kernel(kernel: Kernel, mask: Mask, scores: Scores, *, device: torch.device, grad: bool) -> None:
    """Refuse what `kernel` cannot do, before anything is sent.

    Raises:
        LongspanError: as `local_attention`.
    """
    more = [name for name in ("softcap", "sinks") if getattr(scores, name) is not None]
    if callable(kernel):
        _keywords(kernel, mask, scores)
        return
    if kernel not in ("auto", "sdpa", "flash_attn", "flex", "eager"):
        raise LongspanError(
            f"kernel={kernel!r} is unknown; choose auto, sdpa, flash_attn, flex, eager, or pass a callable"
        )
    if kernel in ("auto", "sdpa") and more:
        raise LongspanError(
            f"kernel={kernel!r} cannot do {' or '.join(more)}; use kernel='eager' (exact, but its memory grows with "
            f"the square of the tokens){', or kernel=flex on a GPU' if more == ['softcap'] else ''}"
        )
    if kernel == "flex":
        if "sinks" in more:
            raise LongspanError("kernel='flex' cannot do sinks in this version; use kernel='eager'")
        if device.type == "cpu" and grad:
            raise LongspanError("kernel='flex': FlexAttention has no backward on CPU; use kernel='sdpa' or 'eager'")
    if kernel == "flash_attn":
        if "sinks" in more:
            raise LongspanError("kernel='flash_attn' cannot do sinks; use kernel='eager'")
        _import_flash_attn()


# ---------------------------------------------------------------------------------------------------------------------
# eager: the formula.


def _eager(q_BSHD: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, mask: Mask, scores: Scores) -> Tensor:
    B, S, H, D = q_BSHD.shape
    dtype = torch.promote_types(q_BSHD.dtype, torch.float32)
    group = H // k_BSKD.shape[2]
    k_BHSD = k_BSKD.transpose(1, 2).repeat_interleave(group, 1).to(dtype)
    v_BHSD = v_BSKD.transpose(1, 2).repeat_interleave(group, 1).to(dtype)
    x_BHSS = q_BSHD.transpose(1, 2).to(dtype) @ k_BHSD.transpose(2, 3)
    x_BHSS = x_BHSS * (1 / math.sqrt(D) if scores.scale is None else scores.scale)
    if scores.softcap is not None:
        x_BHSS = scores.softcap * torch.tanh(x_BHSS / scores.softcap)
    x_BHSS = x_BHSS.masked_fill(~mask.dense(B, S, q_BSHD.device)[:, None], -math.inf)
    if scores.sinks is not None:
        sink = scores.sinks.to(dtype).view(1, H, 1, 1).expand(B, H, S, 1)
        p_BHSS = torch.cat([x_BHSS, sink], -1).softmax(-1)[..., :-1]
    else:
        dead = torch.isneginf(x_BHSS).all(-1, keepdim=True)  # a softmax over nothing is NaN, here it is zero
        p_BHSS = x_BHSS.masked_fill(dead, 0).softmax(-1).masked_fill(dead, 0)
    return (p_BHSS @ v_BHSD).transpose(1, 2).to(q_BSHD.dtype)


# ---------------------------------------------------------------------------------------------------------------------
# sdpa: one call per run of tokens, so that the cost follows the mask.


def _sdpa(q_BSHD: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, mask: Mask, scores: Scores) -> Tensor:
    if mask.rows is None:
        return _sdpa_run(q_BSHD, k_BSKD, v_BSKD, mask, scores)
    if len(set(mask.rows)) == 1:  # every row is cut alike: cut the batch as one
        return _sdpa_row(q_BSHD, k_BSKD, v_BSKD, mask.rows[0], mask, scores)
    per_row = [
        _sdpa_row(q, k, v, row, mask, scores)
        for q, k, v, row in zip(q_BSHD.split(1), k_BSKD.split(1), v_BSKD.split(1), mask.rows, strict=True)
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


def _flex(q_BSHD: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, mask: Mask, scores: Scores) -> Tensor:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    B, S = q_BSHD.shape[:2]
    ids = mask.ids(B, S, q_BSHD.device)

    def allowed(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        ok = (ids[b, i] == ids[b, j]) & (ids[b, i] >= 0)
        if mask.causal:
            ok = ok & (j <= i)
        return ok if mask.window is None else ok & (i - j < mask.window)

    def capped(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        assert scores.softcap is not None
        return scores.softcap * torch.tanh(score / scores.softcap)

    on_gpu = q_BSHD.device.type != "cpu"
    run: Any = _compiled_flex() if on_gpu else flex_attention
    plain = mask.rows is None and not mask.causal and mask.window is None
    rows = B if mask.rows is not None else None
    block_mask = None if plain else create_block_mask(allowed, rows, None, S, S, device=q_BSHD.device, _compile=on_gpu)
    out: Tensor = run(
        q_BSHD.transpose(1, 2),
        k_BSKD.transpose(1, 2),
        v_BSKD.transpose(1, 2),
        score_mod=None if scores.softcap is None else capped,
        block_mask=block_mask,
        scale=scores.scale,
        enable_gqa=q_BSHD.shape[2] != k_BSKD.shape[2],
    )
    return out.transpose(1, 2)


@functools.cache
def _compiled_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def _import_flash_attn() -> Any:
    try:
        return importlib.import_module("flash_attn")
    except ImportError as error:
        raise LongspanError(
            f"kernel='flash_attn' is not installed ({error}); `pip install flash-attn`, or use kernel='sdpa'"
        ) from error


def _flash_attn(q_BSHD: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, mask: Mask, scores: Scores) -> Tensor:
    flash = _import_flash_attn()
    B, S = q_BSHD.shape[:2]
    options = {
        "softmax_scale": scores.scale,
        "causal": mask.causal,
        "window_size": (-1, -1) if mask.window is None else (mask.window - 1, 0),
        "softcap": scores.softcap or 0.0,
    }
    if mask.rows is None:
        out: Tensor = flash.flash_attn_func(q_BSHD, k_BSKD, v_BSKD, **options)
        return out
    runs = [(b * S + start, b * S + stop) for b, row in enumerate(mask.rows) for start, stop in row]
    at = torch.cat([torch.arange(start, stop, device=q_BSHD.device) for start, stop in runs])
    sizes = torch.tensor([0, *(stop - start for start, stop in runs)], device=q_BSHD.device)
    ends = sizes.cumsum(0).to(torch.int32)
    q, k, v = (x.flatten(0, 1).index_select(0, at) for x in (q_BSHD, k_BSKD, v_BSKD))
    longest = int(max(stop - start for start, stop in runs))
    packed = flash.flash_attn_varlen_func(q, k, v, ends, ends, longest, longest, **options)
    whole: Tensor = packed.new_zeros(B * S, *packed.shape[1:]).index_copy(0, at, packed).unflatten(0, (B, S))
    return whole


# ---------------------------------------------------------------------------------------------------------------------
# Any callable.


def _keywords(kernel: Callable[..., Tensor], mask: Mask, scores: Scores) -> dict[str, Any]:
    extra = {"window": mask.window, "rows": mask.rows, "softcap": scores.softcap, "sinks": scores.sinks}
    extra = {name: value for name, value in extra.items() if value is not None}
    name = getattr(kernel, "__name__", repr(kernel))
    try:
        parameters = inspect.signature(kernel).parameters.values()
    except ValueError as error:
        raise LongspanError(
            f"the kernel {name} has no Python signature; wrap it in a function f(q, k, v, *, causal, scale)"
        ) from error
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        missing = sorted({"causal", "scale", *extra} - {p.name for p in parameters})
        if missing:
            raise LongspanError(f"the kernel {name} has no keyword {', '.join(missing)}, which this attention needs")
    return extra


def _call(kernel: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, mask: Mask, scores: Scores) -> Tensor:
    out = kernel(q, k, v, causal=mask.causal, scale=scores.scale, **_keywords(kernel, mask, scores))
    expected = (*q.shape[:3], v.shape[3])
    if tuple(out.shape) != expected:
        raise LongspanError(
            f"the kernel returned the shape {tuple(out.shape)}, [B, S, heads, D] = {expected} is needed"
        )
    return out
