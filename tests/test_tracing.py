"""Traces: computing, in flight and exposed time of each rank, one file of all ranks, and the timeline."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longspan.core.errors import LongspanError
from longspan.tracing.spans import (
    STEP,
    RankTrace,
    Span,
    covered,
    figures,
    imbalance,
    read_trace,
    transfer,
    union,
    without,
)
from longspan.tracing.timeline import merge, render, summary_lines, write_timeline

MAIN, GLOO = 7, 8


def event(
    name: str, start: float, length: float, thread: int = MAIN, cat: str = "cpu_op", **args: Any
) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": 4711, "tid": thread, "ts": start, "dur": length, "args": args}


def a_step(begin: float = 1000.0, stretch: float = 1.0) -> list[dict[str, Any]]:
    """100 us: a gather during a matmul, an exchange alone, an attention, a reduce-scatter half hidden."""

    def at(name: str, start: float, length: float, *more: Any, **args: Any) -> dict[str, Any]:
        return event(name, begin + start * stretch, length * stretch, *more, **args)

    return [
        at(STEP, 0, 100, MAIN, "user_annotation"),
        at("c10d::_allgather_base_", 0, 1),
        at("gloo:all_gather", 0, 20, GLOO, "user_annotation"),
        at("aten::mm", 0, 20),
        at("aten::copy_", 0, 20, GLOO),  # a copy by gloo is no computing
        at("longspan::scatter_heads", 20, 20),
        at("c10d::alltoall_base_", 20, 1),
        at("gloo:all_to_all", 20, 20, GLOO, "user_annotation"),
        at("longspan.attention", 40, 30, MAIN, "user_annotation"),
        at("aten::mul", 40, 5),
        at("aten::_scaled_dot_product_flash_attention_for_cpu", 45, 25),
        at("c10d::_reduce_scatter_base_", 70, 1),
        at("gloo:all_reduce", 70, 20, GLOO, "user_annotation"),  # as gloo runs it
        at("aten::mm", 70, 10),
    ]


def test_figures_of_a_step() -> None:
    (trace,) = read_trace(merge([("host", a_step())]))
    found = figures(trace)
    us = {name: round(1e6 * getattr(found, name), 6) for name in ("step", "computing", "attention", "communication")}
    assert us == {"step": 100, "computing": 60, "attention": 30, "communication": 60}
    assert 1e6 * found.exposed == pytest.approx(30) and 1e6 * found.hidden == pytest.approx(30)
    assert found.computing + found.exposed + found.rest == pytest.approx(found.step)
    assert {k: round(1e6 * v, 6) for k, v in found.kinds.items()} == {
        "exchange": 20,
        "gather": 20,
        "reduce-scatter": 20,
    }


def test_messages_are_in_flight_from_post_to_end_of_wait() -> None:
    ranges = [("longspan.p2p 3 post", 10, 1), ("longspan.p2p 3 wait", 30, 5), ("longspan.p2p 3 wait", 35, 2)]
    events = [event(STEP, 0, 50, cat="user_annotation"), event("aten::mm", 11, 19)]
    events += [event(name, start, length, cat="user_annotation") for name, start, length in ranges]
    found = figures(read_trace(merge([("host", events)]))[0])
    assert 1e6 * found.kinds["ring"] == pytest.approx(27) and 1e6 * found.exposed == pytest.approx(8)


def test_kernels_of_a_gpu_are_classified_by_the_call() -> None:
    events = [
        event(STEP, 0, 100, cat="user_annotation"),
        event("aten::mm", 0, 90),  # on the host: it only starts kernels
        event("ncclDevKernel_SendRecv", 0, 30, 1, "kernel", **{"Collective name": "all_to_allv"}),
        event("ncclDevKernel_AllGather_RING_LL", 30, 30, 1, "kernel"),
        event("flash_fwd_kernel", 40, 30, 2, "kernel"),
    ]
    found = figures(read_trace(merge([("host", events)]))[0])
    assert 1e6 * found.attention == pytest.approx(30) == pytest.approx(1e6 * found.computing)
    assert set(found.kinds) == {"exchange", "gather"} and 1e6 * found.exposed == pytest.approx(40)


def test_every_rank_is_a_process_and_clocks_of_hosts_are_aligned() -> None:
    """Ranks 0 and 1 share a clock, so their difference stays; host b's step starts with host a's."""
    events = merge([("a", a_step(1000)), ("a", a_step(1003)), ("b", a_step(9e9)), ("b", a_step(9e9 + 2))])
    begins = {e["pid"]: e["ts"] for e in events if e["name"] == STEP}
    assert begins == {0: 1000, 1: 1003, 2: 1000, 3: 1002}
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {0: "rank 0 on a", 1: "rank 1 on a", 2: "rank 2 on b", 3: "rank 3 on b"}


def test_the_timeline_has_figures_of_every_rank(tmp_path: Path) -> None:
    events = merge([("a", a_step()), ("a", a_step(stretch=2.0))])
    traces = read_trace(events)
    lines = summary_lines(traces)
    assert "exposed communication 30%" in lines[0] and "computing 60%" in lines[1]
    assert "imbalance of computing 33%" in lines[2]  # 120 us over the mean of 90
    page = render(traces, "a <step>")
    assert "a &lt;step&gt;" in page and "<script" not in page and "http" not in page
    for word in (
        "rank 0",
        "rank 1",
        "exchange: alltoall_base",
        "gather: allgather_base",
        "reduce-scatter: ",
        "attention",
    ):
        assert word in page, word
    write_timeline(events, tmp_path / "new" / "step", "a step")
    assert (tmp_path / "new" / "step.png").read_bytes()[:4] == b"\x89PNG"
    assert {path.name for path in (tmp_path / "new").iterdir()} == {"step.png", "step.html", "step.trace.json"}
    assert json.loads((tmp_path / "new" / "step.trace.json").read_text())["traceEvents"] == events


def test_a_trace_without_a_step_is_refused() -> None:
    with pytest.raises(LongspanError, match=r"longspan\.step.*--trace or --profile"):
        read_trace(merge([("a", [event("aten::mm", 0, 1)])]))


_intervals = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)).map(lambda p: (p[0], p[0] + p[1])), max_size=12)


@given(_intervals, _intervals)
def test_intervals_are_sets_of_points(a: list[tuple[int, int]], b: list[tuple[int, int]]) -> None:
    points = [{p for start, end in spans for p in range(start, end)} for spans in (a, b)]
    assert covered(a) == len(points[0]) and covered(without(a, b)) == len(points[0] - points[1])
    joined = union(a)
    assert all(first[1] < second[0] for first, second in itertools.pairwise(joined))


def test_a_wait_for_a_slower_rank_is_no_transfer() -> None:
    """Three collectives of two ranks: one is late for the first, the other for the second, which overlaps the third."""
    spans = [  # the second rank's step began 10 later; the first collective ends there later
        [("gather", 0, 90), ("exchange", 200, 230), ("ring", 210, 240)],
        [("gather", 70, 90), ("exchange", 140, 220), ("ring", 200, 230)],
    ]
    traces = [
        RankTrace(rank, 300.0, tuple(Span(kind, kind, a, b) for kind, a, b in of_rank), (), start=1000.0 + 10 * rank)
        for rank, of_rank in enumerate(spans)
    ]
    assert transfer(traces) == pytest.approx((20 + 40) / 1e6)
    fewer = dataclasses.replace(traces[1], communication=traces[1].communication[:1])
    assert transfer([traces[0], fewer]) == pytest.approx((90 + 40 + 20) / 2 / 1e6)  # no pairs to compare


def test_imbalance_is_the_largest_over_the_mean() -> None:
    assert imbalance([3.0, 1.0]) == 0.5 and imbalance([2.0, 2.0]) == 0.0 == imbalance([0.0, 0.0])


def _backward_traced(mesh: dict[str, int], chunks: int) -> float:
    """Return the share of an attention's backward that its trace counts as attention: the largest of eight."""
    import torch

    import longspan
    from longspan.tracing.record import Recorder

    sp = longspan.SequenceSharding(longspan.init_mesh(**mesh))
    qkv = [sp.shard(torch.randn(1, 512, 4, 16)).requires_grad_() for _ in "qkv"]
    shares = []
    for _ in range(8):
        out = longspan.attention(*qkv, sp, head_chunks=chunks).sum()
        recorder = Recorder(torch.device("cpu"))
        with recorder.step():
            out.backward()
        (found,) = map(figures, read_trace(merge([("a", recorder.events)])))
        shares.append(found.attention / found.computing)
    return max(shares)


@pytest.mark.parametrize(("mesh", "chunks"), [({"ring": 2}, 1), ({"ulysses": 2}, 2)], ids=["ring", "chunked"])
def test_the_backward_of_an_attention_is_traced_as_attention(pool2: Any, mesh: dict[str, int], chunks: int) -> None:
    assert min(pool2.run(_backward_traced, mesh, chunks)) > 0.9  # about 0.8 without the marks: SDPA alone
