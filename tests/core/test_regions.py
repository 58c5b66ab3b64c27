"""Regions and their tiles against enumerated pairs."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from longspan.core import regions
from longspan.core.regions import Call, Region, intersections, merge_calls, tiles

pytestmark = pytest.mark.fast

spans = st.tuples(st.integers(0, 60), st.integers(1, 50)).map(lambda x: (x[0], x[0] + x[1]))
drawn = st.builds(
    lambda q, k, lo, width: Region(*q, *k, lo, None if width is None else (lo or 0) + width),
    spans,
    spans,
    st.sampled_from([None, 0, 0, -5, 3]),
    st.none() | st.integers(0, 40),
)


def pairs(r: Region) -> set[tuple[int, int]]:
    return {
        (i, j)
        for i in range(r.q0, r.q1)
        for j in range(r.k0, r.k1)
        if (r.lo is None or i - j >= r.lo) and (r.hi is None or i - j <= r.hi)
    }


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that small regions have many tiles."""
    monkeypatch.setattr(regions, "TILE", (8, 16))
    monkeypatch.setattr(regions, "_NARROW", 4)


@given(drawn)
def test_pairs(r: Region) -> None:
    assert r.pairs == len(pairs(r))


@given(drawn, spans, spans)
def test_within(r: Region, q: Any, k: Any) -> None:
    expected = {(i, j) for i, j in pairs(r) if q[0] <= i < q[1] and k[0] <= j < k[1]}
    part = r.within(q, k)
    assert (pairs(part) if part else set()) == expected
    if part:  # trimmed: no row and no column is empty
        assert {i for i, _ in expected} == set(range(part.q0, part.q1))
        assert {j for _, j in expected} == set(range(part.k0, part.k1))


@settings(max_examples=300)
@given(drawn, st.booleans())
def test_tiles_cover_a_region_once(r: Region, materialized: bool) -> None:
    trimmed = r.within((0, 1000), (0, 1000))
    seen: list[tuple[int, int]] = []
    for tile in tiles(trimmed, materialized=materialized) if trimmed else ():
        part, mine = tile.region, pairs(tile.region)
        rows, columns = part.q1 - part.q0, part.k1 - part.k0
        if tile.kind == "full":
            assert len(mine) == rows * columns
        elif tile.kind == "causal":
            assert rows == columns and len(mine) == rows * (rows + 1) // 2
            assert all(i - part.q0 >= j - part.k0 for i, j in mine)
        else:
            assert rows <= 8 and columns <= 16
        seen += mine
    assert len(seen) == len(set(seen)) and set(seen) == pairs(r)


def test_a_window_costs_its_width_not_the_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regions, "TILE", (256, 1024))
    monkeypatch.setattr(regions, "_NARROW", 128)
    for window in (64, 512, 4096):
        n = 65536
        band = Region(0, n, 0, n, 0, window - 1)
        work = sum((t.region.q1 - t.region.q0) * (t.region.k1 - t.region.k0) for t in tiles(band))
        assert work <= n * (2 * window + 256)


def test_intersections_of_every_pair_of_spans() -> None:
    causal = [Region(0, 40, 0, 40, 0)]
    zigzag = ((0, 5), (35, 40))
    found = [part for _, _, part in intersections(causal, zigzag, zigzag)]
    assert sum(part.pairs for part in found) == 15 + 25 + 15


def runs(cuts: list[int], taken: list[bool]) -> list[tuple[int, int]]:
    return [run for run, mine in zip(itertools.pairwise(cuts), taken, strict=False) if mine]


def placed(call: Call) -> list[tuple[int, int, int]]:
    """The triples (row, query, key) that a call computes."""
    (q0, q1), (k0, k1) = call.queries, call.keys
    return [
        (row, q, k)
        for row in range(*call.rows)
        for q in range(q0, q1)
        for k in range(k0, k1)
        if call.kind == "full" or k - k0 <= q - q0
    ]


cuts = st.lists(st.integers(0, 24), min_size=2, max_size=7, unique=True).map(sorted)
some = st.lists(st.booleans(), min_size=6, max_size=6)
plain = st.lists(
    st.sampled_from([Region(0, 24, 0, 24, 0), Region(0, 24, 0, 24), Region(0, 9, 0, 9, 0), Region(9, 24, 9, 24, 0)]),
    min_size=1,
    max_size=3,
)


@settings(max_examples=300)
@given(plain, cuts, some, cuts, some)
@example([Region(0, 24, 0, 24, 0)], [0, 8], [True], [2, 4, 6, 8], [True] * 3)  # a triangle in three parts
def test_merged_calls_compute_the_same_pairs(rows: Any, q_cuts: Any, mine: Any, k_cuts: Any, theirs: Any) -> None:
    q_runs, k_runs = runs(q_cuts, mine), runs(k_cuts, theirs)
    q_at, k_at = ([sum(b - a for a, b in held[:m]) for m in range(len(held))] for held in (q_runs, k_runs))
    calls = [
        Call((row, row + 1), (r.q0 + dq, r.q1 + dq), (r.k0 + dk, r.k1 + dk), tile.kind)
        for row, region in enumerate(rows)
        for m, n, part in intersections([region], q_runs, k_runs)
        for tile in tiles(part)
        for r, dq, dk in ((tile.region, q_at[m] - q_runs[m][0], k_at[n] - k_runs[n][0]),)
    ]
    fewer = merge_calls(calls)
    assert sorted(p for call in fewer for p in placed(call)) == sorted(p for call in calls for p in placed(call))
    assert len(fewer) <= len(calls) and merge_calls(fewer) == fewer


def test_a_masked_tile_is_not_merged() -> None:
    left, right = (Call((0, 1), (0, 8), (k, k + 8), "masked", Region(0, 8, k, k + 8)) for k in (0, 8))
    assert merge_calls([right, left]) == [left, right]
