"""What softmax attention sends: Ulysses, the ring, both together, and attention to a sharded KV cache.

Tests compare all of it with the running code to the byte, except decoding, which is a formula.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from longspan.core.cache import is_sharded, vector_bytes
from longspan.core.heads import split_head_chunks
from longspan.core.routes import choose_ring_impl
from longspan.plan.job import attention_passes, layout_of, local_batch, local_tokens, prompt_chunks
from longspan.plan.layers.base import Sent
from longspan.plan.layers.ring import RingSchedule, ring_schedule

if TYPE_CHECKING:
    from longspan.core.heads import HeadShard
    from longspan.plan.job import Job, Mesh
    from longspan.plan.layers.softmax import Softmax


# ---------------------------------------------------------------------------------------------------------------------
# Heads in chunks.


@dataclass(frozen=True)
class HeadChunk:
    """A rank's heads that go through all-to-all and attention together.

    Attributes:
        q: query heads.
        kv: KV heads that are sent with them.
        kv_back: KV heads whose gradients are sent back with theirs.
    """

    q: int
    kv: int
    kv_back: int


def chunk_count(layer: Softmax, job: Job, mesh: Mesh) -> int:
    """Return the chunks that `Memory.head_chunks` gives: at most a rank's KV heads, which 0 stands for."""
    most = max(1, layer.max_heads(mesh).kv_heads)
    return min(job.memory.head_chunks or most, most)


def head_chunks(layer: Softmax, job: Job, mesh: Mesh) -> tuple[tuple[HeadChunk, ...], ...]:
    """Return the chunks of each Ulysses rank, as `longspan.attn.prepare` cuts them."""
    shards, overlapped = layer.head_shards(mesh), 1
    if mesh.ulysses > 1:
        most = max(shard.kv_heads if mesh.ring > 1 else shard.q_heads for shard in shards)
        overlapped = max(1, min(job.overlap_chunks, most))
    return _head_chunks(shards, job.memory.head_chunks, overlapped)


@functools.lru_cache(maxsize=4096)
def _head_chunks(shards: tuple[HeadShard, ...], chunks: int, overlapped: int) -> tuple[tuple[HeadChunk, ...], ...]:
    cut = split_head_chunks(shards, chunks, overlapped)

    def chunk_of(shard: HeadShard, at: int, count: int) -> HeadChunk:
        # Chunks that share KV heads: these are sent with the first, and their gradients with the last.
        kv = shard.kv_heads
        return HeadChunk(shard.q_heads, kv if at == 0 else 0, kv if at == count - 1 else 0)

    return tuple(
        tuple(chunk_of(piece[rank], at, len(run)) for run in cut for at, piece in enumerate(run))
        for rank in range(len(shards))
    )


# ---------------------------------------------------------------------------------------------------------------------
# A sequence in one forward: Ulysses and the ring.


def sequence(layer: Softmax, job: Job, mesh: Mesh) -> list[Sent]:
    """Return what Ulysses and ring send, on the rank that sends most."""
    if mesh.sequence == 1:
        return []
    of_ranks = head_chunks(layer, job, mesh)

    def sent_by(mine: tuple[HeadChunk, ...]) -> list[Sent]:
        sent: list[Sent] = []
        for chunk, of_all in zip(mine, zip(*of_ranks, strict=True), strict=True):
            sent += [*_ulysses(layer, job, mesh, of_all, chunk), *_ring(layer, job, mesh, chunk.kv)]
        return sent

    # Ranks with equal heads send the same.
    return max(map(sent_by, dict.fromkeys(of_ranks)), key=lambda sent: sum(each.bytes * each.calls for each in sent))


def _ulysses(layer: Softmax, job: Job, mesh: Mesh, of_ranks: tuple[HeadChunk, ...], mine: HeadChunk) -> list[Sent]:
    """Return two All-to-Alls each way: Q, K and V packed in one, O in one (arXiv:2309.14509, section 3.2).

    A rank sends its tokens' rows to every other rank (the widths of their heads), and its heads' outputs to every
    other rank's tokens. If the backward recomputes the all-to-all, it sends Q, K, V and the output along with the
    output's gradient.
    """
    u = mesh.ulysses
    if u == 1:
        return []
    rows = local_tokens(job, mesh) * local_batch(job, mesh)
    q_bytes, v_bytes = (
        vector_bytes(job.wire_dtype, d, job.bytes_per_element) for d in (layer.head_dim, layer.v_head_dim)
    )
    all_packed, all_out, _ = _row_bytes(of_ranks, q_bytes, v_bytes)
    packed, out, packed_gradient = _row_bytes((mine,), q_bytes, v_bytes)
    forwards, backwards = attention_passes(job)
    sent = [
        Sent("all_to_all", "ulysses", "Q, K, V to heads", rows * (all_packed - packed), forwards),
        Sent("all_to_all", "ulysses", "O to tokens", rows * (u - 1) * out, forwards),
    ]
    if backwards:
        what, width = "dO to heads", all_out - out
        if job.memory.recompute_all_to_all:
            what, width = "Q, K, V, O, dO to heads", all_packed - packed + 2 * width
        sent += [
            Sent("all_to_all", "ulysses", what, rows * width, backwards),
            Sent("all_to_all", "ulysses", "dQ, dK, dV to tokens", rows * (u - 1) * packed_gradient, backwards),
        ]
    return sent


