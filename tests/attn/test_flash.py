"""Kernel "flash", with flash attention's operators emulated (`tests/attn/flash_emulated.py`)."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st

import longspan
from longspan.attn.kernels.base import BlockRegion
from longspan.attn.kernels.flash_calls import FlashSequence, flash_sequences, group_by_window, merge_regions, window_of
from longspan.core.regions import Region
from tests.attn.attention import CASES, FEW, check_all, compare, drawn_cases, one_device, sharding
from tests.attn.flash_emulated import emulated, seen_by
from tests.choose import confirming
from tests.oracle import Case
from tests.pool import RankPool
from tests.tolerance import MARGIN

MASKS = [
    name
    for name, case in CASES.items()
    if case.mod is None and case.bias is None and case.softcap is None and not case.alibi
]
"""Masks made of regions: all that the kernel computes."""


@pytest.mark.parametrize("name", MASKS)
def test_one_device(name: str) -> None:
    with emulated():
        found = compare(CASES[name], one_device(), "flash")
    assert max(found.values()) <= MARGIN, found


CROSSED = Case(
    n=12, kv_n=12, causal=False, documents=(0,) * 3 + (1,) * 3 + (2,) * 3 + (3,) * 3,
    kv_documents=(0,) * 2 + (2,) * 4 + (1,) * 3 + (3,) * 3,
)  # fmt: skip


def test_keys_of_documents_in_another_order() -> None:
    with emulated():
        found = compare(CROSSED, one_device(), "flash")
    assert max(found.values()) <= MARGIN, found


def _everywhere(ring: int, layout: str) -> dict[str, dict[str, float]]:
    sp = sharding(dist.get_world_size() // ring, ring, layout=layout)
    with emulated():
        names = [name for name in FEW if name in MASKS]
        return {name: compare(CASES[name], sp, "flash") for name in names}


@pytest.mark.parametrize(
    ("ring", "layout"), [(4, "zigzag"), (2, "contiguous"), *confirming([(4, "contiguous"), (1, "zigzag")])]
)
def test_exact_on_every_mesh(pool4: RankPool, ring: int, layout: str) -> None:
    for found in pool4.run(_everywhere, ring, layout):
        check_all(found)


CASE = drawn_cases(
    60,
    window=st.none() | st.integers(1, 12),
    chunk_size=st.none() | st.integers(1, 9),
    sinks=st.booleans(),
)


def _drawn(case: Case, ring: int, layout: str) -> dict[str, float]:
    with emulated():
        return compare(case, sharding(dist.get_world_size() // ring, ring, layout=layout), "flash")


@settings(max_examples=8)
@given(
    case=CASE,
    ring=st.sampled_from([2, 4]),
    layout=st.sampled_from(["zigzag", "contiguous"]),
    cuts=st.none() | st.lists(st.integers(0, 60), max_size=3),
)
def test_exact_for_drawn_shapes(pool4: RankPool, case: Case, ring: int, layout: str, cuts: Any) -> None:
    ids = None if cuts is None else tuple(sum(i >= c for c in cuts) for i in range(case.n))
    case = dataclasses.replace(case, documents=ids)
    for found in pool4.run(_drawn, case, ring, layout):
        assert max(found.values(), default=0) <= MARGIN, (case, found)


IDS = st.lists(st.integers(-1, 3), min_size=1, max_size=4)


@settings(max_examples=40)
@given(rows=st.lists(IDS, min_size=2, max_size=3), window=st.none() | st.integers(1, 6), causal=st.booleans())
@example([[0, 0, 0, 0], [-1, 0, 0]], None, True)  # as many tokens as their bounding rectangle
def test_rows_of_a_batch_may_differ(rows: list[list[int]], window: int | None, causal: bool) -> None:
    """Documents of at least three tokens with padding between them, different in each row."""
    ids = torch.full((len(rows), 12), -1)
    for row, drawn in enumerate(rows):
        mine = torch.tensor(drawn).repeat_interleave(3)
        ids[row, : len(mine)] = torch.where(
            mine < 0, -1, mine + 4 * torch.arange(len(mine)).div(3, rounding_mode="floor")
        )
    draw = torch.Generator().manual_seed(0)
    shapes = [(len(rows), 12, heads, 8) for heads in (4, 2, 2, 4)]
    q, k, v, grad = (torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes)
    found = []
    for kernel in ("flash", "eager"):
        x = [t.clone().requires_grad_() for t in (q, k, v)]
        with emulated():
            out = longspan.attention(*x, one_device(), documents=ids, window=window, causal=causal, kernel=kernel)
            out.backward(grad)
        found.append([out.detach(), *(t.grad for t in x)])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize(("dtype", "dim", "v_dim"), [(torch.bfloat16, 8, 8), (torch.float16, 12, 20)])
def test_half_precision(dtype: torch.dtype, dim: int, v_dim: int) -> None:
    case = Case(n=64, batch=2, window=9, dtype=dtype, dim=dim, v_dim=v_dim, sinks=True)
    with emulated() as calls:
        found = compare(case, one_device(), "flash")
    assert max(found.values()) <= MARGIN, found
    assert {x["query"].dtype for x in calls.forward + calls.backward} == {dtype}


# ---------------------------------------------------------------------------------------------------------------------
# Windows.

LIMIT = st.none() | st.integers(-12, 12)
SPAN = st.tuples(st.integers(0, 14), st.integers(1, 14)).map(lambda x: (x[0], x[0] + x[1]))
REGION = st.builds(lambda q, k, lo, hi: Region(*q, *k, lo, hi), SPAN, SPAN, LIMIT, LIMIT)


def _dense(r: Region) -> torch.Tensor:
    i, j = torch.arange(60)[:, None], torch.arange(60)
    ok = (i >= r.q0) & (i < r.q1) & (j >= r.k0) & (j < r.k1)
    ok = ok if r.lo is None else ok & (i - j >= r.lo)
    return ok if r.hi is None else ok & (i - j <= r.hi)


@settings(max_examples=200)
@given(region=REGION, others=st.lists(REGION, max_size=2), at=st.tuples(st.integers(0, 20), st.integers(0, 20)))
@example(Region(0, 10, 0, 2, None, 8), [], (0, 0))  # few keys: a left limit alone would limit the right side
@example(Region(0, 20, 0, 4, 0, None), [], (0, 0))  # few keys: a right limit that would be read as none
@example(Region(0, 20, 0, 4, 0, 10), [], (3, 0))
def test_windows_cover_a_region_exactly(region: Region, others: list[Region], at: tuple[int, int]) -> None:
    regions = [
        r.within((r.q0, r.q1), (r.k0, r.k1)) for r in (region, *others) if r.lo is None or r.hi is None or r.lo <= r.hi
    ]
    parts = [BlockRegion((0, 1), r, *at) for r in regions if r is not None]
    for part in parts:  # separately: they need not be disjoint
        r = part.region
        seen = torch.zeros(60, 60, dtype=torch.int64)
        for piece in flash_sequences([part]):
            p = piece.region
            sizes = p.q1 - p.q0, p.k1 - p.k0
            allowed = seen_by(*sizes, piece.window)
            limits = frozenset() if p.hi is None else frozenset({p.hi - p.q1 + p.k1})
            for window in (piece.window, window_of(p, limits)):  # alone, and in a call with longer sequences
                assert all(torch.equal(allowed, seen_by(*sizes, window, max_k=longest)) for longest in (0, 7, 99))
            assert allowed.any(1).all() and allowed.any(0).all()  # the kernel is undefined for a row without keys
            seen[p.q0 - at[0] : p.q1 - at[0], p.k0 - at[1] : p.k1 - at[1]] += allowed
        assert torch.equal(seen, _dense(r).long()), (r, flash_sequences([part]))


@given(st.lists(st.tuples(st.integers(0, 1), REGION), max_size=6))
def test_a_call_has_each_query_and_key_once(drawn: list[tuple[int, Region]]) -> None:
    found = group_by_window(FlashSequence((row, row + 1), region) for row, region in drawn)
    assert sorted(map(repr, (p for _, group in found for p in group))) == sorted(
        repr(FlashSequence((row, row + 1), region)) for row, region in drawn
    )
    for _, group in found:
        for of in (lambda p: range(p.region.q0, p.region.q1), lambda p: range(p.region.k0, p.region.k1)):
            places = [(p.rows, at) for p in group for at in of(p)]
            assert len(places) == len(set(places))


@settings(max_examples=200)
@given(a=REGION, q=st.integers(0, 28), k=st.integers(0, 28))
def test_merged_regions_contain_the_same_pairs(a: Region, q: int, k: int) -> None:
    cuts = [((0, q), (0, 60)), ((q, 60), (0, k)), ((q, 60), (k, 60))]
    parts = [part for spans in cuts if (part := a.within(*spans)) is not None]
    for first, second in ((0, 1), (1, 2)):
        if len(parts) > second:
            both = merge_regions(parts[first], parts[second])
            if both is not None:
                assert torch.equal(_dense(both), _dense(parts[first]) | _dense(parts[second]))
    if len(parts) == 2 and a.lo is None and a.hi is None and parts[0].k1 - parts[0].k0 == parts[1].k1 - parts[1].k0:
        assert merge_regions(*parts) is not None


# ---------------------------------------------------------------------------------------------------------------------
# Calls.


def _calls(sp: longspan.SequenceSharding, n: int, **mask: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The arguments of all forwards and all backwards of one attention."""
    q, k, v = (torch.zeros(1, n // sp.size, heads, 8, requires_grad=True) for heads in (2, 1, 1))
    with emulated() as calls:
        longspan.attention(q, k, v, sp, kernel="flash", **mask).sum().backward()
    return calls.forward, calls.backward


MANY = torch.cat([torch.zeros(1), (1 + torch.arange(200) * 7 % 5).cumsum(0)]).long()
"""Borders of 200 documents of 1 to 5 tokens."""


@pytest.mark.parametrize("mask", [{}, {"window": 3}, {"causal": False}])
def test_many_documents_are_one_call(mask: dict[str, Any]) -> None:
    forward, backward = _calls(one_device(), int(MANY[-1]), cu_seqlens=MANY, **mask)
    for (call,) in (forward, backward):
        assert call["cum_seq_q"].tolist() == call["cum_seq_k"].tolist() == MANY.tolist()
        assert (call["max_q"], call["max_k"]) == (5, 5)
    # Adjacent documents are a view, not a copy.
    assert forward[0]["query"].untyped_storage().nbytes() == 4 * 8 * 2 * int(MANY[-1])


def test_documents_with_padding_between_are_one_call() -> None:
    ids = torch.arange(60) // 5
    ids[torch.arange(60) % 5 == 4] = -1
    forward, backward = _calls(one_device(), 60, documents=ids[None])
    assert len(forward) == len(backward) == 1 and forward[0]["query"].shape == (48, 2, 8)


def _shapes_in_a_ring(layout: str, **mask: Any) -> list[tuple[Any, ...]]:
    forward, backward = _calls(sharding(1, dist.get_world_size(), layout=layout), 64, **mask)
    shapes = [
        (x["query"].shape[-3], x["key"].shape[-3], x["window_size_left"], x["window_size_right"]) for x in forward
    ]
    heads = [x["query"].shape[-2] for x in backward]
    assert len(heads) >= len(shapes)
    return shapes


def test_a_zigzag_ring_makes_one_call_per_block(pool4: RankPool) -> None:
    half, whole = 8, 16
    for rank, shapes in enumerate(pool4.run(_shapes_in_a_ring, "zigzag")):
        before = [(whole, half, -1, -1)] * rank  # all local queries see the first span of earlier ranks
        behind = [(half, whole, -1, -1)] * (3 - rank)  # the second local span sees both spans of later ranks
        assert shapes[0] == (whole, whole, -1, -1) and sorted(shapes[1:]) == sorted(before + behind), (rank, shapes)
