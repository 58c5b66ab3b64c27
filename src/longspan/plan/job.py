"""What to plan: the job, the mesh, and the share of the job on one rank."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from longspan.core.cache import CACHE_DTYPES, OFFLOADS, CacheDtype, CacheOffload, is_sharded
from longspan.core.errors import LongspanError
from longspan.core.heads import HeadShard, split_groups, split_heads
from longspan.core.layout import LAYOUTS, Layout, LayoutName, choose_layout
from longspan.core.memory import FASTEST, Memory
from longspan.core.parallel import AXES, RING_IMPLS, TENSOR_STYLES, RingImpl, TensorStyle
from longspan.core.tile_sizes import layers_held, layers_per_checkpoint
from longspan.core.validation import LARGEST_COUNT, check_choice, check_flag, check_number, format_value

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
        layout: how tokens are placed over a ring; see `SequenceSharding`.
        ring_impl: how keys and values go round the ring; `auto` decides by `longspan.core.routes.choose_ring_impl`.
        overlap_chunks: chunks of heads in which the all-to-all overlaps with attention; see `SequenceSharding`.
        wire_dtype: wire dtype of the all-to-all: "exact", or lossy "int8" or "fp8". The time to convert is not
            counted.
        cache: dtype of the KV cache (`longspan.core.cache.CACHE_DTYPES`).
        cache_offload: where the KV cache is stored (`longspan.core.cache.OFFLOADS`).
        cache_latent: cache MLA's latent vectors if they are smaller (`longspan.core.cache.holds_latent`).
        prefill_chunk: tokens per chunk of a prompt, over all ranks, as `longspan generate` runs it: keys and values
            stay in the cache, and queries are sent. None: the whole prompt in one forward.
    """

    context: int
    batch: int = 1
    mode: Mode = "train"
    dtype: Literal["bf16", "fp32"] = "bf16"
    weight_sharding: bool = True
    memory: Memory = FASTEST
    kv_replication: bool = True
    tensor_style: TensorStyle = "tp"
    layout: LayoutName = "auto"
    ring_impl: RingImpl = "auto"
    overlap_chunks: int = 1
    wire_dtype: CacheDtype = "exact"
    cache: CacheDtype = "exact"
    cache_offload: CacheOffload = "none"
    cache_latent: bool = True
    prefill_chunk: int | None = None

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
        for name, value in (("prefill-chunk", self.prefill_chunk), ("overlap-chunks", self.overlap_chunks)):
            if value is not None:
                check_number(name, value, 1, LARGEST_COUNT, whole=True)
        for name in ("weight_sharding", "kv_replication", "cache_latent"):
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
    def forwards(self) -> int:
        """Forwards per step: one per chunk of a prompt, else 1."""
        return 1 if self.mode != "prefill" or self.prefill_chunk is None else -(-self.context // self.prefill_chunk)

    @property
    def bytes_per_element(self) -> int:
        """Bytes of one element of an activation or a gathered weight."""
        return 2 if self.dtype == "bf16" else 4

    @property
    def bytes_per_weight(self) -> int:
        """Bytes of one weight at rest."""
        return 4 if self.mode == "train" else self.bytes_per_element


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

    def stride(self, axis: str) -> int:
        """Return the distance between neighbours of a group along `axis`; `fsdp` is data x ring x ulysses."""
        return self._groups[axis][0]

    def size(self, axis: str) -> int:
        """Return the ranks of a group along `axis`."""
        return self._groups[axis][1]

    @cached_property
    def _groups(self) -> dict[str, tuple[int, int]]:
        """Stride and ranks of a group along each axis."""
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


# ---------------------------------------------------------------------------------------------------------------------
# The share of a job on one rank.


def layout_of(job: Job, mesh: Mesh) -> Layout:
    """Return which rank of a sequence group holds which tokens, as `SequenceSharding` decides it."""
    return choose_layout(job.layout, mesh.ring, mesh.ulysses)


def micro_batches(job: Job, mesh: Mesh) -> int:
    """Return the forward-backward passes per step: in training a replica runs its sequences one at a time."""
    return max(1, job.batch // mesh.data) if job.mode == "train" else 1


def local_batch(job: Job, mesh: Mesh) -> int:
    """Return the sequences on a GPU at a time."""
    return 1 if job.mode == "train" else max(1, -(-job.batch // mesh.data))


def local_tokens(job: Job, mesh: Mesh) -> int:
    """Return one sequence's tokens on a rank, padding included; in decode the one new token, which every rank holds."""
    return 1 if job.mode == "decode" else layout_of(job, mesh).local_length(job.context)


def prompt_chunks(job: Job) -> list[tuple[int, int]]:
    """Return (tokens of a chunk over all ranks, number of such chunks) for a prompt in chunks."""
    assert job.prefill_chunk is not None
    full, rest = divmod(job.context, job.prefill_chunk)
    return [(tokens, count) for tokens, count in ((job.prefill_chunk, full), (rest, 1)) if tokens and count]


def forwards_of(job: Job, mesh: Mesh) -> list[tuple[int, int]]:
    """Return (one sequence's tokens on a rank, number of such forwards) for the forwards of a step.

    A chunk of a prompt that is too short to be cut is computed by every rank.
    """
    if job.mode != "prefill" or job.prefill_chunk is None:
        return [(local_tokens(job, mesh), 1)]
    layout = layout_of(job, mesh)
    return [(layout.local_length(n) if is_sharded(layout, n) else n, count) for n, count in prompt_chunks(job)]


def layer_passes(job: Job) -> tuple[int, int]:
    """Return how often a layer's forward and its backward run per micro-batch."""
    if job.mode != "train":
        return 1, 0
    return (1 if job.memory.checkpointing == "none" else 2), 1


def attention_passes(job: Job) -> tuple[int, int]:
    """Return how often a layer's attention runs, forward and backward.

    If checkpointing saves the attention's result, all-to-all, ring and kernel do not run again with the layer.
    """
    if job.mode != "train":
        return 1, 0
    return (2 if job.memory.checkpointing == "full" else 1), 1


def recomputed_inputs(layers: int, job: Job) -> int:
    """Return how many layers run a further forward to recompute the next layer's input.

    These are all layers but the last of each group of `Memory.layers_per_checkpoint`.
    """
    if job.mode != "train" or job.memory.checkpointing == "none":
        return 0
    return layers - layers_held(layers, layers_per_checkpoint(layers, job.memory.layers_per_checkpoint))[0]


@functools.lru_cache(maxsize=4096)
def head_shards(q_heads: int, kv_heads: int, tensor: int, ulysses: int) -> tuple[HeadShard, ...]:
    """Return the heads of each Ulysses rank, on the tensor rank that has most heads."""
    most = max(split_groups(q_heads, kv_heads, tensor), key=lambda shard: (shard.q_heads, shard.kv_heads))
    return split_heads(most.q_heads, most.kv_heads, ulysses)
