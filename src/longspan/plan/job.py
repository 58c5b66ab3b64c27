"""What to plan: the job, the mesh, and a rank's share of the job."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from longspan.core.cache import CACHE_DTYPES, OFFLOADS, CacheDtype, CacheOffload, is_sharded
from longspan.core.errors import LongspanError
from longspan.core.experts import ExpertLayout, Experts, most_ranks
from longspan.core.heads import HeadShard, split_groups, split_heads
from longspan.core.layout import LAYOUTS, Layout, LayoutName, choose_layout
from longspan.core.memory import FASTEST, Memory
from longspan.core.parallel import AXES, RING_IMPLS, TENSOR_STYLES, RingImpl, TensorStyle
from longspan.core.tile_sizes import layers_held, layers_per_checkpoint
from longspan.core.validation import LARGEST_COUNT, LARGEST_JOB, check_choice, check_flag, check_number, format_value

if TYPE_CHECKING:
    from longspan.plan.shape import LayerShape, ModelShape
    from longspan.plan.tower import Pictures

Mode = Literal["train", "prefill", "decode"]


@dataclass(frozen=True)
class Job:
    """What one step computes.

    Attributes:
        context: tokens per sequence; in `decode`, tokens already in the cache.
        batch: sequences per step, over all GPUs. A data-parallel replica accumulates gradients over its batch / data
            sequences, one at a time, as `longspan train` does.
        mode: `train` (forward, backward, optimizer), `prefill` (forward, saving K and V) or `decode` (one new token per
            sequence).
        dtype: of activations and gathered weights. bf16 training stores weights, gradients and optimizer in fp32.
        weight_sharding: shard weights by FSDP over data x ring x ulysses, or replicate them.
        memory: memory options, as in `longspan.parallelize(memory=...)`. Without a backward only `tiled_mlp`,
            `head_chunks` and `cpu_offload` have an effect.
        kv_replication: allow one KV head on several ranks.
        tensor_style: AllReduce (`tp`), or AllGather + ReduceScatter (`megatron-sp`).
        experts: ranks of data x ring x ulysses over which experts are sharded; see `longspan.parallelize`.
        layout: how tokens are placed over a ring; see `SequenceSharding`.
        ring_impl: how keys and values go round the ring; `auto` decides by `longspan.core.routes.choose_ring_impl`.
        overlap_chunks: chunks of heads in which the all-to-all overlaps with attention; see `SequenceSharding`.
        wire_dtype: wire dtype of the all-to-all: "exact", or lossy "int8" or "fp8". The time to convert is not
            counted.
        cache: dtype of the KV cache (`longspan.core.cache.CACHE_DTYPES`).
        cache_offload: where the KV cache is stored (`longspan.core.cache.OFFLOADS`).
        cache_latent: cache MLA's latent vectors if they are smaller (`longspan.core.cache.holds_latent`).
        documents: whether sequences may be packed documents: in a ring, blocks then arrive from both sides. Times are
            those of whole sequences.
        prefill_chunk: tokens per chunk of a prompt, over all ranks, as `longspan generate` runs it: keys and values
            stay in the cache, and queries are sent. None: the whole prompt in one forward.
        pictures: images and video of each sequence, for a model with a vision tower; they come first in the sequence.
    """

    context: int
    batch: int = 1
    mode: Mode = "train"
    dtype: Literal["bf16", "fp32"] = "bf16"
    weight_sharding: bool = True
    memory: Memory = FASTEST
    kv_replication: bool = True
    tensor_style: TensorStyle = "tp"
    experts: Experts = 1
    layout: LayoutName = "auto"
    ring_impl: RingImpl = "auto"
    overlap_chunks: int = 1
    wire_dtype: CacheDtype = "exact"
    cache: CacheDtype = "exact"
    cache_offload: CacheOffload = "none"
    cache_latent: bool = True
    prefill_chunk: int | None = None
    documents: bool = False
    pictures: tuple[Pictures, ...] = ()

    def __post_init__(self) -> None:
        for name in ("context", "batch"):
            check_number(name, getattr(self, name), 1, LARGEST_COUNT, whole=True)
        for name, choices in (
            ("mode", ("train", "prefill", "decode")),
            ("dtype", ("bf16", "fp32")),
            ("tensor_style", TENSOR_STYLES),
            ("layout", ("auto", *LAYOUTS)),
            ("ring_impl", RING_IMPLS),
            ("wire_dtype", CACHE_DTYPES),
            ("cache", CACHE_DTYPES),
            ("cache_offload", OFFLOADS),
        ):
            check_choice(name, getattr(self, name), choices)
        if self.experts != "auto":
            check_number("experts", self.experts, 1, LARGEST_JOB, whole=True)
        for name, value in (("prefill-chunk", self.prefill_chunk), ("overlap-chunks", self.overlap_chunks)):
            if value is not None:
                check_number(name, value, 1, LARGEST_COUNT, whole=True)
        for name in ("weight_sharding", "kv_replication", "cache_latent", "documents"):
            check_flag(name, getattr(self, name))
        if not isinstance(self.memory, Memory):
            raise LongspanError(f"memory is {format_value(self.memory)}; make one with longspan.core.memory.Memory")
        if self.wire_dtype != "exact" and (self.mode == "decode" or self.prefill_chunk is not None):
            raise LongspanError(
                f"wire-dtype={self.wire_dtype} does not work with a KV cache; leave it out of mode decode and "
                f"of prefill-chunk"
            )
        if self.memory.cpu_offload and not self.weight_sharding:
            raise LongspanError("cpu_offload moves FSDP's shards, and weight_sharding is off; leave one of them out")

    @property
    def bytes_per_element(self) -> int:
        """Bytes of one element of an activation or a gathered weight."""
        return 2 if self.dtype == "bf16" else 4

    @property
    def prompt_chunks(self) -> list[tuple[int, int]]:
        """(tokens of a chunk over all ranks, number of such chunks); empty for a prompt in one forward."""
        if self.mode != "prefill" or self.prefill_chunk is None:
            return []
        full, rest = divmod(self.context, self.prefill_chunk)
        return [(tokens, count) for tokens, count in ((self.prefill_chunk, full), (rest, 1)) if tokens and count]

    @property
    def forwards(self) -> int:
        """Forwards per step: one per chunk of a prompt, else 1."""
        return sum(count for _, count in self.prompt_chunks) or 1

    @property
    def layer_passes(self) -> tuple[int, int]:
        """How often a layer's forward and its backward run per micro-batch."""
        if self.mode != "train":
            return 1, 0
        return (1 if self.memory.checkpointing == "none" else 2), 1

    @property
    def attention_passes(self) -> tuple[int, int]:
        """How often a layer's attention runs, forward and backward.

        If checkpointing saves the attention's result, all-to-all, ring and kernel do not run again with the layer.
        """
        if self.mode != "train":
            return 1, 0
        return (2 if self.memory.checkpointing == "full" else 1), 1

    def recomputed_inputs(self, layers: int) -> int:
        """Return how many layers run a further forward to recompute the next layer's input.

        These are all layers but the last of each group of `Memory.layers_per_checkpoint`.
        """
        if self.mode != "train" or self.memory.checkpointing == "none":
            return 0
        return layers - layers_held(layers, layers_per_checkpoint(layers, self.memory.layers_per_checkpoint))[0]


