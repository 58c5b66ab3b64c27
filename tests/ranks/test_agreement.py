"""Ranks that differ, or that cannot connect, raise before the first step."""

from __future__ import annotations

import contextlib
import io
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from longspan import cli
from longspan.core.errors import LongspanError
from longspan.ranks import agreement
from longspan.ranks.agreement import compare
from longspan.ranks.job import FOLDER, VARIABLES, join_group, read_job
from tests.pool import RankPool, run_forked

ROOT = Path(__file__).parents[2]


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


def test_a_difference_is_named_by_rank_and_key() -> None:
    same = {"lr": "0.0003", "steps": "6"}
    assert compare([same] * 4) == ""
    verdict = compare([same, same, {**same, "lr": "0.001"}, same])
    assert "lr is 0.001 on rank 2, 0.0003 on ranks 0, 1, 3" in verdict and "steps" not in verdict
    assert "lr is missing on rank 1, 0.0003 on rank 0" in compare([same, {"steps": "6"}])
    many = compare([{str(key): "a" for key in range(9)}, {str(key): "b" for key in range(9)}])
    assert many.count("b on rank 1, a on rank 0") == 6 and "; and 3 more" in many


def test_a_refusal_of_one_rank_is_the_verdict() -> None:
    assert compare([{"refused": "no such file"}] * 2) == "no such file"
    assert compare([{"lr": "1"}, {"refused": "no such file"}]) == "rank 1: no such file"


def test_long_values_are_cut_and_still_differ() -> None:
    texts = [agreement.short("x" * 1000 + last) for last in "ab"]
    assert texts[0] != texts[1] and all(len(text) <= 80 for text in texts)


# --- over the process group


def _agree_on(facts: list[dict[str, Any]]) -> str:
    import torch.distributed as dist

    try:
        agreement.agree(facts[dist.get_rank()])
    except LongspanError as error:
        return str(error)
    return ""


def _one_refuses(kind: type[Exception]) -> str:
    import torch.distributed as dist

    def opened() -> None:
        if dist.get_rank() == 1:
            raise kind("--data x is missing; give another")

    try:
        agreement.open_together(opened, lambda _: {})
    except (LongspanError, kind) as error:
        return str(error)
    return ""


def test_every_rank_raises_the_verdict(pool4: RankPool) -> None:
    facts = [{"lr": 0.1, "mesh": [1, 4]} for _ in range(4)]
    assert pool4.run(_agree_on, facts) == [""] * 4
    facts[3]["lr"] = 0.2
    (verdict,) = set(pool4.run(_agree_on, facts))
    assert "lr is 0.2 on rank 3, 0.1 on ranks 0, 1, 2" in verdict
    assert set(pool4.run(_one_refuses, LongspanError)) == {"rank 1: --data x is missing; give another"}
    errors = pool4.run(_one_refuses, ValueError)  # any exception, as the other ranks would wait for this one
    assert errors[1] == "--data x is missing; give another"
    assert {errors[0], errors[2], errors[3]} == {"rank 1: ValueError: --data x is missing; give another"}


# --- a job that is impossible, or that does not run


@pytest.mark.parametrize(
    "values",
    [("abc", 2, 29500), (2, 2, 29500), (-1, 2, 29500), (0, 0, 29500), (0, "", 29500), (0, 2, 70000), (0, 2, "http")],
)
def test_variables_of_an_impossible_job_are_refused(monkeypatch: pytest.MonkeyPatch, values: tuple[Any, ...]) -> None:
    import longspan

    assert read_job() is None
    _describe(monkeypatch, *values)
    rank, world_size, port = values
    with pytest.raises(LongspanError) as caught:
        longspan.init_mesh()
    assert f"no possible job: RANK={rank}, WORLD_SIZE={world_size}, " in str(caught.value)
    assert f"MASTER_PORT={port}, " in str(caught.value) and f"unset {' '.join(VARIABLES)}" in str(caught.value)


def test_a_job_that_does_not_run_is_refused_within_the_timeout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    port = _free_port()
    _describe(monkeypatch, 1, 2, port)
    with pytest.raises(LongspanError, match=rf"did not arrive within 1 s: .*RANK=1, .*MASTER_PORT={port}.*unset RANK"):
        join_group("cpu", 1)
    monkeypatch.setenv(FOLDER, str(tmp_path))
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(LongspanError, match=r"^ranks 0, 2 of 3 did not arrive within 1 s.*unset RANK"):
        join_group("cpu", 1)


def _command(job: dict[str, str], command: list[str]) -> tuple[int, str]:
    """Return exit code and errors of a command whose environment describes a job."""
    os.environ.update(job)
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        return cli.main(command), printed.getvalue()


@pytest.mark.launcher
def test_different_flags_are_refused_on_every_rank(tmp_path: Path) -> None:
    """As on several machines, each process is started by hand, and rank 0 hosts the store."""
    port = _free_port()
    flags = ["--config", str(ROOT / "examples" / "demo.yaml"), "--context", "64", "--ring", "1"]
    command = ["train", "sft", *flags, "--output_dir", str(tmp_path / "out"), "--max_steps"]
    jobs = [dict(zip(VARIABLES, (rank, "2", "127.0.0.1", str(port)), strict=True)) for rank in "01"]
    with ThreadPoolExecutor() as threads:
        runs = [
            threads.submit(run_forked, _command, job, [*command, steps]) for job, steps in zip(jobs, "34", strict=True)
        ]
        for code, errors in (run.result() for run in runs):
            assert code == 2 and "max_steps is 4 on rank 1, 3 on rank 0" in errors, errors