@functools.lru_cache(maxsize=4096)
def _row_bytes(chunks: tuple[HeadChunk, ...], d: int, dv: int) -> tuple[int, int, int]:
    """Return the sizes of a token's packed row, its output, and its gradients' row, for heads of `d` and `dv`."""
    return (
        sum(chunk.q * d + chunk.kv * (d + dv) for chunk in chunks),
        sum(chunk.q * dv for chunk in chunks),
        sum(chunk.q * d + chunk.kv_back * (d + dv) for chunk in chunks),
    )


def schedule(layer: Softmax, job: Job, mesh: Mesh) -> RingSchedule:
    """Return how the layer's KV blocks go round the ring."""
    return ring_schedule(layout_of(job, mesh), job.context, layer.keys)


def block_elements(layer: Softmax, job: Job, mesh: Mesh, kv_heads: int) -> int:
    """Return the elements of a KV block, which is one P2P message of a ring."""
    tokens = local_tokens(job, mesh) * mesh.ulysses * local_batch(job, mesh)
    return tokens * kv_heads * (layer.head_dim + layer.v_head_dim)


def ring_impl(layer: Softmax, job: Job, mesh: Mesh, kv_heads: int) -> str:
    """Return the ring implementation that the code chooses for so many KV heads, "p2p" or "allgather"."""
    all_blocks = mesh.ring * block_elements(layer, job, mesh, kv_heads) * job.bytes_per_element
    return choose_ring_impl(job.ring_impl, all_blocks, schedule(layer, job, mesh).routes)


def _ring(layer: Softmax, job: Job, mesh: Mesh, kv_heads: int) -> list[Sent]:
    """Return KV blocks, sent on as far as the mask needs them (Liu et al. 2023, arXiv:2310.01889), and gradients.

    In the backward the blocks are sent again, and each rank that receives a block sends its gradient, in fp32. With
    "allgather" every block goes everywhere in one collective, and gradients are reduce-scattered.
    """
    r = mesh.ring
    if r == 1:
        return []
    elements = block_elements(layer, job, mesh, kv_heads)
    block, gradient = elements * job.bytes_per_element, elements * 4
    forwards, backwards = attention_passes(job)
    if ring_impl(layer, job, mesh, kv_heads) == "allgather":
        return [
            Sent("all_gather", "ring", "K, V of all blocks", block * (r - 1), forwards + backwards),
            Sent("reduce_scatter", "ring", "dK, dV of all blocks", gradient * (r - 1), backwards),
        ]
    routes = schedule(layer, job, mesh).routes
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


def decode(layer: Softmax, job: Job, mesh: Mesh, tokens: int = 1) -> list[Sent]:
    """Return what a few new tokens send over a KV cache sharded by heads (ulysses) and tokens (ring).

    Every rank computes all of these tokens. One all-gather joins the outputs of all heads, or, over a ring, partial
    outputs and log-sum-exps in fp32.
    """
    layer = layer.cache_mixer(job, mesh)
    if mesh.sequence == 1:
        return []
    rows = local_batch(job, mesh) * tokens * layer.max_heads(mesh).q_heads
    if mesh.ring == 1:
        outputs = rows * job.bytes_per_element * layer.v_head_dim
        return [Sent("all_gather", "ulysses", "O of all heads", outputs * (mesh.ulysses - 1))]
    partial = rows * (layer.v_head_dim + 1) * 4
    return [Sent("all_gather", "sequence", "O and log-sum-exp of all parts", partial * (mesh.sequence - 1))]


def chunk(layer: Softmax, job: Job, mesh: Mesh, tokens: int, ulysses_rank: int | None = None) -> list[Sent]:
    """Return what one chunk of a prompt sends over a KV cache, whatever this holds.

    Besides the all-to-all, a ring sends queries to the keys, and partial outputs back. The chunk's `tokens` are enough
    to be cut over the ranks (`longspan.core.cache.is_sharded`). `ulysses_rank`: the rank that sends; None: the
    rank that sends most.
    """
    layer = layer.cache_mixer(job, mesh)
    shards = layer.head_shards(mesh)
    b, d, dv = job.bytes_per_element, layer.head_dim, layer.v_head_dim
    rows = layout_of(job, mesh).local_length(tokens) * local_batch(job, mesh)

    def packed_width(shard: HeadShard) -> int:
        return shard.q_heads * d + shard.kv_heads * layer.kv_width

    all_packed = sum(map(packed_width, shards))
    candidates = []
    for mine in shards if ulysses_rank is None else shards[ulysses_rank : ulysses_rank + 1]:
        block = rows * mesh.ulysses * mine.q_heads * (mesh.ring - 1)
        sent = [
            Sent("all_to_all", "ulysses", "Q, K, V to heads", rows * b * (all_packed - packed_width(mine))),
            Sent("all_gather", "ring", "Q to all keys", block * d * b),
            Sent("all_to_all", "ring", "O and log-sum-exp back", block * (dv + 1) * 4),
            Sent("all_to_all", "ulysses", "O to tokens", rows * b * (mesh.ulysses - 1) * mine.q_heads * dv),
        ]
        candidates.append([each for each in sent if mesh.size(each.axis) > 1])
    return max(candidates, key=lambda sent: sum(each.bytes for each in sent))


def prompt(layer: Softmax, job: Job, mesh: Mesh) -> list[Sent]:
    """Return what a prompt sends in chunks of `job.prefill_chunk`."""
    sent = []
    for tokens, count in prompt_chunks(job):
        one = chunk if is_sharded(layout_of(job, mesh), tokens) else decode
        sent += [replace(each, calls=each.calls * count) for each in one(layer, job, mesh, tokens)]
    return sent
