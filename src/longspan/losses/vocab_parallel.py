"""Softmax over logits whose vocabulary is sharded over a tensor group, without gathering them.

Ranks reduce three numbers per token: the largest logit, the sum of exponentials, and the label's logit (Megatron-LM,
arXiv:1909.08053, section 3).

Shape suffixes: T tokens, V this rank's shard of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from longspan.comm.tensor import TensorGroup
from longspan.core.tile_sizes import even_span


@dataclass(frozen=True)
class VocabShard:
    """This rank's shard of the vocabulary.

    Attributes:
        group: the ranks that share the vocabulary.
        start: my first id.
        width: number of my ids.
        size: ids of the whole vocabulary.
    """

    group: TensorGroup
    start: int
    width: int
    size: int

    @classmethod
    def of(cls, group: TensorGroup, size: int) -> VocabShard:
        """Return this rank's shard of `size` ids, cut as `DTensor` cuts them."""
        start, stop = even_span(size, group.rank, group.size)
        return cls(group, start, stop - start, size)

    @property
    def widest(self) -> int:
        """The largest `width` of all ranks: all ranks cut their tokens into the same tiles."""
        return -(-self.size // self.group.size)

    def find(self, labels_T: Tensor) -> tuple[Tensor, Tensor]:
        """Return which labels are in my shard, `[T]`, and their indices in it, `[T, 1]`; 0 for the others."""
        mine_T = (labels_T >= self.start) & (labels_T < self.start + self.width)
        return mine_T, torch.where(mine_T, labels_T - self.start, 0)[:, None]

    def of_label(self, x_TV: Tensor, labels_T: Tensor) -> Tensor:
        """Return the label's entry, `[T]`; 0 if another rank holds it."""
        mine_T, index = self.find(labels_T)
        return torch.where(mine_T, x_TV.gather(-1, index)[:, 0], 0)

    def log_softmax(self, logits_TV: Tensor, dtype: torch.dtype) -> Tensor:
        """Return my shard of the log-softmax over the whole vocabulary; differentiable, collective."""
        x = logits_TV.to(dtype)
        highest = self.group.largest(x.amax(-1, keepdim=True))
        total = self.group.sum_out((x - highest).exp().sum(-1, keepdim=True))
        # Every rank subtracts it from its own shard, so its gradient is the sum over the ranks.
        return x - self.group.copy_in(total.log() + highest)

    def is_top1(self, logits_TV: Tensor, labels_T: Tensor) -> Tensor:
        """Return whether the label has the largest logit; the first of equals. Collective."""
        best, index = logits_TV.detach().max(-1)
        is_best = best == self.group.largest(best)
        first = self.group.smallest(torch.where(is_best, index + self.start, self.size))
        return first == labels_T
