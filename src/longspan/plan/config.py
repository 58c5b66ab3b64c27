"""Everything `longspan plan` can be asked for."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from longspan.core.cache_dtype import CacheDtype, CacheOffload
from longspan.core.errors import LongspanError
from longspan.core.memory import MemoryLevel
from longspan.core.memory_flags import MemoryFlags, flags_last
from longspan.core.parallel import ParallelConfig
from longspan.core.rope import RopeChoice, RopeFlags
from longspan.core.validation import LARGEST_COUNT, LARGEST_JOB, check_number, check_output
from longspan.plan.job import Job
from longspan.plan.search import MOST_GPUS


@flags_last
@dataclass(frozen=True)
class PlanConfig(MemoryFlags, RopeFlags):
    """What fits on which GPUs, which mesh is best, and what it costs, before anyone rents one.

    Needs neither torch nor a GPU. A GB is 1e9 bytes.
    """

    default_level: ClassVar[MemoryLevel] = "auto"

    model: str
    """A built-in name (llama-3.1-8b, qwen3-30b-a3b, ...) or the path of a Hugging Face config.json or its folder."""
    gpu: str = "h100"
    """a100-40gb, a100-80gb, h100, h200, b200, mi300x, l40s, cpu, or a .toml: your own, or what `longspan bench link`
    wrote."""
    gpus: int = 8
    """GPUs in all, up to 16,384."""
    context: int | Literal["max"] = 131072
    """Tokens of one sequence (also 128k or 1M: k is 1024, M is 1024 * 1024). In decode those already in the cache. max:
    the longest that fits, with the memory options that it takes; those that are given stay as they are."""
    batch: int = 1
    """Sequences of one step, over all GPUs."""
    mode: Literal["train", "prefill", "decode"] = "train"
    """train: forward, backward, optimizer. prefill: a forward that keeps K and V. decode: one token more."""
    dtype: Literal["bf16", "fp32"] = "bf16"
    """Of activations and gathered weights. Training in bf16 keeps weights, gradients and optimizer in fp32."""
    optimizer: Literal["adamw", "sgd"] = "adamw"
    """adamw keeps 8 bytes per weight, sgd none."""
    fsdp: bool = True
    """Shard weights over data x ring x ulysses. Off: whole on every GPU."""
    tiled_loss: bool = True
    """Never hold all logits, a tile at a time only."""
    parallel: ParallelConfig = field(
        default_factory=ParallelConfig, metadata={"only": ("layout", "ring_impl", "wire_dtype")}
    )
    """How ranks share the work; the plan chooses the mesh."""
    overlap_chunks: int = 1
    """Chunks of heads in which the Ulysses exchange goes, each beside the attention of another. 1: all at once."""
    cache: CacheDtype = "exact"
    """How the KV cache of prefill and decode is kept: as the model computes it, or (an approximation) by int8 or fp8 a
    byte per element and an fp32 scale per head and token."""
    cache_offload: CacheOffload = "none"
    """Where the KV cache of prefill and decode lies. host: in the host's memory; the GPU has two layers of it at a
    time, that which runs and the next."""
    cache_latent: bool = True
    """Of DeepSeek's attention (MLA) the KV cache holds the vectors that keys and values are made of, where that is less
    on these ranks. --no-cache-latent: keys and values, as of any attention."""
    prefill_chunk: int | None = None
    """Of prefill: so many tokens at once, over all ranks, as `longspan generate` runs it (by default 8k for each rank).
    Without it all tokens at once, as in any forward."""
    kv_replication: bool = True
    """Allow one KV head on several ranks where there are more Ulysses ranks than KV heads."""
    efficiency: float | None = None
    """The part of the GPU's peak that matrix products reach, in place of the catalogue's 0.6."""
    attention_efficiency: float | None = None
    """The same of the attention kernel, in place of 0.45."""
    gpus_per_node: int | None = None
    """GPUs joined by the fast link, in place of the catalogue's."""

    top: int = 6
    """Meshes that the table shows."""
    memory_options: bool = False
    """Show what each memory option alone saves and costs, and the longest context with it."""
    compare: bool = False
    """Show the methods (TP, Megatron SP, FSDP, Ulysses, Ring, USP, LASP-2) side by side."""
    json: bool = False
    """Print JSON (schema longspan.plan/3, see docs/plan.md) instead of tables."""
    html: Path | None = None
    """Write one self-contained page with sliders for context and GPUs, and switches for checkpointing, memory options,
    kind of GPU and batch."""
    png: Path | None = None
    """Draw memory and time against context (needs matplotlib)."""
    rope_scaling: RopeChoice = field(default="auto", kw_only=True)
    """How rotary positions go on beyond those of the model, in the command that is printed: by yarn (or linear, where
    the model has that) where the context needs it (auto), not at all (as-is: such a context is refused), or by linear,
    dynamic (NTK), yarn or longrope scaling."""

    @property
    def chooses(self) -> bool:
        """Whether the planner chooses memory options."""
        return super().chooses or self.context == "max"

    def job(self) -> Job:
        """The job that is asked for; `max` stands for one token, until the longest context is found.

        Raises:
            LongspanError: for sizes that cannot be.
        """
        return Job(
            context=1 if self.context == "max" else self.context,
            batch=self.batch,
            mode=self.mode,
            dtype=self.dtype,
            optimizer=self.optimizer,
            weight_sharding=self.fsdp,
            memory=self.levels(),
            tiled_loss=self.tiled_loss,
            kv_replication=self.kv_replication,
            layout=self.parallel.layout,
            ring_impl=self.parallel.ring_impl,
            overlap_chunks=self.overlap_chunks,
            wire_dtype=self.parallel.wire_dtype,
            cache=self.cache,
            cache_offload=self.cache_offload,
            cache_latent=self.cache_latent,
            prefill_chunk=self.prefill_chunk,
        )

    def check(self) -> None:
        """Refuse sizes that cannot be, before anything is read.

        Raises:
            LongspanError: with the number and the way out.
        """
        self.job()
        self.rope()
        if self.prefill_chunk is not None and self.mode != "prefill":
            raise LongspanError(
                f"--prefill-chunk {self.prefill_chunk} is of --mode prefill, and the mode is {self.mode}; leave it out"
            )
        if self.cache != "exact" and self.mode == "train":
            raise LongspanError(
                f"--cache {self.cache} is of --mode prefill and decode, and training keeps no cache; leave it out"
            )
        if not self.cache_latent and self.mode == "train":
            raise LongspanError(
                "--no-cache-latent is of --mode prefill and decode, and training keeps no cache; leave it out"
            )
        if self.cache_offload != "none" and self.mode == "train":
            raise LongspanError(
                f"--cache-offload {self.cache_offload} is of --mode prefill and decode, and training keeps no cache; "
                f"leave it out"
            )
        if self.context == "max" and self.mode == "decode":
            raise LongspanError("--context max is for train and prefill; of decode the table has the longest cache")
        check_number("--gpus", self.gpus, 1, MOST_GPUS)
        check_number("--top", self.top, 1, LARGEST_COUNT)
        if self.gpus_per_node is not None:
            check_number("--gpus-per-node", self.gpus_per_node, 1, LARGEST_JOB)
        for name in ("efficiency", "attention_efficiency"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= 1:
                raise LongspanError(f"--{name.replace('_', '-')} must be above 0 and at most 1, got {value}")
        for name in ("html", "png"):
            if getattr(self, name) is not None:
                check_output(f"--{name}", getattr(self, name), example=f"plan.{name}")
