"""Latency and bandwidth of the collectives that longspan uses, on every axis of a mesh, fitted to their times."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from longspan.bench.command import ELEMENT_BYTES, BenchConfig
from longspan.bench.timing import median_seconds, time_rounds
from longspan.comm.mesh import SequenceSharding
from longspan.compat.torch_api import gather_into, scatter_into
from longspan.plan.hardware import MeasuredLink

FOUR = ("all_to_all", "all_gather", "reduce_scatter", "all_reduce")
Pending = list[dist.Work]
"""Operations in flight; wait for each."""


def start(op: str, x: Tensor, y: Tensor, n: int, group: dist.ProcessGroup, overlapped: bool = False) -> Pending:
    """Run a collective from `x` to `y`, whose first n elements are the whole tensor; `overlapped`: only start it."""
    ranks = group.size()
    options: dict[str, Any] = {"group": group, "async_op": overlapped}
    if op == "p2p":
        send = dist.P2POp(dist.isend, x[:n], group=group, group_peer=(group.rank() + 1) % ranks)
        receive = dist.P2POp(dist.irecv, y[:n], group=group, group_peer=(group.rank() - 1) % ranks)
        requests: Pending = dist.batch_isend_irecv([send, receive])
        if overlapped:
            return requests
        for request in requests:
            request.wait()
        return []
    work: dist.Work | None
    if op == "all_to_all":
        work = dist.all_to_all_single(y[:n], x[:n], **options)
    elif op == "all_gather":
        work = gather_into(y[:n], x[: n // ranks], **options)
    elif op == "reduce_scatter":
        work = scatter_into(y[: n // ranks], x[:n], **options)
    else:
        work = dist.all_reduce(y[:n], **options)
    return [] if work is None else [work]


def collectives_of(axis: str) -> tuple[str, ...]:
    """Return the collectives measured on `axis`: only the ring uses p2p."""
    return (*FOUR, "p2p") if axis == "ring" else FOUR


def measure_links(config: BenchConfig, mesh: Any, device: torch.device) -> dict[str, dict[str, MeasuredLink]]:
    """Return axis -> collective -> fit for every axis of more than one rank. Collective over all ranks.

    The ranks over which weights are sharded and gradients summed are measured as the axis "fsdp". All groups of an axis
    run concurrently and share their wires, as in a training step.
    """
    groups: dict[str, Any] = {axis: mesh.get_group(axis) for axis, size in config.parallel.degrees.items() if size > 1}
    if config.parallel.fsdp_ranks > 1:
        groups["fsdp"] = SequenceSharding(mesh, overlap_chunks=1).fsdp_group
    return {axis: _measure_axis(config, group, device, axis) for axis, group in groups.items()}


def _measure_axis(
    config: BenchConfig, group: dist.ProcessGroup, device: torch.device, axis: str
) -> dict[str, MeasuredLink]:
    """Return collective -> fit."""
    fits = {}
    # The elements of each size, rounded up to a multiple of the ranks.
    counts = sorted({-(-size // (ELEMENT_BYTES * group.size())) * group.size() for size in config.sizes})
    # Zeros, as sums of them do not overflow. Write them, as reading pages never written costs a CPU nothing.
    x, y = (torch.empty(max(counts), dtype=torch.float32, device=device).zero_() for _ in range(2))
    for op in collectives_of(axis):
        runs = [partial(start, op, x, y, n, group) for n in counts]
        seconds = median_seconds(runs, config.rounds, device)
        found = fit([bytes_sent(op, ELEMENT_BYTES * n, group.size()) for n in counts], seconds)
        if op in _overlapped_on(axis, device):
            timed = list(zip(runs, seconds, strict=True))
            run, alone = ([each for each in timed if each[1] < MAX_OVERLAPPED_S] or timed[:1])[-1]
            found = replace(found, hidden=hidden_share(partial(run, overlapped=True), alone, device))
        fits[op] = found
    return fits


MAX_OVERLAPPED_S = 0.3
"""The overlap is measured with the largest message that takes no more seconds than this."""


def _overlapped_on(axis: str, device: torch.device) -> tuple[str, ...]:
    """Return what longspan overlaps with computing: chunks of heads, ring blocks, FSDP's collectives on GPUs."""
    weights = ("all_gather", "reduce_scatter") if device.type == "cuda" else ()
    return {"ulysses": ("all_to_all",), "ring": ("p2p",), "fsdp": weights}.get(axis, ())


