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

from longspan.attn.kernels.base import AutogradKernel, BlockKernel, Blocks, Kernel, KernelRequest, returns_lse
from longspan.attn.kernels.choice import (
    EAGER,
    AnyKernel,
    Choice,
    choose_kernel,
    log_choice,
    refuse_learnt_biases,
)
from longspan.attn.mask import Mask, row_groups
from longspan.attn.methods.base import AttentionMethod, SavedAttentions
from longspan.attn.methods.head_chunks import ChunkedUlysses, HeadChunk
from longspan.attn.methods.local import LocalAttention
from longspan.attn.methods.reference import ReferenceRing
from longspan.attn.methods.ring import Ring
from longspan.attn.methods.ulysses import Ulysses
from longspan.attn.score import ScoreKind, Scores
from longspan.attn.shapes import Shapes
from longspan.comm.link import choose_overlap_chunks
from longspan.compat.torch_api import named_range
from longspan.core.errors import LongspanError
from longspan.core.heads import HeadShard, check_heads, split_head_chunks, split_heads
from longspan.core.layout import Layout, Lengths
from longspan.core.regions import intersections
from longspan.core.routes import ring_routes

if TYPE_CHECKING:
    from longspan.comm.mesh import SequenceSharding


@dataclass(frozen=True, eq=False)
class AttentionPlan:
    """A prepared attention, for every layer with this mask, these shapes and this kind of scores."""

    shapes: Shapes  # of the tensors that it is for
    kind: ScoreKind
    choice: Choice  # the kernel, and why
    method: AttentionMethod  # executes the attention
    differentiates_bias: bool  # whether a learnt bias gets its gradient

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, scores: Scores, saved_attentions: SavedAttentions | None = None
    ) -> Tensor:
        """Execute the attention of one layer: `[batch, tokens, query heads, head_dim of v]`.

        Raises:
            LongspanError: if `saved_attentions` is given to a plan that would save nothing in it.
        """
        chunked = self.method if isinstance(self.method, ChunkedUlysses) else None
        if saved_attentions is not None and chunked is None:
            raise LongspanError("`saved_attentions` needs a plan made with recompute_all_to_all=True, or saves=True")
        with named_range("longspan.attention"):
            if chunked is not None:
                return chunked(q, k, v, scores, saved_attentions)
            return self.method(q, k, v, scores)

    def check(self, given: Shapes, scores: Scores) -> None:
        """Raise for tensors and scores that the plan was not made for.

        Raises:
            LongspanError: with both shapes.
        """
        planned = self.shapes
        if given != planned and replace(given, grad=planned.grad) != planned:
            raise LongspanError(f"the plan was made for {planned}, it is used with {given}; make one for these tensors")
        if given.grad and not planned.grad:
            raise LongspanError(
                "the plan was made without gradients, and these tensors need them; make it with tensors that require "
                "gradients, outside of torch.no_grad"
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
    saves: bool = False,
    head_chunks: int = 1,
) -> AttentionPlan:
    """Make the plan of one attention. Every rank raises the same. Nothing is sent or computed.

    Args:
        shapes: of the local tensors.
        sp: the sharding.
        mask: over the whole sequence.
        scores: of one of the layers that the plan is for.
        lengths: real queries and real keys of the whole sequence.
        kernel: as for `longspan.attention`.
        recompute_all_to_all: save only local q, k, v and output, and recompute the all-to-all in the backward; several
            `head_chunks` imply it.
        saves: make a plan whose calls accept `saved_attentions`; `recompute_all_to_all` implies it.
        head_chunks: as for `longspan.attention`.

    Raises:
        LongspanError: for tensors, masks, heads and kernels that do not fit together, with the numbers.
    """
    check_attention(shapes, sp, mask, scores, lengths)
    recompute_all_to_all = recompute_all_to_all or head_chunks != 1
    chosen, choice, overlap_chunks = choose_kernel_and_overlap(
        shapes, sp, mask, scores, lengths, kernel, needs_lse=recompute_all_to_all or saves
    )
    if not torch.compiler.is_compiling():
        log_choice(choice)
    mask = mask.limited_to(max(lengths))
    shards = _head_shards(shapes, sp)
    chunks_by_kv = split_head_chunks(shards, head_chunks, overlap_chunks)
    method = _inner_method(shapes, sp, mask, scores, lengths, chosen, shards[sp.ulysses_rank])
    group = sp.ulysses_group if sp.ulysses_size > 1 else None
    trim_to = lengths if group is not None and sp.ring_size == 1 else None
    if recompute_all_to_all or saves or overlap_chunks > 1:  # the same all-to-alls and method, for some heads at a time
        chunks = _head_chunks(cast(LocalAttention, method), chunks_by_kv, sp.ulysses_rank, shapes.device)
        sums_kv_heads = any(a.kv_stop > b.kv_start for a, b in pairwise(shards))
        method = ChunkedUlysses(group, chunks, sums_kv_heads, trim_to, recompute_all_to_all, overlap_chunks > 1)
    elif group is not None:
        method = Ulysses(group, shards, method, trim_to)
    return AttentionPlan(shapes, scores.kind, choice, method, differentiates_bias=not returns_lse(chosen))


