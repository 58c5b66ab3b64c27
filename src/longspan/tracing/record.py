"""Running something under torch's profiler, and its events; what the profiler does not see of messages is added."""

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

_KEPT = ("cpu_op", "user_annotation", "gpu_user_annotation", "kernel", "gpu_memcpy", "gpu_memset")
_SMALL = ("aten::as_strided", "aten::view", "aten::detach", "detach", "aten::alias", "aten::t", "aten::transpose")


class Recorder:
    """The events of the stretch that `step` runs, of this rank; empty before.

    Attributes:
        events: Chrome trace events, as the profiler writes them; those that last no time to speak of left out.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self.events: list[dict[str, Any]] = []

    @contextlib.contextmanager
    def step(self, before: Callable[[], object] = lambda: None) -> Iterator[None]:
        """Record what runs inside; the device is waited for at the end. `before` runs first, and is not recorded."""
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else each start and stop of the profiler prints a line
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_gpu else [])]
        with profile(activities=activities) as profiler, _messages_named():
            before()  # inside: the profiler starts at another moment on each rank
            with record_function(STEP):
                yield
                if self._on_gpu:
                    torch.cuda.synchronize()
        found = _exported(profiler)
        self.events = [e for e in found if e.get("ph") == "X" and e.get("cat") in _KEPT and e["name"] not in _SMALL]


def memory_rise(run: Callable[[], object]) -> int:
    """Return the peak bytes that `run` allocates on the CPU beyond those allocated before."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    return _peak(_exported(profiler))


def _exported(profiler: Any) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return events


def _peak(events: list[dict[str, Any]]) -> int:
    """From allocations and frees by address: the profiler's own total misses what gloo's threads free."""
    held: dict[int, int] = {}
    now = most = 0
    for event in sorted((e for e in events if e.get("name") == "[memory]"), key=lambda e: e["ts"]):
        address, size = event["args"]["Addr"], event["args"]["Bytes"]
        now -= held.pop(address, 0)  # an address that is given out anew was free
        if size > 0:
            held[address] = size
            now += size
            most = max(most, now)
    return most


@contextlib.contextmanager
def _messages_named() -> Iterator[None]:
    """While it lasts, ranges around the post of each batch of messages and each wait: gloo records none of them."""
    plain, numbers = dist.batch_isend_irecv, itertools.count()

    def named(ops: Any) -> Any:
        number = next(numbers)
        with record_function(f"{P2P} {number} post"):
            works = plain(ops)
        return [_Waited(work, f"{P2P} {number} wait") for work in works]

    dist.batch_isend_irecv = named  # type: ignore[assignment]
    try:
        yield
    finally:
        dist.batch_isend_irecv = plain


class _Waited:
    """A `dist.Work` whose wait is a range."""

    def __init__(self, work: Any, name: str) -> None:
        self._work, self._name = work, name

    def wait(self, *args: Any) -> Any:
        with record_function(self._name):
            return self._work.wait(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)
