"""Attention of new tokens to a sequence whose keys and values lie sharded in a cache.

Keys and values stay where they are: each rank stores those of its KV heads (Ulysses axis) and its tokens (ring axis).
Queries are sent to them.

A chunk of a prompt is sharded over all ranks ("pass-Q" of Yang et al. 2024, "Context Parallelism for Scalable
Million-Token Inference", arXiv:2411.01783):

1. The Ulysses all-to-all sends q, k and v of the block's tokens to the ranks of their heads, which store k and v.
2. An all-gather over the ring collects the queries of all blocks.
3. Each rank attends to the keys that it stores.
4. An all-to-all returns the partial outputs, which are merged by their log-sum-exps, as in flash decoding.

Every rank computes a few new tokens redundantly, so no query is sent: each rank takes the queries of its heads, and one
all-gather of the partial outputs gives every rank all of them. Without a ring, a rank's output is the whole one.

Sent per rank and layer on u x r ranks (the planner counts the same: `longspan.plan.layers.messages`):

- a chunk of C tokens: the Ulysses all-to-all of the C / r tokens of a block; C / r * Hq / u * (r - 1) heads of q, and
  as many of the output, in fp32 with their log-sum-exp
- a few tokens: Hq / u * (r u - 1) such heads of output per token; without a ring, in the model's dtype

Shape suffixes: B batch, L my tokens of a chunk, S tokens of a block of it, N new tokens, T tokens that I store, H query
heads, K KV heads, D head_dim of q and k, V of v; lower-case h, k: this rank's.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from longspan.attn.kernels.base import BlockKernel, Blocks, KernelRequest, SoftmaxAccumulator, exponentials, returns_lse
from longspan.attn.kernels.choice import AnyKernel, Choice, choose_kernel
from longspan.comm.all_to_all import gather_heads, scatter_heads
from longspan.compat.torch_api import gather_into
from longspan.core.errors import LongspanError
from longspan.core.heads import HeadShard, split_heads

if TYPE_CHECKING:
    from collections.abc import Sequence

    from longspan.attn.mask import Mask
    from longspan.attn.score import Scores
    from longspan.cache.layer_cache import LayerCache
    from longspan.cache.static import StaticDecode
    from longspan.comm.mesh import SequenceSharding
    from longspan.core.cache import KVPlacement
    from longspan.core.layout import Span


@dataclass(frozen=True, eq=False)
class CacheStep:
    """One forward with a cache: new tokens after the cached ones."""

    sp: SequenceSharding  # the sharding; its layout is that of the new tokens
    kv_placement: KVPlacement  # of all tokens, the new ones included
    new: int  # number of new tokens
    sharded: bool  # whether the new tokens are sharded; else every rank computes all of them
    # The tokens that this ring rank stores, as spans of the block's tokens (sharded) or of the new ones.
    local_spans: tuple[Span, ...]
    kernels: dict[Any, _Prepared] = field(default_factory=dict)  # prepared kernels, by kind of layer
    masks: dict[Any, Mask] = field(default_factory=dict)  # of the new tokens, by what a layer requests
    index_keys: dict[int, Tensor] = field(default_factory=dict)  # by layer, of the new tokens that I store
    stored_layers: set[Any] = field(default_factory=set)  # layers whose new keys and values are in the cache
    static: StaticDecode | None = None  # for a decode step of constant shapes

    @property
    def past(self) -> int:
        """Tokens before the new ones."""
        return self.kv_placement.length - self.new

    def of_entries(self, rate: int) -> CacheStep:
        """Return the same step of entries that each stand for `rate` tokens."""
        placement = self.kv_placement.of_entries(rate)
        return replace(self, kv_placement=placement, new=placement.length - self.past // rate)


@dataclass(frozen=True, eq=False)
class _Prepared:
    """A kernel and its calls, for all layers of a kind."""

    shards: tuple[HeadShard, ...]  # the heads of each Ulysses rank
    mine: HeadShard
    kv_index: Tensor | None  # KV head of each of my query heads, if they do not form equal groups
    kernel: BlockKernel  # returns log-sum-exps
    # What the kernel prepared, for each tile of the keys that I store; None for one that no query sees.
    blocks: Sequence[Any]
    tile: int | None  # tokens of a tile; None if there is one
    choice: Choice  # the kernel's name, and why it was chosen


def start_step(sp: SequenceSharding, kv_placement: KVPlacement, new: int) -> CacheStep:
    """Append `new` tokens to `kv_placement`, in place, and return the step that stores them."""
    rank, past, layout = sp.ring_rank, kv_placement.length, sp.layout
    sharded = kv_placement.add(layout, new)
    if sharded:
        starts = accumulate((b - a for a, b in layout.block(new, rank)), initial=0)
        spans = zip(starts, layout.block(new, rank), strict=False)
        local_spans = tuple((at, at + min(b, new) - a) for at, (a, b) in spans if a < new)
    else:
        local_spans = tuple((a - past, b - past) for a, b in kv_placement.held(rank, past))
    return CacheStep(sp, kv_placement, new, sharded, local_spans)


def attend(
    step: CacheStep,
    layer: LayerCache,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    scores: Scores,
    kernel: AnyKernel = "auto",
    first_visible: int = 0,
) -> tuple[Tensor, Choice]:
    """Store the new tokens' keys and values, and attend to all cached tokens.

    Args:
        step: the forward.
        layer: this layer's cache; tokens before `first_visible` are dropped from it.
        q: queries `[B, L, H, D]` of my new tokens if they are sharded, else of all.
        k: their keys `[B, L, K, D]`.
        v: their values `[B, L, K, V]`; if the cache shares them, the first elements of the keys.
        mask: of the layer, over the whole sequence; its `q_start` is that of the new tokens.
        scores: of all heads.
        kernel: as for `longspan.attention`; must return log-sum-exps.
        first_visible: the first token that later ones will see (`first_visible_token`).

    Returns:
        The exact output of the same tokens, `[B, L, H, V]`, and the kernel that ran.

    Raises:
        LongspanError: the kernel returns no log-sum-exp.
    """
    v_dim = v.shape[3]
    prepared = step.kernels.get(key := (mask, scores.kind, q.shape, k.shape, v_dim, layer.start))
    if prepared is None:
        prepared = step.kernels[key] = _prepare(step, layer, mask, scores, q, k, v, kernel)
    mine = prepared.mine
    q_BShD, k_BSkD, v_BSkV = _to_heads(step, prepared, q, k, v, layer.shared)
    layer.heads, layer.local_kv_heads = (q.shape[2], k.shape[2]), (mine.kv_start, mine.kv_stop)
    if step.static is not None:
        layer.write(step.static.slots(layer, mask).new, k_BSkD.transpose(1, 2), v_BSkV.transpose(1, 2))
    else:
        spans = [slice(*span) for span in step.local_spans]
        layer.append(*(_select(x, spans).transpose(1, 2) for x in (k_BSkD, v_BSkV)))
    del k_BSkD, v_BSkV
    of_mine = scores.of_heads(mine.q_start, mine.q_stop)
    out, lse = _local_attention(step, prepared, layer, q_BShD, of_mine, v_dim)
    layer.release()
    if step.static is None:
        layer.drop_before(first_visible, step.kv_placement.count(step.sp.ring_rank, first_visible))
    if step.sp.ring_size == 1:
        if of_mine.sinks is not None:  # one more key per head, whose value is zero; few launches, for a decoded token
            out = out * (lse - of_mine.sinks[:, None]).sigmoid()[..., None]
        out = out.to(q.dtype).transpose(1, 2)
        combine = _heads_to_tokens if step.sharded else _gather_all_heads
        return combine(step, prepared, out), prepared.choice
    partial = _packed(out, lse)
    del out, lse
    if step.sharded:
        out = _merge_my_tokens(step, partial, of_mine, q.dtype).transpose(1, 2)
        return _heads_to_tokens(step, prepared, out), prepared.choice
    return _merge_all_tokens(step, prepared, partial, scores, q.dtype).transpose(1, 2), prepared.choice


def first_visible_token(length: int, window: int | None, chunk_size: int | None) -> int:
    """Return the first token that the next one, at `length`, will see; earlier ones need not be cached.

    Args:
        length: tokens so far.
        window: of the layer's mask.
        chunk_size: of the layer's mask; chunks count from token 0.
    """
    first = 0 if window is None else max(0, length - window + 1)
    return first if chunk_size is None else max(first, length // chunk_size * chunk_size)


# ---------------------------------------------------------------------------------------------------------------------
# Prepared once per forward, for all layers of a kind.


def _prepare(
    step: CacheStep,
    layer: LayerCache,
    mask: Mask,
    scores: Scores,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kernel: AnyKernel,
) -> _Prepared:
    sp = step.sp
    shards = split_heads(q.shape[2], k.shape[2], sp.ulysses_size)
    mine = shards[sp.ulysses_rank]
    index = None if mine.kv_head_index is None else torch.tensor(mine.kv_head_index, device=q.device)
    dims = q.shape[3], v.shape[3]
    if step.static is None:
        mask = mask.limited_to(step.kv_placement.length)
    request = KernelRequest(mask, scores, q.device, False, max(2, sp.ring_size), False, q.dtype, dims, lse=True)
    if step.static is not None:
        slots = (step.static.slots(layer, mask),) if mine.q_heads else ()
        chosen, choice = step.static.kernel(request)
        return _Prepared(shards, mine, index, chosen, slots, None, choice)
    chosen, choice = choose_kernel(kernel, request)
    if not returns_lse(chosen):
        raise LongspanError(
            f"the kernel {chosen.name} returns no log-sum-exp, which a cache needs to merge partial outputs; "
            f"parallelize the model with kernel='auto' or 'tiled'"
        )
    prepared: Sequence[Any] = ()
    keys = step.kv_placement.held(sp.ring_rank, layer.start)
    elements = q.shape[0] * mine.kv_heads * (dims[0] + (0 if layer.shared else dims[1]))
    tile = layer.tile(elements, step.new, q.device)
    if keys and mine.q_heads:
        past = step.past
        queries = sp.layout.local_length(step.new) * sp.size if step.sharded else step.new
        keys, tiles = _cut(keys, tile)
        blocks = Blocks(
            mask=mask,
            kind=scores.kind,
            batch=q.shape[0],
            heads=mine.q_heads,
            first_head=mine.q_start,
            lengths=(step.new, step.kv_placement.length),
            q_spans=((past, past + queries),),
            k_spans=keys,
            source_ranks=tiles,
            device=q.device,
            dtype=q.dtype,
            head_dims=dims,
        )
        prepared = chosen.prepare(blocks)
    return _Prepared(shards, mine, index, chosen, prepared, tile, choice)


def _cut(spans: Sequence[Span], tile: int | None) -> tuple[tuple[Span, ...], tuple[int, ...]]:
    """Cut the spans of the stored tokens where a tile ends; return them, and the tile of each."""
    if tile is None:
        return tuple(spans), (0,) * len(spans)
    cut, tiles, at = [], [], 0
    for start, stop in spans:
        while start < stop:
            end = min(stop, start + tile - at % tile)
            cut.append((start, end))
            tiles.append(at // tile)
            start, at = end, at + end - start
    return tuple(cut), tuple(tiles)


# ---------------------------------------------------------------------------------------------------------------------
# To my heads, and to the tokens that I store.


def _to_heads(
    step: CacheStep, prepared: _Prepared, q: Tensor, k: Tensor, v: Tensor, shared: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return my heads of the block's tokens, `[B, S, h, D]`, or of all new tokens if they are not sharded."""
    mine, sp = prepared.mine, step.sp
    heads, kv_heads = slice(mine.q_start, mine.q_stop), slice(mine.kv_start, mine.kv_stop)
    if not step.sharded or sp.ulysses_size == 1:
        return q[:, :, heads], k[:, :, kv_heads], v[:, :, kv_heads]
    assert sp.ulysses_group is not None
    D, V = q.shape[3], v.shape[3]
    sent, kinds, counts = [q, k], ["q", "kv"], [(mine.q_heads, D), (mine.kv_heads, D)]
    if not shared:  # otherwise the values are part of the keys
        sent, kinds, counts = [*sent, v], [*kinds, "kv"], [*counts, (mine.kv_heads, V)]
    packed_SBW = scatter_heads(sent, kinds, prepared.shards, sp.ulysses_group)
    parts = packed_SBW.split([heads * dim for heads, dim in counts], -1)
    q, k, *values = (part.unflatten(2, count).transpose(0, 1) for part, count in zip(parts, counts, strict=True))
    return q, k, values[0] if values else k[..., :shared]


