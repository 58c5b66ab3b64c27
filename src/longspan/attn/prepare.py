"""Prepare everything about an attention that depends on the batch and its mask alone, once: an `AttentionPlan`.

Checks run here, a kernel is chosen, KV blocks get their routes and tiles, and index tensors are copied to the device. A
layer only executes the plan: it validates nothing, hashes no documents, and copies nothing between host and device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from longspan.attn.kernels.base import AutogradKernel, Blocks, Kernel, KernelRequest
from longspan.attn.kernels.choice import AnyKernel, Choice, choose_kernel, log_choice, refuse_learnt_biases, returns_lse
from longspan.attn.kernels.eager import EAGER
from longspan.attn.mask import Mask, row_groups
from longspan.attn.methods.base import AttentionMethod, SavedAttentions
from longspan.attn.methods.chunked import ChunkedUlysses, HeadChunk
from longspan.attn.methods.local import LocalAttention
from longspan.attn.methods.reference import ReferenceRing
from longspan.attn.methods.ring import Ring
from longspan.attn.methods.ulysses import Ulysses
from longspan.attn.score import ScoreKind, Scores
from longspan.comm.arguments import check_tensor
from longspan.compat.torch_api import named_range
from longspan.core.errors import LongspanError
from longspan.core.heads import HeadShard, check_heads, split_head_chunks, split_heads, split_overlap_chunks
from longspan.core.layout import Layout
from longspan.core.regions import intersections
from longspan.core.routes import choose_overlap_chunks, choose_ring_impl, ring_routes

if TYPE_CHECKING:
    from longspan.comm.mesh import SequenceSharding

Lengths = tuple[int, int]
"""Numbers of real queries and real keys of the whole sequence."""


@dataclass(frozen=True)
class Shapes:
    """The tensors that a plan is made for.

    Attributes:
        q: `[batch, tokens, query heads, head_dim]` of the local tokens.
        k: `[batch, tokens, KV heads, head_dim]`.
        v: as `k`; its head_dim may differ.
        dtype: of all three.
        device: of all three.
        grad: whether gradients are needed.
    """

    q: torch.Size
    k: torch.Size
    v: torch.Size
    dtype: torch.dtype
    device: torch.device
    grad: bool

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Shapes:
        inputs = (q, k, v, scores.sinks, scores.alibi)
        grad = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
        return cls(q.shape, k.shape, v.shape, q.dtype, q.device, grad)

    def __str__(self) -> str:
        sizes = ", ".join(f"{name} {tuple(shape)}" for name, shape in (("q", self.q), ("k", self.k), ("v", self.v)))
        return f"{sizes}, {str(self.dtype).removeprefix('torch.')} on {self.device}"


@dataclass(frozen=True, eq=False)
class AttentionPlan:
    """A prepared attention, for every layer with this mask, these shapes and this kind of scores.

    Attributes:
        shapes: of the tensors that it is for.
        kind: of the scores.
        choice: the kernel, and why.
        method: executes the attention.
        differentiates_bias: whether a learnt bias gets its gradient.
    """

    shapes: Shapes
    kind: ScoreKind
    choice: Choice
    method: AttentionMethod
    differentiates_bias: bool

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, scores: Scores, saved_attentions: SavedAttentions | None = None
    ) -> Tensor:
        """Execute the attention: `[batch, tokens, query heads, head_dim of v]`.

        Args:
            q: local queries.
            k: local keys.
            v: local values.
            scores: of this layer.
            saved_attentions: of a checkpointed layer; needs a plan with `recompute_all_to_all`.

        Raises:
            LongspanError: if `saved_attentions` is given to another plan, which would save nothing in it.
        """
        chunked = self.method if isinstance(self.method, ChunkedUlysses) else None
        if saved_attentions is not None and (chunked is None or not chunked.recompute_all_to_all):
            raise LongspanError("`saved_attentions` needs a plan made with recompute_all_to_all=True")
        with named_range("longspan.attention"):
            if chunked is not None:
                return chunked(q, k, v, scores, saved_attentions)
            return self.method(q, k, v, scores)

    def check(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> None:
        """Raise for tensors that the plan was not made for.

        Raises:
            LongspanError: with both shapes.
        """
        check_tensors(q, k, v)
        given, planned = Shapes.of(q, k, v, scores), self.shapes
        tensors = [(shapes.q, shapes.k, shapes.v, shapes.dtype, shapes.device) for shapes in (given, planned)]
        if tensors[0] != tensors[1]:
            raise LongspanError(f"the plan was made for {planned}, it is used with {given}; make one for these tensors")
        if given.grad and not planned.grad:
            raise LongspanError(
                "the plan was made where no gradients were asked for, and now they are; make it with tensors that "
                "require gradients, outside of torch.no_grad"
            )
        if scores.kind != self.kind:
            pairs = zip(ScoreKind.__annotations__, self.kind, scores.kind, strict=True)
            different = [name for name, made_with, used_with in pairs if made_with != used_with]
            raise LongspanError(
                f"the plan was made with another {' and '.join(different)}; make one with these options"
            )
        self.check_scores(scores)

    def check_scores(self, scores: Scores) -> None:
        """Raise for scores of another number of heads, and for a bias whose gradient would silently be missing."""
        scores.check(self.shapes.q[2])
        if self.shapes.grad and not self.differentiates_bias:
            refuse_learnt_biases(self.choice.name, scores, self.shapes.device)


def prepare(
    shapes: Shapes,
    sp: SequenceSharding,
    mask: Mask,
    scores: Scores,
    lengths: Lengths,
    kernel: AnyKernel = "auto",
    *,
    recompute_all_to_all: bool = False,
    head_chunks: int = 1,
) -> AttentionPlan:
    """Make the plan of one attention. Nothing is computed or sent, and every rank raises the same.

    Args:
        shapes: of the local tensors.
        sp: the sharding.
        mask: over the whole sequence.
        scores: of one of the layers that the plan is for.
        lengths: real queries and real keys of the whole sequence.
        kernel: as for `longspan.attention`.
        recompute_all_to_all: save only local q, k, v and output, and recompute the all-to-all in the backward; several
            `head_chunks` imply it.
        head_chunks: as for `longspan.attention`.

    Raises:
        LongspanError: for tensors, masks, heads and kernels that do not fit together, with the numbers.
    """
    check_attention(shapes, sp, mask, scores, lengths)
    recompute_all_to_all = recompute_all_to_all or head_chunks != 1
    chosen, choice, overlaps = choose_kernel_and_overlap(
        shapes, sp, mask, scores, lengths, kernel, needs_lse=recompute_all_to_all
    )
    if not torch.compiler.is_compiling():
        log_choice(choice)
    mask = mask.limited_to(max(lengths))
    shards = split_heads(shapes.q[2], shapes.k[2], sp.ulysses_size, kv_replication=sp.kv_replication)
    local = shards[sp.ulysses_rank]
    # Chunks of heads, grouped by the KV heads that they share.
    groups: tuple[tuple[tuple[HeadShard, ...], ...], ...]
    groups = tuple((chunk,) for chunk in split_head_chunks(shards, head_chunks))
    if overlaps:
        groups = split_overlap_chunks(shards, max(wanted_overlap_chunks(shapes, sp), len(groups)))
    method = _inner_method(shapes, sp, mask, scores, lengths, chosen, local, len(groups))
    group = sp.ulysses_group if sp.ulysses_size > 1 else None
    trim_to = lengths if group is not None and sp.ring_size == 1 else None
    if recompute_all_to_all or overlaps:
        chunks = _head_chunks(cast(Ring, method), groups, sp.ulysses_rank, shapes.device)
        replicated = any(a.kv_stop > b.kv_start for a, b in pairwise(shards))
        method = ChunkedUlysses(group, chunks, replicated, trim_to, recompute_all_to_all, overlaps, sp.wire_dtype)
    elif group is not None:
        method = Ulysses(group, shards, method, trim_to, sp.wire_dtype)
    return AttentionPlan(shapes, scores.kind, choice, method, differentiates_bias=not returns_lse(chosen))


def _inner_method(
    shapes: Shapes,
    sp: SequenceSharding,
    mask: Mask,
    scores: Scores,
    lengths: Lengths,
    kernel: Kernel,
    local: HeadShard,
    chunks: int,
) -> AttentionMethod:
    """Return the attention of a ring block's tokens (of all tokens without a ring) on the local heads.

    `chunks` is the number of chunks that the local KV heads are computed in.
    """
    kv_head_index = _kv_head_index(local, shapes.device)
    # Without a ring the tokens of the Ulysses ranks are one block, without padding.
    layout, group = (sp.layout, sp.ring_group) if sp.ring_size > 1 else (Layout(), None)
    blocks = _blocks(shapes, layout, mask, scores, lengths, local, sp.ring_rank)
    if kernel is EAGER:
        return ReferenceRing(group, sp.ring_rank, blocks, kv_head_index)
    if not returns_lse(kernel):
        autograd_kernel = cast(AutogradKernel, kernel)
        prepared = autograd_kernel.prepare_batch(blocks) if local.q_heads else None
        return LocalAttention(autograd_kernel, prepared, kv_head_index)
    pairs = pairs_of_blocks(layout, lengths, mask, shapes.q[0])
    routes = ring_routes([[count > 0 for count in row] for row in pairs])
    kv_elements = -(-local.kv_heads // chunks) * (shapes.k[3] + shapes.v[3])
    kv_bytes = shapes.k[0] * shapes.k[1] * sp.ulysses_size * kv_elements * shapes.dtype.itemsize * sp.ring_size
    impl = choose_ring_impl(sp.ring_impl, kv_bytes, routes) if sp.ring_size > 1 else "p2p"
    per_block = tuple(kernel.prepare(blocks)) if local.q_heads else (None,) * blocks.count
    return Ring(group, sp.ring_rank, sp.ring_size, routes, impl, kernel, per_block, kv_head_index)


def choose_kernel_and_overlap(
    shapes: Shapes,
    sp: SequenceSharding,
    mask: Mask,
    scores: Scores,
    lengths: Lengths,
    kernel: AnyKernel,
    *,
    needs_lse: bool,
) -> tuple[Kernel, Choice, bool]:
    """Return the kernel, why it was chosen, and whether all-to-alls overlap with attention.

    With `overlap_chunks="auto"` they overlap only if a kernel that returns the log-sum-exp can compute this attention.
    """
    request = KernelRequest(
        mask.limited_to(max(lengths)),
        scores,
        shapes.device,
        shapes.grad,
        sp.ring_size,
        lengths[0] == lengths[1],
        shapes.dtype,
        (shapes.q[3], shapes.v[3]),
        needs_lse,
    )
    overlaps = wanted_overlap_chunks(shapes, sp) > 1
    if overlaps and not needs_lse and sp.overlap_chunks == "auto":
        try:
            return *choose_kernel(kernel, replace(request, lse=True)), True
        except LongspanError:  # any other reason is raised below
            overlaps = False
    return *choose_kernel(kernel, replace(request, lse=needs_lse or overlaps)), overlaps


def wanted_overlap_chunks(shapes: Shapes, sp: SequenceSharding) -> int:
    """Return the number of chunks of heads whose all-to-alls overlap with attention; 1: no overlap.

    In a ring a chunk is one or more whole KV groups, because its keys and values travel together.
    """
    if sp.ulysses_size == 1:
        return 1
    wanted = sp.overlap_chunks
    if wanted == "auto":
        elements = shapes.k[0] * shapes.k[1] * (shapes.q[2] * shapes.q[3] + shapes.k[2] * (shapes.k[3] + shapes.v[3]))
        bytes_per_element = shapes.dtype.itemsize if sp.wire_dtype == "exact" else 1
        wanted = choose_overlap_chunks(elements * bytes_per_element, sp.all_to_all_link)
    shards = split_heads(shapes.q[2], shapes.k[2], sp.ulysses_size, kv_replication=sp.kv_replication)
    most = max(shard.kv_heads if sp.ring_size > 1 else shard.q_heads for shard in shards)
    return max(1, min(wanted, most))


def _head_chunks(
    ring: Ring, groups: tuple[tuple[tuple[HeadShard, ...], ...], ...], rank: int, device: torch.device
) -> tuple[HeadChunk, ...]:
    """Return the chunks of all groups. They share what the kernel prepared for all local heads."""
    return tuple(
        HeadChunk(
            shards,
            shards[rank],
            replace(ring, kv_head_index=_kv_head_index(shards[rank], device)),
            first_of_kv=number == 0,
            last_of_kv=number == len(group) - 1,
        )
        for group in groups
        for number, shards in enumerate(group)
    )


def _kv_head_index(shard: HeadShard, device: torch.device) -> Tensor | None:
    heads = shard.kv_head_index
    return None if heads is None else torch.tensor(heads, device=device)


def _blocks(
    shapes: Shapes,
    layout: Layout,
    mask: Mask,
    scores: Scores,
    lengths: Lengths,
    local: HeadShard,
    ring_rank: int,
) -> Blocks:
    k_spans, source_ranks = layout.runs(lengths[1])
    q_spans = tuple((a + mask.q_start, b + mask.q_start) for a, b in layout.block(lengths[0], ring_rank))
    token_elements = local.q_heads * shapes.q[3] + local.kv_heads * (shapes.k[3] + shapes.v[3])
    return Blocks(
        mask=mask,
        kind=scores.kind,
        batch=shapes.q[0],
        heads=local.q_heads,
        first_head=local.q_start,
        lengths=lengths,
        q_spans=q_spans,
        k_spans=k_spans,
        source_ranks=source_ranks,
        device=shapes.device,
        token_bytes=token_elements * shapes.dtype.itemsize,
        dtype=shapes.dtype,
        head_dims=(shapes.q[3], shapes.v[3]),
    )


def pairs_of_blocks(layout: Layout, lengths: Lengths, mask: Mask, batch: int) -> list[list[int]]:
    """Return `pairs[i][j]`: how many pairs of a query of block i and a key of block j attend; `mask_mod` is ignored."""
    pairs = [[0] * layout.ring for _ in range(layout.ring)]
    q_spans, q_ranks = layout.runs(lengths[0])
    k_spans, k_ranks = layout.runs(lengths[1])
    q_spans = tuple((start + mask.q_start, stop + mask.q_start) for start, stop in q_spans)
    for b0, b1 in row_groups(mask, batch):
        for m, n, region in intersections(mask.regions(b0, *lengths), q_spans, k_spans):
            pairs[q_ranks[m]][k_ranks[n]] += (b1 - b0) * region.pairs
    return pairs


# ---------------------------------------------------------------------------------------------------------------------
# Checks.


def check_attention(shapes: Shapes, sp: SequenceSharding, mask: Mask, scores: Scores, lengths: Lengths) -> None:
    """Raise for everything that no kernel can compute.

    Raises:
        LongspanError: with the numbers.
    """
    for name, shape, n in (("length", shapes.q, lengths[0]), ("kv_length", shapes.k, lengths[1])):
        local = sp.layout.local_length(n)
        if local != shape[1]:
            raise LongspanError(
                f"a sequence of {name}={n} over {sp.size} ranks gives {local} tokens to each, the tensors have "
                f"{shape[1]}; cut them with sp.shard"
            )
    mask.check(shapes.q[0], *lengths)
    if mask.kv_segments is None and mask.q_start == 0 and lengths[0] != lengths[1] and mask.causal:
        raise LongspanError(
            f"{lengths[0]} queries and {lengths[1]} keys: say where the queries are among the keys (q_start="
            f"{max(0, lengths[1] - lengths[0])} for the last of them), or causal=False"
        )
    if mask.mask_mod is not None:
        position = torch.zeros(1, dtype=torch.int64, device=shapes.device)
        mask.evaluate_mask_mod((0, 1), (0, 1), position, position)  # raises if it returns no booleans
    scores.check(shapes.q[2])
    check_heads(shapes.q[2], shapes.k[2])
    _check_kv_replication(shapes.k[2], sp)


def _check_kv_replication(kv_heads: int, sp: SequenceSharding) -> None:
    if sp.kv_replication or sp.ulysses_size <= kv_heads:
        return
    fits = max(u for u in range(1, kv_heads + 1) if sp.size % u == 0)
    raise LongspanError(
        f"`ulysses={sp.ulysses_size}` needs at least {sp.ulysses_size} KV heads when KV replication is refused, the "
        f"model has {kv_heads}; try `ulysses={fits}, ring={sp.size // fits}`, or allow `kv_replication=True`"
    )


def check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise unless these are q, k and v of one attention.

    Raises:
        LongspanError: with their shapes.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x)
    shapes = {name: tuple(x.shape) for name, x in (("q", q), ("k", k), ("v", v))}
    listed = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
    if any(len(shape) != 4 for shape in shapes.values()):
        raise LongspanError(f"attention needs [batch, tokens, heads, head_dim], four dimensions each, got {listed}")
    if not q.device == k.device == v.device:
        raise LongspanError(f"q, k and v must be on one device, got q {q.device}, k {k.device}, v {v.device}")
    if len({x.dtype for x in (q, k, v)}) > 1 or not q.is_floating_point():
        raise LongspanError(
            f"attention needs q, k and v of one floating dtype, got q {q.dtype}, k {k.dtype}, v {v.dtype}; cast them"
        )
    if len({shape[0] for shape in shapes.values()}) > 1 or shapes["k"][1] != shapes["v"][1]:
        raise LongspanError(f"q, k and v must have the same batch, k and v the same tokens, got {listed}")
    if min(*q.shape[:2], k.shape[1]) < 1:
        raise LongspanError(f"attention over no tokens: {listed}")
    if shapes["q"][3] != shapes["k"][3] or shapes["k"][2] != shapes["v"][2]:
        raise LongspanError(f"q and k need the same head_dim, k and v the same number of heads, got {listed}")
