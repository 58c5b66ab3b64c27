"""Read a trace: when each rank computed, when collectives were in flight, and which part of that was exposed.

A trace is a list of Chrome trace events whose `pid` is the rank; times are microseconds. A collective is in flight from
its call to its end, including the wait for slower ranks. It is exposed while the rank computes nothing. On CPUs any
operator of torch is computing, on GPUs any kernel but NCCL's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from longspan.core.errors import LongspanError

STEP = "longspan.step"
"""Name of the range around the recorded step."""

Span = tuple[float, float]
"""Start and end in microseconds."""


@dataclass(frozen=True)
class RankTrace:
    """One rank's step: its start and end, and those of collectives, messages, and operators or kernels in it."""

    rank: int
    step: Span
    communication: tuple[Span, ...]  # in the order of their starts
    computing: tuple[Span, ...]


@dataclass(frozen=True)
class Figures:
    """Where one rank's step went, in seconds; computing + exposed + rest = step."""

    step: float
    computing: float
    communication: float  # with a collective or message in flight
    exposed: float  # communication without computing
    rest: float  # the host between two operators


def covered(spans: Iterable[Span]) -> float:
    """Return the length of the union of intervals."""
    length, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        length += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return length


def figures(trace: RankTrace) -> Figures:
    """Return where the time of a rank's step went."""
    length, computing, sent = trace.step[1] - trace.step[0], covered(trace.computing), covered(trace.communication)
    exposed = covered((*trace.communication, *trace.computing)) - computing
    times = (length, computing, sent, exposed, length - computing - exposed)
    return Figures(*(microseconds / 1e6 for microseconds in times))


def imbalance(values: Sequence[float]) -> float:
    """Return the largest value over the mean, minus 1; 0 if all are equal."""
    mean = sum(values) / len(values)
    return max(values) / mean - 1 if mean > 0 else 0.0


def summary_lines(traces: Sequence[RankTrace]) -> list[str]:
    """Return one line on each rank, and one on how they differ."""
    found = [figures(trace) for trace in traces]
    lines = [
        f"rank {trace.rank}: computing {of.computing / of.step:.0%}, exposed communication {of.exposed / of.step:.0%}, "
        f"rest {of.rest / of.step:.0%}; in flight {1e3 * of.communication:.1f} ms"
        for trace, of in zip(traces, found, strict=True)
    ]
    computing = imbalance([of.computing for of in found])
    return [*lines, f"imbalance of computing {computing:.0%} (slowest rank over the mean)"]


def read_trace(events: Sequence[dict[str, Any]]) -> tuple[RankTrace, ...]:
    """Return every rank's step in a merged trace."""
    steps = {e["pid"]: e for e in events if e["name"] == STEP and e.get("cat") == "user_annotation"}
    if not steps:
        raise LongspanError(f"the trace has no range {STEP!r}, so no step; record it with --trace or --profile")
    mine = {rank: [e for e in events if e["pid"] == rank and e["ph"] == "X"] for rank in sorted(steps)}
    return tuple(_rank_trace(rank, found, steps[rank]) for rank, found in mine.items())


def _rank_trace(rank: int, events: list[dict[str, Any]], step: dict[str, Any]) -> RankTrace:
    kernels = [e for e in events if e.get("cat") == "kernel"]
    if kernels:
        sent = [_span(e) for e in kernels if "nccl" in e["name"].lower()]
        computed = [_span(e) for e in kernels if "nccl" not in e["name"].lower()]
    else:
        in_flight = [e for e in events if e["name"].startswith("gloo:")]
        senders = {e["tid"] for e in in_flight} - {step["tid"]}  # gloo's threads, which copy as well
        sent = [_span(e) for e in in_flight]
        computed = [_span(e) for e in events if e["name"].startswith(("aten::", "fsdp::")) and e["tid"] not in senders]
    first, last = _span(step)

    def cut(spans: Iterable[Span]) -> tuple[Span, ...]:
        inside = ((max(first, start), min(last, end)) for start, end in spans)
        return tuple(sorted((start, end) for start, end in inside if end > start))

    return RankTrace(rank, (first, last), cut(sent), cut(computed))


def _span(event: dict[str, Any]) -> Span:
    return float(event["ts"]), float(event["ts"]) + float(event.get("dur", 0))