def _head_shards(shapes: Shapes, sp: SequenceSharding) -> tuple[HeadShard, ...]:
    return split_heads(shapes.q[2], shapes.k[2], sp.ulysses_size)


def _inner_method(
    shapes: Shapes,
    sp: SequenceSharding,
    mask: Mask,
    scores: Scores,
    lengths: Lengths,
    kernel: Kernel,
    local: HeadShard,
) -> AttentionMethod:
    """Return the attention of a ring block's tokens (of all tokens without a ring) on the local heads."""
    kv_head_index = _kv_head_index(local, shapes.device)
    # Without a ring the tokens of the Ulysses ranks are one block, without padding.
    layout, group = (sp.layout, sp.ring_group) if sp.ring_size > 1 else (Layout(), None)
    k_spans, source_ranks = layout.runs(lengths[1])
    blocks = Blocks(
        mask=mask,
        kind=scores.kind,
        batch=shapes.q[0],
        heads=local.q_heads,
        first_head=local.q_start,
        lengths=lengths,
        q_spans=tuple((a + mask.q_start, b + mask.q_start) for a, b in layout.block(lengths[0], sp.ring_rank)),
        k_spans=k_spans,
        source_ranks=source_ranks,
        device=shapes.device,
        dtype=shapes.dtype,
        head_dims=shapes.head_dims,
    )
    if kernel is EAGER:
        return ReferenceRing(group, blocks, kv_head_index)
    kernel = cast(BlockKernel | AutogradKernel, kernel)
    per_block = tuple(kernel.prepare(blocks)) if local.q_heads else (None,) * blocks.count
    if group is None:
        return LocalAttention(kernel, per_block, kv_head_index)
    # Shortest routes, to the right, the left, or both: a block is sent no further than to the last rank that reads it.
    routes = ring_routes(readers_of_blocks(pairs_of_blocks(layout, lengths, mask, shapes.q[0])))
    return Ring(kernel, per_block, kv_head_index, group=group, routes=routes)


