"""Read a trace: when each rank computed, when collectives were in flight, and which part of that was exposed.

Standard library only. A trace is a list of Chrome trace events whose `pid` is the rank; times are microseconds.

A collective is in flight from its call to its end, including the wait for slower ranks. It is exposed while the rank
computes nothing. On CPUs any operator of torch is computing, on GPUs any kernel but NCCL's.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from longspan.core.errors import LongspanError

STEP = "longspan.step"
"""Name of the range around the recorded step."""

ATTENTION = "longspan.attention"
"""Name of the range around one attention with its all-to-all, in forward and backward."""

P2P = "longspan.p2p"
"""Prefix of the ranges around a message's post and wait; the same number follows for both."""

COMMUNICATION = ("exchange", "ring", "gather", "reduce-scatter", "all-reduce", "other collective")
COMPUTING = ("attention", "packing", "computing")

_KIND_OF = (
    ("alltoall", "exchange"),
    ("all_to_all", "exchange"),
    ("allgather", "gather"),
    ("all_gather", "gather"),
    ("reducescatter", "reduce-scatter"),
    ("reduce_scatter", "reduce-scatter"),
    ("allreduce", "all-reduce"),
    ("all_reduce", "all-reduce"),
    ("sendrecv", "ring"),
    ("send", "ring"),
    ("recv", "ring"),
)

# Ranges that contain an attention: ours, and autograd nodes of torch's kernels, whose backward has no range.
_ATTENTION = (ATTENTION, "ScaledDotProduct", "FlexAttention")
_ATTENTION_KERNELS = ("scaled_dot_product", "flash", "fmha", "flex_attention")
# Operators that copy tokens into and out of send buffers.
_PACKING = ("longspan::scatter_heads", "longspan::gather_heads", "fsdp::")


@dataclass(frozen=True)
class Span:
    """An event in microseconds since the start of the step; `kind` is one of `COMMUNICATION` or `COMPUTING`."""

    kind: str
    name: str
    start: float
    end: float


@dataclass(frozen=True)
class RankTrace:
    """One rank's step."""

    rank: int
    length: float  # microseconds
    communication: tuple[Span, ...]  # collectives and messages
    computing: tuple[Span, ...]  # operators or kernels, including nested ones
    start: float = 0.0  # microseconds by the clock of the merged trace


