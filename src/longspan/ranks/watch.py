"""Watch the ranks of a job: name a rank that stopped or hangs, with the line of Python where it is.

Each rank has a thread that writes beats to the job's store: a number and where the rank is (step, phase, line of code).
Rank 0 judges all beats, the other ranks judge rank 0's. A verdict ends all ranks with one message. The rules, with the
timeout T in seconds (`Judge` implements them):

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
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import PurePath
from typing import Any

from longspan.core.formatting import format_ranks

_BUSY = 0.05  # of a core: gloo's threads and this one take less while everything waits
_LONG_STEPS = 10
_FIRST_STEPS, _FIRST_STEPS_S = 30, 1800
_LISTED = 8
# Waits inside torch itself (by FSDP, say); longspan's own are marked by `waiting`.
_WAITING_FILES = ("torch/distributed/", "torch/cuda/")
_waiting_threads: set[int] = set()


@contextlib.contextmanager
def waiting() -> Iterator[None]:
    """Mark a wait for other ranks, so that the watch does not take this rank for the one that hangs.

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


class Judge:
    """Applies the rules to beats: rule 2 only with `cpu`, rules 2 and 3 only with the beats of all ranks."""

    def __init__(self, world_size: int, timeout_s: float, *, cpu: bool) -> None:
        self._world_size, self._timeout_s, self._cpu = world_size, timeout_s, cpu
        self._last: dict[int, Beat] = {}
        self._beat_at: dict[int, float] = {}
        self._moved = self._busy = self._judged = self._awake = 0.0

    def verdict(self, beats: dict[int, Beat], passed_s: float) -> str:
        """Return what is wrong with the job, `passed_s` seconds after the last call; empty if nothing is."""
        self._awake += passed_s
        now = self._awake
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
        judges_all = len(self._last) == self._world_size
        return self._lost(now, running) or (self._stalled(now, running) if running and judges_all else "")

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
        longest_s = max(beat.longest_s for beat in running.values())
        first_s = max(_FIRST_STEPS * self._timeout_s, _FIRST_STEPS_S)
        if not idle and still_s <= (max(_LONG_STEPS * longest_s, self._timeout_s) if longest_s else first_s):
            return ""
        suspects = [rank for rank, beat in running.items() if not beat.waits]
        named = suspects if 0 < len(suspects) < len(running) else list(running)
        others = [rank for rank in running if rank not in named]
        return (
            f"{format_ranks(named)} of {self._world_size} {'is' if len(named) == 1 else 'are'} stuck: no rank has "
            f"begun a phase{' or computed anything' if idle else ''} for {still_s:.0f} s; last known places: "
            f"{_places(running, [*named, *others])}"
        )


def _places(beats: dict[int, Beat], ranks: list[int]) -> str:
    return "; ".join(f"rank {rank}: {beats[rank]}" for rank in ranks[:_LISTED])


class Watch:
    """Watches this rank and judges others: a context manager around a whole job. Without a store it does nothing.

    `end` is called with a verdict, in a thread, as the main thread may wait forever: it must end this process.
    """

    def __init__(
        self,
        store: Any = None,
        rank: int = 0,
        world_size: int = 1,
        timeout_s: float = 60.0,
        end: Callable[[str], None] = lambda verdict: None,
    ) -> None:
        self.rank, self.world_size, self.timeout_s = rank, world_size, timeout_s
        self._store, self._end = store, end
        self._tick_s = min(5.0, timeout_s / 8)
        self._leave = threading.Event()
        self._beat, self._began = Beat(), time.monotonic()
        self._step = self._first_step = -1
        self._main = threading.get_ident()
        self._threads: list[threading.Thread] = []
        self._answered = 0  # beats that the store has taken

    def __enter__(self) -> Watch:
        for work in () if self._store is None else (self._run, self._watch_store):
            self._threads.append(threading.Thread(target=work, name="longspan-watch", daemon=True))
            self._threads[-1].start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # After an error this rank is not done, so that ranks that wait for it are ended.
        error = "" if kind is None else f", ended by {kind.__name__}"
        self._beat = replace(self._beat, place=self._beat.place + error, done=kind is None)
        self._leave.set()
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
        import torch

        try:
            store = self._store.clone()  # requests on one connection wait for each other
        except RuntimeError:
            return  # `_watch_store` notices that nothing is answered
        judge = Judge(self.world_size, self.timeout_s, cpu=not torch.cuda.is_available())
        judged = range(self.world_size) if self.rank == 0 else range(1)
        number, last = 0, time.monotonic()
        while True:
            leaving, number = self._leave.is_set(), number + 1
            where, waits = ("", False) if leaving else _line_of(self._main)
            beat = replace(self._beat, number=number, cpu_s=time.process_time(), where=where, waits=waits)
            now = time.monotonic()
            try:
                store.set(f"beat/{self.rank}", json.dumps(asdict(beat)))
                if leaving:
                    return
                found = {rank: f"beat/{rank}" for rank in judged if store.check([f"beat/{rank}"])}
                texts = store.multi_get(list(found.values())) if found else []
                beats = {rank: Beat(**json.loads(text)) for rank, text in zip(found, texts, strict=True)}
                passed_s = min(now - last, 2 * self._tick_s)  # more is a suspension of this process
                verdict = judge.verdict(dict.fromkeys(judged, Beat()) | beats, passed_s)
                verdict = store.get("verdict").decode() if store.check(["verdict"]) else verdict
                if verdict:
                    store.set("verdict", verdict)
                    return self._end(verdict)
                self._answered = number
            except RuntimeError:  # the store does not answer; `_watch_store` counts for how long
                if leaving:
                    return
            last = now
            self._leave.wait(self._tick_s)

    def _watch_store(self) -> None:
        """End this rank if the store does not answer for T."""
        seen, silent_s, last = 0, 0.0, time.monotonic()
        while not self._leave.wait(self._tick_s):
            now = time.monotonic()
            silent_s = 0.0 if seen != self._answered else silent_s + min(now - last, 2 * self._tick_s)
            seen, last = self._answered, now
            if silent_s > self.timeout_s:
                return self._end(
                    f"rank {self.rank} of {self.world_size}: cut off from the job: its store has not answered for "
                    f"{self.timeout_s:g} s; this rank's place: {self._beat.place}"
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
