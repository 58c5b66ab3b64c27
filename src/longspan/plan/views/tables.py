"""The planner's tables on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Console
from rich.text import Text

from longspan.core.formatting import parameters, seconds, size
from longspan.plan.cost.memory import ITEMS
from longspan.plan.hardware import Hardware
from longspan.plan.job import Job
from longspan.plan.limits import GB, unsupported
from longspan.plan.memory_search import MemoryRow
from longspan.plan.methods import SHORT, Method
from longspan.plan.models.shape import ModelShape
from longspan.plan.search import Plan, Search, format_items
from longspan.plan.views.columns import Column, Columns
from longspan.plan.views.commands import command

REASONS = 3
"""Printed reasons against meshes; the JSON has all."""


def show(
    result: Search,
    model: ModelShape,
    job: Job,
    gpus: int,
    hardware: Hardware,
    methods: Sequence[Method] = (),
    top: int = 6,
    memory_options: Sequence[MemoryRow] = (),
    suggestions: str = "",
    console: Console | None = None,
) -> None:
    """Print the ranked meshes, the recommended one in detail, and the rejected ones.

    With `methods` (of `longspan.plan.methods.compare`) or `memory_options` (of
    `longspan.plan.memory_search.memory_rows`) print these instead. `top`: meshes to print; `suggestions`: sentences, if
    nothing is recommended.
    """
    console = console or Console(highlight=False)
    console.print(_title(model, job, gpus, hardware))
    if methods:
        _methods(methods).show(console)
        return
    if memory_options:
        _memory_options(memory_options).show(console)
        return
    if result.plans:
        _meshes(result, top).show(console)
    best = result.recommended or result.fastest
    if best is None:
        console.print(_nothing_fits(result, suggestions))
    else:
        _detail(best, console)
        if result.recommended is None:
            console.print(_nothing_runs(best, suggestions))
    if result.rejected:
        _rejected(result).show(console)


def _detail(best: Plan, console: Console) -> None:
    """Print a plan's memory, communication, notes and command."""
    _memory(best).show(console)
    if best.comm:
        _communication(best).show(console)
    for note in best.reasons:
        console.print(Text(f"note: {note}", style="yellow"))
    line = command(best)
    if line is not None:
        # No markup and no wrapping: the line is to be copied.
        console.print(Text("run:"))
        console.print(Text(f"  {line}", no_wrap=True), soft_wrap=True)


def _title(model: ModelShape, job: Job, gpus: int, hardware: Hardware) -> Text:
    active = f", {parameters(model.active_params)} active" if model.active_params != model.params else ""
    assumed = (
        "speeds as measured"
        if hardware.measured
        else f"assuming {hardware.matmul_efficiency:.0%} of peak in matrix products, "
        f"{hardware.attention_efficiency:.0%} in attention"
    )
    return Text(
        f"{model.name} ({parameters(model.params)}{active}), {job.mode} at {job.context:,} tokens, "
        f"batch {job.batch}, {job.dtype}, on {gpus} x {hardware.name} ({hardware.memory_bytes / GB:.4g} GB); {assumed}"
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


def _meshes(result: Search, top: int) -> Columns:
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
        Column("mesh", [str(plan.mesh) if len(rings) == 1 else _named(plan) for plan in plans], folds=True),
        Column("memory", [size(plan.memory_total_bytes) for plan in plans], right=True),
        Column("", [_verdict(plan, result) for plan in plans]),
        Column("max context", [f"{plan.max_context:,}" for plan in plans], spare=1, right=True),
        Column("step", [seconds(plan.step_seconds) for plan in plans], right=True),
        Column("tokens/s", [f"{plan.tokens_per_second:,.0f}" for plan in plans], spare=2, right=True),
        Column("MFU", [f"{plan.mfu:.0%}" for plan in plans], spare=3, right=True),
        Column("sent/layer", [size(plan.comm_bytes_per_gpu_per_layer) for plan in plans], spare=4, right=True),
    ]
    if len({plan.job.memory for plan in result.plans}) > 1:  # chosen per mesh
        columns.append(Column("memory options", [plan.job.memory.describe() for plan in plans], folds=True))
    styles = ["bold green" if plan is result.recommended else None if plan.fits else "red" for plan in plans]
    return Columns("meshes, the fastest that fits first", columns, styles, captions=captions)


def _memory(plan: Plan) -> Columns:
    held = {name: nbytes for name, nbytes in plan.memory_bytes.items() if nbytes}
    columns = [
        Column("size", [size(n) for n in (*held.values(), plan.memory_total_bytes)], right=True),
        Column("item", [*held, "total"]),
        Column("what", [*(ITEMS[name] for name in held), f"of {size(plan.hardware.memory_bytes)}"], folds=True),
    ]
    return Columns(f"memory per GPU, {_named(plan)}", columns, sections=[len(held)], header=False)


