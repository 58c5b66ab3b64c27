"""Offload GPU activations to pinned host memory: a side stream copies them out while later layers compute, and back
ahead of the backward.

One side stream does the copies of both directions in order. So host memory can be reused as soon as a tensor is
dropped: the next copy into it runs after the last copy out of it. Compute waits for copies on the device, by events;
the host never waits.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from longspan.core.errors import LongspanError
from longspan.core.tile_sizes import free_memory
from longspan.memory.offload.store import Allocator, DeviceTimer, Entry, Store

IN_FLIGHT = 2
"""Tensors on their way to the host; the device holds them until then."""
_ALIGN = 512
_SMALLEST = 64 << 20


class Copy(DeviceTimer, Protocol):
    """An asynchronous copy on the side stream."""

    def join(self, tensor: Tensor) -> DeviceTimer:
        """Make the current stream, and the stream that started the copy, run after it; return how long it waits.

        `tensor` is the device's side of the copy.
        """

    def wait(self) -> None:
        """Block the host until the copy is done."""


class Copier(Protocol):
    """The side stream."""

    def memory(self, nbytes: int) -> Tensor:
        """Allocate uint8 `[nbytes]` of host memory for asynchronous copies."""

    def begin(self, source: Tensor, into: Tensor) -> Copy:
        """Copy after all work of the current stream and all earlier copies; the caller keeps both tensors alive."""


class _Entry(Entry):
    """A tensor that is copied to the host, or is there, in `memory`, uint8 `[nbytes]`, which `free` gives back."""

    memory: Tensor | None = None
    free: Callable[[], None] | None = None
    copy_out: Copy | None = None


class HostStore(Store):
    """A `Store` in host memory.

    With more than `in_flight` tensors on their way, compute waits on the device for a copy.
    """

    entry_class = _Entry

    def __init__(self, copier: Copier, *, in_flight: int = IN_FLIGHT) -> None:
        super().__init__()
        self._copier, self._in_flight = copier, in_flight
        self._pool = _PinnedPool(copier)
        self._outgoing: deque[_Entry] = deque()

    # Below: with the lock held.

    def _clean_up(self) -> None:
        """Drop abandoned entries, release what has been copied out, and read the timers."""
        super()._clean_up()
        while self._outgoing and (copy := self._outgoing[0].copy_out) is not None and copy.done():
            self._outgoing.popleft().release()
        self.stats.collect()

    def _reserve(self, nbytes: int) -> None:
        self._pool.reserve(nbytes)

    def _start_storing(self, entry: _Entry) -> None:
        if entry.data is None or not entry.nbytes:
            return
        entry.memory, entry.free = self._pool.allocate(entry.nbytes)
        entry.copy_out = self._copier.begin(entry.data, entry.memory)
        self.stats.add("seconds", entry.copy_out, entry.nbytes)
        self._outgoing.append(entry)
        while len(self._outgoing) > self._in_flight:
            self._release(self._outgoing.popleft())

    def _release(self, entry: _Entry) -> None:
        """Free the device memory; whatever reuses it runs after the copy."""
        assert entry.copy_out is not None and entry.data is not None
        self.stats.add("waited", entry.copy_out.join(entry.data))
        entry.release()

    def _start_fetch(self, entry: _Entry) -> tuple[Tensor, Copy]:
        assert entry.memory is not None
        target = torch.empty(entry.nbytes, dtype=torch.uint8, device=entry.meta.device)
        copy = self._copier.begin(entry.memory, target)
        self.stats.add("seconds", copy, entry.nbytes)
        return target, copy

    def _finish_fetch(self, entry: _Entry, fetch: tuple[Tensor, Copy]) -> Tensor:
        target, copy = fetch
        self.stats.add("waited", copy.join(target))
        return target

    def _cancel_fetch(self, fetch: tuple[Tensor, Copy]) -> None:
        target, copy = fetch
        copy.join(target)

    def _free(self, entry: _Entry) -> None:
        entry.memory = None
        if entry in self._outgoing:  # nothing else holds its device memory
            self._outgoing.remove(entry)
            self._release(entry)
        if entry.free is None:  # an empty tensor
            entry.data = None
        else:
            entry.free()


class _PinnedPool:
    """A few large chunks of pinned memory. They stay, because pinning is slow."""

    def __init__(self, copier: Copier) -> None:
        self._copier = copier
        self._chunks: list[tuple[Tensor, Allocator]] = []

    def reserve(self, nbytes: int) -> None:
        """Have `nbytes` free, or raise LongspanError."""
        missing = nbytes - sum(allocator.size - allocator.used for _, allocator in self._chunks)
        if missing > 0:
            self._add(_powers(missing))

    def allocate(self, nbytes: int) -> tuple[Tensor, Callable[[], None]]:
        """Return memory, uint8 `[nbytes]`, and a function that frees it."""
        for memory, allocator in self._chunks:
            offset = allocator.allocate(nbytes)
            if offset is not None:
                return memory[offset : offset + nbytes], functools.partial(allocator.free, offset, nbytes)
        self._add([_power_above(nbytes)])
        return self.allocate(nbytes)

    def _add(self, sizes: list[int]) -> None:
        free = free_memory()
        if free is not None and sum(sizes) > free:
            raise LongspanError(_out_of_memory(sum(sizes), free))
        for size in sizes:
            try:
                memory = self._copier.memory(size)
            except RuntimeError as error:  # CUDA cannot pin it
                raise LongspanError(f"{_out_of_memory(size, free_memory())} ({error})") from error
            allocator = Allocator(_ALIGN)
            allocator.grow(size)
            self._chunks.append((memory, allocator))


def _out_of_memory(needed: int, free: int | None) -> str:
    available = "an unknown number of" if free is None else f"{free:,}"
    return (
        f"activations do not fit in host memory: this rank needs {needed:,} bytes more, and {available} bytes are free "
        "for all ranks of this machine; use offload='disk', save less (checkpointing='full'), or shard the sequence "
        "over more ranks"
    )


def _power_above(nbytes: int) -> int:
    return max(_SMALLEST, 1 << (nbytes - 1).bit_length())


def _powers(nbytes: int) -> list[int]:
    """Return powers of two, largest first, that sum to `nbytes` and at most an eighth more.

    torch's pinned allocator rounds up to powers of two, which would nearly double a single chunk.
    """
    least = max(_SMALLEST, _power_above(nbytes) // 16)
    sizes = []
    while nbytes > 0:
        size = max(least, 1 << (nbytes.bit_length() - 1))
        sizes.append(size)
        nbytes -= size
    return sizes


class CudaCopier:
    """The side stream of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def memory(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def begin(self, source: Tensor, into: Tensor) -> Copy:
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            start = _event(self._stream)
            into.copy_(source, non_blocking=True)
            end = _event(self._stream)
        return _CudaCopy(current, start, end)


class _CudaTimer:
    def __init__(self, start: torch.cuda.Event, end: torch.cuda.Event) -> None:
        self._start, self._end = start, end

    def done(self) -> bool:
        return bool(self._end.query())

    def seconds(self) -> float:
        return float(self._start.elapsed_time(self._end)) / 1000


class _CudaCopy(_CudaTimer):
    def __init__(self, stream: Any, start: torch.cuda.Event, end: torch.cuda.Event) -> None:
        super().__init__(start, end)
        self._started_on = stream

    def join(self, tensor: Tensor) -> DeviceTimer:
        current = torch.cuda.current_stream(tensor.device)
        start = _event(current)
        current.wait_event(self._end)
        if current != self._started_on:  # the tensor's memory belongs to the stream that allocated it
            self._started_on.wait_event(self._end)
            tensor.record_stream(current)
        return _CudaTimer(start, _event(current))

    def wait(self) -> None:
        self._end.synchronize()


def _event(stream: Any) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record(stream)
    return event
