"""A self-contained HTML page of a plan, which opens offline.

`grid` has the job on all meshes at other contexts and on other numbers of GPUs: the page's sliders.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from importlib.resources import files
from types import MappingProxyType
from typing import Any

from longspan.core.formatting import parameters
from longspan.core.memory import Memory
from longspan.core.parallel import AXES
from longspan.core.validation import LARGEST_COUNT
from longspan.plan.cost.memory import ITEMS
from longspan.plan.hardware import Hardware
from longspan.plan.job import Job
from longspan.plan.search import MOST_GPUS, Plan, Search, cost, search
from longspan.plan.shape import ModelShape
from longspan.plan.views.report import Report, command, yaml

MESHES_SHOWN = 6
"""Plans listed per point, besides the meshes of one axis and the recommended one."""

SHORTEST, LONGEST = 1 << 12, 1 << 24
"""Shortest and longest context of every grid; a job outside them widens it."""


def page(report: Report) -> str:
    """Return the page of a report: its plans, and the job at other contexts and on other numbers of GPUs."""
    chosen = {str(plan.mesh): plan.job.memory for plan in report.result.plans}
    return render(report.to_dict(), grid(report.model, report.job, report.gpus, report.hardware, chosen))


def render(report: dict[str, Any], grid: dict[str, Any]) -> str:
    """Return the page of `Report.to_dict` and `grid` of one job."""
    job, gpu = report["job"], report["hardware"]["name"]
    title = f"longspan plan: {report['model']['name']}, {job['context']:,} tokens, {job['gpus']} x {gpu}"
    data = json.dumps({"report": report, "grid": grid}, separators=(",", ":"), allow_nan=False)
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
    pure = {f"{axis}={gpus}" for axis in AXES if axis != "data"}
    if result.recommended is not None:
        pure.add(str(result.recommended.mesh))
    return [plan for i, plan in enumerate(result.plans) if i < MESHES_SHOWN or str(plan.mesh) in pure]


def grid(
    model: ModelShape,
    job: Job,
    gpus: int,
    hardware: Hardware,
    chosen: Mapping[str, Memory] = MappingProxyType({}),
) -> dict[str, Any]:
    """Return the best plans at every context and number of GPUs, as plain data.

    Meshes in `chosen` (as text) have the memory options that were chosen for them, at every context; the others have
    the job's.

    Sizes are bytes, times seconds (six digits). `points[i][j]` is `contexts[i]` on `gpus[j]`. Repeated values are
    written once: `items` names the numbers of a plan's `memory`; a row of `comm` is [index in `collectives`, bytes per
    call, calls, seconds of all calls]; numbers of `notes` are indices.

    Raises:
        LongspanError: if `gpus` is below 1.
    """
    collectives: Distinct = {}
    notes: Distinct = {}

    def planned(context: int, gpus: int) -> Search:
        return search(model, replace(job, context=context), gpus, hardware, plan_of)

    def plan_of(model: ModelShape, job: Job, hardware: Hardware) -> Plan:
        return cost(model, replace(job, memory=chosen.get(str(job.parallel), job.memory)), hardware)

    points = [
        [_point(planned(context, n), n, job, collectives, notes) for n in gpu_counts(gpus)] for context in contexts(job)
    ]
    return {
        "parameters": parameters(model.params),
        "memory": job.memory.describe(),
        "contexts": contexts(job),
        "gpus": gpu_counts(gpus),
        "items": dict(ITEMS),
        "collectives": [dict(zip(("op", "axis", "what", "link", "method"), row, strict=True)) for row in collectives],
        "notes": list(notes),
        "points": points,
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
        "yaml": None if result.recommended is None else yaml(result.recommended),
        "command": None if result.recommended is None else command(result.recommended),
        "plans": [_compact(plan, job, collectives, notes) for plan in best],
    }


def _compact(plan: Plan, job: Job, collectives: Distinct, notes: Distinct) -> dict[str, Any]:
    return {
        "mesh": list(plan.mesh.degrees.values()),
        "layout": plan.c.layout.kind,
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


def six(number: float) -> float:
    """Round to six digits: more than a prediction has, and a third of the file."""
    return float(f"{number:.6g}")
