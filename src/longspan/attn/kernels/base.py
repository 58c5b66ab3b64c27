"""The protocol of a kernel: attention of some queries to one block of keys, with its log-sum-exp.

Partial results of different tiles, blocks and ranks add up by their log-sum-exps, and a backward that is given the
output and the log-sum-exp of the WHOLE row of scores (flash attention's; Dao et al. 2022, arXiv:2205.14135) gives
gradients that simply add up. So a kernel of this protocol serves one device, a Ulysses rank and a ring alike. One that
gives no log-sum-exp (`AutogradKernel`) serves wherever all keys are at hand.

Shape suffixes: B batch, H query heads, K KV heads, Q queries, T keys, D head_dim.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from longspan.attn.mask import Mask, row_groups
from longspan.attn.score import ScoreKind, Scores
from longspan.core.layout import Span
from longspan.core.regions import Region, intersections


@dataclass(frozen=True, eq=False)
class KernelRequest:
    """What a kernel is asked to compute: facts that are alike on every rank.

    Attributes:
        mask: who attends to whom, limited to the length.
        scores: of one layer; a plan serves every layer whose scores are of the same kind (`Scores.kind`).
        device: where.
        grad: whether gradients will be asked for.
        ring: ranks of the ring; from 2 on blocks are added up by their log-sum-exps.
        same_length: whether there are as many queries as keys.
        dtype: of q, k and v.
        head_dims: of q and k, and of v.
        lse: whether the log-sum-exp is asked for, without a ring too: by a method that saves it itself.
    """

    mask: Mask
    scores: Scores
    device: torch.device
    grad: bool = False
    ring: int = 1
    same_length: bool = True
    dtype: torch.dtype = torch.float32
    head_dims: tuple[int, int] = (64, 64)
    lse: bool = False


@dataclass(frozen=True, eq=False)
class Blocks:
    """My queries and all keys, block by block, by their positions: what a kernel prepares its calls from, once a batch.

    Attributes:
        mask: who attends to whom.
        kind: of the scores.
        batch: rows of the batch.
        heads: query heads on this rank.
        first_head: the number of the first of them in the whole model.
        lengths: real queries and real keys of the whole sequence.
        q_spans: positions of my queries, in the order in which I hold them.
        k_spans: positions of all keys, in the sequence's order; they reach into the padding.
        owners: for each of them the block that it belongs to, where it lies behind the block's earlier ones.
        device: of the tensors.
        token_bytes: of q, k and v of one token.
        dtype: of the tensors.
        head_dims: of q and k, and of v.
    """

    mask: Mask
    kind: ScoreKind
    batch: int
    heads: int
    first_head: int
    lengths: Span
    q_spans: tuple[Span, ...]
    k_spans: tuple[Span, ...]
    owners: tuple[int, ...]
    device: torch.device
    token_bytes: int = 0
    dtype: torch.dtype = torch.float32
    head_dims: tuple[int, int] = (64, 64)

    @property
    def count(self) -> int:
        """Number of blocks."""
        return max(self.owners) + 1

    @property
    def ends(self) -> Span:
        """Positions from which on queries and keys are padding."""
        return self.mask.q_start + self.lengths[0], self.lengths[1]

    @cached_property
    def parts(self) -> tuple[tuple[BlockRegion, ...], ...]:
        """What of the mask lies in each block; of a block that nothing attends to nothing."""
        out: list[list[BlockRegion]] = [[] for _ in range(self.count)]
        q_at, k_at = _offsets(self.q_spans, (0,) * len(self.q_spans)), _offsets(self.k_spans, self.owners)
        for rows in row_groups(self.mask, self.batch):
            regions = self.mask.regions(rows[0], *self.lengths)
            for m, n, region in intersections(regions, self.q_spans, self.k_spans):
                out[self.owners[n]].append(BlockRegion(rows, region, q_at[m], k_at[n]))
        return tuple(map(tuple, out))

    def positions(self, block: int) -> tuple[Tensor, Tensor]:
        """Positions of my queries, int64 [Q], and of a block's keys, int64 [T], on the device."""
        keys = tuple(span for span, owner in zip(self.k_spans, self.owners, strict=True) if owner == block)
        return positions_of(self.q_spans, self.device), positions_of(keys, self.device)


@dataclass(frozen=True, slots=True)
class BlockRegion:
    """A region of the mask among my queries and one block's keys.

    Attributes:
        rows: rows of the batch that have it.
        region: by positions.
        q_at: what to add to a query's position for its place in my tensor.
        k_at: what to add to a key's position for its place in its block's tensor.
    """

    rows: Span
    region: Region
    q_at: int
    k_at: int


