"""A small model to train, and the output and log of `longspan train`."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from longspan.core.errors import LongspanError
from longspan.core.sections import make, replace, values
from longspan.train import TrainConfig, run
from tests.tolerance import roughly

if TYPE_CHECKING:
    from torch import Tensor

    from tests.pool import RankPool

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


def small_run(config: Path, out: Path, **changes: Any) -> TrainConfig:
    """Return a run on sequences of 60 tokens, which 4 ranks do not divide evenly into pairs of heads or blocks of 16.

    It logs every step and saves every second one. With the default batch, a step has two micro-batches on one replica.
    """
    base: dict[str, Any] = {
        "data": "pydoc", "context": 61, "batch": 4, "steps": 4, "lr": 1e-2, "warmup": 1, "clip": 0.5, "dtype": "fp32",
        "log_every": 1, "save_every": 2, "keep": 0, "micro_batch": 1 if "batch" in changes else 2,
    }  # fmt: skip
    return make(TrainConfig, **base | changes, config=config, out=out)


def flags(config: TrainConfig) -> list[str]:
    """Return the flags of `longspan train` for a config."""
    found: list[str] = []
    defaults = values(TrainConfig())
    for field, value in values(config).items():
        name = field.replace("_", "-")
        if value == defaults[field]:
            continue
        found += (
            [f"--{'' if value else 'no-'}{name}"]
            if isinstance(value, bool)
            else [f"--{name}", *map(str, value if isinstance(value, tuple) else (value,))]
        )
    return found


def train(config: TrainConfig) -> None:
    """Train on this rank."""
    from longspan.train.loop import Trainer

    Trainer(config).run()


def plain_loop(model: Any, config: TrainConfig, pack: Any = "stream") -> dict[int, float]:
    """Train an unsharded model as a config says, by torch's own parts, a step's sequences in one batch."""
    import torch
    from transformers import get_scheduler

    from longspan.data import deal
    from longspan.train.inputs import open_local

    sequences, batch = iter(open_local(config).sequences(config.context_tokens)), config.sequences
    steps = deal(sequences, batch=batch, micro_batch=batch, data_size=1, data_rank=0, pack=pack)
    trained = [p for p in model.parameters() if p.requires_grad]
    groups: list[Any] = [{"params": [p for p in trained if p.ndim > 1]}]
    groups.append({"params": [p for p in trained if p.ndim == 1], "weight_decay": 0.0})
    options = config.optimizer
    optimizer = torch.optim.AdamW(groups, lr=options.lr, betas=options.betas, weight_decay=options.weight_decay)
    scheduler = get_scheduler(options.schedule, optimizer, options.warmup, config.steps)
    losses = {}
    for number in range(1, config.last_step + 1):
        loss = model(**next(steps).micro_batches[0], use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, options.clip)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses[number] = loss.item()
    return losses


def said_by(config: TrainConfig) -> str:
    """Train, and return what this rank prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        train(config)
    return out.getvalue()


def train_on(pool: RankPool, config: TrainConfig) -> None:
    """Train on the ranks of a pool, whose first run imports transformers and datasets."""
    pool.run(train, config, timeout=240)


def losses_on(pool: RankPool, config: TrainConfig) -> dict[int, float]:
    """Train on the ranks of a pool, and return the losses."""
    train_on(pool, config)
    return losses_of(config.out)


def cut_after(config: TrainConfig, step: int, out: Path, **changes: Any) -> TrainConfig:
    """Return a run that ended after `step`: that checkpoint, and a log that goes further than it."""
    name = f"step-{step:08d}"
    shutil.copytree(config.checkpoints / name, out / "checkpoints" / name)
    shutil.copy(config.out / "metrics.jsonl", out / "metrics.jsonl")
    return replace(config, out=out, **changes)


def near(found: dict[int, float], plain: dict[int, float]) -> bool:
    """Return whether two runs in fp32 have the same losses, but for rounding."""
    same = found.keys() == plain.keys()
    return same and all(abs(found[step] - plain[step]) < roughly(torch.float32) * plain[step] for step in plain)


def refused(base: TrainConfig, match: str, **changes: Any) -> None:
    """The launcher raises, before any rank starts."""
    with pytest.raises(LongspanError, match=match):
        run(replace(base, **changes))


def log_of(out: Path) -> list[dict[str, Any]]:
    """Return the records of a run's log."""
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def losses_of(out: Path) -> dict[int, float]:
    """Return step -> loss from the log of a run."""
    return {record["step"]: record["loss"] for record in log_of(out)}


def weights_of(out: Path) -> dict[str, Tensor]:
    """Return the exported weights of a run."""
    from safetensors.torch import load_file

    return load_file(out / "hf" / "model.safetensors")
