"""Measure the all-to-all of a Ulysses group that spans hosts, to choose how many chunks overlap with attention."""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist

from longspan.core.routes import AllToAllLink

_SHORT_BYTES, _LONG_BYTES = 4 << 10, 1 << 20
"""Buffers of the two all-to-alls that are timed: the short one for latency, the long one for bandwidth."""


def measure_link(
    ulysses_group: dist.ProcessGroup, model_group: dist.ProcessGroup, device: torch.device
) -> AllToAllLink | None:
    """Return the slowest rank's times, equal on all ranks of `model_group`; None if no group spans hosts. Collective.

    A ring contains several Ulysses groups, and all of its ranks must use the same chunks.
    """
    ranks_per_host = int(os.environ.get("LOCAL_WORLD_SIZE") or 0)
    if not ranks_per_host or dist.get_world_size() <= ranks_per_host:
        return None  # on every rank, or on none
    hosts = {rank // ranks_per_host for rank in dist.get_process_group_ranks(ulysses_group)}
    if not _largest([len(hosts) > 1], model_group, device)[0]:
        return None
    times = [_seconds(size, ulysses_group, device) for size in (_SHORT_BYTES, _LONG_BYTES)]
    short, long = _largest(times, model_group, device)
    return AllToAllLink(short, max(0.0, long - short) / (_LONG_BYTES - _SHORT_BYTES))


def _largest(values: list[float], group: dist.ProcessGroup, device: torch.device) -> list[float]:
    largest = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return largest.tolist()


def _seconds(size: int, group: dist.ProcessGroup, device: torch.device) -> float:
    """Return the seconds of an all-to-all of `size` bytes: the fastest of five, after a warm-up."""
    sent = torch.zeros(-(-size // group.size()) * group.size(), dtype=torch.uint8, device=device)
    received, took = torch.empty_like(sent), []
    for _ in range(6):
        start = time.perf_counter()
        dist.all_to_all_single(received, sent, group=group)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        took.append(time.perf_counter() - start)
    return min(took[1:])
