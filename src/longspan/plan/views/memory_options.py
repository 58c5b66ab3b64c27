"""Each memory option on one mesh, as JSON and as a table, besides longest contexts that others have published."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from longspan.core.formatting import seconds, size
from longspan.plan.memory_search import MemoryRow
from longspan.plan.views.columns import Column, Columns


@dataclass(frozen=True)
class Published:
    """A longest context that others have published, measured by them with their code.

    Attributes:
        method: their method.
        source: the paper.
        model: as they call it.
        params: approximate number of parameters, to match models.
        gpus: number of GPUs.
        gpu: kind of GPU, as in `longspan.plan.hardware.CATALOGUE`; "" for any.
        context: tokens.
        note: their remark.
    """

    method: str
    source: str
    model: str
    params: float
    gpus: int
    gpu: str
    context: int
    note: str = ""


PUBLISHED = (
    Published("ALST", "arXiv:2506.13996", "Llama-8B", 8e9, 1, "h100", 500_000),
    Published("ALST", "arXiv:2506.13996", "Llama-8B", 8e9, 8, "h100", 3_700_000, "host memory is what limits"),
    Published("FPDT", "arXiv:2408.16978", "8B", 8e9, 4, "", 2_000_000, "GPUs as in the paper"),
    Published("UPipe", "arXiv:2602.21196", "Llama3-8B", 8e9, 8, "h100", 5_000_000),
)


def published(rows: Sequence[MemoryRow], gpus: int) -> list[Published]:
    """Return the published contexts of a model of about the same size on as many GPUs of the same kind."""
    if not rows:
        return []
    model, hardware = rows[0].plan.model, rows[0].plan.hardware
    return [
        found
        for found in PUBLISHED
        if found.gpus == gpus and found.gpu in ("", hardware.name) and abs(model.params / found.params - 1) < 0.15
    ]


def memory_options_dict(rows: Sequence[MemoryRow], gpus: int) -> dict[str, Any]:
    """Return the rows as plain data: sizes in bytes, times in seconds."""
    return {
        "mesh": asdict(rows[0].plan.mesh),
        "rows": [
            {
                "name": row.name,
                "memory": asdict(row.plan.job.memory),
                "fits": row.plan.fits,
                "memory_total_bytes": row.plan.memory_total_bytes,
                "saved_bytes": row.saved_bytes,
                "host_node_bytes": row.plan.offloaded.host_node_bytes,
                "disk_node_bytes": row.plan.offloaded.disk_node_bytes,
                "step_seconds": row.plan.step_seconds,
                "max_context": row.max_context,
                "max_mesh": None if row.max_mesh is None else asdict(row.max_mesh),
            }
            for row in rows
        ],
        "published": [asdict(found) for found in published(rows, gpus)],
    }


def memory_table(rows: Sequence[MemoryRow], gpus: int) -> Columns:
    """Return the table of `longspan plan --memory-options`: a row per memory option, then published contexts."""
    first = rows[0].plan
    theirs = published(rows, gpus)
    blank = [""] * len(theirs)
    notes = [f"; {found.note}" if found.note else "" for found in theirs]
    names = [f"theirs, not planned: {t.method} ({t.source}), {t.model}{n}" for t, n in zip(theirs, notes, strict=True)]
    stored = [row.plan.offloaded for row in rows]
    columns = [
        Column("memory option", [*(row.name for row in rows), *names], folds=True),
        Column("memory", [*(size(row.plan.memory_total_bytes) for row in rows), *blank], right=True),
        Column("saved", [*(_saved(row.saved_bytes) for row in rows), *blank], spare=4, right=True),
        Column("host / node", [*(_size(s.host_node_bytes) for s in stored), *blank], spare=2, right=True),
        Column("disk / node", [*(_size(s.disk_node_bytes) for s in stored), *blank], spare=3, right=True),
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
