"""All-to-alls in chunks that overlap with attention: their order, their bytes, and when they are chosen."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import longspan
from longspan.attn.methods.head_chunks import ChunkedUlysses
from longspan.attn.methods.local import LocalAttention
from longspan.comm.all_to_all import AllToAll
from longspan.comm.link import AllToAllLink, choose_overlap_chunks
from longspan.core.errors import LongspanError
from tests.attn.attention import one_device
from tests.counting import count_sent
from tests.fakes import fake_world
from tests.oracle import Case, make
from tests.pool import RankPool


def _events(chunks: int, recompute: bool) -> dict[str, Any]:
    """Return the order of starts, computations and waits, and the bytes sent."""
    case = Case(n=32, batch=2, q_heads=16, kv_heads=8)
    sp = longspan.SequenceSharding(longspan.init_mesh(ulysses=2), overlap_chunks=chunks)
    x = make(case)
    qkv = [sp.shard(x[name]).clone().requires_grad_() for name in "qkv"]
    log: list[str] = []
    start, wait, forward, backward = (
        dist.all_to_all_single,
        AllToAll.wait,
        LocalAttention.forward,
        LocalAttention.backward,
    )

    def noted(name: str, function: Any) -> Any:
        def wrapped(*args: Any, **more: Any) -> Any:
            log.append(name)
            return function(*args, **more)

        return wrapped

    with (
        mock.patch.object(dist, "all_to_all_single", noted("start", start)),
        mock.patch.object(AllToAll, "wait", noted("wait", wait)),
        mock.patch.object(LocalAttention, "forward", noted("compute", forward)),
        mock.patch.object(LocalAttention, "backward", noted("compute", backward)),
        count_sent() as sent,
    ):
        out = longspan.attention(*qkv, sp, head_chunks=chunks if recompute else 1)
        of_forward = list(log)
        log.clear()
        out.sum().backward()
    return {"forward": of_forward, "backward": log, "sent": sum(entry.bytes for entry in sent)}


# A chunk computes while the next chunk is scattered and the previous one gathered.
IN_TURN = [
    "start", "wait", "start", "compute", "start",
    "wait", "start", "compute", "start", "wait",
    "wait", "compute", "start", "wait", "wait",
]  # fmt: skip


@pytest.mark.parametrize("recompute", [False, True])
def test_all_to_alls_are_in_flight_while_another_chunk_computes(pool2: RankPool, recompute: bool) -> None:
    for found in pool2.run(_events, 3, recompute):
        assert found["forward"] == found["backward"] == IN_TURN
        row = 4 * 2 * 32 * 8 // 2 // 2  # fp32, batch, tokens of a rank, head_dim 8, the other rank's half
        assert found["sent"] == row * ((2 * 16 + 2 * 8) + ((4 * 16 + 4 * 8) if recompute else (2 * 16 + 2 * 8)))


def test_the_number_of_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_world(0, 2):
        # KV heads of eight query heads, requested chunks, chunks.
        for kv_heads, asked, expected in ((8, 1, None), (2, 4, 4), (1, 3, 3), (8, 3, 3), (8, 99, 4), (8, "auto", None)):
            sp = longspan.SequenceSharding(longspan.init_mesh(ulysses=2), overlap_chunks=asked)  # type: ignore[arg-type]
            q, k, v = (torch.zeros(1, 8, heads, 4) for heads in (8, kv_heads, kv_heads))
            method = longspan.prepare_attention(q, k, v, sp).method
            found = len(method.chunks) if isinstance(method, ChunkedUlysses) else None
            assert found == expected, (kv_heads, asked)
            assert expected is None or (
                isinstance(method, ChunkedUlysses) and method.overlaps and not method.recompute_all_to_all
            )
        # Two hosts of one rank each: chosen if the all-to-all takes long and the kernel supports it.
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
        sp = longspan.SequenceSharding(longspan.init_mesh(ulysses=2))
        assert sp.all_to_all_link is not None
        sp.all_to_all_link = AllToAllLink(1e-4, 1e-8)
        for tokens, kernel, overlaps in ((8, "auto", False), (1 << 14, "auto", True), (1 << 14, "sdpa", False)):
            qkv = [torch.zeros(1, tokens, 8, 16) for _ in range(3)]
            assert isinstance(longspan.prepare_attention(*qkv, sp, kernel=kernel).method, ChunkedUlysses) == overlaps
    alone = longspan.SequenceSharding(one_device().mesh, overlap_chunks=4)
    assert not isinstance(longspan.prepare_attention(q, k, v, alone).method, ChunkedUlysses)


@pytest.mark.parametrize(
    ("link", "sent", "chunks"),
    [
        (None, 1 << 30, 1),
        (AllToAllLink(1e-3, 4e-8), 512 * 24 * 64 * 4, 4),  # 200 Mbit/s, 2 ranks a host: 126 ms
        (AllToAllLink(1e-3, 4e-8), 64 << 10, 1),  # 4 ms, 1 of them latency
        (AllToAllLink(3e-5, 8e-11), 4 << 20, 1),  # 12.5 GB/s: 0.4 ms
        (AllToAllLink(3e-5, 8e-11), 128 << 20, 4),
    ],
)
def test_the_default_depends_on_the_time_of_the_all_to_all(link: AllToAllLink | None, sent: int, chunks: int) -> None:
    assert choose_overlap_chunks(sent, link) == chunks


def _chunks_by_default() -> tuple[Any, int, int]:
    """Rank 1 measures a slow link, the others a fast one; return the link, the chunks and the number of all-to-alls."""
    mesh = longspan.init_mesh(ring=2, ulysses=2)
    with mock.patch.dict(os.environ, LOCAL_WORLD_SIZE="1"):
        assert longspan.SequenceSharding(mesh).all_to_all_link is not None  # measured, not patched
        seconds = (1e-4, 5e-2) if dist.get_rank() == 1 else (1e-5, 1e-5)
        with mock.patch("longspan.comm.link._seconds", lambda size, *_: seconds[size > 1 << 16]):
            sp = longspan.SequenceSharding(mesh)
    q, k = torch.ones(1, 256, 16, 8), torch.ones(1, 256, 8, 8)
    method = longspan.prepare_attention(q, k, k, sp).method
    with count_sent() as sent:
        longspan.attention(q, k, k, sp)
    return sp.all_to_all_link, len(getattr(method, "chunks", "1")), sum("all_to_all" in e.op for e in sent)


def test_all_ranks_of_a_ring_use_the_slowest_link(pool4: RankPool) -> None:
    found = pool4.run(_chunks_by_default)
    assert found == [(AllToAllLink(1e-4, (5e-2 - 1e-4) / ((1 << 20) - (4 << 10))), 4, 8)] * 4


def test_impossible_chunks_are_refused() -> None:
    for wrong in (-1, 0, 1.5, True, "all"):
        with pytest.raises(LongspanError, match="overlap_chunks"):
            longspan.SequenceSharding(one_device().mesh, overlap_chunks=wrong)  # type: ignore[arg-type]
    with fake_world(0, 2):
        q, k, v = (torch.zeros(1, 8, 8, 4) for _ in range(3))
        sp = longspan.SequenceSharding(longspan.init_mesh(ulysses=2), overlap_chunks=2)
        with pytest.raises(LongspanError, match=r"log-sum-exp.*overlap_chunks=1"):
            longspan.attention(q, k, v, sp, kernel="sdpa")
