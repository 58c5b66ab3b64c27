"""Record events under torch's profiler, and add ranges for point-to-point messages, which it does not record."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from longspan.tracing.spans import P2P, STEP

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
        with profile(activities=activities) as profiler, _mark_messages():
            before()  # inside, as the profiler starts at different times on the ranks
            with record_function(STEP):
                yield
                if self._on_gpu:
                    torch.cuda.synchronize()
        exported = _export(profiler)
        self.events = [
            e for e in exported if e.get("ph") == "X" and e.get("cat") in _CATEGORIES and e["name"] not in _SKIPPED
        ]


def memory_rise(run: Callable[[], object]) -> int:
    """Return the peak bytes that `run` allocates on the CPU beyond those allocated before."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    return peak(_export(profiler))


def _export(profiler: Any) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return events


def peak(events: list[dict[str, Any]]) -> int:
    """Return the peak from allocations and frees by address; the profiler's total misses frees by gloo's threads."""
    held: dict[int, int] = {}
    now = most = 0
    for event in sorted((e for e in events if e.get("name") == "[memory]"), key=lambda e: e["ts"]):
        address, size = event["args"]["Addr"], event["args"]["Bytes"]
        now -= held.pop(address, 0)  # a reused address was freed before
        if size > 0:
            held[address] = size
            now += size
            most = max(most, now)
    return most


@contextlib.contextmanager
def _mark_messages() -> Iterator[None]:
    """Mark the post and the wait of each batch of messages with ranges: gloo records none of them."""
    original, numbers = dist.batch_isend_irecv, itertools.count()

    def named(ops: Any) -> Any:
        number = next(numbers)
        with record_function(f"{P2P} {number} post"):
            works = original(ops)
        return [_MarkedWork(work, f"{P2P} {number} wait") for work in works]

    dist.batch_isend_irecv = named  # type: ignore[assignment]
    try:
        yield
    finally:
        dist.batch_isend_irecv = original


class _MarkedWork:
    """A `dist.Work` whose wait is marked with a range."""

    def __init__(self, work: Any, name: str) -> None:
        self._work, self._name = work, name

    def wait(self, *args: Any) -> Any:
        with record_function(self._name):
            return self._work.wait(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)
