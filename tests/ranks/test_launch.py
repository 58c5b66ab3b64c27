"""Ranks are started, end together whatever happens, and the error names the rank that failed."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from longspan.compat.torch_api import ALLOCATOR, copy_job_timeout, give_hosts_time
from longspan.core.errors import LongspanError
from longspan.ranks import job, launch
from longspan.ranks.job import FOLDER, JobRank, join_process_group, read_job
from longspan.ranks.launch import RankFailed, Stopped, StopRequest
from tests.command import ForkedLauncher, launch_forked
from tests.fakes import fake_world
from tests.streams import fake_gpus
from tests.syncs import on_gpu


def _warn_and_report(offset: int) -> tuple[int, int, list[float]]:
    """Warn by several libraries; return rank plus offset, threads, and timeouts of all groups."""
    import logging

    import torch
    import torch.distributed as dist
    import transformers

    import longspan

    warnings.warn("a warning of Python", stacklevel=1)
    transformers.logging.get_logger("transformers.models").warning("a warning of transformers")
    logging.getLogger("torch.distributed").warning("a warning of torch")
    logging.getLogger("torch").error("an error of torch")
    logging.getLogger("a_package").warning("a warning of a package")
    logging.getLogger("torchao").warning("a warning of an import")
    sp = longspan.SequenceSharding(longspan.init_mesh(ring=2, ulysses=1, timeout=77))
    groups: list[Any] = [dist.group.WORLD, sp.ring_group, sp.ulysses_group, sp.group, sp.fsdp_group]
    timeouts = [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups]
    return dist.get_rank() + offset, torch.get_num_threads(), timeouts


def _end_while_others_wait(how: str) -> None:
    """End rank 1 while rank 0 is in a collective that never completes without it."""
    import torch
    import torch.distributed as dist

    join_process_group("cpu")
    dist.barrier()
    if dist.get_rank() == 1:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "leave":
            os._exit(0)
        raise RuntimeError("planted fault")
    dist.all_reduce(torch.ones(1))


def _hang_in_step_7(how: str) -> None:
    """Stop rank 1, or let it hang, in a step in which rank 0 waits for it."""
    import torch
    import torch.distributed as dist

    with launch.joined(4) as watch:
        watch.at("forward and backward", 7)
        if dist.get_rank() == 1:
            time.sleep(1)
            if how == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            _hang()
        dist.all_reduce(torch.ones(1))


def _hang() -> None:
    time.sleep(600)


def _wait_with_stopped_rank(folder: str) -> None:
    """Write process ids to files; then all ranks wait, rank 1 stopped."""
    import torch.distributed as dist

    with launch.joined(60):
        group = dist.new_group(list(range(dist.get_world_size())))
        dist.barrier(group)
        Path(folder, "rank-" + os.environ["RANK"]).write_text(str(os.getpid()))
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        with StopRequest():
            dist.barrier()


@pytest.fixture(autouse=True)
def _no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", *ALLOCATOR):
        monkeypatch.delenv(name, raising=False)


def _as_is_started_rank(monkeypatch: pytest.MonkeyPatch, world: int) -> None:
    for name, value in {"RANK": 1, "WORLD_SIZE": world, "MASTER_ADDR": "localhost", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(world))


@pytest.mark.launcher
def test_ranks_share_cores_and_timeout_and_one_of_them_shows_warnings(capfd: pytest.CaptureFixture[str]) -> None:
    """These ranks have a Python of their own, as those of the command."""
    before = signal.getsignal(signal.SIGTERM)
    found = launch.launch(_warn_and_report, 10, nproc=2)
    assert found == (10, launch.threads_per_rank(2), [77.0] * 5)
    assert signal.getsignal(signal.SIGTERM) is before
    printed = capfd.readouterr().err
    for text in ("a warning of Python", "a warning of transformers", "a warning of torch", "a warning of a package"):
        assert len(re.findall(rf"{text}\n", printed)) == 1, printed
    assert "a warning of an import" not in printed and printed.count("an error of torch") == 2, printed
    assert launch.threads_per_rank(1) >= 1 == launch.threads_per_rank(10**6)


@pytest.mark.launcher
@pytest.mark.parametrize(
    ("how", "message", "details"),
    [
        ("kill", r"^rank 1 of 2 was killed by SIGKILL; often the kernel .* memory .*; the other ranks were ended", ""),
        ("leave", r"^rank 1 of 2 exited with code 0 and left no error before the job was done; the other", ""),
        ("raise", r"^rank 1 of 2 died \(exit code 1\): RuntimeError: planted fault; the", "_end_while_others_wait"),
    ],
)
def test_a_dead_rank_is_named(how: str, message: str, details: str) -> None:
    with pytest.raises(RankFailed, match=message) as caught:
        launch_forked(_end_while_others_wait, how, nproc=2)
    assert details in caught.value.details


@pytest.mark.launcher
@pytest.mark.parametrize(
    ("how", "message"),
    [
        pytest.param(
            "stop",
            r"^rank 1 of 2: no heartbeat for 4 s .*; last known place: rank 1: step 7, forward and backward, at ",
            marks=pytest.mark.confirms,
        ),
        ("hang", r"^rank 1 of 2 is stuck: .* or computed anything .*: rank 1: step 7, .* in _hang; rank 0: step 7"),
    ],
)
def test_a_rank_that_hangs_is_named_with_its_place(how: str, message: str) -> None:
    with pytest.raises(RankFailed, match=message):
        launch_forked(_hang_in_step_7, how, nproc=2)


def _launch_waiting(folder: str, grace_s: float) -> None:
    tempfile.tempdir = folder  # a killed launcher leaves its files
    launch.launch(_wait_with_stopped_rank, folder, nproc=2, grace_s=grace_s)


def _ranks_of(process: ForkedLauncher, folder: Path) -> list[int]:
    """Wait until the ranks wait; return their process ids."""
    files = [folder / "rank-0", folder / "rank-1"]
    end = time.monotonic() + 120
    while not all(file.exists() and file.read_text() for file in files):
        assert time.monotonic() < end and process.poll() is None, process.communicate()[1]
        time.sleep(0.05)
    return [int(file.read_text()) for file in files]


def _gone(pids: list[int], limit_s: float = 30) -> bool:
    end = time.monotonic() + limit_s
    while any(_state(pid) not in ("", "Z") for pid in pids):
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return ""


def _listening(pids: list[int]) -> list[str]:
    """Return the addresses, as the kernel writes them, on which these processes listen."""
    mine = set()
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                mine.add(os.readlink(descriptor))
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A" and f"socket:[{inode}]" in mine:
                found.append(local.partition(":")[0])
    return found


@pytest.mark.launcher
@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="needs /proc")
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_no_rank_survives_its_launcher(signum: int, tmp_path: Path) -> None:
    """Rank 0 catches the signal in a collective and rank 1 is stopped, so neither can end by itself."""
    process = ForkedLauncher(tmp_path, _launch_waiting, str(tmp_path), 1)
    pids = _ranks_of(process, tmp_path)
    try:
        if signum == signal.SIGKILL:
            listening = _listening([process.pid, *pids])
            assert len(listening) >= 2  # gloo in both ranks
            assert set(listening) <= {"0100007F", "00000000000000000000000001000000"}, listening
        process.send_signal(signum)
        _, printed = process.communicate(timeout=60)
        assert process.returncode == (143 if signum == signal.SIGTERM else -signal.SIGKILL), printed
        assert _gone(pids)
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def test_the_end_of_a_rank_decides_the_error(tmp_path: Path) -> None:
    def conclude(*ends: Any, signum: int | None = None, late: str = "") -> Any:
        return launch._conclude(dict(enumerate(ends)), signum, late)

    refused, done, stopped = LongspanError("no space left"), None, Stopped(15)
    assert conclude(done, refused) is refused
    killed = launch._end_of(1, 2, str(tmp_path), -signal.SIGKILL)
    assert str(conclude(done, killed)).startswith("rank 1 of 2 was killed by SIGKILL; often the kernel")
    assert str(conclude(RankFailed("rank 1 of 2: no heartbeat"))).startswith("rank 1 of 2: no heartbeat; the other")
    for ends, signum, late, not_saved in (
        ((stopped, stopped), None, "", ""),
        ((stopped, killed), 15, "", ""),  # before it could save, so nothing is lost
        ((refused, killed), 15, "", "rank 0 could not save: no space left"),
        ((stopped,), 15, "1 of 2 ranks did not end", "1 of 2 ranks did not end"),
    ):
        stop = conclude(*ends, signum=signum, late=late)
        assert isinstance(stop, Stopped) and (stop.code, stop.not_saved) == (143, not_saved)
    assert str(launch._end_of(0, 2, str(tmp_path), 7)) == "rank 0 of 2 exited with code 7 and left no error"


def _end_by(how: str) -> None:
    if how == "exit":
        sys.exit(0)
    raise {"refuse": LongspanError("42 is not an answer; ask again"), "pipe": BrokenPipeError("x")}[how]


@pytest.mark.launcher
@pytest.mark.parametrize(
    ("how", "kind", "message"),
    [
        ("refuse", LongspanError, r"^42 is not an answer; ask again$"),
        ("exit", RankFailed, r"^rank [01] of 2 called sys.exit\(0\) before the job was done; the other"),
        ("pipe", RankFailed, r"BrokenPipeError: .* \(the process that reads this job's output has ended\)"),
    ],
)
def test_an_error_of_a_rank_is_that_of_the_job(how: str, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        launch_forked(_end_by, how, nproc=2)


def test_a_wrong_number_of_processes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    launch.check_started(4, "ulysses=4")
    _as_is_started_rank(monkeypatch, 4)
    launch.check_started(4, "ulysses=4")
    with pytest.raises(LongspanError, match=r"torchrun or srun started 4 processes, but ulysses=8 needs 8"):
        launch.check_started(8, "ulysses=8")
    with pytest.raises(LongspanError, match=r"torchrun or srun started 4 processes, but a mesh of 2 needs 2"):
        launch.launch(os.getpid, nproc=2)


def test_one_rank_and_ranks_of_torchrun_run_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launch.launch(os.getpid, nproc=1) == os.getpid() and launch.is_first_rank()
    _as_is_started_rank(monkeypatch, 4)
    assert launch.launch(os.getpid, nproc=4) == os.getpid()
    assert not launch.is_first_rank()
    with pytest.raises(RankFailed, match=r"rank 1 of 4 called sys.exit\(0\) before the job was done"):
        launch.launch(sys.exit, 0, nproc=4)  # torchrun would count it as a success


# --- Slurm


def _as_under_srun(monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    """Set the environment of a task of `srun`, without torchrun's variables, until the test ends."""
    of_a_job = re.compile("SLURM_|MASTER_|TORCHELASTIC_|(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)")
    others = {name: value for name, value in os.environ.items() if not of_a_job.match(name)}
    monkeypatch.setattr(os, "environ", {**others, **variables})


