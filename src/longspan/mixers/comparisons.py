"""Two other methods for recurrent layers, to compare state passing with.

By heads: all-to-all, the whole sequence on my heads, all-to-all back (Ulysses). It sends all tokens, where state
passing sends one state per rank, and keeps no more ranks busy than there are heads.

States from rank to rank, one after the other: LASP-1 (Sun et al. 2024, arXiv:2404.02882). Each run waits for the state
of the run before, so communication is P - 1 steps, where state passing needs one. Less is sent: a state alone, without
its transition, and to one rank.

Shape suffixes: B batch, S tokens of the sequence in rank order, H value heads, h those of this rank, W packed dims.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from longspan.comm.collectives import P2PMessage, all_gather, post, wait_for
from longspan.comm.mesh import group_name
from longspan.comm.reshard import heads_to_seq, seq_to_heads, shard_sizes
from longspan.core.layout import Layout
from longspan.mixers.chunk_states import pass_states
from longspan.mixers.fragments import fragment_table
from longspan.mixers.mixer import Mixer, Tokens
from longspan.mixers.state_passing import Incoming, Passing, zero_of

if TYPE_CHECKING:
    from longspan.attn.segments import Segments
    from longspan.comm.mesh import SequenceSharding


def run_by_heads(
    mixer: Mixer,
    tokens: Tokens,
    sp: SequenceSharding,
    length: int,
    segments: Segments | None,
    initial_state: Tensor | None,
    return_state: bool,
) -> tuple[Tensor, Tensor | None]:
    """Run a recurrent layer on my tokens, computed by heads; see `run_mixer`."""
    assert sp.group is not None
    (heads, K, V), batch = tokens.state_shape, tokens.v.shape[0]
    repeats = heads // tokens.k.shape[2]
    q, k = (x.repeat_interleave(repeats, 2) if repeats > 1 else x for x in (tokens.q, tokens.k))
    spans = [span for rank in range(sp.size) for span in sp.layout.padded_spans(length, rank)]
    places = torch.cat([torch.arange(*span, device=q.device) for span in spans])  # of the tokens in rank order

    def by_heads(xs_BLHD: list[Tensor]) -> list[Tensor]:
        packed_BShW = seq_to_heads(torch.cat(xs_BLHD, -1), sp.group).index_select(1, places.argsort()[:length])
        return list(packed_BShW.split([x.shape[3] for x in xs_BLHD], -1))

    q, k, v = by_heads([q, k, tokens.v])
    gates = [x if x.dim() == 4 else x.unsqueeze(-1) for x in (tokens.decay, tokens.beta) if x is not None]
    received = iter(by_heads(gates) if gates else [])
    decay = None if tokens.decay is None else next(received)
    beta = None if tokens.beta is None else next(received).squeeze(-1)
    if decay is not None and tokens.decay is not None and tokens.decay.dim() == 3:
        decay = decay.squeeze(-1)

    # All tokens of my heads, as on one device.
    sizes = shard_sizes(heads, sp.size)
    first, mine = sum(sizes[: sp.rank]), sizes[sp.rank]
    link = zero_of(q, k, v, decay, beta, initial_state)  # a rank without heads takes part in each backward
    out, state = v + link, v.new_zeros(batch, 0, K, V, dtype=tokens.state_dtype) + link
    if mine:
        if initial_state is not None:
            initial_state = initial_state[:, first : first + mine]
        table, gathered = fragment_table(Layout(), 0, length, batch, segments), Tokens(q, k, v, decay, beta)
        out, final = pass_states(mixer, gathered, table, None, initial_state=initial_state, return_state=return_state)
        state = state if final is None else final
    out_BShV = F.pad(out, (0, 0, 0, 0, 0, len(places) - length)).index_select(1, places)
    out = heads_to_seq(out_BShV, sp.group, heads=heads)
    if not return_state:
        return out, None
    states = all_gather(F.pad(state, (0, 0, 0, 0, 0, sizes[0] - mine)).unsqueeze(0), group_name(sp.group))
    return out, torch.cat([x[:, :n] for x, n in zip(states, sizes, strict=True)], 1)


# ---------------------------------------------------------------------------------------------------------------------
# LASP-1.


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
