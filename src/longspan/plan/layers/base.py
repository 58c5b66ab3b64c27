"""What every kind of layer can be asked: the costs of the part that mixes tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from longspan.plan.cost.saved import Buffers, SavedActivations

if TYPE_CHECKING:
    from longspan.plan.cost.collective import Sent
    from longspan.plan.cost.ring import RingSchedule
    from longspan.plan.cost.saved import Scale
    from longspan.plan.job import Job, Mesh


@dataclass(frozen=True)
class Mixer(ABC):
    """The part of a layer in which tokens meet: attention, or a recurrence. Its sizes, and what it costs.

    Bytes, FLOPs and calls are of one layer and one micro-batch on the GPU that has most. What a subclass leaves as it
    is here costs nothing.

    Attributes:
        q_heads: query heads, as an exchange deals them. Of linear attention: heads of the values.
        kv_heads: key and value heads. With multi-head latent attention (MLA) those of the expanded keys, `q_heads`. Of
            linear attention: heads of the queries and keys.
        head_dim: elements of one query or key head (MLA: with and without position).
        v_head_dim: elements of one value head.
    """

    q_heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int

    runs: ClassVar[bool] = False
    """Whether `longspan.parallelize` takes such layers in this version."""

    deals_heads: ClassVar[bool] = False
    """Whether Ulysses ranks share out its heads; if not, every rank keeps its tokens with all heads."""

    # What it is.

    @property
    @abstractmethod
    def name(self) -> str:
        """The kind, in reports: "full", "sliding", "chunked", "linear"."""

    @property
    def window(self) -> int | None:
        """Tokens of its window or chunk, None where there is no limit."""
        return None

    @property
    @abstractmethod
    def cached_per_token(self) -> int:
        """Elements that the cache holds for one token more; 0 where a state takes the cache's place."""

    def seen(self, context: int) -> int:
        """Tokens that one query sees at most, out of so many."""
        return context

    # What it computes.

    @abstractmethod
    def flops(self, job: Job, scale: float) -> float:
        """FLOPs of the mixing itself in a forward over the whole batch on all GPUs, times `scale`."""

    @abstractmethod
    def busiest_flops(self, job: Job, mesh: Mesh) -> float:
        """The same of one micro-batch on the GPU that computes most."""

    def added_up(self, job: Job, mesh: Mesh) -> tuple[float, float]:
        """Bytes moved through memory to add up partial results, in a forward and in a backward."""
        return 0.0, 0.0

    # What it sends.

    @abstractmethod
    def sent(self, job: Job, mesh: Mesh) -> list[Sent]:
        """What the sequence methods send, forwards and backwards; P2P messages as two rows: K and V, gradients."""

    def ring_schedule(self, job: Job, mesh: Mesh) -> RingSchedule | None:
        """How KV blocks go round the ring; None where nothing does."""
        return None

    def ring_impls(self, job: Job, mesh: Mesh) -> set[str]:
        """How the ranks' keys and values go round the ring, "p2p" or "allgather"; empty where nothing does."""
        return set()

    # What it holds.

    @abstractmethod
    def cache_bytes(self, job: Job, mesh: Mesh) -> int:
        """Its KV cache, or its state, on the GPU that holds most of it."""

    def staged_by_rank(self, job: Job, mesh: Mesh, generated: int, chunk: int | None, step: int) -> list[int]:
        """What its last `step` tokens see, on each rank of a sequence group, while they are computed: bytes that are
        brought where the cache lies in the host's memory. See `Softmax.cache_by_rank`.
        """
        return [self.cache_bytes(job, mesh)] * mesh.sequence

    def replicated_bytes(self, job: Job, mesh: Mesh) -> float:
        """Keys and values that a GPU holds beyond an even share, because a KV head lies on several ranks."""
        return 0.0

    def chunks(self, job: Job, mesh: Mesh) -> int:
        """Pieces in which its heads go through exchange and attention (`Memory.head_chunks`)."""
        return 1

    @abstractmethod
    def saved(self, mesh: Mesh, s: Scale, *, recompute_all_to_all: bool = False) -> int:
        """Saved activations in bytes per token of a rank; see `Memory.recompute_all_to_all`."""

    def kept(self, job: Job, mesh: Mesh, s: Scale) -> int:
        """Of `saved`, what checkpointing keeps and does not compute again, in bytes per token of a rank."""
        return 0

    def freed(self, behind: SavedActivations, job: Job, mesh: Mesh, s: Scale) -> SavedActivations:
        """Of a layer's saved activations per token, what is gone when the backward reaches the mixing itself.

        Args:
            behind: what the layer saves behind the mixer.
            job: the job.
            mesh: the mesh.
            s: the scale.
        """
        return SavedActivations()

    def ring_buffers(self, job: Job, mesh: Mesh, s: Scale, *, backward: bool) -> Buffers:
        """Bytes that a ring holds while it computes, at its worst moment."""
        return Buffers()

    def backward_buffers(self, job: Job, mesh: Mesh, s: Scale) -> Buffers:
        """Bytes that the backward of the mixing holds beside what is saved, at its worst moment: a ring's, or those of
        the kernel and the exchange.
        """
        return Buffers()

    def in_cache(self, job: Job, mesh: Mesh) -> Mixer:
        """What attends to a KV cache, where that is not the mixer itself."""
        return self

    def forward_buffers(self, mesh: Mesh, s: Scale) -> tuple[int, int, int]:
        """In a forward alone: bytes of Q, K and V; of the output; of Q, K and V packed for an exchange."""
        return 0, 0, 0

    # What cannot be.

    def length_refusal(self, context: int) -> str | None:
        """Why a context cannot be planned, None where it can."""
        return None

    def ulysses_refusal(self, job: Job, mesh: Mesh) -> str | None:
        """Why its heads cannot be dealt to the mesh's Ulysses ranks, None where they can."""
        return None
