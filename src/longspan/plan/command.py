"""`longspan plan`: its flags; read them, search, show the result."""

from __future__ import annotations

import dataclasses
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from longspan.core.cache import CacheConfig
from longspan.core.errors import LongspanError, require
from longspan.core.memory import LONGEST, MemoryChoice
from longspan.core.model import NamedModel
from longspan.core.parallel import MeshOptions, ParallelConfig
from longspan.core.reading import OneFlag
from longspan.core.validation import LARGEST_JOB, check_number, check_output, write_file
from longspan.plan.hardware import Hardware, read_hardware
from longspan.plan.job import Job
from longspan.plan.memory_options import (
    STEP,
    find_suggestions,
    fixed_options,
    search_longest_context,
    search_memory_options,
)
from longspan.plan.methods import compare
from longspan.plan.search import MOST_GPUS, Search, search
from longspan.plan.shape import ALL_TRAINED, ModelShape, Tuning
from longspan.plan.tower import PictureShape, read_pictures
from longspan.plan.views.report import Report, yaml


@dataclass(frozen=True)
class GpuAsked(OneFlag):
    """A GPU, and what differs from its catalogue's values."""

    name: str = "h100"
    gpus_per_node: int | None = None
    efficiency: float | None = None
    attention_efficiency: float | None = None

    def __post_init__(self) -> None:
        if self.gpus_per_node is not None:
            check_number("gpus_per_node", self.gpus_per_node, 1, LARGEST_JOB)
        for name in ("efficiency", "attention_efficiency"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), 0, 1, above=True)

    def hardware(self) -> Hardware:
        """Read the catalogue, or the file that `name` is, and change the values."""
        changed: dict[str, Any] = {}
        if self.efficiency is not None:
            changed["matmul_efficiency"] = self.efficiency
        if self.attention_efficiency is not None:
            changed |= {
                "attention_efficiency": self.attention_efficiency,
                "attention": {},
                "attention_flops": None,
                "attention_forward_flops": None,
                "attention_block": 0.0,
                "attention_width": 0.0,
            }
        if self.gpus_per_node is not None:
            changed["gpus_per_node"] = self.gpus_per_node
        return dataclasses.replace(read_hardware(self.name), **changed)


@dataclass(frozen=True)
class HardwareFlags:
    """The hardware."""

    gpu: GpuAsked = field(default_factory=GpuAsked)
    """a100-40gb, a100-80gb, h100, h200, b200, mi300x, l40s, cpu, or a .toml: your own, or of `longspan bench`. Options:
    gpus_per_node, joined by the fast link; efficiency and attention_efficiency, the fractions of the peak that matrix
    products (else 0.6) and the attention kernel (else as measured on an H200, or 0.45) reach: h100,gpus_per_node=4."""
    gpus: int = 8
    """Number of GPUs, up to 16,384."""

    def __post_init__(self) -> None:
        check_number("gpus", self.gpus, 1, MOST_GPUS)


