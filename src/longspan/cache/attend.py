"""Attention of new tokens to a sequence whose keys and values lie sharded in a cache, and stay there.

Keys and values do not move: each rank holds those of its KV heads (the Ulysses axis) and of its tokens (the ring axis).
Queries go to them. Of a chunk of a prompt, cut over all ranks, the exchange brings q, k and v of the block's tokens to
the ranks of their heads; keys and values are stored there; an all-gather brings the queries of all blocks of the ring,
each rank attends to what it holds, and an All-to-All takes the partial outputs home, where their log-sum-exps add them
up (pass-Q of Yang et al. 2024, "Context Parallelism for Scalable Million-Token Inference", arXiv:2411.01783; flash
decoding over ranks). Of a few tokens, which every rank has computed, no query travels: each rank takes its heads', and
one all-gather of the partial outputs gives every rank all of them.

Per rank and layer a chunk of C tokens on u x r ranks sends, beside the exchange of Ulysses on the C / r tokens of a
block, C / r * Hq / u * (r - 1) heads of q, and as many of the output, in fp32 and with their log-sum-exp; a few tokens
that all compute Hq / u * (r u - 1) such heads of output each, without a ring as they are, not in fp32. The planner has
the bytes (`longspan.plan.layers.exchange`).

Shape suffixes: B batch, L my tokens of a chunk, S tokens of a block of it, N new tokens, T tokens that I hold, H query
heads, K KV heads, D head_dim; lower-case h, k: those of this rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from longspan.attn.kernels.base import BlockKernel, Blocks, KernelRequest
from longspan.attn.kernels.choice import AnyKernel, Choice, choose_kernel, returns_lse
from longspan.comm.all_to_all import gather_heads, scatter_heads
from longspan.comm.gather import gather_into
from longspan.core.errors import LongspanError
from longspan.core.heads import HeadShard, split_heads

if TYPE_CHECKING:
    from longspan.attn.mask import Mask
    from longspan.attn.score import ScoreKind, Scores
    from longspan.cache.store import Store
    from longspan.comm.mesh import SequenceSharding
    from longspan.core.kv_placement import KVPlacement
    from longspan.core.layout import Span


@dataclass(frozen=True, eq=False)
class Step:
    """One forward with a cache: new tokens behind those that it holds.

    Attributes:
        sp: the sharding, its layout that of the new tokens.
        kv_placement: of all tokens, the new ones included.
        new: how many are new.
        cut: whether they are cut over the ranks; else every rank has computed all of them.
        owned: where they lie that this ring rank stores: runs in the block's tokens (cut), or in the new tokens.
        kernels: what was prepared for a kind of layer.
        stored: layers whose keys and values of the new tokens are in the cache.
    """

    sp: SequenceSharding
    kv_placement: KVPlacement
    new: int
    cut: bool
    owned: tuple[Span, ...]
    kernels: dict[Any, _Prepared] = field(default_factory=dict)
    stored: set[Any] = field(default_factory=set)

    @property
    def past(self) -> int:
        """Tokens before the new ones."""
        return self.kv_placement.length - self.new


@dataclass(frozen=True, eq=False)
class _Prepared:
    """A kernel and its calls for all layers of a kind.

    Attributes:
        mine: my heads.
        index: for each of my query heads its KV head, where they are not in equal groups.
        kernel: gives log-sum-exps.
        block: what it prepared; None where no query sees anything that I hold.
        choice: the kernel, and why.
    """

    shards: tuple[HeadShard, ...]
    mine: HeadShard
    index: Tensor | None
    kernel: BlockKernel
    block: Any
    choice: Choice


def begin(sp: SequenceSharding, kv_placement: KVPlacement, new: int) -> Step:
    """Append new tokens to `kv_placement`, and say where they are.

    Args:
        sp: the sharding.
        kv_placement: of the tokens so far; they grow.
        new: tokens.
    """
    rank, past, layout = sp.ring_rank, kv_placement.length, sp.layout
    cut = kv_placement.add(layout, new)
    if cut:
        starts = accumulate((b - a for a, b in layout.block(new, rank)), initial=0)
        runs = zip(starts, layout.block(new, rank), strict=False)
        owned = tuple((at, at + min(b, new) - a) for at, (a, b) in runs if a < new)
    else:
        owned = tuple((a - past, b - past) for a, b in kv_placement.held(rank, past))
    return Step(sp, kv_placement, new, cut, owned)


def attend(
    step: Step,
    store: Store,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    scores: Scores,
    kernel: AnyKernel = "auto",
    kept_from: int = 0,
) -> tuple[Tensor, Choice]:
    """Store the new tokens' keys and values, and attend to all that are held anywhere.

    Args:
        step: the forward.
        store: this layer's; what no later token will see is dropped.
        q: new tokens' queries `[B, L, H, D]`: of my tokens where they are cut, else of all.
        k: their keys `[B, L, K, D]`.
        v: their values `[B, L, K, Dv]`; where the store has them shared, the first elements of the keys.
        mask: of the layer, over the whole sequence; its `q_start` is that of the new tokens.
        scores: of all heads.
        kernel: as for `longspan.attention`, one that gives log-sum-exps.
        kept_from: the first token that later ones will see (`kept_from`).

    Returns:
        The output of the same tokens, `[B, L, H, Dv]`, exactly, and which kernel it was.

    Raises:
        LongspanError: for a kernel that gives no log-sum-exp.
    """
    v_dim = v.shape[3]
    prepared = step.kernels.get(key := (mask, scores.kind, q.shape, k.shape, v_dim, store.start))
    if prepared is None:
        prepared = step.kernels[key] = _prepare(step, mask, scores, q, k, v, store.start, kernel)
    mine = prepared.mine
    q_BShD, k_BSkD, v_BSkD = _to_heads(step, prepared, q, k, v, store.shared)
    rows = [slice(*run) for run in step.owned]
    k_new, v_new = (_rows(x, rows).transpose(1, 2) for x in (k_BSkD, v_BSkD))
    store.heads, store.mine = (q.shape[2], k.shape[2]), (mine.kv_start, mine.kv_stop)
    store.append(k_new, v_new)
    del k_new, v_new, k_BSkD, v_BSkD
    partial = _attended(step, prepared, store, q_BShD, scores.of_heads(mine.q_start, mine.q_stop), v_dim)
    store.release()
    store.keep_from(kept_from, step.kv_placement.count(step.sp.ring_rank, kept_from))
    out = (_home if step.cut else _everywhere)(step, prepared, partial, scores, q.dtype)
    return out, prepared.choice


def kept_from(length: int, window: int | None, chunk: int | None) -> int:
    """The first token that the next one, at `length`, will see: what lies before it need not be held.

    Args:
        length: tokens so far.
        window: of the layer.
        chunk: of the layer, which counts from token 0.
    """
    first = 0 if window is None else max(0, length - window + 1)
    return first if chunk is None else max(first, length // chunk * chunk)


# ---------------------------------------------------------------------------------------------------------------------
# Prepared once in a forward for all layers of a kind.


def _prepare(
    step: Step, mask: Mask, scores: Scores, q: Tensor, k: Tensor, v: Tensor, start: int, kernel: AnyKernel
) -> _Prepared:
    sp = step.sp
    shards = split_heads(q.shape[2], k.shape[2], sp.ulysses_size, kv_replication=sp.kv_replication)
    mine = shards[sp.ulysses_rank]
    mask = mask.limited_to(step.kv_placement.length)
    dims = q.shape[3], v.shape[3]
    need = KernelRequest(mask, scores, q.device, False, max(2, sp.ring_size), False, q.dtype, dims, lse=True)
    found, choice = choose_kernel(kernel, need)
    if not returns_lse(found):
        raise LongspanError(
            f"the kernel {found.name} gives no log-sum-exp, by which what the ranks of a cache compute is added up; "
            f"parallelize the model with kernel='auto' or 'tiled'"
        )
    index = None if mine.kv_head_index is None else torch.tensor(mine.kv_head_index, device=q.device)
    block = None
    keys = step.kv_placement.held(sp.ring_rank, start)
    if keys and mine.q_heads:
        made = _blocks(step, mask, scores.kind, mine, q, keys, dims)
        block = found.prepare(made)[0]
    return _Prepared(shards, mine, index, found, block, choice)


def _blocks(
    step: Step, mask: Mask, kind: ScoreKind, mine: HeadShard, q: Tensor, keys: tuple[Span, ...], dims: tuple[int, int]
) -> Blocks:
    past = step.past
    queries = step.sp.layout.local_length(step.new) * step.sp.size if step.cut else step.new
    return Blocks(
        mask=mask,
        kind=kind,
        batch=q.shape[0],
        heads=mine.q_heads,
        first_head=mine.q_start,
        lengths=(step.new, step.kv_placement.length),
        q_spans=((past, past + queries),),
        k_spans=keys,
        source_ranks=(0,) * len(keys),
        device=q.device,
        dtype=q.dtype,
        head_dims=dims,
    )


# ---------------------------------------------------------------------------------------------------------------------
# To my heads, and to what I hold.


def _to_heads(
    step: Step, prepared: _Prepared, q: Tensor, k: Tensor, v: Tensor, shared: int
) -> tuple[Tensor, Tensor, Tensor]:
    """My heads of the block's tokens `[B, S, h, D]`, or of all new ones where nothing is cut."""
    mine, sp = prepared.mine, step.sp
    heads, kv_heads = slice(mine.q_start, mine.q_stop), slice(mine.kv_start, mine.kv_stop)
    if not step.cut or sp.ulysses_size == 1:
        return q[:, :, heads], k[:, :, kv_heads], v[:, :, kv_heads]
    assert sp.ulysses_group is not None
    D, Dv = q.shape[3], v.shape[3]
    if shared:
        packed_SBW = scatter_heads([q, k], ["q", "kv"], prepared.shards, sp.ulysses_group)
        q_part, k_part = packed_SBW.split([mine.q_heads * D, mine.kv_heads * D], -1)
        q = q_part.unflatten(2, (mine.q_heads, D)).transpose(0, 1)
        k = k_part.unflatten(2, (mine.kv_heads, D)).transpose(0, 1)
        return q, k, k[..., :shared]
    packed_SBW = scatter_heads([q, k, v], ["q", "kv", "kv"], prepared.shards, sp.ulysses_group)
    parts = packed_SBW.split([mine.q_heads * D, mine.kv_heads * D, mine.kv_heads * Dv], -1)
    counts = (mine.q_heads, D), (mine.kv_heads, D), (mine.kv_heads, Dv)
    q, k, v = (part.unflatten(2, count).transpose(0, 1) for part, count in zip(parts, counts, strict=True))
    return q, k, v


