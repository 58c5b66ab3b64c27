"""Time work that all ranks run together. A time is that of the slowest rank, as the others wait for it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def median_seconds(runs: Sequence[Callable[[], object]], rounds: int, device: torch.device) -> list[float]:
    """Return the medians of `time_rounds`. Collective over all ranks."""
    return [statistics.median(seconds) for seconds in time_rounds(runs, rounds, device)]


def time_rounds(runs: Sequence[Callable[[], object]], rounds: int, device: torch.device) -> list[list[float]]:
    """Return the slowest rank's seconds of every round, for each of `runs`. Collective over all ranks.

    A round runs each of them once, so that a disturbance of seconds touches one round of each.
    """
    for run in runs:  # warm up: make connections, select kernels, map pages
        run()
    seconds = torch.zeros(len(runs), rounds, dtype=torch.float64)
    for turn in range(rounds):
        for i in range(len(runs)):
            place = (turn + i) % len(runs)
            wait_for_all(device)
            start = time.perf_counter()
            runs[place]()
            synchronize(device)
            seconds[place, turn] = time.perf_counter() - start
    return reduce(seconds, dist.ReduceOp.MAX, device).tolist()


def reduce(values: torch.Tensor, op: dist.ReduceOp.RedOpType, device: torch.device) -> torch.Tensor:
    """Reduce values over all ranks of the job."""
    values = values.to(device)
    if dist.is_initialized():
        dist.all_reduce(values, op)
    return values


def wait_for_all(device: torch.device) -> None:
    """Wait until every rank is here and its device is idle."""
    reduce(torch.zeros(1), dist.ReduceOp.SUM, device)  # not `dist.barrier`, which needs device ids with NCCL
    synchronize(device)


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
