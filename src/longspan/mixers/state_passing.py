"""State passing: a recurrent layer over a sharded sequence, with one all-gather whose size ignores the length.

A recurrent layer over some tokens is affine in the state that it starts from:

    state after = M . state before + S          output = O + R . state before

Every rank computes S from a zero state, and where a document enters also M. The summaries (M, S) of all runs are
all-gathered, each rank combines those before its own in order, and finishes its output. The backward of the
all-gather, an operator registered with its adjoint, is one reduce-scatter. Every rank's output depends on the gathered
summaries, if only by a zero: a rank whose backward skipped that collective would leave the others waiting. LASP-2
(arXiv:2502.07563) is the case M = 1.

A run is a contiguous part of the sequence on one rank (a zigzag rank has two), a slot its number on the rank, and a
fragment the part of a document in a run.

Shape suffixes: B batch, T tokens, H heads, K key dim, V value dim, J slots (runs of a rank), W = V + columns of M: K
for a matrix (the delta rule), 1 for factors (a decay), 0 for M = 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from longspan.comm.agree import raise_on_every_rank
from longspan.comm.arguments import check_sharding, describe
from longspan.comm.collectives import all_gather
from longspan.comm.mesh import group_name
from longspan.compat.torch_api import not_compiled
from longspan.core.errors import LongspanError
from longspan.mixers.combine import state_after, state_before
from longspan.mixers.fla import DeltaRuleFunction
from longspan.mixers.fragments import FragmentTable, fragment_table, read_documents
from longspan.mixers.mixer import ChunkFunction, Local, Mixer, Tokens

if TYPE_CHECKING:
    from longspan.comm.mesh import SequenceSharding


# ---------------------------------------------------------------------------------------------------------------------
# From states before and after my runs to my output.


class Incoming(NamedTuple):
    """What an all-gather of summaries returns."""

    # By slot the state `[B, H, K, V]` that enters the run, zero in rows where no document does.
    before: Sequence[Tensor]
    after: Sequence[Tensor] | None  # by slot the sum of the document's later tokens, if tokens see those
    final: Tensor | None  # the state after the last token of every row, if it was asked for
    link: Tensor  # a zero that depends on what was received


# Of a mixer's function. Not every Exception: torch ends the recomputation of a checkpoint by one.
_FAILURES = (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


@not_compiled
def pass_states(
    mixer: Mixer,
    tokens: Tokens,
    table: FragmentTable,
    group: dist.ProcessGroup | None,
    *,
    initial_state: Tensor | None = None,
    return_state: bool = False,
    problem: Exception | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Run a recurrent layer on my tokens. A compiler runs it as it is.

    Args:
        mixer: the local computation.
        tokens: of this rank.
        table: its fragments.
        group: the sequence group; None for one rank.
        initial_state: `[batch, value heads, key dim, value dim]`, the state before the first document of every row,
            equal on every rank.
        return_state: whether to return the state after the last token of every row.
        problem: an error in this rank's values.

    Returns:
        The output, zero outside of documents, and the state or None.

    Raises:
        LongspanError: on every rank and naming the first such rank, if one has a `problem`, a mixer that fails, or a
            state that is not finite. On GPUs, which would have to wait for the values, a rank raises its own error
            only.
    """
    if group is None and problem is not None:
        raise problem
    dtype, start = tokens.state_dtype, None
    if initial_state is not None:
        initial_state = initial_state.to(dtype)
    if return_state:
        zero = tokens.v.new_zeros(tokens.v.shape[0], *tokens.state_shape, dtype=dtype)
        start = zero if initial_state is None else initial_state
    with torch.autocast(tokens.q.device.type, enabled=False):
        if group is not None and initial_state is None and not return_state and isinstance(mixer, DeltaRuleFunction):
            whole = mixer.over_ranks(tokens, table, group)
            if whole is not None:
                return _without_padding(whole, table), None
        try:
            locals_ = _locals(mixer, tokens, table, initial_state)
        except _FAILURES as error:
            if group is None:
                raise
            locals_, problem = None, problem or error  # the other ranks wait for this rank's summary
        incoming = None
        if group is not None or return_state:
            summary = _summary(mixer, tokens, table, locals_, initial_state)
            incoming = _gather_states(summary, table, group, tokens.v.shape[3], start, problem, mixer.causal)
        assert locals_ is not None  # the all-gather has raised
        out = _output(tokens, table, locals_, incoming)
        return out, incoming.final if return_state and incoming is not None else None


def _without_padding(out: Tensor, table: FragmentTable) -> Tensor:
    parts = [[out[rows, f.start : f.stop] for f in fragments] for rows, fragments in table.groups]
    return table.join(parts) if any(parts) else depend(torch.zeros_like(out), out)


