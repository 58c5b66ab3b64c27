"""Save a checkpoint by torch's Distributed Checkpoint: at once, or while the training goes on.

1. Check that all numbers are finite, then let every rank write its shards as safetensors into `longspan/`.
2. Each rank computes the CRC-32 of its files; the first one looks whether it sees them all.
3. Write the marker, and remove old checkpoints.
"""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
from collections.abc import Callable
from dataclasses import replace
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
from longspan.checkpoint.folder import SHARDS, FileRecord, begin, remove, remove_unneeded, step_path
from longspan.checkpoint.ranks import Ranks, check_finite
from longspan.comm.arguments import check_module, check_optimizer
from longspan.comm.weights import local_part
from longspan.compat.torch_api import NO_GROUP_WARNING
from longspan.compat.torch_checkpoint import as_plain, flat_names
from longspan.core.errors import DiskFull, LongspanError, is_full
from longspan.core.tile_sizes import free_memory
from longspan.core.validation import as_path, check_count
from longspan.hf.weights.quantized import split_state

_FILE_BYTES = 2 << 30  # of a rank's file, about: torch serialises a whole file in memory before it writes

_COPY_SHARE = 0.5
"""Part of a machine's free memory that the copies of all its ranks may take."""

_NOT_FINITE = "earlier checkpoints stay: resume from one; if it happens again, use a lower learning rate or more warmup"


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

    def check() -> Path:
        check_count("step", step)
        check_count("keep", keep)
        check_module("model", model)
        check_optimizer("optimizer", optimizer)
        return as_path("folder", folder)

    ranks = Ranks()
    run = ranks.each(check)
    Saver(ranks).start(run, step, model, optimizer, state, background=False, keep=keep)
    return step_path(run, step)


class Saver:
    """Save one checkpoint at a time, by `torch.distributed.checkpoint.async_save`. Collective, as is each method.

    A process that is killed meanwhile leaves an incomplete folder and the checkpoints before. Without `ranks` the first
    save makes a gloo group, so that the thread and the training do not wait for each other.
    """

    def __init__(self, ranks: Ranks | None = None) -> None:
        self._ranks = ranks
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def start(
        self,
        folder: Path,
        step: int,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        state: dict[str, Any],
        *,
        background: bool = True,
        keep: int | None = None,
        later: str | None = None,
    ) -> None:
        """Begin to save, once the previous save has ended. The weights may change when this returns.

        If a machine lacks memory for a copy of its tensors, the checkpoint is written before this returns.

        Args:
            folder, step, model, optimizer, state: of `save`.
            background: whether to write in a thread.
            keep: of `save`; None removes no other checkpoint.
            later: a JSON file of the checkpoint that is written afterwards. What is in its folder now belongs to it.
        """
        self.finish()
        ranks = self._ranks = self._ranks or Ranks.apart()
        if ranks.size == 1:  # torch warns in its thread, where no filter can be set for a while
            warnings.filterwarnings("ignore", message=NO_GROUP_WARNING)
        tensors, values = parts_of(model, optimizer)
        path = step_path(folder, step)
        checkpoint = Checkpoint(path, step, state, {} if later is None else {later: None}, values)
        ranks.first(lambda: _check_json(checkpoint))
        check_finite(tensors, f"checkpoint {path} is not written", ranks, _NOT_FINITE)
        others = ranks.first(lambda: _begin(checkpoint))
        writer = HuggingFaceStorageWriter(
            str(path / SHARDS), fqn_to_index_mapping=_files(tensors, ranks.size), save_distributed=True
        )
        common: dict[str, Any] = {"storage_writer": writer, "process_group": ranks.group, "no_dist": ranks.size == 1}
        if background and all(ranks.gather(_copy_fits(tensors))):
            write = async_save(tensors, **common).result  # type: ignore[union-attr]
            # A daemon: the process can end although another rank hangs. `finish` waits for the thread.
            self._thread = threading.Thread(
                target=self._write, args=(ranks, checkpoint, others, write, keep), name="longspan-save", daemon=True
            )
            self._thread.start()
        else:
            _complete(ranks, checkpoint, others, lambda: save_now(tensors, **common), keep)

    def _write(self, *args: Any) -> None:
        try:
            _complete(*args)
        except Exception as error:
            self._error = error

    def finish(self) -> None:
        """Wait for the save in flight, and raise if it failed."""
        if self._thread is not None:
            self._thread.join()
        error, self._thread, self._error = self._error, None, None
        if error is not None:
            raise error


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


def _check_json(checkpoint: Checkpoint) -> None:
    try:
        checkpoint.marker()
    except (TypeError, ValueError, RecursionError) as error:
        raise LongspanError(f"the state of a checkpoint is saved as JSON, and this one is not: {error}") from error


def _begin(checkpoint: Checkpoint) -> list[str]:
    """Make the folder of the shards; return the names of the folder's other files that belong to the checkpoint."""
    begin(checkpoint.path)
    files = [path for path in checkpoint.path.rglob("*") if path.is_file()] if checkpoint.files else []
    (checkpoint.path / SHARDS).mkdir(parents=True)
    return [name for path in files if (name := str(path.relative_to(checkpoint.path))) not in checkpoint.files]


def _complete(
    ranks: Ranks, checkpoint: Checkpoint, others: list[str], write: Callable[[], Any], keep: int | None
) -> None:
    """Write the files and complete the checkpoint. Collective; may run in a thread."""
    path = checkpoint.path

    def mark() -> None:
        if problem := replace(checkpoint, files=shards).wrong_size():
            raise LongspanError(
                f"{problem}: the ranks do not share the folder; give one on a disk that all machines share"
            )
        own = {name: FileRecord.of(path / name) for name in others}
        replace(checkpoint, files=checkpoint.files | own | shards).write_marker()
        remove_unneeded(path, keep)

    try:
        try:
            write()
        except (Exception, CheckpointException) as error:
            if ranks.size > 1 and not isinstance(error, CheckpointException):  # it is not raised on every rank
                raise
            raise _cause(path, error) from error
        mine = ranks.each(lambda: _records(path / SHARDS, ranks.rank))
        shards = dict[str, FileRecord | None]()
        for of_rank in ranks.gather(mine):
            shards |= of_rank
        ranks.first(mark)
    except LongspanError:
        if ranks.rank == 0:  # no rank is writing: all have raised
            with contextlib.suppress(OSError):  # a folder with other files stays
                remove(path / SHARDS)
                path.rmdir()
        raise


def _records(shards: Path, rank: int) -> dict[str, FileRecord]:
    return {f"{SHARDS}/{file.name}": FileRecord.of(file) for file in shards.glob(f"shard-{rank + 1:05d}-*")}


def _cause(path: Path, error: BaseException) -> LongspanError:
    """Return the error of the first rank that failed, of torch's CheckpointException; or of the error itself."""
    failures = getattr(error, "failures", None) or {0: (error,)}
    rank = min(failures)
    cause = failures[rank][0]
    kind = DiskFull if is_full(cause) else LongspanError
    text = (str(cause).strip() or "?").splitlines()[0]
    return kind(f"checkpoint {path} cannot be written: rank {rank}: {type(cause).__name__}: {text}")