def _communication(plan: Plan) -> Columns:
    comm = plan.comm
    columns = [
        Column("what", [*(c.what for c in comm), "all"], folds=True),
        Column("collective", [*(c.op for c in comm), ""]),
        Column("axis", [*(c.axis for c in comm), ""], spare=1),
        Column("link", [*(c.link for c in comm), ""], spare=3),
        Column("a call", [*(size(c.bytes_per_gpu) for c in comm), ""], spare=5, right=True),
        Column("calls", [*(f"{c.count:,}" for c in comm), ""], spare=4, right=True),
        Column("in all", [*(size(c.bytes_total) for c in comm), size(sum(c.bytes_total for c in comm))], right=True),
        Column("time", [*(seconds(c.seconds) for c in comm), seconds(plan.comm_seconds)], right=True),
        Column("overlaps with", [*(c.overlaps_with for c in comm), ""], spare=2),
    ]
    caption = f"exposed: {seconds(plan.exposed_seconds)} of a step of {seconds(plan.step_seconds)}"
    title = f"sent per GPU and step, {_named(plan)}"
    return Columns(title, columns, sections=[len(comm)], captions=[caption])


def _rejected(result: Search) -> Columns:
    by_reason: dict[str, list[str]] = {}
    for mesh, reason in result.rejected:
        by_reason.setdefault(reason, []).append(str(mesh))
    shown = list(by_reason.items())[:REASONS]
    more = [f" and {len(names) - 3} more" if len(names) > 3 else "" for _, names in shown]
    columns = [
        Column("reason", [reason for reason, _ in shown], folds=True),
        Column("meshes", ["; ".join(n[:3]) + rest for (_, n), rest in zip(shown, more, strict=True)], folds=True),
    ]
    left = len(by_reason) - REASONS
    captions = [f"and {left} more reason{'s' if left > 1 else ''} (--json has all)"] if left > 0 else []
    return Columns("meshes that cannot hold the job", columns, captions=captions, header=False)


def _nothing_fits(result: Search, suggestions: str) -> Text:
    if not result.plans:
        return Text("no mesh can hold this job", style="bold red")
    nearest = result.plans[0]
    longest = max(result.plans, key=lambda plan: plan.max_context)
    so_far = (
        f"the longest context that fits is {longest.max_context:,} ({longest.mesh})"
        if longest.max_context
        else "no context fits, however short"
    )
    text = (
        f"nothing fits; the nearest is {nearest.mesh}: {nearest.short_of(0)[0]}. Item by item: "
        f"{format_items(nearest.memory_bytes)}. Without changes, {so_far}. {suggestions}"
    )
    return Text(text.rstrip(), style="bold red")


def _nothing_runs(best: Plan, suggestions: str) -> Text:
    why = "; ".join(unsupported(best.model, best.job, best.mesh))
    return Text(f"nothing that fits is recommended: {why}. {suggestions}".rstrip(), style="bold red")


def _methods(methods: Sequence[Method]) -> Columns:
    def column(name: str, cell: Callable[[Method, Plan], str], spare: int = 0, absent: str = "-") -> Column:
        cells = [absent if method.plan is None else cell(method, method.plan) for method in methods]
        text = name in ("per layer", "fits")
        return Column(name, cells, spare=spare, folds=name == "per layer", right=not text)

    columns = [
        Column("method", [method.name for method in methods]),
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
    ]
    reasons = [f"{method.name}: {method.reason}" for method in methods if method.plan is None]
    return Columns("methods side by side, per GPU", columns, captions=[*remarks, *reasons])


def _memory_options(rows: Sequence[MemoryRow]) -> Columns:
    first, stored = rows[0].plan, [row.plan.offloaded for row in rows]

    def bytes_or_none(number: int) -> str:
        return f"-{size(-number)}" if number < 0 else size(number) if number else "-"

    columns = [
        Column("memory option", [row.name for row in rows], folds=True),
        Column("memory", [size(row.plan.memory_total_bytes) for row in rows], right=True),
        Column("saved", [bytes_or_none(row.saved_bytes) for row in rows], spare=4, right=True),
        Column("host / node", [bytes_or_none(s.host_node_bytes) for s in stored], spare=2, right=True),
        Column("disk / node", [bytes_or_none(s.disk_node_bytes) for s in stored], spare=3, right=True),
        Column("step", [seconds(row.plan.step_seconds) for row in rows], right=True),
        Column("fits", ["yes" if row.plan.fits else "no" for row in rows]),
        Column("longest context", [f"{row.max_context:,}" for row in rows], right=True),
        Column("on", [str(row.max_mesh or "") for row in rows], spare=1),
    ]
    return Columns(
        f"memory options on {first.mesh}, {first.job.context:,} tokens, GPUs of {size(first.hardware.memory_bytes)}",
        columns,
        [None if row.plan.fits else "red" for row in rows],
    )
