"""`bench collectives`: every collective on every axis at every size, next to the fit over all sizes and the formula."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from longspan.bench.config import ELEMENT_BYTES, BenchConfig
from longspan.bench.links import COLLECTIVES, Fit, bytes_sent, fit
from longspan.bench.measure import Spread, most_sent
from longspan.bench.meters import count_sent, round_seconds
from longspan.comm.mesh import OneDeviceMesh, init_mesh
from longspan.core.errors import LongspanError


@dataclass(frozen=True)
class TimedCollective:
    """One collective at one size."""

    axis: str
    ranks: int  # of a group
    op: str
    size: int  # bytes of the whole tensor
    sent: int  # counted bytes of a rank
    formula: float  # bytes that a rank should send
    seconds: Spread  # of the slowest rank
    fitted: float  # seconds by the fit
    fit: Fit  # over all sizes


@dataclass(frozen=True)
class Collectives:
    """All measured collectives, the same on every rank."""

    measured: str
    timed: tuple[TimedCollective, ...]

    def as_json(self) -> dict[str, Any]:
        """Return the rows for JSON."""
        return {"measured": self.measured, "rows": [dataclasses.asdict(timed) for timed in self.timed]}


def measure_collectives(config: BenchConfig, device: torch.device, measured: str) -> Collectives:
    """Measure every axis of more than one rank, all groups of an axis concurrently. Collective.

    Raises:
        LongspanError: for a mesh without such an axis.
    """
    mesh = init_mesh(**config.parallel.degrees, device_type=device.type)
    if isinstance(mesh, OneDeviceMesh):
        raise LongspanError(f"{config.parallel.flags} has no axis of more than one rank; give one, such as --ulysses 4")
    timed: list[TimedCollective] = []
    for axis, ranks in config.parallel.degrees.items():
        if ranks > 1:
            group = mesh.get_group(axis)
            counts = [-(-size // (ELEMENT_BYTES * ranks)) * ranks for size in config.bytes_each]
            x, y = (torch.empty(max(counts), dtype=torch.float32, device=device).zero_() for _ in range(2))
            for op, collective in COLLECTIVES.items():
                runs = [partial(collective, x, y, n, group) for n in counts]
                timed += _time(axis, op, runs, counts, ranks, config, device)
    return Collectives(measured, tuple(timed))


def _time(
    axis: str, op: str, runs: list[Any], counts: list[int], ranks: int, config: BenchConfig, device: torch.device
) -> list[TimedCollective]:
    sent = []
    for run in runs:
        with count_sent() as log:
            run()
        sent.append(sum(most_sent(log).values()))
    rounds = round_seconds(runs, config.times, device)
    spreads = [Spread.of(of_size) for of_size in rounds]
    formulas = [bytes_sent(op, ELEMENT_BYTES * n, ranks) for n in counts]
    line = fit(formulas, [spread.median for spread in spreads])
    return [
        TimedCollective(axis, ranks, op, ELEMENT_BYTES * n, counted_bytes, formula, spread, line.seconds(formula), line)
        for n, counted_bytes, formula, spread in zip(counts, sent, formulas, spreads, strict=True)
    ]
