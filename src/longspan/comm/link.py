"""Resolve `overlap_chunks="auto"`: measure the all-to-all of a Ulysses group that spans hosts, and choose the number of
chunks of heads that overlap with attention.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

OVERLAPPED_CHUNKS = 4
"""Chunks of heads for `overlap_chunks="auto"`: a quarter of an all-to-all that attention hides stays exposed."""

CHUNK_START_S = 1e-4
"""Seconds that each further chunk costs besides its message: kernel launches and copies."""

MIN_TIME_OVER_OVERHEAD = 8
"""Use chunks if the all-to-all takes at least this many times as long as the overhead that chunks add. If nothing
overlaps with it, at most an eighth of its time is lost; if enough does, three quarters are hidden.
"""

_SHORT_BYTES, _LONG_BYTES = 4 << 10, 1 << 20
"""Buffers of the two all-to-alls that are timed: the short one for latency, the long one for bandwidth."""


@dataclass(frozen=True)
class AllToAllLink:
    """The measured time of an all-to-all of a Ulysses group: of an empty message, and per byte of a rank's buffer."""

    start_s: float
    per_byte_s: float


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


def choose_overlap_chunks(sent_bytes: int, link: AllToAllLink | None) -> int:
    """Return the chunks of `overlap_chunks="auto"`: several if the all-to-all of a rank's q, k and v takes long.

    `link` is None inside one host, where chunks gain nothing.
    """
    if link is None:
        return 1
    added = (OVERLAPPED_CHUNKS - 1) * (link.start_s + CHUNK_START_S)
    takes = link.start_s + sent_bytes * link.per_byte_s
    return OVERLAPPED_CHUNKS if takes >= MIN_TIME_OVER_OVERHEAD * added else 1


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
