"""Ring Attention: my queries stay, keys and values of all ranks come by, block by block.

Liu et al. 2023, "Ring Attention with Blockwise Transformers", arXiv:2310.01889; with zigzag blocks as in Llama 3
(arXiv:2407.21783). Contiguous and zigzag rings, the all-gather variant, and attention on a single device by tiles (a
ring of one) are this ONE loop; what differs is a layout and where blocks come from.

Per rank and layer the forward sends b * S/R * Hk * (D + Dv) bytes for every hop of a block, R - 1 hops where every rank
needs every block; the backward sends that again, and dK and dV in fp32 as often. GQA moves KV heads only.

Shape suffixes: B batch, S tokens of my block, T tokens of a block of keys, H query heads, K KV heads, D head_dim.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from longspan.attn.kernels import flex
from longspan.attn.kernels import tiled as tiles
from longspan.attn.mask import Mask, row_groups
from longspan.attn.score import Scores
from longspan.comm.gather import gather_into, scatter_into
from longspan.comm.p2p import P2PMessage, post, ring_shift
from longspan.core.layout import Layout, Span
from longspan.core.regions import meeting
from longspan.core.routes import Routes, ring_routes

# Which way a parcel goes. Both sides sort by it.
_KV_RIGHT, _KV_LEFT, _GRAD_RIGHT, _GRAD_LEFT, _HOME_RIGHT, _HOME_LEFT = range(6)


@dataclass(frozen=True)
class Ring:
    """One ring of R ranks and how the sequence lies on it: a value, and the same on every rank but for `rank`.

    Attributes:
        group: the ranks; None for a ring of one.
        rank: my place.
        layout: of the queries over ring x ulysses; only its blocks matter here.
        lengths: real queries and real keys of the whole sequence.
        impl: "p2p" or "allgather".
        kv_head_index: for every query head its KV head, where they are not in equal groups. They are repeated on
            arrival: what travels is each KV head once.
        kernel: "block" (tiles), or "flex": FlexAttention on each block as a whole.
    """

    group: dist.ProcessGroup | None
    rank: int
    layout: Layout
    lengths: Span
    impl: str = "p2p"
    kv_head_index: tuple[int, ...] | None = None
    kernel: str = "block"

    @property
    def size(self) -> int:
        """R."""
        return self.layout.ring

    def q_runs(self, rank: int, mask: Mask) -> tuple[Span, ...]:
        """Positions of the queries of one rank's block."""
        runs = self.layout.block(self.lengths[0], rank)
        return tuple((start + mask.q_start, stop + mask.q_start) for start, stop in runs)

    def k_runs(self, rank: int) -> tuple[Span, ...]:
        """Positions of the keys of one rank's block."""
        return self.layout.block(self.lengths[1], rank)

    def places(self, block: int, mask: Mask, device: torch.device) -> flex.Places:
        """Where my queries and a block's keys lie, for FlexAttention."""
        i, j = (_positions(runs, device) for runs in (self.q_runs(self.rank, mask), self.k_runs(block)))
        return flex.Places(i, j, (mask.q_start + self.lengths[0], self.lengths[1]))

    def calls(self, mask: Mask, batch: int, scores: Scores) -> tuple[tuple[tiles.Call, ...], ...]:
        """The tiles of my queries against every block."""
        q_runs, (k_runs, owners) = self.q_runs(self.rank, mask), self.layout.runs(self.lengths[1])
        materialized = tiles.must_materialize(mask, scores)
        return tiles.calls(mask.without_mod(), batch, self.lengths, q_runs, k_runs, owners, materialized)

    def routes(self, mask: Mask, batch: int) -> Routes:
        """How far every block travels."""
        return routes_of(self.layout, self.lengths, mask, batch)


def routes_of(layout: Layout, lengths: Span, mask: Mask, batch: int) -> Routes:
    """How far every block of a ring travels: as far as the mask needs it (a `mod` is not asked)."""
    return _routes(layout, lengths, mask.without_mod(), batch)


@functools.lru_cache(maxsize=32)
def _routes(layout: Layout, lengths: Span, mask: Mask, batch: int) -> Routes:
    return ring_routes([[work > 0 for work in row] for row in work_of_blocks(layout, lengths, mask, batch)])


