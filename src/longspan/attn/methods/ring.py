"""Ring Attention: local queries stay, and the keys and values of all ranks are received block by block.

Liu et al. 2023, "Ring Attention with Blockwise Transformers", arXiv:2310.01889; zigzag blocks as in Llama 3
(arXiv:2407.21783). Contiguous and zigzag rings, and attention on one device (one block, nothing sent) are this one
loop; they differ in layout and kernel.

Per rank and layer the forward sends b * N/R * K * (D + V) bytes in each of up to R - 1 steps (N tokens of the sequence,
R ranks of the ring, b bytes per element). The backward sends that again, and dK and dV in fp32 as often. With GQA only
KV heads are sent.

Shape suffixes: B batch, S tokens of the local block, T tokens of a KV block, H query heads, K KV heads, D head_dim
of q and k, V of v.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from longspan.attn.kernels.base import (
    BackwardInputs,
    BlockKernel,
    GradientSum,
    SoftmaxAccumulator,
    tokens_first,
    without_autocast,
    zeros_tokens_first,
)
from longspan.attn.score import Scores
from longspan.comm.collectives import P2PMessage, post, wait_for
from longspan.compat.torch_api import named_range, not_compiled
from longspan.core.layout import Span
from longspan.core.routes import Routes

_KV, _GRAD, _GRAD_TO_SOURCE = range(3)  # kinds of messages


def _tag(kind: int, direction: int) -> int:
    """Return the tag of a message to the right (+1) or left (-1); both sides sort by tags."""
    return 2 * kind + (direction < 0)


@dataclass(frozen=True, eq=False)
class Ring:
    """One ring of R ranks: an `AttentionMethod`."""

    group: dist.ProcessGroup | None  # the ranks; None for a ring of one
    routes: Routes  # how far each block is sent
    kernel: BlockKernel  # attention of the local queries to one block
    prepared: tuple[Any, ...]  # what the kernel prepared for each block; None if nothing attends to the block
    # The KV head of every query head, int64 [H], if KV groups are uneven. Received heads are repeated by it; each KV
    # head is sent once.
    kv_head_index: Tensor | None = None

    @property
    def rank(self) -> int:
        return 0 if self.group is None else self.group.rank()

    @property
    def size(self) -> int:
        return len(self.prepared)

    def __call__(self, q_BSHD: Tensor, k_BTKD: Tensor, v_BTKV: Tensor, scores: Scores) -> Tensor:
        """Attend from the local block's queries to the whole sequence, exactly, with gradients.

        Returns:
            `[B, S, H, V]`; zero for queries that see nothing (padding).
        """
        if q_BSHD.shape[2] == 0:  # no rank of this ring has heads
            return scores.output_without_heads(q_BSHD, v_BTKV)
        q_BHSD, k_BKTD, v_BKTV = (x.transpose(1, 2) for x in (q_BSHD, k_BTKD, v_BTKV))
        out_BHSV: Tensor = _apply(q_BHSD, k_BKTD, v_BKTV, scores.sinks, self, scores)
        return out_BHSV.transpose(1, 2)

    def forward(self, q_BHSD: Tensor, k_BKTD: Tensor, v_BKTV: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
        """Compute the forward outside of autograd, of at least one head, for callers that save tensors themselves.

        Returns:
            The output `[B, H, S, V]`, and the log-sum-exp of whole rows [B, H, S], 0 for queries that see nothing.
        """
        return _forward(q_BHSD, _local_block(q_BHSD, k_BKTD, v_BKTV, self, saved=False), self, scores)

    def backward(
        self,
        q_BHSD: Tensor,
        k_BKTD: Tensor,
        v_BKTV: Tensor,
        out_lse_grad: tuple[Tensor, Tensor, Tensor],
        scores: Scores,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Compute the gradients of q, k, v and sinks, without recomputing the forward.

        `out_lse_grad` are output and log-sum-exp of `forward`, and the output's gradient `[B, H, S, V]`.
        """
        block = _local_block(q_BHSD, k_BKTD, v_BKTV, self, saved=False)
        return _backward(q_BHSD, block, out_lse_grad, self, scores)


