"""Exact attention over a sharded sequence: `attention()` composes mask, local kernel and exchange."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from longspan.attention.local import Kernel, Scores, check_kernel, local_attention
from longspan.attention.mask import Mask
from longspan.attention.ulysses import ulysses_attention
from longspan.errors import LongspanError
from longspan.layout import split_heads
from longspan.shard import document_rows

if TYPE_CHECKING:
    from longspan.mesh import SequenceSharding

__all__ = ["Kernel", "Mask", "Scores", "attend", "attention"]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sp: SequenceSharding,
    *,
    causal: bool = True,
    length: int | None = None,
    window: int | None = None,
    documents: Tensor | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    kernel: Kernel = "auto",
) -> Tensor:
    """My queries over the whole sequence, exactly, with gradients.

    Args:
        q: my tokens, `[batch, tokens, query heads, head_dim]`, as `sp.shard` cut them.
        k: my tokens, `[batch, tokens, KV heads, head_dim]`; the KV heads divide the query heads (MHA, GQA, MQA).
        v: as `k`; its head_dim may differ.
        sp: the sharding.
        causal: whether a token sees only itself and what comes before it.
        length: real tokens of the whole sequence, where `sp.shard` padded; by default all that the ranks hold.
        window: a token sees the last `window` tokens, itself included. Needs `causal`.
        documents: int64 `[batch, length]`, an id for every token of the whole sequence, the same on every rank;
            tokens of different ids do not see each other, an id below 0 is padding. (Read on the host once a call.)
        sinks: one learnt logit per query head, `[query heads]` (gpt-oss). Its gradient is this rank's part.
        softcap: scores become softcap * tanh(scores / softcap) (Gemma-2).
        scale: of the scores; 1/sqrt(head_dim) by default.
        dropout: only 0.0. A random mask that does not depend on the number of ranks has no kernel, so it is refused.
        kernel: the local attention, by name or any callable; see `longspan.attention.local.local_attention`.

    Returns:
        `[batch, tokens, query heads, head_dim of v]`. In fp32 it is to the bit what the same kernel gives on one
        device.

    Raises:
        LongspanError: for tensors of wrong rank, dtypes or shapes that do not fit, heads that do not, and whatever
            the kernel cannot do. All of it from facts that are alike on every rank, before anything is sent.
    """
    _check_tensors(q, k, v)
    if dropout:
        raise LongspanError(
            f"dropout={dropout}: attention dropout that does not depend on the number of ranks is not supported; use "
            "0.0"
        )
    n = q.shape[1] * sp.size if length is None else length
    if documents is not None and tuple(documents.shape) != (q.shape[0], n):
        raise LongspanError(
            f"`documents` has the shape {tuple(documents.shape)}, it needs an id for every token of the whole "
            f"sequence: {(q.shape[0], n)}"
        )
    mask = Mask(causal, window, None if documents is None else document_rows(documents))
    return attend(q, k, v, sp, mask, Scores(scale, softcap, sinks), length=n, kernel=kernel)


def attend(
    q: Tensor, k: Tensor, v: Tensor, sp: SequenceSharding, mask: Mask, scores: Scores, *, length: int, kernel: Kernel
) -> Tensor:
    """`attention` with its mask and scores as values: what the model integration calls, once per layer."""
    _check_tensors(q, k, v)
    if sp.layout.local_length(length) != q.shape[1]:
        raise LongspanError(
            f"a sequence of length={length} over {sp.size} ranks gives {sp.layout.local_length(length)} tokens to "
            f"each, the tensors have {q.shape[1]}; cut them with sp.shard"
        )
    mask.check(q.shape[0], length)
    if scores.sinks is not None and tuple(scores.sinks.shape) != (q.shape[2],):
        raise LongspanError(f"`sinks` has the shape {tuple(scores.sinks.shape)}, one per query head is {(q.shape[2],)}")
    split_heads(q.shape[2], k.shape[2], sp.size, kv_replication=sp.kv_replication)
    grad = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    check_kernel(kernel, mask.limited_to(length), scores, device=q.device, grad=grad)
    if sp.size == 1 or sp.group is None:
        return local_attention(q, k, v, mask, scores, kernel)
    return ulysses_attention(q, k, v, sp.group, length, mask, scores, kernel, kv_replication=sp.kv_replication)


def _check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    shapes = {name: tuple(x.shape) for name, x in (("q", q), ("k", k), ("v", v))}
    spelled = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
    if any(len(shape) != 4 for shape in shapes.values()):
        raise LongspanError(f"attention needs [batch, tokens, heads, head_dim], four dimensions each, got {spelled}")
    if len({x.dtype for x in (q, k, v)}) > 1 or not q.is_floating_point():
        raise LongspanError(
            f"attention needs q, k and v of one floating dtype, got q {q.dtype}, k {k.dtype}, v {v.dtype}; cast them"
        )
    if len({shape[:2] for shape in shapes.values()}) > 1:
        raise LongspanError(f"q, k and v must have the same batch and tokens, got {spelled}")
    if min(q.shape[:2]) < 1:
        raise LongspanError(f"attention over no tokens: q has the shape {shapes['q']}")
    if shapes["q"][3] != shapes["k"][3] or shapes["k"][2] != shapes["v"][2]:
        raise LongspanError(f"q and k need the same head_dim, k and v the same number of heads, got {spelled}")
