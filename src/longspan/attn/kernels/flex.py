"""FlexAttention as a kernel: one compiled call for any mask and score (torch.nn.attention.flex_attention).

Masks and scores go by positions in the whole sequence, given for queries and keys, so that the same call serves one
device, all tokens of a Ulysses rank, and one block of a ring. It has no backward on a CPU.

Shape suffixes: B batch, H query heads, K KV heads, Q queries, T keys, D head_dim.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longspan.attn.kernels.tiled import Finished, SoftmaxAccumulator
from longspan.attn.mask import Mask
from longspan.attn.score import Scores
from longspan.core.layout import Span


@dataclass(frozen=True, eq=False)
class Places:
    """Where queries and keys lie in the whole sequence.

    Attributes:
        i: positions of the queries, int64 [Q].
        j: positions of the keys, int64 [T].
        ends: positions from which on queries and keys are padding.
    """

    i: Tensor
    j: Tensor
    ends: Span


def flex(
    q_BHQD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, places: Places, mask: Mask, scores: Scores
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of some queries over some keys; sinks are left out.

    Returns:
        [B, H, Q, Dv] and fp32 [B, H, Q], zero and -inf where a query sees none of these keys.
    """
    from torch.nn.attention.flex_attention import AuxRequest, create_block_mask

    B, H, Q = q_BHQD.shape[:3]
    T = k_BKTD.shape[2]
    on_gpu = q_BHQD.device.type != "cpu"
    rows = B if mask.by_row or mask.mod is not None else None
    heads = H if mask.mod is not None else None
    allowed = _mask_function(mask, scores, B, places)
    block_mask = create_block_mask(allowed, rows, heads, Q, T, device=q_BHQD.device, _compile=on_gpu)
    out, aux = _flex_attention(on_gpu)(
        q_BHQD,
        k_BKTD,
        v_BKTD,
        score_mod=_score_function(scores, places),
        block_mask=block_mask,
        scale=scores.scale,
        enable_gqa=k_BKTD.shape[1] != H,
        return_aux=AuxRequest(lse=True),
    )
    return out, aux.lse


def forward(
    partial: SoftmaxAccumulator,
    q_BHQD: Tensor,
    k_BKTD: Tensor,
    v_BKTD: Tensor,
    places: Places,
    mask: Mask,
    scores: Scores,
) -> None:
    """Add my queries' attention to one block of keys to `partial`: what `tiles.forward` does, in one call."""
    out, lse = flex(q_BHQD, k_BKTD, v_BKTD, places, mask, scores)
    partial.add(out, lse, (0, q_BHQD.shape[0]), (0, q_BHQD.shape[2]))


def backward(
    done: Finished,
    k_BKTD: Tensor,
    v_BKTD: Tensor,
    places: Places,
    mask: Mask,
    scores: Scores,
    into: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Add one block's dq, dk and dv to `into`, by its forward once more and FlexAttention's own backward.

    The whole output is the sum of partial outputs o_b with weights w_b = exp(lse_b - lse), so the gradient that
    reaches o_b is w_b dO, and the one that reaches lse_b is w_b (dO . (o_b - O)).
    """
    with torch.enable_grad():
        q, k, v = (x.detach().requires_grad_() for x in (done.q, k_BKTD, v_BKTD))
        out, lse = flex(q, k, v, places, mask, scores)
    part, wide = out.detach().to(done.lse.dtype), done.grad.to(done.lse.dtype)
    weight = (lse.detach() - done.lse).exp()
    grad_out = weight[..., None] * wide
    grad_lse = (grad_out * (part - done.out)).sum(-1)
    grads = torch.autograd.grad([out, lse], [q, k, v], [grad_out.to(out.dtype), grad_lse.to(lse.dtype)])
    for total, more in zip(into, grads, strict=True):
        total += more


def _mask_function(mask: Mask, scores: Scores, B: int, places: Places) -> Any:
    """The mask as FlexAttention takes it: a function of a row, head, query and key, by their places in the tensors."""
    i, j, ends = places.i, places.j, places.ends
    q_ids, k_ids = mask.ids(B, i, j)
    prefix = mask.prefix
    prefixes = torch.tensor(prefix if isinstance(prefix, tuple) else [prefix or 0] * B, device=i.device)

    def allowed(b: Tensor, h: Tensor, at_q: Tensor, at_k: Tensor) -> Tensor:
        q, kv = i[at_q], j[at_k]
        ok = torch.ones_like(kv, dtype=torch.bool)
        if mask.causal:
            ok = ok & (kv <= q)
        if mask.window is not None:
            ok = ok & (q - kv < mask.window) & (kv - q < mask.window)
        if mask.chunk is not None:
            ok = ok & (q // mask.chunk == kv // mask.chunk)
        if mask.prefix is not None:
            ok = ok | (kv < prefixes[b])
        if mask.segments is not None:
            ok = ok & (q_ids[b, at_q] == k_ids[b, at_k]) & (q_ids[b, at_q] >= 0)
        ok = ok & (q < ends[0]) & (kv < ends[1])
        return ok if mask.mod is None else ok & mask.mod(b, h + scores.first_head, q, kv)

    return allowed


def _score_function(scores: Scores, places: Places) -> Any:
    """Softcap and biases as FlexAttention takes them; None for neither."""
    if scores.softcap is None and not scores.has_bias:
        return None

    def changed(score: Tensor, b: Tensor, h: Tensor, at_q: Tensor, at_k: Tensor) -> Tensor:
        q, kv = places.i[at_q], places.j[at_k]
        if scores.softcap is not None:
            score = scores.softcap * torch.tanh(score / scores.softcap)
        if scores.alibi is not None:
            score = score - scores.alibi[h] * (q - kv).abs()
        if scores.bias is not None:
            score = score + scores.bias(h + scores.first_head, q, kv)
        return score

    return changed


@functools.cache
def _flex_attention(compiled: bool) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False) if compiled else flex_attention


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """The output when one more key per head, of value zero, takes part in the softmax."""
    weight = torch.sigmoid(lse - sinks.to(lse.dtype)[:, None])
    return out * torch.where(torch.isneginf(lse), 0.0, weight)[..., None].to(out.dtype)