STEP = {
    "SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "12", "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1", "MASTER_ADDR": "gpu007", "MASTER_PORT": "29500",
}  # fmt: skip


def test_a_task_of_srun_is_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    _as_under_srun(monkeypatch, **STEP)
    assert launch.is_started_rank() and not launch.is_first_local_rank()
    assert read_job() == JobRank(9, 12, 1, 0)
    assert os.environ["LOCAL_RANK"] == "1"  # where other libraries look
    _as_under_srun(monkeypatch, **{**STEP, "SLURM_PROCID": "0", "SLURM_LOCALID": "0"})
    assert launch.is_started_rank() and launch.is_first_rank()
    with pytest.raises(LongspanError, match="srun started 12 processes, but ulysses=8 needs 8; start 8, or"):
        launch.check_started(8, "ulysses=8")
    _as_under_srun(monkeypatch, **{**STEP, "SLURM_PROCID": "12"})
    with pytest.raises(LongspanError, match="no possible job: RANK=12, WORLD_SIZE=12, .*; start"):
        read_job()
    _as_under_srun(monkeypatch, **{**STEP, "MASTER_ADDR": ""})
    with pytest.raises(LongspanError, match=r"srun started 12 tasks, but .*`export MASTER_ADDR=\$\(scontrol"):
        read_job()


