"""The planner's tables on a terminal of any width."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from longspan.core.formatting import parameters, seconds, size
from longspan.plan.cost.memory import ITEMS
from longspan.plan.limits import GB, unsupported
from longspan.plan.memory_search import MemoryRow
from longspan.plan.methods import SHORT, Method
from longspan.plan.search import Plan, Search, format_items
from longspan.plan.views.report import Report, command

REASONS = 3
"""Printed reasons against meshes; the JSON has all."""

FOLDED = 24
"""Width of a folding column below which other columns are left out instead."""


@dataclass(frozen=True)
class _Column:
    """One column of a table.

    Attributes:
        name: its header.
        cells: one per row.
        spare: 0: always shown; of the others the highest is left out first if the columns do not fit.
        folds: whether its cells may break between words.
        right: whether cells are right-aligned.
    """

    name: str
    cells: Sequence[str]
    spare: int = 0
    folds: bool = False
    right: bool = False


def _print(
    console: Console,
    title: str,
    columns: Sequence[_Column],
    *,
    styles: Sequence[str | None] = (),
    total: bool = False,
    captions: Sequence[str] = (),
    header: bool = True,
) -> None:
    """Print a table, at most as wide as the console; `total`: with a line above the last row.

    A caption names the columns that are left out, and the width that shows all.
    """

    def table(shown: Sequence[_Column]) -> Padding:
        made = Table(show_header=header, box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
        for column in shown:
            widest = max(map(len, column.cells))
            name = column.name if len(column.name) <= widest else column.name.replace(" ", "\n", 1)
            made.add_column(
                Text(name, style="bold"),
                justify="right" if column.right else "left",
                no_wrap=not column.folds,
                overflow="fold",
                min_width=min(FOLDED, widest) if column.folds else max(widest, *map(len, name.split("\n"))),
            )
        rows = list(zip(*(column.cells for column in shown), strict=True))
        for row, cells in enumerate(rows):
            if total and row == len(rows) - 1:
                made.add_section()
            made.add_row(*map(Text, cells), style=styles[row] if styles else None)
        return Padding(made, (0, 0, 0, 2), expand=False)

    def width(shown: Sequence[_Column]) -> int:
        return Measurement.get(console, console.options.update(max_width=1 << 16), table(shown)).minimum

    shown = list(columns)
    while width(shown) > console.width and any(column.spare for column in shown):
        shown.remove(max(shown, key=lambda column: column.spare))
    left_out = ", ".join(column.name for column in columns if column not in shown)
    more = [f"not shown: {left_out} (a terminal of {width(columns)} columns shows all)"] if left_out else []
    console.print(Text(title, style="italic"))
    console.print(table(shown))
    for caption in (*captions, *more):
        console.print(Text(caption, style="dim"))
    console.print()


def show(report: Report, top: int = 6, console: Console | None = None) -> None:
    """Print the `top` ranked meshes, the recommended one in detail, and the rejected ones.

    A report with methods or rows of memory options prints these instead.
    """
    console = console or Console(highlight=False)
    result, advice = report.result, "" if report.suggestions is None else report.suggestions.describe()
    console.print(_title(report))
    if report.methods:
        _methods(report.methods, console)
        return
    if report.rows:
        _memory_options(report.rows, console)
        return
    if result.plans:
        _meshes(result, top, console)
    best = result.recommended or result.fastest
    if best is None:
        console.print(Text(_nothing_fits(result, advice), style="bold red"))
    else:
        _detail(best, console)
        if result.recommended is None:
            why = "; ".join(unsupported(best.model, best.job, best.mesh))
            console.print(Text(f"nothing that fits is recommended: {why}. {advice}".rstrip(), style="bold red"))
    if result.rejected:
        _rejected(result, console)


def _detail(best: Plan, console: Console) -> None:
    """Print a plan's memory, communication, notes and command."""
    _memory(best, console)
    if best.comm:
        _communication(best, console)
    for note in best.reasons:
        console.print(Text(f"note: {note}", style="yellow"))
    line = command(best)
    if line is not None:
        # No markup and no wrapping: the line is to be copied.
        console.print(Text("run:"))
        console.print(Text(f"  {line}", no_wrap=True), soft_wrap=True)


