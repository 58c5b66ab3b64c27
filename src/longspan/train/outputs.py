"""The folder of a run: checkpoints, the Hugging Face folder and metrics. A full disk does not end the run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from longspan import checkpoint
from longspan.checkpoint import DiskFull, Ranks, RunLock, Saver
from longspan.core.errors import LongspanError
from longspan.core.sections import values
from longspan.train.config import TrainConfig
from longspan.train.inputs import Inputs
from longspan.train.trackers import MetricsLog

_PLAIN = (bool, int, float, str)
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Outputs:
    """The folder of a run, locked against other runs. Collective, except `release` and `open_log`.

    `ranks` write and read, over a group that nothing else uses; `log` shows a line to the user.
    """

    def __init__(self, config: TrainConfig, log: Callable[[str], None]) -> None:
        self.config, self._log = config, log
        self.ranks = Ranks.apart()
        self._lock: RunLock | None = None
        self._log_of_metrics: MetricsLog | None = None
        self._saved = self._begun = 0  # steps
        self._announced: Path | None = None
        try:
            self.ranks.first(self._lock_folder)
            checkpoint.check_shared(config.out, self.ranks)
            self._saver = Saver(config.checkpoint.async_save, self.ranks)
        except BaseException:
            self.release()
            raise

    def _lock_folder(self) -> None:
        self._lock = RunLock(self.config.out)
        if self.config.checkpoint.export != "never":
            checkpoint.check_replaceable(self.config.exported)

    def release(self) -> None:
        if self._log_of_metrics is not None:
            self._log_of_metrics.close()
        if self._lock is not None:
            self._lock.release()

    def begin(self, step: int) -> None:
        """Set the step that the run starts after; it is saved already (or 0)."""
        self._saved = self._begun = step

    def abandon(self, wait_s: float) -> None:
        """Wait up to `wait_s` seconds for the save in progress, before an error ends the run."""
        self._saver.abandon(wait_s)

    # --- checkpoints and the export

    def save(
        self,
        step: int,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        state: dict[str, Any],
        *,
        best: int | None = None,
        last: bool = False,
    ) -> bool:
        """Save a step, in the background unless it is the last; return whether its checkpoint is complete now.

        The checkpoint of the step `best` is kept, too. A full disk raises for the last save only.
        """
        self._finish(last=last and self._begun == step)
        if self._saved == step:
            return False
        keep = self.config.checkpoint.keep
        self._saver.start(self.config.checkpoints, step, model, optimizer, state, keep=keep, best=best)
        self._begun = step
        if last or self.config.checkpoint.export == "saves":
            self._finish(last=last)
        return self._saved == step

    def _finish(self, *, last: bool) -> None:
        """Wait for the save in progress, if any."""
        with self._full_disk_warns(last):
            path = self._saver.finish()
            if path is not None:
                self._saved = self._begun
                self._announce(path)

    def announce(self) -> None:
        """Log the checkpoint that has been completed in the background, if any. Does not wait."""
        self._announce(self._saver.written)

    def _announce(self, path: Path | None) -> None:
        if path is not None and path != self._announced:
            self._announced = path
            self._log(f"saved {path}")

    def export(self, step: int, model: torch.nn.Module, inputs: Inputs, generation_config: Any, *, last: bool) -> None:
        """Write the Hugging Face folder of a step."""
        path, dtype = self.config.exported, _DTYPES[self.config.dtype]
        with self._full_disk_warns(last):
            checkpoint.export(
                path,
                model,
                inputs.model_config,
                inputs.processor or inputs.tokenizer,
                dtype,
                generation_config,
                peft=self.config.tuning.lora_export,
                ranks=self.ranks,
                step=step,
            )
            self._log(f"exported {path}")

    @contextlib.contextmanager
    def _full_disk_warns(self, last: bool) -> Iterator[None]:
        """Warn if the disk is full; raise if this is the last save."""
        saved = f"step {self._saved}" if self._saved else "the beginning"
        try:
            yield
        except DiskFull as error:
            if last:
                raise LongspanError(f"{error}; make room, then the same command resumes from {saved}") from error
            self._log(f"warning: {error}; the run goes on, {saved} is kept, and the next save tries again")

    def open_log(self, step: int) -> MetricsLog:
        """Return the log of metrics, for the steps after `step`; it is closed by `release`. On the first rank."""
        config = self.config
        settings = {name: value if isinstance(value, _PLAIN) else str(value) for name, value in values(config).items()}
        self._log_of_metrics = MetricsLog(config.out, step, config.logging.track, settings, self._log)
        return self._log_of_metrics
