"""Indexed attention over a sharded cache, which stores a token's latent vector and index key together, or an entry's.

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

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from longspan.attn.indexed import Lists, Packing, WindowAndEntries, attend_to_chosen, partial_attention
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


def my_new(step: CacheStep, new_BLX: Tensor) -> Tensor:
    """Return those of the new tokens that I store."""
    spans = step.kv_placement.held(step.sp.ring_rank, step.past)
    return torch.cat([new_BLX[:, :0], *(new_BLX[:, a - step.past : b - step.past] for a, b in spans)], 1)


def keys_to_score(step: CacheStep, store: LayerCache, number: int, new_BLD: Tensor, whole: bool = False) -> Tensor:
    """Return the index keys of all tokens; for queries that every rank computes, those that I store, unless `whole`.

    Also hand on those of the new tokens to the layer's attention, which stores them.
    """
    past = None if store.rows is None else store.read(new_BLD.dtype)[0][:, 0, :, -new_BLD.shape[2] :]
    step.index_keys[number] = mine = my_new(step, new_BLD)
    if step.sharded or whole:
        return whole_of(step, past, new_BLD)
    return mine if past is None else torch.cat([past, mine], 1)


def whole_scores(step: CacheStep, scores_BLT: Tensor) -> Tensor:
    """Return the scores of all index keys, `[B, L, N]`, from those of `keys_to_score`."""
    if step.sharded:
        return scores_BLT
    return in_sequence(step, scores_BLT.transpose(1, 2), step.kv_placement.length).transpose(1, 2)


def attend_indexed(
    step: CacheStep,
    store: LayerCache,
    q_BLHW: Tensor,
    kv_BNKW: Tensor,
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
        kv_BNKW: latent vectors of all new tokens, or keys with values.
        index_keys_BTD: index keys of the new tokens that I store; None for a layer without an indexer.
        chosen_BLT: tokens of the whole sequence, -1 for none.
        packing: of `kv`.
        scores: with a scale.
    """
    heads, scale = kv_BNKW.shape[2], scores.scale_of(1)
    here, whole = _store(step, store, q_BLHW.shape[2], kv_BNKW.flatten(2), index_keys_BTD, packing.value.stop)
    if whole is None and step.sp.ring_size == 1:
        whole = here
    if whole is not None:
        lists, kv = _for_heads(chosen_BLT, heads), whole.unflatten(2, (heads, -1))
        out = attend_to_chosen(q_BLHW, kv, lists, packing, scale, scores.sinks)
    else:
        lists, kv = _for_heads(_local_indices(step, chosen_BLT), heads), here.unflatten(2, (heads, -1))
        part = _packed(*partial_attention(q_BLHW, kv, lists, packing, scale))
        out = merge(_parts_of_ring(step, part), scores, q_BLHW.dtype).transpose(1, 2)
    store.release()
    return out


def attend_compressed(
    step: CacheStep,
    store: LayerCache,
    q_BLHD: Tensor,
    near_BND: Tensor,
    entries_BED: Tensor,
    index_keys_BTI: Tensor | None,
    lists: WindowAndEntries,
    scores: Scores,
) -> Tensor:
    """Store the new entries, and return the attention of my new tokens to their windows and entries, `[B, L, H, D]`.

    Args:
        step: the forward, of entries (`CacheStep.of_entries`).
        store: the entries of this layer.
        q_BLHD: queries of my new tokens if they are sharded, else of all.
        near_BND: keys of the new tokens and of the window before them.
        entries_BED: all new entries.
        index_keys_BTI: index keys of the new entries that I store; None for a layer without an indexer.
        lists: of `near` and of the entries of the whole sequence.
        scores: with sinks.
    """
    D = entries_BED.shape[2]
    here, whole = _store(step, store, q_BLHD.shape[2], entries_BED, index_keys_BTI, D)
    packing, scale = Packing(slice(0, D), slice(0, D)), scores.scale_of(D)
    if whole is not None:
        kv = torch.cat([near_BND, whole], 1)[:, :, None]
        out = attend_to_chosen(q_BLHD, kv, lists, packing, scale, scores.sinks)
    else:  # without a copy of what is stored: the window and the entries are parts, too
        window = replace(lists, entries=0, best_BLT=None, seen_BL=lists.seen_BL * 0)
        near = _packed(*partial_attention(q_BLHD, near_BND[:, :, None], window, packing, scale))
        local = _local_entries(step, lists)
        part = _packed(*partial_attention(q_BLHD, here[:, :, None], local, packing, scale))
        out = merge(torch.cat([near[None], _parts_of_ring(step, part)]), scores, q_BLHD.dtype).transpose(1, 2)
    store.release()
    return out


def _store(
    step: CacheStep, store: LayerCache, heads: int, new_BNW: Tensor, index_keys_BTD: Tensor | None, values: int
) -> tuple[Tensor, Tensor | None]:
    """Store my share of new vectors, whose first elements are values, with index keys.

    Return all that I store, `[B, T, W]`; and, if my queries are sharded, those of the whole sequence.
    """
    W, dtype = new_BNW.shape[2], new_BNW.dtype
    past = None if store.rows is None else store.read(dtype)[0][:, 0, :, :W]
    whole = whole_of(step, past, new_BNW) if step.sharded else None
    mine = my_new(step, new_BNW)
    vectors = mine if index_keys_BTD is None else torch.cat([mine, index_keys_BTD], 2)
    store.shared, store.heads, store.local_kv_heads = values, (heads, 1), (0, 1)
    store.append(vectors[:, None], vectors[:, None, :, :values])
    return store.read(dtype)[0][:, 0, :, :W], whole


def _for_heads(chosen_BLT: Tensor, heads: int) -> Lists:
    return Lists(chosen_BLT[:, :, None].expand(-1, -1, heads, -1))


def _packed(out_BLHV: Tensor, lse_BLH: Tensor) -> Tensor:
    return torch.cat([out_BLHV, lse_BLH[..., None]], -1).transpose(1, 2).contiguous()


def _parts_of_ring(step: CacheStep, part: Tensor) -> Tensor:
    """Return the partial outputs of all ranks of the ring, stacked."""
    if step.sp.ring_group is None or step.sp.ring_size == 1:
        return part[None]
    parts = part.new_empty(step.sp.ring_size, *part.shape)
    gather_into(parts.view(-1), part.view(-1), group=step.sp.ring_group)
    return parts


def _local_entries(step: CacheStep, lists: WindowAndEntries) -> WindowAndEntries:
    """Return the lists of the entries that I store."""
    spans, seen = step.kv_placement.held(step.sp.ring_rank), lists.seen_BL
    local = replace(lists, window=0, tokens=0, entries=sum(b - a for a, b in spans))
    if lists.best_BLT is not None:
        return replace(local, best_BLT=_local_indices(step, lists.best_BLT))
    seen_here = sum(((seen - a).clamp(0, b - a) for a, b in spans), torch.zeros_like(seen))
    return replace(local, seen_BL=seen_here)


def _local_indices(step: CacheStep, chosen_BLT: Tensor) -> Tensor:
    """Return the places of chosen tokens among those that I store, -1 for tokens of other ranks."""
    local, at = torch.full_like(chosen_BLT, -1), 0
    for a, b in step.kv_placement.held(step.sp.ring_rank):
        local = torch.where((chosen_BLT >= a) & (chosen_BLT < b), chosen_BLT - a + at, local)
        at += b - a
    return local
