"""The flags of `longspan plan`."""

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
    """Find out what fits on which GPUs, which mesh is best, and what it costs.

    Needs neither torch nor a GPU. A GB is 1e9 bytes.
    """

    default_level: ClassVar[MemoryLevel] = "auto"

    model: str
    """A built-in name (llama-3.1-8b, qwen3-30b-a3b, ...) or the path of a Hugging Face config.json or its folder."""
    gpu: str = "h100"
    """a100-40gb, a100-80gb, h100, h200, b200, mi300x, l40s, cpu, or a .toml: your own, or written by `longspan bench
    link`."""
    gpus: int = 8
    """Number of GPUs, up to 16,384."""
    context: int | Literal["max"] = 131072
    """Tokens per sequence (also 128k or 1M: k is 1024, M is 1024 * 1024). In decode, tokens already in the cache. max:
    the longest that fits, with the memory options that it needs; options that you give stay as they are."""
    batch: int = 1
    """Sequences per step, over all GPUs."""
    mode: Literal["train", "prefill", "decode"] = "train"
    """train: forward, backward, optimizer. prefill: a forward that caches K and V. decode: one new token."""
    dtype: Literal["bf16", "fp32"] = "bf16"
    """Of activations and gathered weights. bf16 training stores weights, gradients and optimizer in fp32."""
    optimizer: Literal["adamw", "sgd"] = "adamw"
    """adamw stores 8 bytes per weight, sgd none."""
    fsdp: bool = True
    """Shard weights over data x ring x ulysses. Off: replicate them."""
    tiled_loss: bool = True
    """Compute the loss over tiles of logits, never all of them."""
    parallel: ParallelConfig = field(
        default_factory=ParallelConfig, metadata={"only": ("layout", "ring_impl", "wire_dtype")}
    )
    """How ranks share the work; the plan chooses the mesh."""
    overlap_chunks: int = 1
    """Chunks of heads of the Ulysses all-to-all, each overlapped with the attention of another. 1: no overlap."""
    cache: CacheDtype = "exact"
    """Dtype of the KV cache of prefill and decode: exact, or (LOSSY) int8 or fp8 with an fp32 scale per head and
    token."""
    cache_offload: CacheOffload = "none"
    """Where the KV cache of prefill and decode is stored. host: in the host's memory; the GPU holds two layers of it,
    the current and the next."""
    cache_latent: bool = True
    """Cache the latent vectors of DeepSeek's attention (MLA) if they are smaller on these ranks. --no-cache-latent:
    cache keys and values."""
    prefill_chunk: int | None = None
    """Tokens per chunk of a prefill, over all ranks, as `longspan generate` runs it (by default 8k per rank).
    Without it the prompt is one forward."""
    kv_replication: bool = True
    """Allow one KV head on several ranks, for more Ulysses ranks than KV heads."""
    efficiency: float | None = None
    """Fraction of the GPU's peak that matrix products reach, instead of the catalogue's 0.6."""
    attention_efficiency: float | None = None
    """Fraction of the peak that the attention kernel reaches, instead of 0.45."""
    gpus_per_node: int | None = None
    """GPUs joined by the fast link, instead of the catalogue's."""

    top: int = 6
    """Number of meshes in the table."""
    memory_options: bool = False
    """Show what each memory option alone saves and costs, and its longest context."""
    compare: bool = False
    """Show the methods (TP, Megatron SP, FSDP, Ulysses, Ring, USP, LASP-2) side by side."""
    json: bool = False
    """Print JSON (schema longspan.plan/3, see docs/reference/json.md) instead of tables."""
    html: Path | None = None
    """Write one self-contained page with sliders for context and GPUs, and switches for memory options, kind of GPU and
    batch."""
    png: Path | None = None
    """Draw memory and time against context (needs matplotlib)."""
    rope_scaling: RopeChoice = field(default="auto", kw_only=True)
    """RoPE scaling in the printed command. auto: yarn (or linear, if the model has it) if the context needs it. as-is:
    none, and longer contexts are refused. Or linear, dynamic (NTK), yarn or longrope."""

    @property
    def chooses(self) -> bool:
        """Whether the planner chooses memory options."""
        return super().chooses or self.context == "max"

    def job(self) -> Job:
        """Return the job; with `--context max`, of one token until the longest context is found.

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
            memory=self.to_memory(),
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
        """Raise for impossible sizes and combinations, before anything is read."""
        self.job()
        self.rope()
        if self.prefill_chunk is not None and self.mode != "prefill":
            raise LongspanError(
                f"--prefill-chunk {self.prefill_chunk} is for --mode prefill, and --mode is {self.mode}; leave it out"
            )
        if self.mode == "train":
            for flag, given in (
                (f"--cache {self.cache}", self.cache != "exact"),
                ("--no-cache-latent", not self.cache_latent),
                (f"--cache-offload {self.cache_offload}", self.cache_offload != "none"),
            ):
                if given:
                    raise LongspanError(
                        f"{flag} is for --mode prefill and decode, and training has no KV cache; leave it out"
                    )
        if self.context == "max" and self.mode == "decode":
            raise LongspanError(
                "--context max is for --mode train and prefill; in decode the table has the longest cache"
            )
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
