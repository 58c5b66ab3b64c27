"""Some tries of one rank that differs at the API (`tests/chaos/edges.py`), and their judgement."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.chaos import edges
from tests.pool import RankPool


def test_a_rank_that_differs_is_refused_on_all(pool4: RankPool) -> None:
    for seed in range(1000, 1008):
        outcome, note = edges.judge(edges.draw(seed, 4), pool4)
        assert outcome == "refused", note


def test_silence_and_unclear_errors_are_bad_outcomes(pool4: RankPool, monkeypatch: Any) -> None:
    one = replace(edges.draw(1, 4), fault="nothing")
    assert edges.judge(one, pool4) == ("silent", str(one))
    errors = iter([["same"] * 4, ["one", "other", "one", "one"], [f"{edges.RAW}TypeError: planted"] * 4])
    monkeypatch.setattr(RankPool, "run", lambda *_, **__: next(errors))
    assert [edges.judge(one, pool4)[0] for _ in range(3)] == ["refused", "wrong", "traceback"]


def test_a_seed_draws_one_try() -> None:
    drawn = [edges.draw(seed, 4) for seed in range(200)]
    assert drawn == [edges.draw(seed, 4) for seed in range(200)]
    assert {one.fault for one in drawn} == set(edges.FAULTS)
