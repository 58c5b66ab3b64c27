"""The number of steps of a run, from --tokens or --epochs."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

from longspan.train.config import TrainConfig
from longspan.train.inputs import Inputs

_SAMPLE = 2048
"""Sequences whose mean length stands for all, for --tokens: the data may be without end."""


def resolve_steps(config: TrainConfig, inputs: Inputs) -> tuple[TrainConfig, str | None]:
    """Return the config with the number of steps, and a message about it; None if --steps gives it.

    A run that is resumed with the same length, batch and context has the same number of steps. Otherwise what it has
    not trained on yet is divided by the tokens of a step.
    """
    if config.knows_steps:
        return config, None
    resume, total = inputs.resume, config.tokens
    before = None if resume is None else resume.state.get("length")
    if before is not None and before[:-1] == length_of(config)[:-1]:
        return dataclasses.replace(config, steps=before[-1]), None
    mean: float = config.context_tokens  # of a sequence, without padding
    counted = ""
    if config.epochs is not None or inputs.pack in ("best-fit", "none"):
        tokens, sequences = _count(config, inputs, None if config.epochs is not None else _SAMPLE)
        mean = tokens / sequences
        counted = f"; sequences have {mean:,.1f} tokens"
        if config.epochs is not None:
            total = round(config.epochs * tokens)
            counted = f"; an epoch has {tokens:,} tokens in {sequences:,.1f} sequences"
    assert total is not None
    done, trained = (0, 0) if resume is None else (resume.step, resume.state["tokens"])
    steps = done + math.ceil(max(0, total - trained) / mean / config.sequences - 1e-9)
    config = dataclasses.replace(config, steps=max(1, steps))
    config.check_length()
    asked = f"--tokens {config.tokens:,}" if config.epochs is None else f"--epochs {config.epochs:g}"
    return config, f"{asked}: {config.last_step:,} steps{counted}"


def _count(config: TrainConfig, inputs: Inputs, most: int | None) -> tuple[int, float]:
    """Return the tokens and sequences of an epoch, or of its first `most` sequences; a cut last one counts as a part.

    All of them are tokenised.
    """
    stream = inputs.stream(inputs.source, config.context_tokens, epochs=1)
    lengths = [len(s.ids) for s in itertools.islice(stream, most)]
    whole = inputs.pack in ("best-fit", "none")
    return sum(lengths), len(lengths) if whole else sum(lengths) / config.context_tokens


def length_of(config: TrainConfig) -> list[Any]:
    """Return what the number of steps depends on, and then the number, as plain values for a checkpoint."""
    return [
        config.tokens,
        config.epochs,
        config.sequences,
        config.context_tokens,
        config.last_step if config.knows_steps else None,
    ]
