"""Activations on a disk: written by threads while the next layers compute, read ahead of the backward.

What is in memory does not grow with the number of layers: the tensors being written (`in_flight` bytes, or a single
one that is larger), those being read ahead (`ahead` bytes and less than one and a half of the largest, or none), and
the threads' buffers.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from longspan.core.errors import LongspanError
from longspan.memory.offload.allocator import Slots
from longspan.memory.offload.disk_file import BLOCK, SpillFile, aligned, memory_of
from longspan.memory.offload.store import Entry, Handle, Owner, Shelf
from longspan.memory.offload.transfer_stats import Traffic, Way

MIB = 1 << 20
PIECE = 4 * MIB
"""Bytes of one call of the system: tensors are cut, so that several threads share one and buffers need not hold it."""
THREADS = 4
"""For each direction. A disk reaches its bandwidth with several requests only (O_DIRECT has one a thread)."""
IN_FLIGHT = 256 * MIB
AHEAD = 4 * PIECE


class _Entry(Entry):
    """A tensor that is being written, or is in the file.

    Attributes:
        at: its place in the file.
        busy: pieces of it that threads have yet to write or to read; until then its place is not given back.
        ready: of a GPU's tensor, the event after which it may be read.
    """

    at = 0
    busy = 0
    reading: _Reading | None = None
    ready: Any = None


class _Reading:
    """Bytes on their way back: `target`, uint8, where they are needed."""

    def __init__(self, entry: _Entry, target: Tensor, ready: Any) -> None:
        self.entry, self.target, self.ready = entry, target, ready
        self.busy = 0
        self.cancelled = False
        self.problem = ""


class DiskStore:
    """See `longspan.memory.offload.choice.Store`.

    Args:
        folder: on a disk that is local to this machine.
        device: of the tensors.
        in_flight: bytes that may wait to be written; a `put` beyond waits.
        tensors: so many tensors of one size may wait, whatever their bytes: on a CPU they lie in the memory that is to
            be saved. None: no such limit.
        ahead: bytes that are read before they are asked for, at least; None: nothing is.
        piece: bytes of a single write or read, a multiple of 4096.
        direct: False goes through the page cache.
        by_way: tensors are read by way of a buffer of the host, as they have to be for a GPU.

    Raises:
        LongspanError: the folder is missing, is none, or cannot be written to.
    """

    def __init__(
        self,
        folder: str,
        device: torch.device,
        *,
        in_flight: int = IN_FLIGHT,
        tensors: int | None = None,
        ahead: int | None = AHEAD,
        piece: int = PIECE,
        direct: bool = True,
        by_way: bool = False,
    ) -> None:
        self.traffic = Traffic()
        self.abandoned: deque[_Entry] = deque()
        self._file = SpillFile(folder, direct)
        self._in_flight, self._tensors, self._ahead, self._piece = in_flight, tensors, ahead, piece
        self._by_way = by_way or device.type != "cpu"
        self._owner = Owner()
        self._slots = Slots(BLOCK)
        self._shelf: Shelf[_Entry] = Shelf()
        self._flying = 0
        self._changed = threading.Condition()
        self._lanes = _Lanes(piece, device)
        self._writers = ThreadPoolExecutor(THREADS, "longspan-offload-write")
        self._readers = ThreadPoolExecutor(THREADS, "longspan-offload-read")

    # --- what a caller calls

    def reserve(self, nbytes: int) -> None:
        """Have room on the disk for so many bytes beside what is stored; raises LongspanError with the numbers."""
        self._owner.check()
        with self._changed:
            self._sweep()
            self._grow(self._slots.used + self._slots.rounded(nbytes))

    def put(self, tensor: Tensor) -> Handle[_Entry]:
        """Begin to write it; waits while too much is on its way already."""
        self._owner.check()
        entry = _Entry(tensor)
        entry.ready = self._lanes.now()
        with self._changed:
            self._sweep()
            self._raise_problem()
            if not self._has_room(entry.nbytes):
                with self.traffic.waiting("away"):
                    self._changed.wait_for(lambda: self._owner.closed or self._has_room(entry.nbytes))
                self._owner.check()
                self._raise_problem()
            if entry.nbytes:
                entry.at = self._place(entry.nbytes)
                self._flying += entry.nbytes
                entry.busy = self._submit(self._writers, self._write, entry, entry.nbytes)
            self._shelf.add(entry)
        return Handle(self, entry)

    def fetch(self, entry: _Entry) -> Tensor:
        """The tensor of an entry; begins to read those before it."""
        self._owner.check()
        with self._changed:
            self._sweep()
            entry.check()
            held, reading = entry.flat, None
            if held is None:
                reading = entry.reading or self._begin(entry)
                entry.reading = None
            self._read_before(entry)
            if reading is not None and reading.busy:
                with self.traffic.waiting("back"):
                    self._changed.wait_for(lambda: self._owner.closed or not reading.busy)
                self._owner.check()
                entry.check()
        if held is not None:  # not written yet, or empty
            return entry.form.tensor(held)
        assert reading is not None
        if reading.problem:
            raise LongspanError(reading.problem)
        return entry.form.tensor(reading.target[: entry.nbytes])

    def forget(self, entry: _Entry) -> None:
        """Give an entry's place back, as soon as no thread is at it."""
        if not self._owner.here or self._owner.closed:
            return
        with self._changed:
            self._drop(entry)

    def metrics(self) -> dict[str, float]:
        """See `Traffic.metrics`."""
        return self.traffic.metrics()

    def reset(self) -> None:
        """Count from zero."""
        self.traffic.reset()

    def close(self) -> None:
        """End the threads, and give the disk's room back; what is stored is gone. A second time does nothing."""
        if self._owner.here:
            with self._changed:
                self._owner.closed = True
                for entry in list(self._shelf):
                    self._drop(entry)
                self._changed.notify_all()
            for pool in (self._writers, self._readers):
                pool.shutdown(wait=True, cancel_futures=True)
        self._file.close()

    # --- with the lock held

    def _raise_problem(self) -> None:
        """What went wrong with an entry that somebody will ask for."""
        for entry in self._shelf:
            entry.check()

    def _has_room(self, nbytes: int) -> bool:
        most = self._in_flight if self._tensors is None else min(self._in_flight, self._tensors * nbytes)
        return not self._flying or self._flying + nbytes <= most

    def _sweep(self) -> None:
        while self.abandoned:
            self._drop(self.abandoned.popleft())

    def _drop(self, entry: _Entry) -> None:
        if entry.dropped:
            return
        entry.dropped = True
        self._shelf.remove(entry)
        self._cancel(entry)
        if not entry.busy:
            self._vacate(entry)

    def _vacate(self, entry: _Entry) -> None:
        entry.flat = None
        if entry.nbytes:
            self._slots.give(entry.at, entry.nbytes)

    def _place(self, nbytes: int) -> int:
        at = self._slots.take(nbytes)
        if at is None:
            self._grow(self._slots.size_for(nbytes))
            at = self._slots.take(nbytes)
            assert at is not None
        return at

    def _grow(self, size: int) -> None:
        self._file.reserve(size)
        self._slots.grow(size)

    def _begin(self, entry: _Entry) -> _Reading:
        size = entry.nbytes if self._by_way else self._slots.rounded(entry.nbytes)
        device = entry.form.device
        target = torch.empty(size, dtype=torch.uint8, device=device) if self._by_way else aligned(size)
        reading = _Reading(entry, target, self._lanes.now())
        reading.busy = self._submit(self._readers, self._read, reading, entry.nbytes)
        entry.busy += reading.busy
        return reading

    def _read_before(self, entry: _Entry) -> None:
        """Read ahead, and let go of what was read ahead and is not what comes next."""
        coming = [] if self._ahead is None else self._shelf.next_after(entry, self._ahead)
        for other in self._shelf:
            if other.reading is not None and other not in coming:
                self._cancel(other)
        for other in coming:
            if other.flat is None and other.reading is None and not other.problem:
                other.reading = self._begin(other)

    def _cancel(self, entry: _Entry) -> None:
        if entry.reading is not None:
            entry.reading.cancelled = True
            entry.reading = None

    def _submit(self, pool: ThreadPoolExecutor, work: Callable[[Any, int, int], None], what: Any, nbytes: int) -> int:
        starts = range(0, nbytes, self._piece)
        for start in starts:
            pool.submit(work, what, start, min(start + self._piece, nbytes))
        return len(starts)

    # --- in threads

    def _write(self, entry: _Entry, start: int, stop: int) -> None:
        problem = "" if entry.dropped else self._tried("away", self._write_piece, entry, start, stop)
        with self._changed:
            entry.busy -= 1
            entry.problem = entry.problem or problem
            if not entry.busy:
                self._flying -= entry.nbytes
                entry.release()
                if entry.dropped:
                    self._vacate(entry)
                self._changed.notify_all()

    def _read(self, reading: _Reading, start: int, stop: int) -> None:
        problem = "" if reading.cancelled else self._tried("back", self._read_piece, reading, start, stop)
        with self._changed:
            reading.busy -= 1
            reading.entry.busy -= 1
            reading.problem = reading.problem or problem
            if reading.entry.dropped and not reading.entry.busy:
                self._vacate(reading.entry)
            if not reading.busy:
                self._changed.notify_all()

    def _tried(self, way: Way, work: Callable[[Any, int, int], None], what: Any, start: int, stop: int) -> str:
        """What went wrong, in words: an exception would hold the tensors of the frames that it went through."""
        try:
            with self.traffic.moving(way, stop - start):
                work(what, start, stop)
        except OSError as error:
            return self._file.describe(error)
        except Exception as error:
            return f"activations could not be moved to or from the disk: {type(error).__name__}: {error}"
        return ""

    def _write_piece(self, entry: _Entry, start: int, stop: int) -> None:
        assert entry.flat is not None
        with self._lanes.one() as lane:
            lane.load(entry.flat[start:stop], entry.ready)
            self._file.write(lane.memory[: self._slots.rounded(stop - start)], entry.at + start)

    def _read_piece(self, reading: _Reading, start: int, stop: int) -> None:
        at, size = reading.entry.at + start, self._slots.rounded(stop - start)
        if not self._by_way:
            self._file.read(memory_of(reading.target)[start : start + size], at)
            return
        with self._lanes.one() as lane:
            self._file.read(lane.memory[:size], at)
            lane.unload(reading.target[start:stop], reading.ready)


