"""What softmax attention sends: Ulysses, the ring, both together, and attention to a sharded KV cache.

Tests compare all of it with the running code to the byte, except decoding, which is a formula.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from longspan.core.cache import is_sharded
from longspan.core.heads import split_head_chunks
from longspan.plan.layers.base import Sent

if TYPE_CHECKING:
    from longspan.core.heads import HeadShard
    from longspan.plan.job import CostContext
    from longspan.plan.layers.softmax import Softmax


# ---------------------------------------------------------------------------------------------------------------------
# Heads in chunks.


class ChunkHeads(NamedTuple):
    """A rank's heads that go through all-to-all and attention together."""

    q: int  # query heads
    kv: int  # KV heads that are sent with them
    kv_back: int  # KV heads whose gradients are sent back with theirs


def heads_of_chunks(layer: Softmax, c: CostContext) -> tuple[tuple[ChunkHeads, ...], ...]:
    """Return the chunks of each Ulysses rank, as `longspan.attn.prepare` cuts them."""
    shards, overlapped = layer.head_shards(c.mesh), 1
    if c.mesh.ulysses > 1:
        most = max(shard.kv_heads if c.mesh.ring > 1 else shard.q_heads for shard in shards)
        overlapped = max(1, min(c.job.overlap_chunks, most))
    return _heads_of_chunks(shards, overlapped)


@functools.lru_cache(maxsize=4096)
def _heads_of_chunks(shards: tuple[HeadShard, ...], overlapped: int) -> tuple[tuple[ChunkHeads, ...], ...]:
    cut = split_head_chunks(shards, 1, overlapped)

    def chunk_of(shard: HeadShard, at: int, count: int) -> ChunkHeads:
        # Chunks that share KV heads: these are sent with the first, and their gradients with the last.
        return ChunkHeads(shard.q_heads, shard.kv_heads * (at == 0), shard.kv_heads * (at == count - 1))

    return tuple(
        tuple(chunk_of(piece[rank], at, len(run)) for run in cut for at, piece in enumerate(run))
        for rank in range(len(shards))
    )


# ---------------------------------------------------------------------------------------------------------------------
# A sequence in one forward: Ulysses and the ring.


def sequence(layer: Softmax, c: CostContext) -> list[Sent]:
    """Return what Ulysses and ring send, on the rank that sends most."""
    if c.mesh.sequence_ranks == 1:
        return []
    of_ranks = heads_of_chunks(layer, c)

    def sent_by(mine: tuple[ChunkHeads, ...]) -> list[Sent]:
        sent: list[Sent] = []
        for chunk, of_all in zip(mine, zip(*of_ranks, strict=True), strict=True):
            sent += [*_ulysses(layer, c, of_all, chunk), *_ring(layer, c, chunk.kv)]
        return sent

    # Ranks with equal heads send the same.
    return max(map(sent_by, dict.fromkeys(of_ranks)), key=lambda sent: sum(each.bytes * each.calls for each in sent))


def _ulysses(layer: Softmax, c: CostContext, of_ranks: tuple[ChunkHeads, ...], mine: ChunkHeads) -> list[Sent]:
    """Return two All-to-Alls each way: Q, K and V packed in one, O in one (arXiv:2309.14509, section 3.2).

    A rank sends its tokens' rows to every other rank (the widths of their heads), and its heads' outputs to every
    other rank's tokens. If the backward recomputes the all-to-all, it sends Q, K, V and the output along with the
    output's gradient.
    """
    u = c.mesh.ulysses
    if u == 1:
        return []
    rows = c.tokens
    q_bytes, v_bytes = (d * c.b for d in (layer.head_dim, layer.v_head_dim))
    all_packed, all_out, _ = _row_bytes(of_ranks, q_bytes, v_bytes)
    packed, out, packed_gradient = _row_bytes((mine,), q_bytes, v_bytes)
    forwards, backwards = c.job.attention_passes
    # The backward of a slice repeats both all-to-alls, and a selective checkpoint's recomputation the second one.
    of_q, of_o = forwards, forwards
    if layer.is_slice and backwards:
        of_q, of_o = forwards + 1, forwards + 1 + c.job.memory.recompute_all_to_all
    sent = [
        Sent("all_to_all", "ulysses", "Q, K, V to heads", rows * (all_packed - packed), of_q),
        Sent("all_to_all", "ulysses", "O to tokens", rows * (u - 1) * out, of_o),
    ]
    if backwards:
        what, width = "dO to heads", all_out - out
        if c.job.memory.recompute_all_to_all and not layer.is_slice:
            what, width = "Q, K, V, O, dO to heads", all_packed - packed + 2 * width
        sent += [
            Sent("all_to_all", "ulysses", what, rows * width, backwards),
            Sent("all_to_all", "ulysses", "dQ, dK, dV to tokens", rows * (u - 1) * packed_gradient, backwards),
        ]
    return sent


