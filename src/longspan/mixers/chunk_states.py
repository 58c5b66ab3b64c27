"""The states before the chunks of a sharded sequence: a scan over chunks and ranks, with one all-gather each way.

This is `state_passing.run_mixer` for linear attention in plain torch, which cuts a fragment into chunks. Each chunk
changes the state by `state = step . state + added`, so a scan over chunks gives the state before each of them. In the
forward, a run that a document enters and leaves is scanned twice: from zero for its summary (M, S), and from the state
that enters. Other runs are scanned once: before the all-gather if no state enters, after it if no later run reads the
state.

The backward scans in reverse: `gradient = step^T . gradient + the gradient of the state before the chunk`. It needs M,
but no gradient of M: each rank sends M again, with its part of the gradient.

Shape suffixes: B batch, T tokens, H heads, K key dim, V value dim, N chunks, J slots (runs of a rank).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from longspan.comm.collectives import all_gather
from longspan.comm.mesh import group_name
from longspan.compat.torch_api import not_compiled
from longspan.mixers.chunked import LinearAttention, without_tiny
from longspan.mixers.fragments import Fragment, FragmentTable
from longspan.mixers.mixer import Mixer, Tokens
from longspan.mixers.state_passing import Exchange, Passing, depend, gather_states, run_mixer, zero_of


@not_compiled
def pass_states(
    mixer: Mixer,
    tokens: Tokens,
    table: FragmentTable,
    group: dist.ProcessGroup | None,
    *,
    exchange: Exchange | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Run a recurrent layer on my tokens: `run_mixer`, or `run_chunks` where it applies."""
    if exchange is None and mixer.causal and isinstance(mixer, LinearAttention):
        return run_chunks(mixer, tokens, table, group, **options)
    return run_mixer(mixer, tokens, table, group, exchange=exchange, **options)


