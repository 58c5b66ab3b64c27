"""A plan as plain data (`longspan plan --json`), and as the command that runs it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from longspan.core.memory import FASTEST, LONGEST, Memory, flags_to_add
from longspan.plan.hardware import Hardware
from longspan.plan.job import Job, Mesh
from longspan.plan.methods import Method
from longspan.plan.names import weights_flag
from longspan.plan.options import Suggestions
from longspan.plan.search import Plan, Search
from longspan.plan.shape import ModelShape

SCHEMA = "longspan.plan/5"
"""Name and version of the JSON. A key may be added under one version; none changes its meaning or goes."""


@dataclass(frozen=True)
class Report:
    """What `longspan plan` found."""

    result: Search
    model: ModelShape
    job: Job
    gpus: int  # number of GPUs
    hardware: Hardware  # the kind of GPU
    methods: Sequence[Method] = ()  # of `longspan.plan.methods.compare`, if asked for.
    suggestions: Suggestions | None = None  # if nothing is recommended

    def to_dict(self) -> dict[str, Any]:
        """Return plain data: sizes in bytes, times in seconds; docs/reference/json.md documents it."""
        best, advice = self.result.recommended, self.suggestions
        return {
            "schema": SCHEMA,
            "job": {**asdict(self.job), "gpus": self.gpus},
            "model": _model_dict(self.model),
            "hardware": _hardware_dict(self.hardware),
            "recommended": None if best is None else plan_dict(best),
            "plans": [plan_dict(plan) for plan in self.result.plans],
            "rejected": [{"mesh": asdict(mesh), "reasons": [reason]} for mesh, reason in self.result.rejected],
            "methods": [_method_dict(method) for method in self.methods],
            "suggestions": None if advice is None else _suggestions_dict(advice),
        }


def _suggestions_dict(suggestions: Suggestions) -> dict[str, Any]:
    parts = {name: getattr(suggestions, name) for name in ("memory_options", "more", "fewer", "longest")}
    return {name: None if plan is None else _short_dict(plan) for name, plan in parts.items()}


def _short_dict(plan: Plan) -> dict[str, Any]:
    return {
        "gpus": plan.mesh.gpus,
        "mesh": asdict(plan.mesh),
        "memory": asdict(plan.job.memory),
        "context": plan.job.context,
        "memory_total_bytes": plan.memory_total_bytes,
        "step_seconds": plan.step_seconds,
        "command": command(plan),
    }


def _model_dict(model: ModelShape) -> dict[str, Any]:
    own = ("name", "params", "active_params", "d_model", "q_heads", "kv_heads", "vocab", "max_position")
    kinds = [(layer.mixer, count) for layer, count in model.layer_kinds]
    return {
        **{name: getattr(model, name) for name in own},
        "layers": len(model.layers),
        "head_dim": max(mixer.head_dim for mixer, _ in kinds),
        "layer_kinds": [{"kind": mixer.name, "window": mixer.window, "count": count} for mixer, count in kinds],
    }


def _hardware_dict(hardware: Hardware) -> dict[str, Any]:
    own = ("name", "flops", "memory_bandwidth", "gpus_per_node", "matmul_efficiency", "attention_efficiency")
    host = ("host_bandwidth", "disk_write", "disk_read")
    return {
        **{name: getattr(hardware, name) for name in (*own, *host)},
        "memory_bytes": int(hardware.memory_bytes),
        "intra_bandwidth": hardware.intra.bandwidth,
        "inter_bandwidth": hardware.inter.bandwidth,
        "measured": bool(hardware.measured),
        "attention": hardware.attention_words,
        "host_memory": int(hardware.host_memory),
    }


def plan_dict(plan: Plan, *, longest: bool = True) -> dict[str, Any]:
    """Return one plan; `longest=False` leaves out `max_context`, which takes a search."""
    own = (
        "ring_impl", "fits", "runs", "memory_total_bytes", "headroom_bytes", "comm_bytes_per_gpu_per_layer",
        "comm_seconds", "compute_seconds", "step_seconds", "tokens_per_second", "mfu",
    )  # fmt: skip
    return {
        **{name: getattr(plan, name) for name in own},
        "mesh": asdict(plan.mesh),
        "layout": plan.c.layout.kind,
        "fsdp": plan.mesh.weights if plan.job.weight_sharding else 1,
        "memory": asdict(plan.job.memory),
        "rope_scaling": _rope_dict(plan),
        "host_bytes": dict(plan.offloaded.host_bytes),
        "host_node_bytes": plan.offloaded.host_node_bytes,
        "disk_node_bytes": plan.offloaded.disk_node_bytes,
        "exposed_offload_seconds": plan.offload_seconds,
        "memory_bytes": dict(plan.memory_bytes),
        "max_context": plan.max_context if longest else None,
        "comm": [asdict(c) for c in plan.comm],
        "exposed_comm_seconds": plan.exposed_seconds,
        "reasons": list(plan.reasons),
        "command": command(plan),
    }


def _rope_dict(plan: Plan) -> dict[str, Any] | None:
    scaling = plan.model.scaling(plan.job.context)
    if scaling is None:
        return None
    return {name: getattr(scaling, name) for name in ("kind", "factor", "original", "positions")}


def _method_dict(method: Method) -> dict[str, Any]:
    own = ("name", "ops_per_layer", "method_bytes", "method_seconds", "reason")
    return {
        **{name: getattr(method, name) for name in own},
        "seconds_per_layer_at_128_tokens": method.short_seconds,
        "seconds_per_layer_across_nodes": method.apart_seconds,
        "plan": None if method.plan is None else plan_dict(method.plan, longest=False),
    }


# ---------------------------------------------------------------------------------------------------------------------
# The command.


def command(plan: Plan) -> str | None:
    """Return the command that runs a plan, quoted for a shell, or None if this version has none.

    A vision-language model is trained by a script, on the plan's mesh.

    Words in capitals are placeholders: DATA and FILE for a text; a folder of weights for built-in models whose weights
    on the hub cannot be trained as they are.
    """
    if not plan.runs or plan.model.tower is not None:
        return None
    return _train_command(plan) if plan.job.mode == "train" else _generate_command(plan)


def _train_command(plan: Plan) -> str:
    job, mesh, tuning = plan.job, plan.mesh, plan.model.tuning
    words = [_model_flag(plan.model.name, "--model_name_or_path"), f"--dataset_name DATA --context {job.context}"]
    words.append("--packing" if job.documents else "--packing --packing_strategy wrapped")
    if mesh.ring > 1:
        words.append(f"--ring {mesh.ring}")
        words += [f"--layout {job.layout}"] if job.layout != "auto" else []
        words += [f"--ring_impl {job.ring_impl}"] if job.ring_impl != "auto" else []
    if mesh.ulysses > 1:
        words += [f"--overlap_chunks {job.overlap_chunks}"] if job.overlap_chunks > 1 else []
        words += [f"--wire_dtype {job.wire_dtype}"] if job.wire_dtype != "exact" else []
    words += [f"--ulysses {mesh.ulysses}", *_tensor_flags(job, mesh), f"--data {mesh.data}", *_rope_flags(plan)]
    words += ["--per_device_train_batch_size 1", f"--gradient_accumulation_steps {max(1, job.batch // mesh.data)}"]
    words += [] if job.dtype == "bf16" else ["--bf16 false"]
    given = {f.name: getattr(job.memory, f.name) for f in fields(Memory)}
    changed = {name: value for name, value in given.items() if value != getattr(FASTEST, name)}
    memory = json.dumps(changed) if changed else "fastest"
    words.append(f"--memory {shlex.quote(memory)}")
    if tuning.lora is not None:
        targets = " ".join(tuning.targets) or "all-linear"
        words.append(f"--use_peft --lora_r {tuning.lora} --lora_target_modules {targets}")
        words += ["--use_dora"] * tuning.dora + ["--load_in_4bit"] * tuning.quantize
    elif tuning.freeze:
        words.append(f"--freeze {' '.join(map(shlex.quote, tuning.freeze))}")
    words += [] if job.weight_sharding else ["--shard_weights false"]
    return _started(plan, "train sft", words)


def _generate_command(plan: Plan) -> str | None:
    """Return the command for a prompt, or None if `generate` cannot run it."""
    job, mesh, memory = plan.job, plan.mesh, plan.job.memory
    has_options = (memory.tiled_mlp, memory.head_chunks, memory.cpu_offload) != (1, 1, False)
    if mesh.data > 1 or job.batch > 1 or has_options:
        return None
    model = _model_flag(plan.model.name)
    if model.startswith("--config "):  # a config alone has no weights: name its folder
        model = f"--model {_quoted(_config_file(plan.model.name).parent)}"
    words = [model, "--file FILE"]
    words += [f"--ring {mesh.ring}"] if mesh.ring > 1 else []
    words += [f"--layout {job.layout}"] if job.layout != "auto" else []
    words += [f"--ulysses {mesh.ulysses}", *_tensor_flags(job, mesh), f"--dtype {job.dtype}"]
    words += [f"--cache {job.cache}"] if job.cache != "exact" else []
    words += [f"--cache-offload {job.cache_offload}"] if job.cache_offload != "none" else []
    words += [] if job.cache_latent else ["--no-cache-latent"]
    words += [f"--prefill-chunk {job.prefill_chunk}"] if job.prefill_chunk is not None else []
    words += [f"--weights {'sharded' if job.weight_sharding else 'replicated'}"] if mesh.gpus > 1 else []
    return _started(plan, "generate", [*words, *_rope_flags(plan)])


def _tensor_flags(job: Job, mesh: Mesh) -> list[str]:
    if mesh.tensor == 1:
        return [] if job.experts == 1 else [f"--experts {job.experts}"]
    return [f"--tensor {mesh.tensor}", *([] if job.tensor_style == "tp" else [f"--tensor-style {job.tensor_style}"])]


def _rope_flags(plan: Plan) -> list[str]:
    scaling = plan.model.scaling(plan.job.context)
    return [] if scaling is None else [f"{flag} {shlex.quote(value)}" for flag, value in scaling.flags.items()]


def _started(plan: Plan, name: str, words: list[str]) -> str:
    mesh = plan.mesh
    # torchrun starts as many ranks on each node: 12 GPUs in nodes of 8 are two nodes of 6.
    per_node = max(n for n in range(1, min(mesh.gpus, plan.hardware.gpus_per_node) + 1) if mesh.gpus % n == 0)
    nodes = mesh.gpus // per_node
    if nodes == 1:
        return " ".join([f"longspan {name}", *words, *([] if name.startswith("train") else [f"--nproc {mesh.gpus}"])])
    torchrun = f"torchrun --nnodes {nodes} --nproc-per-node {per_node} --rdzv-backend c10d --rdzv-endpoint HOST:29500"
    return " ".join([torchrun, f"-m longspan {name}", *words])


def _model_flag(name: str, flag: str = "") -> str:
    """Return the flag that names a model, or its config; `flag` takes both."""
    given = weights_flag(name) or f"--config {_quoted(_config_file(name))}"
    return f"{flag} {given.split(maxsplit=1)[1]}" if flag else given


def _config_file(name: str) -> Path:
    path = Path(name)
    return path if path.suffix == ".json" and not path.is_dir() else path / "config.json"


def _quoted(path: Path) -> str:
    # A leading "-" would make it a flag.
    return shlex.quote(f"./{path}" if str(path).startswith("-") else str(path))


def memory_flags(memory: Memory) -> list[str]:
    """Return the flags of `longspan plan` and `longspan train` for these memory options."""
    if memory == FASTEST:
        return ["--memory fastest"]
    if memory == Memory(checkpointing="full"):
        return ["--grad-checkpointing"]
    without_offload = replace(memory, offload="none", offload_folder="", cpu_offload=False)
    if without_offload == LONGEST:
        return ["--memory longest", *flags_to_add(LONGEST, memory)]
    return flags_to_add(FASTEST, memory)
