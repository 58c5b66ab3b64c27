"""Traces: computing, in flight and exposed time of each rank, and one file of all ranks."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.methods import transfer
from longspan.core.errors import LongspanError
from longspan.tracing.record import gather_trace, merge
from longspan.tracing.spans import STEP, RankTrace, covered, figures, imbalance, read_trace, summary_lines

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
    us = {name: round(1e6 * seconds, 6) for name, seconds in vars(found).items()}
    assert us == {"step": 100, "computing": 60, "communication": 60, "exposed": 30, "rest": 10}


def test_kernels_of_a_gpu_are_computing_or_nccls() -> None:
    events = [
        event(STEP, 0, 100, cat="user_annotation"),
        event("aten::mm", 0, 90),  # on the host: it only starts kernels
        event("ncclDevKernel_SendRecv", 0, 30, 1, "kernel"),
        event("ncclDevKernel_AllGather_RING_LL", 30, 30, 1, "kernel"),
        event("flash_fwd_kernel", 40, 30, 2, "kernel"),
    ]
    found = figures(read_trace(merge([("host", events)]))[0])
    assert 1e6 * found.computing == pytest.approx(30)
    assert 1e6 * found.communication == pytest.approx(60) and 1e6 * found.exposed == pytest.approx(40)


def test_every_rank_is_a_process_and_clocks_of_hosts_are_aligned() -> None:
    """Ranks 0 and 1 share a clock, so their difference stays; host b's step starts with host a's."""
    events = merge([("a", a_step(1000)), ("a", a_step(1003)), ("b", a_step(9e9)), ("b", a_step(9e9 + 2))])
    begins = {e["pid"]: e["ts"] for e in events if e["name"] == STEP}
    assert begins == {0: 1000, 1: 1003, 2: 1000, 3: 1002}
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {0: "rank 0 on a", 1: "rank 1 on a", 2: "rank 2 on b", 3: "rank 3 on b"}


def test_a_line_says_where_the_step_of_each_rank_went() -> None:
    lines = summary_lines(read_trace(merge([("a", a_step()), ("a", a_step(stretch=2.0))])))
    assert lines[0] == "rank 0: computing 60%, exposed communication 30%, rest 10%; in flight 0.1 ms"
    assert "imbalance of computing 33%" in lines[2]  # 120 us over the mean of 90


def test_a_trace_without_a_step_is_refused() -> None:
    with pytest.raises(LongspanError, match=r"longspan\.step.*--trace or --profile"):
        read_trace(merge([("a", [event("aten::mm", 0, 1)])]))


_intervals = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)).map(lambda p: (p[0], p[0] + p[1])), max_size=12)


@given(_intervals, _intervals)
def test_intervals_are_sets_of_points(a: list[tuple[int, int]], b: list[tuple[int, int]]) -> None:
    points = [{p for start, end in spans for p in range(start, end)} for spans in (a, b)]
    assert covered(a) == len(points[0]) and covered([*a, *b]) == len(points[0] | points[1])


def test_a_wait_for_a_slower_rank_is_no_transfer() -> None:
    """Three collectives of two ranks: one is late for the first, the other for the second, which overlaps the third."""
    first = RankTrace(0, (0, 300), ((0, 90), (200, 230), (210, 240)), ())
    second = RankTrace(1, (10, 310), ((80, 100), (150, 230), (210, 240)), ())
    assert transfer([first, second]) == pytest.approx((20 + 40) / 1e6)
    fewer = dataclasses.replace(second, communication=second.communication[:1])
    assert transfer([first, fewer]) == pytest.approx((90 + 40 + 20) / 2 / 1e6)  # no pairs to compare


def test_imbalance_is_the_largest_over_the_mean() -> None:
    assert imbalance([3.0, 1.0]) == 0.5 and imbalance([2.0, 2.0]) == 0.0 == imbalance([0.0, 0.0])


def _backward_traced(mesh: dict[str, int], chunks: int) -> set[int]:
    """Return the ranks in whose trace a backward of an attention has its range."""
    import torch

    import longspan
    from longspan.tracing.record import Recorder

    sp = longspan.SequenceSharding(longspan.init_mesh(**mesh))
    qkv = [sp.shard(torch.randn(1, 64, 4, 16)).requires_grad_() for _ in "qkv"]
    out = longspan.attention(*qkv, sp, head_chunks=chunks).sum()
    recorder = Recorder(torch.device("cpu"))
    with recorder.step():
        out.backward()
    events = gather_trace(recorder.events)
    assert all(figures(trace).communication > 0 for trace in read_trace(events))
    return {event["pid"] for event in events if event["name"] == "longspan.attention"}


@pytest.mark.parametrize(("mesh", "chunks"), [({"ring": 2}, 1), ({"ulysses": 2}, 2)], ids=["ring", "chunked"])
def test_the_backward_of_an_attention_has_its_range(pool2: Any, mesh: dict[str, int], chunks: int) -> None:
    assert pool2.run(_backward_traced, mesh, chunks) == [{0, 1}] * 2