def _select(x_BSKD: Tensor, spans: list[slice]) -> Tensor:
    """Return some tokens, in order."""
    if len(spans) == 1:
        return x_BSKD[:, spans[0]]
    return torch.cat([x_BSKD[:, span] for span in spans], 1) if spans else x_BSKD[:, :0]


def _local_attention(
    step: CacheStep, prepared: _Prepared, layer: LayerCache, q_BShD: Tensor, scores: Scores, v_dim: int
) -> tuple[Tensor, Tensor]:
    """Return my heads' attention of all queries to the tokens that I store: output `[B, h, R * S, V]` and log-sum-exp
    `[B, h, R * S]`.
    """
    q_BhND, kernel = _gather_queries(step, q_BShD).transpose(1, 2), prepared.kernel
    into = SoftmaxAccumulator(q_BhND, v_dim, several=len(prepared.blocks) > 1)
    for tile, block in enumerate(prepared.blocks):
        if block is None:
            continue
        span = (0, None) if prepared.tile is None else (tile * prepared.tile, (tile + 1) * prepared.tile)
        k, v = layer.read(q_BShD.dtype, *span) if step.static is None else layer.read_capacity(q_BShD.dtype)
        if prepared.kv_index is not None:
            k, v = (x.index_select(1, prepared.kv_index) for x in (k, v))
        kernel.accumulate(into, q_BhND, k, v, block, scores)
        del k, v
    return into.results()


