"""Shared by the items of the report: the device, its clock, an item's time, and the rows that it yields."""

from __future__ import annotations

import contextlib
import statistics
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

import longspan
from longspan.comm.mesh import MeshGroups
from longspan.core.errors import LongspanError

OK, MEASURED, BELOW, WRONG, FAILED, SKIPPED, STOPPED = (
    "ok", "measured", "below goal", "WRONG", "FAILED", "skipped", "stopped",
)  # fmt: skip
"""Verdicts. "measured": a figure that has no goal. WRONG and FAILED make the command exit with 1."""


T = TypeVar("T")


@dataclass(frozen=True)
class Row:
    """One line of the report.

    Attributes:
        what: the measurement.
        figure: the number with its unit and its reference.
        verdict: one of the above; "skipped" and "stopped" are followed by a colon and a reason.
        data: the same for programs, in the JSON only.
        planned: the plan of `longspan plan`, and its ratio to the measurement.
        rival: what another implementation took on the same machine.
        ratio: longspan's time over the rival's; above 1 the rival is faster. None without a rival.
    """

    what: str
    figure: str
    verdict: str
    data: Any = None
    planned: str = ""
    rival: str = ""
    ratio: float | None = None


@dataclass(frozen=True)
class Setup:
    """The arguments of an item.

    Attributes:
        device: "cuda" or "cpu".
        quick: use shapes that take seconds on a CPU.
        until: end of the item's time, by `time.monotonic`.
        ranks: GPUs, or on a CPU processes, of an item that needs several.
    """

    device: str
    quick: bool
    until: float
    ranks: int = 1

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    def time_left(self, needed_s: float = 0.0) -> bool:
        """Return whether `needed_s` seconds are left."""
        return time.monotonic() + needed_s < self.until

    def size(self, full: T, quick: T) -> T:
        return quick if self.quick else full

    def one_device(self) -> longspan.SequenceSharding:
        return longspan.SequenceSharding(MeshGroups(self.device))

    def wait(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def row(self, what: str, measure: Callable[[], tuple[Any, ...]], needed_s: float) -> Row:
        """Return the row of `measure`, which returns the fields after `what`; an error becomes the row's verdict.

        On a GPU it begins only if `needed_s` seconds are left; on a CPU shapes are small.
        """
        if not self.time_left(needed_s if self.on_gpu else 1.0):
            return Row(what, "", f"{STOPPED}: the item's time was up")
        try:
            return Row(what, *measure())
        except LongspanError as error:
            return Row(what, "", f"{SKIPPED}: {str(error).split(';')[0]}")
        except Exception as error:
            traceback.print_exc()
            return Row(what, brief(error), FAILED)

    @contextlib.contextmanager
    def waits(self) -> Iterator[list[str]]:
        """Yield a list; afterwards it contains the file and line of each wait of the host for the GPU."""
        found: list[str] = []
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            if self.on_gpu:
                torch.cuda.set_sync_debug_mode("warn")
            try:
                yield found
            finally:
                if self.on_gpu:
                    torch.cuda.set_sync_debug_mode("default")
        found += [f"{Path(w.filename).name}:{w.lineno}" for w in seen if "synchroniz" in str(w.message)]

    def seconds(self, run: Callable[[], object], budget_s: float = 0.5) -> float:
        """Return the median time of `run` on the device, after a warm-up, of 3 runs and more within `budget_s`."""
        budget_s = self.size(budget_s, 0.01)
        run()
        self.wait()
        times: list[float] = []
        begin = time.monotonic()
        while len(times) < 3 or (time.monotonic() - begin < budget_s and len(times) < 50):
            start = time.perf_counter()
            run()
            self.wait()
            times.append(time.perf_counter() - start)
        return statistics.median(times)


Numbers = dict[str, float]
"""Of a step: "seconds", "sent" (bytes) and "memory" (bytes at the peak), of the rank with most."""

UNITS = {"seconds": ("", 1.0, " s"), "sent": ("sent ", 2.0**20, " MiB"), "memory": ("peak ", 2.0**20, " MiB")}
GOALS = {"seconds": 0.2, "sent": 0.05, "memory": 0.1}
"""How far a plan may be from the measurement, as a fraction of the measurement."""


def written(numbers: Numbers, over: Numbers | None = None) -> str:
    """Return numbers as text, each with its ratio to the same number in `over`."""
    parts = []
    for name, x in numbers.items():
        label, unit, suffix = UNITS[name]
        ratio = f" ({x / over[name]:.3f})" if over and over.get(name) else ""
        parts.append(f"{label}{x / unit:,.4g}{suffix}{ratio}")
    return ", ".join(parts)


def beside(setup: Setup, measured: Numbers, planned: Numbers, rival: Numbers | str | None = None) -> tuple[Any, ...]:
    """Return the fields of a row that follow `what`: measured, planned, and another implementation's numbers, or why
    there are none."""
    far = [n for n, goal in GOALS.items() if measured.get(n) and abs(planned[n] / measured[n] - 1) > goal]
    verdict = MEASURED if not setup.on_gpu else BELOW if far else OK
    data = {"measured": measured, "planned": planned, "rival": rival}
    others = rival if isinstance(rival, dict) else {}
    ratio = measured["seconds"] / others["seconds"] if others else None
    text = rival if isinstance(rival, str) else written(others)
    return written(measured), verdict, data, written(planned, measured), text, ratio


def brief(error: BaseException) -> str:
    """Return an error in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:160] if lines else ''}"