def _title(report: Report) -> Text:
    model, job, hardware = report.model, report.job, report.hardware
    active = f", {parameters(model.active_params)} active" if model.active_params != model.params else ""
    assumed = (
        "speeds as measured"
        if hardware.measured
        else f"assuming {hardware.matmul_efficiency:.0%} of peak in matrix products, "
        f"{hardware.attention_efficiency:.0%} in attention"
    )
    gpus = f"{report.gpus} x {hardware.name} ({hardware.memory_bytes / GB:.4g} GB)"
    return Text(
        f"{model.name} ({parameters(model.params)}{active}), {job.mode} at {job.context:,} tokens, "
        f"batch {job.batch}, {job.dtype}, on {gpus}; {assumed}"
    )


def _ring(plan: Plan) -> str:
    """Return the layout and the ring implementation, if there is a ring."""
    return "" if plan.ring_impl is None else f"{plan.c.layout.kind}, {plan.ring_impl}"


def _named(plan: Plan) -> str:
    """Return the mesh with layout and ring implementation."""
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
        captions.append(f"and {left} more (--top {len(result.plans)} shows all)")
    columns = [
        _Column("mesh", [str(plan.mesh) if len(rings) == 1 else _named(plan) for plan in plans], folds=True),
        _Column("memory", [size(plan.memory_total_bytes) for plan in plans], right=True),
        _Column("", [_verdict(plan, result) for plan in plans]),
        _Column("max context", [f"{plan.max_context:,}" for plan in plans], spare=1, right=True),
        _Column("step", [seconds(plan.step_seconds) for plan in plans], right=True),
        _Column("tokens/s", [f"{plan.tokens_per_second:,.0f}" for plan in plans], spare=2, right=True),
        _Column("MFU", [f"{plan.mfu:.0%}" for plan in plans], spare=3, right=True),
        _Column("sent/layer", [size(plan.comm_bytes_per_gpu_per_layer) for plan in plans], spare=4, right=True),
    ]
    if len({plan.job.memory for plan in result.plans}) > 1:  # chosen per mesh
        columns.append(_Column("memory options", [plan.job.memory.describe() for plan in plans], folds=True))
    styles = ["bold green" if plan is result.recommended else None if plan.fits else "red" for plan in plans]
    _print(console, "meshes, the fastest that fits first", columns, styles=styles, captions=captions)


def _memory(plan: Plan, console: Console) -> None:
    held = {name: nbytes for name, nbytes in plan.memory_bytes.items() if nbytes}
    columns = [
        _Column("size", [size(n) for n in (*held.values(), plan.memory_total_bytes)], right=True),
        _Column("item", [*held, "total"]),
        _Column("what", [*(ITEMS[name] for name in held), f"of {size(plan.hardware.memory_bytes)}"], folds=True),
    ]
    _print(console, f"memory per GPU, {_named(plan)}", columns, total=True, header=False)


def _communication(plan: Plan, console: Console) -> None:
    comm = plan.comm
    columns = [
        _Column("what", [*(c.what for c in comm), "all"], folds=True),
        _Column("collective", [*(c.op for c in comm), ""]),
        _Column("axis", [*(c.axis for c in comm), ""], spare=1),
        _Column("link", [*(c.link for c in comm), ""], spare=3),
        _Column("a call", [*(size(c.bytes_per_gpu) for c in comm), ""], spare=5, right=True),
        _Column("calls", [*(f"{c.count:,}" for c in comm), ""], spare=4, right=True),
        _Column("in all", [*(size(c.bytes_total) for c in comm), size(sum(c.bytes_total for c in comm))], right=True),
        _Column("time", [*(seconds(c.seconds) for c in comm), seconds(plan.comm_seconds)], right=True),
        _Column("overlaps with", [*(c.overlaps_with for c in comm), ""], spare=2),
    ]
    caption = f"exposed: {seconds(plan.exposed_seconds)} of a step of {seconds(plan.step_seconds)}"
    _print(console, f"sent per GPU and step, {_named(plan)}", columns, total=True, captions=[caption])


