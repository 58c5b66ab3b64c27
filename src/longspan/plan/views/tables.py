"""The planner's tables on a terminal: one screen that a person reads."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from longspan.plan.cost.memory import ITEMS
from longspan.plan.hardware import Hardware
from longspan.plan.job import Job, layout_of
from longspan.plan.limits import not_in_this_version
from longspan.plan.memory import LeverRow, what_would_do
from longspan.plan.methods import SHORT, Method
from longspan.plan.models.shape import ModelShape
from longspan.plan.search import Plan, Search, spelled_items
from longspan.plan.views.lever_table import lever_table
from longspan.plan.views.report import command
from longspan.plan.views.units import GB, gb, seconds, size

REASONS = 3
"""Reasons against meshes that are printed; the JSON has all."""


def show(
    found: Search,
    model: ModelShape,
    job: Job,
    gpus: int,
    hardware: Hardware,
    methods: Sequence[Method] = (),
    top: int = 6,
    levers: Sequence[LeverRow] = (),
    console: Console | None = None,
) -> None:
    """Print what was found: the meshes ranked, the recommended one in detail, what was rejected, the methods."""
    console = console or Console(highlight=False)
    console.print(_title(model, job, gpus, hardware))
    if methods:
        console.print(_methods(methods))
        return
    if levers:
        console.print(lever_table(levers, gpus))
        return
    if found.plans:
        console.print(_meshes(found, top))
    best = found.recommended
    if best is None:
        console.print(_nothing_fits(found, model, job, gpus, hardware))
    else:
        console.print(_memory(best))
        if best.comm:
            console.print(_communication(best))
        for note in best.reasons:
            console.print(Text(f"note: {note}", style="yellow"))
        said = command(best)
        if said is not None:
            # No markup and no wrapping: the line is there to be copied.
            console.print(Text("run:"))
            console.print(Text(f"  {said}", no_wrap=True), soft_wrap=True)
    if found.rejected:
        console.print(_rejected(found))


def _title(model: ModelShape, job: Job, gpus: int, hardware: Hardware) -> Text:
    active = f", {model.active_params / 1e9:.3g} G active" if model.active_params != model.params else ""
    assumed = (
        "speeds as measured"
        if hardware.measured
        else f"assuming {hardware.matmul_efficiency:.0%} of peak in matrix products, "
        f"{hardware.attention_efficiency:.0%} in attention"
    )
    return Text(
        f"{model.name} ({model.params / 1e9:.4g} G parameters{active}), {job.mode} at {job.context:,} tokens, "
        f"batch {job.batch}, {job.dtype}, on {gpus} x {hardware.name} ({hardware.memory_bytes / GB:.4g} GB); {assumed}"
    )


def _table(title: str, *, header: bool = True) -> Table:
    return Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, collapse_padding=True, show_header=header)


def _whole(cells: list[str]) -> list[Text]:
    """Cells that are not broken into lines: the first column folds before they do."""
    return [Text(cell.replace(" ", "\u00a0"), overflow="fold") for cell in cells]


def _named(plan: Plan) -> str:
    """The mesh, and with a ring how tokens lie and how keys and values go round."""
    if plan.ring_impl is None:
        return str(plan.mesh)
    return f"{plan.mesh} ({layout_of(plan.job, plan.mesh).kind}, {plan.ring_impl})"


def _meshes(found: Search, top: int) -> Table:
    table = _table("meshes, the fastest that fits first")
    table.add_column("mesh", min_width=11)
    for name in ("memory", "max context", "step", "tokens/s", "MFU", "sent/layer", ""):
        table.add_column(name, justify="right" if name else "left", no_wrap=name == "")
    differ = len({plan.job.memory for plan in found.plans}) > 1  # chosen for each mesh
    if differ:
        table.add_column("levers", overflow="fold")
    for plan in found.plans[:top]:
        chosen = plan is found.recommended
        short = f"{size(-plan.headroom_bytes)} short"
        cells = [
            size(plan.memory_total_bytes),
            f"{plan.max_context:,}",
            seconds(plan.step_seconds),
            f"{plan.tokens_per_second:,.0f}",
            f"{plan.mfu:.0%}",
            size(plan.comm_bytes_per_gpu_per_layer),
            "recommended" if chosen else short if not plan.fits else "" if plan.runs else "planned",
        ]
        style = "bold green" if chosen else None if plan.fits else "red"
        levers = [plan.job.memory.described()] if differ else []
        table.add_row(_named(plan), *_whole(cells), *levers, style=style)
    left = len(found.plans) - top
    if left > 0:
        table.caption = f"and {left} more (--top {len(found.plans)})"
        table.caption_justify = "left"
    return table


def _memory(plan: Plan) -> Table:
    table = _table(f"memory per GPU, {_named(plan)}", header=False)
    table.add_column("GB", justify="right")
    table.add_column("item")
    table.add_column("what")
    for name, held in plan.memory_bytes.items():
        if held:
            table.add_row(f"{gb(held)} GB", name, ITEMS[name])
    table.add_section()
    table.add_row(f"{gb(plan.memory_total_bytes)} GB", "total", f"of {gb(plan.hardware.memory_bytes)} GB")
    return table


def _communication(plan: Plan) -> Table:
    table = _table(f"sent per GPU and step, {_named(plan)}")
    for name in ("what", "collective", "axis", "link"):
        table.add_column(name)
    for name in ("a call", "calls", "in all", "time"):
        table.add_column(name, justify="right")
    table.add_column("beside")
    for c in plan.comm:
        numbers = [size(c.bytes_per_gpu), f"{c.count:,}", size(c.bytes_total), seconds(c.seconds)]
        table.add_row(c.what, *_whole([c.op, c.axis, c.link, *numbers, c.beside]))
    table.add_section()
    total = sum(c.bytes_total for c in plan.comm)
    table.add_row("all", "", "", "", "", "", size(total), seconds(plan.comm_seconds))
    table.caption = (
        f"beside: what it runs beside. Not hidden: {seconds(plan.exposed_seconds)} of a step of "
        f"{seconds(plan.step_seconds)}"
    )
    table.caption_justify = "left"
    return table


def _rejected(found: Search) -> Table:
    table = _table("meshes that cannot be", header=False)
    table.add_column("reason")
    table.add_column("meshes")
    by_reason: dict[str, list[str]] = {}
    for mesh, reason in found.rejected:
        by_reason.setdefault(reason, []).append(str(mesh))
    for reason, names in list(by_reason.items())[:REASONS]:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        table.add_row(reason, "; ".join(names[:3]) + more)
    if len(by_reason) > REASONS:
        table.caption = f"and {len(by_reason) - REASONS} more reasons (--json has all)"
        table.caption_justify = "left"
    return table


def _nothing_fits(found: Search, model: ModelShape, job: Job, gpus: int, hardware: Hardware) -> Text:
    if not found.plans:
        return Text("no mesh can hold this job", style="bold red")
    nearest = found.plans[0]
    if nearest.fits:  # and is not recommended
        return Text(
            f"what fits is only planned, `longspan train` does not run it: the fastest is {nearest.mesh}, and "
            f"{'; '.join(not_in_this_version(model, nearest.job, nearest.mesh))}. "
            f"{what_would_do(model, job, gpus, hardware)}",
            style="bold red",
        )
    longest = max(found.plans, key=lambda plan: plan.max_context)
    so_far = (
        f"the longest context that fits is {longest.max_context:,} ({longest.mesh})"
        if longest.max_context
        else "no context fits, however short"
    )
    return Text(
        f"nothing fits; the nearest is {nearest.mesh}: {nearest.reasons[0]}. Item by item: "
        f"{spelled_items(nearest.memory_bytes)}. As it was asked for, {so_far}. "
        f"{what_would_do(model, job, gpus, hardware)}",
        style="bold red",
    )


def _methods(methods: Sequence[Method]) -> Table:
    table = _table("methods side by side, per GPU")
    columns = ["method", "per layer", "sent/layer", "sent in all", "time/layer", f"at {SHORT} tokens", "across nodes"]
    for name in [*columns, "time in all", "memory GB", "fits", "step"]:
        table.add_column(name, justify="left" if name in ("method", "per layer", "fits") else "right")
    reasons = []
    for method in methods:
        if method.plan is None:
            table.add_row(method.name, "-", *[""] * 7, "no")
            reasons.append(f"{method.name}: {method.reason}")
            continue
        plan, layers = method.plan, len(method.plan.model.layers)
        table.add_row(
            method.name,
            method.ops_per_layer,
            size(method.method_bytes / layers),
            size(method.method_bytes),
            seconds(method.method_seconds / layers),
            "-" if method.short_seconds is None else seconds(method.short_seconds),
            "-" if method.apart_seconds is None else seconds(method.apart_seconds),
            seconds(method.method_seconds),
            gb(plan.memory_total_bytes),
            "yes" if plan.fits else "no",
            seconds(plan.step_seconds),
        )
    said = [
        "weights and gradients are sent besides (see the table without --compare);",
        f"at {SHORT} tokens and across nodes (every GPU in a node of its own): time of a layer",
    ]
    table.caption = "\n".join([*said, *reasons])
    table.caption_justify = "left"
    return table