@dataclass(frozen=True)
class PlanConfig(NamedModel):
    """Find out what fits on which GPUs, which mesh is best, and what it costs.

    The model is a built-in name (llama-3.1-8b, qwen3-30b-a3b, ...), a config.json or its folder. A GB is 1e9 bytes.
    """

    context: int | Literal["max"] = 131072
    """Tokens per sequence (also 128k or 1M: k is 1024, M is 1024 * 1024). In decode, tokens already in the cache. max:
    the longest that fits, with the memory options that it needs; options that you give stay as they are."""
    batch: int = 1
    """Sequences per step, over all GPUs."""
    mode: Literal["train", "prefill", "decode"] = "train"
    """train: forward, backward, optimizer. prefill: a forward that caches K and V. decode: one new token."""
    fsdp: bool = True
    """Shard weights over data x ring x ulysses. Off: replicate them."""
    tuning: Tuning = ALL_TRAINED
    """What is trained, if not all weights: lora=16 (LoRA of this rank), or all but freeze=*embed_tokens* (patterns of
    names). Options of LoRA: targets=q_proj+v_proj, the ends of the names of modules that get it (else all linear layers
    but the LM head); dora=true, a magnitude of each output, too; quantize=true, frozen weights in 4 bits (QLoRA)."""
    teacher: str | None = None
    """A frozen teacher beside the model, as of `longspan train gkd`: a model as --model. Each step runs its forward."""
    documents: bool = False
    """Plan the memory of packed documents (`packing` of `longspan train`): a ring needs more for them."""
    images: str | None = None
    """Images in each sequence of a vision-language model, as NUMBERxHEIGHTxWIDTH in pixels: 4x1024x768. They come
    first, and their tokens count in --context."""
    video: str | None = None
    """A video in each sequence, as FRAMESxHEIGHTxWIDTH in pixels: 256x448x448. Without images and video the vision
    tower only takes memory for its weights."""
    prefill_chunk: int | None = None
    """Tokens per chunk of a prefill, over all ranks, as `longspan generate` runs it (by default 8k per rank).
    Without it the prompt is one forward."""
    details: bool = False
    """Show also memory and messages item by item, all notes, and the meshes that cannot hold the job."""
    compare: bool = False
    """Show the methods (TP, Megatron SP, FSDP, Ulysses, Ring, USP, LASP-2) side by side."""
    json: bool = False
    """Print JSON (schema longspan.plan/6, see docs/reference/json.md) instead of tables."""
    out: Path | None = None
    """Write the settings of the recommended plan to this YAML file, for --config of the command that runs it."""
    html: Path | None = None
    """Write one self-contained page with sliders for context and GPUs."""
    memory: MemoryChoice = field(default_factory=lambda: MemoryChoice("auto"))
    """Memory options. auto: the fastest that fit, for each mesh. fastest: none. longest: the least memory without
    offload. Options after the word, or alone, are fixed: auto,offload=host or checkpointing=full
    (docs/how-to/memory.md)."""
    cache: CacheConfig = field(default_factory=CacheConfig)
    """The KV cache of prefill and decode, as of `longspan generate`: int8,offload=host."""
    parallel: MeshOptions = field(default_factory=MeshOptions)
    hardware: HardwareFlags = field(default_factory=HardwareFlags)

    @property
    def chooses(self) -> bool:
        """Whether the planner chooses memory options."""
        return self.memory.chooses or self.context == "max"

    def job(self) -> Job:
        """Return the job; with `--context max`, of one token until the longest context is known.

        Raises:
            LongspanError: for sizes that cannot be.
        """
        return Job(
            context=1 if self.context == "max" else self.context,
            batch=self.batch,
            mode=self.mode,
            dtype="fp32" if self.dtype == "fp32" else "bf16",
            weight_sharding=self.fsdp,
            parallel=ParallelConfig(**vars(self.parallel)),
            memory=self.memory.to_memory(),
            cache=self.cache,
            prefill_chunk=self.prefill_chunk,
            documents=self.documents,
        )

    def pictures(self, model: ModelShape) -> tuple[PictureShape, ...]:
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
        super().check()
        self.job()
        self.tuning.check(self.mode)
        for flag, given, modes in (
            (f"--teacher {self.teacher}", self.teacher is not None, ("train",)),
            (f"--images {self.images}", self.images is not None, ("train",)),
            (f"--video {self.video}", self.video is not None, ("train",)),
            (f"--prefill-chunk {self.prefill_chunk}", self.prefill_chunk is not None, ("prefill",)),
            (f"--cache {self.cache}", self.cache != CacheConfig(), ("prefill", "decode")),
        ):
            if given and self.mode not in modes:
                raise LongspanError(
                    f"{flag} is for --mode {' and '.join(modes)}, and --mode is {self.mode}; leave it out"
                )
        if self.context == "max" and self.mode == "decode":
            raise LongspanError(
                "--context max is for --mode train and prefill; in decode the table has the longest cache"
            )
        if self.html is not None:
            check_output("--html", self.html, example="plan.html")
        if self.out is not None:
            check_output("--out", self.out, example="plan.yaml")


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

    model = read_model(config.model, config.tuning)
    if config.teacher is not None:
        model = model.taught_by(read_model(config.teacher))
    hardware = config.hardware.gpu.hardware()
    _check(config, model, hardware)
    job, result = _search(config, model, hardware)
    fastest, suggestions = result.fastest, None
    if result.recommended is None and result.plans and (fastest is None or not fastest.runs):  # memory is the reason
        suggestions = find_suggestions(
            model,
            job,
            config.hardware.gpus,
            hardware,
            fixed_options(model, dict(config.memory.options)),
            config.chooses,
        )
    methods = compare(model, job, config.hardware.gpus, hardware) if config.compare else ()
    report = Report(result, model, job, config.hardware.gpus, hardware, methods, suggestions)
    if config.json:
        print(json.dumps(report.to_dict(), indent=1))
    else:
        from longspan.plan.views.tables import show

        show(report, 6, details=config.details)
    out = sys.stderr if config.json else sys.stdout  # JSON is alone on stdout
    if config.out is not None:
        settings = None if result.recommended is None else yaml(result.recommended)
        if settings is None:
            print(f"nothing is written to {config.out}: no command runs this plan", file=out)
        else:
            write_file("settings", config.out, lambda path: path.write_text(settings, encoding="utf-8"), out)
    if config.html is not None:
        from longspan.plan.views.page import page

        text = page(report)
        write_file("page", config.html, lambda path: path.write_text(text, encoding="utf-8"), out)
    # To train, only a plan that `longspan train` runs counts.
    usable = result.recommended if job.mode == "train" else fastest
    return 0 if usable is not None else 1


