"""A self-contained HTML page of a plan, which opens offline; and the data of its switches.

The switches change checkpointing, memory options, kind of GPU and batch. Every combination is planned at contexts and
numbers of GPUs around the job's own, on all meshes without a tensor axis. It has the memory of each mesh, and the times
of the fastest that fit. `longspan.plan.views.curves.grid` has the rest of a plan (collectives, notes), for the job as
it is.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Hashable
from dataclasses import asdict, replace
from importlib.resources import files
from itertools import product
from typing import Any

from longspan.core.memory import CHECKPOINTING, Memory
from longspan.core.parallel import AXES, RING_IMPLS, RingImpl
from longspan.plan.cost.memory import ITEMS
from longspan.plan.cost.times import model_flops
from longspan.plan.hardware import CATALOGUE, Hardware
from longspan.plan.job import Job, Mesh
from longspan.plan.limits import refusal, unsupported
from longspan.plan.models.shape import ModelShape
from longspan.plan.search import Plan, meshes, sort_key, with_faster_ring
from longspan.plan.views.commands import memory_flags
from longspan.plan.views.curves import Distinct, contexts, gpu_counts, six

BEST = 4
"""Plans listed per point: the fastest that fit."""

BATCHES = 4
"""Factor of the largest batch over the job's; one sequence and the job's batch are planned too."""

CONTEXTS = 4
"""Factor by which planned contexts are longer or shorter than the job's."""

MORE_GPUS = 8
"""Factor of the most GPUs over the job's; the fewest are half of the job's."""

MOST_MESHES = 80
"""Meshes planned per context, over all numbers of GPUs and batches; those far from the job's are left out."""


def render(report: dict[str, Any], grid: dict[str, Any], settings: dict[str, Any] | None = None) -> str:
    """Return the page.

    Args:
        report: of `longspan.plan.views.report.to_dict`.
        grid: of `longspan.plan.views.curves.grid`, for the same job.
        settings: of `settings_grid`; None: a page without switches.
    """
    job, gpu = report["job"], report["hardware"]["name"]
    title = f"longspan plan: {report['model']['name']}, {job['context']:,} tokens, {job['gpus']} x {gpu}"
    data = json.dumps({"report": report, "grid": grid, "settings": settings}, separators=(",", ":"), allow_nan=False)
    # In a <script> the HTML parser finds `</script>` and `<!--` even in strings.
    data = data.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    filled = {"TITLE": html.escape(title), "DATA": data}
    template = files("longspan.plan.views").joinpath("page.html").read_text(encoding="utf-8")
    # In one pass, so that a model called "{{DATA}}" stays a name.
    return re.sub(r"\{\{(TITLE|DATA)\}\}", lambda found: filled[found[1]], template)


# ---------------------------------------------------------------------------------------------------------------------
# The switches.


