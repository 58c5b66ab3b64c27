"""Data of the page and the drawing: plans of the job at other contexts and on other numbers of GPUs."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import asdict, replace
from typing import Any

from longspan.core.formatting import parameters
from longspan.core.layout import Span, choose_layout
from longspan.core.parallel import AXES
from longspan.core.validation import LARGEST_COUNT
from longspan.plan.cost.memory import ITEMS
from longspan.plan.hardware import Hardware
from longspan.plan.job import Job, Mesh, head_shards
from longspan.plan.limits import refusal
from longspan.plan.models.shape import ModelShape
from longspan.plan.search import MOST_GPUS, Plan, Search, plan_mesh, search
from longspan.plan.views.commands import command

BEST = 6
"""Plans listed per point, besides the meshes of one axis and the recommended one."""

RANKS_SHOWN = 16
"""Ranks whose heads are listed, as many as the diagram has room for."""

PARTS_SHOWN = 32
"""Ranks of a sequence group up to which all ranks' tokens are listed."""

SHORTEST, LONGEST = 1 << 12, 1 << 24
"""Shortest and longest context of every grid; a job outside them widens it."""


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
    return [plan for i, plan in enumerate(result.plans) if i < BEST or plan.mesh in pure]


def grid(model: ModelShape, job: Job, gpus: int, hardware: Hardware, also: Iterable[Mesh] = ()) -> dict[str, Any]:
    """Return the best plans at every context and number of GPUs, as plain data.

    Sizes are bytes, times seconds (six digits). `points[i][j]` is `contexts[i]` on `gpus[j]`. Repeated values are
    written once: `items` names the numbers of a plan's `memory`; a row of `comm` is [index in `collectives`, bytes per
    call, calls, seconds of all calls]; numbers of `notes` are indices. `lines` has the best meshes of the job along all
    contexts. `heads` and `layouts` say which rank holds which heads and tokens, also for the meshes `also`.

    Raises:
        LongspanError: if `gpus` is below 1.
    """
    collectives, notes = Distinct(), Distinct()
    points = []
    for context in contexts(job):
        at_context = replace(job, context=context)
        points.append([_point(search(model, at_context, n, hardware), n, collectives, notes) for n in gpu_counts(gpus)])
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
        "collectives": [
            dict(zip(("op", "axis", "what", "link", "method"), row, strict=True)) for row in collectives.rows
        ],
        "notes": notes.rows,
        "points": points,
        "lines": [
            _line(model, job, plan.mesh, hardware) for plan in best_plans(search(model, job, gpus, hardware), gpus)
        ],
    }


class Distinct:
    """Distinct values in order of appearance, each with its index."""

    def __init__(self) -> None:
        self._indices: dict[Hashable, int] = {}

    def index(self, value: Hashable) -> int:
        return self._indices.setdefault(value, len(self._indices))

    @property
    def rows(self) -> list[Any]:
        return list(self._indices)


def _point(result: Search, gpus: int, collectives: Distinct, notes: Distinct) -> dict[str, Any]:
    best = best_plans(result, gpus)
    return {
        "legal": len(result.plans),
        "rejected": len(result.rejected),
        "recommended": None if result.recommended is None else best.index(result.recommended),
        "command": None if result.recommended is None else command(result.recommended),
        "plans": [_compact(plan, collectives, notes) for plan in best],
    }


def _compact(plan: Plan, collectives: Distinct, notes: Distinct) -> dict[str, Any]:
    return {
        "mesh": [getattr(plan.mesh, axis) for axis in AXES],
        "ring_impl": plan.ring_impl,
        "fits": plan.fits,
        "runs": plan.runs,
        "memory": [plan.memory_bytes[item] for item in ITEMS],
        "step": six(plan.step_seconds),
        "compute": six(plan.compute_seconds),
        "exposed": six(plan.exposed_seconds),
        "tokens_per_second": six(plan.tokens_per_second),
        "mfu": six(plan.mfu),
        "comm": [
            [collectives.index((c.op, c.axis, c.what, c.link, c.method)), c.bytes_per_gpu, c.count, six(c.seconds)]
            for c in plan.comm
        ],
        "notes": [notes.index(note) for note in plan.notes],
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
