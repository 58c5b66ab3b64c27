"""The rules for lost and stuck ranks, and the threads that apply them."""

from __future__ import annotations

import socket
import threading
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from longspan.compat.reading import decoder_layers
from longspan.core.memory import Memory
from longspan.ranks.watch import Beat, Judge, Watch, _line_of
from tests.models import batch, build
from tests.pool import RankPool

STEP = Beat(
    number=1, place="step 3, optimizer", moves=7, unlimited=False, longest_s=2.0, where="loop.py:1 in run", waits=True
)


def _judge(judge: Judge, seconds: int, *beats: Beat, cpu: float = 0.0) -> str:
    """Return the verdict after some seconds in which all ranks beat, but nothing else changes."""
    verdict = ""
    for second in range(seconds + 1):
        beats = tuple(replace(beat, number=beat.number + 1, cpu_s=beat.cpu_s + cpu) for beat in beats)
        verdict = verdict or judge.verdict(dict(enumerate(beats)), float(second > 0))
    return verdict


def _judge_of_three(timeout_s: float = 10.0, *, cpu: bool = True) -> Judge:
    return Judge(3, timeout_s, cpu=cpu)


# --- the rules


def test_a_rank_without_a_heartbeat_is_named_with_its_place() -> None:
    judge, silent = _judge_of_three(), replace(STEP, place="step 2, forward and backward", number=5)
    for second in range(11):
        beat = replace(STEP, number=second, moves=second, cpu_s=float(second))
        assert not judge.verdict({0: beat, 1: silent, 2: beat}, float(second > 0))
    verdict = judge.verdict({0: replace(beat, number=11), 1: silent, 2: replace(beat, number=11)}, 1)
    assert verdict.startswith("rank 1 of 3: no heartbeat for 10 s")
    assert "rank 1: step 2, forward and backward, at loop.py:1 in run" in verdict
    assert "(the others: rank 0: step 3, optimizer" in verdict


def test_a_rank_that_never_beats_or_stops_in_a_long_phase_is_lost() -> None:
    assert "rank 2 of 3: no heartbeat" in _silent(Beat())
    assert "rank 2 of 3: no heartbeat" in _silent(replace(STEP, place="save", unlimited=True))
    assert not _silent(replace(STEP, done=True))


def _silent(third: Beat) -> str:
    judge, verdict = _judge_of_three(), ""
    for second in range(13):
        beat = replace(STEP, number=second, moves=second)
        verdict = verdict or judge.verdict({0: beat, 1: beat, 2: third}, 1)
    return verdict


def test_ranks_that_all_wait_and_compute_nothing_are_stuck() -> None:
    hung = replace(STEP, waits=False, where="model.py:9 in forward")
    assert not _judge(_judge_of_three(), 9, STEP, hung, STEP)
    verdict = _judge(_judge_of_three(), 11, STEP, hung, STEP)
    assert verdict.startswith("rank 1 of 3 is stuck") and "model.py:9 in forward" in verdict
    assert _judge(_judge_of_three(), 11, STEP, STEP, STEP).startswith("ranks 0, 1, 2 of 3 are stuck")


def test_ranks_that_compute_have_ten_times_their_longest_phase() -> None:
    slow = replace(STEP, longest_s=4.0)
    assert not _judge(_judge_of_three(), 39, slow, STEP, STEP, cpu=0.5)
    assert "are stuck" in _judge(_judge_of_three(), 41, slow, STEP, STEP, cpu=0.5)
    assert not _judge(_judge_of_three(cpu=False), 39, slow, STEP, STEP)  # on GPUs a rank that waits looks busy
    first = replace(STEP, longest_s=0.0)
    assert not _judge(_judge_of_three(), 1799, first, first, first, cpu=0.5)
    assert "for 1801 s" in _judge(_judge_of_three(), 1801, first, first, first, cpu=0.5)


def test_long_phases_have_no_limit_and_only_rank_0_judges_stalls() -> None:
    export = replace(STEP, place="export", unlimited=True)
    assert not _judge(_judge_of_three(), 2_000, export, STEP, STEP)
    assert not _judge(_judge_of_three(), 2_000, STEP)  # the beats of one rank, as the others see rank 0's


# --- the threads


class _Rank(Watch):
    """A watch that stores its verdicts, and that can fall silent."""

    def __init__(self, store: Any, rank: int, world_size: int = 3) -> None:
        self.verdicts: list[str] = []
        self.ended = threading.Event()
        super().__init__(store.clone(), rank, world_size, 1.0, self._end_rank)

    def _end_rank(self, verdict: str) -> None:
        self.verdicts.append(verdict)
        self.ended.set()
        self._leave.set()


def test_all_ranks_end_with_the_name_and_place_of_a_silent_one(store: Any) -> None:
    ranks = [_Rank(store, rank) for rank in range(3)]
    for rank in ranks:
        rank.at("forward and backward", 5)
        rank.__enter__()
    ranks[1].at("optimizer", 5)
    time.sleep(0.5)
    assert not any(rank.verdicts for rank in ranks)
    ranks[1]._leave.set()  # without its last beat, as a process that is stopped
    for rank in (ranks[0], ranks[2]):
        assert rank.ended.wait(30)
        assert "rank 1 of 3: no heartbeat for 1 s" in rank.verdicts[0]
        assert "rank 1: step 5, optimizer" in rank.verdicts[0]


