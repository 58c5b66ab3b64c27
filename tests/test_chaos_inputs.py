"""A short part of the campaign of bad input (`tests/chaos/inputs.py`): every fault is refused clearly."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

import longspan
from longspan.core.errors import LongspanError
from tests.chaos import api, inputs
from tests.chaos.inputs import MAKERS, Attempt, Result, Started, api_campaign, campaign, counts, judge, table

SEED = 20261122


def _check(results: list[Result], kinds: set[str]) -> None:
    wrong = {f"{r.outcome}: {r.attempt.kind}: {r.attempt.what}: {r.said.strip()[-300:]}" for r in results if _wrong(r)}
    assert not wrong, "\n".join([table(results), *sorted(wrong)])
    by_kind = counts(results)
    assert by_kind.keys() == kinds
    assert all(row["refused"] >= row["tried"] / 4 for row in by_kind.values()), table(results)


def _wrong(result: Result) -> bool:
    return result.outcome not in ("accepted", "refused")


def test_bad_command_lines_files_and_data_are_refused_clearly() -> None:
    _check(campaign(SEED, 150), set(MAKERS))


def test_bad_calls_are_refused_clearly() -> None:
    _check(api_campaign(SEED, 400), {"api"})


def test_what_the_calls_begin_with_is_accepted() -> None:
    """Or every refusal would prove nothing."""
    sp = longspan.SequenceSharding(longspan.init_mesh())
    for target in api._targets(sp) + api._plain_targets():
        target.call(**target.arguments)
    for name, argv in inputs._BASE.items():
        result = judge(inputs._command_attempt("flags", [name, *argv], True))
        assert result.outcome == "silent", (name, result)


def test_an_attempt_depends_on_the_seed_alone() -> None:
    said = [[attempt.what for attempt in inputs.attempts(seed, 40)] for seed in (1, 1, 2)]
    assert said[0] == said[1] != said[2]


def _raise(error: BaseException) -> int:
    raise error


def _leave(folder: Path) -> int:
    (folder / "out").mkdir()
    return 2


def _hang(_: Path) -> int:
    while True:
        random.random()


@pytest.mark.parametrize(
    ("run", "bad", "outcome"),
    [
        (lambda _: 2, True, "refused"),
        (lambda _: _raise(LongspanError("no")), True, "refused"),
        (lambda _: 0, False, "accepted"),
        (lambda _: 0, True, "silent"),
        (lambda _: _raise(Started()), True, "silent"),
        (lambda _: _raise(TypeError("x")), True, "crashed"),
        (_leave, True, "left behind"),
        (_hang, True, "hung"),
    ],
)
def test_an_outcome_is_told_from_the_others(run: object, bad: bool, outcome: str) -> None:
    result = judge(Attempt("flags", "x", bad, run), limit_s=0.2)  # type: ignore[arg-type]
    assert result.outcome == outcome
    assert counts([result])["flags"] == {"tried": 1, **dict.fromkeys(inputs.OUTCOMES, 0), outcome: 1}
