"""A ring reads no buffer before its message has arrived, and changes or frees none before it is sent."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import longspan
from longspan.comm.collectives import P2PMessage, post
from tests.attn.attention import CASES, FEW, run
from tests.attn.inflight import InFlight, watched
from tests.choose import confirming
from tests.oracle import Case
from tests.pool import RankPool


def _sharding(ring: int, layout: str = "zigzag") -> longspan.SequenceSharding:
    mesh = longspan.init_mesh(ring=ring, ulysses=dist.get_world_size() // ring)
    return longspan.SequenceSharding(mesh, layout)


def _same(found: dict[str, torch.Tensor], plain: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(found[name], x) for name, x in plain.items())


def _differing(ring: int, layout: str, names: list[str]) -> tuple[list[str], int]:
    """Return the cases whose result changes if messages are watched, and the number of messages."""
    sp, differing, posted = _sharding(ring, layout), [], 0
    for name in names:
        plain = run(CASES[name], sp)
        with watched() as watch:
            found = run(CASES[name], sp)
        posted += watch.posted
        if not _same(found, plain):
            differing.append(name)
    return differing, posted


@pytest.mark.parametrize(
    ("world", "ring", "layout"),
    [(2, 2, "zigzag"), (4, 4, "contiguous"), *confirming([(4, 4, "zigzag"), (4, 2, "zigzag")])],
)
def test_results_are_equal_bit_for_bit_if_messages_arrive_as_late_as_possible(
    get_pool: Callable[[int], RankPool], world: int, ring: int, layout: str
) -> None:
    for differing, posted in get_pool(world).run(_differing, ring, layout, list(FEW), timeout=120):
        assert differing == []
        assert posted > 2 * len(FEW)


def _without_one_wait(case: Case, message: int | None) -> tuple[list[int], bool, str]:
    """Return this rank's receives by number, whether its result is right, and the error."""
    sp = _sharding(dist.get_world_size())
    plain = run(case, sp)
    text, found = "", {}
    try:
        with watched(message if dist.get_rank() == 1 else None) as watch:
            found = run(case, sp)
    except InFlight as error:
        text = str(error)
    return [work.number for work in watch.works if not work.sends], _same(found, plain), text


@pytest.mark.parametrize("case", [Case(n=19), *confirming([Case(n=23, window=6)])])
def test_every_wait_for_a_receive_is_needed(pool2: RankPool, case: Case) -> None:
    """Leave out each wait of rank 1. Results are summed over the ranks, so both are wrong."""
    receives, right, text = pool2.run(_without_one_wait, case, None)[1]
    assert len(receives) >= 2 and right and not text
    for message in receives:
        outcomes = pool2.run(_without_one_wait, case, message)
        assert any(text or not right for _, right, text in outcomes), message


# ---------------------------------------------------------------------------------------------------------------------
# `watched` detects each misuse.


def _start(x: torch.Tensor, y: torch.Tensor) -> list[Any]:
    group, peer = dist.group.WORLD, 1 - dist.get_rank()
    assert group is not None
    return list(post([P2PMessage(x, peer, 0)], [P2PMessage(y, peer, 0)], group))


def _read_early() -> tuple[bool, bool]:
    x, y = torch.ones(5), torch.zeros(5)
    with watched():
        works = _start(x, y)
        early = y.clone()
        for work in works:
            work.wait()
    return bool(early.isnan().all()), torch.equal(y, x)


def _misuse(kind: str) -> str:
    x, y = torch.ones(5), torch.zeros(5)
    try:
        with watched():
            works = _start(x, y)
            if kind == "send changed":
                x.add_(1)
            elif kind == "receive written":
                y[2] = 0
            elif kind == "send freed":
                del x
            elif kind == "receive freed":
                del y
            gc.collect()
            for work in works if kind != "not waited for" else works[:1]:
                work.wait()
        return "nothing"
    except InFlight as error:
        return str(error)


MISUSES = {
    "none": "nothing",
    "send changed": "a send of (5,): its tensor was changed",
    "receive written": "a receive of (5,): its tensor was changed",
    "send freed": "a send of (5,): its tensor was freed",
    "receive freed": "a receive of (5,): its tensor was freed",
    "not waited for": "1 of 2 messages were never waited for",
}


def test_misuse_of_tensors_in_flight_is_an_error(pool2: RankPool) -> None:
    assert pool2.run(_read_early) == [(True, True)] * 2  # a receive buffer is NaN until then
    for kind, text in MISUSES.items():
        for found in pool2.run(_misuse, kind):
            assert text in found
