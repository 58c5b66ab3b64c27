"""A plan as plain data (`longspan plan --json`), and as the command that runs it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from longspan.core.memory import LONGEST, Memory
from longspan.plan.hardware import Hardware
from longspan.plan.job import AXES, Job, Mesh, layout_of
from longspan.plan.methods import Method
from longspan.plan.models.catalogue import CONFIGS, ELSEWHERE, HUB
from longspan.plan.models.shape import ModelShape
from longspan.plan.search import Plan, Search
from longspan.plan.suggestions import Suggestions

SCHEMA = "longspan.plan/3"
"""Name and version of the JSON. A key may be added under one version; none changes its meaning or goes."""


def to_dict(
    found: Search,
    model: ModelShape,
    job: Job,
    gpus: int,
    hardware: Hardware,
    methods: Sequence[Method] = (),
    memory_options: dict[str, Any] | None = None,
    suggestions: Suggestions | None = None,
) -> dict[str, Any]:
    """Return the report as plain data: sizes in bytes, times in seconds; docs/reference/json.md documents it."""
    return {
        "schema": SCHEMA,
        "job": {**asdict(job), "gpus": gpus},
        "model": model_dict(model),
        "hardware": hardware_dict(hardware),
        "recommended": None if found.recommended is None else plan_dict(found.recommended),
        "plans": [plan_dict(plan) for plan in found.plans],
        "rejected": [{"mesh": mesh_dict(mesh), "reasons": [reason]} for mesh, reason in found.rejected],
        "methods": [method_dict(method) for method in methods],
        "memory_options": memory_options,
        "suggestions": None if suggestions is None else suggestions_dict(suggestions),
    }


def suggestions_dict(suggestions: Suggestions) -> dict[str, Any]:
    """Return each suggestion, or null."""
    parts = {
        "memory_options": suggestions.memory_options,
        "more": suggestions.more,
        "fewer": suggestions.fewer,
        "longest": suggestions.longest,
    }
    return {name: None if plan is None else _short_dict(plan) for name, plan in parts.items()}


def _short_dict(plan: Plan) -> dict[str, Any]:
    return {
        "gpus": plan.mesh.gpus,
        "mesh": mesh_dict(plan.mesh),
        "memory": asdict(plan.job.memory),
        "context": plan.job.context,
        "memory_total_bytes": plan.memory_total_bytes,
        "step_seconds": plan.step_seconds,
        "command": command(plan),
    }


def mesh_dict(mesh: Mesh) -> dict[str, int]:
    """Sizes of the four axes."""
    return {axis: getattr(mesh, axis) for axis in AXES}


def model_dict(model: ModelShape) -> dict[str, Any]:
    """Return the model's sizes."""
    return {
        "name": model.name,
        "params": model.params,
        "active_params": model.active_params,
        "layers": len(model.layers),
        "d_model": model.d_model,
        "q_heads": model.q_heads,
        "kv_heads": model.kv_heads,
        "head_dim": max(layer.mixer.head_dim for layer, _ in model.layer_kinds),
        "vocab": model.vocab,
        "max_position": model.max_position,
        "layer_kinds": [{"kind": layer.kind, "window": layer.window, "count": n} for layer, n in model.layer_kinds],
    }


def hardware_dict(hardware: Hardware) -> dict[str, Any]:
    """Return the hardware, with the assumed efficiencies."""
    return {
        "name": hardware.name,
        "memory_bytes": int(hardware.memory_bytes),
        "flops": hardware.flops,
        "memory_bandwidth": hardware.memory_bandwidth,
        "gpus_per_node": hardware.gpus_per_node,
        "intra_bandwidth": hardware.intra.bandwidth,
        "inter_bandwidth": hardware.inter.bandwidth,
        "matmul_efficiency": hardware.matmul_efficiency,
        "attention_efficiency": hardware.attention_efficiency,
        "measured": bool(hardware.measured),
        "host_memory": int(hardware.host_memory),
        "host_bandwidth": hardware.host_bandwidth,
        "disk_write": hardware.disk_write,
        "disk_read": hardware.disk_read,
    }


