"""Softmax attention: full, windowed or chunked, with grouped, shared or latent keys and values."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from longspan.core.cache_dtype import holds_latent, vector_bytes
from longspan.core.kv_placement import tokens_per_rank
from longspan.plan.cost.per_rank import heads_of, local_batch, local_tokens
from longspan.plan.cost.saved import Buffers, SavedActivations, offloads
from longspan.plan.job import layout_of
from longspan.plan.layers import exchange, exchange_memory, ring_memory
from longspan.plan.layers.attended_keys import CAUSAL, Reach
from longspan.plan.layers.base import Mixer

if TYPE_CHECKING:
    from longspan.plan.cost.collective import Sent
    from longspan.plan.cost.ring import RingSchedule
    from longspan.plan.cost.saved import Scale
    from longspan.plan.job import Job, Mesh


@dataclass(frozen=True)
class Softmax(Mixer):
    """Attention over keys and values.

    Attributes:
        reach: what its queries see.
        latent_dim: elements per token of what MLA compresses keys and values to, rotary part included; 0 otherwise.
        rope_dim: of these, the rotary part.
        shared: whether values are the first elements of keys, and not cached beside them (`in_cache`).
        sinks: whether each query head has a learnt attention sink.
    """

    reach: Reach = CAUSAL
    latent_dim: int = 0
    rope_dim: int = 0
    sinks: bool = False
    shared: bool = False

    runs: ClassVar[bool] = True
    deals_heads: ClassVar[bool] = True

    @property
    def name(self) -> str:
        return self.reach.name

    @property
    def window(self) -> int | None:
        return self.reach.limit

    @property
    def cached_per_token(self) -> int:
        expanded = self.kv_heads * (self.head_dim + self.v_head_dim)
        return self.latent_dim if holds_latent(self.latent_dim, 1, expanded, True) else expanded

    @property
    def kv_width(self) -> int:
        """Elements of a KV head's key and value, as they are sent and cached."""
        return self.head_dim + (0 if self.shared else self.v_head_dim)

    def in_cache(self, job: Job, mesh: Mesh) -> Softmax:
        """What attends to a cache: where that holds latent vectors, all query heads over one KV head of them
        (`longspan.cache.latent`).
        """
        return _in_cache(self, job.cache_latent, job.kv_replication, mesh.tensor, mesh.ulysses)

    def seen(self, context: int) -> int:
        return self.reach.seen(context)

    # What it computes: 2 * (D + Dv) FLOPs per query head and pair (query, key) that the mask allows.

    def flops(self, job: Job, scale: float) -> float:
        pairs = float(self.seen(job.context)) if job.mode == "decode" else self.reach.pairs(job.context)
        each = 2.0 * self.q_heads * (self.head_dim + self.v_head_dim)
        return scale * job.batch * pairs * each

    def busiest_flops(self, job: Job, mesh: Mesh) -> float:
        held = self.in_cache(job, mesh)
        if held is not self and (job.mode == "decode" or job.prefill_chunk is not None):
            return held.busiest_flops(job, mesh)
        heads = max(share.q_heads for share in heads_of(self.q_heads, self.kv_heads, mesh.tensor, mesh.ulysses))
        if job.mode == "decode":
            pairs = float(self.seen(job.context)) / mesh.ring
        elif mesh.ring > 1:  # zigzag gives every rank the same share of a causal mask, contiguous blocks do not
            pairs = float(max(self.ring_schedule(job, mesh).pairs))
        else:
            pairs = self.reach.pairs(job.context)
        return 2.0 * local_batch(job, mesh) * pairs * heads * (self.head_dim + self.v_head_dim)

    def added_up(self, job: Job, mesh: Mesh) -> tuple[float, float]:
        """For every KV block that is computed: a partial output (read, weighted, added to the sum in fp32: six
        passes); dQ, dK and dV (read and added in fp32: three).
        """
        if mesh.ring == 1:
            return 0.0, 0.0
        heads = exchange.busiest(self, mesh)
        blocks = 1 + max(self.ring_schedule(job, mesh).received)
        tokens = blocks * local_batch(job, mesh) * local_tokens(job, mesh) * mesh.ulysses
        return 6.0 * 4 * tokens * heads.out, 3.0 * 4 * tokens * (heads.q + heads.kv)

    # What it sends.

    def sent(self, job: Job, mesh: Mesh) -> list[Sent]:
        if job.mode == "decode":
            return exchange.decode(self, job, mesh)
        in_chunks = job.mode == "prefill" and job.prefill_chunk is not None
        return (exchange.prompt if in_chunks else exchange.sequence)(self, job, mesh)

    def ring_schedule(self, job: Job, mesh: Mesh) -> RingSchedule:
        return exchange.schedule(self, job, mesh)

    def ring_impls(self, job: Job, mesh: Mesh) -> set[str]:
        of_ranks = exchange.pieces(self, job, mesh)
        return {
            exchange.impl(self, job, mesh, kv_heads) for rank in of_ranks for kv_heads in {piece.kv for piece in rank}
        }

    # What it holds.

    def cache_bytes(self, job: Job, mesh: Mesh) -> int:
        """Its heads (ulysses), its tokens (ring)."""
        return max(self.cache_by_rank(job, mesh))

    def cache_by_rank(
        self,
        job: Job,
        mesh: Mesh,
        generated: int = 0,
        chunk: int | None = None,
        code: str | None = None,
        step: int = 0,
    ) -> list[int]:
        """Bytes of keys and values on each rank of a sequence group.

        Args:
            job: its context is the prompt.
            mesh: the mesh.
            generated: tokens behind the prompt.
            chunk: tokens of a chunk of the prompt; None as the job, or else `longspan.core.kv_placement`, has it.
            code: how they are written (`longspan.core.cache_dtype.CACHE_DTYPES`); None as the job has it.
            step: count what so many last tokens see, while they are computed, and not what later ones will.
        """
        held = self.in_cache(job, mesh)
        if held is not self:
            return held.cache_by_rank(job, mesh, generated, chunk, code, step)
        first = self.reach.kept_from(job.context + generated - step)
        tokens = tokens_per_rank(layout_of(job, mesh), job.context, generated, first, chunk or job.prefill_chunk)
        shares = heads_of(self.q_heads, self.kv_heads, mesh.tensor, mesh.ulysses)
        each = sum(
            vector_bytes(code or job.cache, dim, job.bytes_per_element)
            for dim in ((self.head_dim,) if self.shared else (self.head_dim, self.v_head_dim))
        )
        return [local_batch(job, mesh) * count * share.kv_heads * each for count in tokens for share in shares]

    def staged_by_rank(self, job: Job, mesh: Mesh, generated: int, chunk: int | None, step: int) -> list[int]:
        return self.cache_by_rank(job, mesh, generated, chunk, step=step)

    def replicated_bytes(self, job: Job, mesh: Mesh) -> float:
        held_in = self.in_cache(job, mesh)
        if held_in is not self:
            return held_in.replicated_bytes(job, mesh)
        kv, u = max(1, self.kv_heads // mesh.tensor), mesh.ulysses
        if u <= kv:
            return 0.0
        most = max(share.kv_heads for share in heads_of(self.q_heads, self.kv_heads, mesh.tensor, u))
        held = self.cache_bytes(replace(job, mode="prefill", batch=mesh.data), mesh)
        return held * (1 - kv / u / most)

    def chunks(self, job: Job, mesh: Mesh) -> int:
        return exchange.chunks(self, job, mesh)

    def saved(self, mesh: Mesh, s: Scale, *, recompute_all_to_all: bool = False) -> int:
        """Q, K, V, the output as computed and as it comes back from an exchange, and a log-sum-exp per head.

        Per token of the rank: the heads of the rank with most, over the tokens of its Ulysses group. Lean, behind an
        exchange: Q, K, V and output of the rank's own tokens, and that log-sum-exp.
        """
        u, heads = mesh.ulysses, exchange.busiest(self, mesh)
        if recompute_all_to_all and u > 1:
            mine = exchange.of_my_tokens(self, mesh)
            return s.b * (mine.q + mine.kv + mine.out) + u * 4 * heads.q_heads
        saved = u * (s.b * (heads.q + heads.kv + heads.out) + 4 * heads.q_heads)
        return saved + self._projected(mesh, s)

    def kept(self, job: Job, mesh: Mesh, s: Scale) -> int:
        """attention: all of `saved`. output: the output of my tokens, and the log-sum-exp of my heads."""
        if job.memory.checkpointing == "save_attention":
            return self.saved(mesh, s, recompute_all_to_all=job.memory.recompute_all_to_all)
        if job.memory.checkpointing == "selective":
            numbers = mesh.ulysses * 4 * exchange.busiest(self, mesh).q_heads
            return s.b * self.q_heads * self.v_head_dim // mesh.tensor + numbers
        return 0

    def freed(self, behind: SavedActivations, job: Job, mesh: Mesh, s: Scale) -> SavedActivations:
        # Saved tensors are freed with the layer; a backward that recomputes the all-to-all also sends the local output.
        stays = job.memory.recompute_all_to_all or (
            job.memory.checkpointing == "save_attention" and not offloads(job, s)
        )
        return behind + SavedActivations(attention=0 if stays else self._projected(mesh, s))

    def _projected(self, mesh: Mesh, s: Scale) -> int:
        """The output as it goes into the projection, where that is a tensor of its own: after an exchange."""
        return s.b * self.q_heads * self.v_head_dim // mesh.tensor if mesh.ulysses > 1 else 0

    def ring_buffers(self, job: Job, mesh: Mesh, s: Scale, *, backward: bool) -> Buffers:
        if job.mode == "prefill" and job.prefill_chunk is not None:
            return exchange.in_chunk(self, job, mesh)
        if mesh.ring == 1 or job.mode == "decode":
            return Buffers()
        whole = (ring_memory.buffers_backward if backward else ring_memory.buffers_forward)(self, job, mesh, s)
        chunks = self.chunks(job, mesh)
        return Buffers(-(-whole.comm // chunks), -(-whole.workspace // chunks))

    def backward_buffers(self, job: Job, mesh: Mesh, s: Scale) -> Buffers:
        return exchange_memory.buffers_backward(self, job, mesh, s)

    def forward_buffers(self, mesh: Mesh, s: Scale) -> tuple[int, int, int]:
        kv = self.kv_width
        width = self.q_heads * self.head_dim + self.kv_heads * kv
        shares = heads_of(self.q_heads, self.kv_heads, mesh.tensor, mesh.ulysses)
        packed = max(share.q_heads * self.head_dim + share.kv_heads * kv for share in shares)
        return (
            s.tokens * width * s.b // mesh.tensor,
            s.tokens * self.q_heads * self.v_head_dim * s.b // mesh.tensor,
            s.tokens * mesh.ulysses * packed * s.b,
        )

    # What cannot be.

    def length_refusal(self, context: int) -> str | None:
        return self.reach.refusal(context)

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
def _in_cache(layer: Softmax, latent: bool, kv_replication: bool, tensor: int, ulysses: int) -> Softmax:
    heads = max(share.kv_heads for share in heads_of(layer.q_heads, layer.kv_heads, tensor, ulysses))
    shared = latent and tensor == 1 and (ulysses == 1 or kv_replication)
    if not holds_latent(layer.latent_dim, heads, layer.head_dim + layer.v_head_dim, shared):
        return layer
    width = layer.latent_dim
    return replace(
        layer, kv_heads=1, head_dim=width, v_head_dim=width - layer.rope_dim, latent_dim=0, rope_dim=0, shared=True
    )
