"""How much memory of the host torch holds at once."""

from __future__ import annotations

import contextlib
import functools
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

COLLECTIVES = (
    "all_gather_into_tensor", "all_gather_single", "all_reduce", "all_to_all_single", "broadcast",
    "reduce_scatter_single", "reduce_scatter_tensor",
)  # fmt: skip
"""Whose tensors are seen to be freed; each torch has some of them."""


def peak_of(run: Callable[[], Any], trace: Path, mapped: int = 0) -> int:
    """Most bytes that torch's tensors on the CPU hold at once above those before, while `run` runs.

    Args:
        run: what is measured.
        trace: a file for the profiler, of this rank alone.
        mapped: bytes of a file that is mapped into memory meanwhile, which the profiler takes for an allocation.
    """
    with (
        _seen_collectives(),
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as recorded,
    ):
        run()
    recorded.export_chrome_trace(str(trace))
    events = json.loads(trace.read_text())["traceEvents"]
    return peak([e for e in events if not mapped or e.get("args", {}).get("Bytes") not in (mapped, -mapped)])


@contextlib.contextmanager
def _seen_collectives() -> Iterator[None]:
    """gloo's thread holds what was sent and what arrived a moment longer than the call, and the profiler sees nothing
    that another thread frees: here whoever called is the last to hold them.
    """

    def slowly(collective: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        done = collective(*args, **kwargs)
        time.sleep(0.01)  # a busy machine gives that thread the processor late
        return done

    with pytest.MonkeyPatch.context() as patch:
        for name in COLLECTIVES:
            if hasattr(dist, name):
                patch.setattr(dist, name, functools.partial(slowly, getattr(dist, name)))
        yield


def peak(events: list[dict[str, Any]]) -> int:
    """Most bytes that are held at once, from allocations and frees by address.

    Not from the profiler's own total, which misses what gloo's threads free. An address given out anew was free.
    """
    held: dict[int, int] = {}
    now = most = 0
    for event in sorted((e for e in events if e.get("name") == "[memory]"), key=lambda e: e["ts"]):
        address, size = event["args"]["Addr"], event["args"]["Bytes"]
        now -= held.pop(address, 0)
        if size > 0:
            held[address] = size
            now += size
            most = max(most, now)
    return most
