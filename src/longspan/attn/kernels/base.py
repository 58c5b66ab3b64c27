"""The kernel protocol: attention of some queries to one KV block, with its log-sum-exp.

Partial results of tiles, blocks and ranks are merged by their log-sum-exps. A backward that takes the output and the
log-sum-exp of the WHOLE row of scores (flash attention's; Dao et al. 2022, arXiv:2205.14135) returns gradients that
simply add up. So a `BlockKernel` serves one device, a Ulysses rank and a ring. An `AutogradKernel`, which returns
no log-sum-exp, needs all keys on the rank.

Shape suffixes: B batch, H query heads, K KV heads, Q queries, T keys, D head_dim of q and k,
V of v.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Protocol, TypeGuard, TypeVar, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from longspan.attn.mask import Mask, row_groups
from longspan.attn.score import ScoreKind, Scores
from longspan.core.layout import Lengths, Span
from longspan.core.regions import Region, intersections

KEYS = "keys of another sequence or length"
CUSTOM = "a custom mask"
_OPTION_NAMES = {
    "segments": "documents",
    "kv_segments": KEYS,
    "q_start": KEYS,
    "bidirectional": "bidirectional spans",
    "nodes": "trees",
}
"""Fields of `Mask` whose option has another name."""


def _options(kind: Any) -> tuple[tuple[str, Any, str], ...]:
    """Return name, default and option of each field of `Mask` or `Scores`, but those that every kernel computes."""
    every_kernel = "causal", "scale", "first_head"
    names = ((x.name, x.default) for x in fields(kind) if x.name not in every_kernel)
    return tuple((name, default, _OPTION_NAMES.get(name, name)) for name, default in names)


OPTIONS = {"mask": _options(Mask), "scores": _options(Scores)}
"""Every option; at import, as a compiler cannot trace `fields`."""

BY_REGIONS = frozenset(
    {"window", "a window to both sides", "chunk_size", "prefix", "documents", KEYS, "bidirectional spans", "trees"}
    | {CUSTOM}
)
"""The options that `Mask.regions` and `Mask.dense` express."""
CHANGES_EACH_SCORE = frozenset({"mask_mod", "softcap", "alibi", "bias"})
BY_SCORES = CHANGES_EACH_SCORE | {"sinks"}
"""The options that change scores, or the sum of their exponentials."""


def _is_given(value: Any, default: Any) -> bool:
    return value is not default and (isinstance(value, Tensor) or value != default)


@dataclass(frozen=True, eq=False)
class KernelRequest:
    """What a kernel is asked to compute; the same on every rank."""

    mask: Mask  # limited to the length
    scores: Scores  # of one layer; a plan serves every layer whose scores are of the same kind (`Scores.kind`)
    device: torch.device  # of the tensors
    grad: bool = False  # whether gradients are needed
    ring: int = 1  # ranks of the ring; from 2 on blocks are merged by their log-sum-exps
    same_length: bool = True  # whether there are as many queries as keys
    dtype: torch.dtype = torch.float32  # of q, k and v
    head_dims: tuple[int, int] = (64, 64)  # of q and k, and of v
    lse: bool = False  # whether the log-sum-exp is needed even without a ring, because the method saves it
    # Rows, and tokens of the whole sequence; None before there is a batch, and for attention to a KV cache.
    tokens: tuple[int, int] | None = None

    @property
    def options(self) -> tuple[str, ...]:
        """The options in use: of every field of `Mask` and `Scores` that is not its default."""
        names = [
            option
            for kind, own in (("mask", self.mask), ("scores", self.scores))
            for name, default, option in OPTIONS[kind]
            if _is_given(getattr(own, name), default)
        ]
        if self.mask.window is not None and not self.mask.causal:
            names.append("a window to both sides")
        if not self.same_length:
            names.append(KEYS)
        if type(self.mask) is not Mask:
            names.append(CUSTOM)
        return tuple(dict.fromkeys(names))


@dataclass(frozen=True, eq=False)
class Blocks:
    """Positions of the local queries and of all KV blocks: a kernel prepares its calls from them, once per batch."""

    mask: Mask
    kind: ScoreKind
    batch: int  # rows of the batch
    heads: int  # local query heads
    first_head: int  # index of the first local query head in the whole model
    lengths: Lengths  # real queries and real keys of the whole sequence
    q_spans: tuple[Span, ...]  # positions of the local queries, in the order of the local tensor
    k_spans: tuple[Span, ...]  # positions of all keys, in the sequence's order, padding included
    # For each of `k_spans` the ring rank whose block contains it; a block's spans are in order.
    source_ranks: tuple[int, ...]
    device: torch.device  # of the tensors
    dtype: torch.dtype = torch.float32  # of the tensors
    head_dims: tuple[int, int] = (64, 64)  # of q and k, and of v

    @property
    def count(self) -> int:
        """Number of blocks."""
        return max(self.source_ranks) + 1

    @property
    def ends(self) -> Lengths:
        """First positions of queries and of keys that are padding."""
        return self.mask.q_start + self.lengths[0], self.lengths[1]

    @cached_property
    def parts(self) -> tuple[tuple[BlockRegion, ...], ...]:
        """Return the mask's regions within each block; none if nothing attends to the block.

        Kernels compute only these: "tiled" cuts them into tiles, and "flash" calls one kernel with a window's limits.
        `pairs_of_blocks` in `attn/prepare.py`, which decides what is sent, intersects the same regions and spans.
        """
        out: list[list[BlockRegion]] = [[] for _ in range(self.count)]
        q_at, k_at = _offsets(self.q_spans, (0,) * len(self.q_spans)), _offsets(self.k_spans, self.source_ranks)
        for rows in row_groups(self.mask, self.batch):
            regions = self.mask.regions(rows[0], *self.lengths)
            for m, n, region in intersections(regions, self.q_spans, self.k_spans):
                out[self.source_ranks[n]].append(BlockRegion(rows, region, q_at[m], k_at[n]))
        return tuple(map(tuple, out))

    def positions(self, block: int) -> tuple[Tensor, Tensor]:
        """Return the positions of the local queries, int64 [Q], and of a block's keys, int64 [T]."""
        spans = zip(self.k_spans, self.source_ranks, strict=True)
        keys = [torch.arange(*span, device=self.device) for span, source in spans if source == block]
        return torch.cat([torch.arange(*span, device=self.device) for span in self.q_spans]), torch.cat(keys)


