"""What softmax attention holds besides saved activations, in bytes: buffers of the ring, the kernel, the all-to-all."""

from __future__ import annotations

from typing import TYPE_CHECKING

from longspan.plan.layers import exchange
from longspan.plan.layers.attended_keys import documents_held, documents_in_forward
from longspan.plan.layers.base import Buffers

if TYPE_CHECKING:
    from longspan.plan.job import CostContext
    from longspan.plan.layers.softmax import Softmax

KERNEL_DQ = 4
"""Bytes per element of dQ that a GPU's flash backward accumulates in fp32, besides dQ itself."""

WEIGHTS = 8
"""Tensors of the size of a log-sum-exp that exist while a partial output is merged, besides the sums."""


def holds_checkpoint(c: CostContext) -> bool:
    """Whether a checkpoint holds the attention's saved tensors until the end of its layer's backward."""
    return c.job.memory.checkpointing == "save_attention" and not c.offloads


def _kernel_backward(layer: Softmax, c: CostContext, queries: float = 1, keys: float = 1) -> int:
    """Return the bytes inside the flash backward, for all heads and these fractions of a block's queries and keys."""
    if c.on_cpu:
        return 0
    heads = layer.max_heads(c.mesh)
    # With grouped queries it writes dK and dV for every query head, and sums each group afterwards.
    per_query_head = c.b * (heads.q + heads.out) * keys if heads.q_heads > heads.kv_heads else 0
    return int(c.tokens * c.mesh.ulysses * (KERNEL_DQ * heads.q * queries + per_query_head))


