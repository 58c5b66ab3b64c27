"""The rings written out: equal to the backend's own collectives, and to the byte what their formulas say they send."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.plain_collectives import naive_all_gather, ring_all_gather, ring_all_reduce, ring_reduce_scatter
from longspan.bench.meters import Sent, count_sent
from longspan.comm.errors import on_every_rank
from longspan.comm.objects import broadcast_object, gather_objects
from longspan.core.errors import LongspanError
from tests.pool import RankPool
from tests.tolerance import MARGIN, eps, units

DTYPES = (torch.float32, torch.bfloat16, torch.int64)
SHAPES = ((1,), (3,), (2, 5), (7, 3, 5), (4, 1, 2, 3), (0, 3), (2, 0))  # of one rank's part
ALL_GATHERS = (ring_all_gather, naive_all_gather)


def _sample(shape: tuple[int, ...], dtype: torch.dtype, rank: int) -> Tensor:
    """Different on every rank and at every place; what `rank` is given can be made again on the others."""
    generator = torch.Generator().manual_seed(rank)
    if dtype is torch.int64:
        return torch.randint(-(2**40), 2**40, shape, generator=generator)
    return torch.randn(shape, generator=generator).to(dtype)


def _gather_alike(x: Tensor, ranks: int) -> None:
    expected = x.new_empty(ranks * x.shape[0], *x.shape[1:])
    dist.all_gather_into_tensor(expected, x.contiguous())
    for gather in ALL_GATHERS:
        before = x.clone()
        out = gather(x, dist.group.WORLD)
        assert torch.equal(out, expected) and out.is_contiguous() and torch.equal(x, before)


def _all_gather() -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for dtype in DTYPES:
        for shape in SHAPES:
            _gather_alike(_sample(shape, dtype, rank), ranks)
        _gather_alike(_sample((4, 6), dtype, rank).T, ranks)
        _gather_alike(_sample((6, 4), dtype, rank)[::2, 1:3], ranks)
        _gather_alike(_sample((1, 4), dtype, rank).expand(3, 4), ranks)
    assert not ring_all_gather(torch.ones(2, requires_grad=True), dist.group.WORLD).requires_grad


@pytest.mark.parametrize("pool", [2, 4], indirect=True)
def test_all_gather_equals_the_backends(pool: RankPool) -> None:
    pool.run(_all_gather)


def _sum_alike(make: Callable[[int], Tensor]) -> None:
    """`make(rank)` is that rank's input, [P * n, ...]."""
    rank, ranks, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    x = make(rank)
    before = x.clone()
    mine, whole = ring_reduce_scatter(x, group), ring_all_reduce(x, group)
    assert torch.equal(x, before)
    assert mine.dtype == whole.dtype == x.dtype and whole.shape == x.shape
    assert mine.is_contiguous() and whole.is_contiguous()
    assert torch.equal(mine, whole.tensor_split(ranks)[rank])  # and so all ranks hold the same bits
    theirs = torch.empty_like(mine)
    dist.reduce_scatter_tensor(theirs, x.contiguous())
    if not x.dtype.is_floating_point:
        assert torch.equal(mine, theirs)
        return
    # Terms are added in fp32; the sum is rounded once more where the dtype is narrower. The backend adds in the dtype.
    terms = torch.stack([make(r).double() for r in range(ranks)])
    exact, size = terms.sum(0), terms.abs().sum(0)
    last = exact.abs() * (eps(x.dtype) / eps(torch.float32) if x.dtype is torch.bfloat16 else 0) / MARGIN
    assert units(whole, exact, size + last, torch.float32) <= MARGIN
    part = (y.tensor_split(ranks)[rank] for y in (exact, size))
    assert units(theirs, *part, x.dtype) <= MARGIN


