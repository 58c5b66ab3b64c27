"""A short part of the campaign at the API's edges (`tests/chaos/edges.py`), and that it can see what it looks for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.chaos import edges
from tests.pool import RankPool


def test_one_rank_that_differs_is_refused_on_all(pool4: RankPool) -> None:
    table = edges.campaign(pool4, tries=8, seed=1000)
    assert table.counts["refused"] == table.counts["tried"] == 8, table.wrong


def test_silence_and_unclear_errors_are_seen(pool4: RankPool, monkeypatch: Any) -> None:
    table = edges.Table()
    for number in range(2):
        one = replace(edges.draw(number, 4), fault="nothing")
        table.add(one, *edges._judge(one, pool4))
    assert table.counts["silent"] == 2 and len(table.wrong) == 2 and "silent: seed 1: nothing on" in table.wrong[1]
    assert str(table) == "tried 2  refused 0  hung 0  silent 2  unclear 0"
    said = iter([["same"] * 4, ["one", "other", "one", "one"], [f"{edges.RAW}TypeError: planted"] * 4])
    monkeypatch.setattr(RankPool, "run", lambda *_, **__: next(said))
    assert [edges._judge(one, pool4)[0] for _ in range(3)] == ["refused", "unclear", "unclear"]


def test_the_same_seed_draws_the_same() -> None:
    drawn = [edges.draw(seed, 4) for seed in range(200)]
    assert drawn == [edges.draw(seed, 4) for seed in range(200)]
    assert {one.fault for one in drawn} == set(edges.FAULTS)
