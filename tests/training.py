"""A small model to train, and the output and log of `longspan train`."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

from longspan.train import TrainConfig

LLAMA = {
    "model_type": "llama",
    "vocab_size": 384,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
"""config.json of a Llama over bytes."""


def write_config(folder: Path, **changes: Any) -> Path:
    """Write `LLAMA` with changes as config.json in `folder`; return its path."""
    path = folder / "config.json"
    path.write_text(json.dumps(LLAMA | changes))
    return path


def train(config: TrainConfig) -> None:
    """Train on this rank."""
    from longspan.train.loop import Trainer

    Trainer(config).run()


def said_by(config: TrainConfig) -> str:
    """Train, and return what this rank prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        train(config)
    return out.getvalue()


def losses_of(out: Path) -> dict[int, float]:
    """Return step -> loss from the log of a run."""
    lines = (out / "metrics.jsonl").read_text().splitlines()
    return {record["step"]: record["loss"] for record in map(json.loads, lines)}
