"""Some attempts of bad input and of a rank that differs (`tests/chaos`), each refused clearly, and their judgement."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import longspan
from longspan.core.errors import LongspanError
from tests.chaos import api, edges, inputs
from tests.chaos.inputs import MAKERS, Attempt, Started, campaign, judge
from tests.pool import RankPool

SEED, GOOD = 20261122, ("harmless", "refused")


def test_bad_input_and_bad_calls_are_refused_clearly() -> None:
    results = campaign(SEED, 40, 120)
    wrong = [f"{r.outcome}: {r.attempt.what}: {r.message[-300:]}" for r in results if r.outcome not in GOOD]
    assert not wrong, "\n".join(wrong)
    tried = Counter(r.attempt.kind for r in results)
    refused = Counter(r.attempt.kind for r in results if r.outcome == "refused")
    assert tried.keys() == {*MAKERS, "api"}
    assert all(refused[kind] >= tried[kind] / 4 for kind in tried), refused


def test_arguments_before_a_change_are_accepted() -> None:
    """Otherwise a refusal would prove nothing."""
    sp = longspan.SequenceSharding(longspan.init_mesh())
    for target in api._targets(sp) + api._plain_targets():
        target.call(**target.arguments)
    for name, argv in inputs._BASE.items():
        result = judge(inputs._command_attempt("flags", [name, *argv], True))
        assert result.outcome == "silent", (name, result)


def test_an_attempt_depends_on_the_seed_alone() -> None:
    drawn = [[attempt.what for attempt in inputs.attempts(seed, 40)] for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


def _raise(error: BaseException) -> int:
    raise error


def _leave(folder: Path) -> int:
    (folder / "out").mkdir()
    return 2


def _hang(_: Path) -> int:
    while True:
        random.random()


def test_outcomes_are_judged() -> None:
    cases: list[tuple[Any, bool, str]] = [
        (lambda _: 2, True, "refused"),
        (lambda _: _raise(LongspanError("no")), True, "refused"),
        (lambda _: 0, False, "harmless"),
        (lambda _: 0, True, "silent"),
        (lambda _: _raise(Started()), True, "silent"),
        (lambda _: _raise(TypeError("x")), True, "traceback"),
        (_leave, True, "wrong"),
        (_hang, True, "hung"),
    ]
    for run, bad, outcome in cases:
        assert judge(Attempt("flags", "x", bad, run), limit_s=0.2).outcome == outcome


def test_a_rank_that_differs_is_refused_on_all(pool4: RankPool) -> None:
    for seed in range(1000, 1005):
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
