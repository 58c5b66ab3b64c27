"""Everything about an attention that depends on the batch and its mask alone, made once: an `AttentionPlan`.

What can be refused is refused here, a kernel is chosen, blocks get their routes and tiles, and index tensors go to the
device. A layer then only executes the plan: it validates nothing, hashes no documents, and copies nothing between host
and device.
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
from longspan.attn.methods.chunked import Chunk, ChunkedUlysses
from longspan.attn.methods.local import LocalAttention
from longspan.attn.methods.reference import ReferenceRing
from longspan.attn.methods.ring import Ring
from longspan.attn.methods.ulysses import Ulysses
from longspan.attn.score import ScoreKind, Scores
from longspan.comm.arguments import check_tensor
from longspan.compat.torch_api import named_range
from longspan.core.errors import LongspanError
from longspan.core.heads import HeadShard, check_heads, split_head_chunks, split_heads, split_overlap_chunks
from longspan.core.layout import Layout, Span
from longspan.core.regions import intersections
from longspan.core.routes import choose_overlap_chunks, choose_ring_impl, ring_routes

if TYPE_CHECKING:
    from longspan.comm.mesh import SequenceSharding


@dataclass(frozen=True)
class Shapes:
    """The tensors that a plan is made for.

    Attributes:
        q: `[batch, tokens, query heads, head_dim]`, my tokens.
        k: `[batch, tokens, KV heads, head_dim]`.
        v: as k; its head_dim may differ.
        dtype: of all.
        device: of all.
        grad: whether gradients are asked for.
    """

    q: torch.Size
    k: torch.Size
    v: torch.Size
    dtype: torch.dtype
    device: torch.device
    grad: bool

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Shapes:
        """Those of some tensors."""
        asked = (q, k, v, scores.sinks, scores.alibi)
        grad = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in asked)
        return cls(q.shape, k.shape, v.shape, q.dtype, q.device, grad)

    def __str__(self) -> str:
        sizes = ", ".join(f"{name} {tuple(shape)}" for name, shape in (("q", self.q), ("k", self.k), ("v", self.v)))
        return f"{sizes}, {str(self.dtype).removeprefix('torch.')} on {self.device}"


@dataclass(frozen=True, eq=False)
class AttentionPlan:
    """An attention that is ready to be executed, in every layer that has this mask, these shapes and kind of scores.

    Attributes:
        shapes: of the tensors that it is for.
        kind: of the scores (`Scores.kind`).
        choice: the kernel, and why.
        method: what executes it.
        learns: whether a bias that is learnt gets its gradient.
    """

    shapes: Shapes
    kind: ScoreKind
    choice: Choice
    method: AttentionMethod
    learns: bool

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, scores: Scores, keeper: SavedAttentions | None = None
    ) -> Tensor:
        """Execute it: `[batch, tokens, query heads, head_dim of v]`. A keeper needs `recompute_all_to_all`.

        Raises:
            LongspanError: for a keeper with another plan, which would leave it without what it is to keep.
        """
        chunked = self.method if isinstance(self.method, ChunkedUlysses) else None
        if keeper is not None and (chunked is None or not chunked.recompute_all_to_all):
            raise LongspanError("only a plan made with recompute_all_to_all=True can be executed with a keeper")
        with named_range("longspan.attention"):
            if chunked is not None:
                return chunked(q, k, v, scores, keeper)
            return self.method(q, k, v, scores)

    def check(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> None:
        """Refuse tensors that it was not made for.

        Raises:
            LongspanError: with both shapes.
        """
        check_tensors(q, k, v)
        found, made = Shapes.of(q, k, v, scores), self.shapes
        mine, theirs = ((s.q, s.k, s.v, s.dtype, s.device) for s in (found, made))
        if mine != theirs:
            raise LongspanError(f"the plan was made for {made}, it is used with {found}; make one for these tensors")
        if found.grad and not made.grad:
            raise LongspanError(
                "the plan was made where no gradients were asked for, and now they are; make it with tensors that "
                "require gradients, outside of torch.no_grad"
            )
        if scores.kind != self.kind:
            pairs = zip(("softcap", "sinks", "alibi", "bias"), self.kind, scores.kind, strict=True)
            unlike = [name for name, made_with, given in pairs if made_with != given]
            raise LongspanError(f"the plan was made with another {' and '.join(unlike)}; make one with these options")
        self.check_scores(scores)

    def check_scores(self, scores: Scores) -> None:
        """Refuse scores of another number of heads, and a bias whose gradient would silently be missing.

        Raises:
            LongspanError: with the way out.
        """
        scores.check(self.shapes.q[2])
        if self.shapes.grad and not self.learns:
            refuse_learnt_biases(self.choice.name, scores, self.shapes.device)


def prepare(
    shapes: Shapes,
    sp: SequenceSharding,
    mask: Mask,
    scores: Scores,
    lengths: tuple[int, int],
    kernel: AnyKernel = "auto",
    *,
    recompute_all_to_all: bool = False,
    head_chunks: int = 1,
) -> AttentionPlan:
    """Make the plan of one attention. Nothing is computed or sent, and every rank refuses the same.

    Args:
        shapes: of my tokens' tensors.
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
    check(shapes, sp, mask, scores, lengths)
    recompute_all_to_all = recompute_all_to_all or head_chunks != 1
    found, choice, overlaps = choose_beside(shapes, sp, mask, scores, lengths, kernel, lse=recompute_all_to_all)
    if not torch.compiler.is_compiling():
        log_choice(choice)
    mask = mask.limited_to(max(lengths))
    shards = split_heads(shapes.q[2], shapes.k[2], sp.ulysses_size, kv_replication=sp.kv_replication)
    mine = shards[sp.ulysses_rank]
    runs: tuple[tuple[tuple[HeadShard, ...], ...], ...] = tuple(
        (run,) for run in split_head_chunks(shards, head_chunks)
    )
    if overlaps:
        runs = split_overlap_chunks(shards, max(exchange_pieces(shapes, sp), len(runs)))
    method = _inner(shapes, sp, mask, scores, lengths, found, mine, len(runs))
    group = sp.ulysses_group if sp.ulysses_size > 1 else None
    exchanged = lengths if group is not None and sp.ring_size == 1 else None
    if recompute_all_to_all or overlaps:
        rings = _of_chunks(cast(Ring, method), runs, sp.ulysses_rank, shapes.device)
        shared = any(a.kv_stop > b.kv_start for a, b in pairwise(shards))
        method = ChunkedUlysses(group, rings, shared, exchanged, recompute_all_to_all, overlaps, sp.wire_dtype)
    elif group is not None:
        method = Ulysses(group, shards, method, exchanged, sp.wire_dtype)
    return AttentionPlan(shapes, scores.kind, choice, method, learns=not returns_lse(found))


