"""Ulysses attention and USP by some heads at a time: what is held is less, and exchanges run beside attention.

The heads go through exchange, attention and exchange back in chunks, one after the other, so that of the tensors
between the two All-to-Alls only one chunk's are there (UPipe, arXiv:2602.21196). A rank's chunk is some of its own KV
groups, or some query heads of one: each KV head travels once, as without chunks. Two things are chosen by themselves:

    overlaps    the next chunk's exchange is under way while one computes, and so is the one before's way home: what is
                not hidden is the first one's way there and the last one's way home, with two chunks' tensors at a time
    lean        saved are q, k, v and the output of my tokens, and the log-sum-exp; not what the exchange brought. So
                the backward exchanges again, in one All-to-All a chunk that brings q, k, v, output and its gradient,
                but no ring's forward and no kernel's runs again

Per rank the forward sends b*S*D*(2Hq + 2Hk)/P * (P-1)/P bytes, as `Ulysses`, and so does the backward; a lean one
(4Hq + 4Hk): 3Hq + 2Hk there, Hq + 2Hk home.

Shape suffixes: B batch, S tokens of the block (of the sequence where there is no ring), L my tokens, H query heads, K
KV heads, D head_dim; lower-case h, k: those of this rank in a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from longspan.attn.methods.base import SavedAttentions
from longspan.attn.methods.ring import Ring, alone
from longspan.attn.score import Scores
from longspan.comm.all_to_all import start_gather_into, start_scatter
from longspan.compat.torch_api import named_range, not_compiled
from longspan.core.heads import HeadShard

if TYPE_CHECKING:
    import torch.distributed as dist

    from longspan.comm.all_to_all import Exchange
    from longspan.core.cache_dtype import CacheDtype


@dataclass(frozen=True, eq=False)
class Chunk:
    """Some heads of every rank.

    Attributes:
        shards: for each rank of the Ulysses group its heads of this chunk; some may have none.
        mine: this rank's.
        ring: attention of all tokens of the block on my heads of this chunk; of one rank where there is no ring.
        first: whether its KV heads come with it; else they are those of the chunk before.
        last: whether no other chunk needs them, so that their gradients go home with it.
    """

    shards: tuple[HeadShard, ...]
    mine: HeadShard
    ring: Ring
    first: bool = True
    last: bool = True


@dataclass(frozen=True, eq=False)
class ChunkedUlysses:
    """The exchange around a ring, chunk by chunk, prepared for a batch: a method.

    Attributes:
        group: the ranks that share the block, each with L tokens; None for one, whose chunks need no exchange.
        chunks: of all heads; every rank has as many, and takes part in each one's collectives.
        replicated: whether some KV head goes to several ranks, so that its gradient is a sum.
        lengths: as in `Ulysses`.
        recompute_all_to_all: whether what the exchange brought is not saved.
        overlaps: whether exchanges run beside attention.
        code: wire dtype of the all-to-all. With `recompute_all_to_all` the backward then uses the rounded output.
    """

    group: dist.ProcessGroup | None
    chunks: tuple[Chunk, ...]
    replicated: bool
    lengths: tuple[int, int] | None = None
    recompute_all_to_all: bool = True
    overlaps: bool = False
    code: CacheDtype = "exact"

    def __call__(
        self, q_BLHD: Tensor, k_BLKD: Tensor, v_BLKD: Tensor, scores: Scores, keeper: SavedAttentions | None = None
    ) -> Tensor:
        """Attention of my tokens' queries, exactly: `[B, L, H, Dv]`.

        Args:
            q_BLHD: my tokens' queries.
            k_BLKD: their keys, or those of another sequence's tokens.
            v_BLKD: values.
            scores: of all heads.
            keeper: of a lean one: keeps output and log-sum-exp in the place of autograd, and has them again when the
                layer is computed again: then nothing is computed or sent.
        """
        grad = torch.is_grad_enabled() and any(
            x is not None and x.requires_grad for x in (q_BLHD, k_BLKD, v_BLKD, scores.sinks)
        )
        keeps = grad or (keeper is not None and keeper.replaying)
        return _apply(q_BLHD, k_BLKD, v_BLKD, scores.sinks, self, scores, keeper if keeps else None)

    def one_message(self, queries: int, keys: int) -> bool:
        """Whether queries and keys are the same tokens, so many of mine, so that they travel together."""
        return queries == keys and (self.lengths is None or self.lengths[0] == self.lengths[1])


@not_compiled
def _apply(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    method: ChunkedUlysses,
    scores: Scores,
    keeper: SavedAttentions | None,
) -> Tensor:
    # A compiler may not look inside: it would give zero gradients for buffers that a collective fills.
    out: Tensor = _ChunkedAttention.apply(q, k, v, sinks, method, scores, keeper)  # type: ignore[no-untyped-call]
    return out


class _ChunkedAttention(torch.autograd.Function):
    """All chunks. What is saved goes by `save_for_backward`, where gradient checkpointing sees it, or to the keeper."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        method: ChunkedUlysses,
        scores: Scores,
        keeper: SavedAttentions | None,
    ) -> Tensor:
        ctx.method, ctx.scores, ctx.kept = method, scores, None
        if not method.recompute_all_to_all:
            saved: list[Tensor] | None = [] if any(ctx.needs_input_grad) else None
            out, lses = _forward(q, k, v, method, scores, saved)
            ctx.like = [(x.shape, x.dtype) for x in (q, k, v)]
            ctx.save_for_backward(sinks, *lses, *(saved or []))
            return out
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
        with named_range("longspan.attention"):
            return _ChunkedAttention._backward(ctx, grad)

    @staticmethod
    def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        method: ChunkedUlysses = ctx.method
        if not method.recompute_all_to_all:
            sinks, *rest = ctx.saved_tensors
            lses, saved = rest[: len(method.chunks)], rest[len(method.chunks) :]
            came = _as_saved(saved, method)
            return *_backward([grad], None, came, lses, sinks, ctx.like, method, ctx.scores), None, None, None
        q, k, v, sinks, *kept = ctx.saved_tensors
        out, *lses = kept if ctx.kept is None else ctx.kept.tensors()
        like = [(x.shape, x.dtype) for x in (q, k, v)]
        grads = _backward([q, out, grad], [k, v], None, lses, sinks, like, method, ctx.scores)
        if ctx.kept is not None:
            ctx.kept.drop()
        return *grads, None, None, None


