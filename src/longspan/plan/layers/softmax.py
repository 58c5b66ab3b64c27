"""Softmax attention: full, windowed or chunked, with grouped, shared or latent keys and values.

`messages.py` says what it sends.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from typing import ClassVar

from longspan.core.cache import holds_latent, tokens_per_rank, vector_bytes
from longspan.core.heads import HeadShard, slices_of, split_groups
from longspan.core.parallel import ParallelConfig
from longspan.plan.job import CostContext, Job, head_shards
from longspan.plan.layers import messages
from longspan.plan.layers.attended_keys import (
    CAUSAL,
    AttendedKeys,
    RingSchedule,
    from_both_sides,
    ring_schedule,
)
from longspan.plan.layers.base import Buffers, SavedActivations, Sent, TokenMixing
from longspan.plan.layers.linear import Linear

KERNEL_DQ = 4
"""Bytes per element of dQ that a GPU's flash backward accumulates in fp32, besides dQ itself."""

WEIGHTS = 8
"""Tensors of the size of a log-sum-exp that exist while a partial output is merged, besides the sums."""


@dataclass(frozen=True)
class RankHeads:
    """A rank's heads, and the elements per token of their queries, of keys and values, and of the output."""

    q: int
    kv: int
    out: int
    q_heads: int
    kv_heads: int


