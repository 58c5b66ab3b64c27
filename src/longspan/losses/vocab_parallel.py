"""The softmax of logits of which each rank of a tensor group holds a part of the vocabulary: they are never gathered.

Of a token three numbers travel: the largest logit, the sum of exponentials, and the label's logit (Megatron-LM,
arXiv:1909.08053, section 3).

Shape suffixes: T tokens, V this rank's part of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from longspan.comm.tensor import TensorGroup
from longspan.core.tile_sizes import even_span


@dataclass(frozen=True)
class Vocabulary:
    """This rank's part of the vocabulary.

    Attributes:
        group: the ranks that hold all of it.
        start: the first id that is mine.
        width: how many are mine.
        size: ids of all ranks.
    """

    group: TensorGroup
    start: int
    width: int
    size: int

    @classmethod
    def of(cls, group: TensorGroup, size: int) -> Vocabulary:
        """Return this rank's part of `size` ids, as `DTensor` cuts them."""
        start, stop = even_span(size, group.rank, group.size)
        return cls(group, start, stop - start, size)

    @property
    def widest(self) -> int:
        """Ids of the rank that has most: all ranks cut their tokens into the same tiles."""
        return -(-self.size // self.group.size)

    def find(self, labels_T: Tensor) -> tuple[Tensor, Tensor]:
        """Which labels are mine, and the index of each, `[T, 1]` (any, of those that are not)."""
        mine_T = (labels_T >= self.start) & (labels_T < self.start + self.width)
        return mine_T, torch.where(mine_T, labels_T - self.start, 0)[:, None]

    def of_label(self, x_TV: Tensor, labels_T: Tensor) -> Tensor:
        """The label's entry, 0 where another rank holds it; `[T]`."""
        mine_T, at = self.find(labels_T)
        return torch.where(mine_T, x_TV.gather(-1, at)[:, 0], 0)

    def log_softmax(self, logits_TV: Tensor, dtype: torch.dtype) -> Tensor:
        """My part of the log-softmax over all of the vocabulary; differentiable."""
        x = logits_TV.to(dtype)
        highest = self.group.largest(x.amax(-1, keepdim=True))
        total = self.group.sum_out((x - highest).exp().sum(-1, keepdim=True))
        # Every rank subtracts it from its own part: its gradient is the sum of theirs.
        return x - self.group.copy_in(total.log() + highest)

    def is_top1(self, logits_TV: Tensor, labels_T: Tensor) -> Tensor:
        """Whether the label is the likeliest token; of several, the first."""
        best, at = logits_TV.detach().max(-1)
        among = best == self.group.largest(best)
        first = self.group.smallest(torch.where(among, at + self.start, self.size))
        return first == labels_T
