"""The folders that a trainer writes, with sharded weights and optimizer state."""

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
"""Folder in a checkpoint of the Trainer with sharded weights and optimizer state, for any mesh."""


def export_into(folder: Path, model: Any, config: Any) -> None:
    """Export to a folder that may contain other files. Collective; the first rank writes."""
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
    """Return the sharded checkpoint in a checkpoint of the Trainer."""
    if not (Path(folder) / STATE).is_file():
        raise LongspanError(
            f"{folder} is incomplete: it has no {STATE}, which is written last; resume from an older checkpoint, or "
            "from the newest complete one with resume_from_checkpoint=True"
        )
    shards = Path(folder) / SHARDS
    steps = checkpoint.complete_steps(shards)
    if not steps:
        raise LongspanError(
            f"{folder} has no {SHARDS}/ with sharded weights: it was not written by a longspan.trainer, or with "
            f"save_only_model=True; load it with from_pretrained and train without resume_from_checkpoint"
        )
    return checkpoint.Checkpoint.read(checkpoint.step_path(shards, steps[-1]))


def newest_complete(run: Path) -> tuple[Path | None, list[str]]:
    """Return the newest complete checkpoint of a Trainer's run, and what is wrong with newer ones.

    Only markers and sizes of the sharded weights are checked here; their content is checked when they are loaded.
    """
    named = [(int(match[1]), path) for path in run.glob("checkpoint-*") if (match := _NAME.fullmatch(path.name))]
    wrong: list[str] = []
    for _, path in sorted(named, reverse=True):
        try:
            shards_of(str(path))
            json.loads((path / STATE).read_text())
            return path, wrong
        except (LongspanError, OSError, ValueError) as error:
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