def _gather_queries(step: CacheStep, q_BShD: Tensor) -> Tensor:
    """Return the queries of all blocks of the ring, `[B, R * S, h, D]`, in sequence order, padding last."""
    sp = step.sp
    if not step.sharded or sp.ring_size == 1:
        return q_BShD
    assert sp.ring_group is not None
    mine = q_BShD.contiguous()
    blocks_RBShD = mine.new_empty(sp.ring_size, *mine.shape)
    gather_into(blocks_RBShD.view(-1), mine.view(-1), group=sp.ring_group)
    whole = mine.new_empty(mine.shape[0], sp.ring_size * mine.shape[1], *mine.shape[2:])
    for rank, block in enumerate(blocks_RBShD):
        at = 0
        for a, b in sp.layout.block(step.new, rank):
            whole[:, a:b] = block[:, at : at + b - a]
            at += b - a
    return whole


# ---------------------------------------------------------------------------------------------------------------------
# Combine the outputs of all ranks.


def _heads_to_tokens(step: CacheStep, prepared: _Prepared, out_BShV: Tensor) -> Tensor:
    """Return all heads' output of my tokens, `[B, L, H, V]`, from my heads' output of the block's tokens."""
    if step.sp.ulysses_size == 1:
        return out_BShV
    assert step.sp.ulysses_group is not None
    return gather_heads(out_BShV, prepared.shards, step.sp.ulysses_group)