def _locals(
    mixer: Mixer, tokens: Tokens, table: FragmentTable, initial_state: Tensor | None
) -> Sequence[Sequence[Local]]:
    return [
        [
            mixer.local(
                tokens.part(rows, f.start, f.stop),
                initial_state[rows] if f.first and initial_state is not None else None,
                receives=f.enters or (f.continues and not mixer.causal),
            )
            for f in fragments
        ]
        for rows, fragments in table.groups  # neighbouring batch rows with the same documents
    ]


def _summary(
    mixer: Mixer,
    tokens: Tokens,
    table: FragmentTable,
    locals_: Sequence[Sequence[Local]] | None,
    initial_state: Tensor | None,
) -> Tensor:
    """Return `[J, B, H, K, W]`: of every run the state of its last fragment, and beside it the transition.

    If tokens see later ones and there are documents, the state of the run's first fragment is there instead. Zero
    without `locals_`.
    """
    H, K, V = tokens.state_shape
    columns = mixer.columns(tokens) if mixer.causal else V * table.has_documents
    empty = tokens.v.new_zeros(tokens.v.shape[0], H, K, V + columns, dtype=tokens.state_dtype)
    if locals_ is None:
        return torch.stack([empty] * table.slots)
    summaries, firsts = dict[tuple[int, int], Tensor](), dict[tuple[int, int], Tensor]()
    for (rows, fragments), of_fragments in zip(table.groups, locals_, strict=True):
        for fragment, local in zip(fragments, of_fragments, strict=True):
            run = fragment.slot, rows.start
            first = firsts.setdefault(run, local.state)
            if fragment.last:
                beside = local.transition if mixer.causal else first
                parts = [local.state, empty[rows, ..., V:] if beside is None else beside]
                summaries[run] = torch.cat(parts, -1) if columns else local.state
    summary = table.stack_slots(summaries, empty)
    # The backward's collective runs on all ranks or on none: connect what this rank has not used.
    unused = [] if summary.requires_grad else [tokens.k, tokens.v, tokens.decay, tokens.beta]
    return summary + zero_of(*unused, initial_state)


def _output(
    tokens: Tokens, table: FragmentTable, locals_: Sequence[Sequence[Local]], incoming: Incoming | None
) -> Tensor:
    """Return my output, with the states that enter."""
    outs: list[list[Tensor]] = []
    corrected = False
    for (rows, fragments), of_fragments in zip(table.groups, locals_, strict=True):
        outs.append([])
        for fragment, local in zip(fragments, of_fragments, strict=True):
            states = []
            if fragment.enters:
                assert incoming is not None
                states.append(incoming.before[fragment.slot][rows])
            if incoming is not None and incoming.after is not None and fragment.continues:
                states.append(incoming.after[fragment.slot][rows])
            corrected = corrected or bool(states)
            out = local.finish(None if not states else states[0] if len(states) == 1 else states[0] + states[1])
            outs[-1].append(out.to(tokens.v.dtype))
    out = table.join(outs) if any(outs) else torch.zeros_like(tokens.v) + zero_of(*tokens)
    return out if incoming is None or corrected else depend(out, incoming.link)


# ---------------------------------------------------------------------------------------------------------------------
# The all-gather.


def _gather_states(
    summary_JBHKW: Tensor,
    table: FragmentTable,
    group: dist.ProcessGroup | None,
    V: int,
    start_BHKV: Tensor | None,
    problem: Exception | None,
    causal: bool,
) -> Incoming:
    """All-gather the summaries, and combine those before my runs.

    `start` is the state before the sequence, or None if no final state is asked for. `problem` is this rank's error: it
    is raised, on CPUs on every rank.
    """
    gathered = summary_JBHKW
    if group is not None:
        if problem is not None:  # seen by every rank
            gathered = torch.full_like(gathered, torch.nan)
        gathered = all_gather(gathered, group_name(group))
        if gathered.device.type == "cpu":
            finite = gathered.detach().view(group.size(), -1).isfinite().all(1).tolist()
            if problem is None and not finite[group.rank()]:
                problem = LongspanError(
                    "its state is not finite (NaN or infinity) after its own tokens; look for NaN in q, k, v, decay, "
                    "beta and initial_state (of a model: longspan.find_nonfinite)"
                )
            if not all(finite):
                raise_on_every_rank(problem, group, "cannot pass its state")
        elif problem is not None:
            raise problem
    of_runs, after, final = gathered if causal else gathered[..., :V], None, None
    before = [state_before(of_runs, table, run, V) for run in table.mine]
    if not causal:
        after = [state_after(gathered[..., -V:], table, run) for run in table.mine]
    if start_BHKV is not None:
        final = state_before(of_runs, table, len(table.runs), V)
        if empty := table.rows_without_tokens():
            final = final.index_copy(0, torch.tensor(empty, device=final.device), start_BHKV[empty])
    return Incoming(before, after, final, gathered[:0].sum())


