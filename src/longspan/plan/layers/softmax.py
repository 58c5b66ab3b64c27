"""Softmax attention as a mixer: full, windowed or chunked, with grouped, shared or latent keys and values.

`exchange.py` says what it sends, and `attention_memory.py` what it holds besides saved activations.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import ClassVar

from longspan.core.cache import holds_latent, tokens_per_rank, vector_bytes
from longspan.core.heads import HeadShard
from longspan.plan.job import Job, Mesh, head_shards, layout_of, local_batch, local_tokens
from longspan.plan.layers import attention_memory, exchange
from longspan.plan.layers.attended_keys import CAUSAL, AttendedKeys
from longspan.plan.layers.base import Buffers, CostContext, Mixer, SavedActivations, Sent, offloads
from longspan.plan.layers.ring import RingSchedule


@dataclass(frozen=True)
class RankHeads:
    """A rank's heads, and the elements per token of their queries, of keys and values, and of the output."""

    q: int
    kv: int
    out: int
    q_heads: int
    kv_heads: int


@dataclass(frozen=True)
class Softmax(Mixer):
    """Attention over keys and values.

    Attributes:
        keys: the keys that a query attends to.
        latent_dim: MLA: elements per token of the latent vector of keys and values, rotary part included; else 0.
        rope_dim: MLA: the rotary part of it.
        sinks: whether each query head has a learnt attention sink.
        shared: whether values are the first elements of the keys, and are not cached a second time (`cache_mixer`).
    """

    keys: AttendedKeys = CAUSAL
    latent_dim: int = 0
    rope_dim: int = 0
    sinks: bool = False
    shared: bool = False

    runs: ClassVar[bool] = True
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

    def head_shards(self, mesh: Mesh) -> tuple[HeadShard, ...]:
        """Return the heads of each Ulysses rank."""
        return head_shards(self.q_heads, self.kv_heads, mesh.tensor, mesh.ulysses)

    def max_heads(self, mesh: Mesh) -> RankHeads:
        """Return the heads of the rank with most heads, as they are behind the all-to-all."""
        return _max_heads(self, mesh.tensor, mesh.ulysses)

    def local_heads(self, mesh: Mesh) -> RankHeads:
        """Return a rank's heads before the all-to-all: all that tensor parallelism leaves it."""
        return _max_heads(self, mesh.tensor, 1)

    def cache_mixer(self, job: Job, mesh: Mesh) -> Softmax:
        """Return the attention to a KV cache.

        If the cache holds latent vectors, all query heads attend to one KV head of them (`longspan.cache.latent`).
        """
        latent = _latent_mixer(self, job.cache_latent, job.kv_replication, mesh.tensor, mesh.ulysses)
        return self if latent is None else latent

    # Compute: 2 * (D + Dv) FLOPs per query head and (query, key) pair.

    def flops(self, job: Job, times: float) -> float:
        pairs = float(self.seen(job.context)) if job.mode == "decode" else self.keys.pairs(job.context)
        each = 2.0 * self.q_heads * (self.head_dim + self.v_head_dim)
        return times * job.batch * pairs * each

    def max_flops(self, job: Job, mesh: Mesh) -> float:
        cached = self.cache_mixer(job, mesh)
        if cached is not self and (job.mode == "decode" or job.prefill_chunk is not None):
            return cached.max_flops(job, mesh)
        heads = self.max_heads(mesh).q_heads
        if job.mode == "decode":
            pairs = float(self.seen(job.context)) / mesh.ring
        elif mesh.ring > 1:  # zigzag shards a causal mask evenly, contiguous blocks do not
            pairs = float(max(self.ring_schedule(job, mesh).pairs))
        else:
            pairs = self.keys.pairs(job.context)
        return 2.0 * local_batch(job, mesh) * pairs * heads * (self.head_dim + self.v_head_dim)

    def accumulated_bytes(self, job: Job, mesh: Mesh) -> tuple[float, float]:
        """Return the traffic over all KV blocks that a rank computes.

        A partial output is read, weighted and added to the fp32 sum: six passes. dQ, dK and dV are read and added in
        fp32: three passes.
        """
        if mesh.ring == 1:
            return 0.0, 0.0
        heads = self.max_heads(mesh)
        blocks = 1 + max(self.ring_schedule(job, mesh).routes.received)
        tokens = blocks * local_batch(job, mesh) * local_tokens(job, mesh) * mesh.ulysses
        return 6.0 * 4 * tokens * heads.out, 3.0 * 4 * tokens * (heads.q + heads.kv)

    # Communication.

    def sent(self, job: Job, mesh: Mesh) -> list[Sent]:
        if job.mode == "decode":
            return exchange.decode(self, job, mesh)
        in_chunks = job.mode == "prefill" and job.prefill_chunk is not None
        return (exchange.prompt if in_chunks else exchange.sequence)(self, job, mesh)

    def ring_schedule(self, job: Job, mesh: Mesh) -> RingSchedule:
        return exchange.schedule(self, job, mesh)

    def ring_impls(self, job: Job, mesh: Mesh) -> set[str]:
        kv_heads = {chunk.kv for rank in exchange.head_chunks(self, job, mesh) for chunk in rank}
        return {exchange.ring_impl(self, job, mesh, heads) for heads in kv_heads}

    # Memory.

    def cache_by_rank(
        self, job: Job, mesh: Mesh, generated: int = 0, chunk: int | None = None, step: int = 0
    ) -> list[int]:
        """Return the bytes of keys and values on each rank of a sequence group: its heads (ulysses), tokens (ring)."""
        cached = self.cache_mixer(job, mesh)
        if cached is not self:
            return cached.cache_by_rank(job, mesh, generated, chunk, step)
        first = self.keys.cached_from(job.context + generated - step)
        tokens = tokens_per_rank(layout_of(job, mesh), job.context, generated, first, chunk or job.prefill_chunk)
        head_bytes = sum(
            vector_bytes(job.cache, dim, job.bytes_per_element)
            for dim in ((self.head_dim,) if self.shared else (self.head_dim, self.v_head_dim))
        )
        shards = self.head_shards(mesh)
        return [local_batch(job, mesh) * n * shard.kv_heads * head_bytes for n in tokens for shard in shards]

    def replicated_bytes(self, job: Job, mesh: Mesh) -> float:
        cached = self.cache_mixer(job, mesh)
        if cached is not self:
            return cached.replicated_bytes(job, mesh)
        kv, u = max(1, self.kv_heads // mesh.tensor), mesh.ulysses
        if u <= kv:
            return 0.0
        most = max(shard.kv_heads for shard in self.head_shards(mesh))
        held = self.cache_bytes(replace(job, mode="prefill", batch=mesh.data), mesh)
        return held * (1 - kv / u / most)

    def chunks(self, job: Job, mesh: Mesh) -> int:
        return exchange.chunk_count(self, job, mesh)

    def saved(self, c: CostContext, *, recompute_all_to_all: bool = False) -> int:
        """Return the bytes of Q, K, V, the output before and behind the all-to-all, and a log-sum-exp per head.

        They are in head layout: the heads of the rank with most heads, over the tokens of its Ulysses group. If the
        backward recomputes the all-to-all, Q, K, V and output are in token layout.
        """
        u, heads = c.mesh.ulysses, self.max_heads(c.mesh)
        if recompute_all_to_all and u > 1:
            mine = self.local_heads(c.mesh)
            return c.b * (mine.q + mine.kv + mine.out) + u * 4 * heads.q_heads
        saved = u * (c.b * (heads.q + heads.kv + heads.out) + 4 * heads.q_heads)
        return saved + self._projected(c)

    def checkpointed(self, c: CostContext) -> int:
        """Return, for "save_attention", all of `saved`; for "selective", the local output and the log-sum-exps."""
        if c.job.memory.checkpointing == "save_attention":
            return self.saved(c, recompute_all_to_all=c.job.memory.recompute_all_to_all)
        if c.job.memory.checkpointing == "selective":
            log_sum_exps = c.mesh.ulysses * 4 * self.max_heads(c.mesh).q_heads
            return c.b * self.q_heads * self.v_head_dim // c.mesh.tensor + log_sum_exps
        return 0

    def freed(self, after_mixer: SavedActivations, c: CostContext) -> SavedActivations:
        # A recomputed all-to-all sends the output in token layout; a checkpoint is freed with its layer.
        held = c.job.memory.recompute_all_to_all or (c.job.memory.checkpointing == "save_attention" and not offloads(c))
        return after_mixer + SavedActivations(attention=0 if held else self._projected(c))

    def _projected(self, c: CostContext) -> int:
        """Return the bytes of the output projection's input, if the all-to-all makes it a tensor of its own."""
        return c.b * self.q_heads * self.v_head_dim // c.mesh.tensor if c.mesh.ulysses > 1 else 0

    def ring_buffers(self, c: CostContext, *, backward: bool) -> Buffers:
        return attention_memory.ring_buffers(self, c, backward=backward)

    def backward_buffers(self, c: CostContext) -> Buffers:
        return attention_memory.backward_buffers(self, c)

    def forward_buffers(self, c: CostContext) -> tuple[int, int, int]:
        width = self.q_heads * self.head_dim + self.kv_heads * self.kv_width
        packed = max(s.q_heads * self.head_dim + s.kv_heads * self.kv_width for s in self.head_shards(c.mesh))
        return (
            c.tokens * width * c.b // c.mesh.tensor,
            c.tokens * self.q_heads * self.v_head_dim * c.b // c.mesh.tensor,
            c.tokens * c.mesh.ulysses * packed * c.b,
        )

    # Limits.

    def length_refusal(self, context: int) -> str | None:
        return self.keys.refusal(context)

    def ulysses_refusal(self, job: Job, mesh: Mesh) -> str | None:
        q, kv, t, u = self.q_heads, self.kv_heads, mesh.tensor, mesh.ulysses
        if u > q // t:
            held = f"tensor={t} leaves {q // t}" if t > 1 else f"the model has {q}"
            ring = -(-u * mesh.ring * t // q)
            return f"ulysses={u} needs at least {u} query heads, {held}; try ulysses={q // t}, ring={ring}"
        if u > max(1, kv // t) and not job.kv_replication:
            return (
                f"ulysses={u} needs {u} KV heads or replication, the model has {max(1, kv // t)}; try "
                f"ulysses={max(1, kv // t)}, ring={u * mesh.ring // max(1, kv // t)}, or allow KV replication"
            )
        return None


@functools.lru_cache(maxsize=1024)
def _max_heads(layer: Softmax, tensor: int, ulysses: int) -> RankHeads:
    shards = head_shards(layer.q_heads, layer.kv_heads, tensor, ulysses)
    q, kv = max((shard.q_heads, shard.kv_heads) for shard in shards)
    return RankHeads(
        q * layer.head_dim, kv * (layer.head_dim + layer.v_head_dim), q * layer.v_head_dim, q_heads=q, kv_heads=kv
    )


@functools.lru_cache(maxsize=1024)
def _latent_mixer(layer: Softmax, latent: bool, kv_replication: bool, tensor: int, ulysses: int) -> Softmax | None:
    """Return the attention to a cache of latent vectors, or None if the cache holds keys and values."""
    heads = max(shard.kv_heads for shard in head_shards(layer.q_heads, layer.kv_heads, tensor, ulysses))
    shareable = latent and tensor == 1 and (ulysses == 1 or kv_replication)
    if not holds_latent(layer.latent_dim, heads, layer.head_dim + layer.v_head_dim, shareable):
        return None
    width = layer.latent_dim
    return replace(
        layer, kv_heads=1, head_dim=width, v_head_dim=width - layer.rope_dim, latent_dim=0, rope_dim=0, shared=True
    )