def plan_dict(plan: Plan, *, longest: bool = True) -> dict[str, Any]:
    """Return one plan; `longest=False` leaves out `max_context`, which takes a search."""
    return {
        "mesh": mesh_dict(plan.mesh),
        "layout": layout_of(plan.job, plan.mesh).kind,
        "ring_impl": plan.ring_impl,
        "fsdp": plan.mesh.weights if plan.job.weight_sharding else 1,
        "memory": asdict(plan.job.memory),
        "fits": plan.fits,
        "runs": plan.runs,
        "rope_scaling": _rope_dict(plan),
        "host_bytes": dict(plan.offloaded.host_bytes),
        "host_node_bytes": plan.offloaded.host_node_bytes,
        "disk_node_bytes": plan.offloaded.disk_node_bytes,
        "exposed_offload_seconds": plan.offloaded.seconds,
        "memory_bytes": dict(plan.memory_bytes),
        "memory_total_bytes": plan.memory_total_bytes,
        "headroom_bytes": plan.headroom_bytes,
        "max_context": plan.max_context if longest else None,
        "comm": [asdict(c) for c in plan.comm],
        "comm_bytes_per_gpu_per_layer": plan.comm_bytes_per_gpu_per_layer,
        "comm_seconds": plan.comm_seconds,
        "exposed_comm_seconds": plan.exposed_seconds,
        "compute_seconds": plan.compute_seconds,
        "step_seconds": plan.step_seconds,
        "tokens_per_second": plan.tokens_per_second,
        "mfu": plan.mfu,
        "reasons": list(plan.reasons),
        "command": command(plan),
    }


def _rope_dict(plan: Plan) -> dict[str, Any] | None:
    scaling = plan.model.scaling(plan.job.context)
    if scaling is None:
        return None
    return {name: getattr(scaling, name) for name in ("kind", "factor", "original", "positions")}


def method_dict(method: Method) -> dict[str, Any]:
    """Return one row of the comparison."""
    return {
        "name": method.name,
        "ops_per_layer": method.ops_per_layer,
        "method_bytes": method.method_bytes,
        "method_seconds": method.method_seconds,
        "seconds_per_layer_at_128_tokens": method.short_seconds,
        "seconds_per_layer_across_nodes": method.apart_seconds,
        "reason": method.reason,
        "plan": None if method.plan is None else plan_dict(method.plan, longest=False),
    }


def command(plan: Plan) -> str | None:
    """Return the command that runs a plan, quoted for a shell, or None if this version has none.

    Words in capitals are placeholders: DATA for a text; a folder of weights for built-in models whose weights on the
    hub cannot be trained as they are.
    """
    job, mesh = plan.job, plan.mesh
    if not plan.runs:
        return None
    if job.mode != "train":
        return _generate_command(plan)
    words = ["--data DATA", f"--context {job.context}", *_ring_flags(job, mesh), f"--ulysses {mesh.ulysses}"]
    words += _tensor_flags(job, mesh)
    words += [f"--data-degree {mesh.data}", f"--batch {job.batch}", f"--dtype {job.dtype}"]
    scaling = plan.model.scaling(job.context)
    if scaling is not None:
        words += [f"{flag} {shlex.quote(value)}" for flag, value in scaling.flags.items()]
    words += memory_flags(job.memory)
    words += [] if job.weight_sharding else ["--no-fsdp"]
    words.insert(0, _model_flag(plan.model.name))
    return _started(plan, "train", words)


def _tensor_flags(job: Job, mesh: Mesh) -> list[str]:
    if mesh.tensor == 1:
        return []
    return [f"--tensor {mesh.tensor}", *([] if job.tensor_style == "tp" else [f"--tensor-style {job.tensor_style}"])]