def zero_of(*tensors: Tensor | None) -> Tensor | float:
    """Return a zero that depends on these tensors, for a rank that uses none of their elements."""
    given = [x[:0].sum() for x in tensors if x is not None and x.requires_grad]
    return torch.stack(given).sum() if given else 0.0


def depend(out: Tensor, *tensors: Tensor | None) -> Tensor:
    """Return `out` as a view whose backward gives these tensors a gradient of zero.

    Adding `zero_of` would do the same, but read and write all of `out`.
    """
    given = [x for x in tensors if x is not None and x.requires_grad]
    return _Depend.apply(out, *given) if given else out  # type: ignore[no-untyped-call]


class _Depend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, *tensors: Tensor) -> Tensor:
        ctx.zeros = [(x.shape, x.dtype, x.device) for x in tensors]
        ctx.save_for_backward(out.new_empty(0))
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        # A checkpoint recomputes up to the last saved tensor: without one, this rank would skip the all-gather.
        _ = ctx.saved_tensors
        return grad, *(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.zeros)


# ---------------------------------------------------------------------------------------------------------------------
# The public form for a model's own chunk function.


def state_passing(
    chunk_function: Callable[..., tuple[Tensor, Tensor | None]],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sp: SequenceSharding,
    *,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    length: int | None = None,
    documents: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Run a model's own recurrent layer on a sharded sequence: `chunk_function` with the same arguments, on my tokens.

    Args:
        chunk_function: `f(q, k, v, g=, beta=, initial_state=, output_final_state=, ...)`, affine in its state, with any
            value dim; see `ChunkFunction`. What `g` may be, above 0 too, is its own matter.
        q, k, v, g, beta: my tokens, `[batch, tokens, heads, ...]`.
        sp: the sharding.
        length, documents: as for `longspan.linear_attention`.
        initial_state: `[batch, value heads, key dim, value dim]`, equal on every rank; its gradient is my part.
        output_final_state: whether to return the state after the last token, equal on every rank.
        options: further arguments of the function.

    Returns:
        The output of my tokens, and the state or None.

    Raises:
        LongspanError: for tensors or results of the function whose shapes do not fit, for a function that fails on one
            rank, and for a state that is not finite: see `pass_states`.
    """
    check_sharding(sp)
    if not callable(chunk_function):
        raise LongspanError(f"`chunk_function` must be a function of q, k and v, got {describe(chunk_function)}")
    tokens = Tokens(q, k, v, g, beta)
    for name, x in zip(("v", "q", "k", "g", "beta"), (v, q, k, g, beta), strict=True):
        wanted = "[batch, tokens, heads, dim]" if name in "qkv" else "[batch, tokens, heads, ...]"
        fits = isinstance(x, Tensor) and x.dim() >= 3 + (name in "qkv") and x.shape[:2] == v.shape[:2]
        if not fits and (x is not None or name in "qkv"):
            raise LongspanError(f"`{name}` must be {wanted}, with the batch and tokens of v, got {describe(x)}")
    if q.shape != k.shape or 0 in (*q.shape, *v.shape) or v.shape[2] % q.shape[2]:
        raise LongspanError(
            f"q and k must have one shape, and heads that divide those of v, got q {tuple(q.shape)}, k "
            f"{tuple(k.shape)}, v {tuple(v.shape)}"
        )
    check_initial_state(tokens, initial_state)
    weights = {name: x for name, x in options.items() if isinstance(x, Tensor)}
    for name, x in weights.items():
        if x.shape[:2] == v.shape[:2]:
            raise LongspanError(
                f"`{name}` {tuple(x.shape)} has a value per token, and only q, k, v, g and beta are cut into "
                f"documents; merge it into one of these"
            )
    length, segments = read_documents(v, sp, length, documents)
    table = fragment_table(sp.layout, sp.rank, length, v.shape[0], segments)
    tokens = Tokens(q, k, depend(v, *weights.values()), g, beta)  # a rank without fragments: weights' gradients
    mixer, group = ChunkFunction(chunk_function, options), sp.group if sp.size > 1 else None
    return pass_states(mixer, tokens, table, group, initial_state=initial_state, return_state=output_final_state)


def check_initial_state(tokens: Tokens, initial_state: Tensor | None) -> None:
    """Raise for an initial state that does not fit the tokens."""
    wanted = (tokens.v.shape[0], *tokens.state_shape)
    if initial_state is None or (isinstance(initial_state, Tensor) and tuple(initial_state.shape) == wanted):
        return
    raise LongspanError(
        f"`initial_state` must be [batch, value heads, key dim, value dim], {wanted}, got {describe(initial_state)}"
    )
