"""A plan as plain data (`longspan plan --json`), and as the YAML file and the command that run it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from longspan.core.settings import changed, to_yaml
from longspan.plan.hardware import Hardware
from longspan.plan.job import Job
from longspan.plan.memory_options import Suggestions
from longspan.plan.methods import Method
from longspan.plan.names import weights_of
from longspan.plan.search import Plan, Search
from longspan.plan.shape import ModelShape

SCHEMA = "longspan.plan/6"
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
            "rejected": [{"mesh": mesh.degrees, "reasons": [reason]} for mesh, reason in self.result.rejected],
            "methods": [_method_dict(method) for method in self.methods],
            "suggestions": None if advice is None else _suggestions_dict(advice),
        }


def _suggestions_dict(suggestions: Suggestions) -> dict[str, Any]:
    parts = {name: getattr(suggestions, name) for name in ("memory_options", "more", "fewer", "longest")}
    return {name: None if plan is None else _short_dict(plan) for name, plan in parts.items()}


def _short_dict(plan: Plan) -> dict[str, Any]:
    return {
        "gpus": plan.mesh.ranks,
        "mesh": plan.mesh.degrees,
        "memory": asdict(plan.job.memory),
        "context": plan.job.context,
        "memory_total_bytes": plan.memory_total_bytes,
        "step_seconds": plan.step_seconds,
        "yaml": yaml(plan),
        "command": command(plan),
    }


def _model_dict(model: ModelShape) -> dict[str, Any]:
    own = ("name", "params", "active_params", "d_model", "q_heads", "kv_heads", "vocab", "max_position")
    kinds = [(layer.mixing, count) for layer, count in model.layer_kinds]
    return {
        **{name: getattr(model, name) for name in own},
        "layers": len(model.layers),
        "head_dim": max(mixing.head_dim for mixing, _ in kinds),
        "layer_kinds": [{"kind": mixing.name, "window": mixing.window, "count": count} for mixing, count in kinds],
    }


def _hardware_dict(hardware: Hardware) -> dict[str, Any]:
    own = ("name", "flops", "memory_bandwidth", "gpus_per_node", "matmul_efficiency", "attention_efficiency")
    host = ("host_bandwidth",)
    return {
        **{name: getattr(hardware, name) for name in (*own, *host)},
        "memory_bytes": int(hardware.memory_bytes),
        "intra_bandwidth": hardware.intra.bandwidth,
        "inter_bandwidth": hardware.inter.bandwidth,
        "measured": bool(hardware.measured),
        "attention": hardware.attention_words,
        "host_memory": int(hardware.host_memory),
    }


def plan_dict(plan: Plan, *, max_context: bool = True) -> dict[str, Any]:
    """Return one plan; `max_context=False` leaves out `max_context`, which takes a search."""
    own = (
        "fits", "runs", "memory_total_bytes", "headroom_bytes", "comm_bytes_per_gpu_per_layer",
        "comm_seconds", "compute_seconds", "step_seconds", "tokens_per_second", "mfu",
    )  # fmt: skip
    return {
        **{name: getattr(plan, name) for name in own},
        "mesh": plan.mesh.degrees,
        "layout": plan.c.layout.kind,
        "fsdp": plan.mesh.fsdp_ranks if plan.job.weight_sharding else 1,
        "memory": asdict(plan.job.memory),
        "config_changes": plan.model.longer(plan.job.context),
        "host_bytes": dict(plan.offloaded.host_bytes),
        "host_node_bytes": plan.offloaded.host_node_bytes,
        "exposed_offload_seconds": plan.offload_seconds,
        "memory_bytes": dict(plan.memory_bytes),
        "max_context": plan.max_context if max_context else None,
        "comm": [asdict(c) for c in plan.comm],
        "exposed_comm_seconds": plan.exposed_seconds,
        "reasons": list(plan.reasons),
        "yaml": yaml(plan),
        "command": command(plan),
    }


def _method_dict(method: Method) -> dict[str, Any]:
    own = ("name", "ops_per_layer", "method_bytes", "method_seconds", "reason")
    return {
        **{name: getattr(method, name) for name in own},
        "seconds_per_layer_at_128_tokens": method.short_seconds,
        "seconds_per_layer_across_nodes": method.apart_seconds,
        "plan": None if method.plan is None else plan_dict(method.plan, max_context=False),
    }


# ---------------------------------------------------------------------------------------------------------------------
# What runs a plan.


def settings(plan: Plan) -> dict[str, Any] | None:
    """Return the keys of the file that runs a plan, by `--config` of its `command`; None if this version has none.

    A vision-language model is trained by a script, on the plan's mesh.

    Words in capitals are placeholders: for built-in models whose weights on the hub cannot be trained as they are.
    """
    if not plan.runs or plan.model.tower is not None:
        return None
    shared = changed(plan.mesh)
    return _training(plan, shared) if plan.job.mode == "train" else _generation(plan, shared)


def _training(plan: Plan, shared: dict[str, Any]) -> dict[str, Any]:
    job, tuning = plan.job, plan.model.tuning
    keys = {
        "model_name_or_path": weights_of(plan.model.name) or str(_config_file(plan.model.name)),
        "context": job.context,
        **shared,
        "memory": changed(job.memory) or "fastest",
        "per_device_train_batch_size": 1,
        "packing": True,
    }
    longer = plan.model.longer(job.context)
    keys |= {} if longer is None else {"model_init_kwargs": longer}
    micro = plan.c.micro_batches
    keys |= {} if micro == 1 else {"gradient_accumulation_steps": micro}
    keys |= {} if job.documents else {"packing_strategy": "wrapped"}
    if (teacher := plan.model.teacher) is not None:
        for key in ("packing", "packing_strategy"):
            keys.pop(key, None)
        keys["teacher_model_name_or_path"] = weights_of(teacher.name) or str(_config_file(teacher.name))
    keys |= {} if job.dtype == "bf16" else {"bf16": False}
    keys |= {} if job.weight_sharding else {"shard_weights": False}
    if tuning.lora is not None:
        targets = list(tuning.targets) or "all-linear"
        keys |= {"use_peft": True, "lora_r": tuning.lora, "lora_target_modules": targets}
        keys |= {"use_dora": True} if tuning.dora else {}
        keys |= {"load_in_4bit": True} if tuning.quantize else {}
    elif tuning.freeze:
        keys["freeze"] = list(tuning.freeze)
    return keys


def _generation(plan: Plan, shared: dict[str, Any]) -> dict[str, Any] | None:
    """Return the keys for a prompt, or None if `generate` cannot run it."""
    job, memory = plan.job, changed(plan.job.memory)
    if plan.mesh.data > 1 or job.batch > 1 or memory.keys() & {"tiled", "head_slices", "cpu_offload"}:
        return None
    # A config alone has no weights: name its folder.
    model = weights_of(plan.model.name) or str(_config_file(plan.model.name).parent)
    keys = {"model": model, **shared, "dtype": job.dtype}
    keys |= {"cache": changed(job.cache)} if changed(job.cache) else {}
    keys |= {} if job.prefill_chunk is None else {"prefill_chunk": job.prefill_chunk}
    keys |= {"weights": "sharded" if job.weight_sharding else "replicated"} if plan.mesh.ranks > 1 else {}
    return keys


def yaml(plan: Plan) -> str | None:
    """Return `settings` as the text of a file."""
    keys = settings(plan)
    return None if keys is None else to_yaml(keys)


def command(plan: Plan) -> str | None:
    """Return the command that runs a plan whose `settings` are in plan.yaml; DATA and FILE stand for a text."""
    if settings(plan) is None:
        return None
    method = "sft" if plan.model.teacher is None else "gkd"
    words = f"train {method} --config plan.yaml --dataset_name DATA"
    if plan.job.mode != "train":
        words = "generate --config plan.yaml --file FILE"
    ranks = plan.mesh.ranks
    # torchrun starts as many ranks on each node: 12 GPUs in nodes of 8 are two nodes of 6.
    per_node = max(n for n in range(1, min(ranks, plan.hardware.gpus_per_node) + 1) if ranks % n == 0)
    if ranks == per_node:
        return f"longspan {words}"
    torchrun = f"torchrun --nnodes {ranks // per_node} --nproc-per-node {per_node}"
    return f"{torchrun} --rdzv-backend c10d --rdzv-endpoint HOST:29500 -m longspan {words}"


def _config_file(name: str) -> Path:
    path = Path(name)
    return path if path.suffix == ".json" and not path.is_dir() else path / "config.json"
