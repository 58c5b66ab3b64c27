"""Offload activations to a disk: threads write them while later layers compute, and read them ahead of the backward.

Memory does not grow with the number of layers. It holds the tensors being written (`in_flight` bytes, or one larger
tensor), those being read ahead (`read_ahead` bytes and less than one and a half of the largest, or none), and the I/O
buffers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from longspan.core.errors import LongspanError
from longspan.memory.offload.disk_file import BLOCK, OffloadFile, aligned_buffer, buffer_of
from longspan.memory.offload.store import Allocator, Entry, Store

MIB = 1 << 20
CHUNK_BYTES = 4 * MIB
"""Bytes of one write or read. Tensors are cut, so that threads share one and buffers need not hold a whole tensor."""
THREADS = 4
"""Per direction. A disk reaches its bandwidth only with several requests, and O_DIRECT has one per thread."""
IN_FLIGHT = 256 * MIB
READ_AHEAD = 4 * CHUNK_BYTES


class _Entry(Entry):
    """A tensor that is being written, or is in the file at `offset`."""

    offset = 0
    pending = 0  # chunks that threads have yet to write or read; until 0 its space in the file is not freed
    ready: Any = None  # the event after which a GPU's tensor may be read


class _Read:
    """Bytes being read into `target`, uint8."""

    def __init__(self, entry: _Entry, target: Tensor, ready: Any) -> None:
        self.entry, self.target, self.ready = entry, target, ready
        self.pending = 0
        self.cancelled = False
        self.error = ""


class DiskStore(Store):
    """A `Store` on a disk local to this machine.

    Args:
        in_flight: bytes that may wait to be written; `put` waits beyond that.
        max_tensors: tensors of one size that may wait, whatever their bytes. None: no such limit.
        read_ahead: bytes to read before they are requested, at least. None: read nothing ahead.
        chunk_bytes: bytes of a single write or read, a multiple of 4096.
        direct: False goes through the page cache.
        via_host: read tensors through a host buffer, as a GPU must.
    """

    entry_class = _Entry

    def __init__(
        self,
        folder: str,
        device: torch.device,
        *,
        in_flight: int = IN_FLIGHT,
        max_tensors: int | None = None,
        read_ahead: int | None = READ_AHEAD,
        chunk_bytes: int = CHUNK_BYTES,
        direct: bool = True,
        via_host: bool = False,
    ) -> None:
        super().__init__(read_ahead)
        self._file = OffloadFile(folder, direct)
        self._in_flight, self._max_tensors = in_flight, max_tensors
        self._chunk_bytes = chunk_bytes
        self._via_host = via_host or device.type != "cpu"
        self._allocator = Allocator(BLOCK)
        self._bytes_in_flight = 0
        self._device, self._of_thread = device, threading.local()
        self._writers = ThreadPoolExecutor(THREADS, "longspan-offload-write")
        self._readers = ThreadPoolExecutor(THREADS, "longspan-offload-read")

    # Below: with the lock held.

    def _reserve(self, nbytes: int) -> None:
        self._grow(self._allocator.used + self._allocator.rounded(nbytes))

    def _start_storing(self, entry: _Entry) -> None:
        entry.ready = self._event()
        self._raise_error()
        if not self._has_room(entry.nbytes):
            with self.stats.wait():
                self.changed.wait_for(lambda: self._has_room(entry.nbytes))
            self._raise_error()
        if entry.nbytes:
            entry.offset = self._allocate(entry.nbytes)
            self._bytes_in_flight += entry.nbytes
            entry.pending = self._submit(self._writers, self._write, entry, entry.nbytes)

    def _raise_error(self) -> None:
        """Raise if an entry that is still needed is lost."""
        for entry in self.entries.values():
            entry.check()

    def _has_room(self, nbytes: int) -> bool:
        most = self._in_flight if self._max_tensors is None else min(self._in_flight, self._max_tensors * nbytes)
        return not self._bytes_in_flight or self._bytes_in_flight + nbytes <= most

    def _free(self, entry: _Entry) -> None:
        if not entry.pending:  # else the last thread that uses it frees it
            entry.data = None
            if entry.nbytes:
                self._allocator.free(entry.offset, entry.nbytes)

    def _allocate(self, nbytes: int) -> int:
        offset = self._allocator.allocate(nbytes)
        if offset is None:
            self._grow(self._allocator.size_for(nbytes))
            offset = self._allocator.allocate(nbytes)
            assert offset is not None
        return offset

    def _grow(self, size: int) -> None:
        self._file.reserve(size)
        self._allocator.grow(size)

    def _start_fetch(self, entry: _Entry) -> _Read:
        if self._via_host:
            target = torch.empty(entry.nbytes, dtype=torch.uint8, device=entry.meta.device)
        else:
            target = aligned_buffer(self._allocator.rounded(entry.nbytes))
        reading = _Read(entry, target, self._event())
        reading.pending = self._submit(self._readers, self._read, reading, entry.nbytes)
        entry.pending += reading.pending
        return reading

    def _finish_fetch(self, entry: _Entry, fetch: _Read) -> Tensor:
        if fetch.pending:
            with self.stats.wait():
                self.changed.wait_for(lambda: not fetch.pending)
            entry.check()
        if fetch.error:
            raise LongspanError(fetch.error)
        return fetch.target[: entry.nbytes]

    def _cancel_fetch(self, fetch: _Read) -> None:
        fetch.cancelled = True

    def _submit(self, pool: ThreadPoolExecutor, work: Callable[[Any, int, int], None], item: Any, nbytes: int) -> int:
        starts = range(0, nbytes, self._chunk_bytes)
        for start in starts:
            pool.submit(work, item, start, min(start + self._chunk_bytes, nbytes))
        return len(starts)

    # Below: in the threads.

    def _write(self, entry: _Entry, start: int, stop: int) -> None:
        error = "" if entry.dropped else self._try(self._write_chunk, entry, start, stop)
        with self.changed:
            entry.pending -= 1
            entry.error = entry.error or error
            if not entry.pending:
                self._bytes_in_flight -= entry.nbytes
                entry.release()
                if entry.dropped:
                    self._free(entry)
                self.changed.notify_all()

    def _read(self, reading: _Read, start: int, stop: int) -> None:
        error = "" if reading.cancelled else self._try(self._read_chunk, reading, start, stop)
        with self.changed:
            reading.pending -= 1
            reading.entry.pending -= 1
            reading.error = reading.error or error
            if reading.entry.dropped:
                self._free(reading.entry)
            if not reading.pending:
                self.changed.notify_all()

    def _try(self, work: Callable[[Any, int, int], None], item: Any, start: int, stop: int) -> str:
        """Return an error as text: an exception would keep the tensors of its frames alive."""
        try:
            with self.stats.transfer(stop - start):
                work(item, start, stop)
        except OSError as error:
            return self._file.describe(error)
        except Exception as error:
            return f"activations could not be moved to or from the disk: {type(error).__name__}: {error}"
        return ""

    def _write_chunk(self, entry: _Entry, start: int, stop: int) -> None:
        assert entry.data is not None
        buffer = self._buffer()
        buffer.copy(buffer.tensor[: stop - start], entry.data[start:stop], entry.ready)
        self._file.write(buffer.memory[: self._allocator.rounded(stop - start)], entry.offset + start)

    def _read_chunk(self, reading: _Read, start: int, stop: int) -> None:
        offset, size = reading.entry.offset + start, self._allocator.rounded(stop - start)
        if not self._via_host:
            self._file.read(buffer_of(reading.target)[start : start + size], offset)
            return
        buffer = self._buffer()
        self._file.read(buffer.memory[:size], offset)
        buffer.copy(reading.target[start:stop], buffer.tensor[: stop - start], reading.ready)

    def _buffer(self) -> _IOBuffer:
        """Return this thread's buffer."""
        if not hasattr(self._of_thread, "buffer"):
            self._of_thread.buffer = _IOBuffer(self._chunk_bytes, self._device)
        buffer: _IOBuffer = self._of_thread.buffer
        return buffer

    def _event(self) -> Any:
        """Return an event after all work that the device has queued; None on a CPU."""
        return torch.cuda.current_stream(self._device).record_event() if self._device.type == "cuda" else None


class _IOBuffer:
    """A thread's buffer, uint8 `[chunk_bytes]`, and on a GPU the stream of its copies."""

    def __init__(self, chunk_bytes: int, device: torch.device) -> None:
        cuda = device.type == "cuda"
        self.tensor = aligned_buffer(chunk_bytes, pinned=cuda)
        self.memory = buffer_of(self.tensor)
        self.stream = torch.cuda.Stream(device) if cuda else None

    def copy(self, into: Tensor, source: Tensor, ready: Any) -> None:
        if self.stream is None:
            # Not torch's copy, which would start compute threads for each of these threads.
            np.copyto(into.numpy(), source.numpy())
            return
        with torch.cuda.stream(self.stream):
            if ready is not None:
                self.stream.wait_event(ready)
            into.copy_(source, non_blocking=True)
        self.stream.synchronize()