def _reduce_scatter() -> None:
    ranks = dist.get_world_size()
    for dtype in DTYPES:
        for n, *rest in SHAPES:
            _sum_alike(lambda rank, shape=(ranks * n, *rest), dtype=dtype: _sample(shape, dtype, rank))
        _sum_alike(lambda rank, dtype=dtype: _sample((5, 2 * ranks), dtype, rank).T)
        _sum_alike(lambda rank, dtype=dtype: _sample((4 * ranks, 3), dtype, rank)[::2, 1:])


@pytest.mark.parametrize("pool", [2, 4], indirect=True)
def test_sums_equal_the_backends(pool: RankPool) -> None:
    pool.run(_reduce_scatter)


@pytest.mark.slow
def test_with_8_ranks(pool8: RankPool) -> None:
    pool8.run(_all_gather)
    pool8.run(_reduce_scatter)


def _half_precision_is_added_in_fp32(dtype: torch.dtype) -> float:
    # 256 and 2048 are where bf16 and fp16 begin to lose every single 1 that is added.
    big = 256.0 if dtype is torch.bfloat16 else 2048.0
    ranks = dist.get_world_size()
    x = torch.full((ranks,), big if dist.get_rank() == 0 else 1.0, dtype=dtype)
    return ring_reduce_scatter(x, dist.group.WORLD).item() - big


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_added_in_fp32(pool4: RankPool, dtype: torch.dtype) -> None:
    # Three ones came in: 259, and 2051, lie between two multiples of 2 and go to that of 4. Added in the dtype itself,
    # the ranks whose ring starts with the big one would lose all three.
    assert pool4.run(_half_precision_is_added_in_fp32, dtype) == [4.0] * 4


