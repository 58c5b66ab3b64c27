"""Time candidates in turns: wall seconds of the slowest rank, and CPU seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist

from longspan.bench.timing import reduce, synchronize, wait_for_all

CPU = torch.device("cpu")
Times = dict[str, list[float]]
"""Seconds of each candidate, by round."""


def alternate(
    candidates: Mapping[str, Callable[[], object]],
    rounds: int,
    device: torch.device = CPU,
    *,
    warmup: int = 1,
    max_over_ranks: bool = False,
) -> tuple[Times, Times]:
    """Time candidates in turns, so that a disturbance of seconds touches one round of each, not all rounds of one.

    Collective over all ranks of the job; without a process group, it times this process. Every run starts behind a
    barrier; `warmup` runs of each, for connections, kernel selection and pages, are not timed.

    Returns:
        Wall seconds of the slowest rank, and CPU seconds of all ranks, or with `max_over_ranks` their maximum; by
        candidate and round. CPU time includes gloo's threads and hardly depends on other load of the machine.
    """
    for _ in range(warmup):
        for run in candidates.values():
            run()
    wall: Times = {name: [] for name in candidates}
    cpu: Times = {name: [] for name in candidates}
    for _, name in rotate(list(candidates), rounds):
        wait_for_all(device)
        start, start_cpu = time.perf_counter(), time.process_time()
        candidates[name]()
        synchronize(device)
        wall[name].append(time.perf_counter() - start)
        cpu[name].append(time.process_time() - start_cpu)
    cpu_op = dist.ReduceOp.MAX if max_over_ranks else dist.ReduceOp.SUM
    return reduce_times(wall, dist.ReduceOp.MAX, device), reduce_times(cpu, cpu_op, device)


def rotate(names: Sequence[str], rounds: int) -> Iterator[tuple[int, str]]:
    """Yield (round, name): every name once per round, starting with another one each time."""
    for turn in range(rounds):
        for i in range(len(names)):
            yield turn, names[(turn + i) % len(names)]


def reduce_times(times: Times, op: dist.ReduceOp.RedOpType, device: torch.device) -> Times:
    """Reduce times over all ranks of the job."""
    reduced = reduce(torch.tensor(list(times.values()), dtype=torch.float64), op, device)
    return dict(zip(times, reduced.tolist(), strict=True))