def _rows(x_BSKD: Tensor, rows: list[slice]) -> Tensor:
    """Some tokens, in order."""
    if len(rows) == 1:
        return x_BSKD[:, rows[0]]
    return torch.cat([x_BSKD[:, run] for run in rows], 1) if rows else x_BSKD[:, :0]


def _attended(step: Step, prepared: _Prepared, store: Store, q_BShD: Tensor, scores: Scores, v_dim: int) -> Tensor:
    """My heads' attention of all blocks' queries to what I hold: output and log-sum-exp, `[B, h, R * S, Dv + 1]`, in
    fp32 at least.
    """
    q_BhND = _all_blocks(step, q_BShD).transpose(1, 2)
    B, h, N = q_BhND.shape[:3]
    out: Tensor | int = 0
    lse: Tensor | float = -torch.inf
    if prepared.block is not None:
        k, v = store.read(q_BShD.dtype)
        if prepared.index is not None:
            k, v = (x.index_select(1, prepared.index) for x in (k, v))
        out, lse = prepared.kernel.forward(q_BhND, k, v, prepared.block, scores)
    # Made behind the kernel, which has sums of its own.
    partial = q_BhND.new_empty(B, h, N, v_dim + 1, dtype=torch.promote_types(q_BhND.dtype, torch.float32))
    partial[..., :v_dim] = out
    partial[..., v_dim] = lse
    return partial