@dataclass(frozen=True)
class Mesh:
    """Sizes of the four axes."""

    data: int = 1
    ring: int = 1
    ulysses: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        for axis in AXES:
            check_number(axis, getattr(self, axis), 1, LARGEST_COUNT, whole=True)

    @property
    def gpus(self) -> int:
        """Ranks in all."""
        return self.data * self.ring * self.ulysses * self.tensor

    @property
    def sequence(self) -> int:
        """Ranks that share one sequence."""
        return self.ring * self.ulysses

    @property
    def weights(self) -> int:
        """Ranks over which FSDP shards (data x ring x ulysses)."""
        return self.data * self.ring * self.ulysses

    def size(self, axis: str) -> int:
        """Return the ranks of a group along `axis`."""
        return self.groups[axis][1]

    @cached_property
    def groups(self) -> dict[str, tuple[int, int]]:
        """Distance between neighbours and ranks of a group along each axis; `fsdp` is data x ring x ulysses."""
        return {
            "tensor": (1, self.tensor),
            "ulysses": (self.tensor, self.ulysses),
            "sequence": (self.tensor, self.sequence),
            "fsdp": (self.tensor, self.weights),
            "ring": (self.tensor * self.ulysses, self.ring),
            "data": (self.tensor * self.sequence, self.data),
        }

    def __str__(self) -> str:
        named = [f"{axis}={getattr(self, axis)}" for axis in AXES if getattr(self, axis) > 1]
        return " ".join(named) or "one GPU"


