"""Save a checkpoint: at once, or from a copy in host memory while the training goes on.

1. Check that all numbers are finite, then write each rank's tensors into `making-...`, with checksums.
2. Read the files back: each rank those of another rank, as a damaged checkpoint is detected (`damage.py`).
3. Write the marker, rename the folder to `step-...`, and remove old checkpoints.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict

from longspan.checkpoint.damage import Checkpoint, format_marker
from longspan.checkpoint.folder import (
    MAKING,
    MARKER,
    FileRecord,
    check_room,
    format_disk_full,
    prune,
    put_in_place,
    remove,
    remove_or_warn,
    step_path,
    write_durably,
)
from longspan.checkpoint.ranks import Ranks, check_finite, checked_on_all
from longspan.checkpoint.tensors import INDEX, RecordingWriter, cause, format_index, without_group_warning
from longspan.comm.arguments import check_module, check_optimizer
from longspan.comm.consistency import local_part
from longspan.compat.torch_api import NO_GROUP_WARNING
from longspan.compat.torch_checkpoint import as_plain, flat_names
from longspan.core.errors import DiskFull, LongspanError, is_full
from longspan.core.tile_sizes import free_memory
from longspan.core.validation import as_path, check_count, checked_call, format_value
from longspan.hf.weights.quantized import split_state

_PER_TENSOR = 2048
"""Bytes that torch's files and the index need for a tensor besides its content, at most."""

_COPY_SHARE = 0.5
"""Part of a machine's free memory that the copies of all its ranks may take."""

_NOT_FINITE = "earlier checkpoints stay: resume from one; if it happens again, use a smaller --lr or a longer --warmup"


def _check_state(name: str, state: Any) -> None:
    if not isinstance(state, dict):
        raise LongspanError(f"`{name}` must be a dict of plain values, {{}} for none, got {format_value(state)}")


@checked_call(
    checked_on_all,
    folder=as_path,
    step=check_count,
    model=check_module,
    optimizer=check_optimizer,
    state=_check_state,
    keep=check_count,
)
def save(
    folder: Path | str,
    step: int,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
    *,
    keep: int = 0,
) -> Path:
    """Write the checkpoint of a step, read it back, and return its path. Collective: every rank of the job calls it.

    Args:
        folder: holds the run's checkpoints.
        step: optimizer steps done.
        model: sharded by FSDP or not.
        optimizer: of the model.
        state: plain JSON values to save with the tensors.
        keep: checkpoints to keep, the newest ones; 0: all. Those of later steps are removed in any case (a run that
            resumed from an older checkpoint leaves them behind). One that cannot be removed is warned of.

    Raises:
        DiskFull: on every rank, with the bytes that are missing.
        LongspanError: on every rank, if any rank cannot write, `state` is not JSON, or a weight or optimizer state is
            not finite. In both cases what was written is removed, and earlier checkpoints stay.
    """
    saver = Saver(background=False, ranks=Ranks())
    saver.start(Path(folder), step, model, optimizer, state, keep=keep)
    path = saver.finish()
    assert path is not None
    return path


class Saver:
    """Save one checkpoint at a time, in a thread. Collective, as is each method.

    A process that is killed meanwhile leaves an incomplete folder and the checkpoints before.

    Args:
        background: False: `start` writes before it returns.
        ranks: the ranks that take part; by default all, over a new gloo group, so that the thread and the training do
            not wait for each other.
    """

    def __init__(self, background: bool = True, ranks: Ranks | None = None) -> None:
        self.ranks = ranks or Ranks.apart()
        self.background = background
        if background and self.ranks.size == 1:  # torch warns in the thread, where no filter can be set for a while
            warnings.filterwarnings("ignore", message=NO_GROUP_WARNING)
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
        best: int | None = None,
    ) -> None:
        """Begin to save; the arguments are those of `save`. The weights may change when this returns.

        The checkpoint of the step `best` is kept next to the newest ones. If a machine lacks memory for the copies, the
        checkpoint is written before this returns. `finish` raises what concerns writing.
        """
        if self._thread is not None or self._path is not None or self._error is not None:
            raise RuntimeError("the previous save is not finished")
        self.ranks.first(lambda: _check_json(step, state))
        tensors, needed = _collect(step_path(folder, step), model, optimizer, self.ranks)
        pending = Pending(folder, step, tensors, state, keep, needed, best)
        if not (self.background and all(self.ranks.gather(_copies_fit(pending)))):
            with without_group_warning():
                self._write(pending)
            return
        stager = DefaultStager(StagingOptions(False, False, False, False))
        copied = dataclasses.replace(pending, tensors=cast("dict[str, Any]", stager.stage(pending.tensors)))

        def work() -> None:
            try:
                self._write(copied)
            finally:
                stager.close()

        # A daemon: the process can end although another rank hangs. `finish` waits for the thread.
        self._thread = threading.Thread(target=work, name="longspan-checkpoint", daemon=True)
        self._thread.start()

    def _write(self, pending: Pending) -> None:
        try:
            self._path = write(pending, self.ranks)
        except Exception as error:
            self._error = error

    @property
    def written(self) -> Path | None:
        """The complete checkpoint that `finish` has not returned yet. For messages only: ranks may differ."""
        return self._path

    def finish(self) -> Path | None:
        """Wait for the save and return its path, or None if there was none; the same on every rank."""
        if self._thread is not None:
            self._thread.join()
        path, error = self._path, self._error
        self._thread = self._path = self._error = None
        if error is not None:
            raise error
        return path

    def abandon(self, wait_s: float) -> None:
        """Wait this many seconds for the save in flight; the run ends for another reason."""
        if self._thread is not None:
            self._thread.join(wait_s)


