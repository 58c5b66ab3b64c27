"""Indexed attention: each query attends to its own list of keys (DeepSeek-V3.2's sparse attention).

Queries are on their rank, with the keys of the whole sequence. A block of queries reads its keys by their indices, so
the cost follows the length of the lists, and no tensor is as large as queries x keys, in the backward neither: it
computes the scores of a block again.

Shape suffixes: B batch, L queries, H query heads, N keys, K KV heads, G queries to a KV head, T chosen keys, W elements
that are stored of a key and its value, R rows of a block (queries of all batch rows), D head_dim of q and k, V of v.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from longspan.core.tile_sizes import INDEXED_TILE, rows_of_tile


@dataclass(frozen=True)
class Packing:
    """Which elements of a token are its key and its value; latent vectors are both (`longspan.cache.latent`)."""

    key: slice
    value: slice

    @classmethod
    def of_latents(cls, rank: int, width: int) -> Packing:
        """Return the packing of latent vectors: all `width` elements are the key, the first `rank` the value."""
        return cls(slice(0, width), slice(0, rank))


@dataclass(frozen=True, eq=False)
class Lists:
    """The keys that each query attends to."""

    chosen_BLKT: Tensor  # indices of keys, each once; -1 for none. One KV head stands for all.

    @property
    def width(self) -> int:
        """Keys of the longest list."""
        return self.chosen_BLKT.shape[3]

    def of(self, rows: slice) -> Tensor:
        """Return the lists of some queries of all batch rows, `[R, K, T]`."""
        return self.chosen_BLKT.flatten(0, 1)[rows]


@dataclass(frozen=True, eq=False)
class WindowAndEntries(Lists):
    """A window of tokens, and entries behind all tokens: chosen ones, or all that a query sees (DeepSeek-V4)."""

    chosen_BLKT: Tensor = field(init=False)
    positions_L: Tensor  # of the queries
    batch: int
    window: int
    tokens: int  # of the sequence
    entries: int
    best_BLT: Tensor | None  # chosen entries, -1 for none; None: all
    seen_BL: Tensor  # how many entries each query sees

    @property
    def width(self) -> int:
        return self.window + (self.entries if self.best_BLT is None else self.best_BLT.shape[2])

    def of(self, rows: slice) -> Tensor:
        length, device = len(self.positions_L), self.positions_L.device
        query = torch.arange(rows.start, rows.stop, device=device) % length
        near = self.positions_L[query, None] - torch.arange(self.window, device=device)
        if self.best_BLT is None:
            entries = torch.arange(self.entries, device=device).expand(len(query), -1)
            entries = entries.masked_fill(entries >= self.seen_BL.flatten()[rows, None], -1)
        else:
            entries = self.best_BLT.flatten(0, 1)[rows].long()
        entries = torch.where(entries < 0, -1, entries + self.tokens)
        return torch.cat([near.clamp(min=-1), entries], 1)[:, None]


@dataclass(frozen=True, eq=False)
class BlocksOfKeys(Lists):
    """The tokens of chosen blocks up to the query (MiniMax-M3); `chosen_BLKT` are blocks."""

    size: int  # tokens of a block
    positions_L: Tensor  # of the queries

    @property
    def width(self) -> int:
        return self.chosen_BLKT.shape[3] * self.size

    def of(self, rows: slice) -> Tensor:
        length, device = len(self.positions_L), self.positions_L.device
        i = self.positions_L[torch.arange(rows.start, rows.stop, device=device) % length, None, None]
        blocks_RKT = self.chosen_BLKT.flatten(0, 1)[rows].long()
        tokens = (blocks_RKT[..., None] * self.size + torch.arange(self.size, device=device)).flatten(2)
        return tokens.masked_fill((tokens < 0) | (tokens > i), -1)


def attend_to_chosen(
    q_BLHD: Tensor,
    kv_BNKW: Tensor,
    chosen: Lists,
    packing: Packing,
    scale: float,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return attention of each query to its chosen keys, `[B, L, H, V]`, with gradients of q, kv and sinks.

    Args:
        q_BLHD: queries.
        kv_BNKW: keys and values of all tokens, in the order of the sequence.
        chosen: the keys of each query. A query without keys gets 0.
        packing: of `kv_BNKW`.
        scale: factor of q.k.
        sinks: one learnt logit per query head, `[H]`, which takes weight and adds no value.
    """
    out: Tensor = _AttendToChosen.apply(q_BLHD, kv_BNKW, sinks, chosen, packing, scale)  # type: ignore[no-untyped-call]
    return out


