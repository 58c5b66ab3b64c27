"""The folders that a trainer writes, with sharded weights and optimizer state."""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from longspan import checkpoint
from longspan.checkpoint import MARKER
from longspan.checkpoint.folder import MAKING, FileRecord, remove
from longspan.core.errors import LongspanError
from longspan.hf.support import transformers_model

STATE = "trainer_state.json"
_NAME = re.compile(r"checkpoint-(\d+)")

SHARDS = "longspan"
"""Folder in a checkpoint of the Trainer with sharded weights and optimizer state, for any mesh."""


def export_into(folder: Path, model: Any, config: Any, tokenizer: Any) -> None:
    """Export to a folder that may contain other files. Collective; the first rank writes."""
    inner: Any = transformers_model(model)
    generation = getattr(inner, "generation_config", None)
    dtype = next(p.dtype for p in inner.parameters() if p.is_floating_point())
    checkpoint.export(folder, model, config, tokenizer, dtype, generation)


class ShardSaver:
    """Saves weights and optimizer state into checkpoints of the Trainer while it goes on. Collective, as each method.

    A checkpoint is complete when the marker in its `longspan/` is written, which may be after the Trainer's own files.
    """

    def __init__(self) -> None:
        self._saver: checkpoint.Saver | None = None

    def start(self, folder: Path, step: int, model: Any, optimizer: Any, *, background: bool) -> None:
        """Begin to save, once the previous save has ended."""
        if self._saver is None:
            self._saver = checkpoint.Saver()
        self._saver.finish()
        self._saver.background = background
        self._saver.start_at(folder / SHARDS, step, model, plain_optimizer(optimizer), {})

    def finish(self) -> None:
        """Wait for the save in flight; raise if it failed."""
        if self._saver is not None:
            self._saver.finish()


def invalidate(folder: Path) -> None:
    """Remove an older run's state from a checkpoint that is about to be written. Collective.

    The Trainer's state is written last, so without it a checkpoint is incomplete. It may be there before the new
    shards, for which the old ones must not be mistaken.
    """

    def remove_old() -> None:
        (folder / STATE).unlink(missing_ok=True)
        remove(folder / SHARDS)

    checkpoint.Ranks().first(remove_old)


def mark(folder: Path, step: int) -> None:
    """Record the checksums of the other files of a checkpoint, once every rank has written its own. Collective.

    The Trainer writes its state afterwards, as the last file.
    """
    ranks = checkpoint.Ranks()
    ranks.gather(None)

    def write() -> None:
        # Do not look into the shards' folders: a thread may be writing and renaming them.
        own = [x for x in folder.iterdir() if not x.name.startswith(MAKING) and x.name not in (SHARDS, MARKER, STATE)]
        files = [path for x in own for path in ([x] if x.is_file() else x.rglob("*")) if path.is_file()]
        names = [str(path.relative_to(folder)) for path in files]
        checkpoint.Checkpoint(folder, step, {}, {name: FileRecord.of(folder / name) for name in names}).write_marker()

    ranks.first(write)


@contextlib.contextmanager
def locked(run: Path) -> Iterator[None]:
    """Lock the folder of a run, on the first rank; raise on every rank if another process has it. Collective."""
    held: list[checkpoint.RunLock] = []
    checkpoint.Ranks().first(lambda: held.append(checkpoint.RunLock(run)))
    try:
        yield
    finally:
        for lock in held:
            lock.release()


def steps_done(folder: str) -> int:
    """Return the optimizer steps of a checkpoint of the Trainer. Raise if its state, the last file, is missing."""
    try:
        return int(json.loads((Path(folder) / STATE).read_text())["global_step"])
    except (OSError, ValueError, KeyError, TypeError):
        raise LongspanError(
            f"{folder} is incomplete: it has no readable {STATE}, which is written last; resume from an older "
            "checkpoint, or from the newest complete one with resume_from_checkpoint=True"
        ) from None


def shards_of(folder: str) -> checkpoint.Checkpoint:
    """Return the sharded checkpoint in one of the Trainer, of which markers and sizes are checked. Collective."""
    return checkpoint.Ranks().each(lambda: _shards_of(Path(folder)))


def _shards_of(path: Path) -> checkpoint.Checkpoint:
    steps_done(str(path))
    if not (path / SHARDS).is_dir():
        raise LongspanError(
            f"{path} has no {SHARDS}/ with sharded weights: a longspan.trainer was killed while it wrote them, did "
            f"not write it, or had save_only_model=True; resume from an older one, or load it with from_pretrained"
        )
    checkpoint.Checkpoint.read(path)
    return checkpoint.Checkpoint.read(path / SHARDS)


def newest_complete(run: Path) -> tuple[Path | None, list[str]]:
    """Return the newest undamaged checkpoint of a Trainer's run, and what is wrong with newer ones. Collective.

    Every file is compared with its checksum; each rank reads a part of them.
    """
    ranks = checkpoint.Ranks()
    found = ranks.first(
        lambda: [(int(m[1]), path) for path in run.glob("checkpoint-*") if (m := _NAME.fullmatch(path.name))]
    )
    wrong: list[str] = []
    for _, path in sorted(found, reverse=True):
        try:
            ranks.first(functools.partial(_shards_of, path))
            for part in (path, path / SHARDS):
                checkpoint.read_verified(part, ranks)
            return path, wrong
        except LongspanError as error:  # the same on every rank
            wrong.append(f"{path.name} cannot be used: {error}")
    if wrong:
        raise LongspanError(
            f"{run} has no complete checkpoint to resume from ({'; '.join(wrong)}); start without resuming"
        )
    return None, []


def plain_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """Return the optimizer inside accelerate's wrappers."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer  # type: ignore[no-any-return]
