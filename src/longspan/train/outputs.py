"""What a run writes into its folder: checkpoints, the Hugging Face folder and metrics, also when the disk is full."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from longspan import checkpoint
from longspan.checkpoint import DiskFull, Ranks, RunLock, Saver, is_full
from longspan.core.errors import LongspanError
from longspan.train.config import TrainConfig
from longspan.train.inputs import Inputs
from longspan.train.metrics import MetricsLog, StepMetrics

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

Say = Callable[[str], None]
"""Shows a line to the user."""


class Outputs:
    """One run's hold on its folder. Collective: every rank makes one and calls the same, in the same order.

    Args:
        config: of the run.

    Attributes:
        ranks: who writes and reads, over a group that nothing else waits in.

    Raises:
        LongspanError: on every rank, if another run uses `--out`, not all ranks see it, or its `hf/` is not longspan's.
    """

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        self.ranks = Ranks.apart()
        self._lock: RunLock | None = None
        self._saved = self._begun = 0
        self._announced: Path | None = None
        self._lines_lost = 0
        try:
            self.ranks.first(self._occupy)
            checkpoint.check_shared(config.out, self.ranks)
            self._saver = Saver(config.checkpoint.async_save, self.ranks)
        except BaseException:
            self.release()
            raise

    def _occupy(self) -> None:
        self._lock = RunLock(self.config.out)
        if self.config.checkpoint.export != "never":
            checkpoint.check_replaceable(self.config.exported)

    def release(self) -> None:
        """Let other runs have the folder."""
        if self._lock is not None:
            self._lock.release()

    def begin(self, step: int) -> None:
        """The run begins after this step, which is saved already (or 0)."""
        self._saved = self._begun = step

    def abandon(self, wait_s: float) -> None:
        """Before an error ends the run: give the save that is under way so many seconds to become whole."""
        self._saver.abandon(wait_s)

    # --- checkpoints and the export

    def save(
        self,
        step: int,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        state: dict[str, Any],
        say: Say,
        *,
        last: bool = False,
    ) -> bool:
        """Save a step, beside the training but for the last time.

        Returns:
            Whether its checkpoint is whole now.

        Raises:
            LongspanError: on every rank, if it cannot be written; for want of room only where it is the last.
        """
        self._finish(say, last=last and self._begun == step)
        if self._saved == step:
            return False
        self._saver.start(self.config.checkpoints, step, model, optimizer, state, keep=self.config.checkpoint.keep)
        self._begun = step
        if last or self.config.checkpoint.export == "saves":
            self._finish(say, last=last)
        return self._saved == step

    def _finish(self, say: Say, *, last: bool) -> None:
        """Wait for the save that is under way, if any."""
        with self._room_is_not_vital(say, last):
            path = self._saver.finish()
            if path is not None:
                self._saved = self._begun
                self._announce(path, say)

    def announce(self, say: Say) -> None:
        """Say which checkpoint has become whole since, if one has. Does not wait."""
        self._announce(self._saver.written, say)

    def _announce(self, path: Path | None, say: Say) -> None:
        if path is not None and path != self._announced:
            self._announced = path
            say(f"saved {path}")

    def export(
        self, step: int, model: torch.nn.Module, inputs: Inputs, generation: Any, say: Say, *, last: bool
    ) -> None:
        """Write the Hugging Face folder of a step.

        Raises:
            LongspanError: as `save`.
        """
        path, dtype = self.config.exported, _DTYPES[self.config.dtype]
        with self._room_is_not_vital(say, last):
            config, tokenizer = inputs.model_config, inputs.tokenizer
            checkpoint.export(path, model, config, tokenizer, dtype, generation, ranks=self.ranks, step=step)
            say(f"exported {path}")

    @contextlib.contextmanager
    def _room_is_not_vital(self, say: Say, last: bool) -> Iterator[None]:
        """A disk that is full ends the run only where it is the last save."""
        kept = f"step {self._saved}" if self._saved else "the beginning"
        try:
            yield
        except DiskFull as error:
            if last:
                raise LongspanError(f"{error}; make room, then the same command goes on from {kept}") from error
            say(f"warning: {error}; the run goes on, {kept} is kept, and the next save tries again")

    # --- metrics

    @contextlib.contextmanager
    def metrics(self, first: bool, step: int) -> Iterator[MetricsLog | None]:
        """The log of the run on its first rank, from a step on; None on the others.

        Raises:
            LongspanError: if it cannot be written.
        """
        if not first:
            yield None
            return
        try:
            log = MetricsLog(self.config.out, step)
        except OSError as error:
            raise LongspanError(f"the metrics of --out {self.config.out} cannot be written: {error}") from error
        try:
            yield log
        finally:
            log.close()

    def write_line(self, log: MetricsLog | None, metrics: StepMetrics | None, say: Say) -> None:
        """A step's metrics, where there are any; one that finds no room is left out, and the first such is said."""
        if log is None or metrics is None:
            return
        try:
            log.write(metrics)
        except OSError as error:
            if not is_full(error):
                raise
            if not self._lines_lost:
                free = shutil.disk_usage(self.config.out).free
                say(
                    f"warning: {log.path} cannot be written: {error.strerror} ({free:,} bytes free); the run goes on, "
                    "steps are missing there until there is room"
                )
            self._lines_lost += 1
