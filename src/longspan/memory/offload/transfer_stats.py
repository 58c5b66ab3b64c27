"""Transfer statistics of a store: bytes moved, seconds of moving, and seconds that compute waited."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Literal, Protocol

Direction = Literal["out", "in"]
"""Out of the memory that computes, and back in."""
_DIRECTIONS: tuple[Direction, ...] = ("out", "in")


class DeviceTimer(Protocol):
    """Times some work of a device."""

    def done(self) -> bool:
        """Return whether the work has ended; do not wait."""

    def seconds(self) -> float:
        """Return how long it took; valid once `done`."""


class TransferStats:
    """Counts transfers; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._active: dict[Direction, int] = dict.fromkeys(_DIRECTIONS, 0)
        self._since: dict[Direction, float] = dict.fromkeys(_DIRECTIONS, 0.0)
        self._timers: deque[tuple[str, DeviceTimer]] = deque()
        self.reset()

    def reset(self) -> None:
        """Reset all counts to zero; transfers in flight count from now."""
        with self._lock:
            self._totals = {
                f"{what}_{direction}": 0.0
                for what in ("bytes", "seconds", "waited_seconds")
                for direction in _DIRECTIONS
            }
            self._timers.clear()
            self._since = dict.fromkeys(_DIRECTIONS, time.perf_counter())

    @contextlib.contextmanager
    def transfer(self, direction: Direction, nbytes: int) -> Iterator[None]:
        """Time the body as a transfer. Overlapping transfers count once, so bytes / seconds is bandwidth."""
        with self._lock:
            if not self._active[direction]:
                self._since[direction] = time.perf_counter()
            self._active[direction] += 1
        try:
            yield
            with self._lock:
                self._totals[f"bytes_{direction}"] += nbytes
        finally:
            with self._lock:
                self._active[direction] -= 1
                if not self._active[direction]:
                    self._totals[f"seconds_{direction}"] += time.perf_counter() - self._since[direction]

    @contextlib.contextmanager
    def wait(self, direction: Direction) -> Iterator[None]:
        """Time the body as waiting."""
        start = time.perf_counter()
        try:
            yield
        finally:
            with self._lock:
                self._totals[f"waited_seconds_{direction}"] += time.perf_counter() - start

    def add_transfer(self, direction: Direction, nbytes: int, timer: DeviceTimer) -> None:
        """Count a transfer of `nbytes` that a device does asynchronously."""
        with self._lock:
            self._totals[f"bytes_{direction}"] += nbytes
            self._timers.append((f"seconds_{direction}", timer))

    def add_wait(self, direction: Direction, timer: DeviceTimer) -> None:
        """Count a wait that a device does asynchronously."""
        with self._lock:
            self._timers.append((f"waited_seconds_{direction}", timer))

    def collect(self) -> None:
        """Read the timers that are done. Call it now and then, so that timers do not pile up."""
        with self._lock:
            for _ in range(len(self._timers)):
                key, timer = self._timers.popleft()
                if timer.done():
                    self._totals[key] += timer.seconds()
                else:
                    self._timers.append((key, timer))

    def metrics(self) -> dict[str, float]:
        """Return the totals since `reset`: see `Store.metrics`."""
        self.collect()
        with self._lock:
            return dict(self._totals)
