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
from longspan.comm.agree import open_together
from longspan.core.errors import LongspanError
from longspan.core.formatting import differences
from longspan.ranks.job import FOLDER, VARIABLES, join_process_group, read_job
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


def test_long_values_are_cut_and_still_differ() -> None:
    (text,) = differences([{"lr": "x" * 1000 + last} for last in "ab"], [0, 1])
    values = text.removeprefix("lr is ").removesuffix(" on rank 0").split(" on rank 1, ")
    assert len(set(values)) == 2 and all(len(value) <= 120 for value in values)


# --- over the process group


def _open(kind: type[Exception], of_ranks: list[Any]) -> str:
    """Open what a rank has: facts, or the text of an error."""
    import torch.distributed as dist

    def opened() -> Any:
        mine = of_ranks[dist.get_rank()]
        if isinstance(mine, str):
            raise kind(mine)
        return mine

    try:
        open_together(opened, lambda facts: facts)
    except (LongspanError, kind) as error:
        return str(error)
    return ""


def test_every_rank_names_differences_by_rank_and_key(pool4: RankPool) -> None:
    same = {"lr": 0.1, "mesh": [1, 4], "steps": 6}
    assert pool4.run(_open, ValueError, [same] * 4) == [""] * 4
    (error,) = set(pool4.run(_open, ValueError, [same, same, same, {**same, "lr": 0.2}]))
    assert "lr is 0.2 on rank 3, 0.1 on ranks 0, 1, 2" in error and "steps" not in error and "LS104" in error
    many, other = ({str(key): value for key in range(9)} for value in "ab")
    (error,) = set(pool4.run(_open, ValueError, [many, many, {"0": "a"}, other]))
    assert "1 is missing on rank 2, b on rank 3, a on ranks 0, 1" in error and "; and 3 more" in error


def test_every_rank_raises_the_error_of_one(pool4: RankPool) -> None:
    text = "--data x is missing; give another"
    assert pool4.run(_open, LongspanError, [text] * 4) == [text] * 4
    assert pool4.run(_open, LongspanError, [{}, text, {"lr": 1}, {}]) == [f"rank 1: {text}"] * 4
    two = "rank 0: no such file (also rank 3); rank 1: no such model"
    assert pool4.run(_open, LongspanError, ["no such file", "no such model", {}, "no such file"]) == [two] * 4
    errors = pool4.run(_open, ValueError, [{}, text, {}, {}])  # any exception: the other ranks would wait
    assert errors == [f"rank 1: ValueError: {text}", text, *[f"rank 1: ValueError: {text}"] * 2]


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
        join_process_group("cpu", 1)
    monkeypatch.setenv(FOLDER, str(tmp_path))
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(LongspanError, match=r"^ranks 0, 2 of 3 did not arrive within 1 s.*unset RANK"):
        join_process_group("cpu", 1)


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
