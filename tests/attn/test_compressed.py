"""Lossy wire dtypes of the all-to-all: each element off by half a step at most, in the same messages."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import longspan
from longspan.comm import quantize
from longspan.comm.counting import count_sent
from longspan.core.errors import LongspanError
from tests.attn.attention import CASES, drawn_cases, one_device, run
from tests.choose import each_value, grouped
from tests.models import Truth, batch, build, gradients, rows_of, truth_of
from tests.oracle import Case, make, oracle, sizes
from tests.pool import RankPool
from tests.tolerance import MARGIN, eps

NAMES = (
    "gqa", "fewer KV heads than ranks", "mqa", "heads do not divide", "a KV group cut unevenly", "a rank without heads",
    "shorter than the ranks", "another head_dim for v", "documents and padding", "sinks, softcap and window",
    "cross attention",
)  # fmt: skip


def _rounded(x: Tensor, code: str) -> Tensor:
    """Return what a rank receives of x, `[..., D]`, by the definition of the wire dtype."""
    x = x.float()
    largest = x.abs().amax(-1, keepdim=True)
    step = largest / (127 if code == "int8" else 448)
    parts = torch.where(step > 0, x / step, 0)
    rounded = parts.round() if code == "int8" else parts.clamp(-448, 448).to(torch.float8_e4m3fn).float()
    return rounded * step


def _half_step(x: Tensor, code: str) -> Tensor:
    """Return how far rounding may move each vector `[..., D]`, in its norm."""
    largest, count = x.abs().amax(-1), math.sqrt(x.shape[-1])
    return count * largest / 254 if code == "int8" else x.norm(dim=-1) / 16 + count * largest / (448 * 1024)


def _errors(case: Case, found: dict[str, Tensor], code: str, recompute: bool = False) -> dict[str, float]:
    """Return the largest error of each result, in units of half a step plus the dtype's own rounding.

    Errors are measured from fp64 attention of rounded q, k, v and a rounded gradient of the output. If the backward
    recomputes the all-to-all, it uses the rounded output: off by half a step times the gradient, in the gradient of
    every score and of the sinks.
    """
    x = {name: _rounded(y, code) if name in ("q", "k", "v", "grad") else y for name, y in make(case).items()}
    truth, size = oracle(case, x), sizes(case, x)
    group = case.q_heads // case.kv_heads
    alone = dataclasses.replace(case, kv_heads=case.q_heads)
    by_query = oracle(alone, {**x, **{name: x[name].repeat_interleave(group, 2) for name in "kv"}})
    allowed = {name: _half_step(by_query[name], code) for name in ("out", "dq", "dk", "dv")}
    for name in ("dk", "dv"):  # ranks return their parts of a KV head's gradient, each rounded
        allowed[name] = allowed[name].unflatten(2, (case.kv_heads, group)).sum(3)
    if recompute:
        scale = case.scale or 1 / math.sqrt(case.dim)
        off = scale * x["grad"].double().norm(dim=-1) * allowed["out"]  # [B, n, H]
        key = x["k"].double().norm(dim=-1).amax(1, keepdim=True).repeat_interleave(group, 2)
        allowed["dq"] = allowed["dq"] + off * key
        if case.sinks:
            allowed["dsinks"] = (off / scale).sum((0, 1))
        of_keys = (off * x["q"].double().norm(dim=-1)).sum(1, keepdim=True)
        allowed["dk"] = allowed["dk"] + of_keys.unflatten(2, (case.kv_heads, group)).sum(3)
    out = {}
    for name, y in found.items():
        rows = y.dim() > 1
        apart, terms = (t.norm(dim=-1) if rows else t.abs() for t in (y.double() - truth[name], size[name]))
        limit = 1.001 * allowed.get(name, torch.zeros(())) + MARGIN * eps(torch.float32) * terms
        ratio = torch.where(apart == 0, 0.0, apart / limit)
        out[name] = float(ratio.nan_to_num(nan=torch.inf).max()) if ratio.numel() else 0.0
    return out


def _sharding(ring: int, chunks: int, code: Any) -> longspan.SequenceSharding:
    mesh = longspan.init_mesh(ring=ring, ulysses=dist.get_world_size() // ring)
    return longspan.SequenceSharding(mesh, overlap_chunks=chunks, wire_dtype=code)


def _compared(ring: int, code: Any) -> dict[str, dict[str, float]]:
    found = {}
    for chunks, recompute in ((1, 0), (2, 0), (1, 2)):
        sp = _sharding(ring, chunks, code)
        for name in NAMES[:: 1 if chunks == 1 and not recompute else 3]:
            options = {"head_chunks": recompute} if recompute else {}
            found[f"{name}, {chunks}, {recompute}"] = _errors(
                CASES[name], run(CASES[name], sp, **options), code, bool(recompute)
            )
    return found


@pytest.mark.parametrize(("code", "world", "ring"), each_value(["int8", "fp8"], grouped([(2, 1), (4, 1), (4, 2)])))
def test_off_by_half_a_step(get_pool: Any, world: int, ring: int, code: str) -> None:
    for found in get_pool(world).run(_compared, ring, code):
        for name, of_case in found.items():
            assert max(of_case.values()) <= 1, (name, of_case)


def _drawn(case: Case, ring: int, chunks: int, code: Any) -> dict[str, float]:
    return _errors(case, run(case, _sharding(ring, chunks, code)), code)


@settings(max_examples=8)
@given(
    case=drawn_cases(20, sinks=st.booleans()),
    mesh=st.sampled_from([(2, 1), (4, 1), (4, 2)]),
    chunks=st.sampled_from([1, 2, 3]),
    code=st.sampled_from(["int8", "fp8"]),
)
def test_off_by_half_a_step_for_drawn_shapes(
    get_pool: Any, case: Case, mesh: tuple[int, int], chunks: int, code: str
) -> None:
    case = dataclasses.replace(case, dtype=torch.float32)
    for found in get_pool(mesh[0]).run(_drawn, case, mesh[1], chunks, code):
        assert max(found.values()) <= 1, (case, found)


def _messages(chunks: int, code: Any, dtype: torch.dtype) -> tuple[list[str], int]:
    case = Case(n=32, batch=2, q_heads=16, kv_heads=8, dtype=dtype)
    x, sp = make(case), _sharding(1, chunks, code)
    qkv = [sp.shard(x[name]).clone().requires_grad_() for name in "qkv"]
    with count_sent() as sent:
        longspan.attention(*qkv, sp).sum().backward()
    return [one.op for one in sent], sum(one.bytes for one in sent)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scales_are_sent_in_the_same_message(pool2: RankPool, dtype: torch.dtype) -> None:
    for chunks in (1, 4):
        for ops, sent in pool2.run(_messages, chunks, "int8", dtype):
            assert ops == ["all_to_all"] * 4 * chunks
            # Heads of 8 elements and a scale, batch, tokens of a rank, the other rank's half; forward and backward.
            assert sent == 2 * (8 + 4) * 2 * 32 // 2 // 2 * (2 * 16 + 2 * 8)


@pytest.mark.parametrize(("code", "dtype"), each_value(["int8", "fp8"], [torch.float32, torch.bfloat16]))
def test_packed_rows_are_rounded(code: str, dtype: torch.dtype) -> None:
    """With runs of several sizes, empty blocks and zeros; a nonfinite element makes its vector NaN."""
    blocks = [((2, 3), (1, 3), (2, 5)), (), ((0, 3), (1, 7))]
    widths = [sum(count * d for count, d in runs) for runs in blocks]
    flat = torch.randn(4 * sum(widths)).to(dtype)
    flat[:3], flat[4] = 0, 1e4
    coded = quantize.quantize_rows(flat, 4, blocks, code)
    assert coded.numel() == 4 * sum(count * (d + 4) for runs in blocks for count, d in runs)
    back = quantize.dequantize_rows(coded, 4, blocks, code, dtype)
    apart = (x.split([4 * w for w in widths]) for x in (flat, back))
    for sent, received, runs, width in zip(*apart, blocks, widths, strict=True):
        col = 0
        for count, d in runs:
            a, b = (x.view(4, width)[:, col : col + count * d].unflatten(1, (count, d)) for x in (sent, received))
            assert torch.equal(b, _rounded(a, code).to(dtype))
            col += count * d
    for bad in (math.nan, math.inf):
        flat[1] = bad
        back = quantize.dequantize_rows(quantize.quantize_rows(flat, 4, blocks, code), 4, blocks, code, dtype)
        assert back[:3].isnan().all() and back[3:].isfinite().all()


def _on_a_model(truth: Truth) -> list[str]:
    """Check that loss and gradients are near one process's, and not equal; return the errors of a KV cache."""
    errors = []
    for mesh, options in (
        ({"ulysses": 2, "data": 2}, {"fsdp": False}),
        ({"ulysses": 2, "tensor": 2}, {"memory": longspan.Memory(checkpointing="selective")}),
        ({"ulysses": 2, "ring": 2}, {"memory": longspan.Memory(checkpointing="full")}),
    ):
        sp = longspan.SequenceSharding(longspan.init_mesh(**mesh), wire_dtype="int8")
        model = longspan.parallelize(build("Llama", vocab_size=64), sp, **options)
        out = model(**rows_of(batch(), sp.data_rank, sp.data_size))
        out.loss.backward()
        assert float(out.loss.detach()) == pytest.approx(float(truth.exact.loss), rel=1e-3)
        for name, grad in gradients(model).items():
            exact = truth.exact.gradients[name]
            error = float((grad - exact).norm() / exact.norm())
            assert (1e-4 if "q_proj" in name else 0) <= error < 0.05, (mesh, options, name, error)
        assert "exchange: int8, LOSSY" in str(longspan.explain(model))
        with pytest.raises(LongspanError) as caught:
            longspan.ShardedCache(model)
        errors.append(str(caught.value))
    return errors


def test_a_model_with_other_features(pool4: RankPool) -> None:
    for errors in pool4.run(_on_a_model, truth_of(build("Llama", vocab_size=64), batch()), timeout=180):
        assert all("wire_dtype='int8' is for training and scoring" in text for text in errors)


def test_unknown_wire_dtypes_are_refused() -> None:
    for wrong in ("int4", "", 8, None):
        with pytest.raises(LongspanError, match=r"wire_dtype.*int8"):
            longspan.SequenceSharding(one_device().mesh, wire_dtype=wrong)  # type: ignore[arg-type]
