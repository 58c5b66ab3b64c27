"""Ulysses and USP by chunks of heads: to hold less between the two all-to-alls, or to overlap them with attention.

Each chunk of heads goes through all-to-all, attention and all-to-all back, one chunk after the other, so that only one
chunk's tensors exist between the two all-to-alls (UPipe, arXiv:2602.21196). A rank's chunk is one or more of its KV
groups, or some query heads of one group: every KV head is sent once, as without chunks. Two choices are independent:

    overlaps              send the next chunk and the previous chunk's output while one computes. Exposed are the first
                          chunk's scatter and the last chunk's gather; two chunks' tensors exist at a time.
    recompute_all_to_all  save local q, k, v, the output and the log-sum-exp, not what the all-to-all received. The
                          backward sends q, k, v, output and its gradient in one all-to-all per chunk, but recomputes
                          no ring and no kernel.

Per rank a forward sends b*S*D*(2Hq + 2Hk)/P * (P-1)/P bytes, as `Ulysses`, and so does the backward; with
`recompute_all_to_all` the backward sends (4Hq + 4Hk): 3Hq + 2Hk to scatter, Hq + 2Hk to gather.

Shape suffixes: B batch, S tokens of the block (the sequence if there is no ring), T keys of the block, L local tokens,
H query heads, K KV heads, h and k those of this rank in a chunk, D head_dim of q and k, V of v, W packed row.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from longspan.attn.kernels.base import tokens_first
from longspan.attn.methods.base import SavedAttentions
from longspan.attn.methods.local import LocalAttention, owns_storage
from longspan.attn.score import Scores
from longspan.comm.all_to_all import copy_wide, head_spans, start_gather, start_scatter, write_heads
from longspan.compat.torch_api import named_range, not_compiled
from longspan.core.heads import HeadShard
from longspan.core.layout import Span

if TYPE_CHECKING:
    import torch.distributed as dist

    from longspan.comm.all_to_all import AllToAll


@dataclass(frozen=True, eq=False)
class HeadChunk:
    """Some heads of every rank."""

    shards: tuple[HeadShard, ...]  # the chunk's heads of each rank of the Ulysses group; some ranks may have none
    local: HeadShard  # this rank's
    attention: LocalAttention  # of all tokens of the block on the local heads, or their `Ring`
    first_of_kv: bool = True  # whether this chunk receives its KV heads; otherwise they are those of the previous chunk
    last_of_kv: bool = True  # whether no later chunk needs these KV heads, so that their gradients are sent back


@dataclass(frozen=True, eq=False)
class ChunkedUlysses:
    """All-to-alls around a ring, chunk by chunk: an `AttentionMethod`."""

    # The ranks that share the block, each with L tokens; None for one rank, whose chunks need no all-to-all.
    group: dist.ProcessGroup | None
    chunks: tuple[HeadChunk, ...]  # of all heads; every rank has the same number, and joins each one's collectives
    sums_kv_heads: bool  # whether a KV head is sent to several ranks, so that its gradient is a sum
    trim_to: tuple[int, int] | None = None  # as in `Ulysses`
    # Whether the backward recomputes the all-to-all instead of saving what it received.
    recompute_all_to_all: bool = True
    overlaps: bool = False  # whether all-to-alls overlap with attention

    def __call__(
        self,
        q_BLHD: Tensor,
        k_BLKD: Tensor,
        v_BLKV: Tensor,
        scores: Scores,
        saved_attentions: SavedAttentions | None = None,
    ) -> Tensor:
        """Return the attention of the local queries, exactly: `[B, L, H, V]`. Keys may belong to another sequence.

        With `recompute_all_to_all`, `saved_attentions` saves output and log-sum-exp instead of autograd. When the layer
        is recomputed, they are loaded, and nothing is computed or sent. Without `recompute_all_to_all`, it saves my
        heads' outputs: when the layer is recomputed, the all-to-alls run again, but no ring and no kernel.
        """
        # With frozen inputs, too: the layer may be recomputed for its MLP.
        saves = torch.is_grad_enabled() or (saved_attentions is not None and saved_attentions.recomputing)
        return _apply(q_BLHD, k_BLKD, v_BLKV, scores.sinks, self, scores, saved_attentions if saves else None)

    def packs_qkv(self, queries: int, keys: int) -> bool:
        """Whether q, k and v are sent in one message: they belong to the same tokens."""
        return queries == keys and (self.trim_to is None or self.trim_to[0] == self.trim_to[1])


@not_compiled
def _apply(*args: Any) -> Tensor:
    # Not traced: a compiler returns zero gradients for buffers that a collective fills.
    out: Tensor = _ChunkedAttention.apply(*args)  # type: ignore[no-untyped-call]
    return out


class _ChunkedAttention(torch.autograd.Function):
    """All chunks. Saved tensors go to `save_for_backward`, where checkpointing sees them, or to `saved_attentions`."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        method: ChunkedUlysses,
        scores: Scores,
        saved_attentions: SavedAttentions | None,
    ) -> Tensor:
        ctx.method, ctx.scores, ctx.saved_attention = method, scores, None
        if not method.recompute_all_to_all:
            received: list[_Received] | None = [] if any(ctx.needs_input_grad) else None
            computed = None
            if saved_attentions is not None and saved_attentions.recomputing:
                tensors = saved_attentions.load_next().tensors()
                computed = list(zip(tensors[::2], tensors[1::2], strict=True))
            results: list[Tensor] | None = [] if saved_attentions is not None and computed is None else None
            out, lses = _forward(q, k, v, method, scores, received, computed, results)
            if saved_attentions is not None and results is not None:
                saved_attentions.save(results)
            ctx.specs, ctx.received = [(x.shape, x.dtype) for x in (q, k, v)], None
            if computed is not None:
                # This runs within the backward of the layer. Hold the tensors here, so that `_backward` can free them:
                # autograd would hold saved ones until this node's backward returns.
                ctx.received, received = received, None
            ctx.save_for_backward(sinks, *lses, *itertools.chain(*received or []))
            return out
        if saved_attentions is None:
            out, lses = _forward(q, k, v, method, scores)
            if any(ctx.needs_input_grad) and not owns_storage(q, k, v):
                # Copy views of one projection, so that saving them does not keep the whole projection alive.
                q, k, v = (x if owns_storage(x) else x.clone(memory_format=torch.contiguous_format) for x in (q, k, v))
            ctx.save_for_backward(q, k, v, sinks, out, *lses)
            return out
        ctx.save_for_backward(q, k, v, sinks)
        if saved_attentions.recomputing:
            ctx.saved_attention = saved_attentions.load_next()
            (out, *_) = ctx.saved_attention.tensors()
        else:
            out, lses = _forward(q, k, v, method, scores)
            ctx.saved_attention = saved_attentions.save([out, *lses])
        # Detach to avoid a reference cycle: the saved output would refer to this node, which refers to it.
        return out.detach()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        with named_range("longspan.attention"):
            return *_ChunkedAttention._gradients(ctx, grad), None, None, None

    @staticmethod
    def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        method: ChunkedUlysses = ctx.method
        if not method.recompute_all_to_all:
            sinks, *rest = ctx.saved_tensors
            lses, received = rest[: len(method.chunks)], ctx.received
            if received is None:
                received = _by_chunk(rest[len(method.chunks) :], method)
            ctx.received = None
            del rest
            return _backward([grad], [], received, lses, ctx.specs, method, replace(ctx.scores, sinks=sinks))
        q, k, v, sinks, *saved = ctx.saved_tensors
        out, *lses = saved if ctx.saved_attention is None else ctx.saved_attention.tensors()
        specs = [(x.shape, x.dtype) for x in (q, k, v)]
        grads = _backward([q, out, grad], [k, v], None, lses, specs, method, replace(ctx.scores, sinks=sinks))
        if ctx.saved_attention is not None:
            ctx.saved_attention.release()
        return grads


