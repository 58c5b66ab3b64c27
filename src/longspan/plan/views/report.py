"""A plan as plain data (`longspan plan --json`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from longspan.plan.hardware import Hardware
from longspan.plan.job import Job
from longspan.plan.memory_search import MemoryRow
from longspan.plan.methods import Method
from longspan.plan.models.shape import ModelShape
from longspan.plan.search import Plan, Search
from longspan.plan.suggestions import Suggestions
from longspan.plan.views.commands import command

SCHEMA = "longspan.plan/4"
"""Name and version of the JSON. A key may be added under one version; none changes its meaning or goes."""


def to_dict(
    result: Search,
    model: ModelShape,
    job: Job,
    gpus: int,
    hardware: Hardware,
    methods: Sequence[Method] = (),
    memory_options: Sequence[MemoryRow] = (),
    suggestions: Suggestions | None = None,
) -> dict[str, Any]:
    """Return the report as plain data: sizes in bytes, times in seconds; docs/reference/json.md documents it."""
    return {
        "schema": SCHEMA,
        "job": {**asdict(job), "gpus": gpus},
        "model": model_dict(model),
        "hardware": hardware_dict(hardware),
        "recommended": None if result.recommended is None else plan_dict(result.recommended),
        "plans": [plan_dict(plan) for plan in result.plans],
        "rejected": [{"mesh": asdict(mesh), "reasons": [reason]} for mesh, reason in result.rejected],
        "methods": [method_dict(method) for method in methods],
        "memory_options": memory_options_dict(memory_options) if memory_options else None,
        "suggestions": None if suggestions is None else suggestions_dict(suggestions),
    }


def suggestions_dict(suggestions: Suggestions) -> dict[str, Any]:
    """Return each suggestion, or null."""
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


def model_dict(model: ModelShape) -> dict[str, Any]:
    """Return the model's sizes."""
    own = ("name", "params", "active_params", "d_model", "q_heads", "kv_heads", "vocab", "max_position")
    return {
        **{name: getattr(model, name) for name in own},
        "layers": len(model.layers),
        "head_dim": max(layer.mixer.head_dim for layer, _ in model.layer_kinds),
        "layer_kinds": [{"kind": layer.kind, "window": layer.window, "count": n} for layer, n in model.layer_kinds],
    }


def hardware_dict(hardware: Hardware) -> dict[str, Any]:
    """Return the hardware, with the assumed efficiencies."""
    own = ("name", "flops", "memory_bandwidth", "gpus_per_node", "matmul_efficiency", "attention_efficiency")
    host = ("host_bandwidth", "disk_write", "disk_read")
    return {
        **{name: getattr(hardware, name) for name in (*own, *host)},
        "memory_bytes": int(hardware.memory_bytes),
        "intra_bandwidth": hardware.intra.bandwidth,
        "inter_bandwidth": hardware.inter.bandwidth,
        "measured": bool(hardware.measured),
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


def method_dict(method: Method) -> dict[str, Any]:
    """Return one row of the comparison."""
    own = ("name", "ops_per_layer", "method_bytes", "method_seconds", "reason")
    return {
        **{name: getattr(method, name) for name in own},
        "seconds_per_layer_at_128_tokens": method.short_seconds,
        "seconds_per_layer_across_nodes": method.apart_seconds,
        "plan": None if method.plan is None else plan_dict(method.plan, longest=False),
    }


def memory_options_dict(rows: Sequence[MemoryRow]) -> dict[str, Any]:
    """Return the rows of `--memory-options`."""
    return {
        "mesh": asdict(rows[0].plan.mesh),
        "rows": [
            {
                "name": row.name,
                "memory": asdict(row.plan.job.memory),
                "fits": row.plan.fits,
                "memory_total_bytes": row.plan.memory_total_bytes,
                "saved_bytes": row.saved_bytes,
                "host_node_bytes": row.plan.offloaded.host_node_bytes,
                "disk_node_bytes": row.plan.offloaded.disk_node_bytes,
                "step_seconds": row.plan.step_seconds,
                "max_context": row.max_context,
                "max_mesh": None if row.max_mesh is None else asdict(row.max_mesh),
            }
            for row in rows
        ],
    }
