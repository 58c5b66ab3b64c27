"""A GPU's activations in the host's memory: copied by a side stream while the next layers compute, and back ahead of
the backward.

One side stream does the copies in both directions, in the order in which they were begun. So a place in the host's
memory may be given to another tensor as soon as it is dropped: what is copied into it comes after what was copied out.
Computing waits for copies on the device, by events; the host waits for nothing.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any, Protocol

import torch
from torch import Tensor

from longspan.core.errors import LongspanError
from longspan.core.system import free_memory
from longspan.memory.offload.allocator import Slots
from longspan.memory.offload.store import Entry, Handle, Owner, Shelf
from longspan.memory.offload.transfer_stats import Span, Traffic

IN_FLIGHT = 2
"""Tensors on their way to the host; the device holds them so long."""
_ALIGN = 512
_SMALLEST = 64 << 20


class Copy(Span, Protocol):
    """A copy that was begun on the side stream."""

    def join(self, tensor: Tensor) -> Span:
        """What the current stream, and the one that the copy was begun on, are told from now on they do after the
        copy.

        Args:
            tensor: the device's side of it.

        Returns:
            how long the current stream waits.
        """

    def wait(self) -> None:
        """The host waits until it is done."""


class Copier(Protocol):
    """The side stream."""

    def memory(self, nbytes: int) -> Tensor:
        """uint8 `[nbytes]` of the host, which copies run from and to without the host's help."""

    def begin(self, source: Tensor, into: Tensor) -> Copy:
        """Copy, after all that the current stream has been told until now and all copies begun before.

        Neither tensor is held by it: until the copy is done or joined, the caller does that."""


class _Entry(Entry):
    """A tensor that is being copied, or is in the host's memory: `place`, uint8 `[nbytes]` in chunk `chunk` at `at`."""

    place: Tensor | None = None
    chunk = 0
    at = 0
    copy: Copy | None = None
    back: tuple[Tensor, Copy] | None = None


class HostStore:
    """See `longspan.memory.offload.choice.Store`.

    Args:
        copier: the side stream.
        in_flight: tensors that the device still holds; computing waits, on the device, for the copy of one before.
    """

    def __init__(self, copier: Copier, *, in_flight: int = IN_FLIGHT) -> None:
        self.traffic = Traffic()
        self.abandoned: deque[_Entry] = deque()
        self._copier, self._in_flight = copier, in_flight
        self._owner = Owner()
        self._pool = _Pool(copier)
        self._shelf: Shelf[_Entry] = Shelf()
        self._leaving: deque[_Entry] = deque()
        self._lock = threading.RLock()

    def reserve(self, nbytes: int) -> None:
        """Have so many bytes of pinned memory beside what is stored; raises LongspanError with the numbers."""
        self._owner.check()
        with self._lock:
            self._sweep()
            self._pool.reserve(nbytes)

    def put(self, tensor: Tensor) -> Handle[_Entry]:
        """Begin to copy it to the host."""
        self._owner.check()
        entry = _Entry(tensor)
        with self._lock:
            self._sweep()
            self._shelf.add(entry)
            if entry.flat is not None and entry.nbytes:
                entry.chunk, entry.at, entry.place = self._pool.take(entry.nbytes)
                entry.copy = self._copier.begin(entry.flat, entry.place)
                self.traffic.moved("away", entry.nbytes, entry.copy)
                self._leaving.append(entry)
                while len(self._leaving) > self._in_flight:
                    self._release(self._leaving.popleft())
        return Handle(self, entry)

    def fetch(self, entry: _Entry) -> Tensor:
        """The tensor of an entry; begins to copy those before it."""
        self._owner.check()
        with self._lock:
            self._sweep()
            entry.check()
            held, coming = entry.flat, None
            if held is None:
                coming = entry.back or self._begin(entry)
                entry.back = None
            self._copy_before(entry)
            if coming is not None:
                held, copy = coming
                self.traffic.waited("back", copy.join(held))
            assert held is not None
            return entry.form.tensor(held)

    def forget(self, entry: _Entry) -> None:
        """Give an entry's place back."""
        if not self._owner.here or self._owner.closed:
            return
        with self._lock:
            self._drop(entry)

    def metrics(self) -> dict[str, float]:
        """See `Traffic.metrics`; seconds are the device's, of what it has done until now."""
        return self.traffic.metrics()

    def reset(self) -> None:
        """Count from zero."""
        self.traffic.reset()

    def close(self) -> None:
        """Give the host's memory back; what is stored is gone. A second time does nothing."""
        if not self._owner.here or self._owner.closed:
            return
        with self._lock:
            for entry in list(self._shelf):
                self._drop(entry)
            while self._leaving:
                self._release(self._leaving.popleft())
            self._owner.closed = True
            self._pool = _Pool(self._copier)

    # --- with the lock held

    def _sweep(self) -> None:
        while self.abandoned:
            self._drop(self.abandoned.popleft())
        while self._leaving and (copy := self._leaving[0].copy) is not None and copy.done():
            self._leaving.popleft().release()
        self.traffic.settle()

    def _release(self, entry: _Entry) -> None:
        """Let the device's memory go: what takes it next runs after the copy."""
        assert entry.copy is not None and entry.flat is not None
        self.traffic.waited("away", entry.copy.join(entry.flat))
        entry.release()

    def _drop(self, entry: _Entry) -> None:
        if entry.dropped:
            return
        entry.dropped = True
        self._shelf.remove(entry)
        self._cancel(entry)
        if entry.place is None:
            entry.flat = None
            return
        entry.place = None
        self._pool.give(entry.chunk, entry.at, entry.nbytes)

    def _begin(self, entry: _Entry) -> tuple[Tensor, Copy]:
        assert entry.place is not None
        target = torch.empty(entry.nbytes, dtype=torch.uint8, device=entry.form.device)
        copy = self._copier.begin(entry.place, target)
        self.traffic.moved("back", entry.nbytes, copy)
        return target, copy

    def _copy_before(self, entry: _Entry) -> None:
        """Copy ahead, and let go of what was copied ahead and is not what comes next."""
        coming = self._shelf.next_after(entry)
        for other in self._shelf:
            if other.back is not None and other not in coming:
                self._cancel(other)
        for other in coming:
            if other.flat is None and other.back is None and not other.problem:
                other.back = self._begin(other)

    def _cancel(self, entry: _Entry) -> None:
        if entry.back is not None:
            target, copy = entry.back
            copy.join(target)
            entry.back = None