@dataclass(frozen=True, slots=True)
class BlockRegion:
    """A region of the mask between the local queries and one KV block."""

    rows: Span  # batch rows that it applies to
    region: Region  # by positions in the sequence
    q_at: int  # add it to a query's position to get its index in the local tensor
    k_at: int  # add it to a key's position to get its index in the block's tensor


def _offsets(spans: tuple[Span, ...], source_ranks: tuple[int, ...]) -> list[int]:
    lengths = dict.fromkeys(source_ranks, 0)  # of each rank's block so far
    out = []
    for (start, stop), source in zip(spans, source_ranks, strict=True):
        out.append(lengths[source] - start)
        lengths[source] += stop - start
    return out


class SoftmaxAccumulator:
    """Online softmax: output and log-sum-exp of the keys seen so far.

    A single result for all queries is kept as the kernel returned it, without a copy. Several are summed in fp32 at
    least. With `several` the first is cast at once and can be freed. Of the queries only shape, dtype and device count.
    """

    def __init__(self, q_BHQD: Tensor, v_dim: int, *, several: bool = False) -> None:
        self._several = several
        self._shape, self._device = (*q_BHQD.shape[:3], v_dim), q_BHQD.device
        self._dtype = torch.promote_types(q_BHQD.dtype, torch.float32)
        self._out: Tensor | None = None
        self._lse: Tensor | None = None

    def results(self) -> tuple[Tensor, Tensor]:
        """Return the output `[B, H, Q, V]`, zero where no key was seen, and the log-sum-exp `[B, H, Q]`, -inf there."""
        if self._out is None or self._lse is None:
            return self._sums()
        return self._out, self._lse

    def add(self, out: Tensor, lse: Tensor, rows: Span | None = None, queries: Span | None = None) -> None:
        """Merge the attention to further keys, `out` [rows, H, queries, V], by its log-sum-exp [rows, H, queries].

        `rows` and `queries` are all by default. Exponents are at most 0, so nothing overflows.
        """
        B, _, Q, _ = self._shape
        if self._out is None and rows in (None, (0, B)) and queries in (None, (0, Q)):
            self._out, self._lse = out, lse.to(self._dtype)
            if self._several:
                self._sums()
            return
        at = slice(*rows or (None,)), slice(None), slice(*queries or (None,))
        all_out, all_lse = self._sums()
        (before, now), all_lse[at] = _weights(all_lse[at], lse)
        total = all_out[at].mul_(before[..., None])
        if total.is_cuda:  # without a weighted copy in fp32
            total.addcmul_(out, now[..., None])
        else:  # the CPU's addcmul may round the last elements of a row differently
            total.add_(out * now[..., None])

    def add_sinks(self, sinks_H: Tensor) -> None:
        """Merge one more key per head, whose value is zero."""
        out, lse = self.results()
        (before, _), self._lse = _weights(lse, sinks_H[:, None].expand(lse.shape))
        self._out = out.mul_(before[..., None])

    def _sums(self) -> tuple[Tensor, Tensor]:
        """Return the sums so far, to add to: in fp32 at least."""
        if self._out is None or self._lse is None:
            self._out = zeros_tokens_first(self._shape, self._dtype, self._device)
            self._lse = torch.full(self._shape[:3], -math.inf, dtype=self._dtype, device=self._device)
        self._out = self._out.to(self._dtype)
        return self._out, self._lse