def _gather_all_heads(step: CacheStep, prepared: _Prepared, out_BNhV: Tensor) -> Tensor:
    """Return all heads' output, on every rank: `[B, N, H, V]`."""
    if step.sp.size == 1:
        return out_BNhV
    received = _gathered(step, prepared, out_BNhV, head_dim=2)[0]
    return _joined_heads(prepared, received, head_dim=2)


def _gathered(step: CacheStep, prepared: _Prepared, mine: Tensor, head_dim: int) -> Tensor:
    """Gather a tensor of each rank's heads from all ranks, `[ring, ulysses, *shape]`, heads padded to the most of a
    rank.
    """
    assert step.sp.group is not None
    missing = max(shard.q_heads for shard in prepared.shards) - mine.shape[head_dim]
    if missing:
        mine = F.pad(mine, (0, 0) * (mine.dim() - 1 - head_dim) + (0, missing))
    mine = mine.contiguous()
    received = mine.new_empty(step.sp.ring_size, step.sp.ulysses_size, *mine.shape)
    gather_into(received.view(-1), mine.view(-1), group=step.sp.group)
    return received


def _joined_heads(prepared: _Prepared, received: Tensor, head_dim: int) -> Tensor:
    """Join the heads of all Ulysses ranks: `[ulysses, *shape]` with `head_dim` counted in `shape`, without padding."""
    counts = [shard.q_heads for shard in prepared.shards]
    if len(set(counts)) == 1:  # a view for one token of one row
        return received.movedim(0, head_dim).flatten(head_dim, head_dim + 1)
    return torch.cat([x.narrow(head_dim, 0, n) for x, n in zip(received, counts, strict=True)], head_dim)


