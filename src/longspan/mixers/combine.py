"""Combine the states of runs by a tree, in fp64: log2(runs) steps, whatever TF32 is set to.

A run turns the state before it into `transition . before + added`, and so do two runs one after the other:

    transition = later.transition . earlier.transition       added = later.transition . earlier.added + later.added

A level of the tree combines all pairs of neighbours by two batched products. The backward goes down the same tree: the
earlier of a pair starts from the pair's state, the later one from the state after the earlier, and gradients pass
through the later one.

Shape suffixes: N runs in the order of `tree_order`, B batch, H heads, K key dim, V value dim, W = V + columns of the
transition.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longspan.mixers.fragments import FragmentTable


def state_before(summaries: Tensor, table: FragmentTable, run: int, V: int) -> Tensor:
    """Return the state `[B, H, K, V]` that enters a run, zero in rows where none does, in the dtype of the summaries.

    Args:
        summaries: `[ranks * slots, B, H, K, W]`; with W = V, without a transition, states are added.
        table: the runs.
        run: its number; the number of runs: return the state after all tokens.
        V: value dim.
    """
    path = _path(table, run, False, summaries.device)
    if summaries.shape[-1] == V:
        return _sum(summaries, path)
    if not len(path.places):
        return _zero_state(summaries[..., :V])
    added, transition = summaries.index_select(0, path.places).tensor_split([V], -1)
    if path.reaches is not None:
        added, transition = _where(path.reaches, added), _where(path.passes, transition)
    if path.skipped is not None:
        one = torch.eye(transition.shape[-2], transition.shape[-1], dtype=transition.dtype, device=transition.device)
        transition = _where(~path.skipped, transition, one if transition.shape[-1] > 1 else torch.ones_like(one))
    state: Tensor = _Combined.apply(added, transition)  # type: ignore[no-untyped-call]
    return state


def state_after(summaries: Tensor, table: FragmentTable, run: int) -> Tensor:
    """Return the sum of the states of later runs with tokens of the run's last document.

    `summaries` are the states of each run's first fragment, `[ranks * slots, B, H, K, V]`.
    """
    return _sum(summaries, _path(table, run, True, summaries.device))


class _Path(NamedTuple):
    """The runs whose states reach another run."""

    places: Tensor  # of their summaries, `[N]`
    reaches: Tensor | None  # rows in which a run's state reaches the other run, bool `[N, B]`; None: all
    passes: Tensor  # rows in which the state before the run does, too
    skipped: Tensor | None  # rows in which a run has no tokens; None: none


@functools.lru_cache(maxsize=64)
def _path(table: FragmentTable, run: int, later: bool, device: torch.device) -> _Path:
    rows = table.later(run) if later else table.earlier(run)
    filled = [row for row in rows if row]
    first = min((row.start for row in filled), default=run)
    runs = [first + i for i in tree_order(max((row.stop for row in filled), default=run) - first)]
    reaches = [[i in row for row in rows] for i in runs]
    skipped = [[i in row and not table.filled[i][b] for b, row in enumerate(rows)] for i in runs]

    def tensor(x: Any, dtype: torch.dtype = torch.bool) -> Tensor:
        return torch.tensor(x, dtype=dtype, device=device)

    return _Path(
        tensor([table.place(i) for i in runs], torch.int64),
        None if all(map(all, reaches)) else tensor(reaches),
        tensor([[i in row[1:] for row in rows] for i in runs]),
        tensor(skipped) if any(map(any, skipped)) else None,
    )


def tree_order(n: int) -> tuple[int, ...]:
    """Return runs 0 to n-1 in an order in which each level of the tree combines its first part with the rest.

    Item i of the first part and item i of the rest are neighbouring runs, and the results of a level are again in such
    an order. If n is odd, the last item of the first part has no partner.
    """
    if n < 2:
        return tuple(range(n))
    pairs = tree_order((n + 1) // 2)
    alone = pairs[-1] if n % 2 else n
    earlier = [2 * pair - (pair > alone) for pair in pairs]
    return (*earlier, *(i + 1 for i, pair in zip(earlier, pairs, strict=True) if pair != alone))


def _sum(states: Tensor, path: _Path) -> Tensor:
    if not len(path.places):
        return _zero_state(states)
    chosen = states.index_select(0, path.places)
    chosen = chosen if path.reaches is None else _where(path.reaches, chosen)
    return chosen.sum(0, dtype=torch.float64).to(states.dtype)


def _zero_state(states: Tensor) -> Tensor:
    return torch.zeros_like(states[0], memory_format=torch.contiguous_format)


def _where(flags_NB: Tensor, x: Tensor, otherwise: Tensor | float = 0.0) -> Tensor:
    return torch.where(flags_NB.view(*flags_NB.shape, *(1,) * (x.dim() - 2)), x, otherwise)


class _Combined(torch.autograd.Function):
    """Return the state `[B, H, K, V]` after all runs, from `added [N, B, H, K, V]` and transitions of W - V columns.

    Saves its inputs alone: the levels of the tree, in fp64, are several times as large.
    """

    @staticmethod
    def forward(ctx: Any, added: Tensor, transition: Tensor) -> Tensor:
        ctx.save_for_backward(added, transition)
        state = added
        for state, _ in _levels(added, transition):  # noqa: B007 (the last one)
            pass
        return state[0].to(added.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        levels = [*_levels(*ctx.saved_tensors)]
        factors, dtype = levels[0][1].shape[-1] == 1, grad.dtype
        grads = grad.double().unsqueeze(0)  # of the state after each
        before = torch.zeros_like(grads)
        levels.pop()
        while levels:
            added, transition = levels.pop()  # freed with its level
            split, pairs = (len(added) + 1) // 2, len(added) // 2
            between = _advance(transition[:pairs], before[:pairs], added[:pairs])
            through = _advance(_transposed(transition[split:]), grads[:pairs])
            before = torch.cat([before, between])
            grads = torch.cat([through, grads[pairs:], grads[:pairs]])
            del added, transition, between, through
        dtransition = torch.einsum("nbhkv,nbhkv->nbhk", grads, before).unsqueeze(-1) if factors else grads @ before.mT
        del before
        return grads.to(dtype), dtransition.to(dtype)


def _levels(added: Tensor, transition: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield `added` and `transition` of each level of the tree, all but the first in fp64.

    The transition of the last level is unused.
    """
    yield added, transition
    while len(added) > 1:
        split, pairs = (len(added) + 1) // 2, len(added) // 2
        later = transition[split:].double()
        combined = _advance(later, added[:pairs], added[split:])
        if split > 1:
            transitions = _advance(later, transition[:pairs])
            alone = transition[pairs:split].double()
            transition = torch.cat([transitions, alone]) if split > pairs else transitions
        added = torch.cat([combined, added[pairs:split].double()]) if split > pairs else combined
        yield added, transition


def _advance(transition: Tensor, state: Tensor, added: Tensor | None = None) -> Tensor:
    """Return `transition . state + added` in fp64."""
    transition, state, added = transition.double(), state.double(), None if added is None else added.double()
    if transition.shape[-1] == 1:
        return transition * state if added is None else torch.addcmul(added, transition, state)
    flat = transition.flatten(0, 2), state.flatten(0, 2)
    out = torch.bmm(*flat) if added is None else torch.baddbmm(added.flatten(0, 2), *flat)
    return out.view_as(state)


def _transposed(transition: Tensor) -> Tensor:
    return transition if transition.shape[-1] == 1 else transition.mT
