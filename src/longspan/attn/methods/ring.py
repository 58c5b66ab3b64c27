"""Ring Attention: local queries stay, and the keys and values of all ranks are received block by block.

Liu et al. 2023, "Ring Attention with Blockwise Transformers", arXiv:2310.01889; zigzag blocks as in Llama 3
(arXiv:2407.21783). The loops over blocks are those of one device (`local.py`); this file receives further blocks and
returns their gradients. Contiguous and zigzag rings differ in layout alone.

Per rank and layer the forward sends b * N/R * K * (D + V) bytes in each of up to R - 1 steps (N tokens of the sequence,
R ranks of the ring, b bytes per element). The backward sends that again, and dK and dV in fp32 as often. With GQA only
KV heads are sent.

Shape suffixes: B batch, S tokens of the local block, T tokens of a KV block, H query heads, K KV heads, D head_dim
of q and k, V of v.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from longspan.attn.kernels.base import BackwardInputs, GradientSum, zeros_tokens_first
from longspan.attn.methods.local import KVBlock, KVGradients, KVPair, LocalAttention
from longspan.attn.score import Scores
from longspan.comm.collectives import P2PMessage, post, wait_for
from longspan.core.layout import Span
from longspan.core.routes import Routes

_KV, _GRAD, _GRAD_TO_SOURCE = range(3)  # kinds of messages


def _tag(kind: int, direction: int) -> int:
    """Return the tag of a message to the right (+1) or left (-1); both sides sort by tags."""
    return 2 * kind + (direction < 0)


@dataclass(frozen=True, eq=False, kw_only=True)
class Ring(LocalAttention):
    """One ring of R ranks: an `AttentionMethod`, whose kernel returns a log-sum-exp."""

    group: dist.ProcessGroup  # the ranks
    routes: Routes  # how far each block is sent: no further than to the last rank that reads it

    @property
    def rank(self) -> int:
        return self.group.rank()

    def kv_blocks(self, local: KVPair) -> Iterator[tuple[int, list[KVBlock]]]:
        """Yield each step's KV blocks; step 0 is the local one. The next step's are in flight while one is computed."""
        current, routes = [KVBlock(self.rank, 0, local)], self.routes
        to_send = {+1: local, -1: local}
        for step in range(1, routes.steps + 1):
            sends, receives, incoming = [], [], []
            for direction in (+1, -1):
                after, before = (self.rank + direction) % self.size, (self.rank - direction) % self.size
                if routes.has_hop(self.rank, direction, step):
                    sends.append(P2PMessage(to_send[direction].message, after, _tag(_KV, direction)))
                if routes.has_hop(before, direction, step):
                    kv = local.like(torch.empty_like(local.message))
                    receives.append(P2PMessage(kv.message, before, _tag(_KV, direction)))
                    incoming.append(KVBlock((self.rank - direction * step) % self.size, direction, kv))
            works = post(sends, receives, self.group)
            yield step - 1, current
            wait_for(works)
            current = incoming
            to_send = {block.direction: block.kv for block in incoming}
        yield routes.steps, current

    def gradients(
        self, inputs: BackwardInputs, q_shape: torch.Size, local: KVPair, scores: Scores
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Send the blocks around again, each followed by its gradient; return dq, dk and dv."""
        wide, heads = inputs.lse.dtype, q_shape[1]
        dq_BHSD = zeros_tokens_first(q_shape, wide, inputs.q.device)
        reducer = _GradientReducer(local, wide, heads, self)
        # The last heads of the local block are computed at the end, while the last gradient is in flight.
        first_heads = reducer.first_heads

        def attend(block: KVBlock, step: int, span: Span) -> None:
            prepared = self.prepared[block.source]
            if prepared is not None and span[0] < span[1]:
                dq = GradientSum.into(dq_BHSD[:, slice(*span)])
                reducer.add(block, step, self.block_gradients(inputs, dq, block.kv, prepared, span, scores), span)
            elif block.direction:
                reducer.add(block, step, None, span)

        for step, received in self.kv_blocks(local):
            for block in received:
                attend(block, step, (0, first_heads if block.direction == 0 and block.source == self.rank else heads))
            reducer.send(step)
        del received, block  # the last block is not needed any more
        attend(KVBlock(self.rank, 0, local), 0, (first_heads, heads))
        kv_grad = reducer.finish()
        return dq_BHSD, kv_grad.k, kv_grad.v


class _GradientReducer:
    """Sums the gradients of KV blocks, in fp32 at least: each rank that a block reaches adds its part.

    A gradient follows one step behind its block. The last rank that the block reaches sends it directly to the source
    rank. `first_heads` of the local block are computed in step 0: they hide the first block's transfer, the others the
    last gradient's. Query heads of one KV group stay together, unless it is the only group.
    """

    def __init__(self, local: KVPair, dtype: torch.dtype, heads: int, ring: Ring) -> None:
        self.local_grad, self.heads, self.ring = local.zeros(dtype), heads, ring
        self.works: list[dist.Work] = []
        self.sends: list[P2PMessage] = []
        self.sending: list[P2PMessage] = []  # keeps the buffers alive until they are sent
        self.partial_sums: dict[int, Tensor] = {}  # received, by direction
        self.returned: list[Tensor] = []
        kv_heads = heads if ring.kv_head_index is not None else local.k.shape[1]
        self.first_heads = heads // 2 if kv_heads == 1 else kv_heads // 2 * (heads // kv_heads)

    def add(self, received: KVBlock, step: int, grads: KVGradients | None, heads: Span) -> None:
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
            self.ring.add_gradients(kv_grad, grads, heads, self.heads)
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
            self.works = post(self.sends, receives, self.ring.group)
        self.sending, self.sends = self.sends, []

    def finish(self) -> KVPair:
        """Wait for the local block's gradients from other ranks; return the sum."""
        self._wait()
        for part in self.returned:
            self.local_grad.message.add_(part)
        return self.local_grad

    def _wait(self) -> None:
        wait_for(self.works)
        self.works, self.sending = [], []
