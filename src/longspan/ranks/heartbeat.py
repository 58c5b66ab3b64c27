"""The heartbeat: which ranks are alive, and whether the job makes progress, over the job's store.

Each rank has a thread that every second writes a beat: a number and where the rank is (step, phase, line of code). Rank
0 judges all beats, the other ranks judge rank 0's. A verdict ends all ranks with one message, which names the rank and
its last known place. The rules, with the timeout T in seconds (`Watch` implements them):

1. A rank without a new beat for T is lost: stopped, hung below Python, or cut off.
2. In a step, if for T no rank begins a phase and none uses its processor, the job is stuck. (On CPUs only: a rank that
   waits for a GPU looks busy.)
3. In a step, no rank may stay in a phase for longer than 10 times the longest phase so far, and at least T; before the
   second step 30 T, and at least half an hour.
4. In an unlimited phase (start, data, save, export) only rule 1 holds.

Time counts only while the judge itself runs: a job that was suspended as a whole is not lost.
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

from longspan.core.formatting import format_ranks
from longspan.ranks.rendezvous import Peers

_BUSY = 0.05  # of a core: gloo's threads and this one take less while everything waits
_LONG_STEPS = 10
_FIRST_STEPS, _FIRST_STEPS_S = 30, 1800
_LISTED = 8
# Waits inside torch itself (by FSDP, say); longspan's own are marked by `waiting`.
_WAITING_FILES = ("torch/distributed/", "torch/cuda/")
_waiting_threads: set[int] = set()


@contextlib.contextmanager
def waiting() -> Iterator[None]:
    """Mark a wait for other ranks, so that the heartbeat does not take this rank for the one that hangs.

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
    """The state of a rank."""

    number: int = 0  # of the beat
    place: str = "starting"  # phase, with the step
    moves: int = 0  # phases begun so far
    unlimited: bool = True  # whether the phase has no time limit
    longest_s: float = 0.0  # longest phase of a step so far; 0 before the second step
    cpu_s: float = 0.0  # processor seconds used
    where: str = ""  # line of Python that the main thread is in
    waits: bool = False  # whether that line waits for other ranks
    done: bool = False  # whether the job has ended without an error

    def __str__(self) -> str:
        return self.place + (f", at {self.where}" if self.where else "")


class AwakeClock:
    """Seconds in which this process ran: a suspension counts as two ticks at most."""

    def __init__(self, tick_s: float, now: Callable[[], float] = time.monotonic) -> None:
        self._tick_s, self._now = tick_s, now
        self._last, self._seconds = now(), 0.0

    def __call__(self) -> float:
        now = self._now()
        self._seconds += min(now - self._last, 2 * self._tick_s)
        self._last = now
        return self._seconds


