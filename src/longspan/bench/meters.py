"""Timers for work that all ranks run together, counted bytes, and everything that is measured of a workload.

A time is that of the slowest rank, as the others wait for it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from longspan.comm.objects import gather_objects
from longspan.tracing.record import Recorder, memory_rise
from longspan.tracing.spans import figures, imbalance, read_trace, transfer
from longspan.tracing.timeline import gather_trace

if TYPE_CHECKING:
    from longspan.bench.workloads import Workload

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


CPU = torch.device("cpu")
Times = dict[str, list[float]]
"""Seconds of each candidate, by round."""


def alternate(
    candidates: Mapping[str, Callable[[], object]],
    rounds: int,
    device: torch.device = CPU,
    *,
    warmup: int = 1,
    busiest: bool = False,
) -> tuple[Times, Times]:
    """Time candidates in turns, so that a disturbance of seconds touches one round of each, not all rounds of one.

    Collective over all ranks of the job; without a process group, it times this process. Every run starts behind a
    barrier; `warmup` runs of each, for connections, kernel selection and pages, are not timed.

    Returns:
        Wall seconds of the slowest rank, and CPU seconds of all ranks, or with `busiest` of the rank with most; by
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
    cpu_op = dist.ReduceOp.MAX if busiest else dist.ReduceOp.SUM
    return reduce_times(wall, dist.ReduceOp.MAX, device), reduce_times(cpu, cpu_op, device)


def rotate(names: Sequence[str], rounds: int) -> Iterator[tuple[int, str]]:
    """Yield (round, name): every name once per round, starting with another one each time."""
    for turn in range(rounds):
        for i in range(len(names)):
            yield turn, names[(turn + i) % len(names)]


def reduce_times(
    times: dict[str, list[float]], op: dist.ReduceOp.RedOpType, device: torch.device
) -> dict[str, list[float]]:
    """Reduce times over all ranks of the job."""
    if not dist.is_initialized():
        return times
    x = torch.tensor(list(times.values()), dtype=torch.float64, device=device)
    dist.all_reduce(x, op)
    return dict(zip(times, x.tolist(), strict=True))


def time_rounds(runs: Sequence[Callable[[], object]], rounds: int, device: torch.device) -> list[list[float]]:
    """Return the slowest rank's seconds of every round, for each of `runs`. Collective over all ranks."""
    wall, _ = alternate({str(i): run for i, run in enumerate(runs)}, rounds, device)
    return list(wall.values())


def median_seconds(runs: Sequence[Callable[[], object]], rounds: int, device: torch.device) -> list[float]:
    """Return the medians of `time_rounds`. Collective over all ranks."""
    return [statistics.median(seconds) for seconds in time_rounds(runs, rounds, device)]


