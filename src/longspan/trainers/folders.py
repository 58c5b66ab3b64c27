"""What a trainer writes: a Hugging Face folder, and beside it sharded weights and the optimizer's state."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import torch

from longspan import checkpoint
from longspan.core.errors import LongspanError
from longspan.hf.support import transformers_model

STATE = "trainer_state.json"
_NAME = re.compile(r"checkpoint-(\d+)")

SHARDS = "longspan"
"""Folder in a checkpoint of the Trainer: weights and optimizer state, sharded, for any mesh."""


def export_into(folder: Path, model: Any, config: Any) -> None:
    """Export into a folder that may hold other files. Collective; the first rank writes."""
    making = folder / ".longspan-export"
    inner: Any = transformers_model(model)
    generation = getattr(inner, "generation_config", None)
    dtype = next(p.dtype for p in inner.parameters() if p.is_floating_point())
    ranks = checkpoint.Ranks()
    ranks.first(lambda: folder.mkdir(parents=True, exist_ok=True))
    checkpoint.export(making, model, config, None, dtype, generation, ranks=ranks)

    def move() -> None:
        record = making / "longspan.json"
        for name in json.loads(record.read_text())["files"]:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            os.replace(making / name, folder / name)
        record.unlink()
        for left in sorted(making.rglob("*"), reverse=True):
            left.rmdir()
        making.rmdir()

    ranks.first(move)


def shards_of(folder: str) -> checkpoint.Checkpoint:
    """The sharded checkpoint in a checkpoint of the Trainer.

    Raises:
        LongspanError: there is none.
    """
    if not (Path(folder) / STATE).is_file():
        raise LongspanError(
            f"{folder} is not whole: it has no {STATE}, which is written last; resume from an older checkpoint, or let "
            "resume_from_checkpoint=True choose the newest that is whole"
        )
    found = checkpoint.latest(Path(folder) / SHARDS)
    if found is None:
        raise LongspanError(
            f"{folder} has no {SHARDS}/ with sharded weights: it was not written by a trainer of longspan.trainer, or "
            f"with save_only_model=True; start from it with from_pretrained and without resume_from_checkpoint"
        )
    return found


def why_not_whole(folder: Path) -> str | None:
    """Return what a checkpoint of the Trainer lacks, or None. trainer_state.json is written last.

    Only markers and sizes of the sharded weights are checked here; their content is checked when they are loaded.
    """
    state = folder / STATE
    try:
        if not state.is_file():
            return f"it has no {STATE}, which is written last"
        json.loads(state.read_text())
        return None if checkpoint.latest(folder / SHARDS) is not None else f"it has no {SHARDS}/ with sharded weights"
    except (LongspanError, OSError, ValueError) as error:
        return str(error)


def newest_whole(run: Path) -> tuple[Path | None, list[str]]:
    """Return the newest whole checkpoint of a Trainer's run, and what is wrong with the newer ones.

    Raises:
        LongspanError: if there are checkpoints, but none is whole.
    """
    named = [(int(match[1]), path) for path in run.glob("checkpoint-*") if (match := _NAME.fullmatch(path.name))]
    wrong: list[str] = []
    for _, path in sorted(named, reverse=True):
        why = why_not_whole(path)
        if why is None:
            return path, wrong
        wrong.append(f"{path.name} is not whole: {why}")
    if wrong:
        raise LongspanError(
            f"{run} has no whole checkpoint to resume from ({'; '.join(wrong)}); start without resuming"
        )
    return None, []


def plain_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer inside accelerate's."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer  # type: ignore[no-any-return]
