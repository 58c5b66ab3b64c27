"""Expert parallelism over a tensor group: each rank holds some experts; an all-to-all sends them tokens, and back.

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
    """Replace the `forward` of a layer's experts: `(hidden [N, D], index [N, K], weights [N, K])`.

    Outputs are weighted on the token's rank, so the gradients of the routing weights are complete there. Llama-4's
    experts are called with `routed [E * N, D]` instead: a row per expert and token, zero if the token does not go to
    the expert.

    Args:
        module: the experts; dim 0 of its weights is experts. `num_experts` becomes this rank's number.
        group: over which they are sharded, as a `DTensor`.
    """

    def __init__(self, module: Any, group: TensorGroup) -> None:
        self.module, self.group = module, group
        self.compute: Any = module.forward
        self.experts: int = module.num_experts
        self.per_rank = -(-self.experts // group.size)  # except on the last
        start, stop = even_span(self.experts, group.rank, group.size)
        self.weights = [name for name, _ in module.named_parameters(recurse=False)]
        module.num_experts = self.local_experts = stop - start
        routed = len(inspect.signature(module.forward).parameters) == 1
        module.forward = self._forward_routed if routed else self._forward  # on the instance: hooks stay

    def _forward(self, hidden_ND: Tensor, index_NK: Tensor, weights_NK: Tensor) -> Tensor:
        experts = index_NK.reshape(-1)
        order = experts.argsort(stable=True)
        token = order // index_NK.shape[1]
        out_RD = self._through(hidden_ND[token], experts[order], self._experts)
        weighted_RD = out_RD * weights_NK.reshape(-1)[order, None]
        return torch.zeros_like(hidden_ND).index_add(0, token, weighted_RD.to(hidden_ND.dtype))

    def _forward_routed(self, routed_RD: Tensor) -> Tensor:
        tokens = len(routed_RD) // self.experts
        rows = routed_RD.detach().ne(0).any(-1).nonzero()[:, 0]  # experts have no bias, so rows of zeros stay zeros
        out_RD = self._through(routed_RD[rows], rows // tokens, self._bucketed)
        return torch.zeros_like(routed_RD).index_add(0, rows, out_RD)

    def _through(self, rows_RD: Tensor, experts: Tensor, compute: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Send rows, sorted by expert, to the experts' ranks, compute, and receive the outputs in the same order."""
        send = torch.bincount(experts // self.per_rank, minlength=self.group.size).tolist()
        group = self.group.name
        receive = exchange_counts(send, group, rows_RD.device)
        numbers = exchange_rows((experts % self.per_rank)[:, None], send, receive, group)
        out_RD = compute(exchange_rows(rows_RD, send, receive, group), numbers)
        return exchange_rows(out_RD, receive, send, group)

    def _bucketed(self, rows_RD: Tensor, numbers: Tensor) -> Tensor:
        """Compute with experts that take equal numbers of rows: pad with zeros."""
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
        # No token was received: give the weights a gradient of zeros, as on the other ranks.
        weights: list[Tensor] = [getattr(self.module, name) for name in self.weights]
        return rows_RD + sum(w.flatten()[:0].sum() for w in weights)
