"""A short part of the campaign, and its judgement."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from longspan.train import TrainConfig
from tests.chaos import ranks
from tests.chaos.ranks import Fault, Outcome
from tests.pool import RankPool


def _train(config: TrainConfig) -> None:
    from longspan.train.loop import Trainer

    Trainer(config).run()


@pytest.mark.launcher
def test_a_killed_rank_is_named_and_the_job_comes_to_the_same_bits(pool2: RankPool, tmp_path: Path) -> None:
    config = ranks.base_config(tmp_path, ring=1, steps=6, timeout=60)
    pool2.run(_train, config, timeout=240)
    fault = Fault("kill", rank=1, lines=3, how="restart")
    outcome = ranks.attempt(config, fault, tmp_path / "killed", ranks.result(config.out))
    assert (outcome.verdict, outcome.recovered) == ("named", True), outcome.said
    assert "rank 1 of 2 was killed by SIGKILL" in outcome.said and "restart 1 of 1" in outcome.said


def test_outcomes_are_judged_and_counted() -> None:
    kill, mismatch = Fault("kill", 2, how="again"), Fault("mismatch", 2, how={"lr": 0.5})
    assert ranks._verdict(kill, None, "") == "hung"
    assert ranks._verdict(kill, 0, "") == "too late"
    assert ranks._verdict(kill, 1, "rank 2 of 4 was killed") == "named"
    assert ranks._verdict(kill, 1, "rank 1 of 4 was killed") == "not named"
    assert ranks._verdict(mismatch, 0, "") == "silent"
    assert ranks._verdict(mismatch, 2, "steps is 3 on rank 2") == "not named"
    assert ranks._verdict(mismatch, 2, "the same: lr is 0.5 on rank 2") == "named"
    assert ranks._verdict(Fault("kill", 2, how="restart"), 0, "rank 2 died; restart 1 of 1") == "named"
    counts = ranks.table([Outcome(kill, "named", "", True), Outcome(kill, "hung", "", None)]).splitlines()[1].split()
    assert counts == ["kill", "2", "1", "1/1", "0", "1", "0", "0"]


def test_a_campaign_can_be_drawn_again(tmp_path: Path) -> None:
    config = ranks.base_config(tmp_path)
    drawn = [[ranks.draw(random.Random(seed), kind, config) for kind in ("kill", "leave")] for seed in (3, 3, 4)]
    assert drawn[0] == drawn[1] != drawn[2]