class _Pool:
    """Pinned memory: few large chunks that stay, since pinning is slow; no entry pins any after the first step."""

    def __init__(self, copier: Copier) -> None:
        self._copier = copier
        self._chunks: list[tuple[Tensor, Slots]] = []

    def reserve(self, nbytes: int) -> None:
        """Have `nbytes` free, or raise LongspanError."""
        missing = nbytes - sum(slots.size - slots.used for _, slots in self._chunks)
        if missing > 0:
            self._check(missing)
            for size in _powers(missing):
                self._add(size)

    def take(self, nbytes: int) -> tuple[int, int, Tensor]:
        """The chunk, the start in it, and the memory: uint8 `[nbytes]`."""
        for number, (memory, slots) in enumerate(self._chunks):
            at = slots.take(nbytes)
            if at is not None:
                return number, at, memory[at : at + nbytes]
        size = _power_above(nbytes)
        self._check(size)
        self._add(size)
        return self.take(nbytes)

    def give(self, chunk: int, at: int, nbytes: int) -> None:
        """Give a place back."""
        self._chunks[chunk][1].give(at, nbytes)

    def _check(self, needed: int) -> None:
        free = free_memory()
        if free is not None and needed > free:
            raise LongspanError(_format_memory_full(needed, free))

    def _add(self, size: int) -> None:
        try:
            memory = self._copier.memory(size)
        except RuntimeError as error:  # what CUDA gives where it cannot pin
            raise LongspanError(f"{_format_memory_full(size, free_memory())} ({error})") from error
        slots = Slots(_ALIGN)
        slots.grow(size)
        self._chunks.append((memory, slots))


def _format_memory_full(needed: int, free: int | None) -> str:
    has = "an unknown number of" if free is None else f"{free:,}"
    return (
        f"activations do not fit in the host's memory: {needed:,} bytes more are needed for this rank, and {has} "
        "bytes are free for all ranks of this machine; use offload='disk', keep less (checkpointing='full'), or "
        "share the sequence among more ranks"
    )


def _power_above(nbytes: int) -> int:
    return max(_SMALLEST, 1 << (nbytes - 1).bit_length())


def _powers(nbytes: int) -> list[int]:
    """Powers of two that make `nbytes` and at most an eighth more, the largest first: torch's allocator of pinned
    memory rounds up to them, which would nearly double one chunk."""
    least = max(_SMALLEST, _power_above(nbytes) // 16)
    found = []
    while nbytes > 0:
        size = max(least, 1 << (nbytes.bit_length() - 1))
        found.append(size)
        nbytes -= size
    return found


# --- CUDA


class CudaCopier:
    """The side stream of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def memory(self, nbytes: int) -> Tensor:
        """Pinned."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def begin(self, source: Tensor, into: Tensor) -> Copy:
        """By an asynchronous copy of the driver."""
        here = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            began = _event(self._stream)
            into.copy_(source, non_blocking=True)
            ended = _event(self._stream)
        return _CudaCopy(here, began, ended)


class _CudaSpan:
    def __init__(self, began: torch.cuda.Event, ended: torch.cuda.Event) -> None:
        self._began, self._ended = began, ended

    def done(self) -> bool:
        """Asks, and does not wait."""
        return bool(self._ended.query())

    def seconds(self) -> float:
        """Between the two events."""
        return float(self._began.elapsed_time(self._ended)) / 1000


class _CudaCopy(_CudaSpan):
    def __init__(self, stream: Any, began: torch.cuda.Event, ended: torch.cuda.Event) -> None:
        super().__init__(began, ended)
        self._from = stream

    def join(self, tensor: Tensor) -> Span:
        """By an event; the tensor's memory belongs to the stream that it was made on."""
        here = torch.cuda.current_stream(tensor.device)
        began = _event(here)
        here.wait_event(self._ended)
        if here != self._from:
            self._from.wait_event(self._ended)
            tensor.record_stream(here)
        return _CudaSpan(began, _event(here))

    def wait(self) -> None:
        """By an event."""
        self._ended.synchronize()


def _event(stream: Any) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record(stream)
    return event
