"""Ulysses attention against one device, bit for bit, and against the fp64 oracle."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import longspan
from longspan.core.errors import LongspanError
from tests.attn.attention import PLAIN, drawn_cases, errors_on_one_rank, one_device, run, sharding
from tests.counting import count_sent
from tests.oracle import Case, errors, make
from tests.pool import THREADS, RankPool
from tests.tolerance import MARGIN

pytestmark = [pytest.mark.fast, pytest.mark.rounding]


def _errors(cases: list[Case], kernel: Any) -> list[dict[str, Any]]:
    """Return for each case whether the output equals one device's bit for bit, and the errors against the oracle."""
    found, sp = [], sharding(dist.get_world_size())
    for case in cases:
        ours = run(case, sp, kernel)
        single = run(case, one_device(), kernel)
        found.append({"equal": torch.equal(ours["out"], single["out"]), "errors": errors_on_one_rank(case, ours, sp)})
    return found


def check(pool: RankPool, *cases: Case, kernel: Any = "auto") -> None:
    """Assert that the output equals one device's bit for bit, and that output and gradients are the oracle's.

    With several threads per rank bits may differ: the order of a CPU kernel's sums then depends on the number of heads.
    """
    for of_rank in pool.run(_errors, list(cases), kernel):
        for case, found in zip(cases, of_rank, strict=True):
            assert found["equal"] or THREADS != "1", case
            assert max(found["errors"].values(), default=0) <= MARGIN, (case, found)


@pytest.mark.parametrize("world", [2, 4])
def test_exact(get_pool: Any, world: int) -> None:
    check(get_pool(world), *PLAIN.values(), Case(n=64, q_heads=8, dtype=torch.bfloat16))


@pytest.mark.slow
def test_exact_over_8_ranks(pool8: RankPool) -> None:
    check(pool8, Case(n=37, q_heads=16, kv_heads=2, batch=2))


def test_eager_with_softcap_and_sinks(pool4: RankPool) -> None:
    cases: list[dict[str, Any]] = [{"softcap": 2.0}, {"sinks": True}, {"softcap": 5.0, "sinks": True, "window": 4}]
    check(pool4, *(Case(n=18, q_heads=6, kv_heads=2, **more) for more in cases), kernel="eager")


@settings(max_examples=12)
@given(case=drawn_cases(40), world=st.sampled_from([2, 4]), window=st.none() | st.integers(1, 12), docs=st.data())
def test_exact_for_drawn_shapes(get_pool: Any, case: Case, world: int, window: int | None, docs: Any) -> None:
    cuts = docs.draw(st.none() | st.lists(st.integers(0, case.n), max_size=3))
    ids = None if cuts is None else tuple(sum(i >= c for c in cuts) for i in range(case.n))
    case = dataclasses.replace(case, window=window if case.causal else None, documents=ids)
    check(get_pool(world), case)


# ---------------------------------------------------------------------------------------------------------------------
# What is sent.


def _sent(case: Case) -> list[tuple[str, int]]:
    sp = sharding(dist.get_world_size())
    x = make(case)
    q, k, v = (sp.shard(x[name]).clone().requires_grad_() for name in "qkv")
    with count_sent() as log:
        out = longspan.attention(q, k, v, sp, length=case.n)
        forward = len(log)
        out.backward(torch.ones_like(out))
    assert forward == 2
    return [(entry.op, entry.bytes) for entry in log]


@pytest.mark.parametrize(("world", "dtype"), [(2, torch.float32), (4, torch.bfloat16)])
def test_two_all_to_alls_send_the_formulas_bytes(get_pool: Any, world: int, dtype: torch.dtype) -> None:
    case = Case(n=32, batch=2, q_heads=8, kv_heads=4, dtype=dtype)
    width = dtype.itemsize * case.batch * case.n * case.dim
    part = (world - 1) / world / world  # a rank holds 1/P of the bytes, and keeps 1/P of these
    qkv, o = width * (case.q_heads + 2 * case.kv_heads) * part, width * case.q_heads * part
    assert qkv + o == dtype.itemsize * case.batch * case.n * case.dim * (2 * case.q_heads + 2 * case.kv_heads) * part
    for log in get_pool(world).run(_sent, case):
        assert log == [("all_to_all", qkv), ("all_to_all", o), ("all_to_all", o), ("all_to_all", qkv)]


