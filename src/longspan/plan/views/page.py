"""A self-contained HTML page of a plan, which opens offline; its data, which `drawing.py` draws too.

`grid` has the job on all meshes at other contexts and on other numbers of GPUs: the page's sliders. `settings_grid` has
it with other checkpointing, memory options, kinds of GPU and batches: the page's switches. Every combination is planned
at contexts and numbers of GPUs around the job's own, on all meshes without a tensor axis. It has the memory of each
mesh, and the times of the fastest that fit.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from importlib.resources import files
from itertools import product
from types import MappingProxyType
from typing import Any

from longspan.core.formatting import parameters
from longspan.core.layout import Span, choose_layout
from longspan.core.memory import CHECKPOINTING, Memory
from longspan.core.parallel import AXES, RING_IMPLS, RingImpl
from longspan.core.validation import LARGEST_COUNT
from longspan.plan.cost.memory import ITEMS
from longspan.plan.cost.times import model_flops
from longspan.plan.hardware import CATALOGUE, Hardware
from longspan.plan.job import Job, Mesh, head_shards
from longspan.plan.limits import refusal, unsupported
from longspan.plan.search import MOST_GPUS, Plan, Search, meshes, plan_mesh, search, sort_key, with_faster_ring
from longspan.plan.shape import ModelShape
from longspan.plan.views.report import command, memory_flags

MESHES_SHOWN = 6
"""Plans listed per point, besides the meshes of one axis and the recommended one."""

RANKS_SHOWN = 16
"""Ranks whose heads are listed, as many as the diagram has room for."""

PARTS_SHOWN = 32
"""Ranks of a sequence group up to which all ranks' tokens are listed."""

SHORTEST, LONGEST = 1 << 12, 1 << 24
"""Shortest and longest context of every grid; a job outside them widens it."""


BEST_TIMED = 4
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
    """Return the page of `Report.to_dict`, `grid` and `settings_grid` of one job; None: without switches."""
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
# The sliders.


def contexts(job: Job) -> list[int]:
    """Return powers of two from 4k (or the job's context) to 16M (or four times the job's), and the job's context."""
    first = min(SHORTEST, 1 << (job.context.bit_length() - 1))
    return _powers(first, min(max(LONGEST, 4 * job.context), LARGEST_COUNT), job.context)


def gpu_counts(gpus: int) -> list[int]:
    """Return powers of two from 1 to at least eight times the job's GPUs (at most `MOST_GPUS`), and the job's GPUs."""
    return _powers(1, min(8 * gpus, MOST_GPUS), gpus)


def _powers(first: int, last: int, own: int) -> list[int]:
    powers = {own}
    while first < last:
        powers.add(first)
        first *= 2
    return sorted({*powers, first})


def best_plans(result: Search, gpus: int) -> list[Plan]:
    """Return the first few plans, the recommended one and the meshes of one axis, in the order of the search."""
    pure = {Mesh(**{axis: gpus}) for axis in AXES if axis != "data"}
    if result.recommended is not None:
        pure.add(result.recommended.mesh)
    return [plan for i, plan in enumerate(result.plans) if i < MESHES_SHOWN or plan.mesh in pure]


def grid(
    model: ModelShape,
    job: Job,
    gpus: int,
    hardware: Hardware,
    also: Iterable[Mesh] = (),
    chosen: Mapping[Mesh, Memory] = MappingProxyType({}),
) -> dict[str, Any]:
    """Return the best plans at every context and number of GPUs, as plain data.

    Meshes in `chosen` have the memory options that were chosen for them, at every context; the others have the job's.

    Sizes are bytes, times seconds (six digits). `points[i][j]` is `contexts[i]` on `gpus[j]`. Repeated values are
    written once: `items` names the numbers of a plan's `memory`; a row of `comm` is [index in `collectives`, bytes per
    call, calls, seconds of all calls]; numbers of `notes` are indices. `lines` has the best meshes of the job along all
    contexts. `heads` and `layouts` say which rank holds which heads and tokens, also for the meshes `also`.

    Raises:
        LongspanError: if `gpus` is below 1.
    """
    collectives: Distinct = {}
    notes: Distinct = {}

    def planned(context: int, gpus: int) -> Search:
        return search(model, replace(job, context=context), gpus, hardware, plan_of)

    def plan_of(model: ModelShape, job: Job, mesh: Mesh, hardware: Hardware) -> Plan:
        return plan_mesh(model, replace(job, memory=chosen.get(mesh, job.memory)), mesh, hardware)

    points = [
        [_point(planned(context, n), n, job, collectives, notes) for n in gpu_counts(gpus)] for context in contexts(job)
    ]
    shown = {Mesh(*plan["mesh"]) for row in points for point in row for plan in point["plans"]} | set(also)
    return {
        "model": model.name,
        "parameters": parameters(model.params),
        "job": {**asdict(job), "gpus": gpus},
        "hardware": {"name": hardware.name, "memory_bytes": int(hardware.memory_bytes)},
        "contexts": contexts(job),
        "gpus": gpu_counts(gpus),
        "items": dict(ITEMS),
        "heads": _heads(model, shown),
        "layouts": held_tokens(job, shown),
        "collectives": [dict(zip(("op", "axis", "what", "link", "method"), row, strict=True)) for row in collectives],
        "notes": list(notes),
        "points": points,
        "lines": [_line(model, plan.job, plan.mesh, hardware) for plan in best_plans(planned(job.context, gpus), gpus)],
    }


