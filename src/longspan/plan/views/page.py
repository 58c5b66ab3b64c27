"""A self-contained HTML page of a plan, which opens offline, with sliders for context and GPUs."""

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
from longspan.plan.cost.peak_memory import ITEMS
from longspan.plan.hardware import Hardware
from longspan.plan.job import Job
from longspan.plan.search import MOST_GPUS, Plan, cost, search
from longspan.plan.shape import ModelShape
from longspan.plan.views.report import Report, plan_dict

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


def grid(
    model: ModelShape,
    job: Job,
    gpus: int,
    hardware: Hardware,
    chosen: Mapping[str, Memory] = MappingProxyType({}),
) -> dict[str, Any]:
    """Return the best plans at every context and number of GPUs: `points[i][j]` is `contexts[i]` on `gpus[j]`.

    Contexts are powers of two from 4k to 16M, and the job's own; numbers of GPUs from 1 to eight times the job's.
    Meshes in `chosen` (as text) have the memory options that were chosen for them, at every context; the others have
    the job's.

    Raises:
        LongspanError: if `gpus` is below 1.
    """
    first = min(SHORTEST, 1 << (job.context.bit_length() - 1))
    contexts = _powers(first, min(max(LONGEST, 4 * job.context), LARGEST_COUNT), job.context)
    counts = _powers(1, min(8 * gpus, MOST_GPUS), gpus)

    def plan_of(model: ModelShape, job: Job, hardware: Hardware) -> Plan:
        return cost(model, replace(job, memory=chosen.get(str(job.parallel), job.memory)), hardware)

    def point(context: int, gpus: int) -> dict[str, Any]:
        found = search(model, replace(job, context=context), gpus, hardware, plan_of)
        one_axis = {f"{axis}={gpus}" for axis in AXES if axis != "data"}
        shown = [
            plan
            for i, plan in enumerate(found.plans)
            if i < MESHES_SHOWN or str(plan.mesh) in one_axis or plan is found.recommended
        ]
        recommended = None if found.recommended is None else shown.index(found.recommended)
        return {"legal": len(found.plans), "recommended": recommended, "plans": [listed(plan) for plan in shown]}

    def listed(plan: Plan) -> dict[str, Any]:
        options = None if plan.job.memory == job.memory else plan.job.memory.describe()
        return {**plan_dict(plan, max_context=False), "memory_options": options, "notes": plan.notes}

    return {
        "parameters": parameters(model.params),
        "memory": job.memory.describe(),
        "contexts": contexts,
        "gpus": counts,
        "items": dict(ITEMS),
        "points": [[point(context, n) for n in counts] for context in contexts],
    }


def _powers(first: int, last: int, own: int) -> list[int]:
    """Return `own`, and the powers of two of `first` up to the first that is at least `last`."""
    powers = {own, first}
    while first < last:
        first *= 2
        powers.add(first)
    return sorted(powers)
