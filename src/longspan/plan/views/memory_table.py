"""The table of `longspan plan --memory-options`."""

from __future__ import annotations

from collections.abc import Sequence

from longspan.plan.memory_search import MemoryRow
from longspan.plan.views.columns import Column, Columns
from longspan.plan.views.memory_options import published
from longspan.plan.views.units import seconds, size


def memory_table(rows: Sequence[MemoryRow], gpus: int) -> Columns:
    """A row for each memory option, and below those of others' publications, marked as theirs."""
    first = rows[0].plan
    theirs = published(rows, gpus)
    blank = [""] * len(theirs)
    notes = [f"; {found.note}" if found.note else "" for found in theirs]
    names = [f"theirs, not planned: {t.method} ({t.source}), {t.model}{n}" for t, n in zip(theirs, notes, strict=True)]
    there = [row.plan.offloaded for row in rows]
    columns = [
        Column("memory_option", [*(row.name for row in rows), *names], folds=True),
        Column("memory", [*(size(row.plan.memory_total_bytes) for row in rows), *blank], right=True),
        Column("saved", [*(_saved(row.saved_bytes) for row in rows), *blank], spare=4, right=True),
        Column("host / node", [*(_size(t.host_node_bytes) for t in there), *blank], spare=2, right=True),
        Column("disk / node", [*(_size(t.disk_node_bytes) for t in there), *blank], spare=3, right=True),
        Column("step", [*(seconds(row.plan.step_seconds) for row in rows), *blank], right=True),
        Column("fits", [*("yes" if row.plan.fits else "no" for row in rows), *blank]),
        Column(
            "longest context",
            [*(f"{row.max_context:,}" for row in rows), *(f"{found.context:,}" for found in theirs)],
            right=True,
        ),
        Column("on", [*(str(row.max_mesh or "") for row in rows), *blank], spare=1),
    ]
    return Columns(
        f"memory options on {first.mesh}, {first.job.context:,} tokens, GPUs of {size(first.hardware.memory_bytes)}",
        columns,
        [*(None if row.plan.fits else "red" for row in rows), *("dim" for _ in theirs)],
        [len(rows)] if theirs else [],
    )


def _size(number: int) -> str:
    return size(number) if number else "-"


def _saved(number: int) -> str:
    return f"-{size(-number)}" if number < 0 else _size(number)