_Received = list[Tensor]
"""A chunk's q and output, of all tokens of the block, and its k and v if the all-to-all brought them."""


def _by_chunk(tensors: list[Tensor], method: ChunkedUlysses) -> list[_Received]:
    rest = iter(tensors)
    return [list(itertools.islice(rest, 4 if chunk.first_of_kv else 2)) for chunk in method.chunks]


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    method: ChunkedUlysses,
    scores: Scores,
    received: list[_Received] | None = None,
    computed: list[tuple[Tensor, Tensor]] | None = None,
    results: list[Tensor] | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """Return the local output `[B, L, H, V]` and each chunk's log-sum-exp [B, h, S].

    `received` and `results` are lists to append to: what each chunk received, and its output of my heads and
    log-sum-exp. `computed`: the results of an earlier call, in the order of the chunks, which are not computed again.
    """
    out = _LocalTensor("q", (*q.shape[:3], v.shape[3]), q.dtype, q.device)
    lses, kv = list[Tensor](), list[Tensor]()

    def start(chunk: HeadChunk) -> Callable[[], list[Tensor]]:
        if computed is not None and received is None:  # no backward needs them
            return lambda: [q, k, v] if chunk.first_of_kv else [q]
        return _scatter([q], [k, v] if chunk.first_of_kv else [], chunk, method)

    def compute(number: int, chunk: HeadChunk, scattered: list[Tensor]) -> list[AllToAll]:
        q_BhSD, *received_kv = scattered
        scattered.clear()
        if chunk.first_of_kv:
            kv[:] = received_kv
        k_BkTD, v_BkTV = kv
        if computed is not None:
            chunk_out, lse = computed.pop(0)
        elif chunk.local.q_heads:
            heads = scores.of_heads(chunk.local.q_start, chunk.local.q_stop)
            local = chunk.attention.pack(q_BhSD, k_BkTD, v_BkTV, saved=False)
            chunk_out, lse = chunk.attention.forward(q_BhSD, local, heads)
            del local
        else:
            chunk_out = q_BhSD.new_empty(*q_BhSD.shape[:3], v.shape[3])
            lse = q_BhSD.new_empty(q_BhSD.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
        if received is not None:
            received.append([q_BhSD, chunk_out, *received_kv])
        if results is not None:
            results.extend([chunk_out, lse])
        del q_BhSD, k_BkTD, v_BkTV, received_kv
        if chunk.last_of_kv:
            kv.clear()
        lses.append(lse)
        outputs = [chunk_out]
        del chunk_out
        return _gather([out], outputs, chunk, method)

    _run_chunks(method, start, compute)
    return out.tensor(), lses


def _backward(
    with_q_heads: list[Tensor],
    with_kv_heads: list[Tensor],
    received: list[_Received] | None,
    lses: Sequence[Tensor],
    specs: Sequence[tuple[torch.Size, torch.dtype]],
    method: ChunkedUlysses,
    scores: Scores,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients of local q, k and v, and this rank's part of the gradient of the sinks.

    Args:
        with_q_heads: local tensors to scatter: the output's gradient; with `recompute_all_to_all` q, output, gradient.
        with_kv_heads: with `recompute_all_to_all`: local k and v to scatter.
        received: without: what the forward's all-to-alls received.
        lses: of each chunk.
        specs: shapes and dtypes of q, k and v.
        method: the method.
        scores: of all heads.
    """
    (q_shape, q_dtype), *kv_specs = specs
    # Gradients of KV heads that several ranks hold return in separate chunks: accumulate them in fp32 and round once.
    wide, device = torch.promote_types(q_dtype, torch.float32), with_q_heads[0].device
    dq, adds = _LocalTensor("q", q_shape, q_dtype, device), method.sums_kv_heads
    dk, dv = (_LocalTensor("kv", shape, wide if adds else dtype, device, adds=adds) for shape, dtype in kv_specs)
    dsinks = None if scores.sinks is None else torch.zeros_like(scores.sinks)
    kv, sums = list[Tensor](), list[Tensor]()

    def start(chunk: HeadChunk) -> Callable[[], list[Tensor]]:
        return _scatter(with_q_heads, with_kv_heads if chunk.first_of_kv else [], chunk, method)

    def compute(number: int, chunk: HeadChunk, scattered: list[Tensor]) -> list[AllToAll]:
        if received is not None:
            q_BhSD, out_BhSV, *received_kv = received[number]
            received[number] = []
            (grad_BhSV,) = scattered
        else:
            q_BhSD, out_BhSV, grad_BhSV, *received_kv = scattered
        scattered.clear()
        if chunk.first_of_kv:
            kv[:] = received_kv
        del received_kv
        if not chunk.local.q_heads:  # this rank has no head in the chunk: empty tensors
            dq_BhSD, dkv = q_BhSD, [*kv]
        else:
            heads = chunk.local.q_start, chunk.local.q_stop
            local = chunk.attention.pack(q_BhSD, *kv, saved=False)
            if local.packed is not None and chunk.last_of_kv:
                # Copy q as well, so that what the all-to-all received is freed.
                q_BhSD = tokens_first(q_BhSD)
                kv.clear()
            dq_BhSD, *dkv, chunk_dsinks = chunk.attention.backward(
                q_BhSD, local, (out_BhSV, lses[number], grad_BhSV), scores.of_heads(*heads)
            )
            del local
            if dsinks is not None and chunk_dsinks is not None:
                dsinks[slice(*heads)] = chunk_dsinks
            if not (chunk.first_of_kv and chunk.last_of_kv):  # several chunks use these KV heads: accumulate in fp32
                sums[:] = [x.to(wide) for x in dkv] if not sums else [a + x for a, x in zip(sums, dkv, strict=True)]
        if sums and chunk.last_of_kv:
            dkv = [x.to(dtype) for x, (_, dtype) in zip(sums, kv_specs, strict=True)]
            sums.clear()
        grads = [dq_BhSD, *dkv]
        del q_BhSD, out_BhSV, grad_BhSV, dq_BhSD, dkv
        if not chunk.last_of_kv:
            return _gather([dq], grads[:1], chunk, method)
        kv.clear()
        if method.packs_qkv(q_shape[1], kv_specs[0][0][1]):
            return _gather([dq, dk, dv], grads, chunk, method)
        return [*_gather([dq], grads[:1], chunk, method), *_gather([dk, dv], grads[1:], chunk, method)]

    _run_chunks(method, start, compute)
    (_, k_dtype), (_, v_dtype) = kv_specs
    return dq.tensor(), dk.tensor().to(k_dtype), dv.tensor().to(v_dtype), dsinks


def _run_chunks(
    method: ChunkedUlysses,
    start: Callable[[HeadChunk], Callable[[], list[Tensor]]],
    compute: Callable[[int, HeadChunk, list[Tensor]], list[AllToAll]],
) -> None:
    """Run all chunks in order, the same on every rank.

    `start` returns a function that waits for a chunk's tensors; `compute` empties their list, to free them early.
    With `overlaps` the next chunk's scatter starts before a chunk is computed, and a chunk's gather is waited for when
    the next chunk has been computed.
    """
    gathering: list[AllToAll] = []

    def finish() -> None:
        for all_to_all in gathering:
            all_to_all.wait()
        gathering.clear()

    following: Callable[[], list[Tensor]] | None = None
    for number, chunk in enumerate(method.chunks):
        scattered = (following or start(chunk))()
        following = None
        if method.overlaps and number + 1 < len(method.chunks):
            following = start(method.chunks[number + 1])
        started = compute(number, chunk, scattered)
        finish()
        gathering += started
        if not method.overlaps:
            finish()
    finish()


# ---------------------------------------------------------------------------------------------------------------------
# A chunk's two all-to-alls.


def _scatter(
    with_q_heads: list[Tensor], with_kv_heads: list[Tensor], chunk: HeadChunk, method: ChunkedUlysses
) -> Callable[[], list[Tensor]]:
    """Start to send a chunk's heads of tensors `[B, L, H, D]`: in one all-to-all, or two if keys have other tokens.

    Returns:
        A function that waits and returns `[B, h, S, D]` of each tensor, without padding: views of the receive buffers.
    """
    local = chunk.local
    if method.group is None:
        q_heads, kv_heads = slice(local.q_start, local.q_stop), slice(local.kv_start, local.kv_stop)
        mine = [(x, q_heads) for x in with_q_heads] + [(x, kv_heads) for x in with_kv_heads]
        return lambda: [x_BLHD[:, :, heads].transpose(1, 2) for x_BLHD, heads in mine]
    q_length, kv_length = method.trim_to or (None, None)
    messages = [(with_q_heads, ["q"] * len(with_q_heads), q_length)]
    if with_kv_heads and method.packs_qkv(with_q_heads[0].shape[1], with_kv_heads[0].shape[1]):
        messages = [(with_q_heads + with_kv_heads, messages[0][1] + ["kv"] * len(with_kv_heads), q_length)]
    elif with_kv_heads:
        messages.append((with_kv_heads, ["kv"] * len(with_kv_heads), kv_length))
    in_flight: list[tuple[AllToAll, list[tuple[int, int]], int | None]] = []
    for xs, kinds, length in messages:
        spans = head_spans(chunk.shards, kinds)
        counts = [local.q_heads if kind == "q" else local.kv_heads for kind in kinds]
        all_to_all = start_scatter(xs, spans, method.group, overlapped=method.overlaps)
        in_flight.append((all_to_all, [(count, x.shape[3]) for count, x in zip(counts, xs, strict=True)], length))

    def wait() -> list[Tensor]:
        views = []
        while in_flight:
            all_to_all, shapes, length = in_flight.pop(0)
            parts_SBW = all_to_all.wait()[:length].split([count * d for count, d in shapes], -1)
            views += [x.unflatten(2, shape).permute(1, 2, 0, 3) for x, shape in zip(parts_SBW, shapes, strict=True)]
        return views

    return wait


class _LocalTensor:
    """A tensor `[B, L, H, D]` of the local tokens that chunks of heads are written to; allocated with the first chunk.

    Its heads are "q" or "kv" heads. With `adds` it starts as zeros, and chunks are added.
    """

    def __init__(
        self, kind: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device, *, adds: bool = False
    ) -> None:
        self.kind, self.shape, self.adds, self._options = kind, tuple(shape), adds, (dtype, device)
        self._tensor: Tensor | None = None

    def tensor(self) -> Tensor:
        if self._tensor is None:
            (dtype, device), make = self._options, torch.zeros if self.adds else torch.empty
            self._tensor = make(self.shape, dtype=dtype, device=device)
        return self._tensor

    def write(self, heads: Span, x_BhLD: Tensor) -> None:
        """Write some heads. All heads are kept without a copy."""
        x_BLhD = x_BhLD.transpose(1, 2)
        if self._tensor is None and x_BLhD.shape == self.shape and x_BLhD.dtype == self._options[0]:
            self._tensor = x_BLhD
        else:
            self.tensor()[:, :, slice(*heads)] = x_BLhD


def _gather(
    outs: list[_LocalTensor], xs_BhSD: list[Tensor], chunk: HeadChunk, method: ChunkedUlysses
) -> list[AllToAll]:
    """Start sending a chunk's heads of all tokens back into `outs`; empty `xs_BhSD`, to free them early."""
    if method.group is None:
        local = chunk.local
        for out, x in zip(outs, xs_BhSD, strict=True):
            out.write((local.q_start, local.q_stop) if out.kind == "q" else (local.kv_start, local.kv_stop), x)
        return []
    packed_SBW = _rows_of(xs_BhSD, outs[0].shape[1] * method.group.size())
    xs_BhSD.clear()
    spans = head_spans(chunk.shards, [out.kind for out in outs])

    def write(recv: Tensor) -> Tensor:
        write_heads(recv, [out.tensor() for out in outs], spans, [out.adds for out in outs])
        return recv

    dims = [out.shape[3] for out in outs]
    return [start_gather(packed_SBW, dims, spans, method.group, overlapped=method.overlaps, finish=write)]


def _rows_of(xs_BhSD: Sequence[Tensor], tokens: int) -> Tensor:
    """Return `[tokens, B, W]`: the heads of all tensors, with zeros for the padding that was cut off."""
    batch, _, length, _ = xs_BhSD[0].shape
    if len(xs_BhSD) == 1 and length == tokens:
        return xs_BhSD[0].permute(2, 0, 1, 3).flatten(2)
    widths = [x.shape[1] * x.shape[3] for x in xs_BhSD]
    packed_SBW = xs_BhSD[0].new_empty(tokens, batch, sum(widths))
    for part_SBW, x_BhSD in zip(packed_SBW[:length].split(widths, -1), xs_BhSD, strict=True):
        copy_wide(part_SBW.unflatten(2, (x_BhSD.shape[1], x_BhSD.shape[3])), x_BhSD.permute(2, 0, 1, 3))
    packed_SBW[length:] = 0
    return packed_SBW
