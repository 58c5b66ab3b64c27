"""The pool of ranks keeps what its docstring says."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.pool import RankError, RankHang, RankPool


def _sum_of_ranks(scale: float = 1.0) -> torch.Tensor:
    x = torch.full((3,), scale * dist.get_rank())
    dist.all_reduce(x)
    return x


def _square(x: torch.Tensor) -> torch.Tensor:
    return x * x


def _raise_on(ranks: tuple[int, ...]) -> int:
    if dist.get_rank() in ranks:
        raise ValueError(f"bad luck on {dist.get_rank()}")
    return dist.get_rank()


def _raise_before_barrier(rank: int) -> None:
    if dist.get_rank() == rank:
        raise KeyError("gone")
    dist.barrier()


def _leave_out_of_step() -> None:
    """Rank 0 starts a collective that rank 1 never joins: a collective after this one would not match."""
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


def _unpicklable() -> object:
    return lambda: None


def _make_groups(count: int) -> int:
    for _ in range(count):
        dist.new_group(list(range(dist.get_world_size())))
    return len(os.listdir("/dev/fd"))


def _draw() -> float:
    return float(torch.rand(()))


def test_collective_and_results_in_rank_order(pool2: RankPool) -> None:
    for result in pool2.run(_sum_of_ranks, 2.0):
        torch.testing.assert_close(result, torch.full((3,), 2.0))
    assert pool2.run(dist.get_rank) == [0, 1]


def test_large_tensors_travel_both_ways(pool2: RankPool) -> None:
    x = torch.randn(1 << 20)
    for result in pool2.run(_square, x):
        assert torch.equal(result, x * x)


def test_every_task_starts_from_the_same_seed(pool2: RankPool) -> None:
    assert len({*pool2.run(_draw), *pool2.run(_draw)}) == 1


def test_error_names_the_rank_and_shows_its_traceback(pool2: RankPool) -> None:
    pids = pool2.run(os.getpid)
    with pytest.raises(RankError, match="1 of 2 ranks failed: 1\n") as caught:
        pool2.run(_raise_on, (1,))
    assert list(caught.value.failures) == [1]
    failure = caught.value.failures[1]
    assert (failure.kind, failure.message) == ("ValueError", "bad luck on 1")
    assert "in _raise_on" in str(caught.value)
    assert pool2.run(os.getpid) == pids  # all ranks had finished: the same processes go on


def test_errors_of_all_ranks_are_listed(pool2: RankPool) -> None:
    with pytest.raises(RankError) as caught:
        pool2.run(_raise_on, (1, 0))
    assert [failure.message for failure in caught.value.failures.values()] == ["bad luck on 0", "bad luck on 1"]


def test_ranks_out_of_step_do_not_disturb_the_next_task(pool2: RankPool) -> None:
    with pytest.raises(RankError):
        pool2.run(_leave_out_of_step)
    assert [result.tolist() for result in pool2.run(_sum_of_ranks, timeout=20)] == [[1.0] * 3] * 2


def test_error_frees_ranks_that_wait_in_a_collective(pool2: RankPool) -> None:
    start = time.monotonic()
    with pytest.raises(RankError, match="rank 0: KeyError: 'gone'") as caught:
        pool2.run(_raise_before_barrier, 0)
    assert time.monotonic() - start < 20
    assert list(caught.value.stacks) == [1]
    assert "_raise_before_barrier" in caught.value.stacks[1]
    assert pool2.run(dist.get_rank) == [0, 1]


def test_hang_ends_within_its_limit_and_shows_where(pool2: RankPool) -> None:
    pool2.run(dist.get_rank)
    start = time.monotonic()
    with pytest.raises(RankHang, match=r"1 of 2 ranks did not answer within 2 s: 0\n") as caught:
        pool2.run(_skip_barrier, 1, timeout=2)
    assert time.monotonic() - start < 10
    assert list(caught.value.stacks) == [0]
    assert "in barrier" in caught.value.stacks[0]
    assert "in _skip_barrier" in caught.value.stacks[0]
    assert pool2.run(dist.get_rank) == [0, 1]


def test_dead_rank_is_named_with_its_exit_code(pool2: RankPool) -> None:
    with pytest.raises(RankError, match="rank 1: exit: the process ended with exit code 7") as caught:
        pool2.run(_exit_on, 1, 7)
    assert next(iter(caught.value.failures)) == 1  # before the ranks that merely lost their neighbour
    assert pool2.run(dist.get_rank) == [0, 1]


def test_rank_killed_between_tasks_is_noticed(pool2: RankPool) -> None:
    pool2.run(dist.get_rank)
    os.kill(pool2.pids[0], 9)
    with pytest.raises(RankError, match="rank 0: exit: .*SIGKILL"):
        pool2.run(dist.get_rank)
    assert pool2.run(dist.get_rank) == [0, 1]


def test_groups_do_not_accumulate(pool2: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.pool.MAX_THREADS", 10**6)
    first = max(pool2.run(_make_groups, 10))
    for _ in range(3):
        last = max(pool2.run(_make_groups, 10))
    assert last <= first + 5


_KEPT: list[dist.ProcessGroup] = []


def _keep_groups(count: int) -> int:
    _KEPT.extend(dist.new_group(list(range(dist.get_world_size()))) for _ in range(count))
    return os.getpid()


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="only Linux tells the threads of a process")
def test_ranks_that_keep_many_groups_are_replaced() -> None:
    own = RankPool(2)
    pids = own.run(_keep_groups, 2)
    assert own.run(_keep_groups, 30) == pids
    assert not set(own.run(os.getpid)) & set(pids)
    own.close()


def test_what_cannot_be_sent_is_refused(pool2: RankPool) -> None:
    with pytest.raises(TypeError, match="a function at the top of a module"):
        pool2.run(lambda: None)
    with pytest.raises(RankError, match="2 of 2 ranks failed"):
        pool2.run(_unpicklable)


@pytest.mark.parametrize("pool", [4], indirect=True)
def test_pool_takes_its_size_from_the_parameter(pool: RankPool, pool4: RankPool) -> None:
    assert pool is pool4
    assert pool.run(dist.get_world_size) == [4] * 4


def test_failed_start_is_reported_and_repeated() -> None:
    own = RankPool(2, warm=("no_such_module",))
    for _ in range(2):
        with pytest.raises(RankError, match="rank 1: ModuleNotFoundError: No module named 'no_such_module'"):
            own.run(dist.get_rank)
        assert own.pids == []


def test_closing_ends_the_processes() -> None:
    own = RankPool(2)
    own.run(dist.get_rank)
    pids = own.pids
    own.close()
    assert own.pids == []
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
