"""The pool of ranks: results, errors, hangs, and ranks that end."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.pool import RankError, RankHang, RankPool, _threads


def _scaled(x: torch.Tensor) -> tuple[torch.Tensor, int, float]:
    factor = torch.tensor(float(dist.get_rank() + 1))
    dist.all_reduce(factor)
    return factor * x, dist.get_rank(), float(torch.rand(()))


def _raise_on(ranks: tuple[int, ...]) -> None:
    if dist.get_rank() in ranks:
        raise ValueError(f"planted on {dist.get_rank()}")


def _raise_before_barrier(rank: int) -> None:
    if dist.get_rank() == rank:
        raise KeyError("gone")
    dist.barrier()


def _leave_out_of_step() -> None:
    """Rank 0 starts a collective that rank 1 never joins: a later collective would not match."""
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(3), async_op=True)
    raise ValueError("out of step")


def _skip_barrier(rank: int) -> None:
    if dist.get_rank() != rank:
        dist.barrier()


def _exit_on(rank: int, code: int) -> None:
    if dist.get_rank() == rank:
        os._exit(code)
    dist.barrier()


def _lose_connection(folder: Path, times: int, error_on_0: str) -> int:
    """Raise what gloo raises, in the first `times` runs."""
    if dist.get_rank() == 0 and error_on_0:
        raise ValueError(error_on_0)
    if dist.get_rank() == 1 and (run := len(list(folder.iterdir()))) < times:
        (folder / str(run)).touch()
        raise RuntimeError(f"[gloo/pair.cc:1] Read error [127.0.0.1]:1: Connection reset by peer\nrun {run}")
    return os.getpid()


def _unpicklable() -> object:
    return lambda: None


def _make_groups(count: int) -> tuple[int, int]:
    """Return how many files and threads the rank has; torch's DTensor keeps its meshes, and so their groups."""
    threads = _threads(os.getpid())
    for _ in range(count):
        mesh = init_device_mesh("cpu", (dist.get_world_size(), 1))
        assert distribute_tensor(torch.ones(4), mesh, [Shard(0), Replicate()]).full_tensor().sum() == 4
    return len(os.listdir("/dev/fd")), threads


def test_results_come_in_rank_order_and_tensors_by_value(pool2: RankPool) -> None:
    x = torch.randn(1 << 20)
    results = pool2.run(_scaled, x)
    assert all(torch.equal(y, 3 * x) for y, _, _ in results) and [rank for _, rank, _ in results] == [0, 1]
    drawn = {number for _, _, number in [*results, *pool2.run(_scaled, x[:3])]}
    assert len(drawn) == 1  # every task starts from the same seed


def test_an_error_names_its_ranks_and_shows_tracebacks(pool2: RankPool) -> None:
    pids = pool2.run(os.getpid)
    with pytest.raises(RankError, match="1 of 2 ranks failed: 1\n") as caught:
        pool2.run(_raise_on, (1,))
    (failure,) = caught.value.failures.values()
    assert (failure.rank, failure.kind, failure.message) == (1, "ValueError", "planted on 1")
    assert "in _raise_on" in str(caught.value)
    with pytest.raises(RankError) as caught:
        pool2.run(_raise_on, (1, 0))
    assert [failure.message for failure in caught.value.failures.values()] == ["planted on 0", "planted on 1"]
    assert str(caught.value).endswith("\nrank 0: ValueError: planted on 0\nrank 1: ValueError: planted on 1")
    assert pool2.run(os.getpid) == pids  # all ranks had finished, so the same processes continue


def test_ranks_out_of_step_do_not_disturb_the_next_task(pool2: RankPool) -> None:
    with pytest.raises(RankError):
        pool2.run(_leave_out_of_step)
    assert [rank for _, rank, _ in pool2.run(_scaled, torch.ones(3), timeout=20)] == [0, 1]


