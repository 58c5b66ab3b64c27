"""Starting ranks, and what is said when one of them dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from longspan import launch
from longspan.errors import LongspanError
from longspan.launch import RankFailed, Stopped, StopRequest


def _join() -> int:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    return dist.get_rank()


def _rank_and_threads(offset: int) -> tuple[int, int]:
    import torch

    return _join() + offset, torch.get_num_threads()


def _end_while_others_wait(how: str) -> None:
    """Rank 1 ends as told, while the others are in a collective that never completes without it."""
    import torch
    import torch.distributed as dist

    rank = _join()
    dist.barrier()
    if rank == 1:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "raise":
            raise RuntimeError("planted fault")
        if how == "exit":
            os._exit(7)
        time.sleep(0.2)
    dist.all_reduce(torch.ones(1))


def _refuse() -> None:
    _join()
    raise LongspanError("42 is not an answer; ask again")


def _stop() -> None:
    _join()
    raise Stopped(signal.SIGTERM)


@pytest.fixture(autouse=True)
def _no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)


def _as_under_torchrun(monkeypatch: pytest.MonkeyPatch, world: int) -> None:
    for name, value in {"RANK": 1, "WORLD_SIZE": world, "MASTER_ADDR": "localhost", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(world))


@pytest.mark.launcher
def test_ranks_run_and_rank_0_answers() -> None:
    before = signal.getsignal(signal.SIGTERM)
    assert launch.launch(_rank_and_threads, 10, nproc=2) == (10, launch.threads_per_rank(2))
    assert signal.getsignal(signal.SIGTERM) is before
    assert "TORCHELASTIC_SIGNALS_TO_HANDLE" not in os.environ


def test_one_rank_runs_in_this_process() -> None:
    assert launch.launch(os.getpid, nproc=1) == os.getpid()


@pytest.mark.launcher
@pytest.mark.parametrize(
    ("how", "message", "details"),
    [
        ("kill", r"^rank 1 of 2 was killed by SIGKILL; often the kernel .* memory .*; the other ranks were ended", ""),
        (
            "raise",
            r"rank 1 of 2 died \(exit code 1\): RuntimeError: planted fault; the",
            "_end_while_others_wait",
        ),
        ("exit", r"^rank 1 of 2 exited with code 7 and left no error", ""),
    ],
)
def test_a_rank_that_dies_is_named(how: str, message: str, details: str) -> None:
    start = time.monotonic()
    with pytest.raises(RankFailed, match=message) as caught:
        launch.launch(_end_while_others_wait, how, nproc=2)
    assert time.monotonic() - start < 60
    assert details in caught.value.details


@pytest.mark.launcher
def test_a_refusal_on_the_ranks_comes_back_as_one_error() -> None:
    with pytest.raises(LongspanError, match=r"^42 is not an answer; ask again$"):
        launch.launch(_refuse, nproc=2)


@pytest.mark.launcher
def test_ranks_that_stop_on_a_signal_stop_the_job() -> None:
    with pytest.raises(Stopped) as stop:
        launch.launch(_stop, nproc=2)
    assert stop.value.code == 143


def test_a_wrong_number_of_processes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    launch.check_nproc(4, None, "--ulysses 4")
    launch.check_nproc(4, 4, "--ulysses 4")
    with pytest.raises(LongspanError, match=r"--nproc 3 does not match the mesh: --ulysses 4 needs 4 processes"):
        launch.check_nproc(4, 3, "--ulysses 4")
    _as_under_torchrun(monkeypatch, 4)
    launch.check_nproc(4, None, "--ulysses 4")
    with pytest.raises(LongspanError, match=r"torchrun started 4 processes, but --ulysses 8 needs 8"):
        launch.check_nproc(8, None, "--ulysses 8")
    with pytest.raises(LongspanError, match=r"--nproc 2 does not match the 4 processes that torchrun started"):
        launch.check_nproc(4, 2, "--ulysses 4")
    with pytest.raises(LongspanError, match=r"torchrun started 4 processes, but a mesh of 2 needs 2"):
        launch.launch(os.getpid, nproc=2)


def test_under_torchrun_the_job_runs_here(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launch.is_first_rank()
    _as_under_torchrun(monkeypatch, 4)
    assert launch.launch(os.getpid, nproc=4) == os.getpid()
    assert not launch.is_first_rank()


def test_threads_share_the_cores() -> None:
    assert launch.threads_per_rank(1) >= 1
    assert launch.threads_per_rank(10**6) == 1


def test_a_stop_request_is_remembered_and_handlers_come_back() -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with StopRequest() as stop:
        assert stop.signum is None
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)  # the launcher repeats what the terminal sent
        assert stop.signum == signal.SIGTERM
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_a_later_second_signal_acts_at_once() -> None:
    code = (
        "import signal, time\nfrom longspan.launch import StopRequest\n"
        "with StopRequest(repeat_s=0.05):\n"
        "    signal.raise_signal(15); time.sleep(0.1); signal.raise_signal(15); print('survived')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGTERM
    assert done.stdout == ""