Distinct = dict[Any, int]
"""Distinct values in order of appearance, each with its index."""


def _index(of: Distinct, value: Any) -> int:
    return of.setdefault(value, len(of))


def _point(result: Search, gpus: int, job: Job, collectives: Distinct, notes: Distinct) -> dict[str, Any]:
    best = best_plans(result, gpus)
    return {
        "legal": len(result.plans),
        "rejected": len(result.rejected),
        "recommended": None if result.recommended is None else best.index(result.recommended),
        "command": None if result.recommended is None else command(result.recommended),
        "plans": [_compact(plan, job, collectives, notes) for plan in best],
    }


def _compact(plan: Plan, job: Job, collectives: Distinct, notes: Distinct) -> dict[str, Any]:
    return {
        "mesh": [getattr(plan.mesh, axis) for axis in AXES],
        "ring_impl": plan.ring_impl,
        "memory_options": None if plan.job.memory == job.memory else plan.job.memory.describe(),
        "fits": plan.fits,
        "runs": plan.runs,
        "memory": [plan.memory_bytes[item] for item in ITEMS],
        "step": six(plan.step_seconds),
        "compute": six(plan.compute_seconds),
        "exposed": six(plan.exposed_seconds),
        "tokens_per_second": six(plan.tokens_per_second),
        "mfu": six(plan.mfu),
        "comm": [
            [_index(collectives, (c.op, c.axis, c.what, c.link, c.method)), c.bytes_per_gpu, c.count, six(c.seconds)]
            for c in plan.comm
        ],
        "notes": [_index(notes, note) for note in plan.notes],
    }


def _line(model: ModelShape, job: Job, mesh: Mesh, hardware: Hardware) -> dict[str, Any]:
    """Return one mesh at every context that it can hold; the first `fitting` of them fit in memory."""
    jobs = [replace(job, context=context) for context in contexts(job)]
    plans = [plan_mesh(model, each, mesh, hardware) for each in jobs if refusal(model, each, mesh) is None]
    return {
        "mesh": str(mesh),
        "contexts": [plan.job.context for plan in plans],
        "fitting": sum(plan.fits for plan in plans),
        "memory": [plan.memory_total_bytes for plan in plans],
        "step": [six(plan.step_seconds) for plan in plans],
    }


def six(number: float) -> float:
    """Round to six digits: more than a prediction has, and a third of the file."""
    return float(f"{number:.6g}")


def _heads(model: ModelShape, meshes: set[Mesh]) -> dict[str, Any]:
    """Return the heads of each Ulysses rank, by "tensor,ulysses", of the first layer whose heads are sharded.

    A shard is [first query head, end, first KV head, end], counted within a tensor rank's heads. `mixed`: other layers
    do not shard heads.
    """
    sharded = [layer.mixer for layer, _ in model.layer_kinds if layer.mixer.shards_heads]
    mixed = 0 < len(sharded) < len(model.layer_kinds)
    if not sharded:
        return {"q": model.q_heads, "kv": model.kv_heads, "shards": {}, "mixed": mixed}
    q, kv = sharded[0].q_heads, sharded[0].kv_heads
    shards = {}
    for tensor, ulysses in sorted({(mesh.tensor, mesh.ulysses) for mesh in meshes}):
        of_ranks = head_shards(q, kv, tensor, ulysses)[:RANKS_SHOWN]
        shards[f"{tensor},{ulysses}"] = [[s.q_start, s.q_stop, s.kv_start, s.kv_stop] for s in of_ranks]
    return {"q": q, "kv": kv, "shards": shards, "mixed": mixed}