def work_of_blocks(layout: Layout, lengths: Span, mask: Mask, batch: int) -> list[list[int]]:
    """`work[i][j]`: pairs of queries of block i and keys of block j that attend to each other."""
    work = [[0] * layout.ring for _ in range(layout.ring)]
    q_runs, q_owners = layout.runs(lengths[0])
    k_runs, k_owners = layout.runs(lengths[1])
    q_runs = tuple((start + mask.q_start, stop + mask.q_start) for start, stop in q_runs)
    for b0, b1 in row_groups(mask, batch):
        for m, n, part in meeting(mask.regions(b0, *lengths), q_runs, k_runs):
            work[q_owners[m]][k_owners[n]] += (b1 - b0) * part.pairs
    return work


def ring_attention(q_BHSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, ring: Ring, mask: Mask, scores: Scores) -> Tensor:
    """Attention of my block's queries over the whole sequence, exactly, with gradients.

    Args:
        q_BHSD: my block's queries.
        k_BKSD: my block's keys; with `lengths` that differ it has another number of tokens than the queries'.
        v_BKSD: its values.
        ring: the ring.
        mask: over the whole sequence.
        scores: scale, softcap, sinks, biases of these heads.

    Returns:
        `[B, H, S, Dv]`; queries that see nothing (padding) give zero.
    """
    if q_BHSD.shape[1] == 0:  # no rank of this ring has heads
        return scores.nothing(q_BHSD, v_BKSD)
    out: Tensor = _apply(q_BHSD, k_BKSD, v_BKSD, scores.sinks, ring, mask, scores)
    return out


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _apply(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, ring: Ring, mask: Mask, scores: Scores) -> Tensor:
    # A compiler may not look inside: it would give zero gradients for buffers that a collective fills.
    out: Tensor = _RingAttention.apply(q, k, v, sinks, ring, mask, scores)  # type: ignore[no-untyped-call]
    return out