def partial_attention(
    q_BLHD: Tensor, kv_BNKW: Tensor, chosen: Lists, packing: Packing, scale: float
) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp, `[B, L, H, V]` and `[B, L, H]`, over the chosen keys that are here.

    In fp32 at least, and without gradients. A query without keys gets 0 and -inf.
    """
    if not kv_BNKW.shape[1] or not chosen.width:
        lse = q_BLHD.new_full(q_BLHD.shape[:3], -math.inf, dtype=torch.promote_types(q_BLHD.dtype, torch.float32))
        return lse.new_zeros(*lse.shape, packing.value.stop - packing.value.start), lse
    outs, lses = list[Tensor](), list[Tensor]()
    for block in _blocks(q_BLHD, kv_BNKW, None, chosen, packing, scale):
        outs.append(torch.matmul(block.weights, block.values).to(block.lse.dtype).flatten(1, 2))
        lses.append(block.lse.flatten(1))
    rows = q_BLHD.shape[:2]
    return torch.cat(outs).unflatten(0, rows), torch.cat(lses).unflatten(0, rows)


class _AttendToChosen(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, kv: Tensor, sinks: Tensor | None, chosen: Lists, packing: Packing, scale: float
    ) -> Tensor:
        ctx.save_for_backward(q, kv, sinks)
        ctx.chosen, ctx.packing, ctx.scale = chosen, packing, scale
        value = packing.value
        out = q.new_empty(*q.shape[:3], value.stop - value.start)
        out_rows = out.flatten(0, 1).unflatten(1, (kv.shape[2], -1))
        for block in _blocks(q, kv, sinks, chosen, packing, scale):
            out_rows[block.rows] = torch.matmul(block.weights, block.values).to(out.dtype)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, kv, sinks = ctx.saved_tensors
        chosen, packing, scale = ctx.chosen, ctx.packing, ctx.scale
        heads = kv.shape[2]
        grad_rows = grads[0].flatten(0, 1).unflatten(1, (heads, -1))
        dq = torch.empty_like(q, memory_format=torch.contiguous_format)
        dq_rows = dq.flatten(0, 1).unflatten(1, (heads, -1))
        wide = torch.promote_types(kv.dtype, torch.float32)  # a key may be chosen by thousands of queries
        dkv = torch.zeros(kv.shape, dtype=wide, device=kv.device)
        dkv_rows = dkv.view(-1, kv.shape[3])
        dsinks = None if sinks is None else torch.zeros_like(sinks, dtype=wide).view(heads, -1)
        for block in _blocks(q, kv, sinks, chosen, packing, scale):
            grad = grad_rows[block.rows].to(block.weights.dtype)
            dp = torch.matmul(grad, block.values.transpose(2, 3))
            delta = (block.weights * dp).sum(-1, keepdim=True)
            ds = dp.sub_(delta).mul_(block.weights).mul_(scale)
            dq_rows[block.rows] = torch.matmul(ds, block.keys).to(dq.dtype)
            more = torch.zeros(block.read.shape, dtype=wide, device=kv.device)
            more[..., packing.key] += torch.matmul(ds.transpose(2, 3), block.queries)
            more[..., packing.value] += torch.matmul(block.weights.transpose(2, 3), grad)
            dkv_rows.index_add_(0, block.places.flatten(), more.flatten(0, 2))
            if dsinks is not None:
                assert block.of_sinks is not None
                dsinks -= (block.of_sinks * delta).sum((0, 3))
            del block, more  # before the next ones are made
        dsinks = None if dsinks is None else dsinks.flatten().to(sinks.dtype)
        return dq, dkv.to(kv.dtype), dsinks, None, None, None


@dataclass(frozen=True, slots=True)
class _Block:
    rows: slice
    places: Tensor  # of what is read in [B, N, K], int64 [R, K, T]
    read: Tensor  # their elements, [R, K, T, W]
    queries: Tensor  # [R, K, G, D]
    weights: Tensor  # after the softmax, [R, K, G, T]
    lse: Tensor  # log-sum-exp, with the sinks, [R, K, G, 1]
    of_sinks: Tensor | None  # weight of the sinks, [R, K, G, 1]
    packing: Packing

    @property
    def keys(self) -> Tensor:
        return self.read[..., self.packing.key]

    @property
    def values(self) -> Tensor:
        return self.read[..., self.packing.value]


def _blocks(
    q: Tensor, kv: Tensor, sinks: Tensor | None, chosen: Lists, packing: Packing, scale: float
) -> Iterator[_Block]:
    """Yield blocks of queries, with what they read, and the weights of it; keep no reference to one."""
    each = rows_of_tile(
        INDEXED_TILE, chosen.width * (kv.shape[2] * kv.shape[3] + 2 * q.shape[2]), q.device.type == "cpu"
    )
    queries = q.shape[0] * q.shape[1]
    for start in range(0, queries, each):
        yield _block(slice(start, min(queries, start + each)), q, kv, sinks, chosen, packing, scale)


def _block(
    rows: slice, q: Tensor, kv: Tensor, sinks: Tensor | None, chosen: Lists, packing: Packing, scale: float
) -> _Block:
    (L, H), (_, N, K, _), device = q.shape[1:3], kv.shape, q.device
    list_RKT = chosen.of(rows).long()
    batch_row = torch.arange(rows.start, rows.stop, device=device)[:, None, None] // L
    token, head = list_RKT.clamp(min=0), torch.arange(K, device=device)[:, None]
    places = (batch_row * N + token) * K + head
    # As in the kernel "tiled": bf16 products are not faster on a CPU.
    dtype = torch.promote_types(q.dtype, torch.float32) if device.type == "cpu" else q.dtype
    read, queries = kv[batch_row, token, head].to(dtype), q.flatten(0, 1).unflatten(1, (K, H // K))[rows].to(dtype)
    x = torch.matmul(queries, read[..., packing.key].transpose(2, 3))
    x = x.to(torch.promote_types(x.dtype, torch.float32)).mul_(scale)
    x = x.masked_fill_((list_RKT < 0)[:, :, None], -math.inf)
    lse = torch.logsumexp(x, -1, keepdim=True)
    of_sinks = None
    if sinks is not None:
        sink = sinks.to(x.dtype).view(K, H // K, 1)
        lse = torch.logaddexp(lse, sink)
        of_sinks = (sink - lse).exp_()
    weights = x.sub_(lse.masked_fill(lse.isneginf(), 0.0)).exp_().to(dtype)
    return _Block(rows, places, read, queries, weights, lse, of_sinks, packing)