@functools.lru_cache(maxsize=4096)
def _row_bytes(chunks: tuple[ChunkHeads, ...], d: int, dv: int) -> tuple[int, int, int]:
    """Return the sizes of a token's packed row, its output, and its gradients' row, for heads of `d` and `dv`."""
    return (
        sum(chunk.q * d + chunk.kv * (d + dv) for chunk in chunks),
        sum(chunk.q * dv for chunk in chunks),
        sum(chunk.q * d + chunk.kv_back * (d + dv) for chunk in chunks),
    )


def _ring(layer: Softmax, c: CostContext, kv_heads: int) -> list[Sent]:
    """Return KV blocks, sent on as far as the mask needs them (Liu et al. 2023, arXiv:2310.01889), and gradients.

    In the backward the blocks are sent again, and each rank that receives a block sends its gradient, in fp32.
    """
    r = c.mesh.ring
    if r == 1:
        return []
    elements = c.tokens * c.mesh.ulysses * kv_heads * (layer.head_dim + layer.v_head_dim)  # of a KV block, one message
    block, gradient = elements * c.b, elements * 4
    forwards, backwards = c.job.attention_passes
    routes = layer.ring_schedule(c).routes
    passes = forwards + backwards
    sends, received = max(
        zip(routes.sends, routes.received, strict=True),
        key=lambda n: n[0] * passes * block + n[1] * backwards * gradient,
    )
    return [
        Sent("p2p", "ring", "K, V to the next", block, sends * passes),
        Sent("p2p", "ring", "dK, dV on and back", gradient, received * backwards),
    ]


# ---------------------------------------------------------------------------------------------------------------------
# Attention to a sharded KV cache.


def decode(layer: Softmax, c: CostContext, tokens: int = 1) -> list[Sent]:
    """Return what a few new tokens send over a KV cache sharded by heads (ulysses) and tokens (ring).

    Every rank computes all of these tokens. One all-gather joins the outputs of all heads, or, over a ring, partial
    outputs and log-sum-exps in fp32.
    """
    layer = layer.cache_mixing(c)
    if c.mesh.sequence_ranks == 1:
        return []
    rows = c.sequences * tokens * layer.max_heads(c.mesh).q_heads
    if c.mesh.ring == 1:
        outputs = rows * c.b * layer.v_head_dim
        return [Sent("all_gather", "ulysses", "O of all heads", outputs * (c.mesh.ulysses - 1))]
    partial = rows * (layer.v_head_dim + 1) * 4
    return [Sent("all_gather", "sequence", "O and log-sum-exp of all parts", partial * (c.mesh.sequence_ranks - 1))]


def prompt_chunk(layer: Softmax, c: CostContext, tokens: int, ulysses_rank: int | None = None) -> list[Sent]:
    """Return what one chunk of a prompt sends over a KV cache, whatever this holds.

    Besides the all-to-all, a ring sends queries to the keys, and partial outputs back. The chunk's `tokens` are enough
    to be cut over the ranks (`longspan.core.cache.is_sharded`). `ulysses_rank`: the rank that sends; None: the
    rank that sends most.
    """
    layer = layer.cache_mixing(c)
    shards = layer.head_shards(c.mesh)
    b, d, dv = c.b, layer.head_dim, layer.v_head_dim
    rows = c.layout.local_length(tokens) * c.sequences

    def packed_width(shard: HeadShard) -> int:
        return shard.q_heads * d + shard.kv_heads * layer.kv_width

    all_packed = sum(map(packed_width, shards))
    candidates = []
    for mine in shards if ulysses_rank is None else shards[ulysses_rank : ulysses_rank + 1]:
        block = rows * c.mesh.ulysses * mine.q_heads * (c.mesh.ring - 1)
        sent = [
            Sent("all_to_all", "ulysses", "Q, K, V to heads", rows * b * (all_packed - packed_width(mine))),
            Sent("all_gather", "ring", "Q to all keys", block * d * b),
            Sent("all_to_all", "ring", "O and log-sum-exp back", block * (dv + 1) * 4),
            Sent("all_to_all", "ulysses", "O to tokens", rows * b * (c.mesh.ulysses - 1) * mine.q_heads * dv),
        ]
        candidates.append([each for each in sent if c.groups[each.axis][1] > 1])
    return max(candidates, key=lambda sent: sum(each.bytes for each in sent))


def prompt(layer: Softmax, c: CostContext) -> list[Sent]:
    """Return what a prompt sends in chunks of `Job.prefill_chunk`."""
    sent = []
    for tokens, count in c.job.prompt_chunks:
        one = prompt_chunk if is_sharded(c.layout, tokens) else decode
        sent += [replace(each, calls=each.calls * count) for each in one(layer, c, tokens)]
    return sent