def test_few_kv_heads_are_sent_only_where_needed(pool4: RankPool) -> None:
    case = Case(n=8, q_heads=8, kv_heads=2)  # 4 ranks: each needs 2 query heads and 1 KV head, for k and for v
    bytes_to_each = 4 * (case.n // 4) * case.dim * (2 + 1 + 1)
    for log in pool4.run(_sent, case):
        assert log[0] == ("all_to_all", 3 * bytes_to_each)


# ---------------------------------------------------------------------------------------------------------------------
# Refused with numbers and a fix, before anything is sent.


def _refused(cases: list[tuple[dict[str, Any], dict[str, Any], str]]) -> list[str]:
    messages = []
    for tensors, options, _ in cases:
        options = dict(options)
        sp = sharding(dist.get_world_size())
        k_dtype = options.pop("k_dtype", torch.float32)
        x = {n: torch.zeros(shape, dtype=k_dtype if n == "k" else torch.float32) for n, shape in tensors.items()}
        with count_sent() as log, pytest.raises(LongspanError) as error:
            longspan.attention(x["q"], x["k"], x["v"], sp, **options)
        assert not log
        messages.append(str(error.value))
    return messages


def _shapes(q: tuple[int, ...] = (1, 4, 4, 8), k: tuple[int, ...] = (1, 4, 2, 8), v: Any = None) -> dict[str, Any]:
    return {"q": q, "k": k, "v": v or k}


BAD = [
    (_shapes(q=(4, 4, 8)), {}, r"four dimensions each, got q \(4, 4, 8\)"),
    (_shapes(k=(1, 4, 3, 8)), {}, "4 query heads do not divide into groups over 3 KV heads"),
    (_shapes(k=(1, 4, 2, 16)), {}, "q and k need the same head_dim"),
    (_shapes(v=(1, 4, 4, 8)), {}, "k and v the same number of heads"),
    (_shapes(k=(1, 5, 2, 8)), {}, r"8 queries and 10 keys: give the position .* \(q_start=2 .*\), or causal=False"),
    (_shapes(q=(1, 0, 4, 8), k=(1, 0, 2, 8)), {}, "attention over no tokens"),
    (_shapes(), {"length": 20}, "length=20 over 2 ranks gives 10 tokens to each, the tensors have 4"),
    (_shapes(), {"dropout": 0.1}, r"dropout=0.1: .* use 0.0"),
    (_shapes(), {"kernel": "magic"}, "kernel='magic' is unknown; there are auto, .*tiled.*sdpa"),
    (_shapes(), {"kernel": "tile"}, "kernel='tile' is unknown; did you mean 'tiled'"),
    (_shapes(), {"sinks": torch.zeros(3), "kernel": "eager"}, r"`sinks` has the shape \(3,\), .* \(4,\)"),
    (
        _shapes(),
        {"k_dtype": torch.bfloat16},
        "one floating dtype, got q torch.float32, k torch.bfloat16, ",
    ),
    (
        _shapes(),
        {"documents": torch.tensor([[0, 0, 1, 1, 0, 0, 2, 2]])},
        "id 0 comes back after another document",
    ),
]


def test_all_ranks_refuse_with_the_same_text(pool2: RankPool) -> None:
    for case, *messages in zip(BAD, *pool2.run(_refused, BAD), strict=True):
        assert len(set(messages)) == 1 and re.search(case[2], messages[0]), (case, messages)


def test_one_device_needs_no_process_group() -> None:
    case = Case(n=9)
    found = errors(case, run(case, longspan.SequenceSharding(longspan.init_mesh())))
    assert max(found.values()) <= MARGIN, found
    assert not dist.is_initialized()
