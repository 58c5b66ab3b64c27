"""Numbers that went wrong in training: what stops a run, what is only said, and in which words."""

from __future__ import annotations

import statistics
from collections import deque
from typing import TYPE_CHECKING

from longspan.core.errors import LongspanError

if TYPE_CHECKING:
    from longspan.hf.checks.nonfinite import NonFinite
    from longspan.train.config import TrainConfig

WINDOW = 20
"""Steps before, whose median loss is what is usual."""

_FEWEST = 5  # steps before there is anything usual


class Health:
    """Looks at each step's loss and gradient norm, which are the same on every rank.

    A loss above `spike` times the median of the `WINDOW` steps before is said, or ends the run. Gradients whose norm is
    exactly 0 for `zero_gradients` steps in a row end it: nothing is learned.
    """

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        self.losses: deque[float] = deque(maxlen=WINDOW)
        self.zeros = 0
        self.in_spike = False

    def look(self, step: int, loss: float, norm: float) -> str | None:
        """After a step.

        Returns:
            What to say of it, if anything.

        Raises:
            LongspanError: if the run must not go on.
        """
        self._count_zeros(step, norm)
        usual = statistics.median(self.losses) if len(self.losses) >= _FEWEST else None
        self.losses.append(loss)
        limit = self.config.logging.spike
        was, self.in_spike = self.in_spike, usual is not None and 0 < limit * usual < loss
        if usual is None or not self.in_spike or was:
            return None
        text = f"step {step}: loss {loss:.4f} is {loss / usual:.1f} times the median of the steps before ({usual:.4f})"
        if self.config.logging.on_spike == "stop":
            raise LongspanError(
                f"{text}, more than --spike {limit:g}; go on from the last checkpoint with a smaller --lr (now "
                f"{self.config.optimizer.lr}), look at the data of this step, or pass --on-spike warn"
            )
        return f"warning: {text}"

    def _count_zeros(self, step: int, norm: float) -> None:
        self.zeros = self.zeros + 1 if norm == 0 else 0
        limit = self.config.logging.zero_gradients
        if limit and self.zeros >= limit:
            raise LongspanError(
                f"the gradient norm was exactly 0 in {self.zeros} steps in a row, up to step {step}: nothing is "
                f"learned; are all weights frozen, or does no label count? --zero-gradients 0 goes on all the same"
            )

    def say_updated(self, step: int, loss: float, norm: float) -> str:
        """Why a step was not finite whose gradients have been used and freed already, so that none can be looked for.

        Args:
            step: the step; its update was made.
            loss: of the step, finite.
            norm: of its gradients.
        """
        options = self.config.optimizer
        return (
            f"loss {loss} and gradient norm {norm} at step {step}: the run has diverged, and with "
            f"--optimizer-in-backward the weights were updated before the norm was known; the last checkpoint is "
            f"untouched in {self.config.checkpoints}, resume from it with a smaller --lr (now {options.lr}) or a "
            f"longer --warmup (now {options.warmup}), or without --optimizer-in-backward, to learn where it began"
        )

    def say_nonfinite(self, step: int, loss: float, norm: float, found: NonFinite | None, started: int) -> str:
        """Why a step was not finite, and what to do.

        Args:
            step: the step; its update was not made.
            loss: of the step.
            norm: of its gradients.
            found: where the first value that is not finite was when the step was repeated from the same state.
            started: the step that this run went on after.
        """
        what, config = f"loss {loss} and gradient norm {norm} at step {step}", self.config
        again = f"the last checkpoint is untouched in {config.checkpoints}"
        if found is None:
            return (
                f"{what}, and finite when the step was repeated from the same state: a fault of a machine that passed "
                f"(memory, a device, a link), not of the model; {again}, the same command goes on from it; if it "
                f"happens again, test the machines"
            )
        if found.kind == "weight" and step == started + 1:
            origin = "checkpoint" if started else "model"
            return f"{what}: {found} already in the {origin} that the run began with; begin with another one"
        if found.kind == "weight":
            return (
                f"{what}: {found} since the update of step {step - 1}, whose gradients were finite: the optimizer made "
                f"it so, or memory was damaged; {again}, go on from it, and if it comes back look at the optimizer's "
                f"settings"
            )
        return (
            f"{what}: the run has diverged; first not finite: {found}; {again}, resume from a checkpoint with a "
            f"smaller --lr (now {config.optimizer.lr}) or a longer --warmup (now {config.optimizer.warmup})"
        )
