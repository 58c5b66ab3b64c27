"""The interface of a mixer, and the values in which layers report their costs."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

from longspan.plan.job import Job, Mesh, local_batch, local_tokens

if TYPE_CHECKING:
    from longspan.plan.layers.ring import RingSchedule


@dataclass(frozen=True)
class Parameter:
    """One weight tensor."""

    name: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements of the tensor."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class CostContext:
    """One job on one mesh, with the sizes that all memory formulas use.

    Attributes:
        job: the job.
        mesh: the mesh.
        d: hidden size.
        on_cpu: whether ranks are processes on CPUs.
    """

    job: Job
    mesh: Mesh
    d: int
    on_cpu: bool

    @cached_property
    def tokens(self) -> int:
        """Tokens on a rank, over all its sequences."""
        return local_tokens(self.job, self.mesh) * local_batch(self.job, self.mesh)

    @property
    def b(self) -> int:
        """Bytes per element."""
        return self.job.bytes_per_element

    @property
    def hidden_shards(self) -> int:
        """Tensor ranks that share the residual stream: Megatron SP shards it, plain TP replicates it."""
        return self.mesh.tensor if self.job.tensor_style == "megatron-sp" else 1


@dataclass(frozen=True)
class Sent:
    """The bytes of one collective.

    Attributes:
        op: one of `longspan.plan.hardware.OPS`.
        axis: mesh axis; `fsdp` is data x ring x ulysses together, `sequence` ring x ulysses.
        what: what is sent.
        bytes: sent by one GPU in one call, max over ranks.
        calls: number of calls.
        method: whether the sequence or tensor method sends it, rather than weights, gradients and loss.
    """

    op: str
    axis: str
    what: str
    bytes: int
    calls: int = 1
    method: bool = True


@dataclass(frozen=True)
class SavedActivations:
    """Bytes that layers save for their backward."""

    hidden: int = 0
    attention: int = 0
    mlp: int = 0

    def __add__(self, other: SavedActivations) -> SavedActivations:
        return SavedActivations(self.hidden + other.hidden, self.attention + other.attention, self.mlp + other.mlp)

    def __sub__(self, other: SavedActivations) -> SavedActivations:
        return self + other * -1

    def __mul__(self, times: int) -> SavedActivations:
        return SavedActivations(self.hidden * times, self.attention * times, self.mlp * times)

    @property
    def total(self) -> int:
        """Sum of the three."""
        return self.hidden + self.attention + self.mlp

    def items(self) -> dict[str, int]:
        """Return them under the names of `longspan.plan.cost.memory.ITEMS`."""
        return {
            "activations_hidden": self.hidden,
            "activations_attention": self.attention,
            "activations_mlp": self.mlp,
        }


@dataclass(frozen=True)
class Buffers:
    """Bytes that attention holds besides saved activations: KV blocks in flight, and results being computed."""

    comm: int = 0
    workspace: int = 0

    @property
    def total(self) -> int:
        """Sum of both."""
        return self.comm + self.workspace

    def items(self) -> dict[str, int]:
        """Return them under the names of `longspan.plan.cost.memory.ITEMS`."""
        return {"comm_buffers": self.comm, "attention_workspace": self.workspace}


def offloads(c: CostContext) -> bool:
    """Whether checkpoints leave this memory. Offload to the host does nothing on a CPU."""
    return c.job.memory.offload == "disk" or (c.job.memory.offload == "host" and not c.on_cpu)


@dataclass(frozen=True)
class Mixer(ABC):
    """The part of a layer that mixes tokens, attention or a recurrence: its sizes and its costs.

    Bytes, FLOPs and calls are for one layer and one micro-batch, max over ranks. A method that a subclass does not
    override costs nothing.

    Attributes:
        q_heads: query heads, which Ulysses shards. Linear attention: heads of the values.
        kv_heads: key and value heads. MLA: those of the expanded keys, `q_heads`. Linear attention: heads of the
            queries and keys.
        head_dim: elements of one query or key head (MLA: rotary part included).
        v_head_dim: elements of one value head.
    """

    q_heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int

    runs: ClassVar[bool] = False
    """Whether `longspan.parallelize` supports such layers in this version."""

    shards_heads: ClassVar[bool] = False
    """Whether Ulysses shards the heads; if not, every rank holds all heads of its tokens."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The kind, in reports: "full", "sliding", "chunked", "linear"."""

    @property
    def window(self) -> int | None:
        """Tokens of its window or chunk; None: no limit."""
        return None

    @property
    @abstractmethod
    def cached_per_token(self) -> int:
        """Elements that each further token adds to the cache; 0 for a recurrent state."""

    def seen(self, context: int) -> int:
        """Return the most tokens of `context` that one query attends to."""
        return context

    # Compute.

    @abstractmethod
    def flops(self, job: Job, times: float) -> float:
        """Return `times` the FLOPs of mixing in one forward, over the whole batch and all GPUs."""

    @abstractmethod
    def max_flops(self, job: Job, mesh: Mesh) -> float:
        """Return the FLOPs of mixing in the forward of one micro-batch, max over ranks."""

    def accumulated_bytes(self, job: Job, mesh: Mesh) -> tuple[float, float]:
        """Return the memory traffic of accumulating partial results, in a forward and in a backward."""
        return 0.0, 0.0

    # Communication.

    @abstractmethod
    def sent(self, job: Job, mesh: Mesh) -> list[Sent]:
        """Return what the sequence methods send, forward and backward; P2P in pairs: K and V, then gradients."""

    def ring_schedule(self, job: Job, mesh: Mesh) -> RingSchedule | None:
        """Return how KV blocks go round the ring; None if the mixer has no ring."""
        return None

    def ring_impls(self, job: Job, mesh: Mesh) -> set[str]:
        """Return the ring implementations in use, "p2p" or "allgather"; empty if the mixer has no ring."""
        return set()

    # The cache.

    @abstractmethod
    def cache_by_rank(
        self, job: Job, mesh: Mesh, generated: int = 0, chunk: int | None = None, step: int = 0
    ) -> list[int]:
        """Return the bytes of its KV cache or state on each rank of a sequence group.

        Args:
            job: its context is the prompt.
            mesh: the mesh.
            generated: tokens after the prompt.
            chunk: tokens per chunk of the prompt; None: the job's, or else that of `longspan.core.cache`.
            step: count the keys that the last `step` tokens attend to, rather than those that later tokens will.
        """

    def cache_bytes(self, job: Job, mesh: Mesh) -> int:
        """Return the bytes of its KV cache or state, max over ranks."""
        return max(self.cache_by_rank(job, mesh))

    def cache_mixer(self, job: Job, mesh: Mesh) -> Mixer:
        """Return the mixer that attends to the KV cache, if that is another one."""
        return self

    def replicated_bytes(self, job: Job, mesh: Mesh) -> float:
        """Return the bytes of K and V beyond an even share, because KV heads are replicated."""
        return 0.0

    # Memory.

    @abstractmethod
    def saved(self, c: CostContext, *, recompute_all_to_all: bool = False) -> int:
        """Return saved bytes per token of a rank, with or without the all-to-all recomputed in the backward."""

    def checkpointed(self, c: CostContext) -> int:
        """Return the part of `saved` that checkpointing saves rather than recomputes."""
        return 0

    def freed(self, after_mixer: SavedActivations, c: CostContext) -> SavedActivations:
        """Return the saved bytes per token that a layer has freed when its backward reaches the mixing itself.

        `after_mixer`: saved by the rest of the layer, behind the mixer.
        """
        return SavedActivations()

    def chunks(self, job: Job, mesh: Mesh) -> int:
        """Return the head chunks that run one after the other (`Memory.head_chunks`)."""
        return 1

    def forward_buffers(self, c: CostContext) -> tuple[int, int, int]:
        """Return a forward's bytes of Q, K and V; of the output; of Q, K and V packed for the all-to-all."""
        return 0, 0, 0

    def ring_buffers(self, c: CostContext, *, backward: bool) -> Buffers:
        """Return a ring's peak buffers."""
        return Buffers()

    def backward_buffers(self, c: CostContext) -> Buffers:
        """Return the peak buffers of the backward of mixing, ring, kernel and all-to-all included."""
        return Buffers()

    # Limits.

    def length_refusal(self, context: int) -> str | None:
        """Return the reason why a context cannot be planned, or None."""
        return None

    def ulysses_refusal(self, job: Job, mesh: Mesh) -> str | None:
        """Return the reason why its heads cannot be sharded over the mesh's Ulysses ranks, or None."""
        return None
