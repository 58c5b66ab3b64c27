"""Softmax attention as a mixer: full, windowed or chunked, with grouped, shared or latent keys and values."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from longspan.core.cache_dtype import holds_latent, vector_bytes
from longspan.core.kv_placement import tokens_per_rank
from longspan.plan.job import layout_of, local_batch, local_tokens
from longspan.plan.layers import attention_memory, exchange
from longspan.plan.layers.attention import Attention
from longspan.plan.layers.base import SavedActivations, offloads

if TYPE_CHECKING:
    from longspan.plan.job import Job, Mesh
    from longspan.plan.layers.base import Buffers, CostContext, Sent
    from longspan.plan.layers.ring import RingSchedule


@dataclass(frozen=True)
class Softmax(Attention):
    """Attention over keys and values; `Attention` documents the fields."""

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
        blocks = 1 + max(self.ring_schedule(job, mesh).received)
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

    def cache_bytes(self, job: Job, mesh: Mesh) -> int:
        return max(self.cache_by_rank(job, mesh))

    def cache_by_rank(
        self,
        job: Job,
        mesh: Mesh,
        generated: int = 0,
        chunk: int | None = None,
        dtype: str | None = None,
        step: int = 0,
    ) -> list[int]:
        """Return the bytes of keys and values on each rank of a sequence group: its heads (ulysses), tokens (ring).

        Args:
            job: its context is the prompt.
            mesh: the mesh.
            generated: tokens after the prompt.
            chunk: tokens per chunk of the prompt; None: the job's, or else that of `longspan.core.kv_placement`.
            dtype: of the cache (`longspan.core.cache_dtype.CACHE_DTYPES`); None: the job's.
            step: count the keys that the last `step` tokens attend to, rather than those that later tokens will.
        """
        cached = self.cache_mixer(job, mesh)
        if cached is not self:
            return cached.cache_by_rank(job, mesh, generated, chunk, dtype, step)
        first = self.keys.cached_from(job.context + generated - step)
        tokens = tokens_per_rank(layout_of(job, mesh), job.context, generated, first, chunk or job.prefill_chunk)
        head_bytes = sum(
            vector_bytes(dtype or job.cache, dim, job.bytes_per_element)
            for dim in ((self.head_dim,) if self.shared else (self.head_dim, self.v_head_dim))
        )
        shards = self.head_shards(mesh)
        return [local_batch(job, mesh) * n * shard.kv_heads * head_bytes for n in tokens for shard in shards]

    def staged_by_rank(self, job: Job, mesh: Mesh, generated: int, chunk: int | None, step: int) -> list[int]:
        return self.cache_by_rank(job, mesh, generated, chunk, step=step)

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

    def saved(self, mesh: Mesh, c: CostContext, *, recompute_all_to_all: bool = False) -> int:
        """Return the bytes of Q, K, V, the output before and behind the all-to-all, and a log-sum-exp per head.

        They are in head layout: the heads of the rank with most heads, over the tokens of its Ulysses group. If the
        backward recomputes the all-to-all, Q, K, V and output are in token layout.
        """
        u, heads = mesh.ulysses, self.max_heads(mesh)
        if recompute_all_to_all and u > 1:
            mine = self.local_heads(mesh)
            return c.b * (mine.q + mine.kv + mine.out) + u * 4 * heads.q_heads
        saved = u * (c.b * (heads.q + heads.kv + heads.out) + 4 * heads.q_heads)
        return saved + self._projected(mesh, c)

    def checkpointed(self, job: Job, mesh: Mesh, c: CostContext) -> int:
        """Return, for "save_attention", all of `saved`; for "selective", the local output and the log-sum-exps."""
        if job.memory.checkpointing == "save_attention":
            return self.saved(mesh, c, recompute_all_to_all=job.memory.recompute_all_to_all)
        if job.memory.checkpointing == "selective":
            log_sum_exps = mesh.ulysses * 4 * self.max_heads(mesh).q_heads
            return c.b * self.q_heads * self.v_head_dim // mesh.tensor + log_sum_exps
        return 0

    def freed(self, after_mixer: SavedActivations, job: Job, mesh: Mesh, c: CostContext) -> SavedActivations:
        # A recomputed all-to-all sends the output in token layout; a checkpoint is freed with its layer.
        held = job.memory.recompute_all_to_all or (
            job.memory.checkpointing == "save_attention" and not offloads(job, c)
        )
        return after_mixer + SavedActivations(attention=0 if held else self._projected(mesh, c))

    def _projected(self, mesh: Mesh, c: CostContext) -> int:
        """Return the bytes of the output projection's input, if the all-to-all makes it a tensor of its own."""
        return c.b * self.q_heads * self.v_head_dim // mesh.tensor if mesh.ulysses > 1 else 0

    def ring_buffers(self, job: Job, mesh: Mesh, c: CostContext, *, backward: bool) -> Buffers:
        return attention_memory.ring_buffers(self, job, mesh, c, backward=backward)

    def backward_buffers(self, job: Job, mesh: Mesh, c: CostContext) -> Buffers:
        return attention_memory.backward_buffers(self, job, mesh, c)

    def forward_buffers(self, mesh: Mesh, c: CostContext) -> tuple[int, int, int]:
        width = self.q_heads * self.head_dim + self.kv_heads * self.kv_width
        packed = max(s.q_heads * self.head_dim + s.kv_heads * self.kv_width for s in self.head_shards(mesh))
        return (
            c.tokens * width * c.b // mesh.tensor,
            c.tokens * self.q_heads * self.v_head_dim * c.b // mesh.tensor,
            c.tokens * mesh.ulysses * packed * c.b,
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