def test_a_batch_script_and_a_single_task_are_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    batch_script = {**STEP, "SLURM_PROCID": "0"}
    del batch_script["SLURM_STEP_ID"]
    for variables in (batch_script, {**STEP, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}):
        _as_under_srun(monkeypatch, **variables)
        assert read_job() is None and "RANK" not in os.environ
    torchrun = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "here", "MASTER_PORT": "1", "LOCAL_RANK": "1"}
    _as_under_srun(monkeypatch, **{**STEP, **torchrun})  # torchrun as a task of srun
    assert read_job() == JobRank(1, 2, 1, 0)


def _a_job(local_rank: int) -> JobRank:
    return JobRank(local_rank, 8, local_rank, 8)


def test_a_rank_uses_the_gpu_of_its_local_rank_or_the_only_one() -> None:
    assert [job.device_index(_a_job(place), 8) for place in range(8)] == list(range(8))
    assert [job.device_index(_a_job(place), 1) for place in range(8)] == [0] * 8
    with pytest.raises(
        LongspanError, match="rank 5 is number 6 on its machine, where it sees 4 GPUs; .*at most 4 ranks"
    ):
        job.device_index(_a_job(5), 4)


def test_a_group_with_gpus_also_has_gloo_and_is_bound_to_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    import torch.distributed as dist

    asked: dict[str, Any] = {}
    host = SimpleNamespace(_set_default_timeout=lambda limit: asked.update(host=limit.total_seconds()))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: asked.update(current=device))
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **options: asked.update(options, backend=backend))
    monkeypatch.setattr(
        dist.distributed_c10d, "_get_default_group", lambda: SimpleNamespace(_get_backend=lambda _: host)
    )
    monkeypatch.setattr(job, "use_loopback", lambda: None)
    monkeypatch.setattr(job, "_meet", lambda *_: "a store")
    monkeypatch.setattr(job, "bind_to_node_of", lambda gpu: asked.update(bound=gpu))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: f"properties of {device}")
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "3")
    for name, value in {"WORLD_SIZE": "8", "MASTER_ADDR": "here", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert join_process_group("cuda", None, 900) == asked["store"] == "a store"
    assert asked["backend"] == "cpu:gloo,cuda:nccl" and asked["device_id"] == asked["current"] == torch.device("cuda:3")
    assert asked["timeout"].total_seconds() == 900 and asked["host"] == job.HOST_TIMEOUT_S
    assert "bound" not in asked
    monkeypatch.setenv(FOLDER, "/nowhere")
    join_process_group("cuda", None, 900)
    assert asked["bound"] == "properties of cuda:3"
    asked.clear()
    join_process_group("cpu", None, 900)
    assert asked["backend"] == "gloo" and asked["device_id"] is None and not asked.keys() & {"current", "bound"}


@pytest.mark.parametrize(
    ("node", "allowed", "expected"),
    [
        ("1", {0, 1, 2, 3, 4, 5, 8}, {4, 5, 8}),
        ("1", {0, 1}, set()),  # the user chose other CPUs
        ("1", {4, 5}, set()),  # there already
        ("-1", {0, 1, 2, 3, 4, 5}, set()),  # a machine without nodes
        ("2", {0, 4}, set()),  # no such folder
    ],
)
def test_a_rank_is_bound_to_the_cpus_beside_its_gpu(
    node: str, allowed: set[int], expected: set[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {"bus/pci/devices/0000:3b:00.0/numa_node": node, "devices/system/node/node1/cpulist": "4-6,8\n"}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text)
    bound: set[int] = set()
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: allowed)
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cpus: bound.update(cpus))
    gpu = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0)
    assert job.bind_to_node_of(gpu, tmp_path) == bound == expected
    assert not job.bind_to_node_of(SimpleNamespace(), tmp_path)  # of another maker


