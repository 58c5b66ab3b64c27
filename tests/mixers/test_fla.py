"""Mixers of flash-linear-attention by stand-ins in plain torch: no kernel of the package has run here.

Those of the delta rule over ranks follow fla-core 0.6 (`fla/ops/cp/context.py` and `chunk_delta_h.py`).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import longspan
from longspan.comm.collectives import all_gather
from longspan.comm.mesh import group_name
from longspan.compat import friends_api
from longspan.compat.friends_api import fla_function, fla_over_ranks
from longspan.hf.forward import mixer_functions
from longspan.mixers import linear_attention
from longspan.mixers.fla import DecayFunction, DeltaRuleFunction
from longspan.mixers.fragments import fragment_table
from longspan.mixers.mixer import Tokens
from longspan.mixers.plain_torch import LinearAttention
from longspan.mixers.state_passing import pass_states
from tests.mixers.recurrence import LIMIT, Case, make, relative_errors, run, truth_of
from tests.pool import RankPool


def build_cp_context(
    cu_seqlens: Tensor, group: Any, cu_seqlens_cpu: Tensor, layout: str = "contiguous"
) -> SimpleNamespace:
    """Return what a rank holds: of each of its parts the ends of its sequences, and its place in the chain of parts."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    places = [rank] if layout == "contiguous" else [rank, 2 * ranks - 1 - rank]
    assert torch.equal(cu_seqlens, cu_seqlens_cpu)
    sequences = [*pairwise(cu_seqlens.tolist())]
    size, rest = divmod(sequences[-1][1], len(places) * ranks)
    assert size and not rest
    parts = []
    for place in places:
        start, stop = size * place, size * (place + 1)
        inside = [(a, b) for a, b in sequences if a < stop and b > start]
        ends = sorted({min(max(x, start), stop) - start for sequence in inside for x in sequence})
        before, after = place - inside[0][0] // size, (inside[-1][1] - 1) // size - place
        parts.append(SimpleNamespace(place=place, ends=ends, before=before, after=after))
    return SimpleNamespace(group=group, layout=layout, size=size, parts=parts)