def _copies_fit(pending: Pending) -> bool:
    """Return whether this machine has memory for the copies of all its ranks."""
    mine = sum(local_part(x).nbytes for x in flat_names(pending.tensors).values() if isinstance(x, Tensor))
    free = free_memory()
    return free is not None and mine * int(os.environ.get("LOCAL_WORLD_SIZE", "1")) <= _COPY_SHARE * free


@dataclass(frozen=True)
class Pending:
    """A checkpoint to write; `tensors` are this rank's shards, `needed` the bytes of all ranks on disk."""

    folder: Path
    step: int
    tensors: dict[str, Any]
    state: dict[str, Any]
    keep: int
    needed: int
    best: int | None = None

    @property
    def path(self) -> Path:
        return step_path(self.folder, self.step)

    @property
    def making(self) -> Path:
        return self.folder / f"{MAKING}{self.step:08d}"


def _collect(
    path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, ranks: Ranks
) -> tuple[dict[str, Any], int]:
    """Return this rank's tensors, and the bytes that all ranks need; raise if a number is not finite. Collective."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    model_state, _ = split_state(model, model_state)  # 4-bit weights do not train: a run reads them again
    tensors: dict[str, Any] = {"model": model_state, "optimizer": as_plain(optimizer_state)}
    flat = flat_names(tensors)
    check_finite(flat, f"checkpoint {path} is not written", ranks, _NOT_FINITE)
    # Replicated tensors are written once; numel() of a DTensor is that of the full tensor.
    full = sum(x.numel() * x.element_size() for x in flat.values() if isinstance(x, Tensor))
    return tensors, full + _PER_TENSOR * len(flat) * ranks.size


def _check_json(step: int, state: dict[str, Any]) -> None:
    try:
        format_marker(step, state, {})
    except (TypeError, ValueError, RecursionError) as error:
        raise LongspanError(f"the state of a checkpoint is saved as JSON, and this one is not: {error}") from error


def write(pending: Pending, ranks: Ranks) -> Path:
    """Write the files, read them back, and complete the checkpoint. Collective; may run in a thread."""
    path, making = pending.path, pending.making
    what = f"checkpoint {path}"

    def begin() -> None:
        for stale in pending.folder.glob(f"{MAKING}*"):  # of a run that was killed while it saved
            remove_or_warn(stale)
        making.mkdir(parents=True)
        check_room(pending.folder, pending.needed, what)

    def complete() -> None:
        write_durably(making / MARKER, format_marker(pending.step, pending.state, _joined(files)))
        put_in_place(making, path)
        prune(pending.folder, pending.step, pending.keep, pending.best)

    try:
        ranks.first(begin)
        metadata, files = _write_tensors(pending, ranks)
        files[0][INDEX] = ranks.first(lambda: write_durably(making / INDEX, format_index(metadata)))
        _read_back(making, files, ranks)
        ranks.first(complete)
    except LongspanError as error:
        if ranks.rank == 0:  # no rank is writing: all have raised
            with contextlib.suppress(OSError):  # the next save removes it
                remove(making)
        if isinstance(error, DiskFull):
            why = str(error)
            text: str = ranks.first(lambda: format_disk_full(pending.folder, pending.needed, what, why))
            raise DiskFull(text) from error
        raise
    return path


def _write_tensors(pending: Pending, ranks: Ranks) -> tuple[Metadata, list[dict[str, FileRecord]]]:
    """Write this rank's tensors; return torch's metadata, and the records of each rank's files."""
    writer = RecordingWriter(pending.making)
    try:
        metadata = state_dict_saver.save(
            pending.tensors, storage_writer=writer, process_group=ranks.group, no_dist=ranks.size == 1
        )
    except (Exception, CheckpointException) as error:
        if ranks.size > 1 and not isinstance(error, CheckpointException):  # it is not raised on every rank
            raise
        _raise_cause(pending.path, writer.files.error, error, ranks)
    return metadata, ranks.gather(writer.files.records)


def _raise_cause(path: Path, own: OSError | None, problem: BaseException, ranks: Ranks) -> NoReturn:
    """Raise the first error of any rank's disk. torch's own message describes a consequence. Collective."""
    failure = getattr(problem, "failures", {}).get(ranks.rank, (problem,))[0]  # of torch's CheckpointException, by rank
    own = own or (failure if isinstance(failure, OSError) else None)
    errors = ranks.gather(None if own is None else OSError(own.errno, own.strerror))
    rank, error = next(((rank, error) for rank, error in enumerate(errors) if error is not None), (0, None))
    if error is None:
        raise LongspanError(f"checkpoint {path} cannot be written: {cause(problem)}") from problem
    kind = DiskFull if is_full(error) else LongspanError
    raise kind(f"checkpoint {path} cannot be written: rank {rank}: OSError: {error}") from problem


def _joined(files: list[dict[str, FileRecord]]) -> dict[str, FileRecord]:
    return {name: record for of_rank in files for name, record in of_rank.items()}


def _read_back(making: Path, files: list[dict[str, FileRecord]], ranks: Ranks) -> None:
    """Raise on every rank if a file is missing or damaged. Each rank reads the files of the rank before it."""
    written = Checkpoint(making, 0, {}, _joined(files))

    def check() -> None:
        problem = written.wrong_size() or written.wrong_content(list(files[ranks.rank - 1]))
        if problem:
            raise LongspanError(f"{problem}: the disk does not hold what was written, or the ranks do not share it")

    ranks.each(check)
