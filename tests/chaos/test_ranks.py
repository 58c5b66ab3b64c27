"""One attempt of the campaign of ranks, and its judgement."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.chaos import ranks
from tests.chaos.ranks import Fault
from tests.command import ForkedLauncher
from tests.pool import RankPool
from tests.training import train


def _start(job: Path) -> ForkedLauncher:
    return ForkedLauncher(job.parent, ranks.run_here, job)


@pytest.mark.launcher
def test_a_killed_rank_is_named_and_the_job_recovers_the_same_bits(pool2: RankPool, tmp_path: Path) -> None:
    config = ranks.base_config(tmp_path, ring=1, steps=4, timeout=60)
    pool2.run(train, config, timeout=240)
    fault = Fault("kill", rank=1, lines=2, how="restart")
    outcome = ranks.attempt(config, fault, tmp_path / "killed", ranks.result(config.out), _start)
    assert (outcome.verdict, outcome.recovered) == ("refused", True), outcome.output
    assert "rank 1 of 2 was killed by SIGKILL" in outcome.output and "restart 1 of 1" in outcome.output


def test_ends_of_jobs_are_judged(tmp_path: Path) -> None:
    kill, mismatch = Fault("kill", 2, how="again"), Fault("mismatch", 2, how={"lr": 0.5})
    assert ranks.verdict(kill, None, "") == "hung"
    assert ranks.verdict(kill, 0, "") == "harmless"
    assert ranks.verdict(kill, 1, "rank 2 of 4 was killed") == "refused"
    assert ranks.verdict(kill, 1, "rank 1 of 4 was killed") == "wrong"
    assert ranks.verdict(mismatch, 0, "") == "silent"
    assert ranks.verdict(mismatch, 2, "steps is 3 on rank 2") == "wrong"
    assert ranks.verdict(mismatch, 2, "differently: lr is 0.5 on rank 2") == "refused"
    assert ranks.verdict(Fault("kill", 2, how="restart"), 0, "rank 2 died; restart 1 of 1") == "refused"
    config = ranks.base_config(tmp_path)
    drawn = [[ranks.draw(random.Random(seed), kind, config) for kind in ("kill", "leave")] for seed in (3, 3, 4)]
    assert drawn[0] == drawn[1] != drawn[2]