def run_chunks(
    mixer: LinearAttention,
    tokens: Tokens,
    table: FragmentTable,
    group: dist.ProcessGroup | None,
    *,
    initial_state: Tensor | None = None,
    return_state: bool = False,
    problem: Exception | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Run a causal mixer on my tokens; arguments, results and errors are those of `run_mixer`."""
    if group is None and problem is not None:
        raise problem
    with torch.autocast(tokens.q.device.type, enabled=False):
        pieces = [(rows, f) for rows, fragments in table.groups for f in fragments]
        chunks = [mixer.cut(tokens.part(rows, f.start, f.stop)) for rows, f in pieces]
        if initial_state is not None:
            initial_state = initial_state.to(tokens.state_dtype)
        totals = [c.total for c in chunks]
        job = _Job(tokens.state_shape, mixer.columns(tokens), table, group, return_state, problem, pieces, totals)
        # A rank without fragments takes part in the backward's collective, too.
        used = [] if chunks else [tokens.k, tokens.v, tokens.decay, tokens.beta]
        like = tokens.v.new_zeros(tokens.v.shape[0], dtype=tokens.state_dtype) + zero_of(*used)
        states = [x for c in chunks for x in (c.step, c.added)]
        link, final, *before = _States.apply(job, like, initial_state, *states)  # type: ignore[no-untyped-call]
        outs = iter([c.output(x).to(tokens.v.dtype) for c, x in zip(chunks, before, strict=True)])
        if chunks:
            out = table.join([[next(outs) for _ in fragments] for _, fragments in table.groups])
        else:
            out = depend(torch.zeros_like(tokens.v), link, tokens.q)
    return out, final if return_state else None


class _Job(NamedTuple):
    """What a scan needs besides differentiable tensors."""

    state_shape: tuple[int, int, int]
    columns: int
    table: FragmentTable
    group: dist.ProcessGroup | None
    return_state: bool
    problem: Exception | None
    pieces: Sequence[tuple[slice, Fragment]]
    totals: Sequence[Tensor | None]

    def needs_state_after(self, f: Fragment) -> bool:
        """Return whether a later run, or the final state, depends on the state after this fragment."""
        return f.continues or (self.return_state and f.last)


class _States(torch.autograd.Function):
    """Return a zero that links to the exchange, the final state, and the states before the chunks of each fragment."""

    @staticmethod
    def forward(ctx: Any, job: _Job, like: Tensor, initial_state: Tensor | None, *of_chunks: Any) -> Any:
        (heads, K, V), pieces = job.state_shape, job.pieces
        steps, added = of_chunks[::2], of_chunks[1::2]
        empty = like.new_zeros(len(like), heads, K, V + job.columns)
        before = dict[int, Tensor]()
        summaries, moved = dict[tuple[int, int], Tensor](), dict[tuple[int, int], Tensor]()
        for i, (rows, f) in enumerate(pieces):
            start, place = None, (f.slot, rows.start)
            if f.first and initial_state is not None:
                start = initial_state[rows]
            transition: Tensor | None = None
            if not f.enters:
                before[i], state = _scan(steps[i], added[i], start)
            elif job.needs_state_after(f):
                state, transition = _summary(steps[i], added[i], job.totals[i], job.columns)
            else:  # no later run reads it; sent so that NaN is reported
                state = added[i].sum(0)
            if transition is not None:
                moved[place] = transition
            if f.last:
                beside = empty[rows, ..., V:] if transition is None else transition
                summaries[place] = torch.cat([state, beside], -1) if job.columns else state
        final, entered = like.new_zeros(0), None
        if job.group is not None or job.return_state:
            start = initial_state if job.return_state else None
            if job.return_state and start is None:
                start = torch.zeros_like(empty[..., :V])
            incoming = gather_states(
                job.table.stack_slots(summaries, empty), Passing(True, job.table, job.group, V), start, job.problem
            )
            entered = incoming.before
            if incoming.final is not None:
                final = incoming.final
        for i, (rows, f) in enumerate(pieces):
            if f.enters:
                assert entered is not None
                before[i], _ = _scan(steps[i], added[i], entered[f.slot][rows])
        ctx.job, ctx.places = job, list(moved)
        ctx.has_initial = initial_state is not None
        in_order = [before[i] for i in range(len(pieces))]
        ctx.save_for_backward(like, *steps, *in_order, *moved.values())
        return like.new_zeros(()), final, *in_order

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, _: Tensor, dfinal: Tensor, *dbefore: Tensor) -> Any:
        job, n = ctx.job, len(ctx.job.pieces)
        (heads, K, V), pieces = job.state_shape, job.pieces
        like, *saved = ctx.saved_tensors
        steps, before, moved = saved[:n], saved[n : 2 * n], dict(zip(ctx.places, saved[2 * n :], strict=True))
        zero = like.new_zeros(len(like), heads, K, V)
        dadded = dict[int, Tensor]()
        dinitial, own = torch.zeros_like(zero), dict[tuple[int, int], Tensor]()
        for i, (rows, f) in enumerate(pieces):
            if not job.needs_state_after(f):
                dadded[i], dstart = _scan_back(steps[i], dbefore[i], None, first=f.enters or f.first)
            elif f.enters:
                dstart = _scan_back(steps[i], dbefore[i], None, first=True)[1]
            else:
                continue
            if f.enters:
                own[f.slot, rows.start] = dstart
            elif f.first:
                dinitial[rows] += dstart
        dafter = None
        if job.group is not None or job.return_state:
            parts = [job.table.stack_slots(own, zero)]
            if job.columns:
                parts.append(job.table.stack_slots(moved, zero.new_zeros(len(zero), heads, K, job.columns)))
            if job.return_state:
                parts.append(dfinal.expand(len(parts[0]), *dfinal.shape))
            dafter, drest = _gather_gradients(torch.cat(parts, -1), job)
            if drest is not None:
                dinitial += torch.where(drest.view(-1, 1, 1, 1), dfinal, 0.0)
        for i, (rows, f) in enumerate(pieces):
            if job.needs_state_after(f):
                assert dafter is not None
                dadded[i], dstart = _scan_back(steps[i], dbefore[i], dafter[f.slot][rows], first=f.first)
                if f.first and not f.enters:
                    dinitial[rows] += dstart
        grads: list[Tensor | None] = []
        for i in range(n):
            needs_step = ctx.needs_input_grad[3 + 2 * i]
            grads += [_step_gradient(steps[i], before[i], dadded[i]) if needs_step else None, dadded[i]]
        return None, torch.zeros_like(like), dinitial if ctx.has_initial else None, *grads


def _gather_gradients(part_JBHKW: Tensor, job: _Job) -> tuple[list[Tensor], Tensor | None]:
    """Return, by slot, the gradient of the state after each of my runs, and of which rows the final state is the first.

    `part`: of every run the gradient of the state that enters it, of its own tokens alone; its transition; and the
    gradient of the final state, if it was returned.
    """
    table, V = job.table, job.state_shape[2]
    gathered = part_JBHKW if job.group is None else all_gather(part_JBHKW.contiguous(), group_name(job.group))
    if gathered.device.type == "cpu":
        gathered = gathered.double()
    enters, passes, filled = table.masks(gathered.device)
    own, moved, finals = gathered.tensor_split([V, V + job.columns], -1)
    dstate = finals[:: table.slots].sum(0) if job.return_state else torch.zeros_like(own[0])
    after = {}

    def where(flags: Tensor, x: Tensor, otherwise: Tensor | float = 0.0) -> Tensor:
        return torch.where(flags.view(-1, 1, 1, 1), x, otherwise)

    for run in range(len(table.runs) - 1, min(table.mine, default=0) - 1, -1):
        rank, slot = table.runs[run]
        at = rank * table.slots + slot
        after[run] = where(filled[run], dstate)
        if run == 0:
            break
        through = after[run]
        if job.columns:
            M = moved[at]
            through = M * through if job.columns == 1 else M.mT @ through
        through = own[at] + where(passes[run], through)
        dstate = where(filled[run], where(enters[run], through), dstate)
    return [after[run].to(part_JBHKW.dtype) for run in table.mine], ~filled.any(0) if job.return_state else None


# ---------------------------------------------------------------------------------------------------------------------
# Scans over the chunks of a fragment.


def _scan(step: Tensor | None, added: Tensor, start: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the state before every chunk, and the one after all of them."""
    before = torch.empty_like(added)
    before[0] = 0 if start is None else start
    for n in range(len(added) - 1):
        _advance(step, added, before, n, before[n + 1], from_zero=n == 0 and start is None)
    after = torch.empty_like(added[0])
    _advance(step, added, before, len(added) - 1, after, from_zero=len(added) == 1 and start is None)
    return before, after


def _scan_back(step: Tensor | None, dbefore: Tensor, dafter: Tensor | None, *, first: bool) -> tuple[Tensor, Tensor]:
    """Return the gradient of the state after every chunk, and with `first` of the one before all of them.

    `dbefore` is the gradient of the states before chunks as those read them, `dafter` of the state after the last one.
    """
    transposed = None if step is None else step if step.shape[-1] == 1 else step.mT
    dstates = torch.empty_like(dbefore)
    dstates[-1] = 0 if dafter is None else dafter
    for n in range(len(dbefore) - 1, 0, -1):
        from_zero = n == len(dbefore) - 1 and dafter is None
        _advance(transposed, dbefore, dstates, n, dstates[n - 1], from_zero=from_zero)
    dstart = torch.empty_like(dbefore[0])
    if first:
        _advance(transposed, dbefore, dstates, 0, dstart, from_zero=len(dbefore) == 1 and dafter is None)
    return dstates, dstart


def _advance(step: Tensor | None, added: Tensor, states: Tensor, n: int, out: Tensor, *, from_zero: bool) -> None:
    """Write `step . state + added` of chunk n to `out`."""
    if from_zero:
        out.copy_(added[n])
    elif step is None:
        torch.add(states[n], added[n], out=out)
    elif step.shape[-1] == 1:
        torch.addcmul(added[n], step[n], states[n], out=out)
    else:
        flat = (x.flatten(0, 1) for x in (added[n], step[n], states[n]))
        torch.baddbmm(*flat, out=out.flatten(0, 1))


def _summary(step: Tensor | None, added: Tensor, total: Tensor | None, columns: int) -> tuple[Tensor, Tensor | None]:
    """Return the state after all chunks from a zero state, and the transition."""
    if step is None:
        return added.sum(0), None
    if total is not None:
        return _scan(step, added, None)[1], total
    V = added.shape[-1]
    state = torch.cat([added[0], step[0]], -1).flatten(0, 1)
    for n in range(1, len(added)):
        state = without_tiny(step[n].flatten(0, 1) @ state)
        state[..., :V] += added[n].flatten(0, 1)
    both = state.unflatten(0, added.shape[1:3])
    return both[..., :V], both[..., V:]


def _step_gradient(step: Tensor | None, before: Tensor, dadded: Tensor) -> Tensor | None:
    if step is None:
        return None
    if step.shape[-1] == 1:
        return (dadded * before).sum_to_size(step.shape)
    return dadded @ before.mT