class _Lane:
    """A thread's buffer, uint8 `[piece]`, and for a GPU the stream of its copies."""

    def __init__(self, piece: int, device: torch.device) -> None:
        cuda = device.type == "cuda"
        self.buffer = aligned(piece, pinned=cuda)
        self.memory = memory_of(self.buffer)
        self.stream = torch.cuda.Stream(device) if cuda else None

    def load(self, source: Tensor, ready: Any) -> None:
        """Fill the buffer."""
        self._copy(self.buffer[: len(source)], source, ready)

    def unload(self, target: Tensor, ready: Any) -> None:
        """Give the buffer's bytes to the tensor."""
        self._copy(target, self.buffer[: len(target)], ready)

    def _copy(self, into: Tensor, source: Tensor, ready: Any) -> None:
        if self.stream is None:
            # Not torch's copy, which would start computing threads of its own for each of these.
            np.copyto(into.numpy(), source.numpy())
            return
        with torch.cuda.stream(self.stream):
            if ready is not None:
                self.stream.wait_event(ready)
            into.copy_(source, non_blocking=True)
        self.stream.synchronize()


class _Lanes:
    """Lanes, made when they are first needed: as many as threads copy at once."""

    def __init__(self, piece: int, device: torch.device) -> None:
        self._piece, self._device = piece, device
        self._free: queue.LifoQueue[_Lane] = queue.LifoQueue()

    def now(self) -> Any:
        """What the device has been told to do until now; None where it does everything at once."""
        return torch.cuda.current_stream(self._device).record_event() if self._device.type == "cuda" else None

    def one(self) -> _Borrowed:
        """A lane, for a `with`."""
        try:
            return _Borrowed(self._free, self._free.get_nowait())
        except queue.Empty:
            return _Borrowed(self._free, _Lane(self._piece, self._device))


class _Borrowed:
    def __init__(self, home: queue.LifoQueue[_Lane], lane: _Lane) -> None:
        self._home, self._lane = home, lane

    def __enter__(self) -> _Lane:
        return self._lane

    def __exit__(self, *_: object) -> None:
        self._home.put(self._lane)