@pytest.mark.parametrize("given", [*ALLOCATOR, "settings", None])
def test_segments_grow_unless_the_user_configures_the_allocator(
    given: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under torchrun, too: every GPU that joins a mesh. The environment stays as it is."""
    import torch

    import longspan

    if given in ALLOCATOR:
        monkeypatch.setenv(given, "max_split_size_mb:512")
    set_by_user, made = "max_split_size_mb:512" if given == "settings" else "", list[str]()
    monkeypatch.setattr(torch._C, "_accelerator_getAllocatorSettings", lambda: set_by_user, raising=False)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", made.append)
    environment = [os.environ.get(name) for name in ALLOCATOR]
    with on_gpu(), fake_gpus(2), fake_world(0, 2):
        longspan.init_mesh(ulysses=2, device_type="cpu")
        assert not made
        longspan.init_mesh(ulysses=2, device_type="cuda")
    assert made == ([] if given else ["expandable_segments:True"])
    assert [os.environ.get(name) for name in ALLOCATOR] == environment


def test_each_backend_of_a_new_group_gets_its_own_timeout(store: Any) -> None:
    """Hosts may wait for each other longer than GPUs."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timedelta(seconds=900))
    try:
        give_hosts_time(timedelta(seconds=7200))
        for group in (dist.new_group([0]), dist.group.WORLD):
            host: Any = copy_job_timeout(group)
            assert host._get_backend(torch.device("cpu")).options._timeout.total_seconds() == 7200
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("axes", "groups"),
    [
        ({"ulysses": 8}, 1),  # the default one
        ({"ring": 2, "ulysses": 4}, 3),  # both axes
        ({"data": 2, "ulysses": 4}, 3),
        ({"data": 2, "ring": 2, "ulysses": 2}, 5),  # the sequence
        ({"ulysses": 4, "tensor": 2}, 3),  # both axes; ulysses is that of FSDP, too
    ],
)
def test_groups_of_a_mesh(axes: dict[str, int], groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts use them, too. Only beside a group for GPUs alone do they get another, once."""
    import torch.distributed as dist

    import longspan

    with fake_world(0, 8):
        sp = longspan.SequenceSharding(longspan.init_mesh(**axes, device_type="cpu"))
        assert sp.host_group is sp.world_group is dist.group.WORLD
        assert longspan.SequenceSharding(sp.mesh).fsdp_group is sp.fsdp_group  # makes no more
        assert sum(group.size() > 1 for group in dist.distributed_c10d._world.pg_names) == groups
        del sp.host_group
        made = mock.Mock(side_effect=lambda ranks, **options: (ranks, options["backend"]))
        monkeypatch.setattr(dist, "get_backend_config", lambda group: "cuda:nccl")
        monkeypatch.setattr(dist, "new_group", made)
        assert sp.host_group == sp.host_group == (list(range(8)), "gloo")
        assert made.call_count == 1


def test_a_stop_request_stores_the_signal_and_restores_handlers(capfd: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with StopRequest(stops="stopping after this step") as stop:
        assert stop.signum is None
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)  # the launcher repeats what the terminal sent
        assert stop.signum == signal.SIGTERM
    assert capfd.readouterr().err == "longspan: stopping after this step; a second signal ends it at once\n"
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_a_second_signal_ends_a_job() -> None:
    code = (
        "import signal, time\nfrom longspan.ranks import launch\nlaunch.REPEAT_S = 0.05\nwith launch.StopRequest():\n"
        "    signal.raise_signal(15); time.sleep(0.1); signal.raise_signal(15); print('survived')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, "")


class _Process:
    """A rank that never ends by itself, and stores the signals that it is sent."""

    exitcode = None

    def __init__(self) -> None:
        self.sentinel, _ = os.pipe()
        self.signals = 0

    def terminate(self) -> None:
        self.signals += 1


def test_ranks_have_a_grace_period_until_a_second_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = [_Process(), _Process()]
    with StopRequest("", ends=False) as stop:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)  # at once, so a repetition
        assert stop.signum == signal.SIGINT and not stop.again
        ends, late = launch._wait(ranks, str(tmp_path), stop, 0.3)
        assert not ends and "2 of 2 ranks did not end within 0.3 s" in late and [r.signals for r in ranks] == [1, 1]
        monkeypatch.setattr(launch, "REPEAT_S", 0.0)
        signal.raise_signal(signal.SIGINT)
        assert "second signal" in launch._wait(ranks, str(tmp_path), stop, 3600)[1]


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError("[/pytorch/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1"), True),
        (RuntimeError("[gloo/transport/tcp/pair.cc:9] writev: Broken pipe"), True),
        (BrokenPipeError(32, "Broken pipe"), False),
        (ConnectionResetError(104, "Connection reset by peer"), False),
        (LongspanError("2 is not 3"), False),
    ],
)
def test_only_errors_of_gloo_nccl_and_the_store_mean_a_lost_peer(error: Exception, lost: bool) -> None:
    assert launch.lost_peer(error) is lost
    wrapped = LongspanError("checkpoint cannot be written")
    wrapped.__cause__ = error
    assert launch.lost_peer(wrapped) is lost
