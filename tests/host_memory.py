"""Peak host memory of torch's tensors."""

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

from benchmarks.common import peak

COLLECTIVES = (
    "all_gather_into_tensor", "all_gather_single", "all_reduce", "all_to_all_single", "broadcast",
    "reduce_scatter_single", "reduce_scatter_tensor",
)  # fmt: skip
"""Collectives whose tensors the caller frees last; each version of torch has some of them."""


PATIENCE_S = 0.01
"""Seconds for gloo's threads to free what a collective has sent. A busy machine gives them the processor later."""


def at_rest(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None) -> int:
    """Return the bytes of this rank's weights and optimizer state."""
    states = optimizer.state.values() if optimizer is not None else ()
    tensors = [*model.parameters(), *(x for state in states for x in state.values() if isinstance(x, torch.Tensor))]
    return sum((x.to_local() if hasattr(x, "to_local") else x).nbytes for x in tensors)


def peak_of(run: Callable[[], Any], trace: Path, mapped: int = 0) -> int:
    """Return the peak bytes of CPU tensors that `run` allocates.

    Args:
        run: the code to measure.
        trace: a file for the profiler, for this rank alone.
        mapped: bytes of a file that `run` maps into memory, which the profiler counts as an allocation.
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
    """Let the caller free the tensors of a collective last.

    gloo's thread holds them a moment longer than the call, and the profiler does not see frees by other threads.
    """

    def slowly(collective: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        done = collective(*args, **kwargs)
        time.sleep(PATIENCE_S)
        return done

    with pytest.MonkeyPatch.context() as patch:
        for name in COLLECTIVES:
            if hasattr(dist, name):
                patch.setattr(dist, name, functools.partial(slowly, getattr(dist, name)))
        yield
