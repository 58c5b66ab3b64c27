"""Ring Attention: my queries stay, keys and values of all ranks come by, block by block.

Liu et al. 2023, "Ring Attention with Blockwise Transformers", arXiv:2310.01889; with zigzag blocks as in Llama 3
(arXiv:2407.21783). Contiguous and zigzag rings, the all-gather variant, and attention on a single device (one block,
nothing sent) are this ONE loop; what differs is a layout, a kernel, and where blocks come from.

Per rank and layer the forward sends b * S/R * Hk * (D + Dv) bytes for every step of a block, R - 1 steps where every
rank needs every block; the backward sends that again, and dK and dV in fp32 as often. GQA moves KV heads only.

Shape suffixes: B batch, S tokens of my block, T tokens of a block of keys, H query heads, K KV heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from longspan.attn.kernels.base import BackwardInputs, BlockKernel, SoftmaxAccumulator, without_autocast
from longspan.attn.score import Scores
from longspan.comm.gather import gather_into, scatter_into
from longspan.comm.p2p import P2PMessage, post, wait_for
from longspan.compat.torch_api import named_range, not_compiled
from longspan.core.layout import Span
from longspan.core.routes import Routes

# What a message is. Both sides sort by it.
_KV_RIGHT, _KV_LEFT, _GRAD_RIGHT, _GRAD_LEFT, _HOME_RIGHT, _HOME_LEFT = range(6)


@dataclass(frozen=True, eq=False)
class Ring:
    """One ring of R ranks, prepared for a batch: a method.

    Attributes:
        group: the ranks; None for a ring of one.
        rank: my place.
        size: R.
        routes: how far each block travels.
        impl: "p2p" or "allgather".
        kernel: computes my queries' attention to one block.
        blocks: for each block what the kernel prepared; None where nothing attends to it.
        kv_head_index: for every query head its KV head, int64 [H], where they are not in equal groups. They are
            repeated on arrival: what travels is each KV head once.
    """

    group: dist.ProcessGroup | None
    rank: int
    size: int
    routes: Routes
    impl: str
    kernel: BlockKernel
    blocks: tuple[Any, ...]
    kv_head_index: Tensor | None = None

    def __call__(self, q_BSHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, scores: Scores) -> Tensor:
        """Attention of my block's queries over the whole sequence, exactly, with gradients.

        Args:
            q_BSHD: my block's queries.
            k_BTKD: my block's keys.
            v_BTKD: its values.
            scores: scale, softcap, sinks, biases of these heads.

        Returns:
            `[B, S, H, Dv]`; queries that see nothing (padding) give zero.
        """
        if q_BSHD.shape[2] == 0:  # no rank of this ring has heads
            return scores.nothing(q_BSHD, v_BTKD)
        q, k, v = (x.transpose(1, 2) for x in (q_BSHD, k_BTKD, v_BTKD))
        out: Tensor = _apply(q, k, v, scores.sinks, self, scores)
        return out.transpose(1, 2)

    def forward(
        self, q_BHSD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, sinks: Tensor | None, scores: Scores
    ) -> tuple[Tensor, Tensor]:
        """What `__call__` computes, outside of autograd and with the log-sum-exp, for one who saves what he likes.

        Args:
            q_BHSD: my block's queries, of one head at least.
            k_BKTD: my block's keys.
            v_BKTD: its values.
            sinks: of these heads, [H].
            scores: of these heads.

        Returns:
            The output `[B, H, S, Dv]` and the log-sum-exp of whole rows [B, H, S], 0 where a query sees nothing.
        """
        return _forward(q_BHSD, _my_block(q_BHSD, k_BKTD, v_BKTD, self, saved=False), sinks, self, scores)

    def backward(
        self,
        q_BHSD: Tensor,
        k_BKTD: Tensor,
        v_BKTD: Tensor,
        sinks: Tensor | None,
        done: tuple[Tensor, Tensor, Tensor],
        scores: Scores,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Gradients of q, k, v and sinks, without `forward` again.

        Args:
            q_BHSD: as in `forward`.
            k_BKTD: as in `forward`.
            v_BKTD: as in `forward`.
            sinks: as in `forward`.
            done: output and log-sum-exp, of `forward`, and the output's gradient `[B, H, S, Dv]`.
            scores: of these heads.
        """
        mine = _my_block(q_BHSD, k_BKTD, v_BKTD, self, saved=False)
        return _backward(q_BHSD, mine, sinks, done, self, scores)


