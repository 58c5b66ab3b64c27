"""Save a checkpoint by torch's Distributed Checkpoint: at once, or while the training goes on.

1. Check that all numbers are finite, then let every rank write its shards as safetensors into `making-...`.
2. Each rank computes the CRC-32 of its files; the first one looks whether it sees them all.
3. Write the marker, rename the folder to `step-...`, and remove old checkpoints.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.checkpoint.state_dict_saver import save as save_now

from longspan.checkpoint.damage import Checkpoint
from longspan.checkpoint.folder import (
    MAKING,
    FileRecord,
    prune,
    put_in_place,
    remove,
    remove_or_warn,
    step_path,
)
from longspan.checkpoint.ranks import Ranks, check_finite, checked_on_all
from longspan.comm.arguments import check_module, check_optimizer
from longspan.comm.consistency import local_part
from longspan.compat.torch_api import NO_GROUP_WARNING
from longspan.compat.torch_checkpoint import as_plain, flat_names
from longspan.core.errors import DiskFull, LongspanError, is_full
from longspan.core.tile_sizes import free_memory
from longspan.core.validation import as_path, check_count, checked_call, format_value
from longspan.hf.weights.quantized import split_state

_FILE_BYTES = 2 << 30  # of a rank's file, about: torch serialises a whole file in memory before it writes

_COPY_SHARE = 0.5
"""Part of a machine's free memory that the copies of all its ranks may take."""

_NOT_FINITE = "earlier checkpoints stay: resume from one; if it happens again, use a lower learning rate or more warmup"


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
    """Write the checkpoint of a step, and return its path. Collective: every rank of the job calls it.

    Args:
        folder: holds the run's checkpoints.
        step: optimizer steps done.
        model: sharded by FSDP or not.
        optimizer: of the model.
        state: plain JSON values to save with the tensors.
        keep: checkpoints to keep, the newest ones; 0: all. Those of later steps are removed in any case (a run that
            resumed from an older checkpoint leaves them behind). One that cannot be removed is warned of.

    Raises:
        DiskFull: on every rank, if any rank's disk is full.
        LongspanError: on every rank, if any rank cannot write, `state` is not JSON, or a weight or optimizer state is
            not finite. In both cases what was written is removed, and earlier checkpoints stay.
    """
    saver = Saver(background=False, ranks=Ranks())
    saver.start(Path(folder), step, model, optimizer, state, keep=keep)
    path = saver.finish()
    assert path is not None
    return path


@dataclass(frozen=True)
class _Job:
    """A checkpoint to write: the final path, step, plain values, and what to do when it is complete."""

    path: Path
    step: int
    state: dict[str, Any]
    values: dict[str, Any]
    completed: Callable[[], None]

    @property
    def making(self) -> Path:
        return self.path.with_name(f"{MAKING}{self.path.name}")


class Saver:
    """Save one checkpoint at a time, by `torch.distributed.checkpoint.async_save`. Collective, as is each method.

    A process that is killed meanwhile leaves an incomplete folder and the checkpoints before.

    Args:
        background: False: `start` writes before it returns.
        ranks: the ranks that take part; by default all, over a new gloo group, so that the thread and the training do
            not wait for each other.
    """

    def __init__(self, background: bool = True, ranks: Ranks | None = None) -> None:
        self.ranks = ranks or Ranks.apart()
        self.background = background
        if self.ranks.size == 1:  # torch warns in its thread, where no filter can be set for a while
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
    ) -> None:
        """Begin to save; the arguments are those of `save`. The weights may change when this returns.

        `finish` raises what concerns writing.
        """
        path = step_path(folder, step)
        self.start_at(path, step, model, optimizer, state, lambda: prune(folder, step, keep))

    def start_at(
        self,
        path: Path,
        step: int,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        state: dict[str, Any],
        completed: Callable[[], None] = lambda: None,
    ) -> None:
        """Begin to save at a path of any name. The first rank calls `completed` once the checkpoint is complete.

        If a machine lacks memory for a copy of its tensors, the checkpoint is written before this returns.
        """
        if self._thread is not None or self._path is not None or self._error is not None:
            raise RuntimeError("the previous save is not finished")
        tensors, values = parts_of(model, optimizer)
        job = _Job(path, step, state, values, completed)
        self.ranks.first(lambda: _check_json(job))
        check_finite(tensors, f"checkpoint {path} is not written", self.ranks, _NOT_FINITE)
        self.ranks.first(lambda: _begin(job))
        writer = HuggingFaceStorageWriter(
            str(job.making), fqn_to_index_mapping=_files(tensors, self.ranks.size), save_distributed=True
        )
        common: dict[str, Any] = {"storage_writer": writer, "process_group": self.ranks.group}
        common["no_dist"] = self.ranks.size == 1
        if self.background and all(self.ranks.gather(_copy_fits(tensors))):
            written: Any = async_save(tensors, **common)
            # A daemon: the process can end although another rank hangs. `finish` waits for the thread.
            self._thread = threading.Thread(
                target=self._complete, args=(job, written.result), name="longspan-checkpoint", daemon=True
            )
            self._thread.start()
        else:
            self._complete(job, lambda: save_now(tensors, **common))

    def _complete(self, job: _Job, write: Callable[[], Any]) -> None:
        try:
            _complete(job, write, self.ranks)
            self._path = job.path
        except Exception as error:
            self._error = error

    def finish(self) -> Path | None:
        """Wait for the save and return its path, or None if there was none; the same on every rank."""
        if self._thread is not None:
            self._thread.join()
        path, error = self._path, self._error
        self._thread = self._path = self._error = None
        if error is not None:
            raise error
        return path