def _rejected(result: Search, console: Console) -> None:
    by_reason: dict[str, list[str]] = {}
    for mesh, reason in result.rejected:
        by_reason.setdefault(reason, []).append(str(mesh))
    shown = list(by_reason.items())[:REASONS]
    more = [f" and {len(names) - 3} more" if len(names) > 3 else "" for _, names in shown]
    columns = [
        _Column("reason", [reason for reason, _ in shown], folds=True),
        _Column("meshes", ["; ".join(n[:3]) + rest for (_, n), rest in zip(shown, more, strict=True)], folds=True),
    ]
    left = len(by_reason) - REASONS
    captions = [f"and {left} more reason{'s' if left > 1 else ''} (--json has all)"] if left > 0 else []
    _print(console, "meshes that cannot hold the job", columns, captions=captions, header=False)


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
    def column(name: str, cell: Callable[[Method, Plan], str], spare: int = 0, absent: str = "-") -> _Column:
        cells = [absent if method.plan is None else cell(method, method.plan) for method in methods]
        text = name in ("per layer", "fits")
        return _Column(name, cells, spare=spare, folds=name == "per layer", right=not text)

    columns = [
        _Column("method", [method.name for method in methods]),
        column("per layer", lambda m, _: m.ops_per_layer, 3),
        column("sent/layer", lambda m, p: size(m.method_bytes / len(p.model.layers)), 4),
        column("sent in all", lambda m, _: size(m.method_bytes), 1),
        column("time/layer", lambda m, p: seconds(m.method_seconds / len(p.model.layers)), 5),
        column(f"at {SHORT} tokens", lambda m, _: "-" if m.short_seconds is None else seconds(m.short_seconds), 7),
        column("across nodes", lambda m, _: "-" if m.apart_seconds is None else seconds(m.apart_seconds), 6),
        column("time in all", lambda m, _: seconds(m.method_seconds), 2),
        column("memory", lambda _, p: size(p.memory_total_bytes)),
        column("fits", lambda _, p: "yes" if p.fits else "no", absent="no"),
        column("step", lambda _, p: seconds(p.step_seconds)),
    ]
    remarks = [
        "without weights and gradients, which the table of meshes has",
        f"at {SHORT} tokens, and across nodes (every GPU in a node of its own): time of a layer",
        *(f"{method.name}: {method.reason}" for method in methods if method.plan is None),
    ]
    _print(console, "methods side by side, per GPU", columns, captions=remarks)


def _memory_options(rows: Sequence[MemoryRow], console: Console) -> None:
    first, stored = rows[0].plan, [row.plan.offloaded for row in rows]

    def bytes_or_none(number: int) -> str:
        return f"-{size(-number)}" if number < 0 else size(number) if number else "-"

    columns = [
        _Column("memory option", [row.name for row in rows], folds=True),
        _Column("memory", [size(row.plan.memory_total_bytes) for row in rows], right=True),
        _Column("saved", [bytes_or_none(row.saved_bytes) for row in rows], spare=4, right=True),
        _Column("host / node", [bytes_or_none(s.host_node_bytes) for s in stored], spare=2, right=True),
        _Column("disk / node", [bytes_or_none(s.disk_node_bytes) for s in stored], spare=3, right=True),
        _Column("step", [seconds(row.plan.step_seconds) for row in rows], right=True),
        _Column("fits", ["yes" if row.plan.fits else "no" for row in rows]),
        _Column("longest context", [f"{row.max_context:,}" for row in rows], right=True),
        _Column("on", [str(row.max_mesh or "") for row in rows], spare=1),
    ]
    title = f"memory options on {first.mesh}, {first.job.context:,} tokens, GPUs of {size(first.hardware.memory_bytes)}"
    _print(console, title, columns, styles=[None if row.plan.fits else "red" for row in rows])