@dataclass(frozen=True)
class CostContext:
    """One job of a model on one mesh, with a rank's share of it: the sizes that all formulas use."""

    model: ModelShape
    job: Job
    mesh: Mesh

    def of_layer(self, layer: LayerShape) -> CostContext:
        """Return the context of a layer's costs: of a forward alone, if the layer has no backward."""
        if layer.has_backward or self.job.mode != "train":
            return self
        return replace(self, job=replace(self.job, mode="prefill", batch=self.mesh.data))

    @property
    def d(self) -> int:
        """Hidden size."""
        return self.model.d_model

    @property
    def b(self) -> int:
        """Bytes per element."""
        return self.job.bytes_per_element

    @cached_property
    def layout(self) -> Layout:
        """Which rank of a sequence group holds which tokens, as `SequenceSharding` decides it."""
        return choose_layout(self.job.layout, self.mesh.ring, self.mesh.ulysses)

    @cached_property
    def micro_batches(self) -> int:
        """Forward-backward passes per step: in training a replica runs its sequences one at a time."""
        return max(1, self.job.batch // self.mesh.data) if self.job.mode == "train" else 1

    @cached_property
    def sequences(self) -> int:
        """Sequences on a rank at a time."""
        return 1 if self.job.mode == "train" else max(1, -(-self.job.batch // self.mesh.data))

    @cached_property
    def sequence_tokens(self) -> int:
        """One sequence's tokens on a rank, padding included; in decode the one new token, which every rank holds."""
        return 1 if self.job.mode == "decode" else self.layout.local_length(self.job.context)

    @cached_property
    def tokens(self) -> int:
        """Tokens on a rank, over all its sequences."""
        return self.sequence_tokens * self.sequences

    @property
    def forwards(self) -> list[tuple[int, int]]:
        """(one sequence's tokens on a rank, number of such forwards) for the forwards of a step.

        A chunk of a prompt that is too short to be cut is computed by every rank.
        """
        local = self.layout.local_length
        chunks = [(local(n) if is_sharded(self.layout, n) else n, count) for n, count in self.job.prompt_chunks]
        return chunks or [(self.sequence_tokens, 1)]

    @property
    def hidden_shards(self) -> int:
        """Tensor ranks that share the residual stream: Megatron SP shards it, plain TP replicates it."""
        return self.mesh.tensor if self.job.tensor_style == "megatron-sp" else 1

    @property
    def weight_ranks(self) -> int:
        """Ranks over which weights are sharded."""
        return self.mesh.weights if self.job.weight_sharding else 1

    @cached_property
    def experts(self) -> int:
        """Ranks of a group over which experts are sharded; 1: each rank gathers them all."""
        needs = {(layer.mlp.experts, layer.fewest_experts) for layer, _ in self.model.layer_kinds if layer.mlp.experts}
        if self.weight_ranks == 1 or self.mesh.tensor > 1 or not needs:
            return 1
        if self.job.experts == "auto":
            return min(most_ranks(count, self.weight_ranks, fewest) for count, fewest in needs)
        return self.job.experts

    def expert_layout(self, experts: int) -> ExpertLayout:
        """Return which rank of a group computes which of a layer's experts."""
        return ExpertLayout(experts, self.weight_ranks, self.experts)

    def group(self, axis: str) -> tuple[int, int]:
        """Return `Mesh.groups` of an axis, or of `experts` x `replicas`, which are data x sequence."""
        groups = {"experts": (1, self.experts), "replicas": (self.experts, self.weight_ranks // self.experts)}
        return groups[axis] if axis in groups else self.mesh.groups[axis]

    @property
    def on_host(self) -> bool:
        """Whether weights, gradients and optimizer states are in the host's memory instead of the GPU's."""
        return self.job.memory.cpu_offload

    @property
    def offloads(self) -> bool:
        """Whether checkpoints leave this memory."""
        return self.job.memory.offload != "none"


@functools.lru_cache(maxsize=4096)
def head_shards(q_heads: int, kv_heads: int, tensor: int, ulysses: int) -> tuple[HeadShard, ...]:
    """Return the heads of each Ulysses rank, on the tensor rank that has most heads."""
    most = max(split_groups(q_heads, kv_heads, tensor), key=lambda shard: (shard.q_heads, shard.kv_heads))
    return split_heads(most.q_heads, most.kv_heads, ulysses)
