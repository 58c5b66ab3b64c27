"""States from rank to rank, one after the other: LASP-1 (Sun et al. 2024, arXiv:2404.02882), for comparison.

Each run waits for the state of the run before, so communication is P - 1 steps, where state passing needs one. Less is
sent: a state alone, without its transition, and to one rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from longspan.comm.p2p import P2PMessage, post, wait_for
from longspan.mixers.state_passing import Incoming, Passing


def ring_states(summary_JBHKW: Tensor, passing: Passing, start: Tensor | None, problem: Exception | None) -> Incoming:
    """Return the states that enter my runs: an `Exchange`."""
    assert start is None and passing.causal
    if problem is not None:
        raise problem
    before: Tensor = _Ring.apply(summary_JBHKW, passing)  # type: ignore[no-untyped-call]
    return Incoming(before.unbind(0), None, None, before[:0].sum())


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, summary: Tensor, passing: Passing) -> Tensor:
        before = torch.zeros_like(summary[..., : passing.value_dim])
        state, works = before[0], list[dist.Work]()
        for slot, run in enumerate(passing.table.mine):
            received, _ = _move(state, passing, run, run - 1, run)
            before[slot] = _where_entered(received, passing, run)
            state = passing.step(run, summary[slot], before[slot]).contiguous()
            works += _move(state, passing, run + 1, run, run + 1)[1]
        wait_for(works)
        ctx.passing = passing
        ctx.save_for_backward(summary, before)
        return before

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        passing, (summary, before) = ctx.passing, ctx.saved_tensors
        dsummary, dstate, works = torch.zeros_like(summary), torch.zeros_like(before[0]), list[dist.Work]()
        for slot, run in reversed(list(enumerate(passing.table.mine))):
            dstate, _ = _move(dstate, passing, run + 1, run + 1, run)
            inputs = [x[slot].detach().requires_grad_() for x in (summary, before)]
            with torch.enable_grad():
                state = passing.step(run, *inputs)
            dsummary[slot], dbefore = torch.autograd.grad(state, inputs, dstate, materialize_grads=True)
            dstate = _where_entered(dbefore + grads[0][slot], passing, run).contiguous()
            works += _move(dstate, passing, run, run, run - 1)[1]
        wait_for(works)
        return dsummary, None


def _move(x: Tensor, passing: Passing, border: int, source: int, target: int) -> tuple[Tensor, list[dist.Work]]:
    """Move `x` over the border before run `border`, from run `source` to `target`; return what my run gets.

    It is `x` itself if one rank holds both runs, and zero if no document crosses the border.
    """
    table, group = passing.table, passing.group
    assert group is not None
    if not 0 < border < len(table.runs) or not any(table.enters[border]):
        return torch.zeros_like(x), []
    ranks = [table.runs[run][0] for run in (source, target)]
    if ranks[0] == ranks[1]:
        return x, []
    if ranks[0] == group.rank():
        return x, post([P2PMessage(x, ranks[1], border)], [], group)
    received = torch.empty_like(x)
    wait_for(post([], [P2PMessage(received, ranks[0], border)], group))
    return received, []


def _where_entered(x: Tensor, passing: Passing, run: int) -> Tensor:
    return torch.where(passing.table.masks(x.device)[0][run].view(-1, 1, 1, 1), x, 0.0)
