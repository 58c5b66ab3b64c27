"""Merge the events of all ranks into one Chrome trace, with one process per rank, in rank order."""

from __future__ import annotations

import gzip
import json
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longspan.tracing.spans import STEP

if TYPE_CHECKING:
    import torch.distributed as dist


def merge(of_ranks: Sequence[tuple[str, Sequence[dict[str, Any]]]]) -> list[dict[str, Any]]:
    """Return the events of all ranks in one list, with the rank as `pid`.

    Clocks of hosts differ: a host's events are shifted so that its first rank's step starts with rank 0's, as all ranks
    start behind one barrier.

    Args:
        of_ranks: host name and events of every rank, in order.
    """
    merged: list[dict[str, Any]] = []
    begins: dict[str, float] = {}
    for rank, (host, events) in enumerate(of_ranks):
        step = next((float(e["ts"]) for e in events if e["name"] == STEP), None)
        if step is not None:
            begins.setdefault(host, step)
        shift = next(iter(begins.values()), 0.0) - begins.get(host, 0.0) if begins else 0.0
        merged += [
            {"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": f"rank {rank} on {host}"}},
            {"ph": "M", "name": "process_sort_index", "pid": rank, "tid": 0, "args": {"sort_index": rank}},
        ]
        merged += [{**event, "pid": rank, "ts": float(event["ts"]) + shift} for event in events]
    return merged


def gather_trace(events: Sequence[dict[str, Any]], group: dist.ProcessGroup | None = None) -> list[dict[str, Any]]:
    """Return the merged trace of a group's ranks, by default of the job, on every rank. Collective."""
    import torch.distributed as dist

    from longspan.comm.objects import gather_objects

    mine = gzip.compress(json.dumps((socket.gethostname(), list(events))).encode(), 1)
    if not dist.is_initialized():
        return merge([json.loads(gzip.decompress(mine))])
    return merge([json.loads(gzip.decompress(one)) for one in gather_objects(mine, group or dist.group.WORLD)])


def write_trace(path: Path, events: Sequence[dict[str, Any]]) -> None:
    """Write a trace for chrome://tracing or ui.perfetto.dev; compress it if the name ends in .gz."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"schemaVersion": 1, "displayTimeUnit": "ms", "traceEvents": list(events)})
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())


def load_trace(path: Path) -> list[dict[str, Any]]:
    """Read a trace that `write_trace` wrote."""
    data = path.read_bytes()
    text = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
    events: list[dict[str, Any]] = json.loads(text)["traceEvents"]
    return events