def _inner(
    shapes: Shapes,
    sp: SequenceSharding,
    mask: Mask,
    scores: Scores,
    lengths: tuple[int, int],
    kernel: Kernel,
    mine: HeadShard,
    chunks: int,
) -> AttentionMethod:
    """Attention of a block's tokens (of all, without a ring) on my heads, which come in so many chunks."""
    index = _index(mine, shapes.device)
    # Without a ring the tokens of the Ulysses ranks are one block, their padding cut off.
    layout, group = (sp.layout, sp.ring_group) if sp.ring_size > 1 else (Layout(), None)
    blocks = _blocks(shapes, layout, mask, scores, lengths, mine, sp.ring_rank)
    if kernel is EAGER:
        return ReferenceRing(group, sp.ring_rank, blocks, index)
    if not returns_lse(kernel):
        whole = cast(AutogradKernel, kernel)
        return LocalAttention(whole, whole.prepare_batch(blocks) if mine.q_heads else None, index)
    work = pairs_of_blocks(layout, lengths, mask, shapes.q[0])
    routes = ring_routes([[pairs > 0 for pairs in row] for row in work])
    width = -(-mine.kv_heads // chunks) * (shapes.k[3] + shapes.v[3])
    kv_bytes = shapes.k[0] * shapes.k[1] * sp.ulysses_size * width * shapes.dtype.itemsize * sp.ring_size
    impl = choose_ring_impl(sp.ring_impl, kv_bytes, routes) if sp.ring_size > 1 else "p2p"
    prepared = tuple(kernel.prepare(blocks)) if mine.q_heads else (None,) * blocks.count
    return Ring(group, sp.ring_rank, sp.ring_size, routes, impl, kernel, prepared, index)


def choose_beside(
    shapes: Shapes,
    sp: SequenceSharding,
    mask: Mask,
    scores: Scores,
    lengths: tuple[int, int],
    kernel: AnyKernel,
    *,
    lse: bool,
) -> tuple[Kernel, Choice, bool]:
    """`choose`, and whether exchanges run beside attention. By rule they do only with a kernel that can serve that."""
    overlaps = exchange_pieces(shapes, sp) > 1
    if overlaps and not lse and sp.overlap_chunks == "auto":
        try:
            return *choose(shapes, sp, mask, scores, lengths, kernel, lse=True), True
        except LongspanError:  # whatever else is wrong is said below
            overlaps = False
    return *choose(shapes, sp, mask, scores, lengths, kernel, lse=lse or overlaps), overlaps


def exchange_pieces(shapes: Shapes, sp: SequenceSharding) -> int:
    """Chunks in which the heads are wanted to go through the exchange, each beside the attention of another; 1: all at
    once. On a ring, keys and values of a chunk go round, so that chunks are whole KV groups.
    """
    if sp.ulysses_size == 1:
        return 1
    asked = sp.overlap_chunks
    if asked == "auto":
        sent = shapes.k[0] * shapes.k[1] * (shapes.q[2] * shapes.q[3] + shapes.k[2] * (shapes.k[3] + shapes.v[3]))
        size = shapes.dtype.itemsize if sp.wire_dtype == "exact" else 1
        asked = choose_overlap_chunks(sent * size, sp.all_to_all_link)
    shards = split_heads(shapes.q[2], shapes.k[2], sp.ulysses_size, kv_replication=sp.kv_replication)
    most = max(shard.kv_heads if sp.ring_size > 1 else shard.q_heads for shard in shards)
    return max(1, min(asked, most))


def _of_chunks(
    ring: Ring, runs: tuple[tuple[tuple[HeadShard, ...], ...], ...], rank: int, device: torch.device
) -> tuple[Chunk, ...]:
    """My heads of every chunk with the ring of all my heads: what it has prepared serves any of them."""
    return tuple(
        Chunk(
            shards,
            shards[rank],
            replace(ring, kv_head_index=_index(shards[rank], device)),
            first=at == 0,
            last=at == len(pieces) - 1,
        )
        for pieces in runs
        for at, shards in enumerate(pieces)
    )


def _index(mine: HeadShard, device: torch.device) -> Tensor | None:
    heads = mine.kv_head_index
    return None if heads is None else torch.tensor(heads, device=device)


def _blocks(
    shapes: Shapes,
    layout: Layout,
    mask: Mask,
    scores: Scores,
    lengths: Span,
    mine: HeadShard,
    ring_rank: int,
) -> Blocks:
    k_spans, owners = layout.runs(lengths[1])
    q_spans = tuple((a + mask.q_start, b + mask.q_start) for a, b in layout.block(lengths[0], ring_rank))
    return Blocks(
        mask,
        scores.kind,
        shapes.q[0],
        mine.q_heads,
        mine.q_start,
        lengths,
        q_spans,
        k_spans,
        owners,
        shapes.device,
        (mine.q_heads * shapes.q[3] + mine.kv_heads * (shapes.k[3] + shapes.v[3])) * shapes.dtype.itemsize,
        shapes.dtype,
        (shapes.q[3], shapes.v[3]),
    )


def choose(
    shapes: Shapes,
    sp: SequenceSharding,
    mask: Mask,
    scores: Scores,
    lengths: tuple[int, int],
    kernel: AnyKernel,
    *,
    lse: bool = False,
) -> tuple[Kernel, Choice]:
    """The kernel that this attention runs with, and why; with `lse` one that gives the log-sum-exp."""
    need = KernelRequest(
        mask.limited_to(max(lengths)),
        scores,
        shapes.device,
        shapes.grad,
        sp.ring_size,
        lengths[0] == lengths[1],
        shapes.dtype,
        (shapes.q[3], shapes.v[3]),
        lse,
    )
    return choose_kernel(kernel, need)


def pairs_of_blocks(layout: Layout, lengths: Span, mask: Mask, batch: int) -> list[list[int]]:
    """`work[i][j]`: pairs of queries of block i and keys of block j that attend to each other (no `mod` is asked)."""
    work = [[0] * layout.ring for _ in range(layout.ring)]
    q_spans, q_owners = layout.runs(lengths[0])
    k_spans, k_owners = layout.runs(lengths[1])
    q_spans = tuple((start + mask.q_start, stop + mask.q_start) for start, stop in q_spans)
    for b0, b1 in row_groups(mask, batch):
        for m, n, part in intersections(mask.regions(b0, *lengths), q_spans, k_spans):
            work[q_owners[m]][k_owners[n]] += (b1 - b0) * part.pairs
    return work


# ---------------------------------------------------------------------------------------------------------------------
# What is refused.


def check(shapes: Shapes, sp: SequenceSharding, mask: Mask, scores: Scores, lengths: tuple[int, int]) -> None:
    """Everything that can be refused whatever the kernel is.

    Raises:
        LongspanError: with the numbers.
    """
    sp.check_placed()
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
    if mask.mod is not None:
        at = torch.zeros(1, dtype=torch.int64, device=shapes.device)
        mask.mod_of((0, 1), (0, 1), at, at)  # refuses what is no mask
    scores.check(shapes.q[2])
    check_heads(shapes.q[2], shapes.k[2])
    _check_mesh(shapes.k[2], sp)


def _check_mesh(kv_heads: int, sp: SequenceSharding) -> None:
    if sp.kv_replication or sp.ulysses_size <= kv_heads:
        return
    fits = max(u for u in range(1, kv_heads + 1) if sp.size % u == 0)
    raise LongspanError(
        f"`ulysses={sp.ulysses_size}` needs at least {sp.ulysses_size} KV heads when KV replication is refused, the "
        f"model has {kv_heads}; try `ulysses={fits}, ring={sp.size // fits}`, or allow `kv_replication=True`"
    )


def check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Refuse tensors that are no q, k and v of one attention.

    Raises:
        LongspanError: with their shapes.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x)
    shapes = {name: tuple(x.shape) for name, x in (("q", q), ("k", k), ("v", v))}
    spelled = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
    if any(len(shape) != 4 for shape in shapes.values()):
        raise LongspanError(f"attention needs [batch, tokens, heads, head_dim], four dimensions each, got {spelled}")
    if not q.device == k.device == v.device:
        raise LongspanError(f"q, k and v must be on one device, got q {q.device}, k {k.device}, v {v.device}")
    if len({x.dtype for x in (q, k, v)}) > 1 or not q.is_floating_point():
        raise LongspanError(
            f"attention needs q, k and v of one floating dtype, got q {q.dtype}, k {k.dtype}, v {v.dtype}; cast them"
        )
    if len({shape[0] for shape in shapes.values()}) > 1 or shapes["k"][1] != shapes["v"][1]:
        raise LongspanError(f"q, k and v must have the same batch, k and v the same tokens, got {spelled}")
    if min(*q.shape[:2], k.shape[1]) < 1:
        raise LongspanError(f"attention over no tokens: {spelled}")
    if shapes["q"][3] != shapes["k"][3] or shapes["k"][2] != shapes["v"][2]:
        raise LongspanError(f"q and k need the same head_dim, k and v the same number of heads, got {spelled}")
