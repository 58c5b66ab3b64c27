"""Collectives written out as ring messages (the benchmarks' baselines): equal results, and bytes as their formulas say.

Also the exchange of Python objects, and errors that reach every rank.
"""

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
from longspan.comm.objects import broadcast_object, gather_objects, on_every_rank
from longspan.core.errors import LongspanError
from tests.pool import RankPool
from tests.tolerance import MARGIN, eps, units

DTYPES = (torch.float32, torch.bfloat16, torch.int64)
SHAPES = ((1,), (3,), (7, 3, 5), (0, 3), (2, 0))  # of one rank's part
ALL_GATHERS = (ring_all_gather, naive_all_gather)
SUMS = (ring_reduce_scatter, ring_all_reduce)


def _sample(shape: tuple[int, ...], dtype: torch.dtype, rank: int) -> Tensor:
    """Return the tensor of a rank; every rank can compute it."""
    generator = torch.Generator().manual_seed(rank)
    if dtype is torch.int64:
        return torch.randint(-(2**40), 2**40, shape, generator=generator)
    return torch.randn(shape, generator=generator).to(dtype)


def _check_gathers(x: Tensor, ranks: int) -> None:
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
            _check_gathers(_sample(shape, dtype, rank), ranks)
    for strided in (_sample((4, 6), dtype, rank).T, _sample((6, 4), dtype, rank)[::2, 1:3]):
        _check_gathers(strided, ranks)
    assert not ring_all_gather(torch.ones(2, requires_grad=True), dist.group.WORLD).requires_grad


def _check_sums(make: Callable[[int], Tensor]) -> None:
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


def _sums() -> None:
    ranks = dist.get_world_size()
    for dtype in DTYPES:
        for n, *rest in SHAPES:
            _check_sums(lambda rank, shape=(ranks * n, *rest), dtype=dtype: _sample(shape, dtype, rank))
    _check_sums(lambda rank: _sample((5, 2 * ranks), torch.float32, rank).T)


@pytest.mark.parametrize("pool", [2, 4, pytest.param(8, marks=[pytest.mark.slow, pytest.mark.confirms])], indirect=True)
def test_results_equal_the_backends(pool: RankPool) -> None:
    pool.run(_all_gather)
    pool.run(_sums)


def _sent(dtype: torch.dtype) -> dict[str, list[int]]:
    sent = {}
    for function in (*ALL_GATHERS, *SUMS):
        x = torch.ones(6 * (dist.get_world_size() if function in SUMS else 1), 5, dtype=dtype)
        with count_sent() as log:
            function(x, dist.group.WORLD)
        assert {entry.op for entry in log} == {"p2p"}
        sent[function.__name__] = [entry.bytes for entry in log]
    return sent


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64])
def test_bytes_sent(pool4: RankPool, dtype: torch.dtype) -> None:
    n = 6 * 5 * dtype.itemsize  # bytes of a part
    partial = 6 * 5 * max(4, dtype.itemsize)  # of a partial sum
    for rank, sent in enumerate(pool4.run(_sent, dtype)):
        assert sent["ring_all_gather"] == [n] * 3
        assert sent["ring_reduce_scatter"] == [partial] * 3
        assert sent["ring_all_reduce"] == [partial] * 3 + [n] * 3
        assert sent["naive_all_gather"] == ([4 * n] * 3 if rank == 0 else [n])


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


def test_count_sent_counts_single_and_batched_sends(pool2: RankPool) -> None:
    assert pool2.run(_counted_sends) == [[Sent("p2p", 20)] * 2, []]


def _objects() -> tuple[list[Any], Any, list[bool]]:
    """Return all ranks' objects, the first rank's, and after each call whether a sent tensor is alive."""
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
        for _ in range(50):
            every = gather_objects({"rank": rank, "more": "x" * 100 * rank}, group)
            alive.append(any(x() is not None for x in sent))
            first = broadcast_object(None if rank else ("first", [rank]), group)
            alive.append(any(x() is not None for x in sent))
    return every, first, alive


def _fail(kind: type[Exception] | None, ranks: list[int]) -> str:
    def action() -> int:
        if kind is not None and dist.get_rank() in ranks:
            raise kind("planted")
        return dist.get_rank()

    try:
        return str(on_every_rank(action, dist.group.WORLD))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def test_objects_are_sent_and_gloo_releases_their_tensors(pool4: RankPool) -> None:
    """If a thread of gloo frees a tensor while Python ends, the process aborts."""
    for every, first, alive in pool4.run(_objects):
        assert every == [{"rank": rank, "more": "x" * 100 * rank} for rank in range(4)]
        assert first == ("first", [0]) and not any(alive)


def test_an_exception_on_one_rank_reaches_all(pool2: RankPool) -> None:
    assert pool2.run(_fail, None, []) == ["0", "1"]
    errors = pool2.run(_fail, ZeroDivisionError, [1])
    assert errors == ["LongspanError: rank 1 failed: ZeroDivisionError: planted", "ZeroDivisionError: planted"]
    assert pool2.run(_fail, LongspanError, [0]) == ["LongspanError: rank 0 failed: planted"] * 2
    assert pool2.run(_fail, LongspanError, [0, 1]) == ["LongspanError: planted"] * 2
