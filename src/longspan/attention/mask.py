"""Masks as values: who may attend to whom, said in a few integers, never as a tensor of S x S."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from longspan.errors import LongspanError
from longspan.shard import Rows


@dataclass(frozen=True)
class Mask:
    """Query token i attends to key token j if all of these hold; i and j count from the start of the sequence.

    Attributes:
        causal: j <= i.
        window: i - j < window (sliding window; needs `causal`). None: no limit.
        rows: i and j lie in the same run of tokens of their row of the batch (documents, padding). None: one run.
    """

    causal: bool = True
    window: int | None = None
    rows: Rows | None = None

    def __post_init__(self) -> None:
        if self.window is not None and (isinstance(self.window, bool) or self.window < 1):
            raise LongspanError(f"window={self.window} must be at least 1 token (1: a token sees only itself)")
        if self.window is not None and not self.causal:
            raise LongspanError(f"window={self.window} without `causal=True` is not supported")

    def limited_to(self, length: int) -> Mask:
        """The same mask for a sequence of `length`: a window that reaches over all of it is dropped."""
        if self.window is not None and self.window >= length:
            return Mask(self.causal, None, self.rows)
        return self

    def dense(self, batch: int, length: int, device: torch.device) -> Tensor:
        """The mask written out, bool [B or 1, length, length]: the plain reference, for tests and the eager kernel."""
        i, j = torch.arange(length, device=device)[:, None], torch.arange(length, device=device)[None]
        allowed = torch.ones(length, length, dtype=torch.bool, device=device)
        if self.causal:
            allowed &= j <= i
        if self.window is not None:
            allowed &= i - j < self.window
        if self.rows is None:
            return allowed[None]
        ids = self.ids(batch, length, device)
        same = (ids[:, :, None] == ids[:, None, :]) & (ids >= 0)[:, :, None]
        return allowed[None] & same

    def ids(self, batch: int, length: int, device: torch.device) -> Tensor:
        """The number of every token's run, int64 [B, length]; -1 for padding."""
        ids = torch.full((batch, length), -1, dtype=torch.int64, device=device)
        for b, row in enumerate(self.rows or (((0, length),),) * batch):
            for number, (start, stop) in enumerate(row):
                ids[b, start:stop] = number
        return ids

    def check(self, batch: int, length: int) -> None:
        """Refuse rows that do not belong to `batch` rows of `length` tokens."""
        if self.rows is None:
            return
        if len(self.rows) != batch:
            raise LongspanError(f"`documents` has {len(self.rows)} rows, the tensors have a batch of {batch}")
        end = max((row[-1][1] for row in self.rows if row), default=0)
        if end > length:
            raise LongspanError(f"`documents` reaches to token {end}, the sequence has {length}")
