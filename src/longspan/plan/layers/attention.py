"""The sizes of a softmax attention and the heads of each rank; `exchange.py` and `attention_memory.py` cost them."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self, cast

from longspan.core.cache_dtype import holds_latent
from longspan.plan.job import head_shards
from longspan.plan.layers.attended_keys import CAUSAL, AttendedKeys
from longspan.plan.layers.base import Mixer

if TYPE_CHECKING:
    from longspan.core.heads import HeadShard
    from longspan.plan.job import Job, Mesh


@dataclass(frozen=True)
class RankHeads:
    """A rank's heads, and the elements per token of their queries, of keys and values, and of the output."""

    q: int
    kv: int
    out: int
    q_heads: int
    kv_heads: int


@dataclass(frozen=True)
class Attention(Mixer):
    """Attention over keys and values: its sizes.

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

    @property
    def kv_width(self) -> int:
        """Elements of a KV head's key and value, as they are sent and cached."""
        return self.head_dim + (0 if self.shared else self.v_head_dim)

    def head_shards(self, mesh: Mesh) -> tuple[HeadShard, ...]:
        """Return the heads of each Ulysses rank."""
        return head_shards(self.q_heads, self.kv_heads, mesh.tensor, mesh.ulysses)

    def max_heads(self, mesh: Mesh) -> RankHeads:
        """Return the heads of the rank with most heads, as they are behind the all-to-all."""
        return self._rank_heads(max(self.head_shards(mesh), key=lambda shard: (shard.q_heads, shard.kv_heads)))

    def local_heads(self, mesh: Mesh) -> RankHeads:
        """Return a rank's heads before the all-to-all: all that tensor parallelism leaves it."""
        return self._rank_heads(head_shards(self.q_heads, self.kv_heads, mesh.tensor, 1)[0])

    def _rank_heads(self, shard: HeadShard) -> RankHeads:
        q, kv = shard.q_heads, shard.kv_heads
        return RankHeads(
            q * self.head_dim, kv * (self.head_dim + self.v_head_dim), q * self.v_head_dim, q_heads=q, kv_heads=kv
        )

    def cache_mixer(self, job: Job, mesh: Mesh) -> Self:
        """Return the attention to a KV cache.

        If the cache holds latent vectors, all query heads attend to one KV head of them (`longspan.cache.latent`).
        """
        latent = _latent_mixer(self, job.cache_latent, job.kv_replication, mesh.tensor, mesh.ulysses)
        return self if latent is None else cast("Self", latent)


@functools.lru_cache(maxsize=1024)
def _latent_mixer(layer: Attention, latent: bool, kv_replication: bool, tensor: int, ulysses: int) -> Attention | None:
    """Return the attention to a cache of latent vectors, or None if the cache holds keys and values."""
    heads = max(shard.kv_heads for shard in head_shards(layer.q_heads, layer.kv_heads, tensor, ulysses))
    shareable = latent and tensor == 1 and (ulysses == 1 or kv_replication)
    if not holds_latent(layer.latent_dim, heads, layer.head_dim + layer.v_head_dim, shareable):
        return None
    width = layer.latent_dim
    return replace(
        layer, kv_heads=1, head_dim=width, v_head_dim=width - layer.rope_dim, latent_dim=0, rope_dim=0, shared=True
    )
