"""What a store of activations counts: bytes that were moved, how long that took, and how long it was waited for."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Literal, Protocol

Way = Literal["away", "back"]
_WAYS: tuple[Way, ...] = ("away", "back")


class Span(Protocol):
    """Something that a device does."""

    def done(self) -> bool:
        """Whether it has ended."""

    def seconds(self) -> float:
        """How long it took; asked only when it has ended."""


class Traffic:
    """Counts, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._active: dict[Way, int] = dict.fromkeys(_WAYS, 0)
        self._since: dict[Way, float] = dict.fromkeys(_WAYS, 0.0)
        self._spans: deque[tuple[str, Span]] = deque()
        self.reset()

    def reset(self) -> None:
        """Begin at zero; what is being moved now counts from now."""
        with self._lock:
            self._found = {f"{what}_{way}": 0.0 for what in ("bytes", "seconds", "waited_seconds") for way in _WAYS}
            self._spans.clear()
            self._since = dict.fromkeys(_WAYS, time.perf_counter())

    @contextlib.contextmanager
    def moving(self, way: Way, nbytes: int) -> Iterator[None]:
        """Around a move of `nbytes`. Moves that overlap count their time once: bytes / seconds is the bandwidth."""
        with self._lock:
            if not self._active[way]:
                self._since[way] = time.perf_counter()
            self._active[way] += 1
        try:
            yield
            with self._lock:
                self._found[f"bytes_{way}"] += nbytes
        finally:
            with self._lock:
                self._active[way] -= 1
                if not self._active[way]:
                    self._found[f"seconds_{way}"] += time.perf_counter() - self._since[way]

    @contextlib.contextmanager
    def waiting(self, way: Way) -> Iterator[None]:
        """Around what the caller waits in."""
        began = time.perf_counter()
        try:
            yield
        finally:
            with self._lock:
                self._found[f"waited_seconds_{way}"] += time.perf_counter() - began

    def moved(self, way: Way, nbytes: int, span: Span) -> None:
        """A device has been told to move `nbytes`."""
        with self._lock:
            self._found[f"bytes_{way}"] += nbytes
            self._spans.append((f"seconds_{way}", span))

    def waited(self, way: Way, span: Span) -> None:
        """A device has been told to wait."""
        with self._lock:
            self._spans.append((f"waited_seconds_{way}", span))

    def settle(self) -> None:
        """Count what the device has done; to be called now and then, so that nothing piles up."""
        with self._lock:
            for _ in range(len(self._spans)):
                what, span = self._spans.popleft()
                if span.done():
                    self._found[what] += span.seconds()
                else:
                    self._spans.append((what, span))

    def metrics(self) -> dict[str, float]:
        """`bytes_away`, `bytes_back`, `seconds_away`, `seconds_back` (of moving), `waited_seconds_away` and
        `waited_seconds_back` (exposed: what was not hidden behind computing), since the last `reset`."""
        self.settle()
        with self._lock:
            return dict(self._found)
