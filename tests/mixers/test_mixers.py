"""Linear attention on real ranks against the recurrence in fp64: output, final state and every gradient."""

from __future__ import annotations

import dataclasses
import re
import sys
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import longspan
from longspan.comm.mesh import MeshGroups
from longspan.compat.friends_api import fla_function
from longspan.core.errors import LongspanError
from longspan.mixers.mixer import ChunkFunction, Tokens
from longspan.mixers.plain_torch import LinearAttention
from longspan.mixers.state_passing import state_passing
from tests.choose import confirming
from tests.counting import count_sent
from tests.mixers.recurrence import LIMIT, Case, ids_of, leaves_of, make, relative_errors, run, truth_of
from tests.pool import RankPool

ROWS = ((0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 3, 3, 3, 3, 3, 3, 3, 3, 3, 4), (-1, -1, 0, *(1,) * 18, -1, -1))
"""Documents of 23 tokens: short and long ones, and a row that is padded left and right."""

KINDS = [
    Case(n=24),
    Case(n=25, decay="head", state=True),
    Case(n=23, decay="key", documents=ROWS),
    Case(n=23, decay="strong", beta=True, documents=ROWS, state=True, batch=4),
    Case(n=24, decay="head", documents=((0,) * 6 + (1,) * 12 + (2,) * 6,), state=True),  # borders where runs end
    Case(n=23, beta=True, value_heads=4, state=True),
    Case(n=30, decay="head", beta=True, state=True),
    Case(n=5, decay="key", beta=True, batch=1),
    Case(n=23, causal=False, documents=ROWS, state=True),
    Case(n=150, decay="strong", dim=8, batch=1),
    Case(n=150, decay="key", beta=True, dim=8, batch=1),
    Case(n=300, decay="head", zero="v", batch=1),  # several chunks on each of 4 ranks
    Case(n=300, decay="head", beta=True, zero="beta", batch=1),
]
KINDS += [dataclasses.replace(case, dtype=torch.float64) for case in KINDS[2:6]]
KINDS += [Case(n=25, decay="key", beta=True, state=True, dtype=torch.bfloat16)]