def _all_blocks(step: Step, q_BShD: Tensor) -> Tensor:
    """The queries of all blocks of the ring, `[B, R * S, h, D]`, in the sequence's order, padding last."""
    sp = step.sp
    if not step.cut or sp.ring_size == 1:
        return q_BShD
    assert sp.ring_group is not None
    mine = q_BShD.contiguous()
    every = mine.new_empty(sp.ring_size, *mine.shape)
    gather_into(every.view(-1), mine.view(-1), group=sp.ring_group)
    whole = mine.new_empty(mine.shape[0], sp.ring_size * mine.shape[1], *mine.shape[2:])
    for rank, block in enumerate(every):
        at = 0
        for a, b in sp.layout.block(step.new, rank):
            whole[:, a:b] = block[:, at : at + b - a]
            at += b - a
    return whole


# ---------------------------------------------------------------------------------------------------------------------
# Partial outputs added up.


def _home(step: Step, prepared: _Prepared, partial: Tensor, scores: Scores, dtype: torch.dtype) -> Tensor:
    """My tokens' output, `[B, L, H, Dv]`."""
    sp, mine = step.sp, prepared.mine
    parts = partial[None]
    if sp.ring_size > 1:
        send = partial.new_empty(sp.ring_size, *partial.shape[:2], partial.shape[2] // sp.ring_size, partial.shape[3])
        for rank, block in enumerate(send):
            torch.cat([partial[:, :, a:b] for a, b in sp.layout.block(step.new, rank)], 2, out=block)
        parts = torch.empty_like(send)
        if send.numel():
            dist.all_to_all_single(parts.view(-1), send.view(-1), group=sp.ring_group)
        del send, block
    out = _merged(parts, scores.of_heads(mine.q_start, mine.q_stop)).to(dtype).transpose(1, 2)
    if sp.ulysses_size == 1:
        return out
    assert sp.ulysses_group is not None
    return gather_heads(out, prepared.shards, sp.ulysses_group)


def _everywhere(step: Step, prepared: _Prepared, partial: Tensor, scores: Scores, dtype: torch.dtype) -> Tensor:
    """All heads' output of all new tokens, on every rank: `[B, N, H, Dv]`."""
    sp, shards, mine = step.sp, prepared.shards, prepared.mine
    if sp.ring_size == 1:  # nothing to add up over ranks, so what travels is the output alone
        partial = _merged(partial[None], scores.of_heads(mine.q_start, mine.q_stop)).to(dtype)
    if sp.size == 1:
        return partial.transpose(1, 2)
    B, _, N, width = partial.shape
    most = max(shard.q_heads for shard in shards)
    send = partial.new_zeros(B, most, N, width)
    send[:, : partial.shape[1]] = partial
    assert sp.group is not None
    every = send.new_empty(sp.ring_size, sp.ulysses_size, *send.shape)
    gather_into(every.view(-1), send.view(-1), group=sp.group)
    outs = [every[:, u, :, : shard.q_heads] for u, shard in enumerate(shards)]
    if sp.ring_size == 1:
        return torch.cat([out[0] for out in outs], 1).transpose(1, 2)
    whole = torch.cat(outs, 2)  # of all heads, in order
    return _merged(whole, scores).to(dtype).transpose(1, 2)


def _merged(parts_RBhNW: Tensor, scores: Scores) -> Tensor:
    """`[B, h, N, Dv]`: the parts' outputs weighed by their log-sum-exps, in the ring's order; sinks join here."""
    outs, lses = parts_RBhNW[..., :-1], parts_RBhNW[..., -1]
    highest = lses.amax(0)
    if scores.sinks is not None:
        sinks = scores.sinks.to(lses.dtype)[:, None]
        highest = torch.maximum(highest, sinks)
    highest = torch.where(torch.isneginf(highest), 0.0, highest)
    total = torch.zeros_like(highest) if scores.sinks is None else (sinks - highest).exp()
    out = torch.zeros_like(outs[0])
    for part, lse in zip(outs, lses, strict=True):
        weight = (lse - highest).exp()
        total = total + weight
        out += part * weight[..., None]
    return out / torch.where(total > 0, total, 1.0)[..., None]
