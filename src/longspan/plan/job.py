"""What is to be planned: the job, and the mesh it may run on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from longspan.core.cache_dtype import CACHE_DTYPES, OFFLOADS, CacheDtype, CacheOffload
from longspan.core.errors import LongspanError
from longspan.core.layout import Layout, LayoutName, choose_layout, layout_names
from longspan.core.memory import FASTEST, Memory
from longspan.core.validation import LARGEST_COUNT, check_flag, check_number, spell

Mode = Literal["train", "prefill", "decode"]
TensorStyle = Literal["tp", "megatron-sp"]
RingImpl = Literal["auto", "p2p", "allgather"]

AXES = ("data", "ring", "ulysses", "tensor")
"""Outermost first: neighbours in rank order share the axes to the right (as in `longspan.comm.mesh`)."""

RUNS = AXES
"""The axes that this version of longspan runs; others would be planned from their formulas."""


_FLAGS = ("weight_sharding", "tiled_loss", "kv_replication", "cache_latent")


@dataclass(frozen=True)
class Job:
    """What is computed in one step.

    Attributes:
        context: tokens of one sequence; for `decode` those already in the cache.
        batch: sequences of one step, over all GPUs. A data-parallel replica takes batch / data of them, one after the
            other where there are several (gradient accumulation), as `longspan train` does.
        mode: `train` (forward, backward, optimizer), `prefill` (forward, keeping K and V) or `decode` (one new token
            for every sequence).
        dtype: of activations and gathered weights. Training in bf16 keeps weights, gradients and optimizer in fp32.
        optimizer: `adamw` keeps two fp32 numbers per weight, `sgd` none.
        weight_sharding: FSDP over data x ring x ulysses, or whole weights on every GPU.
        memory: the memory options that save memory, as `longspan.parallelize(memory=...)` takes them. A forward alone
            keeps
            nothing for a backward: of prefill and decode only `tiled_mlp`, `head_chunks` and `cpu_offload` change
            anything.
        tiled_loss: logits exist a tile at a time, never whole, as in training by default.
        kv_replication: whether one KV head may go to several ranks.
        tensor_style: how tensor parallelism sums: AllReduce, or AllGather + ReduceScatter (Megatron SP).
        layout: how tokens lie over a ring, as `SequenceSharding` takes it: `zigzag`, `contiguous`, another that is
            registered, or `auto` (zigzag).
        ring_impl: how keys and values are sent: `p2p`, `allgather`, or `auto` (`choose_ring_impl`).
        overlap_chunks: in how many chunks of heads the exchange goes, beside the attention, as `SequenceSharding`
            takes it; 1: all at once.
        wire_dtype: how it travels, likewise: "exact", or lossy, "int8" or "fp8". Bytes and their time are counted,
            coding's own time is not.
        cache: how keys and values are kept (`longspan.core.cache_dtype.CACHE_DTYPES`).
        cache_offload: where they lie (`longspan.core.cache_dtype.OFFLOADS`).
        cache_latent: of MLA, hold latent vectors where they take less (`longspan.core.cache_dtype.holds_latent`).
        prefill_chunk: of `prefill`, tokens at once over all ranks, behind those in the cache, as `longspan generate`
            runs it: keys and values stay where they are, and queries travel. None: all tokens at once, as any forward.
    """

    context: int
    batch: int = 1
    mode: Mode = "train"
    dtype: Literal["bf16", "fp32"] = "bf16"
    optimizer: Literal["adamw", "sgd"] = "adamw"
    weight_sharding: bool = True
    memory: Memory = FASTEST
    tiled_loss: bool = True
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
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise LongspanError(f"{name.replace('_', '-')}={spell(value)} must be an integer of at least 1")
            check_number(name.replace("_", "-"), value, 1, LARGEST_COUNT)
        for name, choices in (
            ("mode", ("train", "prefill", "decode")),
            ("dtype", ("bf16", "fp32")),
            ("optimizer", ("adamw", "sgd")),
            ("tensor_style", ("tp", "megatron-sp")),
            ("layout", layout_names()),
            ("ring_impl", ("auto", "p2p", "allgather")),
            ("wire_dtype", CACHE_DTYPES),
            ("cache", CACHE_DTYPES),
            ("cache_offload", OFFLOADS),
        ):
            value = getattr(self, name)
            if not isinstance(value, str) or value not in choices:
                raise LongspanError(f"{name}={spell(value)} is unknown; choose {', '.join(choices)}")
        if self.prefill_chunk is not None:
            check_number("prefill-chunk", self.prefill_chunk, 1, LARGEST_COUNT, whole=True)
        check_number("overlap-chunks", self.overlap_chunks, 1, LARGEST_COUNT, whole=True)
        for name in _FLAGS:
            check_flag(name, getattr(self, name))
        if not isinstance(self.memory, Memory):
            raise LongspanError(f"memory is {spell(self.memory)}; make one with longspan.core.memory.Memory")
        if self.wire_dtype != "exact" and (self.mode == "decode" or self.prefill_chunk is not None):
            raise LongspanError(
                f"wire-dtype={self.wire_dtype}: with a KV cache the exchange is exact; leave it out of mode "
                f"decode and of prefill-chunk"
            )
        if self.memory.cpu_offload and not self.weight_sharding:
            raise LongspanError("cpu_offload moves what FSDP shards, and weight_sharding is off; leave one of them")

    @property
    def forwards(self) -> int:
        """Of a prompt in chunks as many; else 1."""
        return 1 if self.mode != "prefill" or self.prefill_chunk is None else -(-self.context // self.prefill_chunk)

    @property
    def bytes_per_element(self) -> int:
        """Of an activation or a gathered weight."""
        return 2 if self.dtype == "bf16" else 4

    @property
    def bytes_per_weight(self) -> int:
        """Of a weight at rest."""
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
            size = getattr(self, axis)
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise LongspanError(f"{axis}={spell(size)} must be an integer of at least 1")

    @property
    def gpus(self) -> int:
        """All of them."""
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
        """Ranks between neighbours of a group along `axis`; `fsdp` is data x ring x ulysses."""
        return {
            "tensor": 1,
            "ulysses": self.tensor,
            "sequence": self.tensor,
            "fsdp": self.tensor,
            "ring": self.tensor * self.ulysses,
            "data": self.tensor * self.sequence,
        }[axis]

    def size(self, axis: str) -> int:
        """Ranks of a group along `axis`."""
        return {"fsdp": self.weights, "sequence": self.sequence}.get(axis) or int(getattr(self, axis))

    def __str__(self) -> str:
        named = [f"{axis}={getattr(self, axis)}" for axis in AXES if getattr(self, axis) > 1]
        return " ".join(named) or "one GPU"


def layout_of(job: Job, mesh: Mesh) -> Layout:
    """Which rank of a sequence group holds which tokens: as `SequenceSharding` decides it."""
    return choose_layout(job.layout, mesh.ring, mesh.ulysses)
