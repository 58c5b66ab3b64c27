"""What to plan: the job, on its mesh, and a rank's share of the job."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from longspan.core.cache import CacheConfig, is_sharded
from longspan.core.errors import LongspanError
from longspan.core.experts import ExpertLayout, most_ranks
from longspan.core.heads import HeadShard, split_groups, split_heads
from longspan.core.layout import Layout, choose_layout
from longspan.core.memory import FASTEST, Memory
from longspan.core.parallel import ParallelConfig
from longspan.core.tile_sizes import layers_held, layers_per_checkpoint
from longspan.core.validation import LARGEST_COUNT, check_choice, check_flag, check_number, format_value

if TYPE_CHECKING:
    from longspan.plan.shape import LayerShape, ModelShape
    from longspan.plan.tower import PictureShape

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
        parallel: the mesh and its options. `overlap_chunks="auto"` is planned as 1.
        memory: memory options, as in `longspan.parallelize(memory=...)`. Without a backward only `tiled` and
            `cpu_offload` have an effect.
        cache: how the KV cache of `prefill` and `decode` is stored.
        documents: whether sequences may be packed documents: in a ring, blocks then arrive from both sides. Times are
            those of whole sequences.
        prefill_chunk: tokens per chunk of a prompt, over all ranks, as `longspan generate` runs it: keys and values
            stay in the cache, and queries are sent. None: the whole prompt in one forward.
        pictures: images and video of each sequence, for a model with a vision tower; they come first in the sequence.
        elastic: whether batches are elastic, so that NCCL holds buffers for groups of all widths.
        fused: whether linear attention runs by flash-linear-attention's kernels; otherwise in plain torch.
    """

    context: int
    batch: int = 1
    mode: Mode = "train"
    dtype: Literal["bf16", "fp32"] = "bf16"
    weight_sharding: bool = True
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    memory: Memory = FASTEST
    cache: CacheConfig = field(default_factory=CacheConfig)
    prefill_chunk: int | None = None
    documents: bool = False
    pictures: tuple[PictureShape, ...] = ()
    elastic: bool = False
    fused: bool = True

    def __post_init__(self) -> None:
        for name in ("context", "batch"):
            check_number(name, getattr(self, name), 1, LARGEST_COUNT, whole=True)
        check_choice("mode", self.mode, ("train", "prefill", "decode"))
        check_choice("dtype", self.dtype, ("bf16", "fp32"))
        if self.prefill_chunk is not None:
            check_number("prefill-chunk", self.prefill_chunk, 1, LARGEST_COUNT, whole=True)
        for name in ("weight_sharding", "documents", "elastic", "fused"):
            check_flag(name, getattr(self, name))
        for name, kind in (("parallel", ParallelConfig), ("memory", Memory), ("cache", CacheConfig)):
            if not isinstance(getattr(self, name), kind):
                raise LongspanError(f"{name} is {format_value(getattr(self, name))}; make one with {kind.__name__}")
        if not isinstance(self.pictures, tuple):
            raise LongspanError(f"pictures is {format_value(self.pictures)}; give a tuple of PictureShape")
        if self.memory.cpu_offload and not self.weight_sharding:
            raise LongspanError("cpu_offload moves FSDP's shards, and weight_sharding is off; leave one of them out")

    def on(self, **parallel: Any) -> Job:
        """Return the job on another mesh, or with other options of `ParallelConfig`."""
        return replace(self, parallel=replace(self.parallel, **parallel))

    @property
    def overlap_chunks(self) -> int:
        """Chunks of heads in which the all-to-all overlaps with attention."""
        asked = self.parallel.overlap_chunks
        return 1 if asked == "auto" else asked

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
        return (2 if self.memory.recomputes_layers else 1), 1

    def recomputed_inputs(self, layers: int) -> int:
        """Return how many layers run a further forward to recompute the next layer's input.

        These are all layers but the last of each group.
        """
        if self.mode != "train" or self.memory.checkpointing != "grouped":
            return 0
        return layers - layers_held(layers, layers_per_checkpoint(layers, grouped=True))[0]


@dataclass(frozen=True)
class CostContext:
    """One job of a model on one mesh, with a rank's share of it: the sizes that all formulas use."""

    model: ModelShape
    job: Job

    @property
    def mesh(self) -> ParallelConfig:
        return self.job.parallel

    def of_layer(self, layer: LayerShape) -> CostContext:
        """Return the context of a layer's costs: of a forward alone, if the layer has no backward."""
        if layer.has_backward or self.job.mode != "train":
            return self
        return replace(self, job=replace(self.job, mode="prefill", batch=self.mesh.data))

    @cached_property
    def teacher(self) -> CostContext | None:
        """The context of a teacher's forward in a micro-batch of training; None without a teacher."""
        if self.model.teacher is None or self.job.mode != "train":
            return None
        return CostContext(self.model.teacher, replace(self.job, mode="prefill", batch=self.mesh.data, pictures=()))

    @property
    def d(self) -> int:
        """Hidden size."""
        return self.model.d_model

    @property
    def b(self) -> int:
        """Bytes of one element of an activation or a gathered weight."""
        return 2 if self.job.dtype == "bf16" else 4

    @cached_property
    def layout(self) -> Layout:
        """Which rank of a sequence group holds which tokens, as `SequenceSharding` decides it."""
        return choose_layout(self.mesh.layout, self.mesh.ring, self.mesh.ulysses)

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
        return self.mesh.tensor if self.mesh.tensor_style == "megatron-sp" else 1

    @property
    def weight_ranks(self) -> int:
        return self.mesh.fsdp_ranks if self.job.weight_sharding else 1

    @cached_property
    def experts(self) -> int:
        """Ranks of a group over which experts are sharded; 1: each rank gathers them all."""
        needs = {(layer.mlp.experts, layer.fewest_experts) for layer, _ in self.model.layer_kinds if layer.mlp.experts}
        if self.weight_ranks == 1 or self.mesh.tensor > 1 or not needs:
            return 1
        if self.mesh.experts == "auto":
            return min(most_ranks(count, self.weight_ranks, fewest) for count, fewest in needs)
        return self.mesh.experts

    def expert_layout(self, experts: int) -> ExpertLayout:
        """Return which rank of a group computes which of a layer's experts."""
        return ExpertLayout(experts, self.weight_ranks, self.experts)

    @cached_property
    def groups(self) -> dict[str, tuple[int, int]]:
        """Distance between neighbours, and ranks, of a group along each axis.

        `fsdp` is data x ring x ulysses; so is `experts` x `replicas`.
        """
        mesh = self.mesh
        return {
            "tensor": (1, mesh.tensor),
            "ulysses": (mesh.tensor, mesh.ulysses),
            "sequence": (mesh.tensor, mesh.sequence_ranks),
            "fsdp": (mesh.tensor, mesh.fsdp_ranks),
            "ring": (mesh.tensor * mesh.ulysses, mesh.ring),
            "data": (mesh.tensor * mesh.sequence_ranks, mesh.data),
            "experts": (1, self.experts),
            "replicas": (self.experts, self.weight_ranks // self.experts),
        }

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