@dataclass(frozen=True)
class Spread:
    """Median and quartiles over rounds, in seconds; each round is the slowest rank's."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Spread:
        """Summarize the seconds of some rounds."""
        if len(seconds) < 2:
            return cls(seconds[0], seconds[0], seconds[0])
        low, median, high = statistics.quantiles(seconds, n=4, method="inclusive")
        return cls(median, low, high)


def wait_for_all(device: torch.device) -> None:
    """Wait until every rank is here and its device is idle."""
    # Not `dist.barrier`, which needs device ids with NCCL.
    if dist.is_initialized():
        dist.all_reduce(torch.zeros(1, device=device))
    synchronize(device)


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# --- bytes

# FSDP's collectives, by their names in different versions of torch.
GATHERS = ("all_gather_single", "all_gather_into_tensor")
SCATTERS = ("reduce_scatter_single", "reduce_scatter_tensor")


@dataclass(frozen=True)
class Sent:
    """A collective or message ("p2p", as in `longspan.plan.hardware.OPS`), and the bytes that leave this rank."""

    op: str
    bytes: int


def most_sent(log: Sequence[Sent]) -> dict[str, int]:
    """Return the bytes, by collective, of the rank that sends most. Collective."""
    sent: Counter[str] = Counter()
    for each in log:
        sent[each.op] += each.bytes
    if not dist.is_initialized():
        return dict(sent)
    return max(gather_objects(dict(sent), dist.group.WORLD), key=lambda of_rank: sum(of_rank.values()))


@contextlib.contextmanager
def count_sent() -> Iterator[list[Sent]]:
    """Yield a list that grows by the collectives that this rank calls through `torch.distributed`.

    Counted is the least that an algorithm must send: 2 (P-1)/P of the tensor for an all-reduce, P-1 parts for an
    all-gather or reduce-scatter, everything but the rank's own part for an all-to-all, all of a message.
    """
    log: list[Sent] = []
    names = ("all_to_all_single", "all_to_all", "all_reduce", "all_gather", "isend", "batch_isend_irecv", "P2POp")
    original = {name: getattr(dist, name) for name in (*names, *GATHERS, *SCATTERS) if hasattr(dist, name)}

    def all_to_all_single(*args: Any, **kw: Any) -> Any:
        given = dict(zip(("output", "input", "output_split_sizes", "input_split_sizes", "group"), args, strict=False))
        given |= kw
        x, group = given["input"], given.get("group")
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        splits = given.get("input_split_sizes") or [x.shape[0] // size] * size
        row = x[:1].numel() if x.shape[0] else 0
        log.append(Sent("all_to_all", (sum(splits) - splits[rank]) * row * x.element_size()))
        return original["all_to_all_single"](*args, **kw)

    def all_to_all(outs: list[Tensor], xs: list[Tensor], *args: Any, **kw: Any) -> Any:
        group = args[0] if args else kw.get("group")
        log.append(Sent("all_to_all", sum(x.nbytes for i, x in enumerate(xs) if i != dist.get_rank(group))))
        return original["all_to_all"](outs, xs, *args, **kw)

    def all_reduce(tensor: Tensor, *args: Any, **kw: Any) -> Any:
        size = dist.get_world_size(args[1] if len(args) > 1 else kw.get("group"))
        log.append(Sent("all_reduce", 2 * tensor.nbytes * (size - 1) // size))
        return original["all_reduce"](tensor, *args, **kw)

    def all_gather(tensor_list: list[Tensor], tensor: Tensor, *args: Any, **kw: Any) -> Any:
        size = dist.get_world_size(args[0] if args else kw.get("group"))
        log.append(Sent("all_gather", tensor.nbytes * (size - 1)))
        return original["all_gather"](tensor_list, tensor, *args, **kw)

    def count_difference(name: str, op: str) -> Any:
        def counted(output: Any = None, input: Any = None, *args: Any, **kw: Any) -> Any:
            out, x = kw.pop("output_tensor", output), kw.pop("input_tensor", input)
            log.append(Sent(op, abs(out.nbytes - x.nbytes)))  # one is the whole tensor, the other a rank's part
            return original[name](out, x, *args, **kw)

        return counted

    def isend(x: Tensor, *args: Any, **kw: Any) -> Any:
        log.append(Sent("p2p", x.nbytes))
        return original["isend"](x, *args, **kw)

    def p2p_op(op: Any, *args: Any, **kw: Any) -> Any:
        # P2POp accepts torch's own isend alone; the batch counts the message.
        return original["P2POp"](original["isend"] if op is isend else op, *args, **kw)

    def batch_isend_irecv(ops: list[Any]) -> Any:
        log.extend(Sent("p2p", op.tensor.nbytes) for op in ops if op.op is original["isend"])
        return original["batch_isend_irecv"](ops)

    counted: dict[str, Any] = {
        "all_to_all_single": all_to_all_single, "all_to_all": all_to_all, "all_reduce": all_reduce,
        "all_gather": all_gather, "isend": isend, "P2POp": p2p_op, "batch_isend_irecv": batch_isend_irecv,
        **{name: count_difference(name, "all_gather") for name in GATHERS},
        **{name: count_difference(name, "reduce_scatter") for name in SCATTERS},
    }  # fmt: skip
    try:
        for name in original:
            setattr(dist, name, counted[name])
        yield log
    finally:
        for name, function in original.items():
            setattr(dist, name, function)


# --- workloads


def measure(workloads: Mapping[str, Workload], rounds: int, device: torch.device) -> dict[str, dict[str, Any]]:
    """Return everything measured of each workload, in the schema of `longspan bench --json`, and its `trace`.

    Collective over all ranks. Each runs twice as a warm-up, the second time with its bytes counted. Then each runs once
    per round, behind a barrier and in rotating order, so that a disturbance touches one round of each.
    """
    sent = {}
    for name, workload in workloads.items():
        run(workload)
        with count_sent() as log:
            run(workload)
        sent[name] = most_sent(log)
    forward: Times = {name: [] for name in workloads}
    backward: Times = {name: [] for name in workloads}
    for _, name in rotate(list(workloads), rounds):
        wait_for_all(device)
        start = time.perf_counter()
        out = workloads[name].forward()
        synchronize(device)
        middle = time.perf_counter()
        workloads[name].backward(out)
        synchronize(device)
        forward[name].append(middle - start)
        backward[name].append(time.perf_counter() - middle)
    total = {name: [f + b for f, b in zip(forward[name], backward[name], strict=True)] for name in workloads}
    parts = {"forward": forward, "backward": backward, "total": total}
    parts = {part: reduce_times(times, dist.ReduceOp.MAX, device) for part, times in parts.items()}
    found = {}
    for name, workload in workloads.items():
        recorder = Recorder(device)
        with recorder.step(lambda: wait_for_all(device)):
            run(workload)
        trace = gather_trace(recorder.events)
        traces = read_trace(trace)
        of_ranks = [figures(of_rank) for of_rank in traces]
        found[name] = {
            "seconds": {part: dataclasses.asdict(Spread.of(times[name])) for part, times in parts.items()},
            "rounds": parts["total"][name],
            "communication_seconds": statistics.fmean(f.communication for f in of_ranks),
            "exposed_seconds": statistics.fmean(f.exposed for f in of_ranks),
            "transfer_seconds": transfer(traces),
            "imbalance": imbalance([f.computing for f in of_ranks]),
            "figures": [vars(f) for f in of_ranks],
            "sent_bytes": sent[name],
            "peak_bytes": _peak_bytes(workload, device),
            "trace": trace,
        }
    return found


def run(workload: Workload) -> None:
    """Run forward and backward once."""
    workload.backward(workload.forward())


def _peak_bytes(workload: Workload, device: torch.device) -> int:
    """Return the bytes held at the peak of a run, on the rank with the highest."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run(workload)
        synchronize(device)
        rise = torch.cuda.max_memory_allocated(device) - before
    else:
        rise = memory_rise(lambda: run(workload))
    peak = torch.tensor(workload.state_bytes() + rise, device=device)
    if dist.is_initialized():
        dist.all_reduce(peak, dist.ReduceOp.MAX)
    return int(peak)
