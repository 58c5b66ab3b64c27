"""Which ranks are alive, and whether the job gets on: told over the job's store, beside whatever collectives do.

Each rank has a thread that says every second how many beats it has made and where the rank is (step, phase, line of
code). Rank 0 judges all of them, the others judge rank 0; what is found ends all ranks with one message that names the
rank and its last known place. The rules, with T the time-out in seconds (`Watch` holds them):

1. A rank whose beat is not heard for T is lost: stopped, hung below Python, or cut off.
2. In a step, nothing has moved on any rank for T, and no rank has computed meanwhile: everybody waits. (On CPUs only:
   a rank that waits for a GPU looks busy.)
3. In a step, nothing has moved on any rank for 10 times as long as the longest phase so far, and at least T; before the
   second step for 30 T, and at least half an hour.
4. In a long phase (start, data, save, export) a rank whose beat is heard is alive, however long it takes.

Time counts only while the judge itself is awake: a job that was suspended as a whole is not lost.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import PurePath
from typing import Any

from longspan.core.rank_differences import format_ranks
from longspan.ranks.rendezvous import Peers

_BUSY = 0.05  # of a core: gloo's threads and this one take less while everything waits
_LONG_STEPS = 10
_FIRST_STEPS, _FIRST_STEPS_S = 30, 1800
# Waits inside torch itself (by FSDP, say); longspan's own are marked by `waiting`.
_WAITING_FILES = ("torch/distributed/", "torch/cuda/")
_waiting_threads: set[int] = set()


@contextlib.contextmanager
def waiting() -> Iterator[None]:
    """Mark a wait for other ranks, so that the heartbeat knows that this rank is not the one that hangs.

    Put it around every `work.wait()`. On a GPU a backward waits in a thread of autograd, so any thread counts.
    """
    thread = threading.get_ident()
    _waiting_threads.add(thread)
    try:
        yield
    finally:
        _waiting_threads.discard(thread)


@dataclass(frozen=True)
class Beat:
    """What a rank says of itself.

    Attributes:
        number: how often it has said something.
        place: the phase it is in, with the step.
        moves: how many phases it has begun.
        long: whether the phase may last as long as it likes.
        longest_s: its longest phase of a step so far, in seconds; 0 before the second step.
        cpu_s: seconds of processor time it has used.
        where: the line of Python its main thread is in.
        waits: whether that is a line that waits for other ranks.
        done: whether it has ended as it should.
    """

    number: int = 0
    place: str = "starting"
    moves: int = 0
    long: bool = True
    longest_s: float = 0.0
    cpu_s: float = 0.0
    where: str = ""
    waits: bool = False
    done: bool = False

    def __str__(self) -> str:
        return self.place + (f", at {self.where}" if self.where else "")


class AwakeClock:
    """Seconds in which this process ran: what passes while it is suspended counts as two ticks at most."""

    def __init__(self, tick_s: float, now: Callable[[], float] = time.monotonic) -> None:
        self._tick_s, self._now = tick_s, now
        self._last, self._seconds = now(), 0.0

    def __call__(self) -> float:
        now = self._now()
        self._seconds += min(now - self._last, 2 * self._tick_s)
        self._last = now
        return self._seconds


class Watch:
    """Judges beats by the rules above.

    Args:
        world_size: ranks of the job.
        timeout_s: T.
        cpu: whether processor time tells that a rank computes.
        stalls: whether all ranks are judged here, so that rules 2 and 3 can be; else only rule 1 is.
    """

    def __init__(self, world_size: int, timeout_s: float, *, cpu: bool, stalls: bool) -> None:
        self._world_size, self._timeout_s, self._cpu, self._stalls = world_size, timeout_s, cpu, stalls
        self._last: dict[int, Beat] = {}
        self._heard: dict[int, float] = {}
        self._moved = self._busy = self._seen = 0.0

    def judge(self, now: float, beats: dict[int, Beat]) -> str:
        """What is wrong with the job, given the ranks' latest beats; empty if nothing is.

        Args:
            now: seconds, of a clock that stands still while this process does.
            beats: by rank; one that has said nothing yet counts from its first call.
        """
        for rank, beat in beats.items():
            before = self._last.get(rank)
            if before is None or before.number != beat.number:
                self._heard[rank] = now
            if before is None or (before.moves, before.done) != (beat.moves, beat.done):
                self._moved = now
            if before is None or beat.cpu_s - before.cpu_s > _BUSY * (now - self._seen):
                self._busy = now
        self._last |= beats
        self._seen = now
        return self._lost(now) or (self._stalled(now) if self._stalls else "")

    def _lost(self, now: float) -> str:
        living = {rank: beat for rank, beat in self._last.items() if not beat.done}
        lost = [rank for rank in living if now - self._heard[rank] > self._timeout_s]
        if not lost:
            return ""
        places = "; ".join(f"rank {rank}: {living[rank]}" for rank in lost[:8])
        others = [f"rank {rank}: {beat}" for rank, beat in living.items() if rank not in lost][:4]
        return (
            f"{format_ranks(lost)} of {self._world_size}: no sign of life for {self._timeout_s:g} s (stopped, hung or "
            f"cut off); last known place: {places}{' (meanwhile ' + '; '.join(others) + ')' if others else ''}"
        )

    def _stalled(self, now: float) -> str:
        living = {rank: beat for rank, beat in self._last.items() if not beat.done}
        if not living or any(beat.long for beat in living.values()):
            return ""
        if any(now - self._heard[rank] > self._timeout_s / 4 for rank in living):
            return ""  # one is perhaps lost, and then it is that one
        still_s, idle_s = now - self._moved, now - max(self._moved, self._busy)
        if not (self._cpu and idle_s > self._timeout_s) and still_s <= self._patience(living):
            return ""
        suspects = [rank for rank, beat in living.items() if not beat.waits]
        named = suspects if 0 < len(suspects) < len(living) else list(living)
        what = "does not take part" if len(named) == 1 else "do not get on"
        places = "; ".join(f"rank {rank}: {living[rank]}" for rank in [*named, *(set(living) - set(named))][:8])
        idle = " or computed anything" if self._cpu and idle_s > self._timeout_s else ""
        return (
            f"{format_ranks(named)} of {self._world_size} {what}: no rank has moved on{idle} for {still_s:.0f} s; last "
            f"known places: {places}"
        )

    def _patience(self, living: dict[int, Beat]) -> float:
        longest = max(beat.longest_s for beat in living.values())
        if longest == 0.0:
            return max(_FIRST_STEPS * self._timeout_s, _FIRST_STEPS_S)
        return max(_LONG_STEPS * longest, self._timeout_s)


class Heartbeat:
    """This rank's beat, while a job lasts: a context manager around all of it. Does nothing for a rank alone.

    Args:
        peers: the ranks.
        on_lost: called in a thread, with what is wrong and whether the job's store knows it, to end this process (the
            main thread may wait without end).
    """

    def __init__(self, peers: Peers, on_lost: Callable[[str, bool], None]) -> None:
        import torch

        self.peers, self._on_lost = peers, on_lost
        self._tick_s = min(1.0, peers.timeout_s / 8)
        self._stop = threading.Event()
        self._beat, self._began = Beat(), time.monotonic()
        self._step = self._first_step = -1
        self._main = threading.get_ident()
        self._threads: list[threading.Thread] = []
        self._answered = 0  # rounds of the store that were answered
        self._watch = Watch(
            peers.world_size, peers.timeout_s, cpu=not torch.cuda.is_available(), stalls=peers.rank == 0
        )

    def __enter__(self) -> Heartbeat:
        if self.beats:
            for work in (self._tell, self._see_that_the_store_answers):
                self._threads.append(threading.Thread(target=work, name="longspan-heartbeat", daemon=True))
                self._threads[-1].start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # Who ends with an error is not done: others that wait for it must hear of it.
        error = "" if kind is None else f", ended by {kind.__name__}"
        self._beat = replace(self._beat, place=self._beat.place + error, done=kind is None)
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout=2 * self._tick_s + 1)

    @property
    def beats(self) -> bool:
        """Whether there is anybody to hear it."""
        return not self.peers.alone

    def at(self, phase: str, step: int | None = None, *, long: bool = False) -> None:
        """Say where this rank is: a phase begins. `long`: it may last, as loading, a save or an export does."""
        now, beat = time.monotonic(), self._beat
        longest_s = beat.longest_s
        if not beat.long and self._step > self._first_step:  # the first step also compiles and allocates
            longest_s = max(longest_s, now - self._began)
        if step is not None:
            self._step = step
            self._first_step = step if self._first_step < 0 else self._first_step
        place = phase if step is None else f"step {step}, {phase}"
        self._beat = replace(beat, place=place, moves=beat.moves + 1, long=long, longest_s=longest_s)
        self._began = now

    # --- in threads of their own

    def _tell(self) -> None:
        try:
            peers, clock = self.peers.clone(), AwakeClock(self._tick_s)
        except RuntimeError:
            return  # the other thread finds that nothing is answered
        number, known = 0, {peers.rank}
        while True:
            number += 1
            leaving = self._stop.is_set()
            where, waits = ("", False) if leaving else _line_of(self._main)
            beat = replace(self._beat, number=number, cpu_s=time.process_time(), where=where, waits=waits)
            try:
                peers.set(f"beat/{peers.rank}", json.dumps(asdict(beat)))
                if leaving:
                    return self._leave_last(peers)
                verdict = peers.get("verdict") or self._watch.judge(clock(), self._hear(peers, known))
                if verdict:
                    peers.set("verdict", verdict)
                    peers.set_end_reason(verdict)
                    return self._on_lost(verdict, True)
                self._answered = number
            except RuntimeError:  # the store does not answer; the other thread counts how long
                if leaving:
                    return
            self._stop.wait(self._tick_s)

    def _hear(self, peers: Peers, known: set[int]) -> dict[int, Beat]:
        """The beats of those that this rank judges: rank 0 all, the others rank 0. Who never beat counts as well."""
        judged = range(peers.world_size) if peers.rank == 0 else (0,)
        known.update(rank for rank in judged if rank not in known and peers.get(f"beat/{rank}") is not None)
        ranks = [rank for rank in judged if rank in known]
        beats = dict(zip(ranks, peers.get_all([f"beat/{rank}" for rank in ranks]), strict=True)) if ranks else {}
        return {rank: Beat(**json.loads(beats[rank])) if rank in beats else Beat() for rank in judged}

    def _leave_last(self, peers: Peers) -> None:
        """Rank 0 may hold the store: it leaves when the others have."""
        deadline = time.monotonic() + 5.0
        while self._beat.done and peers.rank == 0 and peers.job is not None and time.monotonic() < deadline:
            texts = peers.get_all([f"beat/{rank}" for rank in range(peers.world_size)])
            if all(json.loads(text)["done"] for text in texts):
                return
            time.sleep(0.05)

    def _see_that_the_store_answers(self) -> None:
        clock, seen, since = AwakeClock(self._tick_s), 0, 0.0
        while not self._stop.wait(self._tick_s):
            now = clock()
            if seen != self._answered:
                seen, since = self._answered, now
            elif now - since > self.peers.timeout_s:
                job = self.peers.job
                store = f"{job.address}:{job.port}" if job else "the process group"
                return self._on_lost(
                    f"rank {self.peers.rank} of {self.peers.world_size}: cut off from the job: its store ({store}) has "
                    f"not answered for {self.peers.timeout_s:g} s; this rank's place: {self._beat.place}",
                    False,
                )


def _line_of(thread: int) -> tuple[str, bool]:
    """Return the line of Python that the main thread is in, and whether this process waits for other ranks."""
    frame: Any = sys._current_frames().get(thread)
    if frame is None:
        return "", False
    code = frame.f_code
    files: list[str] = []
    where = f"{PurePath(code.co_filename).name}:{frame.f_lineno} in {code.co_name}"
    while frame is not None and len(files) < 4:
        files.append(PurePath(frame.f_code.co_filename).as_posix())
        frame = frame.f_back
    return where, bool(_waiting_threads) or any(part in file for file in files for part in _WAITING_FILES)


@contextlib.contextmanager
def ending_with_the_agent() -> Iterator[None]:
    """Under torchrun: end this process when the agent that started it is gone (killed, so that it could end nobody)."""
    agent, stop = os.getppid(), threading.Event()

    def watch() -> None:
        while not stop.wait(1.0):
            if os.getppid() != agent:
                os._exit(1)

    thread = threading.Thread(target=watch, name="longspan-agent", daemon=True)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        thread.start()
    try:
        yield
    finally:
        stop.set()
