"""Checks of each step's loss and gradient norm: spikes, gradients of zero, and values that are not finite."""

from __future__ import annotations

import statistics
from collections import deque
from typing import TYPE_CHECKING

from longspan.core.errors import LongspanError

if TYPE_CHECKING:
    from longspan.hf.checks.nonfinite import NonFinite
    from longspan.train.config import TrainConfig

WINDOW = 20
"""Previous steps whose median loss is the baseline of a spike."""

_FEWEST = 5  # steps for a baseline


class Health:
    """Checks each step's loss and gradient norm, which are the same on every rank."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        self.losses: deque[float] = deque(maxlen=WINDOW)
        self.zeros = 0
        self.in_spike = False

    def look(self, step: int, loss: float, norm: float) -> str | None:
        """Check a step, by the flags of `LoggingSection`, and return a warning for the first one of a spike."""
        self._count_zeros(step, norm)
        median = statistics.median(self.losses) if len(self.losses) >= _FEWEST else None
        self.losses.append(loss)
        limit = self.config.logging.spike
        before, self.in_spike = self.in_spike, median is not None and 0 < limit * median < loss
        if median is None or not self.in_spike or before:
            return None
        text = f"step {step}: loss {loss:.4f} is {loss / median:.1f} times the median of previous steps ({median:.4f})"
        if self.config.logging.on_spike == "stop":
            raise LongspanError(
                f"{text}, more than --spike {limit:g}; resume from the last checkpoint with a smaller --lr (now "
                f"{self.config.optimizer.lr}), look at the data of this step, or pass --on-spike warn"
            )
        return f"warning: {text}"

    def _count_zeros(self, step: int, norm: float) -> None:
        self.zeros = self.zeros + 1 if norm == 0 else 0
        limit = self.config.logging.zero_gradients
        if limit and self.zeros >= limit:
            raise LongspanError(
                f"the gradient norm was exactly 0 in {self.zeros} steps in a row, up to step {step}: nothing is "
                f"learned; are all weights frozen, or all labels masked? --zero-gradients 0 continues anyway"
            )

    def format_updated(self, step: int, loss: float, norm: float) -> str:
        """Return the error for a norm that is not finite after an update in the backward: its gradients are freed."""
        options = self.config.optimizer
        return (
            f"loss {loss} and gradient norm {norm} at step {step}: the run has diverged, and with "
            f"--optimizer-in-backward the weights were updated before the norm was known; the last checkpoint is "
            f"untouched in {self.config.checkpoints}, resume from it with a smaller --lr (now {options.lr}) or a "
            f"longer --warmup (now {options.warmup}), or without --optimizer-in-backward to find the first bad value"
        )

    def format_nonfinite(self, step: int, loss: float, norm: float, first: NonFinite | None, started: int) -> str:
        """Return the error for a step that is not finite and did not update the weights.

        `first` is the first value that was not finite when the step was repeated from the same state; the run started
        after the step `started`.
        """
        what, config = f"loss {loss} and gradient norm {norm} at step {step}", self.config
        checkpoint = f"the last checkpoint is untouched in {config.checkpoints}"
        if first is None:
            return (
                f"{what}, and finite when the step was repeated from the same state: a transient fault of a machine "
                f"(memory, a device, a link), not of the model; {checkpoint}, the same command resumes from it; if it "
                f"happens again, test the machines"
            )
        if first.kind == "weight" and step == started + 1:
            origin = "checkpoint" if started else "model"
            return f"{what}: {first} already in the {origin} that the run started from; start from another one"
        if first.kind == "weight":
            return (
                f"{what}: {first} since the update of step {step - 1}, whose gradients were finite: the optimizer "
                f"caused it, or memory was damaged; {checkpoint}, resume from it, and if it happens again check the "
                f"optimizer's settings"
            )
        return (
            f"{what}: the run has diverged; first not finite: {first}; {checkpoint}, resume from a checkpoint with a "
            f"smaller --lr (now {config.optimizer.lr}) or a longer --warmup (now {config.optimizer.warmup})"
        )