def backward_buffers(layer: Softmax, c: CostContext) -> Buffers:
    """Return the largest of three peaks: sending gradients to heads; the kernel or the ring; sending gradients back.

    With head chunks each peak is one chunk's, and the gradients received so far are added.
    """
    heads, mine = layer.max_heads(c.mesh), layer.local_heads(c.mesh)
    chunks, u = layer.chunks(c), c.mesh.ulysses
    exchanged, recomputed = u > 1, c.job.memory.recompute_all_to_all and u > 1
    in_heads, in_tokens = c.tokens * u * c.b, c.tokens * c.b  # bytes per element in either layout
    gradients = in_heads * (heads.q + heads.kv)
    received = in_heads * (heads.q + heads.kv + heads.out) if recomputed else 0  # by the recomputed all-to-all
    result = in_tokens * (mine.q + mine.kv)
    d_out = in_tokens * mine.out
    stays = d_out + (result if chunks > 1 else 0)
    # The output and its gradient, copied from the received rows, or some of their heads.
    sliced = chunks > 1 and not exchanged
    copied = (recomputed or sliced) and not c.on_cpu
    copies = 2 * in_heads * heads.out if copied or (recomputed and c.mesh.ring > 1) else 0
    if c.mesh.ring > 1:  # its sums include the output's gradient in head layout, or a slice of it
        ring = _ring_backward(layer, c)
        computing = -(-ring.workspace // chunks) + -(-(copies + received) // chunks)
        stays -= d_out // chunks * sliced
        return Buffers(-(-ring.comm // chunks), computing + (stays if recomputed or chunks > 1 else 0))
    kernel = _kernel_backward(layer, c) + copies
    computing = received + gradients + in_heads * heads.out * exchanged + kernel
    sending = received + in_heads * heads.out + d_out + (result + d_out if recomputed else 0)
    # The kernel's saved tensors are freed before gradients are sent back, unless something else holds them.
    freed = 0 if recomputed or holds_checkpoint(c) else in_heads * (heads.q + heads.kv + heads.out)
    returning = 2 * gradients + (result if chunks == 1 else 0) - freed
    if chunks == 1 and not recomputed:  # the incoming gradient is freed when it has been sent
        return Buffers(0, max(computing, d_out + sending, returning) if exchanged else computing + d_out)
    peaks = [computing, *((sending, returning) if exchanged else ())]
    return Buffers(0, stays + -(-max(peaks) // chunks))


# A ring, for the rank whose block is one run of tokens: the tile on its diagonal is the whole block. A CPU computes its
# tiles in fp32.


def ring_buffers(layer: Softmax, c: CostContext) -> Buffers:
    """Return the buffers of a forward over a ring, of all head chunks together, or of a prompt's chunk over a cache."""
    if c.job.mode == "prefill" and c.job.prefill_chunk is not None:
        return _prompt_chunk(layer.cache_mixer(c), c)
    if c.mesh.ring == 1 or c.job.mode == "decode":
        return Buffers()
    heads, tokens = layer.max_heads(c.mesh), c.tokens * c.mesh.ulysses
    tile_bytes = 4 if c.on_cpu else c.b
    block, log_sum_exp = c.b * heads.kv * tokens, 4 * heads.q_heads * tokens
    sums = 4 * heads.out * tokens + log_sum_exp
    casts = tokens * 4 * (heads.q + heads.kv) * (c.b < tile_bytes)
    # A tile's output, on a CPU with its weighted copy.
    tile = tokens * heads.out * (8 if c.on_cpu else c.b)
    schedule = layer.ring_schedule(c)
    # The rank's own block, packed to be sent, and either all blocks, or the current and the next ones.
    gathered = exchange.ring_impl(layer, c, heads.kv_heads) == "allgather"
    peaks = [Buffers(block * (1 + (c.mesh.ring if gathered else schedule.first)), sums + casts + tile)]
    documents = [documents_in_forward(c.layout)] if c.job.documents else []
    for blocks, queries in (*schedule.forward, *documents):
        of_tile = tile if c.on_cpu else int((tile + WEIGHTS * log_sum_exp) * queries)
        peaks.append(Buffers(block * (1 + (c.mesh.ring if gathered else blocks)), sums + casts + of_tile))
    return max(peaks, key=lambda buffers: buffers.total)


def _ring_backward(layer: Softmax, c: CostContext) -> Buffers:
    """Return the buffers of a backward over a ring, of all head chunks together."""
    heads, tokens = layer.max_heads(c.mesh), c.tokens * c.mesh.ulysses
    tile_bytes = 4 if c.on_cpu else c.b
    block, gradient = c.b * heads.kv * tokens, 4 * heads.kv * tokens
    # The output's gradient, and in fp32 dQ, and dK and dV of the rank's own block.
    sums = tokens * (c.b * heads.out + 4 * (heads.q + heads.kv))
    casts = tokens * 4 * (heads.q + heads.kv + 2 * heads.out) * (c.b < tile_bytes)
    packed = block if c.job.memory.recompute_all_to_all else 0  # the rank's own block, which otherwise is saved so
    if exchange.ring_impl(layer, c, heads.kv_heads) == "allgather":
        tile = casts + tokens * tile_bytes * (heads.q + heads.kv) + _kernel_backward(layer, c)
        return Buffers(packed + c.mesh.ring * (block + gradient), sums + tile)
    # Half of the heads of the rank's own block, whose outputs and gradients the kernel copies.
    own = (tokens * c.b * (heads.q + heads.kv + 2 * heads.out) + _kernel_backward(layer, c)) // 2
    schedule, peaks = layer.ring_schedule(c), []
    documents = [documents_held(c.layout)] if c.job.documents else []
    for blocks, gradients, queries, keys in (*schedule.held, *documents):
        if c.on_cpu and queries:  # it computes a block in several tiles, and sums their gradients
            gradients, queries, keys = gradients + 1, 1.0, 1.0
        tile = int(tokens * tile_bytes * (heads.q * queries + heads.kv * keys)) + (casts if queries else 0)
        tile += _kernel_backward(layer, c, queries, keys)
        peaks.append(Buffers(packed + blocks * block + gradients * gradient, sums + tile))
    if c.on_cpu:
        own = casts + tokens * tile_bytes * (heads.q + heads.kv)
    peaks.append(Buffers(packed + schedule.first * block, sums + own))
    peaks.append(Buffers(packed + schedule.last * gradient, sums + (0 if c.on_cpu else own)))
    return max(peaks, key=lambda buffers: buffers.total)


def _prompt_chunk(layer: Softmax, c: CostContext) -> Buffers:
    """Return the buffers of a chunk (the job's context) over a KV cache, besides those of the all-to-all.

    Over a ring the queries of all blocks; and three fp32 outputs with their log-sum-exps: the running sum, the next
    partial output, and their weighted sum (over a ring: computed, sent, received).
    """
    heads, tokens = layer.max_heads(c.mesh), c.tokens * c.mesh.sequence
    queries = tokens * heads.q * c.b if c.mesh.ring > 1 else 0
    return Buffers(comm=queries, workspace=3 * tokens * heads.q_heads * (layer.v_head_dim + 1) * 4)