def _runs(cases: list[Case], ring: int, layout: str, more: dict[str, Any]) -> list[dict[str, torch.Tensor]] | None:
    mesh = longspan.init_mesh(ring=ring, ulysses=dist.get_world_size() // ring)
    sp = longspan.SequenceSharding(mesh, layout)
    found = [run(case, sp, **more) for case in cases]
    return found if dist.get_rank() == dist.get_world_size() - 1 else None


def check(pool: RankPool, cases: list[Case], ring: int, layout: str = "zigzag", **more: Any) -> None:
    for case, found in zip(cases, pool.run(_runs, cases, ring, layout, more)[-1], strict=True):
        errors = relative_errors(found, truth_of(case))
        assert max(errors.values()) <= LIMIT[case.dtype], (case, errors)


MESHES = [(2, 2, "contiguous"), (2, 2, "zigzag"), (4, 4, "contiguous"), (4, 4, "zigzag"), (4, 2, "zigzag"), (4, 1, "")]


@pytest.mark.parametrize(("world", "ring", "layout"), [*MESHES[1:], *confirming(MESHES[:1])])
def test_exact_on_every_mesh(get_pool: Any, world: int, ring: int, layout: str) -> None:
    check(get_pool(world), KINDS, ring, layout or "auto")


class _Written(TorchDispatchMode):
    """Counts the elements of all results."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self.elements += sum(x.numel() for x in torch.utils._pytree.tree_leaves(found) if isinstance(x, torch.Tensor))
        return found


@pytest.mark.parametrize("beta", [False, True])
def test_the_work_grows_as_the_length(beta: bool) -> None:
    written = []
    for n in (1024, 4096):
        case = Case(n=n, decay="head", beta=beta, batch=1, heads=1, value_heads=1, dim=16, v_dim=16)
        with _Written() as mode:
            run(case, longspan.SequenceSharding(MeshGroups("cpu")))
        written.append(mode.elements)
    assert written[1] <= 4 * written[0]


def test_one_device() -> None:
    sp = longspan.SequenceSharding(MeshGroups("cpu"))
    for case in KINDS:
        errors = relative_errors(run(case, sp), truth_of(case))
        assert max(errors.values()) <= LIMIT[case.dtype], (case, errors)


drawn = st.builds(
    lambda heads, group, **rest: Case(heads=heads, value_heads=heads * group, **rest),
    heads=st.integers(1, 3),
    group=st.integers(1, 2),
    n=st.integers(1, 40),
    batch=st.integers(1, 3),
    dim=st.integers(1, 5),
    v_dim=st.integers(1, 5),
    decay=st.sampled_from(["none", "head", "key", "strong"]),
    beta=st.booleans(),
    state=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=st.integers(0, 3),
)


@settings(max_examples=12)
@given(case=drawn, mesh=st.sampled_from(MESHES), docs=st.data())
def test_exact_for_drawn_shapes(get_pool: Any, case: Case, mesh: tuple[int, int, str], docs: Any) -> None:
    rows = docs.draw(st.none() | st.lists(st.lists(st.integers(0, case.n), max_size=4), min_size=1, max_size=2))
    ids = None if rows is None else tuple(tuple(sum(i >= c for c in row) - 1 for i in range(case.n)) for row in rows)
    assume(ids is None or max(map(max, ids)) >= 0)  # of padding alone the oracle has no gradient
    causal = case.decay != "none" or case.beta or docs.draw(st.booleans())
    case = dataclasses.replace(case, documents=ids, causal=causal)
    check(get_pool(mesh[0]), [case], mesh[1], mesh[2] or "auto")


# ---------------------------------------------------------------------------------------------------------------------
# What is sent.


def _sent(case: Case, ring: int) -> list[tuple[str, int]]:
    sp = longspan.SequenceSharding(longspan.init_mesh(ring=ring, ulysses=dist.get_world_size() // ring))
    x = make(case)
    names = [name for name in ("q", "k", "v", "decay", "beta") if name in x]
    local = {name: sp.shard(x[name]).requires_grad_() for name in names}
    with count_sent() as log:
        out = longspan.linear_attention(**local, sp=sp, length=case.n, causal=case.causal)
        forward = len(log)
        assert isinstance(out, torch.Tensor)
        out.backward(torch.ones_like(out))
    assert forward * 2 == len(log)
    return [(entry.op, entry.bytes) for entry in log if entry.bytes]


@pytest.mark.parametrize("n", [16, 48])
@pytest.mark.parametrize(("decay", "beta", "columns"), [("none", False, 0), ("key", False, 1), ("head", True, 4)])
def test_one_all_gather_sends_the_states_whatever_the_length(
    pool4: RankPool, n: int, decay: str, beta: bool, columns: int
) -> None:
    case = Case(n=n, decay=decay, beta=beta)
    for ring, slots in ((4, 2), (2, 1), (1, 1)):  # zigzag gives each rank of a ring two runs
        size = 3 * slots * 4 * case.batch * case.value_heads * case.dim * (case.v_dim + columns)
        for log in pool4.run(_sent, case, ring):
            assert log == [("all_gather", size), ("reduce_scatter", size)]


def test_lasp2_sends_one_state_in_both_directions(pool4: RankPool) -> None:
    for case in (Case(), Case(causal=False)):
        state = 4 * case.batch * case.value_heads * case.dim * case.v_dim
        for log in pool4.run(_sent, case, 1):
            assert log == [("all_gather", 3 * state), ("reduce_scatter", 3 * state)]


# ---------------------------------------------------------------------------------------------------------------------
# Gradients of some inputs: the backward's collective must run on all ranks or on none.


def _gradients_of(names: tuple[str, ...]) -> dict[str, torch.Tensor]:
    case = Case(n=9, decay="head", beta=True, state=True)
    sp = longspan.SequenceSharding(longspan.init_mesh(ring=4))
    x = make(case)
    leaves = {name: x[name].clone().requires_grad_(name in names) for name in x}
    local = {name: sp.shard(leaves[name]) for name in ("q", "k", "v", "decay", "beta")}
    out = longspan.linear_attention(**local, sp=sp, length=case.n, initial_state=leaves["initial_state"])
    assert isinstance(out, torch.Tensor)
    grads = torch.autograd.grad((out * sp.shard(x["dout"])).sum(), [leaves[name] for name in names])
    for grad in grads:
        dist.all_reduce(grad)
    return dict(zip(names, grads, strict=True))


def test_gradients_of_some_inputs(pool4: RankPool) -> None:
    everything = pool4.run(_gradients_of, ("q", "k", "v", "decay", "beta", "initial_state"))[0]
    for names in (("initial_state",), ("q",), ("decay", "q")):
        for found in pool4.run(_gradients_of, names):
            assert all(torch.equal(grad, everything[name]) for name, grad in found.items())


def _compiled(backend: str | None) -> list[torch.Tensor]:
    sp = longspan.SequenceSharding(longspan.init_mesh(ring=2))
    x = make(Case(decay="head", beta=True))
    leaves = {name: sp.shard(x[name]).clone().requires_grad_() for name in ("q", "k", "v", "decay", "beta")}

    def layer(**tokens: torch.Tensor) -> torch.Tensor:
        out = longspan.linear_attention(**{**tokens, "v": tokens["v"].sin()}, sp=sp)  # type: ignore[arg-type]
        assert isinstance(out, torch.Tensor)
        return out.cos()

    run_layer = layer if backend is None else torch.compile(layer, backend=backend)
    run_layer(**leaves).sum().backward()
    return [leaf.grad for leaf in leaves.values() if leaf.grad is not None]


def test_compiled_gradients_are_the_eager_ones(pool2: RankPool) -> None:
    for eager, compiled in zip(pool2.run(_compiled, None), pool2.run(_compiled, "aot_eager"), strict=True):
        assert len(eager) == len(compiled) == 5 and all(map(torch.equal, eager, compiled))


# ---------------------------------------------------------------------------------------------------------------------
# Refused on every rank with the same text.


def _message(case: Case, changes: dict[str, Any], at: dict[str, tuple[int, float]], more: dict[str, Any]) -> str:
    """Return the error. `at`: on which rank an input has which value."""
    sp = longspan.SequenceSharding(longspan.init_mesh(ring=2))
    local = {name: sp.shard(x) for name, x in make(case).items() if name in ("q", "k", "v", "decay", "beta")}
    for name, (rank, value) in at.items():
        if sp.rank == rank:
            local[name] = local[name].clone()
            local[name][0, 0, 0] = value
    local |= {name: torch.zeros(shape) for name, shape in changes.items()}
    with count_sent() as log, pytest.raises(LongspanError) as error:
        longspan.linear_attention(**local, sp=sp, **more)
    assert at or not log
    return str(error.value)


GATED = Case(n=8, decay="head", beta=True)
BAD: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any], str]] = [
    ({"q": (2, 4, 2)}, {}, {}, r"\[batch, tokens, heads, dim\], got q \(2, 4, 2\)"),
    ({"v": (2, 4, 3, 3)}, {}, {}, r"value heads that the heads of q and k divide, got q .* v \(2, 4, 3, 3\)"),
    ({"k": (2, 4, 2, 5)}, {}, {}, "q and k of one shape"),
    ({"beta": (2, 4)}, {}, {}, r"`beta` needs one number per token and value head, \(2, 4, 2\), got \(2, 4\)"),
    ({"decay": (2, 4, 2, 3)}, {}, {}, r"`decay` needs .*, \(2, 4, 2\), or per key dim too, \(2, 4, 2, 4\), got"),
    ({}, {}, {"causal": False}, "causal=False: a decay and a delta rule"),
    ({}, {}, {"length": 20}, "length=20 over 2 ranks gives 10 tokens to each, the tensors have 4"),
    ({}, {}, {"initial_state": torch.zeros(2, 4, 3)}, r"`initial_state` must be .* \(2, 2, 4, 3\), got .*\(2, 4, 3\)"),
    ({}, {}, {"documents": torch.zeros(2, 7, dtype=torch.int64)}, r"shape \(2, 7\), it needs an id for .*\(2, 8\)"),
    ({}, {}, {"documents": torch.tensor([[0, 0, 1, 1, 0, 0, 2, 2]] * 2)}, "id 0 comes back after another document"),
    ({}, {"decay": (1, 0.5)}, {}, "rank 1 cannot pass its state: `decay` .* at most 0, its largest value is 0.5"),
    ({}, {"v": (1, torch.nan)}, {}, "rank 1 cannot pass its state: its state is not finite"),
    ({}, {"beta": (0, torch.inf)}, {}, "rank 0 cannot pass its state: its state is not finite"),
]  # fmt: skip


def _messages() -> list[str]:
    return [_message(GATED, changes, at, more) for changes, at, more, _ in BAD]


def test_all_ranks_refuse_with_the_same_text(pool2: RankPool) -> None:
    for case, *messages in zip(BAD, *pool2.run(_messages), strict=True):
        assert len(set(messages)) == 1 and re.search(case[3], messages[0]), (case, messages)


def _fails_with(kind: str) -> str:
    """Return the error of a chunk function that fails on one rank."""

    def function(q: Any, k: Any, v: Any, **states: Any) -> Any:
        out = v + q.sum() + k.sum()
        if kind == "raises" and dist.get_rank() == 1:
            raise RuntimeError("out of memory")
        if kind == "fixed dim" and v.shape[3] != 3:
            raise LongspanError("it needs a value dim of 3")
        return out, v.new_zeros(v.shape[0], 2, 5 if kind == "state" else 4, v.shape[3])

    sp, x = longspan.SequenceSharding(longspan.init_mesh(ulysses=2)), make(Case(n=8))
    q, k, v = (sp.shard(x[name]) for name in "qkv")
    # The second rank has padding only, and does not call the function.
    documents = -(torch.arange(8) // 4).expand(2, -1) if kind == "state" else None
    with pytest.raises((LongspanError, RuntimeError)) as error:
        state_passing(function, q, k, v, sp, documents=documents)
    return str(error.value)


def test_an_option_with_a_value_per_token_is_refused() -> None:
    sp, x = longspan.SequenceSharding(longspan.init_mesh()), make(Case(n=8))
    with pytest.raises(LongspanError, match=r"`gate` \(2, 8, 2\) has a value per token, and only q, k, v, g and beta"):
        state_passing(_sums, x["q"], x["k"], x["v"], sp, gate=torch.ones(2, 8, 2))


def test_a_function_that_fails_on_one_rank_is_reported_by_all(pool2: RankPool) -> None:
    text = "rank 1 cannot pass its state: RuntimeError: out of memory"
    assert pool2.run(_fails_with, "raises") == [text, "out of memory"]
    assert pool2.run(_fails_with, "fixed dim") == ["rank 1 cannot pass its state: it needs a value dim of 3"] * 2
    text = r"rank 0 cannot pass its state: function must return .* it returned \(2, 4, 2, 3\) and \(2, 2, 5, 3\)"
    assert all(re.fullmatch(text, found) for found in pool2.run(_fails_with, "state"))


def test_one_device_refuses_a_decay_above_zero() -> None:
    sp = longspan.SequenceSharding(MeshGroups("cpu"))
    x = torch.ones(1, 2, 1, 1)
    with pytest.raises(LongspanError, match="`decay` .* at most 0, its largest value is 1;"):
        longspan.linear_attention(x, x, x, sp, decay=x)


# ---------------------------------------------------------------------------------------------------------------------
# A model's own chunk function, and flash-linear-attention's by their arguments.


def _own_function(case: Case, ring: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return output, final state and gradients of transformers' gated DeltaNet: sharded, and on one device."""
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    x, ids = make(case), ids_of(case)
    found = []
    for sp in (longspan.SequenceSharding(longspan.init_mesh(ring=ring, ulysses=4 // ring)), None):
        leaves = leaves_of(x)
        options = {"use_qk_l2norm_in_kernel": True, "initial_state": leaves["initial_state"]}
        part = leaves if sp is None else {name: sp.shard(leaf) for name, leaf in leaves.items()}
        q, k, v, g, beta = (part[name] for name in ("q", "k", "v", "decay", "beta"))
        if sp is not None:
            out, final = state_passing(
                torch_chunk_gated_delta_rule, q, k, v, sp, g=g, beta=beta, length=case.n, documents=ids,
                output_final_state=True, **options,
            )  # fmt: skip
            assert final is not None
            loss = (out * sp.shard(x["dout"])).sum() + (final * x["dfinal"]).sum() / sp.size
        else:
            outs, state = [], leaves["initial_state"]
            cuts = [0, case.n] if ids is None else [0, *(ids[0].diff().nonzero().flatten() + 1).tolist(), case.n]
            for number, (a, b) in enumerate(pairwise(cuts)):
                options["initial_state"] = state if number == 0 else None
                out, state = torch_chunk_gated_delta_rule(
                    q[:, a:b], k[:, a:b], v[:, a:b], g=g[:, a:b], beta=beta[:, a:b], output_final_state=True, **options
                )
                outs.append(out)
            out, final = torch.cat(outs, 1), state
            loss = (out * x["dout"]).sum() + (final * x["dfinal"]).sum()
        loss.backward()
        found.append({"final": final.detach(), "out": out.detach()})
        for name, leaf in leaves.items():
            assert leaf.grad is not None
            if sp is not None:
                dist.all_reduce(leaf.grad)
            found[-1][f"d{name}"] = leaf.grad
        if sp is not None:
            found[-1]["out"] = sp.gather(out.detach(), length=case.n)
    return found[0], found[1]


@pytest.mark.parametrize("ring", [1, 4])
def test_a_models_own_chunk_function(pool4: RankPool, ring: int) -> None:
    case = Case(n=70, decay="head", beta=True, state=True, dim=8)
    documents = (tuple(sum(i >= c for c in (3, 20, 60)) for i in range(70)),)
    for each in (case, dataclasses.replace(case, documents=documents)):
        for sharded, alone in pool4.run(_own_function, each, ring):
            errors = relative_errors(sharded, {name: x.double() for name, x in alone.items()})
            assert max(errors.values()) <= 1e-5, errors


@pytest.mark.parametrize(
    ("decay", "beta"), [("none", False), ("head", False), ("key", False), ("head", True), ("key", True)]
)
def test_flash_linear_attention_is_called_with_its_arguments(
    monkeypatch: pytest.MonkeyPatch, decay: str, beta: bool
) -> None:
    """A stand-in with the package's signature, in plain torch: no kernel of the package has run here."""

    def chunk_any(q: Any, k: Any, v: Any, g: Any, beta: Any = None, *, scale: float, **states: Any) -> Any:
        assert scale == 1.0 and states["output_final_state"] is True
        part, state = Tokens(q, k, v, g, beta), states["initial_state"]
        local = LinearAttention().local(part, state, False)
        return local.finish(None), local.state

    for name, function in (("simple_gla", "simple_gla"), ("gla", "gla"), ("kda", "kda"), ("gated_delta_rule",) * 2):
        monkeypatch.setitem(sys.modules, f"fla.ops.{name}", SimpleNamespace(**{f"chunk_{function}": chunk_any}))
    case = Case(decay=decay, beta=beta, value_heads=4, state=True)
    x = make(case)
    function = fla_function(decay == "key", beta)
    assert function is not None
    tokens = Tokens(x["q"], x["k"], x["v"], x.get("decay"), x.get("beta"))
    local = ChunkFunction(function).local(tokens, x["initial_state"], False)
    found = {"out": local.finish(None), "final": local.state}
    assert max(relative_errors(found, {name: truth_of(case)[name] for name in found}).values()) <= 1e-5


def test_without_flash_linear_attention_torch_computes_it() -> None:
    assert fla_function(True, True) is None


# ---------------------------------------------------------------------------------------------------------------------
# Activation checkpoints, and gradients of gradients.


def _sums(q: Any, k: Any, v: Any, initial_state: Any = None, **_: Any) -> Any:
    """Return plain linear attention of a fragment, as a model's own chunk function."""
    before = torch.zeros_like(k[:, 0, ..., None] * v[:, 0, :, None]) if initial_state is None else initial_state
    states = before.unsqueeze(1) + (k.unsqueeze(-1) * v.unsqueeze(-2)).cumsum(1)
    return (q.unsqueeze(-2) @ states).squeeze(-2), states[:, -1]


def _in_a_checkpoint(mine: bool, documents: torch.Tensor | None) -> None:
    """Nothing after the layer saves a tensor, so that only the layer itself makes every rank recompute the exchange."""
    sp = longspan.SequenceSharding(longspan.init_mesh(ring=2), "contiguous")
    x = make(Case(n=8))
    options: dict[str, Any] = {"sp": sp, "documents": documents}
    grads = []

    def layer(*qkv: torch.Tensor) -> Any:
        return state_passing(_sums, *qkv, **options)[0] if mine else longspan.linear_attention(*qkv, **options)

    for checkpointed in (True, False):
        leaves = [sp.shard(x[name]).clone().requires_grad_() for name in "qkv"]
        out = checkpoint(layer, *leaves, use_reentrant=False) if checkpointed else layer(*leaves)
        out.sum().backward()
        grads.append([leaf.grad for leaf in leaves])
    assert all(map(torch.equal, *grads))


@pytest.mark.parametrize("padded", [False, True])
def test_every_rank_recomputes_the_exchange_of_a_checkpoint(pool2: RankPool, padded: bool) -> None:
    documents = -(torch.arange(8) // 4).expand(2, -1) if padded else None  # the second rank has padding only
    for mine in (True, False):
        pool2.run(_in_a_checkpoint, mine, documents, timeout=20)


def _twice_differentiated() -> None:
    sp, x = longspan.SequenceSharding(longspan.init_mesh(ring=2)), make(Case(n=8, decay="head"))
    local = {name: sp.shard(x[name]).clone().requires_grad_() for name in ("q", "k", "v", "decay")}
    out = longspan.linear_attention(**local, sp=sp)
    assert isinstance(out, torch.Tensor)
    grads = torch.autograd.grad(out.square().sum(), [*local.values()], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        sum(grad.square().sum() for grad in grads).backward()  # type: ignore[union-attr]


def test_gradients_of_gradients_are_refused(pool2: RankPool) -> None:
    """Transitions are computed without a graph: a second derivative would lack them."""
    pool2.run(_twice_differentiated, timeout=20)
