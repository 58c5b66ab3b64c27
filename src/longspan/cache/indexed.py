"""Indexed attention over a sharded cache, which stores a token's latent vector and index key together.

Each rank of a ring stores its tokens. A chunk of a prompt gathers those of all ranks, and its queries stay. Every rank
computes a few new tokens redundantly: it scores the index keys that it stores, and gathers the rows of scores, as the
best of a row depend on all of it. It attends to the chosen tokens that it stores, and partial outputs are merged.

Sent per rank and layer on a ring of r, for vectors of W elements and index keys of D: a chunk of C tokens over n ranks
after P others sends C / n * (W + D) * (n - 1) + P / r * (W + D) * (r - 1) elements; a token after P others P / r * (r -
1) scores, and H * (R + 1) * (r - 1) elements of outputs and log-sum-exps, both in fp32.

Shape suffixes: B batch, L my new tokens, T tokens that I store, N all tokens, X elements, W a latent vector with its
rotary part, H query heads, R elements of a latent vector.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from longspan.attn.indexed import Lists, Packing, attend_to_chosen, partial_attention
from longspan.cache.attend import merge
from longspan.compat.torch_api import gather_into

if TYPE_CHECKING:
    from longspan.attn.score import Scores
    from longspan.cache.attend import CacheStep
    from longspan.cache.layer_cache import LayerCache


def in_sequence(step: CacheStep, x_BTX: Tensor, length: int) -> Tensor:
    """Return the entries of the first `length` tokens in their order, `[B, length, X]`, from those of each rank."""
    ring, group = step.sp.ring_size, step.sp.ring_group
    if group is None or ring == 1:
        return x_BTX
    held = [
        [(a, min(b, length)) for a, b in step.kv_placement.held(rank) if a < length] for rank in range(ring)
    ]  # fmt: skip
    most = max(sum(b - a for a, b in spans) for spans in held)
    mine = x_BTX.new_zeros(most, x_BTX.shape[0], x_BTX.shape[2])
    mine[: x_BTX.shape[1]] = x_BTX.transpose(0, 1)
    every = mine.new_empty(ring, *mine.shape)
    gather_into(every.view(-1), mine.view(-1), group=group)
    out = x_BTX.new_empty(x_BTX.shape[0], length, x_BTX.shape[2])
    for spans, theirs in zip(held, every, strict=True):
        at = 0
        for a, b in spans:
            out[:, a:b] = theirs[at : at + b - a].transpose(0, 1)
            at += b - a
    return out


def whole_of(step: CacheStep, past_BTX: Tensor | None, new_BLX: Tensor) -> Tensor:
    """Return the entries of cached and new tokens, of which `past` are those that I store: `[B, N, X]`."""
    if not step.past:
        return new_BLX
    if past_BTX is None:
        past_BTX = new_BLX[:, :0]
    return torch.cat([in_sequence(step, past_BTX, step.past), new_BLX], 1)


def attend_indexed(
    step: CacheStep,
    store: LayerCache,
    q_BLHW: Tensor,
    c_BLW: Tensor,
    index_keys_BTD: Tensor | None,
    chosen_BLT: Tensor,
    packing: Packing,
    scores: Scores,
) -> Tensor:
    """Store the new tokens, and return the attention of my new tokens to the chosen ones, `[B, L, H, R]`.

    Args:
        step: the forward.
        store: this layer's cache.
        q_BLHW: queries of my new tokens if they are sharded, else of all.
        c_BLW: their latent vectors.
        index_keys_BTD: index keys of the new tokens that I store; None for a layer without an indexer.
        chosen_BLT: tokens of the whole sequence, -1 for none.
        packing: of the latent vectors.
        scores: with a scale.
    """
    W, scale = c_BLW.shape[2], scores.scale_of(1)
    if step.sharded:
        c_BLW = step.sp.gather(c_BLW, dim=1, length=step.new)
    spans = step.kv_placement.held(step.sp.ring_rank, step.past)
    mine = torch.cat([c_BLW[:, :0], *(c_BLW[:, a - step.past : b - step.past] for a, b in spans)], 1)
    past = None if store.rows is None else store.read(c_BLW.dtype)[0][:, 0, :, :W]
    whole = whole_of(step, past, c_BLW) if step.sharded else None
    vectors = mine if index_keys_BTD is None else torch.cat([mine, index_keys_BTD.to(mine.dtype)], 2)
    store.shared = packing.value.stop
    store.heads, store.local_kv_heads = (q_BLHW.shape[2], 1), (0, 1)
    store.append(vectors[:, None], vectors[:, None, :, : store.shared])
    if whole is None and step.sp.ring_size == 1:
        whole = store.read(c_BLW.dtype)[0][:, 0, :, :W]
    if whole is not None:
        out = attend_to_chosen(q_BLHW, whole[:, :, None], Lists(chosen_BLT[:, :, None]), packing, scale, scores.sinks)
        store.release()
        return out
    here = store.read(c_BLW.dtype)[0][:, 0, :, None, :W]
    local = _local_indices(step, chosen_BLT)
    out, lse = partial_attention(q_BLHW, here, Lists(local[:, :, None]), packing, scale)
    store.release()
    packed = torch.cat([out, lse[..., None]], -1).transpose(1, 2).contiguous()
    parts = packed.new_empty(step.sp.ring_size, *packed.shape)
    assert step.sp.ring_group is not None
    gather_into(parts.view(-1), packed.view(-1), group=step.sp.ring_group)
    return merge(parts, scores, q_BLHW.dtype).transpose(1, 2)


def _local_indices(step: CacheStep, chosen_BLT: Tensor) -> Tensor:
    """Return the places of chosen tokens among those that I store, -1 for tokens of other ranks."""
    local, at = torch.full_like(chosen_BLT, -1), 0
    for a, b in step.kv_placement.held(step.sp.ring_rank):
        local = torch.where((chosen_BLT >= a) & (chosen_BLT < b), chosen_BLT - a + at, local)
        at += b - a
    return local