def _subgroup() -> tuple[list[int], list[int]]:
    """Two rings in one job: ranks 0, 2 and ranks 1, 3. A rank's place in its ring is not its rank in the job."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    rank = dist.get_rank()
    x = torch.tensor([10 * rank, 10 * rank + 1])
    group = groups[rank % 2]
    gathered = [gather(x, group).tolist() for gather in ALL_GATHERS]
    assert gathered[0] == gathered[1]
    return gathered[0], ring_all_reduce(x, group).tolist()


def test_in_a_subgroup(pool4: RankPool) -> None:
    even = ([0, 1, 20, 21], [20, 22])
    odd = ([10, 11, 30, 31], [40, 42])
    assert pool4.run(_subgroup) == [even, odd, even, odd]


def _sent(dtype: torch.dtype) -> dict[str, list[int]]:
    group, ranks = dist.group.WORLD, dist.get_world_size()
    part, whole = torch.ones(6, 5, dtype=dtype), torch.ones(6 * ranks, 5, dtype=dtype)
    sent = {}
    for function, x in [
        (ring_all_gather, part),
        (naive_all_gather, part),
        (ring_reduce_scatter, whole),
        (ring_all_reduce, whole),
    ]:
        with count_sent() as log:
            function(x, group)
        assert {entry.op for entry in log} == {"p2p"}
        sent[function.__name__] = [entry.bytes for entry in log]
    return sent


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pool", [2, 4], indirect=True)
def test_bytes_sent(pool: RankPool, dtype: torch.dtype) -> None:
    ranks = pool.world_size
    n = 6 * 5 * dtype.itemsize  # bytes of a part
    partial = 6 * 5 * max(4, dtype.itemsize)  # of a partial sum
    for rank, sent in enumerate(pool.run(_sent, dtype)):
        assert sent["ring_all_gather"] == [n] * (ranks - 1)
        assert sent["ring_reduce_scatter"] == [partial] * (ranks - 1)
        assert sent["ring_all_reduce"] == [partial] * (ranks - 1) + [n] * (ranks - 1)
        assert sent["naive_all_gather"] == ([ranks * n] * (ranks - 1) if rank == 0 else [n])


def _counted_sends() -> list[Sent]:
    rank = dist.get_rank()
    buffer = torch.empty(5)
    with count_sent() as log:
        work = dist.isend(torch.ones(5), 1) if rank == 0 else dist.irecv(buffer, 0)
        work.wait()
        op = dist.P2POp(dist.isend, torch.ones(5), 1) if rank == 0 else dist.P2POp(dist.irecv, buffer, 0)
        for request in dist.batch_isend_irecv([op]):
            request.wait()
    assert rank == 0 or torch.equal(buffer, torch.ones(5))
    assert dist.isend.__module__ == dist.P2POp.__module__ == "torch.distributed.distributed_c10d"
    return log


def test_the_count_sees_sends_alone_and_in_batches(pool2: RankPool) -> None:
    assert pool2.run(_counted_sends) == [[Sent("p2p", 20)] * 2, []]


def _bad_input() -> None:
    group = dist.group.WORLD
    for function in (*ALL_GATHERS, ring_reduce_scatter, ring_all_reduce):
        with pytest.raises(LongspanError, match=r"a tensor without dimensions has no parts; pass x.unsqueeze\(0\)"):
            function(torch.tensor(1.0), group)
    for function in (ring_reduce_scatter, ring_all_reduce):
        with pytest.raises(LongspanError, match=r"shape \(5, 3\) does not divide over 4 ranks; pad it to 8"):
            function(torch.zeros(5, 3), group)


def test_bad_input(pool4: RankPool) -> None:
    pool4.run(_bad_input)


def _alone() -> None:
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    x = torch.randn(3, 2)
    for function in (*ALL_GATHERS, ring_reduce_scatter, ring_all_reduce):
        assert function(x, alone) is x


def test_alone_nothing_happens(pool2: RankPool) -> None:
    x = torch.randn(3, 2)
    for function in (*ALL_GATHERS, ring_reduce_scatter, ring_all_reduce):
        assert function(x, None) is x
    pool2.run(_alone)


def _objects() -> tuple[list[Any], Any, list[bool]]:
    """Return all ranks' objects, the first rank's, and whether any tensor that was sent is still alive."""
    sent: list[weakref.ref[Tensor]] = []
    plain = dist.all_gather, dist.broadcast

    def all_gather(outs: list[Tensor], x: Tensor, **more: Any) -> Any:
        sent.extend(weakref.ref(each) for each in (*outs, x))
        return plain[0](outs, x, **more)

    def broadcast(x: Tensor, **more: Any) -> Any:
        sent.append(weakref.ref(x))
        return plain[1](x, **more)

    rank, group, alive = dist.get_rank(), dist.group.WORLD, []
    with mock.patch.object(dist, "all_gather", all_gather), mock.patch.object(dist, "broadcast", broadcast):
        for _ in range(100):
            every = gather_objects({"rank": rank, "more": "x" * 100 * rank}, group)
            alive.append(any(x() is not None for x in sent))
            first = broadcast_object(None if rank else ("first", [rank]), group)
            alive.append(any(x() is not None for x in sent))
    return every, first, alive


def _fail(kind: type[Exception] | None, ranks: list[int]) -> str:
    def action() -> int:
        if kind is not None and dist.get_rank() in ranks:
            raise kind("no more")
        return dist.get_rank()

    try:
        return str(on_every_rank(action, dist.group.WORLD))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def test_objects_arrive_and_gloo_holds_none_of_their_tensors(pool4: RankPool) -> None:
    """A thread of gloo that frees a tensor while Python ends aborts the process."""
    for every, first, alive in pool4.run(_objects):
        assert every == [{"rank": rank, "more": "x" * 100 * rank} for rank in range(4)]
        assert first == ("first", [0]) and not any(alive)


def test_an_exception_on_one_rank_reaches_all(pool2: RankPool) -> None:
    assert pool2.run(_fail, None, []) == ["0", "1"]
    said = pool2.run(_fail, ZeroDivisionError, [1])
    assert said == ["LongspanError: rank 1 failed: ZeroDivisionError: no more", "ZeroDivisionError: no more"]
    assert pool2.run(_fail, LongspanError, [0]) == ["LongspanError: rank 0 failed: no more"] * 2
    assert pool2.run(_fail, LongspanError, [0, 1]) == ["LongspanError: no more"] * 2