_MIN_ROUNDS, _MAX_ROUNDS = 5, 25
"""Rounds for a long collective, and for one so short that its time is mostly noise."""

_WIDTHS = {"cpu": 128, "cuda": 1024}


def hidden_share(begin: Callable[[], Pending], alone: float, device: torch.device) -> float:
    """Return the share of a collective's time, 0 to 1, that overlaps with matrix products of the same length.

    The same on every rank. Collective over all ranks of the job. `begin` starts the collective, which takes about
    `alone` seconds.
    """
    d = _WIDTHS[device.type]
    a_dd, b_dd, c_dd = (torch.ones(d, d, device=device) for _ in range(3))

    def compute(times: int) -> None:
        for _ in range(times):
            torch.mm(a_dd, b_dd, out=c_dd)

    def both(times: int) -> None:
        pending = begin()
        compute(times)
        for work in pending:
            work.wait()

    (each,) = median_seconds([partial(compute, 16)], 3, device)
    times = max(1, round(16 * alone / each))
    in_turn = [partial(both, 0), partial(compute, times), partial(both, times)]
    count = min(_MAX_ROUNDS, max(_MIN_ROUNDS, round(MAX_OVERLAPPED_S / alone)))
    rounds = zip(*time_rounds(in_turn, count, device), strict=True)
    shares = [(sent + computed - took) / min(sent, computed) for sent, computed, took in rounds]
    share: float = min(1.0, max(0.0, statistics.median(shares)))
    return share


# --- the fit

_HEADROOM = 10.0
"""The most that the fitted bandwidth may exceed the best measured throughput.

If time hardly grows with the size, the data do not determine a bandwidth; an infinite one would make larger messages
free.
"""


def bytes_sent(op: str, size: float, ranks: int) -> float:
    """Return the bytes that each rank sends in a collective whose whole tensor has `size` bytes.

    The whole tensor is the result of an all_gather and the input of a reduce_scatter; an all_reduce is both in turn;
    p2p shifts it to the next rank. Counted is the least that an algorithm must send: what a library sends in addition
    lowers the bandwidth.
    """
    if op == "p2p":
        return size
    return size * (ranks - 1) / ranks * (2 if op == "all_reduce" else 1)


def fit(sent: Sequence[float], seconds: Sequence[float]) -> MeasuredLink:
    """Fit latency and bandwidth by non-negative least squares of the relative errors.

    Absolute errors would let the largest message decide, and its noise would determine the latency. `sent` are bytes of
    every rank, at least two distinct values.
    """
    x, t = np.asarray(sent, dtype=float), np.asarray(seconds, dtype=float)
    least = (t / x).min() / _HEADROOM  # seconds per byte that the link needs at least; the rest may be 0
    latency, rest = _nonnegative_line(x, t - least * x, t**-2)
    residual = np.median(abs(latency + x * (least + rest) - t) / t)
    points = tuple(sorted(zip(x.tolist(), t.tolist(), strict=True)))
    return MeasuredLink(float(latency), float(1 / (least + rest)), points, residual=float(residual))


def _nonnegative_line(x: Any, y: Any, w: Any) -> tuple[float, float]:
    """Return a, b >= 0 that minimize `sum(w * (a + b * x - y)**2)`.

    The sum is convex: if its free minimum is not allowed, the constrained one has a = 0 or b = 0.
    """
    b, a = map(float, np.polyfit(x, y, 1, w=w**0.5))
    if a >= 0 and b >= 0:
        return a, b
    border = (0.0, max(0.0, (w * x * y).sum() / (w * x * x).sum())), (max(0.0, (w * y).sum() / w.sum()), 0.0)
    return min(border, key=lambda line: float((w * (line[0] + line[1] * x - y) ** 2).sum()))
