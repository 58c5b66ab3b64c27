"""Shared by the items of the report: the device, its clock, an item's time, and the rows that it yields."""

from __future__ import annotations

import contextlib
import statistics
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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

    def size(self, full: T, quick: T) -> T:
        return quick if self.quick else full

    def one_device(self) -> longspan.SequenceSharding:
        return longspan.SequenceSharding(MeshGroups(self.device))

    def wait(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def row(self, what: str, measure: Callable[[], tuple[Any, ...]], needed_s: float) -> Row:
        """Return the row of a measurement, which returns figure, verdict and data; nothing that it raises gets out.

        It is not begun with less than `needed_s` seconds left on a GPU; what a CPU runs is small.
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
        """Yield a list that then has a line for each time that the host waited for the GPU."""
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
        found += [str(w.message).splitlines()[0] for w in seen if "synchroniz" in str(w.message)]

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


def brief(error: BaseException) -> str:
    """Return an error in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:160] if lines else ''}"
