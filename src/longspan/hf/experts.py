"""Experts over a tensor group: each rank holds some of them, and tokens travel to theirs by an All-to-All, and back.

Shape suffixes: N my tokens, K experts a token, R rows (a token for one expert), D hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from longspan.comm.tensor import TensorGroup, exchange_counts, exchange_rows


class ExpertParallel:
    """The experts of a layer in the place of their `forward`: `(hidden [N, D], index [N, K], weights [N, K])`.

    What an expert gives is weighed where its token lives, so the gradients of the weights are there too, whole.

    Args:
        module: the experts, whose weights have one entry an expert; `num_experts` becomes this rank's.
        group: over which they lie.
    """

    def __init__(self, module: Any, group: TensorGroup) -> None:
        self.module, self.group = module, group
        self.compute: Any = module.forward
        self.here: int = module.num_experts // group.size
        module.num_experts = self.here
        module.forward = self._forward  # the instance's: hooks around the call stay

    def _forward(self, hidden_ND: Tensor, index_NK: Tensor, weights_NK: Tensor) -> Tensor:
        experts = index_NK.reshape(-1)
        order = experts.argsort(stable=True)
        token = order // index_NK.shape[1]
        send = torch.bincount(experts // self.here, minlength=self.group.size).tolist()
        receive = exchange_counts(send, self.group, hidden_ND.device)
        numbers = exchange_rows((experts[order] % self.here)[:, None], send, receive, self.group)
        rows_RD = exchange_rows(hidden_ND[token], send, receive, self.group)
        found = exchange_rows(self._experts(rows_RD, numbers), receive, send, self.group)
        weighed = found * weights_NK.reshape(-1)[order, None]
        return torch.zeros_like(hidden_ND).index_add(0, token, weighed.to(hidden_ND.dtype))

    def _experts(self, rows_RD: Tensor, numbers: Tensor) -> Tensor:
        if len(rows_RD):
            out: Tensor = self.compute(rows_RD, numbers, torch.ones_like(numbers, dtype=rows_RD.dtype))
            return out
        # No token came: the weights still have a gradient, of zeros, as on the ranks that hold other parts of them.
        module: nn.Module = self.module
        return rows_RD + sum(p.flatten()[:0].sum() for p in module.parameters(recurse=False))
