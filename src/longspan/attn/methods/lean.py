"""Ulysses attention and USP that keep little: the heads in chunks, and of each token only its own q, k, v and output.

The heads go through exchange, attention and exchange back in chunks, one after the other, so that of the tensors
between the two All-to-Alls only one chunk's are there (UPipe, arXiv:2602.21196). A rank's chunk is some of its own KV
groups: each KV head travels once, as without chunks. Saved are q, k, v and the output of my tokens, and the
log-sum-exp; not what the exchange brought. So the backward exchanges again, in one All-to-All a chunk that brings q, k,
v, output and its gradient, but no ring's forward and no kernel's runs again.

Per rank the forward sends b*S*D*(2Hq + 2Hk)/P * (P-1)/P bytes, as `Ulysses`; the backward (4Hq + 4Hk) in the place of
its (2Hq + 2Hk): 3Hq + 2Hk there, Hq + 2Hk home.

Shape suffixes: B batch, S tokens of the block (of the sequence where there is no ring), L my tokens, H query heads, K
KV heads, D head_dim; lower-case h, k: those of this rank in a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from longspan.attn.methods.base import Keeper
from longspan.attn.methods.ring import Ring, alone
from longspan.attn.score import Scores
from longspan.comm.all_to_all import gather_heads_into, scatter_heads
from longspan.compat.torch_api import not_compiled
from longspan.core.heads import HeadShard

if TYPE_CHECKING:
    import torch.distributed as dist


@dataclass(frozen=True, eq=False)
class Chunk:
    """Some heads of every rank.

    Attributes:
        shards: for each rank of the Ulysses group its heads of this chunk; some may have none.
        mine: this rank's.
        ring: attention of all tokens of the block on my heads of this chunk; of one rank where there is no ring.
    """

    shards: tuple[HeadShard, ...]
    mine: HeadShard
    ring: Ring


@dataclass(frozen=True, eq=False)
class LeanUlysses:
    """The exchange around a ring, chunk by chunk, prepared for a batch: a method.

    Attributes:
        group: the ranks that share the block, each with L tokens; None for one, whose chunks need no exchange.
        chunks: of all heads; every rank has as many, and takes part in each one's collectives.
        replicated: whether some KV head goes to several ranks, so that its gradient is a sum.
        lengths: as in `Ulysses`.
    """

    group: dist.ProcessGroup | None
    chunks: tuple[Chunk, ...]
    replicated: bool
    lengths: tuple[int, int] | None = None

    def __call__(
        self, q_BLHD: Tensor, k_BLKD: Tensor, v_BLKD: Tensor, scores: Scores, keeper: Keeper | None = None
    ) -> Tensor:
        """Attention of my tokens' queries, exactly: `[B, L, H, Dv]`.

        Args:
            q_BLHD: my tokens' queries.
            k_BLKD: their keys, or those of another sequence's tokens.
            v_BLKD: values.
            scores: of all heads.
            keeper: keeps output and log-sum-exp in the place of autograd, and has them again when the layer is
                computed again: then nothing is computed or sent.
        """
        grad = torch.is_grad_enabled() and any(
            x is not None and x.requires_grad for x in (q_BLHD, k_BLKD, v_BLKD, scores.sinks)
        )
        keeps = grad or (keeper is not None and keeper.replaying)
        return _apply(q_BLHD, k_BLKD, v_BLKD, scores.sinks, self, scores, keeper if keeps else None)


@not_compiled
def _apply(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    method: LeanUlysses,
    scores: Scores,
    keeper: Keeper | None,
) -> Tensor:
    # A compiler may not look inside: it would give zero gradients for buffers that a collective fills.
    out: Tensor = _LeanAttention.apply(q, k, v, sinks, method, scores, keeper)  # type: ignore[no-untyped-call]
    return out


class _LeanAttention(torch.autograd.Function):
    """All chunks. What is saved goes by `save_for_backward`, where gradient checkpointing sees it, or to the keeper."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        method: LeanUlysses,
        scores: Scores,
        keeper: Keeper | None,
    ) -> Tensor:
        ctx.method, ctx.scores, ctx.kept = method, scores, None
        if keeper is None:
            out, lses = _forward(q, k, v, method, scores)
            if any(ctx.needs_input_grad) and not alone(q, k, v):
                # What a model cut out of one projection would keep all of it; what it has changed since, only itself.
                q, k, v = (x if alone(x) else x.clone(memory_format=torch.contiguous_format) for x in (q, k, v))
            ctx.save_for_backward(q, k, v, sinks, out, *lses)
            return out
        ctx.save_for_backward(q, k, v, sinks)
        if keeper.replaying:
            ctx.kept = keeper.take()
            (out, *_) = ctx.kept.tensors()
        else:
            out, lses = _forward(q, k, v, method, scores)
            ctx.kept = keeper.keep([out, *lses])
        # Not the tensor that is kept: it would know this node, which knows what is kept.
        return out.detach()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        q, k, v, sinks, *kept = ctx.saved_tensors
        out, *lses = kept if ctx.kept is None else ctx.kept.tensors()
        grads = _backward((q, k, v), (out, lses, grad), sinks, ctx.method, ctx.scores)
        if ctx.kept is not None:
            ctx.kept.drop()
        return *grads, None, None, None