def _weights(old: Tensor, more: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weights of two partial outputs with these log-sum-exps, and the log-sum-exp of both.

    This uses exp and log, not `logaddexp`: on a CPU, results of `logaddexp` depend on an element's position (vector or
    scalar loop), and a head must be equal bit for bit on whichever rank it is computed.
    """
    weights, total, highest = exponentials(torch.stack([old, more.to(old.dtype)]))
    lse = highest + total.log()
    return weights.div_(total.clamp_(min=torch.finfo(total.dtype).tiny)), lse


def exponentials(lses: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the weights of partial outputs with log-sum-exps `[parts, ...]`, which are overwritten; and their sum.

    The sum is 0 if no part saw a key. The weights are relative to the third result, so none overflows.
    """
    highest = lses.amax(0).clamp_(min=torch.finfo(lses.dtype).min)  # -inf - -inf is NaN
    weights = lses.sub_(highest).exp_()
    return weights, weights.sum(0), highest


class GradientSum:
    """The sum of gradients from several kernel calls, in `dtype`, fp32 at least. A single one is kept as returned."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        self.shape, self._dtype, self._device = tuple(shape), dtype, device
        self._sum: Tensor | None = None  # of the whole tensor; in the kernel's dtype if it is a single gradient
        self._part: tuple[Tensor, _Index] | None = None  # a single gradient, of a part

    @classmethod
    def into(cls, total: Tensor) -> GradientSum:
        """Return a sum that adds to `total`."""
        into = cls(total.shape, total.dtype, total.device)
        into._sum = total
        return into

    def add(self, more: Tensor, at: _Index = ()) -> None:
        """Add the gradient of the part that `at` selects, by default of the whole tensor."""
        if self._sum is not None or self._part is not None:
            # Not `total[at] += more`, which copies the sum onto itself.
            self._summed()[at].add_(more)
        elif more.shape == self.shape:
            self._sum = more
        else:
            self._part = more, at

    def add_to(self, total: Tensor) -> None:
        """Add the sum to `total`, of the same shape."""
        if self._part is not None:
            more, at = self._part
            total[at].add_(more)
        elif self._sum is not None:
            total.add_(self._sum)

    def total(self) -> Tensor:
        """Return the sum; zeros if nothing was added."""
        return self._summed() if self._sum is None else self._sum

    def _summed(self) -> Tensor:
        """Return the sum so far, to add to: in `dtype`."""
        if self._sum is None:
            self._sum = zeros_tokens_first(self.shape, self._dtype, self._device)
        self._sum = self._sum.to(self._dtype)
        if self._part is not None:
            (more, at), self._part = self._part, None
            self._sum[at].add_(more)
        return self._sum


_Index = tuple[slice, ...]


def tokens_first(x_BHSD: Tensor) -> Tensor:
    """Return the same tensor with memory order [B, S, H, D]; a copy only if needed."""
    return x_BHSD.transpose(1, 2).contiguous().transpose(1, 2)


def pad_heads(x: Tensor, dim: int) -> Tensor:
    """Pad each head with zeros to `dim` elements: no score and no gradient changes."""
    return x if x.shape[3] == dim else F.pad(x, (0, dim - x.shape[3]))


def zeros_tokens_first(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros `[B, H, S, D]` with memory order [B, S, H, D], which is that of a model's q, k and v."""
    B, H, S, D = shape
    return torch.zeros(B, S, H, D, dtype=dtype, device=device).transpose(1, 2)


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Turn autocast off: it would cast fp32 sums to half precision before a matmul."""
    kind = device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.autocast(kind, enabled=False)
    return contextlib.nullcontext()


@dataclass(frozen=True, slots=True)
class BackwardInputs:
    """What the backward of each block needs of the queries, after their attention to ALL blocks."""

    q: Tensor  # [B, H, Q, D]
    out: Tensor  # [B, H, Q, V], the output over all blocks
    grad: Tensor  # the output's gradient
    lse: Tensor  # [B, H, Q], the log-sum-exp of the whole row; 0 for a query that sees nothing

    def at(self, *index: slice) -> BackwardInputs:
        """Select rows, heads and queries."""
        return BackwardInputs(self.q[index], self.out[index], self.grad[index], self.lse[index])


@runtime_checkable
class Kernel(Protocol):
    """A registered kernel: a `BlockKernel` or an `AutogradKernel`."""

    name: str
    # The options of mask and scores that it computes (`KernelRequest.options`). It is never called with any other.
    computes: frozenset[str] = frozenset()

    def refuses(self, request: KernelRequest) -> str | None:
        """Return why the kernel cannot compute these tensors, with a fix; None if it can."""

    def describe(self, request: KernelRequest) -> str:
        """Return in a few words how the kernel would compute this."""


class BlockKernel(Kernel, Protocol):
    """A kernel that returns a log-sum-exp, for one device and for every block of a ring.

    To write one, inherit from this and define `name`, `computes` (`BY_REGIONS | {"sinks"}` if it follows
    `Blocks.parts`), `refuses`, `describe`, `prepare`, `forward` and `backward`; a kernel of several calls instead
    defines `accumulate` and `accumulate_gradients`, to add each.
    """

    def prepare(self, blocks: Blocks) -> Sequence[Any]:
        """Return what `forward` and `backward` need for each KV block, on the device; called once per batch.

        None for a block that nothing attends to: the kernel is not called for it.
        """

    def forward(
        self, q_BHQD: Tensor, k_BKTD: Tensor, v_BKTV: Tensor, block: Any, scores: Scores
    ) -> tuple[Tensor, Tensor]:
        """Compute attention to one block, without sinks (they join at the end).

        Args:
            q_BHQD: local queries of all local heads or, with `head_chunks`, of some. Any strides with a contiguous last
                dimension.
            k_BKTD: the block's keys; K divides H, in equal groups.
            v_BKTV: the block's values; their head_dim may differ.
            block: from `prepare`.
            scores: of these heads.

        Returns:
            The output [B, H, Q, V], and the log-sum-exp [B, H, Q] in fp32 at least, over these keys; zero and -inf
            where a query sees none of them. New tensors: the caller writes to them.
        """
        raise AssertionError(f"{self.name} defines neither `forward` nor `accumulate`")

    def backward(
        self, inputs: BackwardInputs, k_BKTD: Tensor, v_BKTV: Tensor, block: Any, scores: Scores
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return this block's part of dq [B, H, Q, D], and its dk [B, K, T, D] and dv [B, K, T, V].

        `inputs` are the queries, and the output, its gradient and the log-sum-exp of the WHOLE row. They and `k_BKTD`
        and `v_BKTV` may contain only some of the heads. Return new tensors: the caller writes to them.
        """
        raise AssertionError(f"{self.name} defines neither `backward` nor `accumulate_gradients`")

    def to_kernel_layout(self, xs: Sequence[Tensor], v_dim: int, scores: Scores) -> list[Tensor]:
        """Cast and pad q (in the backward: q, out and its gradient) once, not per block.

        `accumulate` and `accumulate_gradients` receive the result; k and v keep their head_dims.
        """
        return list(xs)

    def accumulate(
        self, into: SoftmaxAccumulator, q_BHQD: Tensor, k_BKTD: Tensor, v_BKTV: Tensor, block: Any, scores: Scores
    ) -> None:
        """Merge `forward` into `into`."""
        into.add(*self.forward(q_BHQD, k_BKTD, v_BKTV, block, scores))

    def accumulate_gradients(
        self,
        into: tuple[GradientSum, GradientSum, GradientSum],
        inputs: BackwardInputs,
        k_BKTD: Tensor,
        v_BKTV: Tensor,
        block: Any,
        scores: Scores,
    ) -> None:
        """Add `backward` to the sums of dq, dk and dv."""
        for total, more in zip(into, self.backward(inputs, k_BKTD, v_BKTV, block, scores), strict=True):
            total.add(more)


