"""Measuring works side by side: rounds in which each runs once; what each sends, where its time goes, its memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from longspan.bench.bytes_sent import counting
from longspan.bench.timing import synchronize, wait_for_all
from longspan.bench.workloads import Work
from longspan.comm.objects import gather_objects
from longspan.tracing.merge import gather_trace
from longspan.tracing.record import Recorder
from longspan.tracing.spans import Figures, RankTrace, figures, imbalance, read_trace, transfer


@dataclass(frozen=True)
class Spread:
    """Seconds over the rounds, the slowest rank's of each: the median, and the quartiles around it."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Those of some rounds."""
        if len(values) < 2:
            return cls(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)


@dataclass(frozen=True)
class Measured:
    """What was measured of one work; the same on every rank.

    Attributes:
        forward: seconds.
        backward: seconds, in a step the optimizer's included.
        total: seconds of both.
        rounds: seconds of both, round by round.
        sent: bytes of the rank that sends most, by collective.
        figures: where one run went, by rank.
        peak_bytes: held at once, on the rank that holds most: what lies there anyway (weights, optimizer) and the rise.
        trace: the events of that run, of all ranks.
    """

    forward: Spread
    backward: Spread
    total: Spread
    rounds: tuple[float, ...]
    sent: dict[str, int]
    figures: tuple[Figures, ...]
    peak_bytes: int
    trace: list[dict[str, Any]]

    @property
    def traces(self) -> tuple[RankTrace, ...]:
        """The same events, read."""
        return read_trace(self.trace)

    @property
    def communication(self) -> float:
        """Seconds in which a collective was in flight, mean over ranks."""
        return statistics.fmean(f.communication for f in self.figures)

    @property
    def exposed(self) -> float:
        """Of these, seconds in which the rank computed nothing, mean over ranks."""
        return statistics.fmean(f.exposed for f in self.figures)

    @property
    def transfer(self) -> float:
        """Seconds of communication from the last rank's call of each collective to the last rank's end."""
        return transfer(self.traces)

    @property
    def imbalance(self) -> float:
        """How much more the rank that computes most computes than the mean."""
        return imbalance([f.computing for f in self.figures])


def measure(works: Mapping[str, Work], rounds: int, device: torch.device) -> dict[str, Measured]:
    """Measure all of them on all ranks. Collective.

    Each has run twice before the first round, and once counted. In every round each runs once, in an order that moves
    on from round to round, behind a barrier of its own: a disturbance touches one round of each, not all of one.
    """
    names = list(works)
    sent = {}
    for name in names:
        run(works[name])
        with counting() as log:
            run(works[name])
        sent[name] = dict(log)
    forward = torch.zeros(len(names), rounds, dtype=torch.float64)
    backward = torch.zeros_like(forward)
    for turn in range(rounds):
        for at in (*range(turn % len(names), len(names)), *range(turn % len(names))):
            wait_for_all(device)
            forward[at, turn], backward[at, turn] = _timed(works[names[at]], device)
    times = torch.stack([forward, backward, forward + backward])
    if dist.is_initialized():
        times = times.to(device)
        dist.all_reduce(times, dist.ReduceOp.MAX)
    seconds = times.tolist()
    found = {}
    for at, name in enumerate(names):
        trace = _traced(works[name], device)
        forward_s, backward_s, total_s = (Spread.of(of_kind[at]) for of_kind in seconds)
        found[name] = Measured(
            forward=forward_s,
            backward=backward_s,
            total=total_s,
            rounds=tuple(seconds[2][at]),
            sent=most_sent(sent[name]),
            figures=tuple(figures(one) for one in read_trace(trace)),
            peak_bytes=_peak(works[name], device),
            trace=trace,
        )
    return found


def run(work: Work) -> None:
    """Once."""
    work.backward(work.forward())


def _timed(work: Work, device: torch.device) -> tuple[float, float]:
    start = time.perf_counter()
    out = work.forward()
    synchronize(device)
    between = time.perf_counter()
    work.backward(out)
    synchronize(device)
    return between - start, time.perf_counter() - between


def _traced(work: Work, device: torch.device) -> list[dict[str, Any]]:
    recorder = Recorder(device)
    with recorder.step(lambda: wait_for_all(device)):
        run(work)
    return gather_trace(recorder.events)


def most_sent(mine: dict[str, int]) -> dict[str, int]:
    """Of the rank that sends most."""
    if not dist.is_initialized():
        return mine
    return max(gather_objects(mine, dist.group.WORLD), key=lambda sent: sum(sent.values()))


def _peak(work: Work, device: torch.device) -> int:
    """Bytes at the peak of a run, on the rank that holds most."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        held = torch.cuda.memory_allocated(device)
        run(work)
        synchronize(device)
        rise = torch.cuda.max_memory_allocated(device) - held
    else:
        rise = Recorder(device).rise(lambda: run(work))
    most = torch.tensor(work.at_rest() + rise, device=device)
    if dist.is_initialized():
        dist.all_reduce(most, dist.ReduceOp.MAX)
    return int(most)