@not_compiled
def _apply(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, ring: Ring, scores: Scores) -> Tensor:
    # A compiler may not look inside: it would give zero gradients for buffers that a collective fills.
    out: Tensor = _RingAttention.apply(q, k, v, sinks, ring, scores)  # type: ignore[no-untyped-call]
    return out


class _RingAttention(torch.autograd.Function):
    """The loop. Its backward goes round once more, with the gradients of every block behind it.

    Autocast is off inside: sums in fp32 would be cast to half precision.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, ring: Ring, scores: Scores) -> Tensor:
        mine = _my_block(q, k, v, ring)
        if any(ctx.needs_input_grad) and mine.packed is not None and not alone(q):
            # What arrived with q, K and V, would be kept by q alone: they are saved packed.
            q = _tokens_first(q)
        out, lse = _forward(q, mine, sinks, ring, scores)
        # K and V once: as the message that they are, or where they lie.
        ctx.save_for_backward(q, out, lse, sinks, *mine.saved)
        ctx.shapes, ctx.ring, ctx.scores = (k.shape, v.shape), ring, scores
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        q, out, lse, sinks, *kept = ctx.saved_tensors
        mine = _KVBlock(*kept) if len(kept) == 2 else _KVBlock.of(kept[0], *ctx.shapes)
        with named_range("longspan.attention"):
            return *_backward(q, mine, sinks, (out, lse, grad), ctx.ring, ctx.scores), None, None


def _forward(q: Tensor, mine: _KVBlock, sinks: Tensor | None, ring: Ring, scores: Scores) -> tuple[Tensor, Tensor]:
    """Once round: the output, and the log-sum-exp of whole rows."""
    seen = SoftmaxAccumulator(q, mine.v.shape[3])
    with without_autocast(q.device):
        (laid,) = ring.kernel.laid([q], mine.v.shape[3], scores)
        for _, here in _steps(mine, ring):
            for visitor in here:
                _attend(seen, laid, visitor, ring, scores)
        del laid
        if sinks is not None:  # one more key per head, whose value is zero
            seen.add(seen.out.new_zeros(()), sinks[:, None].expand(q.shape[:3]))
    return seen.out.to(q.dtype), seen.lse.masked_fill(torch.isneginf(seen.lse), 0)


def _backward(
    q: Tensor,
    mine: _KVBlock,
    sinks: Tensor | None,
    done: tuple[Tensor, Tensor, Tensor],
    ring: Ring,
    scores: Scores,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Round once more, the gradients of every block behind it; `done` is output, log-sum-exp, the output's gradient."""
    out, lse, grad = done
    # A GPU's kernel wants out and its gradient with tokens first, and would copy them for every tile.
    out, grad = _tokens_first(out), _tokens_first(grad)
    dq, home = torch.zeros_like(q, dtype=lse.dtype), mine.zeros(lse.dtype)
    reducer = _ReduceScatterReducer(home, ring) if ring.impl == "allgather" else _P2PReducer(home, ring)
    heads, middle = q.shape[1], reducer.first_heads(q.shape[1])
    with without_autocast(q.device):
        q_laid, out_laid, grad_laid = ring.kernel.laid([q, out, grad], mine.v.shape[3], scores)
        finished = BackwardInputs(q_laid, out_laid, grad_laid, lse)
        for step, here in _steps(mine, ring):
            for visitor in here:
                own = visitor.owner == ring.rank
                part = home if own else home.zeros(lse.dtype)
                _attend_backward(finished, dq, visitor, part, (0, middle if own else heads), ring, scores)
                reducer.add(visitor, step, part)
            reducer.send(step)
        _attend_backward(finished, dq, _Visitor(ring.rank, 0, mine), home, (middle, heads), ring, scores)
        del q_laid, out_laid, grad_laid, finished
        reducer.arrive()
    dsinks = None
    if sinks is not None:
        share = (sinks.to(lse.dtype)[:, None] - lse).exp()  # of the softmax, what the sink takes
        dsinks = -(share * (grad.to(lse.dtype) * out).sum(-1)).sum((0, 2)).to(sinks.dtype)
    return dq.to(q.dtype), home.k.to(q.dtype), home.v.to(q.dtype), dsinks


