"""Record a step under torch's profiler, and merge the events of all ranks into one Chrome trace."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import socket
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from longspan.comm.agree import gather_objects
from longspan.tracing.spans import STEP

_CATEGORIES = ("cpu_op", "user_annotation", "gpu_user_annotation", "kernel", "gpu_memcpy", "gpu_memset")
_SKIPPED = ("aten::as_strided", "aten::view", "aten::detach", "detach", "aten::alias", "aten::t", "aten::transpose")


class Recorder:
    """Records this rank's events of one step.

    Attributes:
        events: Chrome trace events of the profiler, without views and similar operators that take no time; empty before
            `step`.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self.events: list[dict[str, Any]] = []

    @contextlib.contextmanager
    def step(self, before: Callable[[], object] = lambda: None) -> Iterator[None]:
        """Record the body of the `with` statement, then wait for the device. `before` runs first, unrecorded."""
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler would print a line at each start and stop
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_gpu else [])]
        with profile(activities=activities) as profiler:
            before()  # inside, as the profiler starts at different times on the ranks
            with record_function(STEP):
                yield
                if self._on_gpu:
                    torch.cuda.synchronize()
        self.events = [
            event
            for event in exported_events(profiler)
            if event.get("ph") == "X" and event.get("cat") in _CATEGORIES and event["name"] not in _SKIPPED
        ]


def exported_events(profiler: Any) -> list[dict[str, Any]]:
    """Return the Chrome trace events of torch's profiler."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return events


def gather_trace(events: Sequence[dict[str, Any]], group: dist.ProcessGroup | None = None) -> list[dict[str, Any]]:
    """Return the merged trace of a group's ranks, by default of the job, on every rank. Collective."""
    mine = gzip.compress(json.dumps((socket.gethostname(), list(events))).encode(), 1)
    all_ranks = gather_objects(mine, group or dist.group.WORLD) if dist.is_initialized() else [mine]
    return merge([json.loads(gzip.decompress(each)) for each in all_ranks])


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
        merged.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank} on {host}"}})
        merged.append({"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}})
        merged += [{**event, "pid": rank, "ts": float(event["ts"]) + shift} for event in events]
    return merged
