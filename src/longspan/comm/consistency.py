"""Consistency checks: compare ranks before a collective could hang, and name the ranks and keys that differ.

Each comparison gathers a few numbers. Texts and digests of single tensors are sent only if the numbers differ. All
ranks see the same numbers, so all raise the same error.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from longspan.comm.digests import Digester, digest_of_text, digests_of, weights_of
from longspan.comm.errors import raise_on_every_rank
from longspan.comm.objects import gather_objects
from longspan.core.errors import LongspanError
from longspan.core.formatting import differences, format_ranks, listed, odd_ones

if TYPE_CHECKING:
    from longspan.comm.mesh import SequenceSharding

T = TypeVar("T")


def gather_numbers(mine: Sequence[int], group: dist.ProcessGroup, device: torch.device) -> list[list[int]]:
    """Gather the int64 numbers of every rank, in group order; each rank has equally many."""
    row = torch.tensor(mine, dtype=torch.int64, device=device)
    rows = [torch.empty_like(row) for _ in range(group.size())]
    dist.all_gather(rows, row, group=group)
    return torch.stack(rows).tolist()


# ---------------------------------------------------------------------------------------------------------------------
# The model that `parallelize` gets.


def check_on_every_rank(sp: SequenceSharding, check: Callable[[], tuple[T, Mapping[str, str], Mapping[str, int]]]) -> T:
    """Run this rank's own checks, then compare what they found over all ranks. Collective.

    Args:
        sp: the sharding.
        check: raises, or returns its result, and facts and weights for `check_same_model`.

    Raises:
        LongspanError: as `check_same_model`; if `check` raised another kind of exception, that one on its own rank.
    """
    results: list[T] = []
    facts: Mapping[str, str] = {}
    weights: Mapping[str, int] = {}
    problem: Exception | None = None
    try:
        result, facts, weights = check()
        results.append(result)
    except Exception as error:  # of any kind: the other ranks must raise too
        problem = error
    check_same_model(sp, facts, weights, problem)
    return results[0]


def digests_to_compare(model: nn.Module, sp: SequenceSharding, weights: str) -> dict[str, int]:
    """Return digests of the weights if `parallelize(weights=...)` says that all ranks have the same."""
    return digests_of(weights_of(model)) if sp.job_size > 1 and weights == "same" else {}


def check_same_model(
    sp: SequenceSharding, facts: Mapping[str, str], weights: Mapping[str, int], problem: Exception | None
) -> None:
    """Raise on every rank if any rank has a problem, or if facts or weights differ. Collective.

    Args:
        sp: the sharding.
        facts: values that must be equal, by their names in errors.
        weights: digests of parameters and buffers, by name.
        problem: the error of this rank's own checks.

    Raises:
        LongspanError: naming the ranks, and the keys or parameters; on the rank that has a `problem`, that error.
    """
    group = sp.mesh_group
    if group is None or sp.job_size == 1:
        if problem is not None:
            raise problem
        return
    mine = [int(problem is not None), *(digest_of_text(json.dumps(x, sort_keys=True)) for x in (facts, weights))]
    rows = gather_numbers(mine, group, sp.device)
    ranks = dist.get_process_group_ranks(group)
    raise_on_every_rank(problem, group, "cannot parallelize the model", [bool(row[0]) for row in rows])
    if len({row[1] for row in rows}) > 1:
        found = differences(gather_objects(dict(facts), group), ranks)
        raise LongspanError(
            f"parallelize must be given the same on every rank: {listed(found)}; start every rank with the same "
            f"settings, model and versions",
            code="LS104",
        )
    if len({row[2] for row in rows}) > 1:
        raise LongspanError(
            f"the ranks have different weights: {_format_differing(gather_objects(dict(weights), group), ranks)}; call "
            f"torch.manual_seed with one seed on every rank before the model is made, load the same files everywhere, "
            f"or copy the weights of rank {ranks[0]} to all: parallelize(..., weights='broadcast')",
            code="LS405",
        )


def _format_differing(weights: Sequence[Mapping[str, int]], ranks: Sequence[int]) -> str:
    """Describe which parameters differ, and on which ranks."""
    names = dict.fromkeys(name for each in weights for name in each)
    wrong = {name: odd_ones([each.get(name) for each in weights]) for name in names}
    wrong = {name: odd for name, odd in wrong.items() if odd}
    first = next(iter(wrong))
    same = [rank for i, rank in enumerate(ranks) if i not in wrong[first]]
    also = f" and {len(wrong) - 1} more of {len(names)}" if len(wrong) > 1 else ""
    return f"{first}{also} on {format_ranks([ranks[i] for i in wrong[first]])}, not as on {format_ranks(same)}"


def broadcast_weights(model: nn.Module, sp: SequenceSharding) -> None:
    """Copy the parameters and buffers of the first rank to all ranks. Collective."""
    group = sp.mesh_group
    if group is None or sp.job_size == 1:
        return
    source = dist.get_process_group_ranks(group)[0]
    with torch.no_grad():
        for x in weights_of(model).values():
            data = x.detach().to(sp.device).contiguous()
            dist.broadcast(data.view(-1).view(torch.uint8), source, group=group)
            if data.data_ptr() != x.data_ptr():
                x.copy_(data)


# ---------------------------------------------------------------------------------------------------------------------
# Replicated weights during training.


class ReplicaCheck:
    """Compare weights that are replicated, so that each rank updates its own copy (no FSDP).

    Args:
        model: the model.
        every: training forwards from one comparison to the next; 0 for none.
    """

    def __init__(self, model: nn.Module, every: int) -> None:
        self.every = every
        self.seen = 0
        parameters = list(model.parameters())
        self.digester = Digester(parameters[0].device) if every and parameters else None

    def number(self, model: nn.Module) -> int:
        """Return the joint digest of all parameters in every `every`-th training forward, 0 in the others."""
        if self.digester is None or not (model.training and torch.is_grad_enabled()):
            return 0
        self.seen += 1
        if self.seen % self.every:
            return 0
        parameters = list(model.parameters())
        if parameters[0].device != self.digester.factors.device:
            self.digester = Digester(parameters[0].device)
        return int(self.digester.joint(parameters))

    def refuse(self, model: nn.Module, group: dist.ProcessGroup, held: int = 1) -> None:
        """Raise on every rank, naming parameter and ranks. Ranks `held` apart hold the same weights. Collective."""
        weights = gather_objects(digests_of(dict(model.named_parameters())), group)
        ranks = dist.get_process_group_ranks(group)
        copies = [(weights[i::held], ranks[i::held]) for i in range(held)]
        found = next(_format_differing(*each) for each in copies if any(x != each[0][0] for x in each[0]))
        raise LongspanError(
            f"the weights of the ranks have diverged: {found}; they were equal "
            f"{self.every} training forwards ago (forward {self.seen} now). Either the ranks' optimizers "
            f"differ, or a rank's memory was damaged: continue from an earlier checkpoint, and test that machine",
            code="LS405",
        )


def is_on_cpu(values: Mapping[str, Any]) -> bool:
    """Whether the host can read all tensors of a batch without waiting for a GPU."""
    return all(x.device.type == "cpu" for x in values.values() if isinstance(x, Tensor))