def parts_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return this rank's tensors by name, "model." or "optimizer.", and the optimizer's other values. Collective."""
    optimizer_state: Any
    model_state, optimizer_state = get_state_dict(model, optimizer)
    model_state, _ = split_state(model, model_state)  # 4-bit weights do not train: a run reads them again
    states = as_plain(optimizer_state)["state"]
    flat = flat_names({"model": model_state, "optimizer": states})
    tensors = {name: x for name, x in flat.items() if isinstance(x, Tensor)}
    others = {name: x for name, x in flat.items() if not isinstance(x, Tensor)}
    groups = [{k: v.item() if isinstance(v, Tensor) else v for k, v in group.items()} for group in
              optimizer_state["param_groups"]]  # fmt: skip
    return tensors, {"groups": groups, "others": others}


def _files(tensors: dict[str, Tensor], ranks: int) -> dict[str, int]:
    """Return the number of the file, from 1, in which each rank writes its shard of a tensor."""
    numbers, held = {}, 0
    for name, x in tensors.items():  # numel() of a DTensor is that of the full tensor
        numbers[name] = 1 + held // (_FILE_BYTES * ranks)
        held += x.numel() * x.element_size()
    return numbers


def _copy_fits(tensors: dict[str, Tensor]) -> bool:
    """Return whether this machine has memory for the copies of all its ranks."""
    mine = sum(local_part(x).nbytes for x in tensors.values())
    free = free_memory()
    return free is not None and mine * int(os.environ.get("LOCAL_WORLD_SIZE", "1")) <= _COPY_SHARE * free


def _check_json(job: _Job) -> None:
    try:
        json.dumps([job.state, job.values])
    except (TypeError, ValueError, RecursionError) as error:
        raise LongspanError(f"the state of a checkpoint is saved as JSON, and this one is not: {error}") from error


def _begin(job: _Job) -> None:
    if job.path.parent.is_dir():
        for stale in job.path.parent.glob(f"{MAKING}*"):  # of a run that was killed while it saved
            remove_or_warn(stale)
    job.making.mkdir(parents=True)


def _complete(job: _Job, write: Callable[[], Any], ranks: Ranks) -> None:
    """Write the files and complete the checkpoint. Collective; may run in a thread."""
    try:
        try:
            write()
        except (Exception, CheckpointException) as error:
            if ranks.size > 1 and not isinstance(error, CheckpointException):  # it is not raised on every rank
                raise
            raise _cause(job.path, error) from error
        prefix = f"shard-{ranks.rank + 1:05d}-"
        mine = ranks.each(lambda: {p.name: FileRecord.of(p) for p in job.making.iterdir() if p.name.startswith(prefix)})
        files = {name: record for of_rank in ranks.gather(mine) for name, record in of_rank.items()}
        ranks.first(lambda: _mark(job, files))
    except LongspanError:
        if ranks.rank == 0:  # no rank is writing: all have raised
            with contextlib.suppress(OSError):  # the next save removes it
                remove(job.making)
        raise


def _mark(job: _Job, files: dict[str, FileRecord]) -> None:
    checkpoint = Checkpoint(job.making, job.step, job.state, files, job.values)
    if problem := checkpoint.wrong_size():
        raise LongspanError(f"{problem}: the ranks do not share the folder; give one on a disk that all machines share")
    checkpoint.write_marker()
    put_in_place(job.making, job.path)
    job.completed()


def _cause(path: Path, error: BaseException) -> LongspanError:
    """Return the error of the first rank that failed, of torch's CheckpointException; or of the error itself."""
    failures = getattr(error, "failures", None) or {0: (error,)}
    rank = min(failures)
    cause = failures[rank][0]
    kind = DiskFull if is_full(cause) else LongspanError
    text = (str(cause).strip() or "?").splitlines()[0]
    return kind(f"checkpoint {path} cannot be written: rank {rank}: {type(cause).__name__}: {text}")