def _attend(seen: SoftmaxAccumulator, q: Tensor, visitor: _Visitor, ring: Ring, scores: Scores) -> None:
    """Add my queries' attention to a block that is here."""
    block = ring.blocks[visitor.owner]
    if block is not None:
        heads = q.shape[1]
        k, v = (_kv_of(x, ring, (0, heads), heads) for x in (visitor.kv.k, visitor.kv.v))
        ring.kernel.accumulate(seen, q, k, v, block, scores)


def _attend_backward(
    done: BackwardInputs, dq: Tensor, visitor: _Visitor, into: _KVBlock, heads: Span, ring: Ring, scores: Scores
) -> None:
    """Add the gradients of query heads [start, stop) to `dq`, and those of the block to `into`."""
    block = ring.blocks[visitor.owner]
    if block is None or heads[0] == heads[1]:
        return
    total = dq.shape[1]
    k, v = (_kv_of(x, ring, heads, total) for x in (visitor.kv.k, visitor.kv.v))
    if ring.kv_head_index is None:
        dk, dv = (_kv_of(x, ring, heads, total) for x in (into.k, into.v))
    else:  # heads that were repeated: added up below
        dk, dv = into.k.new_zeros(k.shape), into.v.new_zeros(v.shape)
    at = slice(None), slice(*heads)
    part = scores.of_heads(*heads)
    ring.kernel.accumulate_gradients((dq[at], dk, dv), done.at(*at), k, v, block, part)
    if ring.kv_head_index is not None:
        index = ring.kv_head_index[slice(*heads)]
        into.k.index_add_(1, index, dk)
        into.v.index_add_(1, index, dv)