def test_an_error_frees_ranks_that_wait_in_a_collective(pool2: RankPool) -> None:
    with pytest.raises(RankError, match="rank 0: KeyError: 'gone'") as caught:
        pool2.run(_raise_before_barrier, 0)
    assert list(caught.value.stacks) == [1] and "_raise_before_barrier" in caught.value.stacks[1]
    assert str(caught.value).endswith("\nrank 0: KeyError: 'gone'\nrank 1: still running 2 s later")
    assert pool2.run(dist.get_rank) == [0, 1]


def test_a_hang_shows_the_stacks_of_the_ranks_that_wait(pool2: RankPool) -> None:
    pool2.run(dist.get_rank)
    with pytest.raises(RankHang, match=r"1 of 2 ranks did not answer within 2 s: 0\n") as caught:
        pool2.run(_skip_barrier, 1, timeout=2)
    assert list(caught.value.stacks) == [0]
    assert "in barrier" in caught.value.stacks[0] and "in _skip_barrier" in caught.value.stacks[0]
    assert pool2.run(dist.get_rank) == [0, 1]


def test_a_rank_that_ends_is_named_with_its_exit_code(pool2: RankPool, recwarn: pytest.WarningsRecorder) -> None:
    with pytest.raises(RankError, match="rank 1: exit: the process ended with exit code 7") as caught:
        pool2.run(_exit_on, 1, 7)
    assert next(iter(caught.value.failures)) == 1  # before the ranks that merely lost their neighbour
    assert not recwarn.list
    pool2.run(dist.get_rank)
    os.kill(pool2.pids[0], 9)  # between two tasks
    with pytest.raises(RankError, match="rank 0: exit: .*SIGKILL"):
        pool2.run(dist.get_rank)
    assert pool2.run(dist.get_rank) == [0, 1]


def test_a_lost_connection_is_repeated_once_on_new_ranks(pool2: RankPool, tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("once", "always", "other")]
    for folder in folders:
        folder.mkdir()
    pids = pool2.run(os.getpid)
    with pytest.warns(UserWarning, match="a second time: rank 1: RuntimeError: .*Connection reset by peer$"):
        assert not set(pool2.run(_lose_connection, folders[0], 1, "")) & set(pids)
    with pytest.warns(UserWarning), pytest.raises(RankError, match="1 of 2 ranks failed: 1\n"):
        pool2.run(_lose_connection, folders[1], 9, "")
    with pytest.raises(RankError, match="2 of 2 ranks failed"):
        pool2.run(_lose_connection, folders[2], 9, "Connection reset by peer")
    assert [len(list(folder.iterdir())) for folder in folders] == [1, 2, 1]


def test_groups_of_earlier_tasks_are_freed_and_ranks_stay(pool2: RankPool) -> None:
    pids = pool2.run(os.getpid)
    first, *_, last = (max(pool2.run(_make_groups, 5)) for _ in range(3))
    assert all(after <= before + 5 for before, after in zip(first, last, strict=True)), (first, last)
    assert pool2.run(os.getpid) == pids


_HELD: list[dist.ProcessGroup] = []


def _hold_groups(count: int) -> int:
    _HELD.extend(dist.new_group(list(range(dist.get_world_size()))) for _ in range(count))
    return os.getpid()


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="only Linux shows the threads of a process")
def test_ranks_that_hold_many_groups_are_replaced_and_closing_ends_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.pool.MAX_THREADS", 24)
    pool = RankPool(2)
    pids = pool.run(_hold_groups, 2)
    assert pool.run(_hold_groups, 8) == pids
    later = pool.run(os.getpid)
    assert not set(later) & set(pids)
    pool.close()
    assert pool.pids == []
    for pid in later:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_values_that_cannot_be_pickled_are_refused(pool2: RankPool) -> None:
    with pytest.raises(TypeError, match="a function at the top of a module"):
        pool2.run(lambda: None)
    with pytest.raises(RankError, match="2 of 2 ranks failed"):
        pool2.run(_unpicklable)


def test_a_failed_start_is_reported() -> None:
    pool = RankPool(2, warm=("no_such_module",))
    with pytest.raises(RankError, match="rank 1: ModuleNotFoundError: No module named 'no_such_module'"):
        pool.run(dist.get_rank)
    assert pool.pids == []