@dataclass(frozen=True)
class Figures:
    """Where one rank's step went, in seconds; computing + exposed + rest = step."""

    step: float
    computing: float  # including attention and packing
    attention: float
    communication: float  # with a collective or message in flight
    exposed: float  # communication without computing
    rest: float  # the host between two operators
    kinds: dict[str, float]  # in flight, by kind

    @property
    def hidden(self) -> float:
        """Communication overlapped with computing."""
        return self.communication - self.exposed


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of intervals (start, end)."""
    return sum(end - start for start, end in union(spans))


def union(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the union of intervals as disjoint intervals, in order."""
    found: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def without(spans: Iterable[tuple[float, float]], others: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the union of `spans` minus that of `others`, as disjoint intervals."""
    holes, left = union(others), []
    for start, end in union(spans):
        at = start
        for hole_start, hole_end in holes:
            if hole_end <= at or hole_start >= end:
                continue
            if hole_start > at:
                left.append((at, hole_start))
            at = max(at, hole_end)
        if at < end:
            left.append((at, end))
    return left


def figures(trace: RankTrace) -> Figures:
    """Return where the time of a rank's step went."""
    sent, computed = ends_of(trace.communication), ends_of(trace.computing)
    exposed = covered(without(sent, computed))
    computing = covered(computed)
    return Figures(
        step=trace.length / 1e6,
        computing=computing / 1e6,
        attention=covered(ends_of(s for s in trace.computing if s.kind == "attention")) / 1e6,
        communication=covered(sent) / 1e6,
        exposed=exposed / 1e6,
        rest=(trace.length - computing - exposed) / 1e6,
        kinds={
            kind: covered(ends_of(s for s in trace.communication if s.kind == kind)) / 1e6
            for kind in COMMUNICATION
            if any(s.kind == kind for s in trace.communication)
        },
    )


def transfer(traces: Sequence[RankTrace]) -> float:
    """Return the seconds of communication without the wait for slower ranks.

    The i-th collective counts from the last rank's call to the last rank's end, as in `longspan bench`. If ranks
    have different numbers of collectives, return the mean time in flight, including waits.
    """
    sent = [sorted(trace.communication, key=lambda s: s.start) for trace in traces]
    if len({len(spans) for spans in sent}) != 1:
        return sum(covered(ends_of(spans)) for spans in sent) / len(sent) / 1e6
    in_flight = []
    for of_all in zip(*sent, strict=True):
        start = max(trace.start + span.start for trace, span in zip(traces, of_all, strict=True))
        end = max(trace.start + span.end for trace, span in zip(traces, of_all, strict=True))
        in_flight.append((start, end))
    return covered(in_flight) / 1e6


def imbalance(values: Sequence[float]) -> float:
    """Return the largest value over the mean, minus 1; 0 if all are equal."""
    mean = sum(values) / len(values)
    return max(values) / mean - 1 if mean > 0 else 0.0


def ends_of(spans: Iterable[Span]) -> list[tuple[float, float]]:
    """Return (start, end) of each span."""
    return [(span.start, span.end) for span in spans]


# --- reading


def read_trace(events: Iterable[dict[str, Any]]) -> tuple[RankTrace, ...]:
    """Return every rank's step in a merged trace."""
    by_rank: dict[int, list[dict[str, Any]]] = {}
    for event in events:
        if event.get("ph") == "X" and isinstance(event.get("pid"), int):
            by_rank.setdefault(event["pid"], []).append(event)
    traces = tuple(_rank_trace(rank, found) for rank, found in sorted(by_rank.items()) if _window(found))
    if not traces:
        raise LongspanError(f"the trace has no range {STEP!r}, so no step; record it with --trace or --profile")
    return traces


def _window(events: Iterable[dict[str, Any]]) -> dict[str, Any] | None:
    return next((e for e in events if e["name"] == STEP and e.get("cat") == "user_annotation"), None)


def _rank_trace(rank: int, events: list[dict[str, Any]]) -> RankTrace:
    window = _window(events)
    assert window is not None
    start, length = float(window["ts"]), float(window["dur"])
    inside = [e for e in events if e["ts"] + e.get("dur", 0) > start and e["ts"] < start + length]
    on_gpu = any(e.get("cat") == "kernel" for e in inside)
    sent, computed = (_on_gpu if on_gpu else _on_cpu)(inside)

    def cut(spans: Iterable[Span]) -> tuple[Span, ...]:
        moved = (Span(s.kind, s.name, max(0.0, s.start - start), min(length, s.end - start)) for s in spans)
        return tuple(sorted((s for s in moved if s.end > s.start), key=lambda s: s.start))

    return RankTrace(rank, length, cut(sent), cut(computed), start)


def kind_of(name: str) -> str:
    """Return the kind of a collective, by any of its names."""
    plain = name.lower().replace("_base", "")
    return next((kind for part, kind in _KIND_OF if part in plain), "other collective")


def _span(kind: str, event: dict[str, Any], name: str | None = None) -> Span:
    return Span(kind, name or event["name"], float(event["ts"]), float(event["ts"]) + float(event.get("dur", 0)))


def _on_gpu(events: list[dict[str, Any]]) -> tuple[list[Span], list[Span]]:
    sent, computed = [], []
    for event in events:
        if event.get("cat") != "kernel":
            continue
        if "nccl" in event["name"].lower():
            # NCCL runs an all-to-all as sends and receives; the profiler knows the call.
            name = str(event.get("args", {}).get("Collective name") or event["name"])
            sent.append(_span(kind_of(name), event, name))
        else:
            attention = any(part in event["name"].lower() for part in _ATTENTION_KERNELS)
            computed.append(_span("attention" if attention else "computing", event))
    return sent, computed


def _on_cpu(events: list[dict[str, Any]]) -> tuple[list[Span], list[Span]]:
    in_flight = sorted((e for e in events if e["name"].startswith("gloo:")), key=lambda e: e["ts"])
    main = {e["tid"] for e in events if e["name"] == STEP}
    senders = {e["tid"] for e in in_flight} - main  # gloo's threads, which copy as well
    calls = [e for e in events if e["name"].startswith("c10d::") and kind_of(e["name"]) != "ring"]
    names = _names(sorted(calls, key=lambda e: e["ts"]), in_flight)
    sent = [_span(kind_of(name), event, name) for name, event in zip(names, in_flight, strict=True)]
    sent += _messages(events)
    attention = _containers(e for e in events if any(part in e["name"] for part in _ATTENTION))
    packing = _containers(e for e in events if e["name"].startswith(_PACKING))
    computed = []
    for event in events:
        if not event["name"].startswith(("aten::", "fsdp::")) or event["tid"] in senders:
            continue
        if any(part in event["name"] for part in _ATTENTION_KERNELS):
            kind = "attention"
        elif _inside(event, packing):
            kind = "packing"
        else:
            kind = "attention" if _inside(event, attention) else "computing"
        computed.append(_span(kind, event))
    return sent, computed


def _names(calls: list[dict[str, Any]], in_flight: list[dict[str, Any]]) -> list[str]:
    """Return the called collective of each gloo operation, as gloo runs a reduce-scatter as an all-reduce."""
    if len(calls) != len(in_flight):
        return [event["name"] for event in in_flight]
    return [call["name"].removeprefix("c10d::").strip("_") for call in calls]


def _messages(events: Iterable[dict[str, Any]]) -> list[Span]:
    """Return messages between two ranks, each from its post to the end of its wait."""
    posts: dict[str, dict[str, Any]] = {}
    ends: dict[str, float] = {}
    for event in events:
        if event["name"].startswith(P2P):
            _, number, what = event["name"].split()
            if what == "post":
                posts[number] = event
            else:
                ends[number] = max(ends.get(number, 0.0), float(event["ts"]) + float(event["dur"]))
    return [Span("ring", "send, receive", float(post["ts"]), ends[n]) for n, post in posts.items() if n in ends]


def _containers(events: Iterable[dict[str, Any]]) -> dict[Any, list[tuple[float, float]]]:
    by_thread: dict[Any, list[tuple[float, float]]] = {}
    for event in events:
        by_thread.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event.get("dur", 0)))
    return {thread: union(spans) for thread, spans in by_thread.items()}


def _inside(event: dict[str, Any], containers: dict[Any, list[tuple[float, float]]]) -> bool:
    spans = containers.get(event["tid"], [])
    at = bisect.bisect_right(spans, (event["ts"], float("inf"))) - 1
    return at >= 0 and event["ts"] < spans[at][1]
