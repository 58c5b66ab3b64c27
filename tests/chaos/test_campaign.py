"""The campaign's table and judgements, one killed rank, and that cut links and full disks are made and removed."""

from __future__ import annotations

import dataclasses
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import cluster
from longspan.train.arguments import read
from tests.chaos import __main__ as campaign
from tests.chaos import disks, network, ranks
from tests.chaos.counts import BAD, COLUMNS, Budget, Counts, Outcome, table
from tests.chaos.network import Cut
from tests.chaos.ranks import Fault
from tests.command import ForkedLauncher
from tests.pool import RankPool
from tests.train.training import train


def test_a_bad_outcome_of_any_part_fails_the_campaign(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[Budget] = []

    def module(name: str) -> Any:
        part = name.rpartition(".")[2]

        def run(budget: Budget, counts: Counts) -> None:
            seen.append(budget)
            if part == "broken":
                raise RuntimeError("planted too")
            counts.add(part, "planted")

        return SimpleNamespace(run=run)

    monkeypatch.setattr(campaign, "PARTS", dict.fromkeys((*COLUMNS[1:], "broken"), 0.1))
    monkeypatch.setattr(campaign, "importlib", SimpleNamespace(import_module=module))
    monkeypatch.setattr(campaign.signal, "signal", lambda *_: None)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert campaign.main(["--seed", "7", "--minutes", "2", "--only", "refused", "survived", "skipped"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-4].split() == ["refused", "1", "1", *["0"] * 8] and "skipped: skipped: planted" in lines
    assert lines[-1].split() == ["all", "2", "1", "0", "1", "0", "1", "0", "0", "0", "0"]
    assert {budget.seed for budget in seen} == {7} and seen[0].scale == pytest.approx(0.1)
    for outcome in (*BAD, "broken"):
        assert campaign.main(["--only", "refused", outcome]) == 1, outcome
        assert "planted" in capsys.readouterr().out
    assert not Counts("nothing").good
    with pytest.raises(ValueError, match="no outcome: named"):
        Counts("x").add("named")
    recovery = Counts("x")
    recovery.add_job(1, Outcome("a kill", "refused", "", True))
    recovery.add_job(1, Outcome("a kill", "hung", "", None))
    recovery.add_job(1, Outcome("a kill", "refused", "", False))
    assert table([recovery]).splitlines()[-1].split() == ["all", "3", "2", "1", "0", "0", "0", "1", "0", "0", "1"]


def test_parts_that_need_root_are_skipped_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    for part in ("network", "disks"):
        counts = campaign.run(part, 1, 0.1, 1.0)
        assert (counts["tried"], counts["skipped"], counts.good) == (0, 1, True), counts
        assert "root" in counts.notes[0] or "Linux" in counts.notes[0]


def test_a_part_ends_when_its_time_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    over = Budget(5, tmp_path, 1.0, time.monotonic() - 1)
    assert list(over.seeds(10)) == [5]
    assert list(dataclasses.replace(over, end=time.monotonic() + 600, scale=0.3).seeds(10)) == [5, 6, 7]
    monkeypatch.setattr(ranks, "run_job", lambda *_: (0, ""))
    monkeypatch.setattr(ranks, "result", lambda _: None)
    monkeypatch.setattr(ranks, "attempt", lambda config, fault, *_: Outcome(fault, "refused", "", True))
    for budget, tried in ((Budget(1, tmp_path, 0.5), 8), (over, 1)):
        ranks.run(budget, counts := Counts("ranks"))
        assert counts["tried"] == counts["recovered"] == tried


def test_cuts_are_judged() -> None:
    short, long = Cut(1, 3, 0.1, 2.0, True), Cut(1, 3, 0.1, None, False)
    lost, alone = (
        "longspan: error: rank 1 of 2: no heartbeat for 20 s",
        "rank 1 of 2: cut off from the job: its store",
    )
    assert network.verdict(short, [0, 0], ["", ""], True) == "survived"
    assert network.verdict(short, [0, 0], ["", ""], False) == "silent"
    assert network.verdict(short, [1, 1], [lost, alone], False) == "wrong"
    assert network.verdict(short, [0, None], ["", ""], False) == "hung"
    assert network.verdict(long, [1, 1], [lost, alone], False) == "refused"
    assert network.verdict(Cut(0, 3, 0.1, None, False), [1, 1], [lost, alone], False) == "refused"
    assert network.verdict(long, [1, 1], [lost, "no idea"], False) == "wrong"
    assert network.verdict(long, [1, 1], ["rank 0 of 2 is lost", alone], False) == "wrong"
    assert network.verdict(long, [0, 0], ["", ""], True) == "harmless"
    four = ["ranks 1, 2, 3 of 4: no heartbeat"] + [f"rank {rank} of 4: cut off" for rank in (1, 2, 3)]
    assert network.verdict(Cut(0, 3, 0.1, None, False), [1] * 4, four, False) == "refused"


def test_ends_on_a_full_disk_are_judged(tmp_path: Path) -> None:
    config = ranks.base_config(tmp_path)
    newest = config.out / "checkpoint-1"
    newest.mkdir(parents=True)
    (config.out / "model.safetensors").write_bytes(b"weights")
    (newest / "trainer_state.json").write_text('{"log_history": [{"step": 1, "loss": 3.0}]}')
    weights = {"model.safetensors": b"weights"}
    whole, more = ({1: 3.0}, weights), ({1: 3.0, 2: 2.0}, weights)
    judge: Any = disks.verdict
    assert judge(0, "", config, whole) == "survived"
    assert judge(0, "", config, more) == judge(0, "", config, ({1: 9.0}, weights)) == "silent"
    assert judge(None, "", config, whole) == "hung"
    assert judge(1, "Traceback (most recent call last):\n  File", config, whole) == "traceback"
    assert judge(2, "error: it needs 1,000 bytes, 10 are missing; make room", config, whole) == "refused"
    assert (
        judge(1, "error: it needs 1,000 bytes", config, whole) == judge(2, "unexpected pos", config, whole) == "wrong"
    )


def test_draws_depend_on_the_seed_and_flags_restore_a_config(tmp_path: Path) -> None:
    config = network.small_config(tmp_path)
    cuts = [[network.draw(random.Random(seed), kind, config) for kind in network.KINDS] for seed in (3, 3, 4)]
    full = [disks.draw(random.Random(seed), config) for seed in (3, 3, 4)]
    assert cuts[0] == cuts[1] != cuts[2] and full[0] == full[1] != full[2]
    assert cuts[0][1].seconds is None and 0 < (cuts[0][0].seconds or 0) < ranks.TIMEOUT_S / 2
    changed = read(ranks.base_config(tmp_path, shard_weights=False, layout="zigzag").argv)
    assert (changed.ours.shard_weights, changed.ours.parallel.layout, changed.ours.parallel.ring) == (
        False,
        "zigzag",
        2,
    )


def test_a_small_disk_is_filled_and_unmounted(tmp_path: Path) -> None:
    try:
        with pytest.raises(RuntimeError, match="planted"), disks.small_disk(tmp_path, 1 << 20) as disk:
            disks.fill(disk / "filler", 50_000)
            assert 40_000 < shutil.disk_usage(disk).free <= 50_000
            with pytest.raises(OSError, match="No space left"):
                (disk / "more").write_bytes(bytes(60_000))
            raise RuntimeError("planted")
    except disks.CannotMount as error:
        pytest.skip(str(error))
    assert not list(tmp_path.iterdir())


def test_a_host_is_cut_off_and_reconnected() -> None:
    try:
        with pytest.raises(RuntimeError, match="planted"), cluster.hosts(2, rate=None) as net:
            for noticed in (False, True):
                cluster.cut(net, 1, noticed=noticed)
                assert not _reaches(net.names[0])
                cluster.mend(net, 1)
                assert _reaches(net.names[0])
            raise RuntimeError("planted")
    except cluster.CannotBuild as error:
        pytest.skip(str(error))
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    assert net.bridge not in listed and net.names[0] not in listed


def _reaches(host: str) -> bool:
    """Return whether the second host answers the first, even if it refuses the connection."""
    ask = "import socket; print(socket.socket().connect_ex(('10.0.0.2', 9)))"
    limit = f"import signal; signal.alarm(1); {ask}"
    done = subprocess.run(
        ["ip", "netns", "exec", host, sys.executable, "-S", "-c", limit], capture_output=True, text=True
    )
    return done.stdout.strip() == "111"


def _start(job: Path) -> ForkedLauncher:
    return ForkedLauncher(job.parent, ranks.run_here, job)


@pytest.mark.launcher
def test_a_killed_rank_is_named_and_the_job_recovers_the_same_bits(pool2: RankPool, tmp_path: Path) -> None:
    config = ranks.base_config(tmp_path, ring=1, max_steps=4, timeout=60)
    pool2.run(train, config.argv, timeout=240)
    fault = Fault("kill", rank=1, lines=2, how="restart")
    outcome = ranks.attempt(config, fault, tmp_path / "killed", ranks.result(config.out), _start)
    assert (outcome.verdict, outcome.recovered) == ("refused", True), outcome.output
    assert "rank 1 of 2 was killed by SIGKILL" in outcome.output and "restart 1 of 1" in outcome.output


def test_ends_of_jobs_are_judged(tmp_path: Path) -> None:
    kill, mismatch = Fault("kill", 2, how="again"), Fault("mismatch", 2, how={"learning_rate": 0.5})
    assert ranks.verdict(kill, None, "") == "hung"
    assert ranks.verdict(kill, 0, "") == "harmless"
    assert ranks.verdict(kill, 1, "rank 2 of 4 was killed") == "refused"
    assert ranks.verdict(kill, 1, "rank 1 of 4 was killed") == "wrong"
    assert ranks.verdict(mismatch, 0, "") == "silent"
    assert ranks.verdict(mismatch, 2, "max_steps is 3 on rank 2") == "wrong"
    assert ranks.verdict(mismatch, 2, "differently: learning_rate is 0.5 on rank 2") == "refused"
    assert ranks.verdict(Fault("kill", 2, how="restart"), 0, "rank 2 died; restart 1 of 1") == "refused"
    config = ranks.base_config(tmp_path)
    drawn = [[ranks.draw(random.Random(seed), kind, config) for kind in ("kill", "leave")] for seed in (3, 3, 4)]
    assert drawn[0] == drawn[1] != drawn[2]
