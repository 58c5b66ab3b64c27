"""Save beside the training: of a copy in the host's memory, by a thread, over process groups of its own."""

from __future__ import annotations

import dataclasses
import os
import threading
import warnings
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.tensor import DTensor

from longspan.checkpoint.ranks import Ranks
from longspan.checkpoint.saving import Pending, one_process_is_fine, prepare, write
from longspan.compat.torch_api import NO_GROUP_WARNING
from longspan.compat.torch_checkpoint import flat_names
from longspan.core.system import free_memory

#: Of the memory that is free on a machine, what the copies of all its ranks may take together.
FREE_SHARE = 0.5


class Saver:
    """Writes one checkpoint at a time, as `save` does; the caller waits for a copy of the tensors, or for all of it.

    Making one is collective (it makes a gloo group, so that its thread and the training do not wait for each other).
    What the thread raises, `finish` raises, on every rank alike. A process that is killed while the thread writes
    leaves what `save` would leave: a folder without its name, and the checkpoints before.

    Args:
        background: False writes before `start` returns.
        ranks: who takes part, over a group that nobody else uses meanwhile; by default `Ranks.apart()`.
    """

    def __init__(self, background: bool = True, ranks: Ranks | None = None) -> None:
        self.ranks = ranks or Ranks.apart()
        if background and self.ranks.size == 1:  # said by torch in the thread, where filters cannot be set for a while
            warnings.filterwarnings("ignore", message=NO_GROUP_WARNING)
        self.background = background
        self._thread: threading.Thread | None = None
        self._path: Path | None = None
        self._error: BaseException | None = None

    def start(
        self,
        folder: Path,
        step: int,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        state: dict[str, Any],
        *,
        keep: int = 0,
    ) -> None:
        """Begin to save; the weights may change when this returns. Collective; the save before must be finished.

        Without room in memory for the copy, on any machine, the checkpoint is written before this returns.

        Raises:
            LongspanError: on every rank, if a number is not finite; what concerns writing is raised by `finish`.
        """
        if self._thread is not None or self._path is not None or self._error is not None:
            raise RuntimeError("the save before is not finished")
        pending = prepare(folder, step, model, optimizer, state, keep, self.ranks)
        fits = self.background and all(self.ranks.gather(_fits(pending)))
        if not fits:
            with one_process_is_fine():
                self._write(pending)
            return
        stager = DefaultStager(StagingOptions(False, False, False, False))
        copied = dataclasses.replace(pending, tensors=cast("dict[str, Any]", stager.stage(pending.tensors)))

        def work() -> None:
            try:
                self._write(copied)
            finally:
                stager.close()

        # A daemon: where a peer hangs, the process must be able to end. `finish` waits for it.
        self._thread = threading.Thread(target=work, name="longspan-checkpoint", daemon=True)
        self._thread.start()

    def _write(self, pending: Pending) -> None:
        try:
            self._path = write(pending, self.ranks)
        except Exception as error:
            self._error = error

    @property
    def written(self) -> Path | None:
        """The checkpoint that is whole and not yet asked for by `finish`; for a message, since ranks may differ."""
        return self._path

    def finish(self) -> Path | None:
        """Wait for the save, and return its path; None if there was none. The same on every rank.

        Raises:
            LongspanError: as `save`.
        """
        if self._thread is not None:
            self._thread.join()
        self._thread, path, error = None, self._path, self._error
        self._path = self._error = None
        if error is not None:
            raise error
        return path

    def abandon(self, wait_s: float) -> None:
        """Give a save that is under way so many seconds to become whole; the run ends for another reason."""
        if self._thread is not None:
            self._thread.join(wait_s)


def _fits(pending: Pending) -> bool:
    """Whether there is memory for copies by all ranks of this machine."""
    flat = flat_names(pending.tensors)
    local = (x.to_local() if isinstance(x, DTensor) else x for x in flat.values() if isinstance(x, Tensor))
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    free = free_memory()
    return free is not None and sum(x.nbytes for x in local) * ranks_here <= FREE_SHARE * free