def _gpu_counts(gpus: int, batches: list[int]) -> list[int]:
    """Return numbers of GPUs around the job's, the nearest first, until `MOST_MESHES` are planned."""
    counts = [n for n in gpu_counts(gpus) if gpus <= 2 * n and n <= MORE_GPUS * gpus]
    counts.sort(key=lambda n: (n != gpus, max(n / gpus, gpus / n)))
    chosen, planned_for = [counts[0]], 0
    for n in counts:
        planned_for += sum(batch % mesh.data == 0 for mesh in _without_tensor(n) for batch in batches)
        if n not in chosen and planned_for <= (MOST_MESHES if gpus <= 128 else MOST_MESHES // 2):
            chosen.append(n)
    return sorted(chosen)


def _memory(checkpointing: str, options: dict[str, Any]) -> Memory:
    """Return the memory options of two switches; without checkpointing no checkpoint is offloaded or shared."""
    of_checkpoints = {"offload": "none", "offload_folder": "", "layers_per_checkpoint": 1}
    return Memory(**{**options, "checkpointing": checkpointing, **(of_checkpoints if checkpointing == "none" else {})})


def _memory_options(job: Job, hardware: Hardware) -> dict[str, dict[str, Any]]:
    tiled = {"tiled_mlp": 0, "tiled_norms": True, "head_chunks": 0}
    options: dict[str, dict[str, Any]] = {"none": {}, "tiles": tiled}
    if not hardware.on_cpu:  # it computes in the host's memory
        offload = {"offload": "host"} if job.mode == "train" else {}
        options["tiles, and the host's memory"] = {**tiled, **offload, "cpu_offload": job.weight_sharding}
    own = replace(job.memory, checkpointing="full")
    if all(Memory(**{**each, "checkpointing": "full"}) != own for each in options.values()):
        options = {"as given": asdict(job.memory), **options}
    return options


def _kinds(own: Hardware) -> tuple[Hardware, ...]:
    """Return the job's kind and those of the catalogue; flags that change a catalogue kind apply to all."""
    if own.on_cpu:
        return (own,)
    others = [kind for name, kind in CATALOGUE.items() if name != own.name and not kind.on_cpu]
    if own.name in CATALOGUE:
        same = {name: getattr(own, name) for name in ("matmul_efficiency", "attention_efficiency", "gpus_per_node")}
        changed = {name: value for name, value in same.items() if value != getattr(CATALOGUE[own.name], name)}
        others = [replace(kind, **changed) for kind in others]
    return (own, *others)


def _without_tensor(gpus: int) -> list[Mesh]:
    return [mesh for mesh in meshes(gpus) if mesh.tensor == 1]


def settings_grid(model: ModelShape, job: Job, gpus: int, hardware: Hardware) -> dict[str, Any]:
    """Return plans of every combination of settings, as plain data: sizes in bytes, times in seconds (six digits).

    Meshes and memories are indices into `meshes` and `memories`. Points are in the order checkpointing, memory options,
    batches, contexts, gpus, the last one fastest.

    - `held[point]`: [mesh, memory, mesh, memory, ...] of every mesh that can hold the job, least memory first.
    - `timed[kind][point]`: [mesh, memory, step, compute, exposed, ...] of the fastest that fit on a kind of GPU.
    - `flops[i][j]`: FLOPs that a step of `batches[i]` and `contexts[j]` needs (for MFU).
    - `flags[i][j]`: flags of `longspan plan` for `checkpointing[i]` with `memory_options[j]`; `asked`: the other flags.
    """
    checkpointing = CHECKPOINTING if job.mode == "train" else (job.memory.checkpointing,)
    options, kinds = _memory_options(job, hardware), _kinds(hardware)
    batches = sorted({1, job.batch, BATCHES * job.batch})
    near = [n for n in contexts(job) if job.context <= CONTEXTS * n and n <= CONTEXTS * job.context]
    counts = _gpu_counts(gpus, batches)
    memories, mesh_sizes = Distinct(), Distinct()

    def indices(plan: Plan) -> tuple[int, int]:
        return mesh_sizes.index(tuple(getattr(plan.mesh, axis) for axis in AXES)), memories.index(_items(plan))

    held: list[list[int]] = []
    timed: list[list[list[float]]] = [[] for _ in kinds]
    for how, switched, batch, context, count in product(checkpointing, options.values(), batches, near, counts):
        asked = replace(job, memory=_memory(how, switched), batch=batch, context=context)
        legal = [mesh for mesh in _without_tensor(count) if refusal(model, asked, mesh) is None]
        plans = sorted((Plan(model, asked, mesh, hardware) for mesh in legal), key=lambda p: p.memory_total_bytes)
        held.append([index for plan in plans for index in indices(plan)])
        for kind, points in zip(kinds, timed, strict=True):
            fitting = (with_faster_ring(replace(plan, hardware=kind)) for plan in plans if _may_fit(plan, kind))
            best = sorted((plan for plan in fitting if plan.fits), key=sort_key)[:BEST]
            points.append([number for plan in best for number in (*indices(plan), *_times(plan))])
    own = [_memory(job.memory.checkpointing, each) == job.memory for each in options.values()]
    return {
        "checkpointing": checkpointing,
        "memory_options": list(options),
        "hardware": [{"name": k.name, "memory_bytes": int(k.memory_bytes), "flops": k.flops} for k in kinds],
        "batches": batches,
        "contexts": near,
        "gpus": counts,
        "own": {
            "checkpointing": checkpointing.index(job.memory.checkpointing),
            "memory_options": own.index(True),
            "hardware": 0,
            "batch": batches.index(job.batch),
        },
        "runs": not unsupported(model, job, Mesh()),
        "asked": _flags(job),
        "flags": [[" ".join(memory_flags(_memory(how, each))) for each in options.values()] for how in checkpointing],
        "flops": [[model_flops(model, replace(job, batch=b, context=n)) for n in near] for b in batches],
        "meshes": mesh_sizes.rows,
        "memories": memories.rows,
        "held": held,
        "timed": timed,
    }


def _may_fit(plan: Plan, kind: Hardware) -> bool:
    """Whether a mesh fits on a kind of GPU, with any ring implementation if the job leaves it open."""
    impls: tuple[RingImpl, ...] = (plan.job.ring_impl,)
    if plan.job.ring_impl == "auto" and plan.mesh.ring > 1:
        impls = RING_IMPLS
    return any(replace(plan, hardware=kind, job=replace(plan.job, ring_impl=impl)).fits for impl in impls)


def _items(plan: Plan) -> Hashable:
    return tuple(plan.memory_bytes[item] for item in ITEMS)


def _times(plan: Plan) -> tuple[float, float, float]:
    return six(plan.step_seconds), six(plan.compute_seconds), six(plan.exposed_seconds)


def _flags(job: Job) -> str:
    """Return the flags of `longspan plan` that no switch or slider changes."""
    flags = [f"--mode {job.mode}", f"--dtype {job.dtype}"]
    named = {"layout": job.layout, "ring-impl": job.ring_impl}
    flags += [f"--{name} {value}" for name, value in named.items() if value != "auto"]
    flags += [f"--overlap-chunks {job.overlap_chunks}"] * (job.overlap_chunks > 1)
    flags += [f"--wire-dtype {job.wire_dtype}"] * (job.wire_dtype != "exact")
    switches = {"fsdp": job.weight_sharding, "kv-replication": job.kv_replication}
    return " ".join([*flags, *(f"--no-{name}" for name, on in switches.items() if not on)])
