"""Ring Attention and USP against the fp64 oracle: layouts, meshes, masks, and how blocks are sent."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import longspan
from longspan.attn.mask import Mask
from longspan.attn.prepare import pairs_of_blocks, readers_of_blocks
from longspan.core.layout import Layout
from longspan.core.routes import Routes, ring_routes
from tests.attn.attention import CASES, FEW, HARD, check_all, compare, drawn_cases, one_device, run, sharding
from tests.choose import confirming, each_value, grouped
from tests.counting import count_sent
from tests.oracle import Case, make, options, truth_of
from tests.pool import RankPool
from tests.tolerance import MARGIN, NOT_MORE

pytestmark = [pytest.mark.fast, pytest.mark.rounding]


@pytest.mark.parametrize("name", HARD)
@pytest.mark.parametrize("kernel", ["auto", "eager"])
def test_one_device(name: str, kernel: str) -> None:
    case = HARD[name]
    found = compare(case, one_device(), kernel)
    assert max(found.values()) <= MARGIN, found


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("kernel", ["tiled", "flex", "eager"])
def test_a_sink_of_minus_infinity_changes_nothing(kernel: str) -> None:
    x = make(Case(documents=(-1,) * 3 + (0,) * 8, n=11, dtype=torch.float64))  # padding: rows with nothing but the sink
    sp = one_device()
    q, sinks = x["q"], torch.full((x["q"].shape[2],), -torch.inf, dtype=torch.float64)
    if kernel != "flex":  # it has no backward on a CPU
        q, sinks = q.requires_grad_(), sinks.requires_grad_()
    rest = x["k"], x["v"], sp
    out = longspan.attention(q, *rest, documents=x["documents"], sinks=sinks, kernel=kernel)
    without = longspan.attention(q, *rest, documents=x["documents"], kernel=kernel)
    assert torch.equal(out, without)
    if kernel != "flex":
        both = [torch.autograd.grad(o, [q, *more], x["grad"]) for o, more in ((out, [sinks]), (without, []))]
        assert torch.equal(both[0][0], both[1][0]) and not both[0][1].any()


def _everywhere(ring: int, layout: str, names: list[str]) -> dict[str, dict[str, float]]:
    sp = sharding(dist.get_world_size() // ring, ring, layout=layout)
    return {name: compare(CASES[name], sp) for name in names}


ALL = tuple(CASES)
MESHES = [(2, 2, ALL), (4, 4, FEW), (4, 2, FEW), (4, 1, FEW), *confirming((4, ring, ALL) for ring in (4, 2, 1))]


@pytest.mark.parametrize(("layout", "world", "ring", "names"), each_value(["zigzag", "contiguous"], grouped(MESHES)))
def test_exact_on_every_mesh(get_pool: Any, world: int, ring: int, layout: str, names: tuple[str, ...]) -> None:
    for found in get_pool(world).run(_everywhere, ring, layout, list(names)):
        check_all(found)


@pytest.mark.slow
@pytest.mark.parametrize("ring", [8, *confirming([4, 2])])
def test_exact_over_8_ranks(pool8: RankPool, ring: int) -> None:
    for found in pool8.run(_everywhere, ring, "zigzag", [name for name in FEW if name in HARD], timeout=120):
        check_all(found)


def _eager(ring: int, names: list[str]) -> dict[str, dict[str, float]]:
    sp = sharding(dist.get_world_size() // ring, ring)
    return {name: compare(CASES[name], sp, "eager") for name in names}


@pytest.mark.slow
@pytest.mark.parametrize("ring", [4, *confirming([2])])
def test_the_eager_ring(pool4: RankPool, ring: int) -> None:
    for found in pool4.run(_eager, ring, [name for name in FEW if name in HARD]):
        check_all(found)


# ---------------------------------------------------------------------------------------------------------------------
# Drawn shapes.


def _drawn(case: Case, ring: int, layout: str) -> dict[str, float]:
    sp = sharding(dist.get_world_size() // ring, ring, layout=layout)
    return compare(case, sp)


CASE = drawn_cases(
    60,
    window=st.none() | st.integers(1, 12),
    chunk_size=st.none() | st.integers(1, 9),
    sinks=st.booleans(),
    softcap=st.none() | st.floats(1, 10),
    alibi=st.booleans(),
    mod=st.none() | st.sampled_from(["striped"]),
)


@settings(max_examples=12)
@given(
    case=CASE,
    mesh=st.sampled_from([(2, 2), (4, 4), (4, 2)]),
    layout=st.sampled_from(["zigzag", "contiguous"]),
    cuts=st.none() | st.lists(st.integers(0, 60), max_size=3),
)
def test_exact_for_drawn_shapes(get_pool: Any, case: Case, mesh: Any, layout: str, cuts: Any) -> None:
    ids = None if cuts is None else tuple(sum(i >= c for c in cuts) for i in range(case.n))
    case = dataclasses.replace(case, documents=ids)
    world, ring = mesh
    for found in get_pool(world).run(_drawn, case, ring, layout):
        assert max(found.values(), default=0) <= MARGIN, (case, found)


# ---------------------------------------------------------------------------------------------------------------------
# Layouts, routes, work.


@given(n=st.integers(1, 10**6), ring=st.integers(1, 33), ulysses=st.integers(1, 9), zigzag=st.booleans())
def test_every_token_has_one_rank(n: int, ring: int, ulysses: int, zigzag: bool) -> None:
    layout = Layout(ring, ulysses, "zigzag" if zigzag else "contiguous")
    held = sorted(span for rank in range(layout.size) for span in layout.spans(n, rank))
    assert held[0][0] == 0 and held[-1][1] == n
    assert all(a[1] == b[0] for a, b in itertools.pairwise(held))
    padded = [layout.padded_spans(n, rank) for rank in range(layout.size)]
    assert {sum(b - a for a, b in spans) for spans in padded} == {layout.local_length(n)}
    assert layout.local_length(n) * layout.size - n < 2 * layout.size


def test_zigzag_balances_a_causal_mask_and_contiguous_does_not() -> None:
    for ring in (2, 4, 8):
        zigzag = [sum(row) for row in pairs_of_blocks(Layout(ring, 1, "zigzag"), (8192, 8192), Mask(), 1)]
        assert max(zigzag) <= 1.05 * sum(zigzag) / ring
        contiguous = [sum(row) for row in pairs_of_blocks(Layout(ring, 1), (8192, 8192), Mask(), 1)]
        assert sum(contiguous) == sum(zigzag) == 8192 * 8193 // 2
        assert max(contiguous) / max(zigzag) > 2 - 1.1 / ring


@given(st.integers(1, 9).flatmap(lambda r: st.lists(st.sets(st.integers(0, r - 1)), min_size=r, max_size=r)))
def test_routes_reach_all_readers_of_a_block_by_the_fewest_hops(readers_of: list[set[int]]) -> None:
    size, routes = len(readers_of), ring_routes(readers_of)
    for j in range(size):
        reached = {(j + s) % size for s in range(1, routes.right[j] + 1)}
        reached |= {(j - s) % size for s in range(1, routes.left[j] + 1)}
        readers = readers_of[j] - {j}
        assert readers <= reached
        assert routes.right[j] + routes.left[j] <= size - 1
        fewest = min(
            right + left
            for right in range(size)
            for left in range(size)
            if readers <= {(j + s) % size for s in range(1, right + 1)} | {(j - s) % size for s in range(1, left + 1)}
        )
        assert routes.right[j] + routes.left[j] == fewest


def _routes(layout: Layout, n: int, mask: Mask) -> Routes:
    return ring_routes(readers_of_blocks(pairs_of_blocks(layout, (n, n), mask, 1)))


def test_a_window_needs_only_neighbours() -> None:
    contiguous = _routes(Layout(8), 800, Mask(window=50))
    assert contiguous.right == (1,) * 7 + (0,) and contiguous.left == (0,) * 8
    zigzag = _routes(Layout(8, 1, "zigzag"), 800, Mask(window=50))
    assert zigzag.steps == 1 and sum(zigzag.right) == sum(zigzag.left) == 7
    documents = Mask(segments=(tuple((100 * i, 100 * i + 100) for i in range(8)),))
    assert _routes(Layout(8), 800, documents).steps == 0


# ---------------------------------------------------------------------------------------------------------------------
# What is sent.


def _sent(case: Case, ring: int, layout: str) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    sp = sharding(dist.get_world_size() // ring, ring, layout=layout)
    x = make(case)
    q, k, v = (sp.shard(x[name]).clone().requires_grad_() for name in "qkv")
    with count_sent() as log:
        out = longspan.attention(q, k, v, sp, **options(case, x))
        forward = len(log)
        out.backward(torch.ones_like(out))
    sent = [(entry.op, entry.bytes) for entry in log]
    return sent[:forward], sent[forward:]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_ring_sends_kv_heads_only_and_gradients_in_fp32(pool4: RankPool, dtype: torch.dtype) -> None:
    case = Case(n=32, batch=2, q_heads=8, kv_heads=2, dtype=dtype)
    block = case.batch * case.n // 4 * case.kv_heads * (case.dim + case.v_dim)  # elements of K and V together
    for forward, backward in pool4.run(_sent, case, 4, "zigzag"):
        assert forward == [("p2p", block * dtype.itemsize)] * 3
        assert sorted(backward) == sorted([("p2p", block * dtype.itemsize)] * 3 + [("p2p", block * 4)] * 3)


def test_usp_sends_local_heads_around_the_ring(pool4: RankPool) -> None:
    case = Case(n=32, q_heads=8, kv_heads=2)
    for forward, _ in pool4.run(_sent, case, 2, "zigzag"):
        names = [op for op, _ in forward]
        assert names == ["all_to_all", "p2p", "all_to_all"]
        assert forward[1][1] == 4 * (case.n // 2) * 1 * (case.dim + case.v_dim)  # one KV head of the two


def test_heads_of_an_uneven_kv_group_are_sent_once(pool4: RankPool) -> None:
    # 6 query heads over 3 KV heads and 2 Ulysses ranks: 3 and 3, which cuts the second group of 2 in its middle.
    sent = pool4.run(_sent, Case(n=16, q_heads=6, kv_heads=3), 2, "zigzag")
    assert [forward[1] for forward, _ in sent] == [("p2p", 4 * 8 * 2 * 16)] * 4


def test_blocks_that_the_mask_hides_are_not_sent(pool4: RankPool) -> None:
    block = 4 * 8 * 2 * 16
    window = pool4.run(_sent, Case(n=32, window=5), 4, "contiguous")
    assert [[size for _, size in forward] for forward, _ in window] == [[block], [block], [block], []]
    causal = pool4.run(_sent, Case(n=32), 4, "contiguous")
    assert [len(forward) for forward, _ in causal] == [1, 2, 3, 0]
    documents = pool4.run(_sent, Case(n=32, documents=(0,) * 8 + (1,) * 16 + (2,) * 8), 4, "contiguous")
    assert [len(forward) for forward, _ in documents] == [0, 1, 0, 0]
    assert [len(backward) for _, backward in documents] == [0, 1, 1, 0]


# ---------------------------------------------------------------------------------------------------------------------
# bf16.


def _bf16(case: Case, ring: int) -> dict[str, float]:
    """Errors against fp64 over those of one device, in the 2-norm."""
    sp = sharding(dist.get_world_size() // ring, ring)
    truth, ours = truth_of(case), run(case, sp)
    single = run(case, one_device(), "sdpa")
    return {name: float((ours[name] - x).norm() / (single[name] - x).norm()) for name, x in truth.items()}


@pytest.mark.parametrize(("world", "ring"), [(4, 4), (4, 2)])
def test_bf16_errors_are_those_of_one_device(get_pool: Any, world: int, ring: int) -> None:
    case = Case(n=256, q_heads=8, dim=32, v_dim=32, dtype=torch.bfloat16)
    for found in get_pool(world).run(_bf16, case, ring):
        assert max(found.values()) <= NOT_MORE, found