def _offsets(spans: tuple[Span, ...], owners: tuple[int, ...]) -> list[int]:
    filled = dict.fromkeys(owners, 0)
    out = []
    for (start, stop), owner in zip(spans, owners, strict=True):
        out.append(filled[owner] - start)
        filled[owner] += stop - start
    return out


def positions_of(spans: tuple[Span, ...], device: torch.device) -> Tensor:
    """All positions of some spans one after the other, int64."""
    return torch.cat([torch.arange(*span, device=device) for span in spans])


class SoftmaxAccumulator:
    """Output and log-sum-exp of the keys seen so far: starts with none, `add` merges more of them in, in fp32 at least.

    Attributes:
        out: [B, H, Q, Dv], the softmax over the keys seen so far times their values; its memory in the order [B, Q, H,
            Dv], as kernels give theirs and as models go on with it.
        lse: [B, H, Q], the log of the sum of their exponentials; -inf where nothing was seen.
    """

    def __init__(self, q_BHQD: Tensor, v_dim: int) -> None:
        dtype = torch.promote_types(q_BHQD.dtype, torch.float32)
        B, H, Q = q_BHQD.shape[:3]
        self.out = q_BHQD.new_zeros(B, Q, H, v_dim, dtype=dtype).transpose(1, 2)
        self.lse = q_BHQD.new_full(q_BHQD.shape[:3], -math.inf, dtype=dtype)

    def add(self, out: Tensor, lse: Tensor, rows: Span | None = None, queries: Span | None = None) -> None:
        """Merge the attention to further keys: exponentials of at most 0, so nothing overflows.

        Written with exp and log, whose results do not depend on where an element lies, as those of `logaddexp` do on a
        CPU (vectors or, at the end, numbers): so a head's result is the same to the bit on whichever rank it is.

        Args:
            out: [rows, H, queries, Dv], the softmax over these keys alone times their values.
            lse: [rows, H, queries], the log of the sum of their exponentials.
            rows: of the batch; by default all.
            queries: by default all.
        """
        mine = slice(*rows or (None,)), slice(None), slice(*queries or (None,))
        old, more = self.lse[mine], lse.to(self.lse.dtype)
        highest = torch.maximum(old, more)
        highest = torch.where(torch.isneginf(highest), 0.0, highest)  # -inf - -inf is NaN
        before, now = (old - highest).exp_(), (more - highest).exp_()
        total = before + now
        self.lse[mine] = highest + total.log()
        total = torch.where(total > 0, total, 1.0)  # nothing seen yet: all weights are 0
        self.out[mine].mul_((before / total)[..., None]).add_(out * (now / total)[..., None])


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Within this, autocast is off: what is summed in fp32 would be cast to half precision before it is multiplied."""
    kind = device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.autocast(kind, enabled=False)
    return contextlib.nullcontext()


@dataclass(frozen=True, slots=True)
class BackwardInputs:
    """Queries whose attention to ALL blocks is computed: what the backward of each block needs of them.

    Attributes:
        q: [B, H, Q, D].
        out: [B, H, Q, Dv], the whole output.
        grad: its gradient.
        lse: [B, H, Q], the whole row's log-sum-exp, 0 where a query sees nothing at all.
    """

    q: Tensor
    out: Tensor
    grad: Tensor
    lse: Tensor

    def at(self, *index: slice) -> BackwardInputs:
        """Some rows, heads and queries of them."""
        return BackwardInputs(self.q[index], self.out[index], self.grad[index], self.lse[index])


@runtime_checkable
class Kernel(Protocol):
    """What a registered kernel is, whatever it gives."""

    name: str

    def refuses(self, need: KernelRequest) -> str | None:
        """Why it cannot compute this, with the way out; None if it can."""

    def describe(self, need: KernelRequest) -> str:
        """TileScores it would compute this, in a few words."""


class BlockKernel(Kernel, Protocol):
    """A kernel that gives a log-sum-exp: of one device, and of every block of a ring.

    To write one, inherit from this and give `name`, `refuses`, `describe`, `prepare`, `forward` and `backward`.
    """

    def prepare(self, blocks: Blocks) -> Sequence[Any]:
        """For every block of keys what `forward` and `backward` need to know of it, on the device; made once a batch.

        None where nothing attends to a block: the kernel is then not called.
        """

    def forward(
        self, q_BHQD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, block: Any, scores: Scores
    ) -> tuple[Tensor, Tensor]:
        """Attention to one block. Sinks are left out: they join at the end.

        Args:
            q_BHQD: my queries, of all of this rank's heads or (`head_chunks`) of some. Any strides with a contiguous
                last dimension.
            k_BKTD: the block's keys; K divides H, heads in equal groups.
            v_BKTD: its values; their head_dim may differ.
            block: of `prepare`.
            scores: scale, softcap, biases of these heads.

        Returns:
            [B, H, Q, Dv], the softmax over these keys times their values, and its log-sum-exp [B, H, Q] in fp32 at
            least; zero and -inf where a query sees none of these keys.
        """

    def backward(
        self, done: BackwardInputs, k_BKTD: Tensor, v_BKTD: Tensor, block: Any, scores: Scores
    ) -> tuple[Tensor, Tensor, Tensor]:
        """This block's part of dq [B, H, Q, D], and dk [B, K, T, D] and dv [B, K, T, Dv] of it.

        Args:
            done: queries, and the output, its gradient and the log-sum-exp of the whole row.
            k_BKTD: as in `forward`; `done` and these may hold a part of the heads.
            v_BKTD: as in `forward`.
            block: of `prepare`.
            scores: of these heads.
        """

    def laid(self, xs: Sequence[Tensor], v_dim: int, scores: Scores) -> list[Tensor]:
        """q (of a backward: q, out and its gradient) as this kernel takes them, made once for all blocks.

        What a kernel converts or fills up is done here, else it would be for every block. `accumulate` and
        `accumulate_gradients` get what this gives; the head_dims are still those of k and v.
        """
        return list(xs)

    def accumulate(
        self, into: SoftmaxAccumulator, q_BHQD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, block: Any, scores: Scores
    ) -> None:
        """Add `forward` to `into`; a kernel of many small calls may do so in place."""
        into.add(*self.forward(q_BHQD, k_BKTD, v_BKTD, block, scores))

    def accumulate_gradients(
        self,
        into: tuple[Tensor, Tensor, Tensor],
        done: BackwardInputs,
        k_BKTD: Tensor,
        v_BKTD: Tensor,
        block: Any,
        scores: Scores,
    ) -> None:
        """Add `backward` to `into` (dq, dk, dv, in fp32 at least); a kernel of many small calls may do so in place."""
        for total, more in zip(into, self.backward(done, k_BKTD, v_BKTD, block, scores), strict=True):
            total += more


class AddingKernel(BlockKernel):
    """A kernel of many calls: it gives `accumulate` and `accumulate_gradients`, and the rest follows."""

    def forward(
        self, q_BHQD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, block: Any, scores: Scores
    ) -> tuple[Tensor, Tensor]:
        """All calls, added up; see `BlockKernel`."""
        into = SoftmaxAccumulator(q_BHQD, v_BKTD.shape[3])
        self.accumulate(into, q_BHQD, k_BKTD, v_BKTD, block, scores)
        return into.out, into.lse

    def backward(
        self, done: BackwardInputs, k_BKTD: Tensor, v_BKTD: Tensor, block: Any, scores: Scores
    ) -> tuple[Tensor, Tensor, Tensor]:
        """All calls' gradients, added up in fp32 at least; see `BlockKernel`."""
        dq, dk, dv = (torch.zeros_like(x, dtype=done.lse.dtype) for x in (done.q, k_BKTD, v_BKTD))
        self.accumulate_gradients((dq, dk, dv), done, k_BKTD, v_BKTD, block, scores)
        return dq, dk, dv


class AutogradKernel(Kernel, Protocol):
    """A kernel that gives the output alone, with gradients by autograd: where all keys are at hand (no ring)."""

    def prepare_batch(self, blocks: Blocks) -> Any:
        """What `run` needs to know of the batch, on the device; made once a batch."""

    def run(self, q_BSHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, prepared: Any, scores: Scores) -> Tensor:
        """Attention of all tokens, `[B, S, H, Dv]`; a query that sees nothing gives zero."""

    def laid(self, q_BSHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, prepared: Any) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v as `run` would copy them, if it would: whoever has them asks for this before `run`, and lets go of
        what they came in.
        """
        return q_BSHD, k_BTKD, v_BTKD


REGISTRY: dict[str, Kernel] = {}
"""Kernels by name: what `kernel=` takes in `longspan.attention` and `longspan.parallelize`."""

ALIASES = {"block": "tiled"}
"""Older names."""


def register(kernel: Kernel) -> Kernel:
    """Make a kernel known by its name, so that `kernel="its name"` takes it everywhere."""
    REGISTRY[kernel.name] = kernel
    return kernel
