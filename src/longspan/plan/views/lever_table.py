"""The table of `longspan plan --levers`."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table

from longspan.plan.memory import LeverRow
from longspan.plan.views.levers import published
from longspan.plan.views.units import gb, seconds, size


def lever_table(rows: Sequence[LeverRow], gpus: int) -> Table:
    """A row for each lever, and below those of others' publications, marked as theirs."""
    first = rows[0].plan
    title = f"levers on {first.mesh}, at {first.job.context:,} tokens"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, collapse_padding=True)
    table.add_column("lever")
    for name in ("memory GB", "saved", "host/node", "disk/node", "step", "longest context"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        there = row.plan.offloaded
        table.add_row(
            row.name,
            gb(row.plan.memory_total_bytes),
            f"-{size(-row.saved_bytes)}" if row.saved_bytes < 0 else size(row.saved_bytes) if row.saved_bytes else "-",
            size(there.host_node_bytes) if there.host_node_bytes else "-",
            size(there.disk_node_bytes) if there.disk_node_bytes else "-",
            seconds(row.plan.step_seconds),
            f"{row.max_context:,}",
            style=None if row.plan.fits else "red",
        )
    theirs = published(rows, gpus)
    if theirs:
        table.add_section()
    for found in theirs:
        note = f"; {found.note}" if found.note else ""
        name = f"theirs, not planned: {found.method} ({found.source}), {found.model}{note}"
        table.add_row(name, *[""] * 5, f"{found.context:,}", style="dim")
    table.caption = f"memory of a GPU of {gb(first.hardware.memory_bytes)} GB; red: does not fit at this context"
    table.caption_justify = "left"
    return table