class AutogradKernel(Kernel, Protocol):
    """A kernel that returns the output alone and gets its gradients from autograd; it needs all keys (no ring)."""

    def prepare(self, blocks: Blocks) -> Sequence[Any]:
        """Return what `run` needs for the one block of keys, on the device; called once per batch."""

    def run(self, q_BSHD: Tensor, k_BTKD: Tensor, v_BTKV: Tensor, prepared: Any, scores: Scores) -> Tensor:
        """Return the attention of all tokens, `[B, S, H, V]`; zero for a query that sees nothing."""

    def own_inputs(self, *qkv_BSHD: Tensor) -> tuple[Tensor, ...]:
        """Copy q, k and v now if `run` would copy them, so that the caller can free the received buffer."""
        return qkv_BSHD


def returns_lse(kernel: Any) -> TypeGuard[BlockKernel]:
    """Whether a kernel is a `BlockKernel`, which computes block by block."""
    return hasattr(kernel, "accumulate")


def refusal(kernel: Any, request: KernelRequest) -> str | None:
    """Return why a kernel cannot compute this, with a fix; None if it can. "auto" then tries the next kernel."""
    unable = [name for name in request.options if name not in kernel.computes]
    if not unable:
        refused: str | None = kernel.refuses(request)
        return refused
    known: Any = REGISTRY.get(kernel.name)
    which = f"kernel={kernel.name!r}" if known is kernel else f"the kernel {kernel.name}"
    named = (f"the mask {type(request.mask).__name__}" if name == CUSTOM else name for name in unable)
    return f"{which} cannot do {' or '.join(named)}; use kernel='auto'"


KernelT = TypeVar("KernelT", bound=Kernel)

REGISTRY: dict[str, Kernel] = {}
"""Kernels by name, for `kernel=` of `longspan.attention` and `longspan.parallelize`."""


def register(kernel: KernelT) -> KernelT:
    """Register a kernel, so that `kernel="its name"` selects it everywhere."""
    REGISTRY[kernel.name] = kernel
    return kernel
