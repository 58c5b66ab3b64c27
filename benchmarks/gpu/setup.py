"""Shared by the items of the report: the device, its clock, an item's time, and the rows that it yields."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import longspan
from longspan.comm.mesh import OneDeviceMesh

OK, MEASURED, BELOW, WRONG, FAILED, SKIPPED, STOPPED = (
    "ok", "measured", "below goal", "WRONG", "FAILED", "skipped", "stopped",
)  # fmt: skip
"""Verdicts. "measured": a figure that has no goal. WRONG and FAILED make the command exit with 1."""


@dataclass(frozen=True)
class Row:
    """One line of the report.

    Attributes:
        what: the measurement.
        figure: the number with its unit and its reference.
        verdict: one of the above; "skipped" and "stopped" are followed by a colon and a reason.
        data: the same for programs, in the JSON only.
    """

    what: str
    figure: str
    verdict: str
    data: Any = None


@dataclass(frozen=True)
class Setup:
    """The arguments of an item.

    Attributes:
        device: "cuda" or "cpu".
        quick: use shapes that take seconds on a CPU.
        until: end of the item's time, by `time.monotonic`.
    """

    device: str
    quick: bool
    until: float

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    def time_left(self, needed_s: float = 0.0) -> bool:
        """Return whether `needed_s` seconds are left."""
        return time.monotonic() + needed_s < self.until

    def size(self, full: int, quick: int) -> int:
        return quick if self.quick else full

    def one_device(self) -> longspan.SequenceSharding:
        return longspan.SequenceSharding(OneDeviceMesh(self.device))

    def wait(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def seconds(self, run: Callable[[], object], least: int = 3, budget_s: float = 0.5) -> float:
        """Return the median time of `run` on the device, after a warm-up."""
        run()
        self.wait()
        times: list[float] = []
        begin = time.monotonic()
        while len(times) < least or (time.monotonic() - begin < budget_s and len(times) < 50):
            start = time.perf_counter()
            run()
            self.wait()
            times.append(time.perf_counter() - start)
        return statistics.median(times)


def needs_cuda(setup: Setup, what: str) -> Row | None:
    """Return the row of an item that needs a GPU if there is none."""
    return None if setup.on_gpu else Row(what, "", f"{SKIPPED}: needs CUDA")


def brief(error: BaseException) -> str:
    """Return an error in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:160] if lines else ''}"
