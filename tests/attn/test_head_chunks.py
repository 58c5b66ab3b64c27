"""Attention in chunks of heads: exact, with overlapped or recomputed all-to-alls, and the bytes and memory it needs."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import longspan
from longspan.attn.api import AttentionOptions
from longspan.attn.kernels.tiled import TiledKernel
from longspan.attn.methods.head_chunks import ChunkedUlysses
from longspan.attn.prepare import AttentionPlan, prepare
from longspan.attn.score import Scores
from longspan.attn.shapes import Shapes
from longspan.core.errors import LongspanError
from longspan.core.heads import split_head_chunks, split_heads
from tests.attn.attention import (
    CASES,
    FEW,
    check_all,
    compare,
    drawn_cases,
    errors_on_one_rank,
    one_device,
    run,
    sharding,
)
from tests.choose import confirming, each_value, grouped
from tests.counting import count_sent
from tests.fakes import fake_world
from tests.host_memory import peak_of
from tests.oracle import Case, errors, make, options
from tests.pool import RankPool
from tests.tolerance import MARGIN

MANY = {
    "many KV heads": Case(n=21, q_heads=16, kv_heads=8, batch=2),
    "as many KV heads": Case(n=13, q_heads=12, kv_heads=12, v_dim=4),
    "KV groups do not divide": Case(n=18, q_heads=14, kv_heads=7),
    "KV groups cut between ranks": Case(n=15, q_heads=15, kv_heads=5, batch=2),
    "KV heads of several ranks, in different chunks": Case(n=12, q_heads=21, kv_heads=7),
    "ranks without heads": Case(n=10, q_heads=3, kv_heads=3, sinks=True),
    "sinks by head": Case(n=19, q_heads=12, kv_heads=6, sinks=True, batch=2),
    "alibi by head": Case(n=17, q_heads=12, kv_heads=6, alibi=True),
    "a bias by head": Case(n=17, q_heads=12, kv_heads=6, bias="waves"),
    "a mask function by head": Case(n=17, q_heads=12, kv_heads=6, mod="late", causal=False),
    "all by head": Case(
        n=20, q_heads=18, kv_heads=6, mod="striped", bias="waves", alibi=True, sinks=True, softcap=4.0, window=9
    ),
    "documents, window, sinks": Case(
        n=30, q_heads=12, kv_heads=6, documents=(0,) * 11 + (1,) * 13 + (-1,) * 6, window=5, sinks=True
    ),
    "keys of another length": Case(causal=False, n=13, kv_n=30, q_heads=12, kv_heads=6),
    "bf16": Case(n=40, q_heads=16, kv_heads=8, dtype=torch.bfloat16),
    "bf16, KV heads of several ranks": Case(n=40, q_heads=15, kv_heads=5, dtype=torch.bfloat16, sinks=True),
}
"""Cases with several KV heads on a rank, so that there are chunks, and scores that differ by head."""

SOME = [
    "many KV heads", "KV heads of several ranks, in different chunks", "ranks without heads", "all by head",
    "documents, window, sinks", "keys of another length", "bf16, KV heads of several ranks",
]  # fmt: skip


def chunked_plan(
    case: Case, x: dict[str, Tensor], qkv: Sequence[Tensor], sp: longspan.SequenceSharding, sinks: Any, chunks: int
) -> tuple[AttentionPlan, Scores]:
    """A plan that recomputes the all-to-all even if there is one chunk, as a layer of a model has it."""
    given = AttentionOptions.of({**options(case, x), "sinks": sinks})
    shapes = Shapes.of(*qkv, given.scores)
    mask, lengths = given.mask_and_lengths(shapes, sp)
    return prepare(shapes, sp, mask, given.scores, lengths, recompute_all_to_all=True, head_chunks=chunks), given.scores


class SavedInList:
    """`SavedAttentions` in a list."""

    def __init__(self) -> None:
        self.recomputing = False
        self.saved: list[SavedTensors] = []
        self.loaded = 0

    def save(self, tensors: Sequence[Tensor]) -> SavedTensors:
        self.saved.append(SavedTensors(list(tensors)))
        return self.saved[-1]

    def load_next(self) -> SavedTensors:
        self.loaded += 1
        return self.saved[self.loaded - 1]

    def contexts(self) -> tuple[Any, Any]:
        """For `torch.utils.checkpoint`: of the forward, and of the recomputed layer."""
        return contextlib.nullcontext(), self._recomputed()

    @contextlib.contextmanager
    def _recomputed(self) -> Iterator[None]:
        self.recomputing = True
        yield
        self.recomputing = False


@dataclasses.dataclass
class SavedTensors:
    of: list[Tensor]
    dropped: int = 0

    def tensors(self) -> list[Tensor]:
        assert not self.dropped
        return self.of

    def release(self) -> None:
        self.dropped += 1
        self.of = []


def run_chunked(
    case: Case, sp: longspan.SequenceSharding, chunks: int, checkpointed: bool = False
) -> dict[str, Tensor]:
    """As `tests.attn.attention.run`, by a plan that recomputes the all-to-all."""

    def attend(x: dict[str, Tensor], qkv: list[Tensor], sinks: Tensor | None) -> Tensor:
        plan, scores = chunked_plan(case, x, qkv, sp, sinks, chunks)
        if not checkpointed:
            return plan(*qkv, scores)
        saved = SavedInList()

        def layer(*qkv: Tensor) -> Tensor:
            return plan(*(y * 1 for y in qkv), scores, saved) * 1

        out: Tensor = checkpoint(layer, *qkv, use_reentrant=False, context_fn=saved.contexts)
        return out

    return run(case, sp, attend=attend)


# ---------------------------------------------------------------------------------------------------------------------
# Exact, on every mesh.


def _errors(names: Sequence[str], ring: int, chunks: int, checkpointed: bool) -> dict[str, dict[str, float]]:
    sp = sharding(dist.get_world_size() // ring, ring)
    cases = {**CASES, **MANY}
    return {
        name: errors_on_one_rank(cases[name], run_chunked(cases[name], sp, chunks, checkpointed), sp) for name in names
    }


MESHES = grouped([(2, 1), (4, 1), (2, 2), (4, 2), pytest.param(4, 4, marks=pytest.mark.confirms)])


@pytest.mark.parametrize(("world", "ring", "chunks"), each_value(MESHES, [1, 2, 3, 0]))
def test_exact(get_pool: Any, world: int, ring: int, chunks: int) -> None:
    for found in get_pool(world).run(_errors, list(MANY), ring, chunks, False):
        check_all(found)


def test_exact_for_masks_of_every_kind(pool2: RankPool) -> None:
    for found in pool2.run(_errors, FEW, 1, 0, False):
        check_all(found)


@pytest.mark.parametrize(("world", "ring", "chunks"), [(2, 1, 1), (4, 2, 2), *confirming([(2, 2, 1)])])
def test_exact_in_a_checkpointed_layer(get_pool: Any, world: int, ring: int, chunks: int) -> None:
    for found in get_pool(world).run(_errors, SOME, ring, chunks, True):
        check_all(found)


@pytest.mark.parametrize(("chunks", "checkpointed"), [(1, False), (3, False), (2, True)])
def test_exact_on_one_device(chunks: int, checkpointed: bool) -> None:
    check_all(
        {name: errors(case, run_chunked(case, one_device(), chunks, checkpointed)) for name, case in MANY.items()}
    )


def _drawn(case: Case, ring: int, chunks: int) -> dict[str, float]:
    return compare(case, sharding(dist.get_world_size() // ring, ring), head_chunks=chunks)


@settings(max_examples=12)
@given(
    case=drawn_cases(30, sinks=st.booleans(), alibi=st.booleans(), bias=st.sampled_from([None, "waves"])),
    mesh=st.sampled_from([(2, 1), (4, 1), (4, 2)]),
    chunks=st.sampled_from([2, 3, 4, 0]),
    window=st.none() | st.integers(1, 9),
)
def test_exact_for_drawn_shapes(
    get_pool: Any, case: Case, mesh: tuple[int, int], chunks: int, window: int | None
) -> None:
    case = dataclasses.replace(case, window=window if case.causal else None)
    for found in get_pool(mesh[0]).run(_drawn, case, mesh[1], chunks):
        assert max(found.values(), default=0) <= MARGIN, (case, found)


def _equal_to_one_device(names: Sequence[str]) -> dict[str, bool]:
    out = {}
    for name in names:
        case, sp = MANY[name], sharding(dist.get_world_size())
        single = run(case, one_device(), "tiled")["out"]
        overlapped = [longspan.SequenceSharding(sp.mesh, overlap_chunks=n) for n in (2, 5)]
        outs = [run(case, sp, "tiled", head_chunks=c)["out"] for c in (1, 2, 0)]
        outs += [run(case, each, "tiled")["out"] for each in overlapped]
        out[name] = all(torch.equal(one, single) for one in outs)
    return out


def test_the_output_equals_one_devices_bit_for_bit(pool2: RankPool) -> None:
    for found in pool2.run(
        _equal_to_one_device, ["many KV heads", "KV groups cut between ranks", "sinks by head", "bf16"]
    ):
        assert all(found.values()), found


def _overlapped(names: Sequence[str], ring: int, chunks: int, recompute: bool) -> dict[str, dict[str, float]]:
    mesh = longspan.init_mesh(ring=ring, ulysses=dist.get_world_size() // ring)
    sp = longspan.SequenceSharding(mesh, overlap_chunks=chunks)
    cases = {**CASES, **MANY}
    if recompute:
        return {name: errors_on_one_rank(cases[name], run_chunked(cases[name], sp, 1), sp) for name in names}
    return {name: compare(cases[name], sp) for name in names}


@pytest.mark.parametrize(
    ("world", "ring", "chunks", "recompute"),
    each_value(grouped([(2, 1, 2), (4, 1, 3), (2, 1, 9), (4, 2, 2)]), [False, True]),
)
def test_overlapped_is_exact(get_pool: Any, world: int, ring: int, chunks: int, recompute: bool) -> None:
    for found in get_pool(world).run(_overlapped, SOME, ring, chunks, recompute):
        check_all(found)


def _last_token_is_zero() -> list[bool]:
    """Of the output and of the gradients; on the last rank this token is padding."""
    case, sp = Case(n=13, q_heads=8, kv_heads=4, batch=2), sharding(2)
    x = make(case)
    qkv = [sp.shard(x[name]).clone().requires_grad_() for name in "qkv"]
    plan, scores = chunked_plan(case, x, qkv, sp, None, 2)
    out = plan(*qkv, scores)
    grads = torch.autograd.grad(out.sum(), qkv)
    return [not bool(y[:, -1].any()) for y in (out, *grads)]


def test_padding_gets_zeros(pool2: RankPool) -> None:
    assert pool2.run(_last_token_is_zero) == [[False] * 4, [True] * 4]


@given(
    kv=st.integers(1, 12),
    group=st.integers(1, 6),
    ranks=st.integers(1, 9),
    chunks=st.integers(0, 14),
    overlap=st.sampled_from([1]) | st.integers(1, 14),
)
def test_chunks_contain_every_head_of_every_rank_once(
    kv: int, group: int, ranks: int, chunks: int, overlap: int
) -> None:
    shards = split_heads(kv * group, kv, ranks)
    groups = split_head_chunks(shards, chunks, overlap)
    most, widest = max(shard.kv_heads for shard in shards), max(max(s.group_sizes, default=1) for s in shards)
    count = max(min(chunks, most) if chunks else most, overlap)
    assert len(groups) == min(count, most)
    assert {len(chunks) for chunks in groups} == {1 if count <= most else min(-(-count // most), widest)}
    for rank, shard in enumerate(shards):
        runs = [chunk[rank] for chunks in groups for chunk in chunks]
        assert [h for run in runs for h in range(run.q_start, run.q_stop)] == list(range(shard.q_start, shard.q_stop))
        kv_heads = [h for chunks in groups for h in range(chunks[0][rank].kv_start, chunks[0][rank].kv_stop)]
        assert kv_heads == list(range(shard.kv_start, shard.kv_stop))
        assert all(len({(chunk[rank].kv_start, chunk[rank].kv_stop) for chunk in chunks}) == 1 for chunks in groups)
        assert all(len(run.group_sizes) == run.kv_heads and sum(run.group_sizes) == run.q_heads for run in runs)
        assert all((run.q_start + i) // group == run.kv_start + (run.kv_head_index or ())[i]
                   for run in runs if not run.is_regular for i in range(run.q_heads))  # fmt: skip
        assert max(run.kv_heads for run in runs) <= -(-most // len(groups))


# ---------------------------------------------------------------------------------------------------------------------
# What is sent and saved, and how much memory exists at a time.


def _sent(case: Case, chunks: int) -> list[tuple[str, int]]:
    sp = sharding(dist.get_world_size())
    x = make(case)
    qkv = [sp.shard(x[name]).clone().requires_grad_() for name in "qkv"]
    plan, scores = chunked_plan(case, x, qkv, sp, None, chunks)
    with count_sent() as log:
        out = plan(*qkv, scores)
        assert len(log) == 2 * (chunks or 1)
        out.backward(torch.ones_like(out))
    return [(entry.op, entry.bytes) for entry in log]


@pytest.mark.parametrize(
    ("world", "chunks", "dtype"), each_value(grouped([(2, 1), (2, 2), (2, 4), (4, 2)]), [torch.float32, torch.bfloat16])
)
def test_two_all_to_alls_per_chunk_send_the_formulas_bytes(
    get_pool: Any, world: int, chunks: int, dtype: torch.dtype
) -> None:
    case = Case(n=32, batch=2, q_heads=16, kv_heads=8, dtype=dtype)
    width = dtype.itemsize * case.batch * case.n * case.dim
    part = (world - 1) / world / world / chunks
    q, k = width * case.q_heads * part, width * case.kv_heads * part
    for log in get_pool(world).run(_sent, case, chunks):
        forward, backward = [("all_to_all", q + 2 * k), ("all_to_all", q)], [3 * q + 2 * k, q + 2 * k]
        assert log == forward * chunks + [("all_to_all", sent) for sent in backward] * chunks


def test_saved_bytes() -> None:
    """Local q, k, v and output, and the log-sum-exp, each byte once; v does not keep a fused projection alive."""
    case = Case(n=64, batch=2, q_heads=8, kv_heads=4)
    for rings, ulysses in ((1, 1), (1, 2), (2, 2), (4, 1)):
        with fake_world(0, rings * ulysses):
            sp = sharding(ulysses, rings)
            size = case.n // sp.size
            x = torch.zeros(case.batch, size, 16, case.dim, requires_grad=True) * 1
            q, k, v = x.split([8, 4, 4], 2)
            for qkv in ([q, k, v], [q * 1, k * 1, v]):
                plan, scores = chunked_plan(case, {}, qkv, sp, None, 2)
                saved: list[Tensor] = []
                with torch.autograd.graph.saved_tensors_hooks(functools.partial(_recorded, saved), lambda y: y):
                    out = plan(*qkv, scores)
                storages = {y.untyped_storage().data_ptr(): y.untyped_storage().nbytes() for y in saved}
                tokens = case.batch * size
                assert sum(storages.values()) == 4 * tokens * case.dim * (2 * 8 + 2 * 4) + 4 * tokens * 8
                out.sum().backward(retain_graph=True)


def _recorded(into: list[Tensor], x: Tensor) -> Tensor:
    into.append(x)
    return x


def test_memory_of_a_forward_and_a_backward(tmp_path: Path) -> None:
    """With four chunks a quarter above what is returned, and buffers of the CPU's kernel; on a GPU see live bytes."""
    case = Case(n=2048, q_heads=16, kv_heads=8, dim=32, v_dim=32)
    L, wide = case.n // 2, 4 * 32

    def peaks(chunks: int) -> list[int]:
        with fake_world(0, 2):
            sp = sharding(2)
            qkv = [torch.zeros(1, L, h, 32, requires_grad=True) for h in (16, 8, 8)]
            plan, scores = chunked_plan(case, {}, qkv, sp, None, chunks)
            outs: list[Tensor] = []
            forward = peak_of(lambda: outs.append(plan(*qkv, scores)), tmp_path / "f")
            grad = torch.zeros_like(outs[0])
            backward = peak_of(lambda: torch.autograd.grad(outs[0], qkv, grad), tmp_path / "b")
        return [forward, backward]

    returned = [L * 16 * wide + 4 * case.n * 8, L * 32 * wide]
    for one, of_four, more in zip(peaks(1), peaks(4), returned, strict=True):
        assert of_four - more < 0.36 * one, (one, of_four, more)


