"""A ring whose messages are watched: nothing is read before it has come, or changed or freed before it has left."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import longspan
from longspan.comm.p2p import P2PMessage, post
from tests.attention import CASES, run
from tests.inflight import InFlight, watched
from tests.oracle import Case
from tests.pool import RankPool

NAMES = [name for name in CASES if not name.startswith("long")]


def _sharding(ring: int, layout: str = "zigzag") -> longspan.SequenceSharding:
    mesh = longspan.init_mesh(ring=ring, ulysses=dist.get_world_size() // ring)
    return longspan.SequenceSharding(mesh, layout, ring_impl="p2p")


def _same(found: dict[str, torch.Tensor], plain: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(found[name], x) for name, x in plain.items())


def _alike(ring: int, layout: str, names: list[str]) -> tuple[list[str], int]:
    """Cases whose result is another one when messages are watched, and how many messages there were."""
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
    [
        (2, 2, "zigzag"),
        (4, 4, "contiguous"),
        *(pytest.param(*p, marks=pytest.mark.slow) for p in ((4, 4, "zigzag"), (4, 2, "zigzag"))),
    ],
)
def test_the_same_bits_when_messages_come_as_late_as_they_may(
    get_pool: Callable[[int], RankPool], world: int, ring: int, layout: str
) -> None:
    for differing, posted in get_pool(world).run(_alike, ring, layout, NAMES, timeout=120):
        assert differing == []
        assert posted > 2 * len(NAMES)


def _without_one_wait(case: Case, message: int | None) -> tuple[list[int], bool, str]:
    """This rank's receives by number, whether its result is right, and what was said."""
    sp = _sharding(dist.get_world_size())
    plain = run(case, sp)
    said, found = "", {}
    try:
        with watched(message if dist.get_rank() == 1 else None) as watch:
            found = run(case, sp)
    except InFlight as error:
        said = str(error)
    return [work.number for work in watch.works if not work.sends], _same(found, plain), said


@pytest.mark.parametrize("case", [Case(n=19), Case(n=23, window=6)], ids=["causal", "window"])
def test_every_receive_is_needed_in_its_time(pool2: RankPool, case: Case) -> None:
    """Each wait of rank 1 left out, one after the other. Results are summed over the ranks, so both see it."""
    receives, right, said = pool2.run(_without_one_wait, case, None)[1]
    assert len(receives) >= 2 and right and not said
    for message in receives:
        outcomes = pool2.run(_without_one_wait, case, message)
        assert any(said or not right for _, right, said in outcomes), message


# ---------------------------------------------------------------------------------------------------------------------
# What is watched for is found.


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


def test_what_is_read_early_is_not_a_number(pool2: RankPool) -> None:
    assert pool2.run(_read_early) == [(True, True)] * 2


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("right", "nothing"),
        ("send changed", "a send of (5,): its tensor was changed"),
        ("receive written", "a receive of (5,): its tensor was changed"),
        ("send freed", "a send of (5,): its tensor was freed"),
        ("receive freed", "a receive of (5,): its tensor was freed"),
        ("not waited for", "1 of 2 messages were never waited for"),
    ],
)
def test_a_tensor_under_way_that_is_touched_is_an_error(pool2: RankPool, kind: str, said: str) -> None:
    for found in pool2.run(_misuse, kind):
        assert said in found
