"""Times of what all ranks do at once: the slowest rank's, because the others wait for it in a real step too."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist


def median_seconds(works: Sequence[Callable[[], object]], rounds: int, device: torch.device) -> list[float]:
    """For each of `works`, the median over the rounds of the slowest rank's seconds; the same on every rank.

    Collective over all ranks of the job. Every round goes through all of `works`, so that a disturbance of a few
    seconds touches one round of each rather than all rounds of one. All have run once before the first round: what is
    set up at the first use (connections, kernels' choices, pages) does not count.
    """
    rounds_of = torch.tensor(every_seconds(works, rounds, device), dtype=torch.float64)
    medians: list[float] = rounds_of.quantile(0.5, dim=1).tolist()
    return medians


def every_seconds(works: Sequence[Callable[[], object]], rounds: int, device: torch.device) -> list[list[float]]:
    """What `median_seconds` takes the medians of: for each of `works`, the slowest rank's seconds of every round."""
    for work in works:
        work()
    times = torch.zeros(rounds, len(works), dtype=torch.float64, device=device)
    for row in range(rounds):
        for column, work in enumerate(works):
            wait_for_all(device)
            start = time.perf_counter()
            work()
            synchronize(device)
            times[row, column] = time.perf_counter() - start
    if dist.is_initialized():
        dist.all_reduce(times, dist.ReduceOp.MAX)
    found: list[list[float]] = times.T.tolist()
    return found


def smallest(value: int, device: torch.device) -> int:
    """The smallest `value` of all ranks. Collective."""
    x = torch.tensor(value, device=device)
    if dist.is_initialized():
        dist.all_reduce(x, dist.ReduceOp.MIN)
    return int(x)


def wait_for_all(device: torch.device) -> None:
    """Until every rank has come here and its device is idle."""
    # A sum over all ranks rather than `dist.barrier`, which asks NCCL's users for device ids.
    if dist.is_initialized():
        dist.all_reduce(torch.zeros(1, device=device))
    synchronize(device)


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
