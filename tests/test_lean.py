"""Attention that saves q, k, v and output of its tokens, in chunks of heads: exact, of known bytes and known memory."""

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
from longspan.attn.methods.chunked import ChunkedUlysses
from longspan.attn.prepare import AttentionPlan, Shapes, prepare
from longspan.attn.score import Scores
from longspan.bench.meters import count_sent
from longspan.core.errors import LongspanError
from longspan.core.heads import split_head_chunks, split_heads, split_overlap_chunks
from tests.attention import CASES, check_all, compare, drawn_cases, one_device, run, sharding
from tests.choose import each_value, grouped
from tests.fakes import fake_world
from tests.memory import peak_of
from tests.oracle import Case, errors, make, options
from tests.pool import RankPool
from tests.tolerance import MARGIN

MANY = {
    "many KV heads": Case(n=21, q_heads=16, kv_heads=8, batch=2),
    "many heads of their own": Case(n=13, q_heads=12, kv_heads=12, v_dim=4),
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


def lean_plan(
    case: Case, x: dict[str, Tensor], qkv: Sequence[Tensor], sp: longspan.SequenceSharding, sinks: Any, chunks: int
) -> tuple[AttentionPlan, Scores]:
    """A plan that recomputes the all-to-all even if there is one chunk, as a layer of a model has it."""
    given = AttentionOptions.of({**options(case, x), "sinks": sinks})
    shapes = Shapes.of(*qkv, given.scores)
    lengths = given.lengths(shapes.q, shapes.k, sp)
    mask = given.mask_with_documents(shapes.q[0], lengths)
    return prepare(shapes, sp, mask, given.scores, lengths, recompute_all_to_all=True, head_chunks=chunks), given.scores


class Shelf:
    """`SavedAttentions` in a list."""

    def __init__(self) -> None:
        self.recomputing = False
        self.kept: list[KeptHere] = []
        self.taken = 0

    def save(self, tensors: Sequence[Tensor]) -> KeptHere:
        self.kept.append(KeptHere(list(tensors)))
        return self.kept[-1]

    def load_next(self) -> KeptHere:
        self.taken += 1
        return self.kept[self.taken - 1]

    def contexts(self) -> tuple[Any, Any]:
        """For `torch.utils.checkpoint`: of the forward, and of the layer computed again."""
        return contextlib.nullcontext(), self._again()

    @contextlib.contextmanager
    def _again(self) -> Iterator[None]:
        self.recomputing = True
        yield
        self.recomputing = False


@dataclasses.dataclass
class KeptHere:
    of: list[Tensor]
    dropped: int = 0

    def tensors(self) -> list[Tensor]:
        assert not self.dropped
        return self.of

    def drop(self) -> None:
        self.dropped += 1
        self.of = []


def lean_run(case: Case, sp: longspan.SequenceSharding, chunks: int, kept: bool = False) -> dict[str, Tensor]:
    """As `tests.attention.run`, by a plan that recomputes the all-to-all; `kept`: in a checkpointed layer."""
    x = make(case)
    leaves = {name: t.clone().requires_grad_() for name, t in x.items() if name in ("q", "k", "v", "sinks")}
    qkv = [sp.shard(leaves[name]) for name in "qkv"]
    plan, scores = lean_plan(case, x, qkv, sp, leaves.get("sinks"), chunks)
    if kept:
        shelf = Shelf()

        def layer(*qkv: Tensor) -> Tensor:
            return plan(*(y * 1 for y in qkv), scores, shelf) * 1

        out = checkpoint(layer, *qkv, use_reentrant=False, context_fn=shelf.contexts)
    else:
        out = plan(*qkv, scores)
    out.backward(sp.shard(x["grad"]))
    result = {"out": sp.gather(out.detach(), length=case.n)}
    for name, leaf in leaves.items():
        assert leaf.grad is not None
        if sp.size > 1:
            dist.all_reduce(leaf.grad, group=sp.group)
        result[f"d{name}"] = leaf.grad
    return result


# ---------------------------------------------------------------------------------------------------------------------
# Exact, on every mesh.


def _compared(names: Sequence[str], ring: int, chunks: int, kept: bool = False) -> dict[str, dict[str, float]]:
    sp = sharding(dist.get_world_size() // ring, ring)
    cases = {**CASES, **MANY}
    return {name: errors(cases[name], lean_run(cases[name], sp, chunks, kept)) for name in names}


@pytest.mark.parametrize(
    ("world", "ring", "chunks"), each_value(grouped([(2, 1), (4, 1), (2, 2), (4, 2), (4, 4)]), [1, 2, 3, 0])
)
def test_exact(get_pool: Any, world: int, ring: int, chunks: int) -> None:
    for found in get_pool(world).run(_compared, list(MANY), ring, chunks):
        check_all(found)


@pytest.mark.parametrize(("world", "ring"), [(2, 1), (4, 2)])
def test_exact_for_every_mask(get_pool: Any, world: int, ring: int) -> None:
    for found in get_pool(world).run(_compared, list(CASES), ring, 0, timeout=240):
        check_all(found)


@pytest.mark.parametrize("chunks", [1, 2, 3, 0])
def test_exact_on_one_device(chunks: int) -> None:
    found = {name: errors(case, lean_run(case, one_device(), chunks)) for name, case in MANY.items()}
    check_all(found)


@pytest.mark.slow
@pytest.mark.parametrize("ring", [1, 2])
def test_exact_over_8_ranks(pool8: RankPool, ring: int) -> None:
    names = ["many KV heads", "KV heads of several ranks, in different chunks", "ranks without heads", "all by head"]
    for found in pool8.run(_compared, names, ring, 0, timeout=240):
        check_all(found)


def _drawn(case: Case, ring: int, chunks: int) -> dict[str, float]:
    return compare(case, sharding(dist.get_world_size() // ring, ring), head_chunks=chunks)


@settings(max_examples=30)
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
        assert max(found.values()) <= MARGIN, (case, found)


def _equal(names: Sequence[str]) -> dict[str, bool]:
    """Whether every number of chunks gives the output of one device, to the bit."""
    out = {}
    for name in names:
        case, sp = MANY[name], sharding(dist.get_world_size())
        single = run(case, one_device(), "tiled")["out"]
        beside = [longspan.SequenceSharding(sp.mesh, overlap_chunks=n) for n in (2, 5)]
        out[name] = all(torch.equal(run(case, sp, "tiled", head_chunks=c)["out"], single) for c in (1, 2, 0))
        out[name] &= all(torch.equal(run(case, each, "tiled")["out"], single) for each in beside)
    return out


def test_the_output_is_to_the_bit_that_of_one_device(pool2: RankPool) -> None:
    for found in pool2.run(_equal, ["many KV heads", "KV groups cut between ranks", "sinks by head", "bf16"]):
        assert all(found.values()), found


# ---------------------------------------------------------------------------------------------------------------------
# Exchanges beside attention.


def _overlapped(names: Sequence[str], ring: int, pieces: int, recompute: bool) -> dict[str, dict[str, float]]:
    mesh = longspan.init_mesh(ring=ring, ulysses=dist.get_world_size() // ring)
    sp = longspan.SequenceSharding(mesh, overlap_chunks=pieces)
    cases = {**CASES, **MANY}
    found = {}
    for name in names:
        compared = errors(cases[name], lean_run(cases[name], sp, 1)) if recompute else compare(cases[name], sp)
        found[name] = compared
    return found


@pytest.mark.parametrize(
    ("world", "ring", "pieces", "recompute"),
    each_value(grouped([(2, 1, 2), (4, 1, 3), (2, 1, 9), (4, 2, 2)]), [False, True]),
)
def test_overlapped_is_exact(get_pool: Any, world: int, ring: int, pieces: int, recompute: bool) -> None:
    for found in get_pool(world).run(_overlapped, list(MANY), ring, pieces, recompute):
        check_all(found)


def test_overlapped_is_exact_for_every_mask(get_pool: Any) -> None:
    for found in get_pool(2).run(_overlapped, list(CASES), 1, 4, False, timeout=240):
        check_all(found)


@given(kv=st.integers(1, 8), group=st.integers(1, 6), ranks=st.integers(1, 9), pieces=st.integers(1, 14))
def test_pieces_hold_every_head_of_every_rank_once(kv: int, group: int, ranks: int, pieces: int) -> None:
    shards = split_heads(kv * group, kv, ranks)
    runs = split_overlap_chunks(shards, pieces)
    most, widest = max(shard.kv_heads for shard in shards), max(max(s.group_sizes, default=1) for s in shards)
    assert len(runs) == min(pieces, most) and len(runs[0]) == (1 if pieces <= most else min(-(-pieces // most), widest))
    for rank, shard in enumerate(shards):
        queries = [h for run in runs for piece in run for h in range(piece[rank].q_start, piece[rank].q_stop)]
        assert queries == list(range(shard.q_start, shard.q_stop))
        keys = [h for run in runs for h in range(run[0][rank].kv_start, run[0][rank].kv_stop)]
        assert keys == list(range(shard.kv_start, shard.kv_stop))
        for of_run in runs:
            assert len({(piece[rank].kv_start, piece[rank].kv_stop) for piece in of_run}) == 1
            assert all(sum(piece[rank].group_sizes) == piece[rank].q_heads for piece in of_run)


def _padding() -> list[bool]:
    """Whether what the last rank has of the padding, a token, is zero: of the output, and of the gradients."""
    case, sp = Case(n=13, q_heads=8, kv_heads=4, batch=2), sharding(2)
    x = make(case)
    qkv = [sp.shard(x[name]).clone().requires_grad_() for name in "qkv"]
    plan, scores = lean_plan(case, x, qkv, sp, None, 2)
    out = plan(*qkv, scores)
    grads = torch.autograd.grad(out.sum(), qkv)
    return [not bool(y[:, -1].any()) for y in (out, *grads)]


def test_padding_gets_zeros(pool2: RankPool) -> None:
    assert pool2.run(_padding) == [[False] * 4, [True] * 4]


# ---------------------------------------------------------------------------------------------------------------------
# Which heads a chunk has.


@given(kv=st.integers(1, 12), group=st.integers(1, 5), ranks=st.integers(1, 9), chunks=st.integers(0, 14))
def test_chunks_hold_every_head_of_every_rank_once(kv: int, group: int, ranks: int, chunks: int) -> None:
    shards = split_heads(kv * group, kv, ranks)
    found = split_head_chunks(shards, chunks)
    most = max(shard.kv_heads for shard in shards)
    assert len(found) == (min(chunks, most) if chunks else most)
    for rank, shard in enumerate(shards):
        runs = [chunk[rank] for chunk in found]
        assert [h for run in runs for h in range(run.q_start, run.q_stop)] == list(range(shard.q_start, shard.q_stop))
        kv_heads = [h for run in runs for h in range(run.kv_start, run.kv_stop)]
        assert kv_heads == list(range(shard.kv_start, shard.kv_stop))
        assert sum((run.group_sizes for run in runs), ()) == shard.group_sizes
        assert all(len(run.group_sizes) == run.kv_heads and sum(run.group_sizes) == run.q_heads for run in runs)
        assert all((run.q_start + i) // group == run.kv_start + (run.kv_head_index or ())[i]
                   for run in runs if not run.is_regular for i in range(run.q_heads))  # fmt: skip
        assert max(run.kv_heads for run in runs) <= -(-most // len(found))


# ---------------------------------------------------------------------------------------------------------------------
# What is sent, saved, and there at once.


def _sent(case: Case, chunks: int) -> list[tuple[str, int]]:
    sp = sharding(dist.get_world_size())
    x = make(case)
    qkv = [sp.shard(x[name]).clone().requires_grad_() for name in "qkv"]
    plan, scores = lean_plan(case, x, qkv, sp, None, chunks)
    with count_sent() as log:
        out = plan(*qkv, scores)
        assert len(log) == 2 * (chunks or 1)
        out.backward(torch.ones_like(out))
    return [(entry.op, entry.bytes) for entry in log]


@pytest.mark.parametrize(
    ("world", "chunks", "dtype"), each_value(grouped([(2, 1), (2, 2), (2, 4), (4, 2)]), [torch.float32, torch.bfloat16])
)
def test_two_exchanges_a_chunk_of_exactly_the_formulas_bytes(
    get_pool: Any, world: int, chunks: int, dtype: torch.dtype
) -> None:
    case = Case(n=32, batch=2, q_heads=16, kv_heads=8, dtype=dtype)
    width = dtype.itemsize * case.batch * case.n * case.dim
    part = (world - 1) / world / world / chunks
    q, k = width * case.q_heads * part, width * case.kv_heads * part
    for log in get_pool(world).run(_sent, case, chunks):
        forward, backward = [("all_to_all", q + 2 * k), ("all_to_all", q)], [3 * q + 2 * k, q + 2 * k]
        assert log == forward * chunks + [("all_to_all", sent) for sent in backward] * chunks


def test_what_is_saved_is_of_my_tokens() -> None:
    """q, k, v and the output of my tokens and the log-sum-exp, each byte once; a fused projection is not kept by v."""
    case = Case(n=64, batch=2, q_heads=8, kv_heads=4)
    for rings, ulysses in ((1, 1), (1, 2), (2, 2), (4, 1)):
        with fake_world(0, rings * ulysses):
            sp = sharding(ulysses, rings)
            size = case.n // sp.size
            x = torch.zeros(case.batch, size, 16, case.dim, requires_grad=True) * 1
            q, k, v = x.split([8, 4, 4], 2)
            for qkv in ([q, k, v], [q * 1, k * 1, v]):
                plan, scores = lean_plan(case, {}, qkv, sp, None, 2)
                saved: list[Tensor] = []
                with torch.autograd.graph.saved_tensors_hooks(functools.partial(_noted, saved), lambda y: y):
                    out = plan(*qkv, scores)
                storages = {y.untyped_storage().data_ptr(): y.untyped_storage().nbytes() for y in saved}
                tokens = case.batch * size
                assert sum(storages.values()) == 4 * tokens * case.dim * (2 * 8 + 2 * 4) + 4 * tokens * 8
                out.sum().backward(retain_graph=True)


def _noted(into: list[Tensor], x: Tensor) -> Tensor:
    into.append(x)
    return x


@pytest.mark.parametrize("chunks", [2, 4])
def test_what_is_there_between_the_exchanges_is_a_chunks(chunks: int) -> None:
    """The largest buffer that an All-to-All fills or empties."""
    case = Case(n=32, q_heads=16, kv_heads=8)

    def largest(chunks: int) -> list[int]:
        sizes: list[int] = []
        original = dist.all_to_all_single

        def recorded(out: Tensor, x: Tensor, *args: Any, **more: Any) -> Any:
            sizes.append(max(out.numel(), x.numel()))
            return original(out, x, *args, **more)

        with fake_world(0, 2), mock.patch.object(dist, "all_to_all_single", recorded):
            sp = sharding(2)
            x = make(case)
            qkv = [sp.shard(x[name]).clone().requires_grad_() for name in "qkv"]
            plan, scores = lean_plan(case, x, qkv, sp, None, chunks)
            out = plan(*qkv, scores)
            forward = len(sizes)
            out.sum().backward()
        return [max(sizes[:forward]), max(sizes[forward:])]

    assert [chunks * size for size in largest(chunks)] == largest(1)


def test_memory_of_a_forward_and_a_backward(tmp_path: Path) -> None:
    """All that is there at once, above what is given, saved and returned: a quarter, and what does not depend on it."""
    case = Case(n=4096, q_heads=16, kv_heads=8, dim=32, v_dim=32)
    L, wide = case.n // 2, 4 * 32

    def transient(chunks: int) -> list[int]:
        with fake_world(0, 2):
            sp = sharding(2)
            qkv = [torch.zeros(1, L, h, 32, requires_grad=True) for h in (16, 8, 8)]
            plan, scores = lean_plan(case, {}, qkv, sp, None, chunks)
            outs: list[Tensor] = []
            forward = peak_of(lambda: outs.append(plan(*qkv, scores)), tmp_path / "f")
            grad = torch.zeros_like(outs[0])
            backward = peak_of(lambda: torch.autograd.grad(outs[0], qkv, grad), tmp_path / "b")
        return [forward - L * 16 * wide - 4 * case.n * 8, backward - L * 32 * wide]

    whole, quarter = transient(1), transient(4)
    for one, of_four in zip(whole, quarter, strict=True):
        assert of_four < 0.3 * one, (whole, quarter)


# ---------------------------------------------------------------------------------------------------------------------
# A keeper.


@pytest.mark.parametrize(("world", "ring"), [(2, 1), (2, 2), (4, 2)])
def test_exact_in_a_checkpointed_layer_that_keeps_its_output(get_pool: Any, world: int, ring: int) -> None:
    names = ["many KV heads", "ranks without heads", "all by head", "documents, window, sinks", "bf16"]
    for chunks in (1, 2):
        for found in get_pool(world).run(_compared, names, ring, chunks, True):
            check_all(found)


def test_exact_in_a_checkpointed_layer_on_one_device() -> None:
    check_all({name: errors(case, lean_run(case, one_device(), 2, True)) for name, case in MANY.items()})


def _replayed(ring: int, chunks: int) -> dict[str, Any]:
    case = MANY["sinks by head"]
    sp = sharding(dist.get_world_size() // ring, ring)
    x = make(case)
    qkv = [sp.shard(x[name]).clone().requires_grad_() for name in "qkv"]
    plan, scores = lean_plan(case, x, qkv, sp, x["sinks"].requires_grad_(), chunks)
    shelf = Shelf()
    saved: list[list[Tensor]] = []
    calls: list[int] = []
    original = TiledKernel.accumulate

    def counted(*args: Any) -> None:
        calls.append(1)
        original(*args)

    def of(keeper: Shelf) -> Tensor:
        saved.append([])
        with torch.autograd.graph.saved_tensors_hooks(functools.partial(_noted, saved[-1]), lambda y: y):
            return plan(*qkv, scores, keeper)

    with count_sent() as log, mock.patch.object(TiledKernel, "accumulate", counted):
        first = of(shelf)
        sent, called = len(log), len(calls)
        shelf.recomputing = True
        again = of(shelf)
        shapes = [[y.shape for y in ys] for ys in saved]
        same = torch.equal(first, again), shapes[0] == shapes[1], len(shapes[0])
        of_replay = len(log) - sent, len(calls) - called
        first.sum().backward()
        by_backward = len(calls) - called
    with torch.no_grad():
        shelf.recomputing = False
        plan(*qkv, scores, shelf)
    dropped = [one.dropped for one in shelf.kept]
    return {"same": same, "of replay": of_replay, "called": called, "by backward": by_backward, "dropped": dropped}


@pytest.mark.parametrize(("world", "ring"), [(2, 1), (4, 2), (2, 2)])
def test_a_replay_sends_nothing_and_calls_no_kernel(get_pool: Any, world: int, ring: int) -> None:
    for found in get_pool(world).run(_replayed, ring, 2):
        assert found.pop("called") > 0
        assert found == {"same": (True, True, 4), "of replay": (0, 0), "by backward": 0, "dropped": [1]}


@pytest.mark.parametrize("kept", [False, True])
def test_an_output_that_is_not_needed_any_more_is_freed(kept: bool) -> None:
    """Without the garbage collector: no cycle holds it."""
    case, sp = Case(), one_device()
    x = make(case)
    qkv = [x[name].requires_grad_() for name in "qkv"]
    plan, scores = lean_plan(case, x, qkv, sp, None, 2)
    shelf = Shelf() if kept else None
    gc.collect()
    gc.disable()
    try:
        for recomputing in (False, True) if shelf else (False,):
            if shelf:
                shelf.recomputing = recomputing
            out = plan(*qkv, scores, shelf)
            gone = weakref.ref(out)
            node = weakref.ref(out.grad_fn)
            del out
            assert gone() is None and node() is None
    finally:
        gc.enable()


# ---------------------------------------------------------------------------------------------------------------------
# As an option.


def test_the_kernel_must_give_the_log_sum_exp() -> None:
    sp, x = one_device(), make(Case())
    q, k, v = (x[name] for name in "qkv")

    def mine(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None) -> Tensor:
        return q

    assert longspan.explain_kernel(q, k, v, sp).name == "sdpa"
    choice = longspan.explain_kernel(q, k, v, sp, head_chunks=2)
    assert choice.name == "tiled" and "sdpa gives no log-sum-exp" in choice.reason
    for kernel in ("sdpa", "eager", mine):
        with pytest.raises(LongspanError, match=r"gives no log-sum-exp, .*kernel='auto' or 'tiled'.*head_chunks=1"):
            longspan.attention(q, k, v, sp, head_chunks=0, kernel=kernel)


def test_what_is_no_number_of_chunks_is_refused() -> None:
    sp, x = one_device(), make(Case())
    q, k, v = (x[name] for name in "qkv")
    for wrong in (-1, 1.5, True, "2"):
        with pytest.raises(LongspanError, match="head_chunks"):
            longspan.attention(q, k, v, sp, head_chunks=wrong)
    plan = longspan.prepare_attention(q, k, v, sp, head_chunks=2)
    assert isinstance(plan.method, ChunkedUlysses) and len(plan.method.chunks) == 2
    with pytest.raises(LongspanError, match="a plan has head_chunks already"):
        longspan.attention(q, k, v, sp, plan=plan, head_chunks=2)
    with pytest.raises(LongspanError, match="recompute_all_to_all=True"):
        longspan.prepare_attention(q, k, v, sp)(q, k, v, Scores(), Shelf())


def test_plans_of_other_chunks_are_other_plans() -> None:
    sp, x = one_device(), make(Case(q_heads=8, kv_heads=8))
    qkv = [x[name] for name in "qkv"]
    for chunks in (1, 2, 4, 0, 99):
        longspan.attention(*qkv, sp, head_chunks=chunks)
    methods = [plan.method for plan in sp.plans.values()]
    assert [len(m.chunks) if isinstance(m, ChunkedUlysses) else None for m in methods] == [None, 2, 4, 8, 8]
