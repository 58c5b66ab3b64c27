"""The memory options on one mesh as plain data, and what others have published beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from longspan.plan.memory_search import MemoryRow


@dataclass(frozen=True)
class Published:
    """A longest context that others have published; measured by them, with their code.

    Attributes:
        method: theirs.
        source: where it stands.
        model: theirs, as they call it.
        params: about how many, to tell whether a plan is of such a model.
        gpus: how many.
        gpu: of which kind, as in `longspan.plan.hardware.CATALOGUE`; "" for any.
        context: tokens.
        note: what they say besides.
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
    """Those of about the same model on as many GPUs of the kind."""
    if not rows:
        return []
    model, hardware = rows[0].plan.model, rows[0].plan.hardware
    return [
        found
        for found in PUBLISHED
        if found.gpus == gpus and found.gpu in ("", hardware.name) and abs(model.params / found.params - 1) < 0.15
    ]


def memory_options_dict(rows: Sequence[MemoryRow], gpus: int) -> dict[str, Any]:
    """The rows as the JSON has them: sizes in bytes, times in seconds."""
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
