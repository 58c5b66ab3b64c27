"""The planner's tables on a terminal of any width."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from longspan.core.formatting import parameters, seconds, size
from longspan.core.memory import FASTEST
from longspan.plan.cost.peak_memory import ITEMS
from longspan.plan.limits import GB, unsupported
from longspan.plan.methods import Method
from longspan.plan.search import Plan, Search, format_items
from longspan.plan.views.report import Report, command, yaml

REASONS = 3
"""Printed reasons against meshes; the JSON has all."""


WIDE_NAME = 8
"""Characters of a column's name above which it takes two lines."""


def _print(
    console: Console,
    title: str,
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    text: Sequence[str] = (),
    styles: Sequence[str | None] = (),
    total: bool = False,
    captions: Sequence[str] = (),
) -> None:
    """Print a table; columns of `text` may break between words, the others are right-aligned.

    `total`: with a line above the last row. JSON has more columns.
    """
    table = Table(show_header=any(headers), box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for at, name in enumerate(headers):
        folds = name in text
        table.add_column(
            Text(name.replace(" ", "\n", 1) if len(name) > WIDE_NAME else name, style="bold"),
            justify="left" if folds else "right",
            no_wrap=not folds,
            overflow="fold",
            min_width=max((len(word) for cells in rows for word in cells[at].split()), default=0) if folds else None,
        )
    for at, cells in enumerate(rows):
        if total and at == len(rows) - 1:
            table.add_section()
        table.add_row(*map(Text, cells), style=styles[at] if styles else None)
    console.print(Text(title, style="italic"))
    console.print(Padding(table, (0, 0, 0, 2), expand=False))
    for caption in captions:
        console.print(Text(caption, style="dim"))
    console.print()


def show(report: Report, top: int = 6, *, details: bool = False, console: Console | None = None) -> None:
    """Print the recommended mesh with the file and the command that run it, and the `top` ranked meshes.

    `details`: also its memory item by item, its messages and notes, and the meshes that cannot hold the job. A report
    with methods prints these instead.
    """
    console = console or Console(highlight=False)
    result = report.result
    console.print(_title(report))
    console.print()
    if report.methods:
        _methods(report.methods, console)
        return
    best = result.recommended or result.fastest
    _answer(report, best, details, console)
    if result.plans:
        _meshes(result, top, console)
    if best is not None and details:
        _memory(best, console)
        if best.comm:
            _communication(best, console)
        _notes(best.reasons, console)
    if result.rejected and (details or not result.plans):
        _rejected(result, console)
    if not details:
        console.print(
            Text("--details: memory and messages item by item, all notes, and meshes that cannot hold the job")
        )


def _answer(report: Report, best: Plan | None, details: bool, console: Console) -> None:
    """Print what is recommended, and what runs it; if nothing is, why, and what would fit.

    `details`: all notes follow later.
    """
    advice = "" if report.suggestions is None else report.suggestions.describe()
    if best is None:
        console.print(Text(_nothing_fits(report.result, advice), style="bold red"))
        console.print()
        return
    if report.result.recommended is None:
        why = "; ".join(unsupported(best.model, best.job))
        console.print(Text(f"nothing that fits is recommended: {why}. {advice}".rstrip(), style="bold red"))
        console.print()
        return
    unit = {"train": "step", "prefill": "prefill", "decode": "token"}[best.job.mode]
    of_gpu = f"{size(best.memory_total_bytes)} of {size(best.hardware.memory_bytes)} per GPU"
    tokens = "" if unit == "token" else f", {best.tokens_per_second:,.0f} tokens/s"
    answer = f"recommended: {_named(best)}: {of_gpu}, {seconds(best.step_seconds)} per {unit}{tokens}"
    console.print(Text(answer, style="bold green"))
    if best.job.memory != FASTEST:
        host = best.offloaded.host_node_bytes
        on_host = f"; {size(host)} of host memory per node" if host else ""
        console.print(Text(f"memory options: {best.job.memory.describe()}{on_host}"))
    file = yaml(best)
    if file is None:
        axes = ", ".join(f"{axis}={n}" for axis, n in best.mesh.degrees.items() if n > 1)
        console.print(Text(f"no command runs this job; in a script its mesh is longspan.init_mesh({axes})"))
    else:
        # No markup and no wrapping: the lines are to be copied.
        console.print(Text("plan.yaml:"))
        console.print(Text(textwrap.indent(file, "  "), no_wrap=True), soft_wrap=True, end="")
        console.print(Text(f"run: {command(best)}", no_wrap=True), soft_wrap=True)
    if not details:
        _notes(best.cautions, console)
    console.print()


def _notes(notes: Sequence[str], console: Console) -> None:
    for note in notes:
        console.print(Text(f"note: {note}", style="yellow"))


def _title(report: Report) -> Text:
    model, job, hardware = report.model, report.job, report.hardware
    active = f", {parameters(model.active_params)} active" if model.active_params != model.params else ""
    assumed = (
        "speeds as measured"
        if hardware.measured
        else f"assuming {hardware.matmul_efficiency:.0%} of peak in products, {hardware.attention_words}"
    )
    gpus = f"{report.gpus} x {hardware.name} ({hardware.memory_bytes / GB:.4g} GB)"
    return Text(
        f"{model.name} ({parameters(model.params)}{active}), {job.mode} at {job.context:,} tokens, "
        f"batch {job.batch}, {job.dtype}, on {gpus}; {assumed}"
    )


def _ring(plan: Plan) -> str:
    """Return the layout of tokens, if keys and values go round a ring."""
    rings = plan.mesh.ring > 1 and plan.job.mode != "decode" and plan.job.prefill_chunk is None
    return plan.c.layout.kind if rings else ""


def _named(plan: Plan) -> str:
    """Return the mesh with the layout of its ring."""
    return f"{plan.mesh} ({_ring(plan)})" if _ring(plan) else str(plan.mesh)


def _verdict(plan: Plan, result: Search) -> str:
    if plan is result.recommended:
        return "recommended"
    if plan.headroom_bytes < 0:
        return f"{size(-plan.headroom_bytes)} short"
    return "host short" if not plan.fits else "" if plan.runs else "planned only"


def _meshes(result: Search, top: int, console: Console) -> None:
    plans = list(result.plans[:top])
    best = result.recommended
    if best is not None and all(plan is not best for plan in plans):
        plans[-1:] = [best]
    rings = {_ring(plan) for plan in plans} - {""}
    captions = [f"rings: {ring}" for ring in rings] if len(rings) == 1 else []
    if any(plan.fits and not plan.runs for plan in plans):
        captions.append("planned only: this version does not run it")
        if best is not None and best is plans[-1]:
            captions.append(f"recommended: the fastest that runs, number {result.plans.index(best) + 1} of all")
    left = len(result.plans) - top
    if left > 0:
        captions.append(f"and {left} more (--json lists all)")
    headers = ["mesh", "memory", "verdict", "max context", "step", "tokens/s", "MFU"]
    rows = [
        [
            str(plan.mesh) if len(rings) == 1 else _named(plan),
            size(plan.memory_total_bytes),
            _verdict(plan, result),
            f"{plan.max_context:,}",
            seconds(plan.step_seconds),
            f"{plan.tokens_per_second:,.0f}",
            f"{plan.mfu:.0%}",
        ]
        for plan in plans
    ]
    if len({plan.job.memory for plan in result.plans}) > 1:  # chosen per mesh: too long for a column
        chosen = [plan.job.memory.describe() for plan in plans]
        numbers = {text: str(number) for number, text in enumerate(dict.fromkeys(chosen), start=1)}
        headers.append("memory options")
        rows = [[*row, numbers[text]] for row, text in zip(rows, chosen, strict=True)]
        captions += [f"memory options {number}: {text}" for text, number in numbers.items()]
    styles = ["bold green" if plan is result.recommended else None if plan.fits else "red" for plan in plans]
    title, text = "meshes, the fastest that fits first", ("mesh", "verdict")
    _print(console, title, headers, rows, text=text, styles=styles, captions=captions)


def _memory(plan: Plan, console: Console) -> None:
    rows = [(size(nbytes), name, ITEMS[name]) for name, nbytes in plan.memory_bytes.items() if nbytes]
    rows.append((size(plan.memory_total_bytes), "total", f"of {size(plan.hardware.memory_bytes)}"))
    headers = ("memory", "item", "content")
    _print(console, f"memory per GPU, {_named(plan)}", headers, rows, text=("item", "content"), total=True)


def _communication(plan: Plan, console: Console) -> None:
    comm = plan.comm
    rows = [
        (c.what, c.op, c.axis, f"{c.count:,}", size(c.bytes_total), seconds(c.seconds), c.overlaps_with) for c in comm
    ]
    rows.append(("all", "", "", "", size(sum(c.bytes_total for c in comm)), seconds(plan.comm_seconds), ""))
    headers = ("what", "collective", "axis", "calls", "bytes", "time", "overlaps with")
    caption = f"exposed: {seconds(plan.exposed_seconds)} of a step of {seconds(plan.step_seconds)}"
    title, text = f"sent per GPU and step, {_named(plan)}", ("what", "collective", "axis", "overlaps with")
    _print(console, title, headers, rows, text=text, total=True, captions=[caption])


def _rejected(result: Search, console: Console) -> None:
    by_reason: dict[str, list[str]] = {}
    for mesh, reason in result.rejected:
        by_reason.setdefault(reason, []).append(str(mesh))
    rows = []
    for reason, names in list(by_reason.items())[:REASONS]:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        rows.append((reason, "; ".join(names[:3]) + more))
    left = len(by_reason) - REASONS
    captions = [f"and {left} more reason{'s' if left > 1 else ''} (--json has all)"] if left > 0 else []
    headers = ("reason", "meshes")
    _print(console, "meshes that cannot hold the job", headers, rows, text=headers, captions=captions)


def _nothing_fits(result: Search, advice: str) -> str:
    if not result.plans:
        return "no mesh can hold this job"
    nearest = result.plans[0]
    longest = max(result.plans, key=lambda plan: plan.max_context)
    so_far = (
        f"the longest context that fits is {longest.max_context:,} ({longest.mesh})"
        if longest.max_context
        else "no context fits, however short"
    )
    return (
        f"nothing fits; the nearest is {nearest.mesh}: {nearest.short_of(0)[0]}. Item by item: "
        f"{format_items(nearest.memory_bytes)}. Without changes, {so_far}. {advice}"
    ).rstrip()


def _methods(methods: Sequence[Method], console: Console) -> None:
    rows = []
    for method in methods:
        if (plan := method.plan) is None:
            rows.append((method.name, *["-"] * 4, "no", "-"))
            continue
        each = size(method.method_bytes / len(plan.model.layers))
        fits = "yes" if plan.fits else "no"
        memory = size(plan.memory_total_bytes)
        in_all = seconds(method.method_seconds)
        rows.append((method.name, method.ops_per_layer, each, in_all, memory, fits, seconds(plan.step_seconds)))
    remarks = [
        "sent and time: without weights and gradients, which the table of meshes has",
        *(f"{method.name} {method.reason}" for method in methods if method.plan is None),
    ]
    headers = ("method", "per layer", "sent / layer", "time", "memory", "fits", "step")
    _print(console, "methods side by side, per GPU", headers, rows, text=("method", "per layer"), captions=remarks)