@not_compiled
def _apply(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, ring: Ring, scores: Scores) -> Tensor:
    # Not traced: a compiler returns zero gradients for buffers that a collective fills.
    out: Tensor = _RingAttention.apply(q, k, v, sinks, ring, scores)  # type: ignore[no-untyped-call]
    return out


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, ring: Ring, scores: Scores) -> Tensor:
        local = _local_block(q, k, v, ring)
        if any(ctx.needs_input_grad) and local.packed is not None and not owns_storage(q):
            # `q` is a view of the packed QKV buffer. Copy it, so that saving `q` does not keep K and V alive.
            q = tokens_first(q)
        out, lse = _forward(q, local, ring, scores)
        ctx.save_for_backward(q, out, lse, sinks, *local.saved)
        ctx.shapes, ctx.ring, ctx.scores = (k.shape, v.shape), ring, scores
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        q, out, lse, sinks, *kv = ctx.saved_tensors
        local = _KVPair(*kv) if len(kv) == 2 else _KVPair.of(kv[0], *ctx.shapes)
        with named_range("longspan.attention"):
            return *_backward(q, local, (out, lse, grad), ctx.ring, replace(ctx.scores, sinks=sinks)), None, None


# ---------------------------------------------------------------------------------------------------------------------
# The two loops. Autocast is off in them: it would cast fp32 sums to half precision.


def _forward(q_BHSD: Tensor, local: _KVPair, ring: Ring, scores: Scores) -> tuple[Tensor, Tensor]:
    """Return the output [B, H, S, V], and the log-sum-exp of whole rows [B, H, S]."""
    heads = q_BHSD.shape[1]
    total = SoftmaxAccumulator(q_BHSD, local.v.shape[3], several=ring.size > 1)
    with without_autocast(q_BHSD.device):
        (kernel_q,) = ring.kernel.to_kernel_layout([q_BHSD], local.v.shape[3], scores)
        for _, received in _kv_blocks(local, ring):
            while received:
                block = received.pop(0)
                prepared = ring.prepared[block.source]
                if prepared is not None:
                    k_BKTD, v_BKTV = (_kv_of(x, ring, (0, heads), heads) for x in (block.kv.k, block.kv.v))
                    ring.kernel.accumulate(total, kernel_q, k_BKTD, v_BKTV, prepared, scores)
                    del k_BKTD, v_BKTV
                del block  # before the next step's buffers are allocated
        del kernel_q
        if scores.sinks is not None:  # a sink is one more key per head, whose value is zero
            total.add_sinks(scores.sinks)
    out, lse = total.results()
    out = out.to(q_BHSD.dtype)
    if not owns_storage(out):  # the kernel padded its heads, and saving it would keep the padding alive
        out = tokens_first(out)
    return out, lse.masked_fill(torch.isneginf(lse), 0)