# ---------------------------------------------------------------------------------------------------------------------
# Merge the partial outputs of a ring.


def _packed(out_BhNV: Tensor, lse_BhN: Tensor) -> Tensor:
    """Pack output and log-sum-exp, `[B, h, N, V + 1]`, in fp32 or wider."""
    B, h, N, V = out_BhNV.shape
    packed = lse_BhN.new_empty(B, h, N, V + 1)
    packed[..., :V] = out_BhNV
    packed[..., V] = lse_BhN
    return packed


def _merge_my_tokens(step: CacheStep, partial: Tensor, scores: Scores, dtype: torch.dtype) -> Tensor:
    """Return my heads' output of the block's tokens, `[B, h, S, V]`."""
    sp = step.sp
    send = partial.new_empty(sp.ring_size, *partial.shape[:2], partial.shape[2] // sp.ring_size, partial.shape[3])
    for rank, block in enumerate(send):
        torch.cat([partial[:, :, a:b] for a, b in sp.layout.block(step.new, rank)], 2, out=block)
    parts = torch.empty_like(send)
    if send.numel():
        dist.all_to_all_single(parts.view(-1), send.view(-1), group=sp.ring_group)
    del send, block
    return merge(parts, scores, dtype)


def _merge_all_tokens(
    step: CacheStep, prepared: _Prepared, partial: Tensor, scores: Scores, dtype: torch.dtype
) -> Tensor:
    """Return all heads' output of all new tokens, on every rank: `[B, H, N, V]`."""
    received = _gathered(step, prepared, partial, head_dim=1)
    return merge(_joined_heads(prepared, received.transpose(0, 1), head_dim=2), scores, dtype)


def merge(parts_RBhNW: Tensor, scores: Scores, dtype: torch.dtype) -> Tensor:
    """Return the parts' outputs, weighted by their log-sum-exps: `[B, h, N, V]`. Add sinks. Overwrites the parts."""
    outs, lses = parts_RBhNW[..., :-1], parts_RBhNW[..., -1]
    if scores.sinks is not None:  # one more part, whose output is zero
        lses = torch.cat([lses, scores.sinks.to(lses.dtype)[:, None].expand(1, *lses.shape[1:])])
    weights, total, _ = exponentials(lses)
    out = outs.mul_(weights[: len(outs), ..., None]).sum(0)
    total = total.clamp_(min=torch.finfo(total.dtype).tiny)[..., None]  # 0 for a query that sees no key
    return torch.div(out, total, out=torch.empty_like(out, dtype=dtype))  # one kernel with the cast