class Watch:
    """Judges beats by the rules above: 2 only with `cpu`, 2 and 3 only with the beats of all ranks (`judges_all`)."""

    def __init__(self, world_size: int, timeout_s: float, *, cpu: bool, judges_all: bool) -> None:
        self._world_size, self._timeout_s, self._cpu, self._judges_all = world_size, timeout_s, cpu, judges_all
        self._last: dict[int, Beat] = {}
        self._beat_at: dict[int, float] = {}
        self._moved = self._busy = self._judged = 0.0

    def judge(self, now: float, beats: dict[int, Beat]) -> str:
        """Return what is wrong with the job at `now`, by an `AwakeClock`; empty if nothing is."""
        for rank, beat in beats.items():
            before = self._last.get(rank)
            if before is None or before.number != beat.number:
                self._beat_at[rank] = now
            if before is None or (before.moves, before.done) != (beat.moves, beat.done):
                self._moved = now
            if before is None or beat.cpu_s - before.cpu_s > _BUSY * (now - self._judged):
                self._busy = now
        self._last |= beats
        self._judged = now
        running = {rank: beat for rank, beat in self._last.items() if not beat.done}
        return self._lost(now, running) or (self._stalled(now, running) if self._judges_all and running else "")

    def _lost(self, now: float, running: dict[int, Beat]) -> str:
        lost = [rank for rank in running if now - self._beat_at[rank] > self._timeout_s]
        if not lost:
            return ""
        others = [rank for rank in running if rank not in lost][: _LISTED // 2]
        return (
            f"{format_ranks(lost)} of {self._world_size}: no heartbeat for {self._timeout_s:g} s (stopped, hung or cut "
            f"off); last known place: {_places(running, lost)}"
            f"{f' (the others: {_places(running, others)})' if others else ''}"
        )

    def _stalled(self, now: float, running: dict[int, Beat]) -> str:
        if any(beat.unlimited for beat in running.values()):
            return ""
        if any(now - self._beat_at[rank] > self._timeout_s / 4 for rank in running):
            return ""  # that rank may be lost, and then rule 1 names it
        still_s, idle_s = now - self._moved, now - max(self._moved, self._busy)
        idle = self._cpu and idle_s > self._timeout_s
        if not idle and still_s <= self._patience(running):
            return ""
        suspects = [rank for rank, beat in running.items() if not beat.waits]
        named = suspects if 0 < len(suspects) < len(running) else list(running)
        others = [rank for rank in running if rank not in named]
        stuck = f"{format_ranks(named)} of {self._world_size} {'is' if len(named) == 1 else 'are'} stuck"
        what = "begun a phase or computed anything" if idle else "begun a phase"
        return (
            f"{stuck}: no rank has {what} for {still_s:.0f} s; last known places: {_places(running, [*named, *others])}"
        )

    def _patience(self, running: dict[int, Beat]) -> float:
        longest = max(beat.longest_s for beat in running.values())
        if longest == 0.0:
            return max(_FIRST_STEPS * self._timeout_s, _FIRST_STEPS_S)
        return max(_LONG_STEPS * longest, self._timeout_s)


def _places(beats: dict[int, Beat], ranks: list[int]) -> str:
    return "; ".join(f"rank {rank}: {beats[rank]}" for rank in ranks[:_LISTED])


class Heartbeat:
    """This rank's heartbeat: a context manager around a whole job. Does nothing on a single rank.

    `on_lost` is called in a thread, as the main thread may wait forever, to end this process: with the message, and
    whether the job's store has it.
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
        self._answered = 0  # beats that the store has answered
        self._watch = Watch(
            peers.world_size, peers.timeout_s, cpu=not torch.cuda.is_available(), judges_all=peers.rank == 0
        )

    @property
    def beats(self) -> bool:
        """Whether the ranks are watched, so that a wait for a slow one needs no limit."""
        return bool(self._threads)

    def __enter__(self) -> Heartbeat:
        for work in () if self.peers.alone else (self._run, self._watch_store):
            self._threads.append(threading.Thread(target=work, name="longspan-heartbeat", daemon=True))
            self._threads[-1].start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # After an error this rank is not done, so that ranks that wait for it are ended.
        error = "" if kind is None else f", ended by {kind.__name__}"
        self._beat = replace(self._beat, place=self._beat.place + error, done=kind is None)
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout=2 * self._tick_s + 1)

    def at(self, phase: str, step: int | None = None, *, unlimited: bool = False) -> None:
        """Begin a phase; `unlimited` for one without a time limit, such as loading, a save or an export."""
        now, beat = time.monotonic(), self._beat
        longest_s = beat.longest_s
        if not beat.unlimited and self._step > self._first_step:  # the first step also compiles and allocates
            longest_s = max(longest_s, now - self._began)
        if step is not None:
            self._step = step
            self._first_step = step if self._first_step < 0 else self._first_step
        place = phase if step is None else f"step {step}, {phase}"
        self._beat = replace(beat, place=place, moves=beat.moves + 1, unlimited=unlimited, longest_s=longest_s)
        self._began = now

    # --- in threads

    def _run(self) -> None:
        """Write a beat and judge the others', once per tick."""
        try:
            peers, clock = self.peers.clone(), AwakeClock(self._tick_s)
        except RuntimeError:
            return  # `_watch_store` notices that nothing is answered
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
                verdict = peers.get("verdict") or self._watch.judge(clock(), self._read_beats(peers, known))
                if verdict:
                    peers.set("verdict", verdict)
                    peers.set_end_reason(verdict)
                    return self._on_lost(verdict, True)
                self._answered = number
            except RuntimeError:  # the store does not answer; `_watch_store` counts for how long
                if leaving:
                    return
            self._stop.wait(self._tick_s)

    def _read_beats(self, peers: Peers, known: set[int]) -> dict[int, Beat]:
        """Return the beats that this rank judges: all on rank 0, else rank 0's; an empty one before the first."""
        judged = range(peers.world_size) if peers.rank == 0 else (0,)
        known.update(rank for rank in judged if rank not in known and peers.get(f"beat/{rank}") is not None)
        ranks = [rank for rank in judged if rank in known]
        beats = dict(zip(ranks, peers.get_all([f"beat/{rank}" for rank in ranks]), strict=True)) if ranks else {}
        return {rank: Beat(**json.loads(beats[rank])) if rank in beats else Beat() for rank in judged}

    def _leave_last(self, peers: Peers) -> None:
        """Wait on rank 0, which may host the store, until the others have left."""
        deadline = time.monotonic() + 5.0
        while self._beat.done and peers.rank == 0 and peers.job is not None and time.monotonic() < deadline:
            texts = peers.get_all([f"beat/{rank}" for rank in range(peers.world_size)])
            if all(json.loads(text)["done"] for text in texts):
                return
            time.sleep(0.05)

    def _watch_store(self) -> None:
        """End this rank if the store does not answer for T."""
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
    """Return the line of Python that a thread is in, and whether this process waits for other ranks."""
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
    """Under torchrun: end this process if its agent is gone, as a killed agent ends nobody."""
    agent, stop = os.getppid(), threading.Event()

    def watch() -> None:
        while not stop.wait(1.0):
            if os.getppid() != agent:
                os._exit(1)

    if "TORCHELASTIC_RUN_ID" in os.environ:
        threading.Thread(target=watch, name="longspan-agent", daemon=True).start()
    try:
        yield
    finally:
        stop.set()