def _forward(q: Tensor, k: Tensor, v: Tensor, method: LeanUlysses, scores: Scores) -> tuple[Tensor, list[Tensor]]:
    """The output of my tokens `[B, L, H, Dv]`, and of every chunk the log-sum-exp [B, h, S]."""
    out = q.new_empty(*q.shape[:3], v.shape[3])
    lses = []
    for chunk in method.chunks:
        (q_here,), (k_here, v_here) = _scatter([q], [k, v], chunk, method)
        of_chunk, part = q_here.new_empty(*q_here.shape[:3], v.shape[3]), scores
        lse = q_here.new_empty(q_here.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
        if chunk.mine.q_heads:
            part = scores.of_heads(chunk.mine.q_start, chunk.mine.q_stop)
            of_chunk, lse = chunk.ring.forward(q_here, k_here, v_here, part.sinks, part)
        del q_here, k_here, v_here
        _gather([out], [of_chunk], ["q"], chunk, method)
        del of_chunk  # before the next chunk's exchange
        lses.append(lse)
    return out, lses


def _backward(
    qkv: tuple[Tensor, Tensor, Tensor],
    done: tuple[Tensor, list[Tensor], Tensor],
    sinks: Tensor | None,
    method: LeanUlysses,
    scores: Scores,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of my tokens' q, k and v, and my heads' part of the sinks'."""
    (q, k, v), (out, lses, grad) = qkv, done
    dq = q.new_empty(q.shape)
    # Of a head that went to several ranks they come home in different chunks: added up here, and rounded once.
    wide = torch.promote_types(q.dtype, torch.float32)
    dk, dv = (x.new_zeros(x.shape, dtype=wide) if method.replicated else x.new_empty(x.shape) for x in (k, v))
    dsinks = None if sinks is None else torch.zeros_like(sinks)
    for chunk, lse in zip(method.chunks, lses, strict=True):
        (q_here, out_here, grad_here), (k_here, v_here) = _scatter([q, out, grad], [k, v], chunk, method)
        grads = [q_here, k_here, v_here]  # of no head
        if chunk.mine.q_heads:
            heads = chunk.mine.q_start, chunk.mine.q_stop
            part = scores.of_heads(*heads)
            of_sinks = None if sinks is None else sinks[slice(*heads)]
            dq_here, dk_here, dv_here, of_sinks = chunk.ring.backward(
                q_here, k_here, v_here, of_sinks, (out_here, lse, grad_here), part
            )
            grads = [dq_here, dk_here, dv_here]
            del dq_here, dk_here, dv_here
            if dsinks is not None and of_sinks is not None:
                dsinks[slice(*heads)] = of_sinks
        del q_here, out_here, grad_here, k_here, v_here
        if _one_message(q, k, method):
            _gather([dq, dk, dv], grads, ["q", "kv", "kv"], chunk, method)
        else:
            _gather([dq], grads[:1], ["q"], chunk, method)
            _gather([dk, dv], grads[1:], ["kv", "kv"], chunk, method)
        del grads
    return dq, dk.to(k.dtype), dv.to(v.dtype), dsinks


# ---------------------------------------------------------------------------------------------------------------------
# A chunk's heads, from all tokens and back.


def _one_message(q_BLHD: Tensor, k_BLKD: Tensor, method: LeanUlysses) -> bool:
    """Whether queries and keys are the same tokens, so that they travel together."""
    lengths = method.lengths
    return q_BLHD.shape[1] == k_BLKD.shape[1] and (lengths is None or lengths[0] == lengths[1])


def _scatter(
    of_q: list[Tensor], of_kv: list[Tensor], chunk: Chunk, method: LeanUlysses
) -> tuple[list[Tensor], list[Tensor]]:
    """Of tensors with query heads `[B, L, H, D]` and with KV heads those of this chunk, of all tokens: `[B, h, S, D]`.

    They are views of what arrived.
    """
    q_heads, kv_heads = (chunk.mine.q_start, chunk.mine.q_stop), (chunk.mine.kv_start, chunk.mine.kv_stop)
    if method.group is None:
        of_q, of_kv = (
            [x[:, :, slice(*heads)].transpose(1, 2) for x in xs] for xs, heads in ((of_q, q_heads), (of_kv, kv_heads))
        )
        return of_q, of_kv
    q_length, kv_length = method.lengths or (None, None)
    if _one_message(of_q[0], of_kv[0], method):
        here = _exchanged(of_q + of_kv, ["q"] * len(of_q) + ["kv"] * len(of_kv), chunk, method.group, q_length)
        return here[: len(of_q)], here[len(of_q) :]
    return (
        _exchanged(of_q, ["q"] * len(of_q), chunk, method.group, q_length),
        _exchanged(of_kv, ["kv"] * len(of_kv), chunk, method.group, kv_length),
    )


def _exchanged(
    xs: list[Tensor], kinds: list[str], chunk: Chunk, group: dist.ProcessGroup, length: int | None
) -> list[Tensor]:
    """One All-to-All; the padding, from `length` on, cut off."""
    packed_SBW = scatter_heads(xs, kinds, chunk.shards, group)[:length]
    counts = [chunk.mine.q_heads if kind == "q" else chunk.mine.kv_heads for kind in kinds]
    parts = packed_SBW.split([count * x.shape[3] for count, x in zip(counts, xs, strict=True)], -1)
    return [
        part.unflatten(2, (count, x.shape[3])).permute(1, 2, 0, 3)
        for part, count, x in zip(parts, counts, xs, strict=True)
    ]


def _gather(outs: list[Tensor], xs_BhSD: Sequence[Tensor], kinds: list[str], chunk: Chunk, method: LeanUlysses) -> None:
    """A chunk's heads of all tokens into their places of my tokens' `[B, L, H, D]`: one All-to-All."""
    if method.group is None:
        for out, x, kind in zip(outs, xs_BhSD, kinds, strict=True):
            mine = chunk.mine
            heads = (mine.q_start, mine.q_stop) if kind == "q" else (mine.kv_start, mine.kv_stop)
            out[:, :, slice(*heads)] = x.transpose(1, 2)
        return
    tokens = outs[0].shape[1] * method.group.size()
    packed_SBW = _packed(xs_BhSD, tokens)
    gather_heads_into(outs, packed_SBW, kinds, chunk.shards, method.group, add=method.replicated)


def _packed(xs_BhSD: Sequence[Tensor], tokens: int) -> Tensor:
    """`[tokens, B, W]`: rows of all tensors' heads; zeros for the padding that was cut off."""
    batch, _, length, _ = xs_BhSD[0].shape
    if len(xs_BhSD) == 1 and length == tokens:
        return xs_BhSD[0].permute(2, 0, 1, 3).flatten(2)
    widths = [x.shape[1] * x.shape[3] for x in xs_BhSD]
    packed = xs_BhSD[0].new_empty(tokens, batch, sum(widths))
    for part, x in zip(packed[:length].split(widths, -1), xs_BhSD, strict=True):
        part.unflatten(2, (x.shape[1], x.shape[3])).copy_(x.permute(2, 0, 1, 3))
    packed[length:] = 0
    return packed