def held_tokens(job: Job, meshes: set[Mesh]) -> dict[str, Any]:
    """Return which rank holds which tokens, by "ring,ulysses": the layout's name, and at every context the runs of the
    first ranks of a sequence group (`parts`) and of the first ring blocks, flat: [start, stop, start, stop, ...].

    Groups of up to `PARTS_SHOWN` ranks list all ranks.
    """
    layouts: dict[str, Any] = {}
    for ring, ulysses in sorted({(mesh.ring, mesh.ulysses) for mesh in meshes}):
        layout = choose_layout(job.layout, ring, ulysses)
        parts = layout.size if layout.size <= PARTS_SHOWN else min(layout.size, RANKS_SHOWN)
        layouts[f"{ring},{ulysses}"] = {
            "kind": layout.kind,
            "contexts": [
                {
                    "parts": [_flat(layout.spans(context, rank)) for rank in range(parts)],
                    "blocks": [_flat(layout.block_spans(context, rank)) for rank in range(min(ring, RANKS_SHOWN))],
                }
                for context in contexts(job)
            ],
        }
    return layouts


def _flat(spans: Iterable[Span]) -> list[int]:
    return [place for span in spans for place in span]


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
    memories: Distinct = {}
    mesh_sizes: Distinct = {}

    def indices(plan: Plan) -> tuple[int, int]:
        sizes = tuple(getattr(plan.mesh, axis) for axis in AXES)
        return _index(mesh_sizes, sizes), _index(memories, tuple(plan.memory_bytes[item] for item in ITEMS))

    def times(plan: Plan) -> list[float]:
        return [six(each) for each in (plan.step_seconds, plan.compute_seconds, plan.exposed_seconds)]

    held: list[list[int]] = []
    timed: list[list[list[float]]] = [[] for _ in kinds]
    for how, switched, batch, context, count in product(checkpointing, options.values(), batches, near, counts):
        asked = replace(job, memory=_memory(how, switched), batch=batch, context=context)
        legal = [mesh for mesh in _without_tensor(count) if refusal(model, asked, mesh) is None]
        plans = sorted((Plan(model, asked, mesh, hardware) for mesh in legal), key=lambda p: p.memory_total_bytes)
        held.append([index for plan in plans for index in indices(plan)])
        for kind, points in zip(kinds, timed, strict=True):
            fitting = (with_faster_ring(replace(plan, hardware=kind)) for plan in plans if _may_fit(plan, kind))
            best = sorted((plan for plan in fitting if plan.fits), key=sort_key)[:BEST_TIMED]
            points.append([number for plan in best for number in (*indices(plan), *times(plan))])
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
        "asked": _flags(model, job),
        "flags": [[" ".join(memory_flags(_memory(how, each))) for each in options.values()] for how in checkpointing],
        "flops": [[model_flops(model, replace(job, batch=b, context=n)) for n in near] for b in batches],
        "meshes": list(mesh_sizes),
        "memories": list(memories),
        "held": held,
        "timed": timed,
    }


def _may_fit(plan: Plan, kind: Hardware) -> bool:
    """Whether a mesh fits on a kind of GPU, with any ring implementation if the job leaves it open."""
    impls: tuple[RingImpl, ...] = (plan.job.ring_impl,)
    if plan.job.ring_impl == "auto" and plan.mesh.ring > 1:
        impls = RING_IMPLS
    return any(replace(plan, hardware=kind, job=replace(plan.job, ring_impl=impl)).fits for impl in impls)


def _flags(model: ModelShape, job: Job) -> str:
    """Return the flags of `longspan plan` that no switch or slider changes."""
    flags = [f"--mode {job.mode}", f"--dtype {job.dtype}", *model.tuning.flags]
    flags += [pictures.flag(model.tower) for pictures in job.pictures if model.tower is not None]
    named = {"layout": job.layout, "ring-impl": job.ring_impl}
    flags += [f"--{name} {value}" for name, value in named.items() if value != "auto"]
    flags += [f"--overlap-chunks {job.overlap_chunks}"] * (job.overlap_chunks > 1)
    flags += [f"--wire-dtype {job.wire_dtype}"] * (job.wire_dtype != "exact")
    flags += ["--documents"] * job.documents
    switches = {"fsdp": job.weight_sharding, "kv-replication": job.kv_replication}
    return " ".join([*flags, *(f"--no-{name}" for name, on in switches.items() if not on)])