def _kv_of(x_BKTD: Tensor, ring: Ring, heads: Span, total: int) -> Tensor:
    """The KV heads of query heads [start, stop) of `total`: a view, which a group that is cut shares with its other
    part. Where groups are uneven a copy, with a KV head for every query head.
    """
    start, stop = heads
    if ring.kv_head_index is not None:
        return x_BKTD.index_select(1, ring.kv_head_index[start:stop])
    group = total // x_BKTD.shape[1]
    return x_BKTD[:, start // group : -(-stop // group)]


# ---------------------------------------------------------------------------------------------------------------------
# Keys and values on their way.


@dataclass(frozen=True)
class _KVBlock:
    """Keys and values of one block, or their gradients.

    Attributes:
        k: [B, K, T, D].
        v: [B, K, T, Dv].
        packed: the one buffer that both are views of, so that they are one message. None for those of a ring of one
            that nothing is gained from packing: they are where the caller has them.
    """

    k: Tensor
    v: Tensor
    packed: Tensor | None = None

    @classmethod
    def of(cls, packed: Tensor, k_shape: torch.Size, v_shape: torch.Size) -> _KVBlock:
        n = k_shape.numel()
        return cls(packed[:n].view(k_shape), packed[n:].view(v_shape), packed)

    @property
    def message(self) -> Tensor:
        assert self.packed is not None
        return self.packed

    @property
    def saved(self) -> tuple[Tensor, ...]:
        return (self.k, self.v) if self.packed is None else (self.packed,)

    def like(self, packed: Tensor) -> _KVBlock:
        return _KVBlock.of(packed, self.k.shape, self.v.shape)

    def empty(self) -> _KVBlock:
        return self.like(torch.empty_like(self.message))

    def zeros(self, dtype: torch.dtype) -> _KVBlock:
        return self.like(self.k.new_zeros(self.k.numel() + self.v.numel(), dtype=dtype))


def _my_block(q: Tensor, k: Tensor, v: Tensor, ring: Ring, *, saved: bool = True) -> _KVBlock:
    """My keys and values, packed if they travel. A CPU's kernel reads them once per block of queries: it gains from a
    copy in which the tokens of a head lie together. Else they are copied only if saving them would keep more alive.
    """
    if ring.size == 1 and not _reads_again(k.device) and (not saved or alone(q, k, v)):
        return _KVBlock(k, v)
    return _KVBlock.of(torch.cat([k.reshape(-1), v.reshape(-1)]), k.shape, v.shape)


def _reads_again(device: torch.device) -> bool:
    return device.type == "cpu"


def alone(*xs: Tensor) -> bool:
    """Whether keeping these tensors keeps alive little else (a sequence's padding, an eighth at most)."""
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in xs}
    return 8 * sum(storages.values()) <= 9 * sum(x.nbytes for x in xs)


def _tokens_first(x_BHSD: Tensor) -> Tensor:
    """The same, its memory in the order [B, S, H, D]: a copy only if it is not."""
    return x_BHSD.transpose(1, 2).contiguous().transpose(1, 2)


@dataclass(frozen=True)
class _Visitor:
    """A KV block that is here: rank `owner`'s, come to the right (+1) or to the left (-1); 0 if it did not travel."""

    owner: int
    direction: int
    kv: _KVBlock


def _steps(mine: _KVBlock, ring: Ring) -> Iterator[tuple[int, list[_Visitor]]]:
    """The KV blocks that are here, step by step; at step 0 my own. While one step is computed the next is in flight."""
    here, routes = [_Visitor(ring.rank, 0, mine)], ring.routes
    if ring.impl == "allgather" and ring.group is not None:
        everything = mine.message.new_empty(ring.size, mine.message.numel())
        gather_into(everything.view(-1), mine.message, group=ring.group)
        others = [(ring.rank - step) % ring.size for step in range(1, ring.size)]
        yield 0, here + [_Visitor(rank, 0, mine.like(everything[rank])) for rank in others]
        return
    leaving = {+1: mine, -1: mine}
    for step in range(1, routes.rounds + 1):
        assert ring.group is not None
        sends, receives, coming = [], [], []
        for direction, tag in ((+1, _KV_RIGHT), (-1, _KV_LEFT)):
            if _sends(routes, ring.rank, direction, step):
                sends.append(P2PMessage(leaving[direction].message, (ring.rank + direction) % ring.size, tag))
            if _sends(routes, (ring.rank - direction) % ring.size, direction, step):
                visitor = _Visitor((ring.rank - direction * step) % ring.size, direction, mine.empty())
                receives.append(P2PMessage(visitor.kv.message, (ring.rank - direction) % ring.size, tag))
                coming.append(visitor)
        works = post(sends, receives, ring.group)
        yield step - 1, here
        wait_for(works)
        here = coming
        leaving = {visitor.direction: visitor.kv for visitor in coming}
    yield routes.rounds, here


def _sends(routes: Routes, rank: int, direction: int, step: int) -> bool:
    return routes.sends_right(rank, step) if direction > 0 else routes.sends_left(rank, step)


