"""Merge the events of all ranks into one Chrome trace, and write it: JSON for Chrome and Perfetto, HTML and PNG."""

from __future__ import annotations

import gzip
import importlib.util
import json
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from longspan.core.errors import LongspanError
from longspan.tracing.spans import STEP, read_trace
from longspan.tracing.timeline import draw_timeline, render

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

    if not dist.is_initialized():
        return merge([(socket.gethostname(), events)])
    mine = gzip.compress(json.dumps((socket.gethostname(), list(events))).encode(), 1)
    return merge([json.loads(gzip.decompress(one)) for one in gather_objects(mine, group or dist.group.WORLD)])


def write(what: str, path: Path, write_to: Callable[[Path], object], out: IO[str] | None = None) -> None:
    """Make the folder, write a file, and print its path to `out`, by default stdout.

    Raises:
        LongspanError: if it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_to(path)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise LongspanError(f"the {what} cannot be written to {path}: {error}") from error
    print(f"{what} written to {path}", file=out or sys.stdout)


def write_timeline(events: Sequence[dict[str, Any]], stem: Path, title: str, out: IO[str] | None = None) -> None:
    """Write STEM.trace.json, STEM.html and, with matplotlib, STEM.png of a merged trace.

    Raises:
        LongspanError: for a trace without a step, or if a file cannot be written.
    """
    traces = read_trace(events)
    text = json.dumps({"schemaVersion": 1, "displayTimeUnit": "ms", "traceEvents": list(events)})
    page = render(traces, title)
    write("trace", Path(f"{stem}.trace.json"), lambda path: path.write_text(text), out)
    write("timeline", Path(f"{stem}.html"), lambda path: path.write_text(page, encoding="utf-8"), out)
    if importlib.util.find_spec("matplotlib") is None:
        print("no PNG of it: pip install matplotlib", file=out or sys.stdout)
        return
    write("timeline", Path(f"{stem}.png"), lambda path: draw_timeline(traces, title, path), out)
