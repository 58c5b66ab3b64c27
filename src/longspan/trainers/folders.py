"""What a trainer writes: a Hugging Face folder, and beside it sharded weights and the optimizer's state."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

from longspan import checkpoint
from longspan.core.errors import LongspanError
from longspan.hf.support import transformers_model

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
    found = checkpoint.latest(Path(folder) / SHARDS)
    if found is None:
        raise LongspanError(
            f"{folder} has no {SHARDS}/ with sharded weights: it was not written by a trainer of longspan.trainer, or "
            f"with save_only_model=True; start from it with from_pretrained and without resume_from_checkpoint"
        )
    return found


def plain_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer inside accelerate's."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer  # type: ignore[no-any-return]
