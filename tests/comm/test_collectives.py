"""Counted sends, the exchange of Python objects, and errors that reach every rank."""

from __future__ import annotations

import weakref
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from longspan.comm.agree import broadcast_object, gather_objects, on_every_rank
from longspan.core.errors import LongspanError
from tests.counting import Sent, count_sent
from tests.pool import RankPool

pytestmark = pytest.mark.fast


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
