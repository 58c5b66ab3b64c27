"""Ranks that were not given the same, or that never meet, hear of it before any collective."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from longspan.core.errors import LongspanError
from longspan.core.sections import make, replace
from longspan.ranks import agreement, rendezvous
from longspan.ranks.agreement import compare
from longspan.ranks.rendezvous import VARIABLES, Peers, read_job, wait_for_ranks
from tests.pool import RankPool

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def _no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*VARIABLES, "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _describe(monkeypatch: pytest.MonkeyPatch, rank: Any, world: Any, port: Any) -> None:
    for name, value in zip(VARIABLES, (rank, world, "127.0.0.1", port), strict=True):
        monkeypatch.setenv(name, str(value))


# --- what is said


def test_a_difference_is_named_by_rank_and_key() -> None:
    same = {"lr": "0.0003", "steps": "6"}
    assert compare([same] * 4) == ""
    said = compare([same, same, {**same, "lr": "0.001"}, same])
    assert "lr is 0.001 on rank 2, 0.0003 on ranks 0, 1, 3" in said and "steps" not in said
    assert "lr is missing on rank 1, 0.0003 on rank 0" in compare([same, {"steps": "6"}])
    many = compare([{str(key): "a" for key in range(9)}, {str(key): "b" for key in range(9)}])
    assert many.count("b on rank 1, a on rank 0") == 6 and "; and 3 more" in many


def test_what_one_rank_refused_is_said_on_all() -> None:
    assert compare([{"refused": "no such file"}] * 2) == "no such file"
    assert compare([{"lr": "1"}, {"refused": "no such file"}]) == "rank 1: no such file"


def test_long_values_are_compared_whole() -> None:
    texts = [agreement.short("x" * 1000 + last) for last in "ab"]
    assert texts[0] != texts[1] and all(len(text) <= 80 for text in texts)


# --- over the store of ranks that are there


def _agree_on(facts: list[dict[str, Any]]) -> str:
    peers = wait_for_ranks(20)
    try:
        agreement.agree(peers, facts[peers.rank])
    except LongspanError as error:
        return str(error)
    return ""


def _one_refuses(kind: type[Exception]) -> str:
    peers = wait_for_ranks(20)
    try:
        with agreement.refusing_together(peers):
            if peers.rank == 1:
                raise kind("--data x is missing; give another")
        agreement.agree(peers, {})
    except (LongspanError, kind) as error:
        return str(error)
    return ""


def _say_nothing_on_rank_1() -> str:
    peers = wait_for_ranks(20)
    peers.timeout_s = 0.5
    try:
        return "" if peers.rank == 1 else str(agreement.agree(peers, {}))
    except LongspanError as error:
        return str(error)


def test_ranks_compare_before_they_go_on(pool4: RankPool) -> None:
    facts = [{"lr": 0.1, "mesh": [1, 4]} for _ in range(4)]
    assert pool4.run(_agree_on, facts) == [""] * 4
    facts[3]["lr"] = 0.2
    (said,) = set(pool4.run(_agree_on, facts))
    assert "lr is 0.2 on rank 3, 0.1 on ranks 0, 1, 2" in said
    assert set(pool4.run(_one_refuses, LongspanError)) == {"rank 1: --data x is missing; give another"}
    said = pool4.run(_one_refuses, ValueError)  # an exception of any kind: the other ranks would wait for this one
    assert said[1] == "--data x is missing; give another"
    assert {said[0], said[2], said[3]} == {"rank 1: ValueError: --data x is missing; give another"}
    heard = pool4.run(_say_nothing_on_rank_1)
    assert heard[1] == "" and all("rank 1 of 4 said nothing" in heard[rank] for rank in (0, 2, 3)), heard


def _try_changed(config: Any, changes: list[dict[str, Any]]) -> list[str]:
    """What a Trainer says to each of the changes, made on rank 1 alone."""
    import torch.distributed as dist

    from longspan.train.loop import Trainer

    said = []
    for change in changes:
        mine = replace(config, **change) if dist.get_rank() == 1 else config
        try:
            Trainer(mine)
            said.append("accepted")
        except LongspanError as error:
            said.append(str(error))
    return said


def test_every_setting_of_a_run_must_be_alike(pool2: RankPool, tmp_path: Path) -> None:
    from longspan.train import TrainConfig

    llama = json.loads((ROOT / "examples" / "llama-tiny.json").read_text())
    path, thin, coarse = (tmp_path / name for name in ("config.json", "thin.json", "coarse.json"))
    path.write_text(json.dumps(llama))
    thin.write_text(json.dumps(llama | {"num_hidden_layers": 1}))
    coarse.write_text(json.dumps(llama | {"rms_norm_eps": 0.1}))
    out = tmp_path / "out"
    config = make(TrainConfig, data="pydoc", config=path, context=64, ulysses=2, steps=6, out=out, dtype="fp32")
    changes: dict[str, dict[str, Any]] = {
        "lr is 0.1 on rank 1": {"lr": 0.1},
        "clip is 2.0 on rank 1": {"clip": 2.0},
        "weight_decay is 0.5": {"weight_decay": 0.5},
        "warmup is 3": {"warmup": 3},
        "steps is 7 on rank 1, 6 on rank 0": {"steps": 7},
        "save_every is 1": {"save_every": 1},
        f"out is {tmp_path}": {"out": tmp_path / "elsewhere"},
        "ulysses is 1": {"ulysses": 1, "data_degree": 2, "batch": 2},
        "layout is contiguous": {"layout": "contiguous"},
        "model config's num_hidden_layers is 1": {"config": thin},
        "model config's rms_norm_eps is 0.1": {"config": coarse},
        "seed is 1": {"seed": 1},
    }
    both = pool2.run(_try_changed, config, list(changes.values()), timeout=240)
    assert both[0] == both[1]
    for expected, said in zip(changes, both[0], strict=True):
        assert expected in said, (expected, said)
    assert pool2.run(_try_changed, config, [{"nproc": 2}], timeout=240) == [["accepted"]] * 2


# --- a job that cannot be, or that nobody runs


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (("abc", 2, 29500), "RANK=abc, which is no integer from 0 to 1"),
        ((2, 2, 29500), "RANK=2, which is no integer from 0 to 1"),
        ((-1, 2, 29500), "RANK=-1, which is no integer"),
        ((0, 0, 29500), "WORLD_SIZE=0, which is no integer of at least 1"),
        ((0, "", 29500), "it has RANK=0, MASTER_ADDR=127.0.0.1, MASTER_PORT=29500, but no WORLD_SIZE"),
        ((0, 2, 70000), "MASTER_PORT=70000, which is no integer from 1 to 65535"),
        ((0, 2, "http"), "MASTER_PORT=http"),
    ],
)
def test_variables_that_describe_no_job_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], values: tuple[Any, ...], said: str
) -> None:
    import longspan
    from longspan.cli import main

    assert read_job() is None
    _describe(monkeypatch, *values)
    with pytest.raises(LongspanError) as caught:
        longspan.init_mesh()
    assert said in str(caught.value) and f"unset {' '.join(VARIABLES)}" in str(caught.value)
    assert main(["train", "--data", "pydoc", "--config", str(ROOT / "examples" / "llama-tiny.json")]) == 2
    assert said in capsys.readouterr().err


def test_a_job_that_nobody_runs_is_refused_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    start = time.monotonic()
    port = _free_port()
    _describe(monkeypatch, 1, 2, port)
    with pytest.raises(LongspanError, match=rf"RANK=1, WORLD_SIZE=2, .*MASTER_PORT={port} within 1 s, nobody.*unset"):
        wait_for_ranks(start_s=1)
    with socket.create_server(("127.0.0.1", port)), pytest.raises(LongspanError, match=r"not the store of a job"):
        wait_for_ranks(start_s=1)
    _describe(monkeypatch, 0, 3, _free_port())
    with pytest.raises(LongspanError, match=r"^ranks 1, 2 of 3 did not arrive within 1 s.*unset RANK"):
        wait_for_ranks(start_s=1)
    monkeypatch.setenv("MASTER_ADDR", "no.such.host.invalid")
    with pytest.raises(LongspanError, match=r"MASTER_ADDR=no.such.host.invalid is no address"):
        wait_for_ranks(start_s=1)
    assert time.monotonic() - start < 60


def _meet_in_threads(store: Any, ranks: list[int], world: int, timeout_s: float) -> dict[int, str]:
    """The session, or the error, of each of the ranks."""
    found: dict[int, str] = {}

    def rank_of(number: int, rank: int) -> None:
        try:
            found[number] = rendezvous._gather(store.clone(), rank, world, timeout_s, None)
        except LongspanError as error:
            found[number] = str(error)

    threads = [threading.Thread(target=rank_of, args=pair) for pair in enumerate(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


def test_ranks_meet_again_over_a_store_that_outlived_a_job(store: Any) -> None:
    first = set(_meet_in_threads(store, [0, 1, 2], 3, 30).values())
    second = set(_meet_in_threads(store, [2, 1, 0], 3, 30).values())
    assert len(first) == len(second) == 1 and first != second
    absent = _meet_in_threads(store, [0, 1], 3, 1)  # rank 2's old greeting is no arrival
    assert all("rank 2 of 3 did not arrive within 1 s" in said for said in absent.values()), absent
    assert "rank 0 of 3 did not arrive" in _meet_in_threads(store, [1], 3, 0.5)[0]


def test_a_rank_whose_connection_is_busy_has_another(store: Any) -> None:
    peers = Peers(0, 1, 5, store, "session")
    peers.clone().set("word", "yes")
    assert peers.get("word") == "yes" and peers.get("other") is None
    assert peers.missing("beat") == [0]


@pytest.mark.launcher
def test_processes_with_other_flags_are_refused_on_every_rank(tmp_path: Path) -> None:
    """As with several machines: each process is started by hand, and rank 0 holds the store."""
    port = _free_port()
    flags = ["--data", "pydoc", "--config", str(ROOT / "examples" / "llama-tiny.json"), "--context", "64"]
    processes = []
    for rank, steps in enumerate(("3", "4")):
        job = dict(zip(VARIABLES, (str(rank), "2", "127.0.0.1", str(port)), strict=True))
        environment = {**os.environ, **job, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "longspan", "train", *flags, "--ulysses", "2", "--out", str(tmp_path / "out")]
        processes.append(
            subprocess.Popen(
                [*command, "--steps", steps], env=environment, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        )
    for process in processes:
        said, _ = process.communicate(timeout=200)[::-1]
        assert process.returncode == 2, said
        assert "steps is 4 on rank 1, 3 on rank 0" in said


def test_starting_has_another_time_limit_than_a_lost_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine ranks start minutes apart, whatever `--timeout` says of ranks that have arrived."""
    limits: list[float] = []
    monkeypatch.setattr(rendezvous, "_connect", lambda job, limit_s: limits.append(limit_s) or "a store")
    monkeypatch.setattr(rendezvous, "_gather", lambda store, rank, world, limit_s, job: limits.append(limit_s) or "us")
    _describe(monkeypatch, 0, 2, 29500)
    assert wait_for_ranks(30).timeout_s == 30 and limits == [600, 600]
    assert wait_for_ranks(30, 5).timeout_s == 30 and limits[2:] == [5, 5]
