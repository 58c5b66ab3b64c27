"""Measure workloads in turns: their times, the bytes they send, one run under the profiler, and their peak memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from longspan.bench.meters import Spread, count_sent, most_sent, reduce_times, rotate, synchronize, wait_for_all
from longspan.bench.workloads import Workload
from longspan.tracing.record import Recorder, memory_rise
from longspan.tracing.spans import Figures, RankTrace, figures, imbalance, read_trace, transfer
from longspan.tracing.timeline import gather_trace


@dataclass(frozen=True)
class Measurement:
    """Everything measured of one workload, the same on every rank."""

    forward: Spread
    backward: Spread  # in a training step including the optimizer
    total: Spread
    rounds: tuple[float, ...]  # seconds of both
    sent: dict[str, int]  # bytes by collective, on the rank that sends most
    figures: tuple[Figures, ...]  # of one run, by rank
    peak_bytes: int  # weights, optimizer states and the rise of one run, on the rank with the highest peak
    trace: list[dict[str, Any]]  # Chrome trace events of that run, of all ranks

    @property
    def traces(self) -> tuple[RankTrace, ...]:
        """The trace, parsed."""
        return read_trace(self.trace)

    @property
    def communication(self) -> float:
        """Seconds in which a collective was in flight, mean over ranks."""
        return statistics.fmean(f.communication for f in self.figures)

    @property
    def exposed(self) -> float:
        """Seconds of communication in which the rank computed nothing, mean over ranks."""
        return statistics.fmean(f.exposed for f in self.figures)

    @property
    def transfer(self) -> float:
        """Seconds of communication, each collective from the last rank's call to the last rank's end."""
        return transfer(self.traces)

    @property
    def imbalance(self) -> float:
        """Compute time of the slowest rank over the mean, minus 1."""
        return imbalance([f.computing for f in self.figures])


def measure(workloads: Mapping[str, Workload], rounds: int, device: torch.device) -> dict[str, Measurement]:
    """Measure all workloads. Collective over all ranks.

    Each runs twice as a warm-up, the second time with its bytes counted. Then each runs once per round, behind a
    barrier and in rotating order, so that a disturbance touches one round of each.
    """
    sent = {}
    for name, workload in workloads.items():
        run(workload)
        with count_sent() as log:
            run(workload)
        sent[name] = most_sent(log)
    forward: dict[str, list[float]] = {name: [] for name in workloads}
    backward: dict[str, list[float]] = {name: [] for name in workloads}
    for _, name in rotate(list(workloads), rounds):
        wait_for_all(device)
        forward_s, backward_s = _time(workloads[name], device)
        forward[name].append(forward_s)
        backward[name].append(backward_s)
    total = {name: [f + b for f, b in zip(forward[name], backward[name], strict=True)] for name in workloads}
    forward, backward, total = (reduce_times(times, dist.ReduceOp.MAX, device) for times in (forward, backward, total))
    measurements = {}
    for name, workload in workloads.items():
        trace = _trace(workload, device)
        measurements[name] = Measurement(
            forward=Spread.of(forward[name]),
            backward=Spread.of(backward[name]),
            total=Spread.of(total[name]),
            rounds=tuple(total[name]),
            sent=sent[name],
            figures=tuple(figures(of_rank) for of_rank in read_trace(trace)),
            peak_bytes=_peak_bytes(workload, device),
            trace=trace,
        )
    return measurements


def run(workload: Workload) -> None:
    """Run forward and backward once."""
    workload.backward(workload.forward())


def _time(workload: Workload, device: torch.device) -> tuple[float, float]:
    start = time.perf_counter()
    out = workload.forward()
    synchronize(device)
    middle = time.perf_counter()
    workload.backward(out)
    synchronize(device)
    return middle - start, time.perf_counter() - middle


def _trace(workload: Workload, device: torch.device) -> list[dict[str, Any]]:
    recorder = Recorder(device)
    with recorder.step(lambda: wait_for_all(device)):
        run(workload)
    return gather_trace(recorder.events)


def _peak_bytes(workload: Workload, device: torch.device) -> int:
    """Return the bytes held at the peak of a run, on the rank with the highest."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run(workload)
        synchronize(device)
        rise = torch.cuda.max_memory_allocated(device) - before
    else:
        rise = memory_rise(lambda: run(workload))
    peak = torch.tensor(workload.state_bytes() + rise, device=device)
    if dist.is_initialized():
        dist.all_reduce(peak, dist.ReduceOp.MAX)
    return int(peak)