def choose_kernel_and_overlap(
    shapes: Shapes,
    sp: SequenceSharding,
    mask: Mask,
    scores: Scores,
    lengths: Lengths,
    kernel: AnyKernel,
    *,
    needs_lse: bool,
) -> tuple[Kernel, Choice, int]:
    """Return the kernel, why it was chosen, and in how many chunks all-to-alls overlap with attention (1: they do not).

    The kernel "auto" is the first that does not refuse (kernels/choice.py). On a CPU: "sdpa" for a causal or full mask
    without a ring, else "tiled". On a GPU: "sdpa" or "cudnn" for these masks, "flash" for regions (windows, documents),
    "flex" for what changes each score, and "tiled" for the rest.

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
        shapes.head_dims,
        needs_lse,
        (shapes.q[0], lengths[0]),
    )
    overlap_chunks = _overlap_chunks(shapes, sp)
    if overlap_chunks > 1 and not needs_lse and sp.overlap_chunks == "auto":
        try:
            return *choose_kernel(kernel, replace(request, lse=True)), overlap_chunks
        except LongspanError:  # any other reason is raised below
            overlap_chunks = 1
    request = replace(request, lse=needs_lse or overlap_chunks > 1)
    return *choose_kernel(kernel, request), overlap_chunks


def _overlap_chunks(shapes: Shapes, sp: SequenceSharding) -> int:
    """Return the chunks of heads whose all-to-alls overlap with attention, with a ring at most one per KV head."""
    if sp.ulysses_size == 1:
        return 1
    asked = sp.overlap_chunks
    if asked == "auto":
        elements = shapes.k[0] * shapes.k[1] * (shapes.q[2] * shapes.q[3] + shapes.k[2] * (shapes.k[3] + shapes.v[3]))
        asked = choose_overlap_chunks(elements * shapes.dtype.itemsize, sp.all_to_all_link)
    most = max(shard.kv_heads if sp.ring_size > 1 else shard.q_heads for shard in _head_shards(shapes, sp))
    return max(1, min(asked, most))


def _head_chunks(
    attention: LocalAttention,
    chunks_by_kv: tuple[tuple[tuple[HeadShard, ...], ...], ...],
    rank: int,
    device: torch.device,
) -> tuple[HeadChunk, ...]:
    """Return all chunks. They share what the kernel prepared for all local heads."""
    return tuple(
        HeadChunk(
            shards,
            shards[rank],
            replace(attention, kv_head_index=_kv_head_index(shards[rank], device)),
            first_of_kv=number == 0,
            last_of_kv=number == len(same_kv) - 1,
        )
        for same_kv in chunks_by_kv
        for number, shards in enumerate(same_kv)
    )


def _kv_head_index(shard: HeadShard, device: torch.device) -> Tensor | None:
    heads = shard.kv_head_index
    return None if heads is None else torch.tensor(heads, device=device)


def pairs_of_blocks(layout: Layout, lengths: Lengths, mask: Mask, batch: int) -> list[list[int]]:
    """Return `pairs[i][j]`: how many pairs of a query of block i and a key of block j attend; `mask_mod` is ignored.

    `Blocks.parts`, which decides what is computed, intersects the same regions and spans.
    """
    pairs = [[0] * layout.ring for _ in range(layout.ring)]
    q_spans, q_ranks = layout.runs(lengths[0])
    k_spans, k_ranks = layout.runs(lengths[1])
    q_spans = tuple((start + mask.q_start, stop + mask.q_start) for start, stop in q_spans)
    for b0, b1 in row_groups(mask, batch):
        for m, n, region in intersections(mask.regions(b0, *lengths), q_spans, k_spans):
            pairs[q_ranks[m]][k_ranks[n]] += (b1 - b0) * region.pairs
    return pairs


def readers_of_blocks(pairs: list[list[int]]) -> list[list[int]]:
    """Return for each block the ranks whose queries attend to anything in it, from `pairs_of_blocks`."""
    return [[i for i, row in enumerate(pairs) if row[j]] for j in range(len(pairs))]


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
            f"{lengths[0]} queries and {lengths[1]} keys: give the position of the first query among the keys (q_start="
            f"{max(0, lengths[1] - lengths[0])} if the queries are the last tokens), or causal=False"
        )
    if mask.mask_mod is not None:
        position = torch.zeros(1, dtype=torch.int64, device=shapes.device)
        mask.evaluate_mask_mod((0, 1), (0, 1), position, position)  # raises if it returns no booleans
    scores.check(shapes.q[2])
    if mask.nodes is not None and scores.alibi is not None:
        raise LongspanError("`alibi` measures distances along the row, not along a tree's paths; leave one out")
    check_heads(shapes.q[2], shapes.k[2])