class _P2PReducer:
    """Gradients of KV blocks on their way home, in fp32 at least: each rank that a block visits adds its part.

    They follow one step behind the block, and go straight home from the last rank that the block visits. My own part
    of my own block waits at home.
    """

    def __init__(self, home: _KVBlock, ring: Ring) -> None:
        self.home, self.ring, self.routes = home, ring, ring.routes
        self.works: list[dist.Work] = []
        self.sends: list[P2PMessage] = []
        self.sending: list[P2PMessage] = []  # held until they have left
        self.arrived: dict[int, Tensor] = {}
        self.returned: list[Tensor] = []

    def first_heads(self, heads: int) -> int:
        """How many query heads of my own block to compute at once.

        The others wait until everything is sent: they hide the last gradient's way home, as these hide the first
        block's way here. A group of query heads stays together, unless it is the only one.
        """
        if self.ring.size == 1:
            return heads
        kv_heads = heads if self.ring.kv_head_index is not None else self.home.k.shape[1]
        return heads // 2 if kv_heads == 1 else kv_heads // 2 * (heads // kv_heads)

    def _reach(self, rank: int, direction: int) -> int:
        return (self.routes.right if direction > 0 else self.routes.left)[rank]

    def add(self, visitor: _Visitor, step: int, part: _KVBlock) -> None:
        """My part of the gradient of a block that is here at this step."""
        direction = visitor.direction
        if direction == 0:
            return
        if step > 1:
            self._wait()
            part.message.add_(self.arrived.pop(direction))
        onward = self._reach(visitor.owner, direction) > step
        tags = (_GRAD_RIGHT, _HOME_RIGHT) if direction > 0 else (_GRAD_LEFT, _HOME_LEFT)
        peer = (self.ring.rank + direction) % self.ring.size if onward else visitor.owner
        self.sends.append(P2PMessage(part.message, peer, tags[not onward]))

    def send(self, step: int) -> None:
        """This step is computed: pass on what was added, and receive what others pass on."""
        self._wait()
        receives = []
        for direction, on, home in ((+1, _GRAD_RIGHT, _HOME_RIGHT), (-1, _GRAD_LEFT, _HOME_LEFT)):
            before = (self.ring.rank - direction) % self.ring.size
            theirs = (before - direction * step) % self.ring.size  # the block that my neighbour has just computed
            if step and self._reach(theirs, direction) > step:
                self.arrived[direction] = torch.empty_like(self.home.message)
                receives.append(P2PMessage(self.arrived[direction], before, on))
            if step and self._reach(self.ring.rank, direction) == step:
                self.returned.append(torch.empty_like(self.home.message))
                last = (self.ring.rank + direction * step) % self.ring.size
                receives.append(P2PMessage(self.returned[-1], last, home))
        if self.sends or receives:
            assert self.ring.group is not None
            self.works = post(self.sends, receives, self.ring.group)
        self.sending, self.sends = self.sends, []

    def arrive(self) -> None:
        """Wait until all of my own block's gradient is home."""
        self._wait()
        for part in self.returned:
            self.home.message.add_(part)

    def _wait(self) -> None:
        wait_for(self.works)
        self.works = []


class _ReduceScatterReducer:
    """Gradients of all KV blocks at once: one reduce-scatter, the adjoint of the all-gather."""

    def __init__(self, home: _KVBlock, ring: Ring) -> None:
        self.home, self.ring = home, ring
        self.parts: dict[int, Tensor] = {}

    def first_heads(self, heads: int) -> int:
        """All of them: the reduce-scatter wants my own block's gradient too."""
        return heads

    def add(self, visitor: _Visitor, step: int, part: _KVBlock) -> None:
        """My part of the gradient of a block."""
        self.parts[visitor.owner] = part.message

    def send(self, step: int) -> None:
        """Everything is computed."""
        if self.ring.group is not None:
            everything = torch.stack([self.parts[rank] for rank in range(self.ring.size)])
            scatter_into(self.home.message, everything.view(-1), group=self.ring.group)

    def arrive(self) -> None:
        """It is here."""
