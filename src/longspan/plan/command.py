"""`longspan plan`: its flags; read them, search, show the result."""

from __future__ import annotations

import dataclasses
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from longspan.core.cache import CacheConfig, CacheDtype, CacheOffload
from longspan.core.errors import LongspanError, require
from longspan.core.memory import LONGEST, MemoryFlags, MemoryLevel, flags_last
from longspan.core.parallel import ParallelConfig
from longspan.core.rope import RopeChoice, RopeFlags, scaling_for
from longspan.core.validation import LARGEST_COUNT, LARGEST_JOB, check_number, check_output, write_file
from longspan.plan.hardware import Hardware, read_hardware
from longspan.plan.job import Job
from longspan.plan.methods import compare
from longspan.plan.options import STEP, find_suggestions, fixed_options, longest, search_memory_options
from longspan.plan.search import MOST_GPUS, Search, search
from longspan.plan.shape import ModelShape, Tuning
from longspan.plan.tower import Pictures, read_pictures
from longspan.plan.views.report import Report


@flags_last
@dataclass(frozen=True)
class PlanConfig(MemoryFlags, RopeFlags):
    """Find out what fits on which GPUs, which mesh is best, and what it costs.

    A GB is 1e9 bytes.
    """

    default_level: ClassVar[MemoryLevel] = "auto"

    model: str
    """A built-in name (llama-3.1-8b, qwen3-30b-a3b, ...) or the path of a Hugging Face config.json or its folder."""
    gpu: str = "h100"
    """a100-40gb, a100-80gb, h100, h200, b200, mi300x, l40s, cpu, or a .toml: your own, or of `longspan bench`."""
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
    fsdp: bool = True
    """Shard weights over data x ring x ulysses. Off: replicate them."""
    parallel: ParallelConfig = field(
        default_factory=ParallelConfig,
        metadata={"only": ("layout", "ring_impl", "overlap_chunks", "wire_dtype", "experts")},
    )
    """How ranks share the work; the plan chooses the mesh."""
    lora: int | None = None
    """Train LoRA of this rank, and nothing else, as `use_peft` of `longspan train`."""
    lora_targets: tuple[str, ...] = ()
    """Modules that get LoRA, by the ends of their names. By default all linear layers but the LM head."""
    dora: bool = False
    """Train a magnitude for each output of a target beside LoRA (DoRA)."""
    quantize: Literal["none", "nf4"] = "none"
    """nf4: store the frozen weights of linear layers in 4 bits (QLoRA). Needs --lora."""
    freeze: tuple[str, ...] = ()
    """Weights that are not trained: patterns of their names, such as "*embed_tokens*" or "*.layers.0.*"."""
    documents: bool = False
    """Plan the memory of packed documents (`packing` of `longspan train`), which a ring needs more of."""
    images: str | None = None
    """Images in each sequence of a vision-language model, as NUMBERxHEIGHTxWIDTH in pixels: 4x1024x768. They come
    first, and their tokens count in --context."""
    video: str | None = None
    """A video in each sequence, as FRAMESxHEIGHTxWIDTH in pixels: 256x448x448. Without images and video the vision
    tower only takes memory for its weights."""
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
    """Fraction of the peak that the attention kernel reaches, instead of what was measured on an H200 (for H100 and
    H200), or 0.45."""
    gpus_per_node: int | None = None
    """GPUs joined by the fast link, instead of the catalogue's."""

    top: int = 6
    """Number of meshes in the table."""
    details: bool = False
    """Show also memory and messages item by item, all notes, and the meshes that cannot hold the job."""
    compare: bool = False
    """Show the methods (TP, Megatron SP, FSDP, Ulysses, Ring, USP, LASP-2) side by side."""
    json: bool = False
    """Print JSON (schema longspan.plan/6, see docs/reference/json.md) instead of tables."""
    html: Path | None = None
    """Write one self-contained page with sliders for context and GPUs."""
    rope_scaling: RopeChoice = field(default="auto", kw_only=True)
    """RoPE scaling in the printed file. auto: yarn (or linear, if the model has it) if the context needs it. as-is:
    none, and longer contexts are refused. Or linear, dynamic (NTK), yarn or longrope."""

    @property
    def chooses(self) -> bool:
        """Whether the planner chooses memory options."""
        return super().chooses or self.context == "max"

    def job(self) -> Job:
        """Return the job; with `--context max`, of one token until the longest context is known.

        Raises:
            LongspanError: for sizes that cannot be.
        """
        return Job(
            context=1 if self.context == "max" else self.context,
            batch=self.batch,
            mode=self.mode,
            dtype=self.dtype,
            weight_sharding=self.fsdp,
            parallel=self.parallel,
            memory=self.to_memory(),
            cache=CacheConfig(self.cache, self.cache_offload, self.cache_latent),
            kv_replication=self.kv_replication,
            prefill_chunk=self.prefill_chunk,
            documents=self.documents,
        )

    @property
    def tuning(self) -> Tuning:
        """Which weights are trained."""
        return Tuning(self.lora, self.lora_targets, self.freeze, self.dora, self.quantize == "nf4")

    def pictures(self, model: ModelShape) -> tuple[Pictures, ...]:
        """Return the images and the video of each sequence.

        Raises:
            LongspanError: for sizes that cannot be, or a model without a vision tower.
        """
        found = []
        for flag, text in (("--images", self.images), ("--video", self.video)):
            if text is not None and model.tower is None:
                raise LongspanError(f"{flag} {text}: {model.name} has no vision tower; leave {flag} out")
            if text is not None and model.tower is not None:
                found.append(read_pictures(flag, text, model.tower))
        return tuple(found)

    def check(self) -> None:
        """Raise for impossible sizes and combinations, before anything is read."""
        self.job()
        self.rope()
        self.tuning.check(self.mode)
        for flag, given, modes in (
            (f"--images {self.images}", self.images is not None, ("train",)),
            (f"--video {self.video}", self.video is not None, ("train",)),
            (f"--prefill-chunk {self.prefill_chunk}", self.prefill_chunk is not None, ("prefill",)),
            (f"--cache {self.cache}", self.cache != "exact", ("prefill", "decode")),
            ("--no-cache-latent", not self.cache_latent, ("prefill", "decode")),
            (f"--cache-offload {self.cache_offload}", self.cache_offload != "none", ("prefill", "decode")),
        ):
            if given and self.mode not in modes:
                raise LongspanError(
                    f"{flag} is for --mode {' and '.join(modes)}, and --mode is {self.mode}; leave it out"
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
            if getattr(self, name) is not None:
                check_number(f"--{name.replace('_', '-')}", getattr(self, name), 0, 1, above=True)
        if self.html is not None:
            check_output("--html", self.html, example="plan.html")


def run(config: PlanConfig) -> int:
    """Plan, and print the result.

    Returns:
        0 if something fits, else 1.

    Raises:
        LongspanError: for an unknown model or GPU, impossible sizes, or a file that cannot be written.
    """
    config.check()
    require("longspan plan", "transformers")
    from longspan.plan.from_model import read_model

    model = read_model(config.model, config.tuning, config.rope())
    hardware = _hardware(config)
    _check(config, model, hardware)
    job, result = _search(config, model, hardware)
    fastest, suggestions = result.fastest, None
    if result.recommended is None and result.plans and (fastest is None or not fastest.runs):  # memory is the reason
        suggestions = find_suggestions(
            model, job, config.gpus, hardware, fixed_options(model, config.fixed()), config.chooses
        )
    methods = compare(model, job, config.gpus, hardware) if config.compare else ()
    report = Report(result, model, job, config.gpus, hardware, methods, suggestions)
    if config.json:
        print(json.dumps(report.to_dict(), indent=1))
    else:
        from longspan.plan.views.tables import show

        show(report, config.top, details=config.details)
    if config.html is not None:
        from longspan.plan.views.page import page

        text = page(report)
        out = sys.stderr if config.json else sys.stdout  # JSON is alone on stdout
        write_file("page", config.html, lambda path: path.write_text(text, encoding="utf-8"), out)
    # To train, only a plan that `longspan train` runs counts.
    usable = result.recommended if job.mode == "train" else fastest
    return 0 if usable is not None else 1


def _check(config: PlanConfig, model: ModelShape, hardware: Hardware) -> None:
    """Raise for what no mesh changes: positions that the model cannot have, memory options that the hardware lacks."""
    if config.context != "max":
        scaling_for(model.positions, model.rope, config.context, model.name)
    job = config.job()
    if hardware.on_cpu and (job.memory.cpu_offload or job.memory.offload == "host"):
        flag = "--cpu-offload" if job.memory.cpu_offload else "--offload host"
        raise LongspanError(
            f"{flag} moves data from a GPU to its host's memory, and --gpu {config.gpu} has no GPU; leave it out"
        )


def _search(config: PlanConfig, model: ModelShape, hardware: Hardware) -> tuple[Job, Search]:
    """Return the job, with the context and the memory options of the recommended plan, and what the search found."""
    job = dataclasses.replace(config.job(), pictures=config.pictures(model))
    fixed = fixed_options(model, config.fixed())
    if config.context == "max":
        if config.level == "longest":
            fixed = {**{f.name: getattr(LONGEST, f.name) for f in dataclasses.fields(LONGEST)}, **fixed}
        best = longest(model, job, config.gpus, hardware, fixed)
        if best is None:
            shortest = dataclasses.replace(job, context=STEP)
            suggestions = find_suggestions(model, shortest, config.gpus, hardware, fixed, chooses=True)
            raise LongspanError(
                f"--context max: not even {STEP:,} tokens fit on {config.gpus} x {hardware.name}. "
                f"{suggestions.describe()}"
            )
        job = dataclasses.replace(best.job, memory=job.memory)
        result = search_memory_options(model, job, config.gpus, hardware, fixed)
    elif config.level == "auto":
        result = search_memory_options(model, job, config.gpus, hardware, fixed)
    else:
        return job, search(model, job, config.gpus, hardware)
    chosen = result.recommended or next(iter(result.plans), None)
    return (job if chosen is None else dataclasses.replace(job, memory=chosen.job.memory)), result


def _hardware(config: PlanConfig) -> Hardware:
    hardware = read_hardware(config.gpu)
    changed: dict[str, Any] = {}
    if config.efficiency is not None:
        changed["matmul_efficiency"] = config.efficiency
    if config.attention_efficiency is not None:
        changed |= {
            "attention_efficiency": config.attention_efficiency,
            "attention": {},
            "attention_flops": None,
            "attention_forward_flops": None,
            "attention_block": 0.0,
            "attention_width": 0.0,
        }
    if config.gpus_per_node is not None:
        changed["gpus_per_node"] = config.gpus_per_node
    return dataclasses.replace(hardware, **changed)