def test_a_rank_that_is_done_is_not_lost_and_one_that_failed_is(store: Any) -> None:
    ranks = [_Rank(store, rank) for rank in range(3)]
    for rank in ranks:
        rank.__enter__()
    ranks[2].__exit__(None)
    ranks[1].__exit__(ValueError)
    assert ranks[0].ended.wait(30)
    assert "rank 1 of 3: no heartbeat" in ranks[0].verdicts[0] and "ended by ValueError" in ranks[0].verdicts[0]


def test_a_job_that_was_suspended_as_a_whole_is_not_lost(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the ranks of a job that was stopped and continued, time has jumped."""
    jump, real = [0.0], time.monotonic
    monkeypatch.setattr("longspan.ranks.watch.time", SimpleNamespace(
        monotonic=lambda: real() + jump[0], process_time=time.process_time))  # fmt: skip
    ranks = [_Rank(store, rank) for rank in range(3)]
    for rank in ranks:
        rank.__enter__()
    time.sleep(0.4)
    jump[0] = 5000.0
    time.sleep(0.6)
    assert not any(rank.verdicts for rank in ranks)
    for rank in ranks:
        rank.__exit__(None)


def test_a_rank_without_an_answering_store_ends_itself() -> None:
    import torch.distributed as dist

    # A relay that stops sending makes a store that stops answering.
    server = socket.create_server(("127.0.0.1", 0))
    behind = dist.TCPStore(
        "127.0.0.1", server.getsockname()[1], is_master=True, wait_for_workers=False, master_listen_fd=server.detach()
    )
    cut = threading.Event()
    front = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=_relay, args=(front, behind.port, cut), daemon=True).start()
    through = dist.TCPStore("127.0.0.1", front.getsockname()[1], is_master=False)
    rank = _Rank(through, 0, 1)
    rank.__enter__()
    time.sleep(1.5)
    assert not rank.verdicts
    cut.set()
    assert rank.ended.wait(30)
    assert "cut off from the job" in rank.verdicts[0]


def _relay(front: socket.socket, port: int, cut: threading.Event) -> None:
    def pump(source: socket.socket, sink: socket.socket) -> None:
        while data := source.recv(65536):
            if cut.is_set():
                return
            sink.sendall(data)

    while True:
        one, _ = front.accept()
        other = socket.create_connection(("127.0.0.1", port))
        for pair in ((one, other), (other, one)):
            threading.Thread(target=pump, args=pair, daemon=True).start()


def test_a_rank_alone_has_no_threads() -> None:
    before = threading.active_count()
    with Watch() as watch:
        watch.at("data", 1, unlimited=True)
        assert threading.active_count() == before


def _who_waits(mesh: dict[str, int], chunks: Any, memory: Any, backward: bool) -> tuple[str, bool]:
    """Return where this rank is, and whether its watch reports a wait, while rank 1 hangs between two layers."""
    import torch.distributed as dist

    import longspan

    store, rank, main = dist.distributed_c10d._get_default_store(), dist.get_rank(), threading.get_ident()
    sp = longspan.SequenceSharding(longspan.init_mesh(**mesh), overlap_chunks=chunks)
    model = longspan.parallelize(build("Llama"), sp, memory=memory, fsdp=False).train()
    found: list[tuple[str, bool]] = []

    def sample() -> None:
        unchanged, own_store = 0, store.clone()
        own_store.wait(["hangs"])
        for _ in range(400):  # a rank that waits stays in its line
            found.append(_line_of(main))
            unchanged = unchanged + 1 if found[-1] == found[-2:][0] else 0
            if unchanged == 10:
                break
            time.sleep(0.05)
        own_store.set(f"seen/{rank}", "yes")

    def hang(*_: Any) -> None:
        store.set("hangs", "yes")
        store.wait(["seen/0", "seen/1"])

    thread = threading.Thread(target=sample)
    if rank == 1:
        mlp: Any = decoder_layers(model)[0].mlp
        mlp.register_full_backward_pre_hook(hang) if backward else mlp.register_forward_pre_hook(hang)
    thread.start()
    model(**batch(n=64)).loss.backward()
    thread.join()
    return found[-1]


@pytest.mark.parametrize(
    "case",
    [
        ({"ring": 2}, "auto", "fastest", False),
        ({"ulysses": 2}, 2, "fastest", False),
        ({"ring": 2}, "auto", Memory(checkpointing="full"), True),
    ],
    ids=["ring", "overlap_chunks", "offload"],
)
def test_a_waiting_rank_is_told_apart_from_a_hung_one(pool2: RankPool, case: Any) -> None:
    (where, waits), (hung_at, hung) = pool2.run(_who_waits, *case)
    assert waits and not hung, (where, hung_at)