def _generate_command(plan: Plan) -> str | None:
    """Return the command for a prompt, or None if `generate` cannot run it. FILE is a placeholder for the text."""
    job, mesh, memory_options = plan.job, plan.mesh, plan.job.memory
    if (
        mesh.data > 1
        or job.batch > 1
        or (memory_options.tiled_mlp, memory_options.head_chunks, memory_options.cpu_offload) != (1, 1, False)
    ):
        return None
    model = _model_flag(plan.model.name)
    if model.startswith("--config "):  # a config alone has no weights: name its folder
        path = Path(plan.model.name)
        folder = path.parent if path.suffix == ".json" and not path.is_dir() else path
        model = f"--model {shlex.quote(f'./{folder}' if str(folder).startswith('-') else str(folder))}"
    words = [model, "--file FILE"]
    words += [f"--ring {mesh.ring}"] if mesh.ring > 1 else []
    words += [f"--layout {job.layout}"] if job.layout != "auto" else []
    words += [f"--ulysses {mesh.ulysses}"]
    words += _tensor_flags(job, mesh)
    words += [f"--dtype {job.dtype}"]
    words += [f"--cache {job.cache}"] if job.cache != "exact" else []
    words += [f"--cache-offload {job.cache_offload}"] if job.cache_offload != "none" else []
    words += [] if job.cache_latent else ["--no-cache-latent"]
    words += [f"--prefill-chunk {job.prefill_chunk}"] if job.prefill_chunk is not None else []
    words += [] if job.weight_sharding else ["--no-fsdp"]
    scaling = plan.model.scaling(job.context)
    if scaling is not None:
        words += [f"{flag} {shlex.quote(value)}" for flag, value in scaling.flags.items()]
    return _started(plan, "generate", words)


def _started(plan: Plan, name: str, words: list[str]) -> str:
    mesh = plan.mesh
    # torchrun starts as many ranks on each node: 12 GPUs in nodes of 8 are two nodes of 6.
    per_node = max(n for n in range(1, min(mesh.gpus, plan.hardware.gpus_per_node) + 1) if mesh.gpus % n == 0)
    nodes = mesh.gpus // per_node
    if nodes == 1:
        return " ".join([f"longspan {name}", *words, f"--nproc {mesh.gpus}"])
    torchrun = f"torchrun --nnodes {nodes} --nproc-per-node {per_node} --rdzv-backend c10d --rdzv-endpoint HOST:29500"
    return " ".join([torchrun, f"-m longspan {name}", *words])


def memory_flags(memory: Memory) -> list[str]:
    """Return the flags of `longspan plan` and `longspan train` for these memory options."""
    if memory == Memory():
        return ["--memory fastest"]
    if memory == Memory(checkpointing="full"):
        return ["--grad-checkpointing"]
    offloaded_longest = replace(memory, offload="none", offload_folder="", cpu_offload=False) == LONGEST
    base = LONGEST if offloaded_longest else Memory()
    flags = ["--memory longest"] if offloaded_longest else []
    for name in ("checkpointing", "layers_per_checkpoint", "offload", "offload_folder", "tiled_mlp", "head_chunks"):
        if getattr(memory, name) != getattr(base, name):
            flags.append(f"--{name.replace('_', '-')} {shlex.quote(str(getattr(memory, name)))}")
    for name in ("tiled_norms", "cpu_offload"):
        if getattr(memory, name) and not getattr(base, name):
            flags.append(f"--{name.replace('_', '-')}")
    if not memory.recompute_mlp_act:
        flags.append("--no-recompute-mlp-act")
    return flags


def _ring_flags(job: Job, mesh: Mesh) -> list[str]:
    chunks = [f"--overlap-chunks {job.overlap_chunks}"] * (job.overlap_chunks > 1 and mesh.ulysses > 1)
    chunks += [f"--wire-dtype {job.wire_dtype}"] * (job.wire_dtype != "exact" and mesh.ulysses > 1)
    if mesh.ring == 1:
        return chunks
    said = {"layout": job.layout, "ring-impl": job.ring_impl}
    return [f"--ring {mesh.ring}", *(f"--{name} {value}" for name, value in said.items() if value != "auto"), *chunks]


def _model_flag(name: str) -> str:
    if name in CONFIGS:
        return f"--model {HUB[name]}" if name in HUB else ELSEWHERE[name]
    path = Path(name)
    file = path if path.suffix == ".json" and not path.is_dir() else path / "config.json"
    plain = f"./{file}" if str(file).startswith("-") else str(file)  # a leading "-" would make it a flag
    return f"--config {shlex.quote(plain)}"