class _RingAttention(torch.autograd.Function):
    """The loop. Its backward goes round once more, with the gradients of every block behind it."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, ring: Ring, mask: Mask, scores: Scores
    ) -> Tensor:
        mine = _Block(torch.cat([k.reshape(-1), v.reshape(-1)]), k.shape, v.shape)
        partial = tiles.SoftmaxAccumulator(q, v.shape[3])
        work = _Work(ring, mask, scores, q)
        for _, visits in _rounds(mine, ring, ring.routes(mask, q.shape[0])):
            for visit in visits:
                work.forward(partial, q, visit)
        if sinks is not None:  # one more key per head, whose value is zero
            zero = partial.out.new_zeros(())
            partial.add(zero, sinks[:, None].expand(q.shape[:3]), (0, q.shape[0]), (0, q.shape[2]))
        out = partial.out.to(q.dtype)
        lse = partial.lse.masked_fill(torch.isneginf(partial.lse), 0)
        ctx.save_for_backward(q, mine.packed, out, lse, sinks)
        ctx.shapes, ctx.ring, ctx.mask, ctx.scores = (k.shape, v.shape), ring, mask, scores
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        q, packed, out, lse, sinks = ctx.saved_tensors
        ring: Ring = ctx.ring
        done = tiles.Finished(q, out, grad if grad.stride(-1) == 1 else grad.contiguous(), lse)
        mine = _Block(packed, *ctx.shapes)
        dq, home = torch.zeros_like(q, dtype=lse.dtype), mine.zeros(lse.dtype)
        routes = ring.routes(ctx.mask, q.shape[0])
        travel = _Scattered(home, ring) if ring.impl == "allgather" else _Homeward(home, ring, routes)
        work = _Work(ring, ctx.mask, ctx.scores, q)
        heads, middle = q.shape[1], travel.first_heads(q.shape[1])
        for hop, visits in _rounds(mine, ring, routes):
            for visit in visits:
                own = visit.rank == ring.rank
                part = home if own else home.zeros(lse.dtype)
                work.backward(done, dq, visit, part, (0, middle if own else heads))
                travel.add(visit, hop, part)
            travel.send(hop)
        work.backward(done, dq, _Visit(ring.rank, 0, mine), home, (middle, heads))
        travel.arrive()
        dsinks = None
        if sinks is not None:
            share = (sinks.to(lse.dtype)[:, None] - lse).exp()  # of the softmax, what the sink takes
            dsinks = -(share * (grad.to(lse.dtype) * out).sum(-1)).sum((0, 2)).to(sinks.dtype)
        return dq.to(q.dtype), home.k.to(q.dtype), home.v.to(q.dtype), dsinks, None, None, None


class _Work:
    """What my queries do with a block that is here: the kernel's part of the loop."""

    def __init__(self, ring: Ring, mask: Mask, scores: Scores, q: Tensor) -> None:
        self.ring, self.mask, self.scores = ring, mask, scores
        self.calls, self.device = ring.calls(mask, q.shape[0], scores), q.device

    def forward(self, partial: tiles.SoftmaxAccumulator, q: Tensor, visit: _Visit) -> None:
        """Add the attention to the block to `partial`."""
        if self.calls[visit.rank]:
            k, v = (_kv_of(x, self.ring, (0, q.shape[1]), q.shape[1]) for x in (visit.held.k, visit.held.v))
            kernel, where = self._kernel(visit.rank)
            kernel.forward(partial, q, k, v, where, self.mask, self.scores)

    def backward(self, done: tiles.Finished, dq: Tensor, visit: _Visit, into: _Block, heads: Span) -> None:
        """Add the gradients of query heads [start, stop) to `dq`, and those of the block to `into`."""
        if not self.calls[visit.rank] or heads[0] == heads[1]:
            return
        total = dq.shape[1]
        k, v = (_kv_of(x, self.ring, heads, total) for x in (visit.held.k, visit.held.v))
        if self.ring.kv_head_index is None:
            dk, dv = (_kv_of(x, self.ring, heads, total) for x in (into.k, into.v))
        else:  # heads that were repeated: added up below
            dk, dv = into.k.new_zeros(k.shape), into.v.new_zeros(v.shape)
        at = slice(None), slice(*heads)
        kernel, where = self._kernel(visit.rank)
        kernel.backward(done.at(*at), k, v, where, self.mask, self.scores.of_heads(*heads), (dq[at], dk, dv))
        if self.ring.kv_head_index is not None:
            index = torch.tensor(self.ring.kv_head_index[slice(*heads)], device=dq.device)
            into.k.index_add_(1, index, dk)
            into.v.index_add_(1, index, dv)

    def _kernel(self, block: int) -> tuple[Any, Any]:
        """What computes, and where queries and keys lie in its terms."""
        if self.ring.kernel == "flex":
            return flex, self.ring.places(block, self.mask, self.device)
        return tiles, self.calls[block]


