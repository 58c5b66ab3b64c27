"""Plans execute what a call executes and are refused for other tensors; custom masks and kernels; the path of q."""

from __future__ import annotations

import cProfile
import itertools
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import longspan
from longspan.attn.kernels import tiled
from longspan.attn.prepare import AttentionPlan
from longspan.core.errors import LongspanError
from longspan.hf.forward import attention
from tests.attn.attention import CASES, one_device, run
from tests.attn.attention import sharding as sharding_of
from tests.fakes import fake_world
from tests.models import batch, build
from tests.oracle import errors, make, options, truth_of
from tests.pool import RankPool
from tests.tolerance import MARGIN


def _tensors(n: int = 24, grad: bool = True) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(2, n, heads, 8, generator=draw).requires_grad_(grad) for heads in (4, 2, 2)]


# --- a plan does what a call does


def _by_plan(names: list[str], ring: int) -> dict[str, bool]:
    """Whether output and gradients of a plan, used twice, equal those of a call bit for bit."""
    sp = sharding_of(dist.get_world_size() // ring, ring)
    out = {}
    for name in names:
        case = CASES[name]
        x = make(case)
        given = options(case, x)
        of_layer = {key: given.pop(key) for key in ("softcap", "alibi", "bias", "scale") if key in given}
        if "sinks" in x:
            of_layer["sinks"] = x["sinks"]
        q, k, v = (sp.shard(x[key]).clone().requires_grad_() for key in "qkv")
        plan = longspan.prepare_attention(q, k, v, sp, **given, **of_layer)
        runs = [longspan.attention(q, k, v, sp, plan=plan, **of_layer) for _ in range(2)]
        runs.append(longspan.attention(q, k, v, sp, **given, **of_layer))
        grads = [torch.autograd.grad(run.square().sum(), [q, k, v]) for run in runs]
        same = all(torch.equal(run, runs[0]) for run in runs)
        out[name] = same and all(torch.equal(a, b) for grad in grads for a, b in zip(grad, grads[0], strict=True))
    return out


@pytest.mark.parametrize("ring", [1, 2])
def test_a_plan_does_what_a_call_does(pool2: RankPool, ring: int) -> None:
    names = ["window", "documents and padding", "chunks", "prefix", "sinks", "alibi", "a mask function", "softcap"]
    for found in pool2.run(_by_plan, names, ring):
        assert all(found.values()), found


def test_layers_of_one_kind_share_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[AttentionPlan] = []

    def counted(*args: Any, **more: Any) -> AttentionPlan:
        made.append(original(*args, **more))
        return made[-1]

    original = attention.prepare
    monkeypatch.setattr(attention, "prepare", counted)
    model = longspan.parallelize(
        build("Gemma3Text", num_hidden_layers=4, layer_types=["sliding_attention"] * 3 + ["full_attention"]),
        one_device(),
    )
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    first, second = model(**batch()), model(**batch(seed=2, n=17))
    (first.loss + second.loss).backward()  # layers run again: with the plans of their own batch
    assert len(made) == 4  # two kinds of layers, two batches
    assert {plan.shapes.q[1] for plan in made} == {21, 17}


# --- refusals


def test_a_plan_is_refused_for_other_tensors() -> None:
    sp, (q, k, v) = one_device(), _tensors()
    plan = longspan.prepare_attention(q, k, v, sp, window=5)
    wrong: list[tuple[list[Tensor], dict[str, Any], str]] = [
        (_tensors(23), {}, r"made for q \(2, 24, 4, 8\).* used with q \(2, 23, 4, 8\)"),
        ([x.double() for x in (q, k, v)], {}, "float32 on cpu, it is used with .*float64"),
        ([q, k, v], {"softcap": 3.0}, "another softcap"),
        ([q, k, v], {"sinks": torch.zeros(4), "alibi": torch.zeros(4)}, "another sinks and alibi"),
        ([q, k, v], {"window": 5}, "a plan contains window;"),
        ([q, k, v], {"causal": False, "kernel": "sdpa"}, "a plan contains causal, kernel;"),
        ([q, k, v[0]], {}, "four dimensions each"),
    ]
    for tensors, more, text in wrong:
        with pytest.raises(LongspanError, match=text):
            longspan.attention(*tensors, sp, plan=plan, **more)
    with pytest.raises(LongspanError, match="'fast' is no plan; make one with longspan.prepare_attention"):
        longspan.attention(q, k, v, sp, plan="fast")  # type: ignore[arg-type]
    without = longspan.prepare_attention(*_tensors(grad=False), sp)
    with pytest.raises(LongspanError, match="made without gradients"):
        longspan.attention(q, k, v, sp, plan=without)


def test_a_cached_plan_is_not_used_for_another_attention() -> None:
    """attention() caches the last plans; none is used for another attention."""
    sp, (q, k, v) = one_device(), _tensors()
    reach = 3

    def near(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i >= j) & (i - j < reach)

    outs = []
    for reach in (3, 7):
        by_function = longspan.attention(q, k, v, sp, causal=False, mask_mod=near)
        assert torch.allclose(by_function, longspan.attention(q, k, v, sp, window=reach), atol=1e-6)
        outs.append(by_function)
    assert not torch.equal(*outs)
    with pytest.raises(LongspanError, match=r"`sinks` has the shape \(3,\)"):
        for heads in (4, 3):
            longspan.attention(q, k, v, sp, sinks=torch.zeros(heads))


def test_a_plan_made_before_a_bias_was_learnt_refuses_it() -> None:
    """Its gradient would silently be zero: with a given plan, a cached plan and a custom kernel."""
    sp, (q, k, v) = one_device(), _tensors()
    fixed, learnt = torch.ones(4), torch.ones(4, requires_grad=True)
    plan = longspan.prepare_attention(q, k, v, sp, alibi=fixed)
    longspan.attention(q, k, v, sp, alibi=fixed)
    calls: list[dict[str, Any]] = [{"plan": plan}, {}, {"kernel": plain_tile}]
    for more in calls:
        with pytest.raises(LongspanError, match="computes no gradient of a learnt bias; use kernel='eager'"):
            longspan.attention(q, k, v, sp, alibi=learnt, **more)
    eager = longspan.prepare_attention(q, k, v, sp, alibi=fixed, kernel="eager")
    longspan.attention(q, k, v, sp, alibi=learnt, plan=eager).sum().backward()
    assert learnt.grad is not None and learnt.grad.any()


@pytest.mark.parametrize("kernel", ["tiled", "eager"])
def test_autocast_does_not_change_fp32_sums(kernel: str) -> None:
    sp, (q, k, v) = one_device(), _tensors()
    found = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            out = longspan.attention(q, k, v, sp, softcap=3.0, kernel=kernel)
        found.append([out, *torch.autograd.grad(out.square().sum(), [q, k, v])])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


# --- custom masks


class Custom(longspan.Mask):
    pass


def test_a_mask_is_given_once() -> None:
    sp, (q, k, v) = one_device(), _tensors()
    with pytest.raises(LongspanError, match="`mask` was given together with window"):
        longspan.attention(q, k, v, sp, mask=Custom(window=5), window=3)
    with pytest.raises(LongspanError, match="mask='causal' is no longspan.Mask"):
        longspan.attention(q, k, v, sp, mask="causal")  # type: ignore[arg-type]
    with pytest.raises(LongspanError, match="cannot do window or the mask Custom"):
        longspan.attention(q, k, v, sp, mask=Custom(window=5), kernel="sdpa")
    twice = longspan.Mask(segments=(((0, 24),),) * 2)
    with pytest.raises(LongspanError, match="documents are given twice"):
        longspan.attention(q, k, v, sp, mask=twice, documents=(torch.arange(24) // 9).expand(2, -1))


# --- custom kernels


@longspan.kernel_with_lse
def plain_tile(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    group = q.shape[2] // k.shape[2]
    x = torch.einsum("bqhd,bthd->bhqt", q, k.repeat_interleave(group, 2)) * scale
    if bias is not None:
        x = x + bias
    if causal:
        x = x.masked_fill(torch.ones(x.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    return torch.einsum("bhqt,bthd->bqhd", x.softmax(-1), v.repeat_interleave(group, 2)), x.logsumexp(-1)


def _own_kernel(names: list[str], ring: int) -> dict[str, dict[str, float]]:
    sp = sharding_of(dist.get_world_size() // ring, ring)
    return {name: errors(CASES[name], run(CASES[name], sp, plain_tile), truth_of(CASES[name])) for name in names}


@pytest.mark.parametrize("ring", [1, 4])
def test_a_custom_kernel_with_lse_in_rings(pool4: RankPool, ring: int) -> None:
    names = ["gqa", "window", "documents and padding", "sinks", "alibi", "a mask function that leaves rows empty"]
    for found in pool4.run(_own_kernel, names, ring):
        for name, each in found.items():
            assert max(each.values()) <= MARGIN, (name, each)


def test_a_custom_kernel_that_returns_something_else_is_refused() -> None:
    sp, (q, k, v) = one_device(), _tensors()
    bad = longspan.kernel_with_lse(lambda q, k, v, *, causal, scale, bias: q)  # type: ignore[arg-type, return-value]
    with pytest.raises(LongspanError, match=r"returned \['Tensor'\]; \(out, lse\) of .*2, 24, 4, 8.*2, 4, 24"):
        longspan.attention(q, k, v, sp, kernel=bad)
    with pytest.raises(LongspanError, match="the kernel plain_tile cannot do softcap"):
        longspan.attention(q, k, v, sp, kernel=plain_tile, softcap=3.0)


# --- the path of q


def test_q_passes_at_most_12_functions_and_no_file_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """From attention() to the kernel and to the all-to-all, on a mesh with both axes."""
    paths: dict[str, list[list[tuple[str, str]]]] = {"kernel": [], "all-to-all": []}

    def recorded(what: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            frame, path = sys._getframe(1), []
            while frame is not None:
                if (module := frame.f_globals.get("__name__", "")).startswith("longspan"):
                    path.append((module, frame.f_code.co_name))
                frame = frame.f_back  # type: ignore[assignment]
            paths[what].append(path[::-1])
            return function(*args, **kwargs)

        return call

    monkeypatch.setattr(tiled, "_flash_cpu", recorded("kernel", tiled._flash_cpu))
    monkeypatch.setattr(dist, "all_to_all_single", recorded("all-to-all", dist.all_to_all_single))
    with fake_world(0, 4):
        longspan.attention(*_tensors(), longspan.SequenceSharding(longspan.init_mesh(ring=2, ulysses=2)))
    for what, found in paths.items():
        assert found and all(path[0] == ("longspan.attn.api", "attention") for path in found), (what, found)
        assert max(map(len, found)) <= 12, (what, max(found, key=len))
        for path in found:
            modules = [module for module, _ in itertools.groupby(path, key=lambda step: step[0])]
            assert len(modules) == len(set(modules)), (what, modules)


def _own_calls(ulysses: int, **options: Any) -> int:
    """Return the calls of longspan's functions in an attention with a plan."""
    sp = sharding_of(ulysses) if ulysses > 1 else one_device()
    q, k, v = (torch.randn(1, 32 // ulysses, heads, 8, requires_grad=True) for heads in (4, 2, 2))
    plan = longspan.prepare_attention(q, k, v, sp, **options)
    longspan.attention(q, k, v, sp, plan=plan)  # fills caches
    with cProfile.Profile() as profile:
        longspan.attention(q, k, v, sp, plan=plan)
    return sum(
        entry.callcount for entry in profile.getstats() if "/longspan/" in getattr(entry.code, "co_filename", "")
    )


def test_a_layer_with_a_plan_makes_few_calls(pool2: RankPool) -> None:
    three = torch.arange(32)[None] * 3 // 32
    assert _own_calls(1) <= 26 and _own_calls(1, documents=three) <= 104
    assert max(pool2.run(_own_calls, 2)) <= 175