def _check(config: PlanConfig, model: ModelShape, hardware: Hardware) -> None:
    """Raise for what no mesh changes: positions that the model cannot have, memory options that the hardware lacks."""
    if config.context != "max":
        model.longer(config.context)
    job = config.job()
    if hardware.on_cpu and (job.memory.cpu_offload or job.memory.offload == "host"):
        flag = "--memory cpu_offload=true" if job.memory.cpu_offload else "--memory offload=host"
        raise LongspanError(
            f"{flag} moves data from a GPU to its host's memory, and --gpu {config.hardware.gpu} has no GPU; leave it "
            "out"
        )


def _search(config: PlanConfig, model: ModelShape, hardware: Hardware) -> tuple[Job, Search]:
    """Return the job, with the context and the memory options of the recommended plan, and what the search found."""
    job = dataclasses.replace(config.job(), pictures=config.pictures(model))
    fixed = fixed_options(model, dict(config.memory.options))
    if config.context == "max":
        if config.memory.level == "longest":
            fixed = {**{f.name: getattr(LONGEST, f.name) for f in dataclasses.fields(LONGEST)}, **fixed}
        best = search_longest_context(model, job, config.hardware.gpus, hardware, fixed)
        if best is None:
            shortest = dataclasses.replace(job, context=STEP)
            suggestions = find_suggestions(model, shortest, config.hardware.gpus, hardware, fixed, chooses=True)
            raise LongspanError(
                f"--context max: not even {STEP:,} tokens fit on {config.hardware.gpus} x {hardware.name}. "
                f"{suggestions.describe()}"
            )
        job = dataclasses.replace(best.job, memory=job.memory)
        result = search_memory_options(model, job, config.hardware.gpus, hardware, fixed)
    elif config.memory.level == "auto":
        result = search_memory_options(model, job, config.hardware.gpus, hardware, fixed)
    else:
        return job, search(model, job, config.hardware.gpus, hardware)
    chosen = result.recommended or next(iter(result.plans), None)
    return (job if chosen is None else dataclasses.replace(job, memory=chosen.job.memory)), result