def _kv_of(x_BKTD: Tensor, ring: Ring, heads: Span, total: int) -> Tensor:
    """The KV heads of query heads [start, stop) of `total`: a view, which a group that is cut shares with its other
    part. Where groups are uneven a copy, with a KV head for every query head.
    """
    start, stop = heads
    if ring.kv_head_index is not None:
        return x_BKTD.index_select(1, torch.tensor(ring.kv_head_index[start:stop], device=x_BKTD.device))
    group = total // x_BKTD.shape[1]
    return x_BKTD[:, start // group : -(-stop // group)]


# ---------------------------------------------------------------------------------------------------------------------
# Keys and values on their way.


@dataclass(frozen=True)
class _Block:
    """Keys and values of one block, or their gradients, in one buffer: one message."""

    packed: Tensor
    k_shape: torch.Size
    v_shape: torch.Size

    @property
    def k(self) -> Tensor:
        return self.packed[: self.k_shape.numel()].view(self.k_shape)

    @property
    def v(self) -> Tensor:
        return self.packed[self.k_shape.numel() :].view(self.v_shape)

    def like(self, packed: Tensor) -> _Block:
        return _Block(packed, self.k_shape, self.v_shape)

    def empty(self) -> _Block:
        return self.like(torch.empty_like(self.packed))

    def zeros(self, dtype: torch.dtype) -> _Block:
        return self.like(torch.zeros_like(self.packed, dtype=dtype))


@dataclass(frozen=True)
class _Visit:
    """A block that is here: rank `rank`'s, come to the right (+1) or to the left (-1)."""

    rank: int
    way: int
    held: _Block


def _rounds(mine: _Block, ring: Ring, routes: Routes) -> Iterator[tuple[int, list[_Visit]]]:
    """The blocks that visit me, round by round; round 0 is my own. While one round is computed the next is in
    flight.
    """
    here = [_Visit(ring.rank, 0, mine)]
    if ring.impl == "allgather" and ring.group is not None:
        everything = mine.packed.new_empty(ring.size, mine.packed.numel())
        gather_into(everything.view(-1), mine.packed, group=ring.group)
        others = [(ring.rank - hop) % ring.size for hop in range(1, ring.size)]
        yield 0, here + [_Visit(rank, 0, mine.like(everything[rank])) for rank in others]
        return
    leaving = {+1: mine, -1: mine}
    for hop in range(1, routes.rounds + 1):
        assert ring.group is not None
        sends, receives, coming = [], [], []
        for way, tag in ((+1, _KV_RIGHT), (-1, _KV_LEFT)):
            if _sends(routes, ring.rank, way, hop):
                sends.append(P2PMessage(leaving[way].packed, (ring.rank + way) % ring.size, tag))
            if _sends(routes, (ring.rank - way) % ring.size, way, hop):
                visit = _Visit((ring.rank - way * hop) % ring.size, way, mine.empty())
                receives.append(P2PMessage(visit.held.packed, (ring.rank - way) % ring.size, tag))
                coming.append(visit)
        works = post(sends, receives, ring.group)
        yield hop - 1, here
        for work in works:
            work.wait()
        here = coming
        leaving = {visit.way: visit.held for visit in coming}
    yield routes.rounds, here


def _sends(routes: Routes, rank: int, way: int, hop: int) -> bool:
    return routes.sends_right(rank, hop) if way > 0 else routes.sends_left(rank, hop)


class _Homeward:
    """Gradients of blocks on their way home, in fp32 at least: each rank that a block visits adds its part.

    They follow one round behind the block, and go straight home from the last rank that the block visits. My own part
    of my own block waits at home.
    """

    def __init__(self, home: _Block, ring: Ring, routes: Routes) -> None:
        self.home, self.ring, self.routes = home, ring, routes
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
        kv_heads = heads if self.ring.kv_head_index is not None else self.home.k_shape[1]
        return heads // 2 if kv_heads == 1 else kv_heads // 2 * (heads // kv_heads)

    def _reach(self, rank: int, way: int) -> int:
        return (self.routes.right if way > 0 else self.routes.left)[rank]

    def add(self, visit: _Visit, hop: int, part: _Block) -> None:
        """My part of the gradient of a block that is here in round `hop`."""
        if visit.way == 0:
            return
        if hop > 1:
            self._wait()
            part.packed.add_(self.arrived.pop(visit.way))
        onward = self._reach(visit.rank, visit.way) > hop
        tags = (_GRAD_RIGHT, _HOME_RIGHT) if visit.way > 0 else (_GRAD_LEFT, _HOME_LEFT)
        peer = (self.ring.rank + visit.way) % self.ring.size if onward else visit.rank
        self.sends.append(P2PMessage(part.packed, peer, tags[not onward]))

    def send(self, hop: int) -> None:
        """Round `hop` is computed: pass on what was added, and open the doors for what others pass on."""
        self._wait()
        receives = []
        for way, on, home in ((+1, _GRAD_RIGHT, _HOME_RIGHT), (-1, _GRAD_LEFT, _HOME_LEFT)):
            before = (self.ring.rank - way) % self.ring.size
            theirs = (before - way * hop) % self.ring.size  # the block that my neighbour has just computed
            if hop and self._reach(theirs, way) > hop:
                self.arrived[way] = torch.empty_like(self.home.packed)
                receives.append(P2PMessage(self.arrived[way], before, on))
            if hop and self._reach(self.ring.rank, way) == hop:
                self.returned.append(torch.empty_like(self.home.packed))
                receives.append(P2PMessage(self.returned[-1], (self.ring.rank + way * hop) % self.ring.size, home))
        if self.sends or receives:
            assert self.ring.group is not None
            self.works = post(self.sends, receives, self.ring.group)
        self.sending, self.sends = self.sends, []

    def arrive(self) -> None:
        """Wait until all of my own block's gradient is home."""
        self._wait()
        for part in self.returned:
            self.home.packed.add_(part)

    def _wait(self) -> None:
        for work in self.works:
            work.wait()
        self.works = []


class _Scattered:
    """Gradients of all blocks at once: one reduce-scatter, the adjoint of the all-gather."""

    def __init__(self, home: _Block, ring: Ring) -> None:
        self.home, self.ring = home, ring
        self.parts: dict[int, Tensor] = {}

    def first_heads(self, heads: int) -> int:
        """All of them: the reduce-scatter wants my own block's gradient too."""
        return heads

    def add(self, visit: _Visit, hop: int, part: _Block) -> None:
        """My part of the gradient of a block."""
        self.parts[visit.rank] = part.packed

    def send(self, hop: int) -> None:
        """Everything is computed."""
        if self.ring.group is not None:
            everything = torch.stack([self.parts[rank] for rank in range(self.ring.size)])
            scatter_into(self.home.packed, everything.view(-1), group=self.ring.group)

    def arrive(self) -> None:
        """It is here."""


# ---------------------------------------------------------------------------------------------------------------------
# The same in plain operations, for reading, for tests, and as kernel="eager".


def reference_ring(q_BHSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, ring: Ring, mask: Mask, scores: Scores) -> Tensor:
    """`ring_attention` by its definition: every block's whole scores, an online softmax, autograd for the gradients.

    Every block goes all the way round, nothing overlaps and memory is O(S x T); learnt biases get their gradients.
    """
    if q_BHSD.shape[1] == 0:
        return scores.nothing(q_BHSD, v_BKSD)
    dtype = torch.promote_types(q_BHSD.dtype, torch.float32)
    batch, heads = q_BHSD.shape[:2]
    i = _positions(ring.q_runs(ring.rank, mask), q_BHSD.device)
    # The highest score so far only keeps exp() in range; it cancels, so nothing is differentiated through it.
    highest = q_BHSD.new_full(q_BHSD.shape[:3], -1e30, dtype=dtype)
    if scores.sinks is not None:
        highest = torch.maximum(highest, scores.sinks.detach().to(dtype)[:, None])
    total = q_BHSD.new_zeros(q_BHSD.shape[:3], dtype=dtype)
    out = q_BHSD.new_zeros(*q_BHSD.shape[:3], v_BKSD.shape[3], dtype=dtype)
    k, v = k_BKSD, v_BKSD
    for hop in range(ring.size):
        j = _positions(ring.k_runs((ring.rank - hop) % ring.size), q_BHSD.device)
        group = heads // (k.shape[1] if ring.kv_head_index is None else heads)
        k_BHTD, v_BHTD = (_kv_of(x, ring, (0, heads), heads).repeat_interleave(group, 1).to(dtype) for x in (k, v))
        x_BHST = q_BHSD.to(dtype) @ k_BHTD.transpose(2, 3) * scores.scale_of(q_BHSD.shape[3])
        if scores.softcap is not None:
            x_BHST = scores.softcap * torch.tanh(x_BHST / scores.softcap)
        bias_HST = scores.bias_of(heads, i, j, dtype)
        if bias_HST is not None:
            x_BHST = x_BHST + bias_HST
        real = (i < mask.q_start + ring.lengths[0])[:, None] & (j < ring.lengths[1])
        allowed = mask.dense(batch, heads, i, j, first_head=scores.first_head) & real
        x_BHST = x_BHST.masked_fill(~allowed, -math.inf)
        new_highest = torch.maximum(highest, x_BHST.detach().amax(-1))
        p_BHST = (x_BHST - new_highest[..., None]).exp()
        before = (highest - new_highest).exp()
        total = total * before + p_BHST.sum(-1)
        out = out * before[..., None] + p_BHST @ v_BHTD
        highest = new_highest
        if hop + 1 < ring.size:
            k, v = ring_shift(k, ring.group), ring_shift(v, ring.group)
    if scores.sinks is not None:
        total = total + (scores.sinks.to(dtype)[:, None] - highest).exp()
    return (out / torch.where(total > 0, total, 1)[..., None]).to(q_BHSD.dtype)


def _positions(runs: tuple[Span, ...], device: torch.device) -> Tensor:
    return torch.cat([torch.arange(*run, device=device) for run in runs])