# ---------------------------------------------------------------------------------------------------------------------
# Saved attentions of a checkpointed layer.


def _recomputed(ring: int, chunks: int) -> dict[str, Any]:
    case = MANY["sinks by head"]
    sp = sharding(dist.get_world_size() // ring, ring)
    x = make(case)
    qkv = [sp.shard(x[name]).clone().requires_grad_() for name in "qkv"]
    plan, scores = chunked_plan(case, x, qkv, sp, x["sinks"].requires_grad_(), chunks)
    attentions = SavedInList()
    saved: list[list[Tensor]] = []
    calls: list[int] = []
    original = TiledKernel.accumulate

    def counted(*args: Any) -> None:
        calls.append(1)
        original(*args)

    def forward() -> Tensor:
        saved.append([])
        with torch.autograd.graph.saved_tensors_hooks(functools.partial(_recorded, saved[-1]), lambda y: y):
            return plan(*qkv, scores, attentions)

    with count_sent() as log, mock.patch.object(TiledKernel, "accumulate", counted):
        first = forward()
        sent, called = len(log), len(calls)
        attentions.recomputing = True
        again = forward()
        shapes = [[y.shape for y in ys] for ys in saved]
        same = torch.equal(first, again), shapes[0] == shapes[1], len(shapes[0])
        recomputed = len(log) - sent, len(calls) - called
        first.sum().backward()
        by_backward = len(calls) - called
    with torch.no_grad():
        attentions.recomputing = False
        plan(*qkv, scores, attentions)
    dropped = [one.dropped for one in attentions.saved]
    return {"same": same, "recomputed": recomputed, "called": called, "by backward": by_backward, "dropped": dropped}


@pytest.mark.parametrize(("world", "ring"), [(2, 1), (2, 2)])
def test_a_recomputed_layer_sends_nothing_and_calls_no_kernel(get_pool: Any, world: int, ring: int) -> None:
    for found in get_pool(world).run(_recomputed, ring, 2):
        assert found.pop("called") > 0
        assert found == {"same": (True, True, 4), "recomputed": (0, 0), "by backward": 0, "dropped": [1]}


@pytest.mark.parametrize("checkpointed", [False, True])
def test_an_unused_output_is_freed_without_the_garbage_collector(checkpointed: bool) -> None:
    case, sp = Case(), one_device()
    x = make(case)
    qkv = [x[name].requires_grad_() for name in "qkv"]
    plan, scores = chunked_plan(case, x, qkv, sp, None, 2)
    saved = SavedInList() if checkpointed else None
    gc.collect()
    gc.disable()
    try:
        for recomputing in (False, True) if saved else (False,):
            if saved:
                saved.recomputing = recomputing
            out = plan(*qkv, scores, saved)
            output, node = weakref.ref(out), weakref.ref(out.grad_fn)
            del out
            assert output() is None and node() is None
    finally:
        gc.enable()


# ---------------------------------------------------------------------------------------------------------------------
# The options.


def test_the_kernel_must_return_the_log_sum_exp() -> None:
    sp, x = one_device(), make(Case())
    q, k, v = (x[name] for name in "qkv")

    assert longspan.explain_kernel(q, k, v, sp).name == "sdpa"
    choice = longspan.explain_kernel(q, k, v, sp, head_chunks=2)
    assert choice.name == "tiled" and "sdpa returns no log-sum-exp" in choice.reason
    for kernel in ("sdpa", "eager"):
        with pytest.raises(LongspanError, match=r"returns no log-sum-exp, .*kernel='auto' or 'tiled'.*head_chunks=1"):
            longspan.attention(q, k, v, sp, head_chunks=0, kernel=kernel)


def test_invalid_head_chunks_are_refused() -> None:
    sp, x = one_device(), make(Case())
    q, k, v = (x[name] for name in "qkv")
    for wrong in (-1, 1.5, True, "2"):
        with pytest.raises(LongspanError, match="head_chunks"):
            longspan.attention(q, k, v, sp, head_chunks=wrong)
    plan = longspan.prepare_attention(q, k, v, sp, head_chunks=2)
    assert isinstance(plan.method, ChunkedUlysses) and len(plan.method.chunks) == 2
    with pytest.raises(LongspanError, match="a plan contains head_chunks"):
        longspan.attention(q, k, v, sp, plan=plan, head_chunks=2)
    with pytest.raises(LongspanError, match="recompute_all_to_all=True"):
        longspan.prepare_attention(q, k, v, sp)(q, k, v, Scores(), SavedInList())


def test_each_number_of_chunks_has_its_own_plan() -> None:
    sp, x = one_device(), make(Case(q_heads=8, kv_heads=8))
    qkv = [x[name] for name in "qkv"]
    for chunks in (1, 2, 4, 0, 99):
        longspan.attention(*qkv, sp, head_chunks=chunks)
    methods = [plan.method for plan in sp.prepared.values()]
    assert [len(m.chunks) if isinstance(m, ChunkedUlysses) else None for m in methods] == [None, 2, 4, 8, 8]
