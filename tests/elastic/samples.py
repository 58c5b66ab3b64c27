"""Random samples of elastic batches."""

from __future__ import annotations

import random
from collections.abc import Sequence

IGNORE = -100

Samples = list[dict[str, list[int]]]


def samples_of(lengths: Sequence[int], seed: int = 3) -> Samples:
    """Return samples that begin with a prompt without a loss."""
    draw = random.Random(seed)
    made = []
    for n in lengths:
        ids = [draw.randrange(3, 61) for _ in range(n)]
        made.append({"input_ids": ids, "labels": [IGNORE] * (n // 4) + ids[n // 4 :]})
    return made


def labels_of(samples: Samples, first: int = 1) -> int:
    return sum(label != IGNORE for sample in samples for label in sample["labels"][first:])
