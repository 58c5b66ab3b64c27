"""The loss of an evaluation: its mean over all labelled tokens, and by the number of tokens that a prediction sees."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from longspan.comm.mesh import SequenceSharding
from longspan.losses.cross_entropy import IGNORE

_FIRST_RANGE = 16  # tokens, at least
_MOST_RANGES = 8


class Tally:
    """The mean loss of batches, weighted by their labelled tokens."""

    def __init__(self) -> None:
        self.total, self.tokens = 0.0, 0
        self.items: int | None = None  # of the current batch

    def add(self, mean: float, tokens: int) -> None:
        if tokens:
            self.total, self.tokens = self.total + mean * tokens, self.tokens + tokens

    def mean(self) -> float | None:
        return self.total / self.tokens if self.tokens else None


class ByPosition:
    """Mean losses by the number of tokens that a prediction sees, its own input included.

    The ranges end at `context`, its half and so on, at most 8.
    """

    def __init__(self, context: int, sp: SequenceSharding) -> None:
        ends = [context]
        while len(ends) < _MOST_RANGES and (half := -(-ends[-1] // 2)) >= _FIRST_RANGE:
            ends.append(half)
        self.ends, self.sp = ends[::-1], sp
        self.lasts = torch.tensor(self.ends[:-1], device=sp.device)
        self.sums = torch.zeros(len(ends), 2, dtype=torch.float64, device=sp.device)  # losses, tokens

    def add(self, losses: Tensor, labels: Tensor, positions: Tensor) -> None:
        """Count my tokens, whose losses are 0 where they have no label."""
        index = torch.bucketize(positions.expand_as(labels).to(self.lasts.device) + 1, self.lasts).flatten()
        found = torch.stack([losses.double(), (labels != IGNORE).double().to(losses.device)], -1).flatten(0, -2)
        self.sums.index_add_(0, index, found.to(self.sums.device))

    def means(self) -> dict[int, float]:
        """Return the mean of each range that has tokens, by its end, over all ranks. Collective."""
        if self.sp.fsdp_group is not None:
            dist.all_reduce(self.sums, group=self.sp.fsdp_group)
        return {end: total / n for end, (total, n) in zip(self.ends, self.sums.tolist(), strict=True) if n}
