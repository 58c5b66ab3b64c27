"""What mixes tokens in a layer (`TokenMixing`), the MLP behind it, and the values in which they report their costs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from longspan.plan.job import CostContext, Job

if TYPE_CHECKING:
    from longspan.plan.layers.attended_keys import RingSchedule


@dataclass(frozen=True)
class Parameter:
    """One weight tensor."""

    name: str  # in its layer, or in the model
    shape: tuple[int, ...]  # in elements
    trained: bool = True  # whether it gets a gradient in training
    packed: bool = False  # whether it is stored in 4 bits an element
    shares_scales: bool = False  # whether its product rounds to float8 by the largest entry over all ranks
    in_float8: bool = False  # whether FSDP gathers it in float8

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Sent:
    """The bytes of one collective."""

    op: str  # one of `longspan.plan.hardware.OPS`.
    axis: str  # mesh axis; `fsdp` is data x ring x ulysses together, `sequence` ring x ulysses
    what: str  # what is sent
    bytes: int  # sent by one GPU in one call, max over ranks
    calls: int = 1  # number of calls
    method: bool = True  # whether the sequence or tensor method sends it, rather than weights, gradients and loss


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
        return self.hidden + self.attention + self.mlp

    def items(self) -> dict[str, int]:
        """Return them under the names of `longspan.plan.cost.peak_memory.ITEMS`."""
        return {f"activations_{name}": getattr(self, name) for name in ("hidden", "attention", "mlp")}


@dataclass(frozen=True)
class Buffers:
    """Bytes that attention holds besides saved activations: KV blocks in flight, and results being computed."""

    comm: int = 0
    workspace: int = 0

    @property
    def total(self) -> int:
        return self.comm + self.workspace


@dataclass(frozen=True)
class Mlp:
    """The part of a layer that follows the mixing: dense, or routed experts."""

    ffn: int  # intermediate size of a dense MLP, or of each routed expert
    gated: bool = True  # three matrices (SwiGLU and its like) rather than two
    experts: int = 0  # routed experts; 0 for a dense MLP
    per_token: int = 1  # routed experts per token
    shared_ffn: int = 0  # intermediate size of all shared experts together

    @property
    def width(self) -> int:
        """Intermediate elements of one token, over all experts that compute it."""
        return self.shared_ffn + self.per_token * self.ffn

    @property
    def saved_intermediates(self) -> int:
        """Tensors of the intermediate size that autograd saves.

        Half of them, the activation function's result and the input of the last product, follow from the others.
        """
        return 4 if self.gated else 2

    def active(self, p: Parameter) -> int:
        """Return the elements of one weight that one token uses."""
        # Routed experts are stacked along the first dimension.
        return p.numel // self.experts * self.per_token if p.name.startswith("mlp.experts.") else p.numel

    def saved(self, c: CostContext) -> int:
        """Return the saved bytes per token: the intermediates; of experts (an estimate) also inputs and outputs."""
        of_experts = 2 * c.b * c.d * self.per_token if self.experts else 0
        return self.saved_intermediates * c.b * self.width + of_experts


@dataclass(frozen=True)
class TokenMixing:
    """The part of a layer that mixes tokens, attention or a recurrence: its sizes and its costs.

    Bytes, FLOPs and calls are for one layer and one micro-batch, max over ranks. A method that a subclass does not
    override costs nothing; a plain `TokenMixing()` is a layer that is an MLP alone.

    Attributes:
        q_heads: query heads, which Ulysses shards. Recurrent layers: heads of the values.
        kv_heads: key and value heads. MLA: those of the expanded keys, `q_heads`. Recurrent layers: heads of the
            queries and keys.
        head_dim: elements of one query or key head (MLA: rotary part included).
        v_head_dim: elements of one value head.
    """

    q_heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    v_head_dim: int = 0

    shards_heads: ClassVar[bool] = False
    """Whether Ulysses shards the heads; if not, every rank holds all heads of its tokens."""

    @property
    def name(self) -> str:
        """The kind, in reports: "full", "sliding", "chunked", "linear"."""
        return "no"

    @property
    def window(self) -> int | None:
        """Tokens of its window or chunk; None: no limit."""
        return None

    @property
    def cached_per_token(self) -> int:
        """Elements that each further token adds to the cache; 0 for a recurrent state."""
        return 0

    def seen(self, context: int) -> int:
        """Return the most tokens of `context` that one query attends to."""
        return context

    # Compute.

    def flops(self, job: Job, times: float) -> float:
        """Return `times` the FLOPs of mixing in one forward, over the whole batch and all GPUs."""
        return 0.0

    def max_flops(self, c: CostContext) -> float:
        """Return the FLOPs of mixing in the forward of one micro-batch, max over ranks."""
        return 0.0

    def accumulated_bytes(self, c: CostContext) -> tuple[float, float]:
        """Return the memory traffic of accumulating partial results, in a forward and in a backward."""
        return 0.0, 0.0

    # Communication.

    def sent(self, c: CostContext) -> list[Sent]:
        """Return what the sequence methods send, forward and backward; P2P in pairs: K and V, then gradients."""
        return []

    def ring_schedule(self, c: CostContext) -> RingSchedule | None:
        """Return how KV blocks go round the ring; None if the mixing has no ring."""
        return None

    # The cache.

    def cache_by_rank(self, c: CostContext, generated: int = 0, chunk: int | None = None, step: int = 0) -> list[int]:
        """Return the bytes of its KV cache or state on each rank of a sequence group.

        Args:
            c: its job's context is the prompt.
            generated: tokens after the prompt.
            chunk: tokens per chunk of the prompt; None: the job's, or else that of `longspan.core.cache`.
            step: count the keys that the last `step` tokens attend to, rather than those that later tokens will.
        """
        return [0] * c.mesh.sequence_ranks

    def cache_bytes(self, c: CostContext) -> int:
        """Return the bytes of its KV cache or state, max over ranks."""
        return max(self.cache_by_rank(c))

    def cache_mixing(self, c: CostContext) -> TokenMixing:
        """Return the mixing that attends to the KV cache, if that is another one."""
        return self

    # Memory.

    def saved(self, c: CostContext) -> int:
        """Return saved bytes per token of a rank."""
        return 0

    def checkpointed(self, c: CostContext) -> int:
        """Return the part of `saved` that checkpointing saves rather than recomputes."""
        return 0

    def freed(self, after_mixing: SavedActivations, c: CostContext) -> SavedActivations:
        """Return the saved bytes per token that a layer has freed when its backward reaches the mixing itself.

        `after_mixing`: saved by the rest of the layer, behind the mixing.
        """
        return SavedActivations()

    def slices(self, c: CostContext) -> tuple[TokenMixing, ...]:
        """Return the slices of heads that run one after another in training (`Memory.head_slices`)."""
        return (self,)

    def forward_buffers(self, c: CostContext) -> tuple[int, int, int]:
        """Return a forward's bytes of Q, K and V; of the output; of Q, K and V packed for the all-to-all."""
        return 0, 0, 0

    def ring_buffers(self, c: CostContext) -> Buffers:
        """Return a ring's peak buffers in a forward."""
        return Buffers()

    def backward_buffers(self, c: CostContext) -> Buffers:
        """Return the peak buffers of the backward of mixing, ring, kernel and all-to-all included."""
        return Buffers()

    # Limits.

    def ulysses_refusal(self, job: Job) -> str | None:
        """Return the reason why its heads cannot be sharded over the mesh's Ulysses ranks, or None."""
        return None