def _forward(
    q: Tensor, k: Tensor, v: Tensor, method: ChunkedUlysses, scores: Scores, saved: list[Tensor] | None = None
) -> tuple[Tensor, list[Tensor]]:
    """The output of my tokens `[B, L, H, Dv]`, and of every chunk the log-sum-exp [B, h, S].

    `saved` gets what the exchange brought: of each chunk q and output, and k and v where they came with it.
    """
    out = q.new_empty(*q.shape[:3], v.shape[3])
    lses, kv = list[Tensor](), list[Tensor]()

    def start(chunk: Chunk) -> _Coming:
        return _Coming([q], [k, v] if chunk.first else [], chunk, method)

    def compute(at: int, chunk: Chunk, coming: _Coming) -> list[Exchange]:
        (q_here,), brought = coming.take()
        if chunk.first:
            kv[:] = brought
        k_here, v_here = kv
        of_chunk, part = q_here.new_empty(*q_here.shape[:3], v.shape[3]), scores
        lse = q_here.new_empty(q_here.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
        if chunk.mine.q_heads:
            part = scores.of_heads(chunk.mine.q_start, chunk.mine.q_stop)
            of_chunk, lse = chunk.ring.forward(q_here, k_here, v_here, part.sinks, part)
        if saved is not None:
            saved.extend([q_here, of_chunk, *brought])
        del q_here, k_here, v_here, brought
        if chunk.last:
            kv.clear()
        lses.append(lse)
        return _home([out], [of_chunk], ["q"], chunk, method)

    _one_by_one(method, start, compute)
    return out, lses


def _as_saved(saved: list[Tensor], method: ChunkedUlysses) -> list[tuple[Tensor, Tensor, list[Tensor]]]:
    """q, output, and k and v where they came, of each chunk; as `_forward` has saved them."""
    found, rest = [], list(saved)
    for chunk in method.chunks:
        count = 4 if chunk.first else 2
        (q, out, *kv), rest = rest[:count], rest[count:]
        found.append((q, out, kv))
    return found


def _backward(
    of_q: list[Tensor],
    of_kv: list[Tensor] | None,
    came: list[tuple[Tensor, Tensor, list[Tensor]]] | None,
    lses: Sequence[Tensor],
    sinks: Tensor | None,
    like: Sequence[tuple[torch.Size, torch.dtype]],
    method: ChunkedUlysses,
    scores: Scores,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of my tokens' q, k and v, and my heads' part of the sinks'.

    Args:
        of_q: of my tokens, what travels with the query heads: the output's gradient; lean, q, output and gradient.
        of_kv: lean: k and v of my tokens.
        came: otherwise: what the exchange has brought.
        lses: of every chunk.
        sinks: of all heads.
        like: shapes and dtypes of q, k and v.
        method: the method.
        scores: of all heads.
    """
    (q_shape, q_dtype), *kv_like = like
    dq = of_q[0].new_empty(q_shape, dtype=q_dtype)
    # Of a head that went to several ranks they come home in different chunks: added up here, and rounded once.
    wide = torch.promote_types(q_dtype, torch.float32)
    dk, dv = (
        dq.new_zeros(shape, dtype=wide) if method.replicated else dq.new_empty(shape, dtype=dtype)
        for shape, dtype in kv_like
    )
    dsinks = None if sinks is None else torch.zeros_like(sinks)
    kv, sums = list[Tensor](), list[Tensor]()

    def start(chunk: Chunk) -> _Coming:
        # Without lengths of their own, k and v are asked for so that the queries' message is cut as theirs.
        return _Coming(of_q, of_kv or [] if chunk.first else [], chunk, method)

    def compute(at: int, chunk: Chunk, coming: _Coming) -> list[Exchange]:
        queries, brought = coming.take()
        if came is not None:
            q_here, out_here, brought = came[at]
            came[at] = (q_here[:0], out_here[:0], [])
            (grad_here,) = queries
        else:
            q_here, out_here, grad_here = queries
        if chunk.first:
            kv[:] = brought
        k_here, v_here = kv
        dq_here, grads = q_here, [k_here, v_here]  # of no head
        if chunk.mine.q_heads:
            heads = chunk.mine.q_start, chunk.mine.q_stop
            of_sinks = None if sinks is None else sinks[slice(*heads)]
            dq_here, dk_here, dv_here, of_sinks = chunk.ring.backward(
                q_here, k_here, v_here, of_sinks, (out_here, lses[at], grad_here), scores.of_heads(*heads)
            )
            grads = [dk_here, dv_here]
            del dk_here, dv_here
            if dsinks is not None and of_sinks is not None:
                dsinks[slice(*heads)] = of_sinks
            if not (chunk.first and chunk.last):  # several chunks' queries see these keys: added up in fp32, here
                sums[:] = [x.to(wide) for x in grads] if not sums else [a + x for a, x in zip(sums, grads, strict=True)]
        if sums and chunk.last:
            grads = [x.to(dtype) for x, (_, dtype) in zip(sums, kv_like, strict=True)]
            sums.clear()
        del queries, brought, q_here, out_here, grad_here, k_here, v_here
        if chunk.last:
            kv.clear()
        else:
            return _home([dq], [dq_here], ["q"], chunk, method)
        if method.one_message(q_shape[1], kv_like[0][0][1]):
            return _home([dq, dk, dv], [dq_here, *grads], ["q", "kv", "kv"], chunk, method)
        return [
            *_home([dq], [dq_here], ["q"], chunk, method),
            *_home([dk, dv], grads, ["kv", "kv"], chunk, method),
        ]

    _one_by_one(method, start, compute)
    return dq, dk.to(kv_like[0][1]), dv.to(kv_like[1][1]), dsinks


def _one_by_one(
    method: ChunkedUlysses,
    start: Callable[[Chunk], _Coming],
    compute: Callable[[int, Chunk, _Coming], list[Exchange]],
) -> None:
    """All chunks in order, on every rank the same. Where exchanges overlap, the next chunk's is started before one is
    computed, and its results are put in their places when the next one has been computed.
    """
    chunks, coming = method.chunks, start(method.chunks[0])
    home: list[Exchange] = []
    for at, chunk in enumerate(chunks):
        more = at + 1 < len(chunks)
        coming.wait()
        here, coming = coming, start(chunks[at + 1]) if more and method.overlaps else coming
        going = compute(at, chunk, here)
        del here
        for exchange in home:
            exchange.wait()
        home = going
        if more and not method.overlaps:
            for exchange in home:
                exchange.wait()
            home = []
            coming = start(chunks[at + 1])
    for exchange in home:
        exchange.wait()


# ---------------------------------------------------------------------------------------------------------------------
# A chunk's heads, from all tokens and back.


class _Coming:
    """A chunk's heads of all tokens, on their way: one All-to-All, or two where keys have other tokens.

    Args:
        of_q: tensors with query heads, `[B, L, H, D]`.
        of_kv: with KV heads; none where they have come before.
        chunk: whose heads.
        method: the method.
    """

    def __init__(self, of_q: list[Tensor], of_kv: list[Tensor], chunk: Chunk, method: ChunkedUlysses) -> None:
        self._here: tuple[list[Tensor], list[Tensor]] | None = None
        self._under_way: list[tuple[Exchange, list[int], list[int], int | None]] = []
        self._count = len(of_q)
        mine = chunk.mine
        if method.group is None:
            cuts = slice(mine.q_start, mine.q_stop), slice(mine.kv_start, mine.kv_stop)
            self._here = (
                [x[:, :, cuts[0]].transpose(1, 2) for x in of_q],
                [x[:, :, cuts[1]].transpose(1, 2) for x in of_kv],
            )
            return
        q_length, kv_length = method.lengths or (None, None)
        of_both = [*of_q, *of_kv]
        if not of_kv or method.one_message(of_q[0].shape[1], of_kv[0].shape[1]):
            messages = [(of_both, ["q"] * len(of_q) + ["kv"] * len(of_kv), q_length)]
        else:
            messages = [(of_q, ["q"] * len(of_q), q_length), (of_kv, ["kv"] * len(of_kv), kv_length)]
        for xs, kinds, length in messages:
            heads = [mine.q_heads if kind == "q" else mine.kv_heads for kind in kinds]
            exchange = start_scatter(xs, kinds, chunk.shards, method.group, beside=method.overlaps, code=method.code)
            self._under_way.append((exchange, heads, [x.shape[3] for x in xs], length))

    def wait(self) -> None:
        """Until it is here."""
        if self._here is None:
            every = [x for message in self._under_way for x in _arrived(*message)]
            self._under_way.clear()
            self._here = every[: self._count], every[self._count :]

    def take(self) -> tuple[list[Tensor], list[Tensor]]:
        """Of `of_q` and of `of_kv` this chunk's heads, of all tokens: `[B, h, S, D]`, views of what arrived, padding
        cut off. They are the caller's from now on, and nobody else's.
        """
        self.wait()
        assert self._here is not None
        here, self._here = self._here, ([], [])
        return here


def _arrived(exchange: Exchange, heads: list[int], dims: list[int], length: int | None) -> list[Tensor]:
    packed_SBW = exchange.wait()[:length]
    parts = packed_SBW.split([count * d for count, d in zip(heads, dims, strict=True)], -1)
    return [
        part.unflatten(2, (count, d)).permute(1, 2, 0, 3) for part, count, d in zip(parts, heads, dims, strict=True)
    ]


def _home(
    outs: list[Tensor], xs_BhSD: Sequence[Tensor], kinds: list[str], chunk: Chunk, method: ChunkedUlysses
) -> list[Exchange]:
    """A chunk's heads of all tokens on their way to their places of my tokens' `[B, L, H, D]`: one All-to-All."""
    if method.group is None:
        for out, x, kind in zip(outs, xs_BhSD, kinds, strict=True):
            mine = chunk.mine
            heads = (mine.q_start, mine.q_stop) if kind == "q" else (mine.kv_start, mine.kv_stop)
            out[:, :, slice(*heads)] = x.transpose(1, 2)
        return []
    tokens = outs[0].shape[1] * method.group.size()
    packed_SBW = _packed(xs_BhSD, tokens)
    return [
        start_gather_into(
            outs,
            packed_SBW,
            kinds,
            chunk.shards,
            method.group,
            beside=method.overlaps,
            add=method.replicated,
            code=method.code,
        )
    ]


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
