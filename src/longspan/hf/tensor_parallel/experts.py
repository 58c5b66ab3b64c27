"""Experts over a tensor group: each rank holds some of them, and tokens travel to theirs by an All-to-All, and back.

Shape suffixes: N my tokens, K experts a token, R rows (a token for one expert), D hidden size.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from longspan.comm.collectives import exchange_counts, exchange_rows
from longspan.comm.tensor import TensorGroup
from longspan.core.tile_sizes import even_span


class ExpertParallel:
    """The experts of a layer in the place of their `forward`: `(hidden [N, D], index [N, K], weights [N, K])`.

    What an expert gives is weighed where its token lives, so the gradients of the weights are there too, whole.
    Llama-4's experts are called with `routed [E * N, D]` instead: a row for each expert and token, zero where the token
    does not go to the expert.

    Args:
        module: the experts, whose weights have one entry an expert; `num_experts` becomes this rank's.
        group: over which they lie, as `DTensor` cuts them.
    """

    def __init__(self, module: Any, group: TensorGroup) -> None:
        self.module, self.group = module, group
        self.compute: Any = module.forward
        self.experts: int = module.num_experts
        self.each = -(-self.experts // group.size)  # on every rank but the last
        start, stop = even_span(self.experts, group.rank, group.size)
        self.weights = [name for name, _ in module.named_parameters(recurse=False)]
        module.num_experts = self.here = stop - start
        takes_all = len(inspect.signature(module.forward).parameters) == 1
        module.forward = self._forward_routed if takes_all else self._forward  # the instance's: hooks stay

    def _forward(self, hidden_ND: Tensor, index_NK: Tensor, weights_NK: Tensor) -> Tensor:
        experts = index_NK.reshape(-1)
        order = experts.argsort(stable=True)
        token = order // index_NK.shape[1]
        found = self._through(hidden_ND[token], experts[order], self._experts)
        weighed = found * weights_NK.reshape(-1)[order, None]
        return torch.zeros_like(hidden_ND).index_add(0, token, weighed.to(hidden_ND.dtype))

    def _forward_routed(self, routed_RD: Tensor) -> Tensor:
        tokens = len(routed_RD) // self.experts
        rows = routed_RD.detach().ne(0).any(-1).nonzero()[:, 0]  # experts have no bias, so rows of zeros stay zeros
        found = self._through(routed_RD[rows], rows // tokens, self._bucketed)
        return torch.zeros_like(routed_RD).index_add(0, rows, found)

    def _through(self, rows_RD: Tensor, experts: Tensor, compute: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Send rows, sorted by expert, to the experts' ranks, compute, and return the results in the same order."""
        send = torch.bincount(experts // self.each, minlength=self.group.size).tolist()
        group = self.group.name
        receive = exchange_counts(send, group, rows_RD.device)
        numbers = exchange_rows((experts % self.each)[:, None], send, receive, group)
        found = compute(exchange_rows(rows_RD, send, receive, group), numbers)
        return exchange_rows(found, receive, send, group)

    def _bucketed(self, rows_RD: Tensor, numbers: Tensor) -> Tensor:
        """Compute with experts that take equally many rows each: pad with zeros."""
        expert = numbers[:, 0]
        order = expert.argsort(stable=True)
        counts = torch.bincount(expert, minlength=self.module.num_experts)
        most = max(1, int(counts.max()))
        place = torch.arange(len(order), device=order.device) - (counts.cumsum(0) - counts)[expert[order]]
        at = torch.empty_like(order).scatter(0, order, expert[order] * most + place)
        padded = rows_RD.new_zeros(self.module.num_experts * most, rows_RD.shape[1]).index_add(0, at, rows_RD)
        return self.compute(padded)[at]  # type: ignore[no-any-return]

    def _experts(self, rows_RD: Tensor, numbers: Tensor) -> Tensor:
        if len(rows_RD):
            out: Tensor = self.compute(rows_RD, numbers, torch.ones_like(numbers, dtype=rows_RD.dtype))
            return out
        # No token came: the weights still have a gradient, of zeros, as on the ranks that hold other parts of them.
        weights: list[Tensor] = [getattr(self.module, name) for name in self.weights]
        return rows_RD + sum(w.flatten()[:0].sum() for w in weights)