@dataclass(frozen=True)
class Softmax(TokenMixing):
    """Attention over keys and values."""

    keys: AttendedKeys = CAUSAL  # the keys that a query attends to
    latent_dim: int = 0  # MLA: elements per token of the latent vector of keys and values, rotary part included; else 0
    rope_dim: int = 0  # MLA: the rotary part of it
    sinks: bool = False  # whether each query head has a learnt attention sink
    # whether values are the first elements of the keys, and are not cached a second time (`cache_mixing`)
    shared: bool = False
    sliceable: bool = True  # whether its heads can run in slices
    is_slice: bool = False  # whether it is one of them

    shards_heads: ClassVar[bool] = True

    @property
    def name(self) -> str:
        return self.keys.name

    @property
    def window(self) -> int | None:
        return self.keys.limit

    @property
    def cached_per_token(self) -> int:
        expanded = self.kv_heads * (self.head_dim + self.v_head_dim)
        return self.latent_dim if holds_latent(self.latent_dim, 1, expanded, True) else expanded

    def seen(self, context: int) -> int:
        return self.keys.seen(context)

    # Heads.

    @property
    def kv_width(self) -> int:
        """Elements of a KV head's key and value, as they are sent and cached."""
        return self.head_dim + (0 if self.shared else self.v_head_dim)

    def head_shards(self, mesh: ParallelConfig) -> tuple[HeadShard, ...]:
        return head_shards(self.q_heads, self.kv_heads, mesh.tensor, mesh.ulysses)

    def max_heads(self, mesh: ParallelConfig) -> RankHeads:
        """Return the heads of the rank with most heads, as they are behind the all-to-all."""
        return _max_heads(self, mesh.tensor, mesh.ulysses)

    def local_heads(self, mesh: ParallelConfig) -> RankHeads:
        """Return a rank's heads before the all-to-all: all that tensor parallelism leaves it."""
        return _max_heads(self, mesh.tensor, 1)

    def slices(self, c: CostContext) -> tuple[Softmax, ...]:
        if c.job.mode != "train" or c.mesh.tensor > 1 or self.is_slice or not self.sliceable:
            return (self,)
        return _slices(self, slices_of(c.job.memory.head_slices, self.q_heads, c.mesh.ulysses))

    def _recomputes_all_to_all(self, c: CostContext) -> bool:
        return c.job.memory.recompute_all_to_all and not self.is_slice

    def cache_mixing(self, c: CostContext) -> Softmax:
        """Return the attention to a KV cache.

        If the cache holds latent vectors, all query heads attend to one KV head of them (`longspan.cache.latent`).
        """
        heads = self.max_heads(c.mesh).kv_heads
        shareable = c.job.cache.latent and c.mesh.tensor == 1
        if not holds_latent(self.latent_dim, heads, self.head_dim + self.v_head_dim, shareable):
            return self
        return _over_latent(self)

    # Compute: 2 * (D + Dv) FLOPs per query head and (query, key) pair.

    def flops(self, job: Job, times: float) -> float:
        pairs = float(self.seen(job.context)) if job.mode == "decode" else self.keys.pairs(job.context)
        each = 2.0 * self.q_heads * (self.head_dim + self.v_head_dim)
        return times * job.batch * pairs * each

    def max_flops(self, c: CostContext) -> float:
        cached = self.cache_mixing(c)
        if cached is not self and (c.job.mode == "decode" or c.job.prefill_chunk is not None):
            return cached.max_flops(c)
        if c.job.mode == "decode":
            pairs = float(self.seen(c.job.context)) / c.mesh.ring
        elif c.mesh.ring > 1:  # zigzag shards a causal mask evenly, contiguous blocks do not
            pairs = float(max(self.ring_schedule(c).pairs))
        else:
            pairs = self.keys.pairs(c.job.context)
        return 2.0 * c.sequences * pairs * self.max_heads(c.mesh).q_heads * (self.head_dim + self.v_head_dim)

    def accumulated_bytes(self, c: CostContext) -> tuple[float, float]:
        """Return the traffic over all KV blocks that a rank computes.

        A partial output is read, weighted and added to the fp32 sum: six passes. dQ, dK and dV are read and added in
        fp32: three passes.
        """
        if c.mesh.ring == 1:
            return 0.0, 0.0
        heads = self.max_heads(c.mesh)
        tokens = (1 + max(self.ring_schedule(c).routes.received)) * c.tokens * c.mesh.ulysses
        return 6.0 * 4 * tokens * heads.out, 3.0 * 4 * tokens * (heads.q + heads.kv)

    # Communication.

    def sent(self, c: CostContext) -> list[Sent]:
        if c.job.mode == "decode":
            return messages.decode(self, c)
        if c.job.prompt_chunks:
            return messages.prompt(self, c)
        return [each for part in self.slices(c) for each in messages.sequence(part, c)]

    def ring_schedule(self, c: CostContext) -> RingSchedule:
        return ring_schedule(c.layout, c.job.context, self.keys)

    # Memory.

    def cache_by_rank(self, c: CostContext, generated: int = 0, chunk: int | None = None, step: int = 0) -> list[int]:
        """Return the bytes of keys and values on each rank of a sequence group: its heads (ulysses), tokens (ring)."""
        cached, job = self.cache_mixing(c), c.job
        if cached is not self:
            return cached.cache_by_rank(c, generated, chunk, step)
        first = self.keys.cached_from(job.context + generated - step)
        tokens = tokens_per_rank(c.layout, job.context, generated, first, chunk or job.prefill_chunk)
        dims = (self.head_dim,) if self.shared else (self.head_dim, self.v_head_dim)
        head_bytes = sum(vector_bytes(job.cache.dtype, dim, c.b) for dim in dims)
        shards = self.head_shards(c.mesh)
        return [c.sequences * n * shard.kv_heads * head_bytes for n in tokens for shard in shards]

    def saved(self, c: CostContext) -> int:
        """Return the bytes of Q, K, V, the output before and behind the all-to-all, and a log-sum-exp per head.

        They are in head layout: the heads of the rank with most heads, over the tokens of its Ulysses group. If the
        backward recomputes the all-to-all, Q, K, V and output are in token layout. Slices save the output in head
        layout, and the log-sum-exp.
        """
        u, heads = c.mesh.ulysses, self.max_heads(c.mesh)
        if len(self.slices(c)) > 1:
            return u * (c.b * heads.out + 4 * heads.q_heads)
        if self._recomputes_all_to_all(c) and u > 1:
            mine = self.local_heads(c.mesh)
            return c.b * (mine.q + mine.kv + mine.out) + u * 4 * heads.q_heads
        return u * (c.b * (heads.q + heads.kv + heads.out) + 4 * heads.q_heads) + self._projected(c)

    def checkpointed(self, c: CostContext) -> int:
        """Return, for "selective", the bytes of the local output and the log-sum-exps."""
        if c.job.memory.checkpointing == "selective":
            log_sum_exps = c.mesh.ulysses * 4 * self.max_heads(c.mesh).q_heads
            return c.b * self.q_heads * self.v_head_dim // c.mesh.tensor + log_sum_exps
        return 0

    def freed(self, after_mixing: SavedActivations, c: CostContext) -> SavedActivations:
        # A recomputed all-to-all sends the output in token layout; a checkpoint is freed with its layer.
        keeps = c.job.memory.recompute_all_to_all or len(self.slices(c)) > 1
        return after_mixing + SavedActivations(attention=0 if keeps else self._projected(c))

    def _projected(self, c: CostContext) -> int:
        """Return the bytes of the output projection's input, if the all-to-all makes it a tensor of its own."""
        return c.b * self.q_heads * self.v_head_dim // c.mesh.tensor if c.mesh.ulysses > 1 else 0

    def forward_buffers(self, c: CostContext) -> tuple[int, int, int]:
        width = self.q_heads * self.head_dim + self.kv_heads * self.kv_width
        packed = max(s.q_heads * self.head_dim + s.kv_heads * self.kv_width for s in self.head_shards(c.mesh))
        return (
            c.tokens * width * c.b // c.mesh.tensor,
            c.tokens * self.q_heads * self.v_head_dim * c.b // c.mesh.tensor,
            c.tokens * c.mesh.ulysses * packed * c.b,
        )

    # A ring is costed for the rank whose block is one run of tokens: the tile on its diagonal is the whole block.

    def ring_buffers(self, c: CostContext) -> Buffers:
        """Return the buffers of a forward over a ring, or of a chunk over a cache."""
        if c.job.mode == "prefill" and c.job.prefill_chunk is not None:
            return self.cache_mixing(c)._prompt_chunk(c)
        if c.mesh.ring == 1 or c.job.mode == "decode":
            return Buffers()
        heads, tokens = self.max_heads(c.mesh), c.tokens * c.mesh.ulysses
        block, log_sum_exp = c.b * heads.kv * tokens, 4 * heads.q_heads * tokens
        sums = 4 * heads.out * tokens + log_sum_exp
        tile = tokens * heads.out * c.b  # its output
        # The rank's own block, packed to be sent, and the current and the next ones.
        return Buffers(block * (1 + self._in_flight(c)[0]), sums + tile + WEIGHTS * log_sum_exp)

    def _in_flight(self, c: CostContext) -> tuple[int, int]:
        """Return the most KV blocks and gradients of KV blocks that a rank of a ring holds besides its own."""
        schedule = self.ring_schedule(c)
        documents = from_both_sides(c.layout, c.mesh.ring - 1) if c.job.documents else (0, 0)
        return max(schedule.blocks, documents[0]), max(schedule.gradients, documents[1])

    def _prompt_chunk(self, c: CostContext) -> Buffers:
        """Return the buffers of a chunk (the job's context) over a KV cache, besides those of the all-to-all.

        Over a ring the queries of all blocks; and three fp32 outputs with their log-sum-exps: the running sum, the next
        partial output, and their weighted sum (over a ring: computed, sent, received).
        """
        heads, tokens = self.max_heads(c.mesh), c.tokens * c.mesh.sequence_ranks
        queries = tokens * heads.q * c.b if c.mesh.ring > 1 else 0
        return Buffers(comm=queries, workspace=3 * tokens * heads.q_heads * (self.v_head_dim + 1) * 4)

    def _kernel_backward(self, c: CostContext, keys: float = 1) -> int:
        """Return the bytes inside the flash backward, for this fraction of a block's keys."""
        heads = self.max_heads(c.mesh)
        # With grouped queries it writes dK and dV for every query head, and sums each group afterwards.
        per_query_head = c.b * (heads.q + heads.out) * keys if heads.q_heads > heads.kv_heads else 0
        return int(c.tokens * c.mesh.ulysses * (KERNEL_DQ * heads.q + per_query_head))

    def backward_buffers(self, c: CostContext) -> Buffers:
        """Return the largest of three peaks: sending gradients to heads, the kernel or the ring, sending them back."""
        parts = self.slices(c)
        if len(parts) > 1:
            return self._of_slices(parts, c)
        heads, mine, u = self.max_heads(c.mesh), self.local_heads(c.mesh), c.mesh.ulysses
        all_to_all, recomputed = u > 1, self._recomputes_all_to_all(c) and u > 1
        in_heads, in_tokens = c.tokens * u * c.b, c.tokens * c.b  # bytes per element in either layout
        gradients = in_heads * (heads.q + heads.kv)
        received = in_heads * (heads.q + heads.kv + heads.out) if recomputed else 0  # by the recomputed all-to-all
        result = in_tokens * (mine.q + mine.kv)
        d_out = in_tokens * mine.out
        # The output and its gradient, copied from the received rows.
        copies = 2 * in_heads * heads.out if recomputed else 0
        if c.mesh.ring > 1:  # its sums include the output's gradient in head layout
            ring = self._ring_backward(c)
            return Buffers(ring.comm, ring.workspace + copies + received + d_out * recomputed)
        kernel = self._kernel_backward(c) + copies
        computing = received + gradients + in_heads * heads.out * all_to_all + kernel
        sending = received + in_heads * heads.out + d_out + (result + d_out if recomputed else 0)
        # The kernel's saved tensors are freed before gradients are sent back.
        freed = 0 if recomputed else in_heads * (heads.q + heads.kv + heads.out)
        returning = 2 * gradients + result - freed
        if not recomputed:  # the incoming gradient is freed when it has been sent
            return Buffers(0, max(computing, d_out + sending, returning) if all_to_all else computing + d_out)
        return Buffers(0, d_out + max(computing, *((sending, returning) if all_to_all else ())))

    def _of_slices(self, parts: tuple[Softmax, ...], c: CostContext) -> Buffers:
        """Return the peak buffers of the widest slice, as if it ran second or later.

        A slice holds its output's gradient, and what its all-to-all received until its own gradients are packed (on a
        ring only q: the rank's block of K and V is packed first). The saved outputs of slices before it are freed, but
        their gradients of q, K and V exist, or that of the layer's normed input.
        """
        part = max(parts, key=lambda each: each.max_heads(c.mesh).q)
        heads, mine, u = part.max_heads(c.mesh), part.local_heads(c.mesh), c.mesh.ulysses
        in_heads, in_tokens = c.tokens * u * c.b, c.tokens * c.b
        held = in_heads * heads.q + in_tokens * mine.out
        before = []
        kv_width = (self.head_dim + self.v_head_dim) * (1 if len(parts) <= self.kv_heads else 4 // c.b)
        for done in range(1, len(parts)):
            # Slices that share KV heads sum their gradients, in fp32.
            waiting = done * mine.q + -(-done * self.kv_heads // len(parts)) * kv_width
            before.append(in_tokens * (waiting if waiting <= c.d else c.d) - in_heads * heads.out * done)
        held += max(before)
        if c.mesh.ring > 1:
            ring = part._ring_backward(c)
            return Buffers(ring.comm, ring.workspace + held)
        held += in_heads * heads.kv
        gradients = in_heads * (heads.q + heads.kv)
        computing = gradients + in_heads * heads.out * (u > 1) + part._kernel_backward(c)
        return Buffers(0, held + computing)

    def _ring_backward(self, c: CostContext) -> Buffers:
        """Return the buffers of a backward over a ring."""
        heads, tokens = self.max_heads(c.mesh), c.tokens * c.mesh.ulysses
        block, gradient = c.b * heads.kv * tokens, 4 * heads.kv * tokens
        # The output's gradient, and in fp32 dQ, and dK and dV of the rank's own block.
        sums = tokens * (c.b * heads.out + 4 * (heads.q + heads.kv))
        # The rank's own block; without a recomputation it is saved in packed form.
        packed = block if self._recomputes_all_to_all(c) or self.is_slice else 0
        blocks, gradients = self._in_flight(c)
        # First and last half of the heads of the rank's own block, whose outputs and gradients the kernel copies.
        own = (tokens * c.b * (heads.q + heads.kv + 2 * heads.out) + self._kernel_backward(c)) // 2
        if heads.q_heads == 1:  # the kernel computes it in one call, without copies
            own = tokens * c.b * (heads.q + heads.kv) + self._kernel_backward(c)
        keys = 1.0 if c.job.documents else self.ring_schedule(c).keys
        arriving, leaving = max(1, blocks // 2) * block, max(2, gradients) * gradient
        tile = int(tokens * c.b * (heads.q + heads.kv * keys)) + self._kernel_backward(c, keys)
        peaks = [
            Buffers(packed + blocks * block + gradients * gradient, sums + tile),
            Buffers(packed + arriving, sums + own),
            Buffers(packed + leaving, sums + own),
        ]
        return max(peaks, key=lambda buffers: buffers.total)

    # Limits.

    def ulysses_refusal(self, job: Job) -> str | None:
        mesh = job.parallel
        q, t, u = self.q_heads, mesh.tensor, mesh.ulysses
        if u > q // t:
            held = f"tensor={t} leaves {q // t}" if t > 1 else f"the model has {q}"
            ring = -(-u * mesh.ring * t // q)
            return f"ulysses={u} needs at least {u} query heads, {held}; try ulysses={q // t}, ring={ring}"
        return None


@dataclass(frozen=True)
class Parallel(Softmax):
    """Attention and a recurrence beside each other in one layer (Falcon-H1)."""

    beside: Linear = field(default_factory=Linear)  # the recurrence

    def flops(self, job: Job, times: float) -> float:
        return super().flops(job, times) + self.beside.flops(job, times)

    def max_flops(self, c: CostContext) -> float:
        return super().max_flops(c) + self.beside.max_flops(c)

    def sent(self, c: CostContext) -> list[Sent]:
        return [*super().sent(c), *self.beside.sent(c)]

    def cache_by_rank(self, c: CostContext, generated: int = 0, chunk: int | None = None, step: int = 0) -> list[int]:
        pairs = super().cache_by_rank(c, generated, chunk, step)
        return [one + other for one, other in zip(pairs, self.beside.cache_by_rank(c), strict=True)]

    def saved(self, c: CostContext) -> int:
        return super().saved(c) + self.beside.saved(c)


@functools.lru_cache(maxsize=1024)
def _max_heads(layer: Softmax, tensor: int, ulysses: int) -> RankHeads:
    shards = head_shards(layer.q_heads, layer.kv_heads, tensor, ulysses)
    q, kv = max((shard.q_heads, shard.kv_heads) for shard in shards)
    return RankHeads(
        q * layer.head_dim, kv * (layer.head_dim + layer.v_head_dim), q * layer.v_head_dim, q_heads=q, kv_heads=kv
    )


@functools.lru_cache(maxsize=256)
def _slices(layer: Softmax, count: int) -> tuple[Softmax, ...]:
    if count == 1:
        return (layer,)
    shards = split_groups(layer.q_heads, layer.kv_heads, count)
    return tuple(replace(layer, q_heads=s.q_heads, kv_heads=s.kv_heads, is_slice=True) for s in shards)


@functools.lru_cache(maxsize=64)
def _over_latent(layer: Softmax) -> Softmax:
    width = layer.latent_dim
    return replace(
        layer, kv_heads=1, head_dim=width, v_head_dim=width - layer.rope_dim, latent_dim=0, rope_dim=0, shared=True
    )
