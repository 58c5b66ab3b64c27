"""Training on preferences: the loss of DPO on the log-probabilities of two answers (Rafailov et al., 2023).

An answer's reward is beta times the difference of its log-probability under the model and under a reference, the model
before training. The loss of a pair is -log sigmoid(reward of the chosen answer - reward of the rejected one).
"""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import logsigmoid

from longspan.compat.friends_api import without_adapters
from longspan.hf.forward.logprobs import token_logprobs

if TYPE_CHECKING:
    from collections.abc import Mapping

    from longspan.comm.mesh import SequenceSharding


_MEANS = ("loss", "accuracy", "margin", "chosen", "rejected")


def mean_of_pairs(sums: Tensor) -> dict[str, float]:
    """Return the means of sums as `Preferences.sums` returns them, and the number of pairs.

    accuracy: the share of pairs whose chosen answer has the larger reward. chosen, rejected: rewards; margin: their
    difference.
    """
    pairs = int(sums[-1])
    means = (sums[:-1] / pairs).tolist() if pairs else [math.nan] * len(_MEANS)
    return {**dict(zip(_MEANS, means, strict=True)), "pairs": pairs}


class Preferences:
    """The loss of DPO on batches whose documents are pairs: a chosen answer, then a rejected one. Collective.

    `reference` is the parallelized model that `model` is compared with; None: `model` without its adapters.
    """

    def __init__(self, model: Any, reference: Any, sp: SequenceSharding, beta: float) -> None:
        self.model, self.reference, self.sp, self.beta = model, reference, sp, beta
        self._since_report = torch.zeros(len(_MEANS) + 1, dtype=torch.float64, device=sp.device)

    def loss(self, batch: Mapping[str, Any], pairs: int) -> Tensor:
        """Return the sum of losses over all replicas, divided by the pairs of a step, equal on every rank."""
        sums = self.sums(batch)
        total = sums.detach() if self.sp.rank == 0 else torch.zeros_like(sums)
        if self.sp.world_group is not None:
            dist.all_reduce(total, group=self.sp.world_group)
        self._since_report += total
        own = self.sp.data_size * (sums[0] - sums[0].detach())  # gradients are averaged over the replicas
        return (own + total[0]) / pairs

    def sums(self, batch: Mapping[str, Any]) -> Tensor:
        """Return this replica's sums of what `mean_of_pairs` returns, fp64, for a batch that `shard_batch` has cut."""
        with torch.no_grad(), without_adapters(self.model) if self.reference is None else contextlib.nullcontext():
            before = _answers(self.model if self.reference is None else self.reference, batch)
        chosen, rejected = (self.beta * (_answers(self.model, batch) - before)).unflatten(0, (-1, 2)).unbind(1)
        margin = chosen - rejected
        values = [-logsigmoid(margin), (margin > 0).double(), margin, chosen, rejected, torch.ones_like(margin)]
        return torch.stack([value.sum() for value in values])

    def report(self) -> dict[str, float]:
        """Return the fields of `StepMetrics` about rewards, over the steps since the last call."""
        found = mean_of_pairs(self._since_report)
        self._since_report.zero_()
        return {f"reward_{name}": found[name] for name in ("accuracy", "margin", "chosen", "rejected")}


def _answers(model: Any, batch: Mapping[str, Any]) -> Tensor:
    """Return the log-probability of every answer of a batch, fp64."""
    found = token_logprobs(model, batch, gather=True)
    n = found.shape[1]
    starts = [row * n + start for row, of_row in enumerate(batch["longspan"].segments) for start, _ in of_row]
    answer = torch.zeros(found.numel(), dtype=torch.int64, device=found.device)
    answer[torch.tensor(starts[1:], device=found.device)] = 1
    sums = torch.zeros(len(starts), dtype=torch.float64, device=found.device)
    return sums.index_add(0, answer.cumsum(0), found.double().flatten())  # padding behind an answer adds 0
