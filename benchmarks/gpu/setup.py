"""What the items of the report share: the device, its clock, what is left of an item's time, and what it yields."""

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
        what: what was measured.
        figure: the number with its unit, and what it is compared with.
        verdict: one of the above; "skipped" and "stopped" with a reason behind a colon.
        data: the same for programs, kept in the JSON only.
    """

    what: str
    figure: str
    verdict: str
    data: Any = None


@dataclass(frozen=True)
class Setup:
    """What an item is told.

    Attributes:
        device: "cuda" or "cpu".
        quick: shapes that a CPU can do in seconds.
        until: when the item has to come to its end, by `time.monotonic`.
    """

    device: str
    quick: bool
    until: float

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    def time_left(self, needed_s: float = 0.0) -> bool:
        """Whether something that takes so long may still be begun."""
        return time.monotonic() + needed_s < self.until

    def size(self, full: int, quick: int) -> int:
        return quick if self.quick else full

    def one_device(self) -> longspan.SequenceSharding:
        return longspan.SequenceSharding(OneDeviceMesh(self.device))

    def wait(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def seconds(self, run: Callable[[], object], least: int = 3, budget_s: float = 0.5) -> float:
        """Median time of `run` on the device, after one go that is not counted."""
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
    """The line that stands for an item which only a GPU can answer; None where there is one."""
    return None if setup.on_gpu else Row(what, "", f"{SKIPPED}: needs CUDA")


def brief(error: BaseException) -> str:
    """An error in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:160] if lines else ''}"