def chunk_any(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Any = None, scale: float | None = None, initial_state: Any = None,
    output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False, cp_context: Any = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    CALLS.append((v.shape[3], cp_context is not None))
    if use_qk_l2norm_in_kernel:
        q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    tokens = Tokens(q * (q.shape[3] ** -0.5 if scale is None else scale), k, v, g, beta)
    if cp_context is None:
        local = LinearAttention().local(tokens, initial_state, False)
        return local.finish(None), local.state
    assert len(q) == 1 and initial_state is None and not output_final_state
    return _over_ranks(tokens, cp_context), None


CALLS: list[tuple[int, bool]] = []
"""Value dims of the calls, and whether they were over ranks."""


def _over_ranks(tokens: Tokens, c: SimpleNamespace) -> Tensor:
    parts = []
    for i, part in enumerate(c.parts):
        mine = tokens.part(slice(0, 1), i * c.size, (i + 1) * c.size)
        cuts = (mine.part(slice(0, 1), *ends) for ends in pairwise(part.ends))
        parts.append([LinearAttention().local(cut, None, True) for cut in cuts])
    summaries = [torch.cat([locals_[-1].state, locals_[-1].transition], -1) for locals_ in parts]  # type: ignore[list-item]
    sent = torch.stack([x if part.after else 0 * x for x, part in zip(summaries, c.parts, strict=True)])
    gathered = all_gather(sent, group_name(c.group)).unflatten(0, (-1, len(parts)))
    chain = torch.cat([gathered[:, 0], *([gathered[:, 1].flip(0)] if len(parts) > 1 else [])])
    outs = []
    for part, (first, *others) in zip(c.parts, parts, strict=True):
        state = torch.zeros_like(first.state)
        for summary in chain[part.place - part.before : part.place]:
            added, transition = summary.tensor_split([state.shape[-1]], -1)
            state = transition @ state + added
        outs += [first.finish(state if part.before else None), *(one.finish(None) for one in others)]
    return torch.cat(outs, 1) + gathered[:0].sum()


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Pretend that the package is installed, and that CPU tensors are on a GPU."""
    names = (("simple_gla", "simple_gla"), ("gla", "gla"), ("kda", "kda"), ("gated_delta_rule", "gated_delta_rule"))
    modules: dict[str, Any] = {f"fla.ops.{name}": SimpleNamespace(**{f"chunk_{f}": chunk_any}) for name, f in names}
    modules["fla.ops.cp"] = SimpleNamespace(build_cp_context=build_cp_context)

    def mixer(tokens: Tokens, causal: bool = True) -> Any:
        per_key = tokens.decay is not None and tokens.decay.dim() == 4
        function = fla_function(per_key, tokens.beta is not None)
        assert function is not None
        if tokens.beta is None:
            return DecayFunction(function)
        return DeltaRuleFunction(function, exchanging=fla_over_ranks(per_key, scale=1.0))

    with (
        mock.patch.dict(sys.modules, modules),
        mock.patch.object(friends_api, "_is_ampere", return_value=True),
        mock.patch.object(linear_attention, "default_mixer", mixer),
        mock.patch.object(mixer_functions, "default_mixer", mixer),
    ):
        CALLS.clear()
        yield


def _found(cases: list[Case], ring: int, layout: str) -> tuple[list[dict[str, Tensor]], list[tuple[int, bool]]]:
    sp = longspan.SequenceSharding(longspan.init_mesh(ring=ring, ulysses=4 // ring), layout)
    with installed():
        found = [run(case, sp) for case in cases]
    return found, list(CALLS)


DOCUMENTS = tuple(
    (row,)
    for row in (
        (0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 3, 3, 3, 3, 3, 3, 3, 3, 3, 4),
        (-1, -1, 0, *(1,) * 18, -1, -1),
        (*(0,) * 6, *(1,) * 6, *(2,) * 11),  # borders where runs end
        (*(0,) * 3, *(-1,) * 20),  # ranks of padding alone
    )
)
DELTA = [
    Case(n=24, batch=1, decay="head", beta=True),
    Case(n=21, batch=1, decay="key", beta=True, value_heads=4),
    *(Case(n=23, batch=1, decay="head", beta=True, documents=documents) for documents in DOCUMENTS),
]


@pytest.mark.parametrize(("ring", "layout"), [(1, "contiguous"), (4, "contiguous"), (4, "zigzag")])
def test_the_delta_rule_over_ranks(pool4: RankPool, ring: int, layout: str) -> None:
    for results, calls in pool4.run(_found, DELTA, ring, layout):
        assert calls == [(3, True)] * len(DELTA)
        for case, found in zip(DELTA, results, strict=True):
            errors = relative_errors(found, truth_of(case))
            assert max(errors.values()) <= LIMIT[case.dtype], (case, errors)


def test_other_layouts_rows_and_states_widen_the_values(pool4: RankPool) -> None:
    wide = [Case(n=24, decay="head", beta=True), Case(n=24, batch=1, beta=True, decay="head", state=True)]
    for cases, ring, layout in ((DELTA[:1], 2, "zigzag"), (wide, 4, "contiguous")):
        for rank, (results, calls) in enumerate(pool4.run(_found, cases, ring, layout)):
            assert not any(over_ranks for _, over_ranks in calls) and (rank == 0 or (7, False) in calls)
            for case, found in zip(cases, results, strict=True):
                assert max(relative_errors(found, truth_of(case)).values()) <= LIMIT[case.dtype]


@pytest.mark.parametrize("decay", ["none", "head", "key"])
def test_without_a_delta_rule_no_values_are_widened(pool4: RankPool, decay: str) -> None:
    cases = [
        Case(n=25, decay=decay, value_heads=4, state=True),
        Case(n=23, decay=decay, batch=1, documents=DOCUMENTS[0]),
    ]
    for results, calls in pool4.run(_found, cases, 4, "zigzag"):
        assert {dim for dim, _ in calls} == {3}
        for case, found in zip(cases, results, strict=True):
            errors = relative_errors(found, truth_of(case))
            assert max(errors.values()) <= LIMIT[case.dtype], (case, errors)


def _layer() -> tuple[list[Tensor], list[tuple[int, bool]]]:
    """Return output and gradients of a layer's call, by the package's function over ranks and by plain torch."""
    sp, x = longspan.SequenceSharding(longspan.init_mesh(ring=4)), make(Case(n=24, batch=1, decay="head", beta=True))
    table = fragment_table(sp.layout, sp.rank, 24, 1, None)
    layer: Any = SimpleNamespace(
        cached=None, run_from_state=lambda mixer, tokens: pass_states(mixer, tokens, table, sp.group)
    )
    found: list[Tensor] = []
    for context in (installed(), contextlib.nullcontext()):
        leaves = [sp.shard(x[name]).clone().requires_grad_() for name in ("q", "k", "v", "decay", "beta")]
        with context:
            out = mixer_functions._gated_delta_rule(layer, chunk_any, *leaves, use_qk_l2norm_in_kernel=True)[0]
        found += [out.detach(), *torch.autograd.grad(out, leaves, sp.shard(x["dout"]))]
    return found, list(CALLS)


def test_a_layer_runs_over_ranks(pool4: RankPool) -> None:
    for found, calls in pool4.run(_layer):
        assert calls == [(3, True)]
        for mine, plain in zip(found[:6], found[6:], strict=True):
            torch.testing.assert_close(mine, plain, rtol=1e-5, atol=1e-6)