def _backward(
    q_BHSD: Tensor, local: _KVPair, out_lse_grad: tuple[Tensor, Tensor, Tensor], ring: Ring, scores: Scores
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients of q, k, v and sinks."""
    out_BHSV, lse_BHS, grad_BHSV = out_lse_grad
    if ring.size > 1:  # a GPU kernel takes them with tokens first, and would copy them for every block
        out_BHSV, grad_BHSV = tokens_first(out_BHSV), tokens_first(grad_BHSV)
    elif grad_BHSV.stride(3) != 1:  # such as the expanded gradient of a sum, which kernels may refuse
        grad_BHSV = tokens_first(grad_BHSV)
    backward = _backward_of_one_block if ring.size == 1 else _backward_of_blocks
    with without_autocast(q_BHSD.device):
        kernel_q, kernel_out, kernel_grad = ring.kernel.to_kernel_layout(
            [q_BHSD, out_BHSV, grad_BHSV], local.v.shape[3], scores
        )
        inputs = BackwardInputs(kernel_q, kernel_out, kernel_grad, lse_BHS)
        del kernel_q, kernel_out, kernel_grad
        grads = [x.to(q_BHSD.dtype) for x in backward(inputs, q_BHSD.shape, local, ring, scores)]
        del inputs
    dsinks = None
    if scores.sinks is not None:
        sink_weight_BHS = (scores.sinks.to(lse_BHS.dtype)[:, None] - lse_BHS).exp()
        delta_BHS = (grad_BHSV.to(lse_BHS.dtype) * out_BHSV).sum(-1)
        dsinks = -(sink_weight_BHS * delta_BHS).sum((0, 2)).to(scores.sinks.dtype)
    dq_BHSD, dk_BKTD, dv_BKTV = grads
    return dq_BHSD, dk_BKTD, dv_BKTV, dsinks


def _backward_of_one_block(
    inputs: BackwardInputs, q_shape: torch.Size, local: _KVPair, ring: Ring, scores: Scores
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk and dv of a ring of one, as the kernel returned them if it made one call."""
    wide, heads = inputs.lse.dtype, (0, q_shape[1])
    dq = GradientSum(q_shape, wide, inputs.q.device)
    grads = _block_gradients(inputs, dq, local, ring.prepared[0], heads, ring, scores)
    if ring.kv_head_index is None:
        dk, dv = grads
        return dq.total(), dk.total(), dv.total()
    kv_grad = local.zeros(wide)
    _add_gradients(kv_grad, grads, heads, q_shape[1], ring)
    return dq.total(), kv_grad.k, kv_grad.v


def _backward_of_blocks(
    inputs: BackwardInputs, q_shape: torch.Size, local: _KVPair, ring: Ring, scores: Scores
) -> tuple[Tensor, Tensor, Tensor]:
    """Send the blocks around again, each followed by its gradient; return dq, dk and dv."""
    wide, heads = inputs.lse.dtype, q_shape[1]
    dq_BHSD = zeros_tokens_first(q_shape, wide, inputs.q.device)
    reducer = _GradientReducer(local, wide, heads, ring)
    # The last heads of the local block are computed at the end, while the last gradient is in flight.
    first_heads = reducer.first_heads

    def attend(block: _ReceivedBlock, step: int, span: Span) -> None:
        prepared = ring.prepared[block.source]
        if prepared is not None and span[0] < span[1]:
            dq = GradientSum.into(dq_BHSD[:, slice(*span)])
            reducer.add(block, step, _block_gradients(inputs, dq, block.kv, prepared, span, ring, scores), span)
        elif block.direction:
            reducer.add(block, step, None, span)

    for step, received in _kv_blocks(local, ring):
        for block in received:
            attend(block, step, (0, first_heads if block.direction == 0 and block.source == ring.rank else heads))
        reducer.send(step)
    del received, block  # the last block is not needed any more
    attend(_ReceivedBlock(ring.rank, 0, local), 0, (first_heads, heads))
    kv_grad = reducer.finish()
    return dq_BHSD, kv_grad.k, kv_grad.v


_KVGradients = tuple[GradientSum, GradientSum]


def _block_gradients(
    inputs: BackwardInputs, dq: GradientSum, kv: _KVPair, prepared: Any, heads: Span, ring: Ring, scores: Scores
) -> _KVGradients:
    """Add the gradient of query heads [start, stop) to `dq`; return those of their KV heads, as `_kv_of` returns them.

    `prepared` is what the kernel prepared for this block; None if nothing attends to it.
    """
    k_BKTD, v_BKTV = (_kv_of(x, ring, heads, inputs.q.shape[1]) for x in (kv.k, kv.v))
    dk, dv = (GradientSum(x.shape, inputs.lse.dtype, x.device) for x in (k_BKTD, v_BKTV))
    if prepared is not None:
        of_heads = inputs.at(slice(None), slice(*heads))
        ring.kernel.accumulate_gradients((dq, dk, dv), of_heads, k_BKTD, v_BKTV, prepared, scores.of_heads(*heads))
    return dk, dv


def _add_gradients(into: _KVPair, grads: _KVGradients, heads: Span, total: int, ring: Ring) -> None:
    """Add the gradients that `_block_gradients` returned for query heads [start, stop) out of `total`."""
    for sum_BKTD, grad in zip((into.k, into.v), grads, strict=True):
        if ring.kv_head_index is None:
            grad.add_to(_kv_of(sum_BKTD, ring, heads, total))
        else:  # the heads were repeated
            sum_BKTD.index_add_(1, ring.kv_head_index[slice(*heads)], grad.total().to(sum_BKTD.dtype))


def _kv_of(x_BKTD: Tensor, ring: Ring, heads: Span, total: int) -> Tensor:
    """Return the KV heads of query heads [start, stop) out of `total`.

    Even groups: a view; two parts of one group share their KV head. Uneven groups: a copy with one KV head per query
    head.
    """
    start, stop = heads
    if ring.kv_head_index is not None:
        return x_BKTD.index_select(1, ring.kv_head_index[start:stop])
    group = total // x_BKTD.shape[1]
    return x_BKTD[:, start // group : -(-stop // group)]


# ---------------------------------------------------------------------------------------------------------------------
# Sending keys and values.


@dataclass(frozen=True)
class _KVPair:
    """Keys and values of one block, or their gradients."""

    k: Tensor  # [B, K, T, D]
    v: Tensor  # [B, K, T, V]
    # The buffer that both are views of, so that they are one message; None if they are the caller's tensors (a ring of
    # one).
    packed: Tensor | None = None

    @classmethod
    def of(cls, packed: Tensor, k_shape: torch.Size, v_shape: torch.Size) -> _KVPair:
        n = k_shape.numel()
        return cls(packed[:n].view(k_shape), packed[n:].view(v_shape), packed)

    @property
    def message(self) -> Tensor:
        assert self.packed is not None
        return self.packed

    @property
    def saved(self) -> tuple[Tensor, ...]:
        """The tensors to save for the backward; K and V are saved once."""
        return (self.k, self.v) if self.packed is None else (self.packed,)

    def like(self, packed: Tensor) -> _KVPair:
        return _KVPair.of(packed, self.k.shape, self.v.shape)

    def zeros(self, dtype: torch.dtype) -> _KVPair:
        return self.like(self.k.new_zeros(self.k.numel() + self.v.numel(), dtype=dtype))


def _local_block(q: Tensor, k: Tensor, v: Tensor, ring: Ring, *, saved: bool = True) -> _KVPair:
    """Pack local keys and values if they are sent.

    A ring of one packs them on a CPU, whose kernel reads them once per block of queries and is faster with contiguous
    heads, and if saving them would keep a larger buffer alive.
    """
    if ring.size == 1 and not _kernel_rereads_kv(k.device) and (not saved or owns_storage(q, k, v)):
        return _KVPair(k, v)
    local = _KVPair.of(k.new_empty(k.numel() + v.numel()), k.shape, v.shape)
    local.k.copy_(k)
    local.v.copy_(v)
    return local


def _kernel_rereads_kv(device: torch.device) -> bool:
    return device.type == "cpu"


def owns_storage(*xs: Tensor) -> bool:
    """Whether saving these tensors keeps at most an eighth more memory alive than their own (a sequence's padding)."""
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in xs}
    return 8 * sum(storages.values()) <= 9 * sum(x.nbytes for x in xs)


@dataclass(frozen=True)
class _ReceivedBlock:
    """A KV block of rank `source`, sent to the right (+1) or left (-1); 0 if local."""

    source: int
    direction: int
    kv: _KVPair


def _kv_blocks(local: _KVPair, ring: Ring) -> Iterator[tuple[int, list[_ReceivedBlock]]]:
    """Yield each step's KV blocks; step 0 is the local one. The next step's are in flight while one is computed."""
    current, routes = [_ReceivedBlock(ring.rank, 0, local)], ring.routes
    to_send = {+1: local, -1: local}
    for step in range(1, routes.steps + 1):
        assert ring.group is not None
        sends, receives, incoming = [], [], []
        for direction in (+1, -1):
            after, before = (ring.rank + direction) % ring.size, (ring.rank - direction) % ring.size
            if routes.has_hop(ring.rank, direction, step):
                sends.append(P2PMessage(to_send[direction].message, after, _tag(_KV, direction)))
            if routes.has_hop(before, direction, step):
                kv = local.like(torch.empty_like(local.message))
                receives.append(P2PMessage(kv.message, before, _tag(_KV, direction)))
                incoming.append(_ReceivedBlock((ring.rank - direction * step) % ring.size, direction, kv))
        works = post(sends, receives, ring.group)
        yield step - 1, current
        wait_for(works)
        current = incoming
        to_send = {block.direction: block.kv for block in incoming}
    yield routes.steps, current


class _GradientReducer:
    """Sums the gradients of KV blocks, in fp32 at least: each rank that a block reaches adds its part.

    A gradient follows one step behind its block. The last rank that the block reaches sends it directly to the source
    rank. `first_heads` of the local block are computed in step 0: they hide the first block's transfer, the others the
    last gradient's. Query heads of one KV group stay together, unless it is the only group.
    """

    def __init__(self, local: _KVPair, dtype: torch.dtype, heads: int, ring: Ring) -> None:
        self.local_grad, self.heads, self.ring = local.zeros(dtype), heads, ring
        self.works: list[dist.Work] = []
        self.sends: list[P2PMessage] = []
        self.sending: list[P2PMessage] = []  # keeps the buffers alive until they are sent
        self.partial_sums: dict[int, Tensor] = {}  # received, by direction
        self.returned: list[Tensor] = []
        kv_heads = heads if ring.kv_head_index is not None else local.k.shape[1]
        self.first_heads = heads // 2 if kv_heads == 1 else kv_heads // 2 * (heads // kv_heads)

    def add(self, received: _ReceivedBlock, step: int, grads: _KVGradients | None, heads: Span) -> None:
        """Add this rank's part of the gradient of a block that was received in this step; None if it has none."""
        direction = received.direction
        if direction == 0:
            kv_grad = self.local_grad
        elif step == 1:
            kv_grad = self.local_grad.zeros(self.local_grad.k.dtype)
        else:
            self._wait()
            kv_grad = self.local_grad.like(self.partial_sums.pop(direction))
        if grads is not None:
            _add_gradients(kv_grad, grads, heads, self.heads, self.ring)
        if direction == 0:
            return
        if self.ring.routes.hops(received.source, direction) > step:
            peer, kind = (self.ring.rank + direction) % self.ring.size, _GRAD
        else:
            peer, kind = received.source, _GRAD_TO_SOURCE
        self.sends.append(P2PMessage(kv_grad.message, peer, _tag(kind, direction)))

    def send(self, step: int) -> None:
        """Send the sums of this step, and start to receive those of the neighbours."""
        self._wait()
        receives = []
        rank, size, routes = self.ring.rank, self.ring.size, self.ring.routes
        for direction in (+1, -1) if step else ():
            neighbour = (rank - direction) % size
            source = (neighbour - direction * step) % size  # of the block that it has just computed
            if routes.hops(source, direction) > step:
                self.partial_sums[direction] = torch.empty_like(self.local_grad.message)
                receives.append(P2PMessage(self.partial_sums[direction], neighbour, _tag(_GRAD, direction)))
            if routes.hops(rank, direction) == step:
                self.returned.append(torch.empty_like(self.local_grad.message))
                last = (rank + direction * step) % size
                receives.append(P2PMessage(self.returned[-1], last, _tag(_GRAD_TO_SOURCE, direction)))
        if self.sends or receives:
            assert self.ring.group is not None
            self.works = post(self.sends, receives, self.ring.group)
        self.sending, self.sends = self.sends, []

    def finish(self) -> _KVPair:
        """Wait for the local block's gradients from other ranks; return the sum."""
        self._wait()
        for part in self.returned:
            self.local_grad.message.add_(part)
        return self.local_grad

    def _wait(self) -> None:
        wait_for(self.works)
        self.works, self.sending = [], []
