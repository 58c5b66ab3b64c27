"""What both stores share: tensors as bytes, entries in the order of `put`, futures, prefetching, ranges, statistics."""

from __future__ import annotations

import bisect
import contextlib
import itertools
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from longspan.compat.torch_api import version_of
from longspan.core.errors import LongspanError


class Allocator:
    """Tracks which of `size` bytes of a file or a buffer are used, in multiples of `align`, lowest first.

    Freed ranges merge with free neighbours, so a training step needs no more bytes than the first one.
    """

    def __init__(self, align: int) -> None:
        self.align = align
        self.size = self.used = 0
        self._holes: list[tuple[int, int]] = []  # free (start, stop), ascending; no two touch

    def rounded(self, nbytes: int) -> int:
        return -(-nbytes // self.align) * self.align

    def allocate(self, nbytes: int) -> int | None:
        """Return the start of a range of `nbytes`; None if no hole is large enough."""
        nbytes = self.rounded(nbytes)
        for i, (start, stop) in enumerate(self._holes):
            if stop - start >= nbytes:
                self._holes[i : i + 1] = [(start + nbytes, stop)] if start + nbytes < stop else []
                self.used += nbytes
                return start
        return None

    def free(self, start: int, nbytes: int) -> None:
        """Free a range: the result of `allocate` and its argument."""
        nbytes = self.rounded(nbytes)
        self.used -= nbytes
        self._add_hole(start, start + nbytes)

    def grow(self, size: int) -> None:
        """Grow to `size` bytes; never shrink."""
        if size > self.size:
            before, self.size = self.size, size
            self._add_hole(before, size)

    def _add_hole(self, start: int, stop: int) -> None:
        i = bisect.bisect(self._holes, (start, stop))
        if i < len(self._holes) and self._holes[i][0] == stop:
            stop = self._holes.pop(i)[1]
        if i and self._holes[i - 1][1] == start:
            i -= 1
            start = self._holes.pop(i)[0]
        self._holes.insert(i, (start, stop))


_KEYS = ("bytes", "seconds", "waited")


class DeviceTimer(Protocol):
    """Times some work of a device; `seconds` is valid once `done`."""

    def done(self) -> bool:
        """Return whether the work has ended; do not wait."""

    def seconds(self) -> float:
        """Return how long it took; valid once `done`."""


class TransferStats:
    """Bytes moved, seconds of moving, and seconds that compute waited, both directions together; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._active, self._since = 0, 0.0
        self._timers: deque[tuple[str, DeviceTimer]] = deque()
        self._totals = dict.fromkeys(_KEYS, 0.0)

    @contextlib.contextmanager
    def transfer(self, nbytes: int) -> Iterator[None]:
        """Time the body as a transfer. Overlapping transfers count once, so bytes / seconds is bandwidth."""
        with self._lock:
            if not self._active:
                self._since = time.perf_counter()
            self._active += 1
        try:
            yield
            with self._lock:
                self._totals["bytes"] += nbytes
        finally:
            with self._lock:
                self._active -= 1
                if not self._active:
                    self._totals["seconds"] += time.perf_counter() - self._since

    @contextlib.contextmanager
    def wait(self) -> Iterator[None]:
        """Time the body as waiting."""
        start = time.perf_counter()
        try:
            yield
        finally:
            with self._lock:
                self._totals["waited"] += time.perf_counter() - start

    def add(self, key: str, timer: DeviceTimer, nbytes: int = 0) -> None:
        """Count what a device does asynchronously, as "seconds" (of moving `nbytes`) or "waited"."""
        with self._lock:
            self._totals["bytes"] += nbytes
            self._timers.append((key, timer))

    def collect(self) -> None:
        """Read the timers that are done. Call it now and then, so that timers do not pile up."""
        with self._lock:
            for _ in range(len(self._timers)):
                key, timer = self._timers.popleft()
                if timer.done():
                    self._totals[key] += timer.seconds()
                else:
                    self._timers.append((key, timer))

    def take(self) -> dict[str, float]:
        """Return the `bytes`, `seconds` and `waited` seconds since the last call; a device's, of work that is done."""
        self.collect()
        with self._lock:
            totals, self._totals = self._totals, dict.fromkeys(_KEYS, 0.0)
            return totals


@dataclass(frozen=True)
class TensorMeta:
    """Metadata that rebuilds a tensor from its bytes.

    A dense tensor gets its strides back, because a kernel or a projection chose that layout.
    """

    dtype: torch.dtype
    device: torch.device
    shape: tuple[int, ...]
    order: tuple[int, ...]  # the dims from the slowest to the fastest in memory

    def view(self, data: Tensor) -> Tensor:
        """Return the tensor whose bytes are `data`, uint8 `[nbytes]`; they share memory."""
        ordered = data.view(self.dtype).view([self.shape[d] for d in self.order])
        return ordered.permute([self.order.index(d) for d in range(len(self.order))])


def to_bytes(tensor: Tensor) -> tuple[TensorMeta, Tensor]:
    """Return a tensor's metadata and its bytes, uint8 `[nbytes]`: a view if the tensor is dense, else a copy."""
    if tensor.layout != torch.strided:
        raise LongspanError(f"a tensor of layout {tensor.layout} cannot be offloaded; only strided tensors can")
    x = tensor.detach().resolve_conj().resolve_neg()
    strides: tuple[int, ...] = x.stride()
    order = tuple(sorted(range(x.dim()), key=lambda d: -strides[d]))
    meta = TensorMeta(x.dtype, x.device, tuple(x.shape), order)
    return meta, x.permute(order).reshape(-1).view(torch.uint8)


class Entry:
    """A tensor in a store."""

    def __init__(self, tensor: Tensor) -> None:
        self.meta, data = to_bytes(tensor)
        self.data: Tensor | None = data  # on the original device, until it is stored
        self.nbytes = data.nbytes
        self.number = -1  # its place in the order of `put`
        self.layer = -1  # number of the layer that saves it, in the same order; without layers its own number
        self.fetch: Any = None  # its way back, while it is prefetched
        self.dropped = False  # its space may be reused
        self.error = ""  # why it is lost
        self._version = -1 if data.is_inference() else version_of(data)

    def check(self) -> None:
        """Raise if the entry is lost."""
        if self.error:
            raise LongspanError(self.error)

    def release(self) -> None:
        """Free the original bytes. If they were written to since `put`, the stored copy cannot be trusted."""
        if self.data is not None and self._version >= 0 and version_of(self.data) != self._version:
            self.error = (
                "a tensor was written to while it was being offloaded; do not change a layer's inputs or outputs in "
                "place, as autograd demands of saved tensors"
            )
        self.data = None


class Future:
    """A tensor that `Store.put` accepted. Its space is freed when nothing refers to the future any more."""

    def __init__(self, store: Store, entry: Entry) -> None:
        self._store, self._entry = store, entry

    def get(self) -> Tensor:
        """Return the tensor on its device, bit for bit; wait if necessary. May be called again.

        It may share memory with the original, so write to neither. The call also starts to fetch what a backward needs
        next: the rest of the layer, then the layers before it.
        """
        return self._store.fetch(self._entry)

    def __del__(self) -> None:
        self._store.abandoned.append(self._entry)  # do no more: this may run while the store holds its lock


class Store(ABC):
    """Where the tensors of one device are offloaded to. Every method may be called from any thread."""

    entry_class: type[Entry]

    def __init__(self, prefetch_bytes: int | None = 0) -> None:
        self.stats = TransferStats()
        self.abandoned: deque[Entry] = deque()  # whose future was deleted: the next call to the store drops them
        self._prefetch_bytes = prefetch_bytes
        self.entries: dict[int, Entry] = {}  # by number, in the order of `put`, without those that are dropped
        self._numbers = itertools.count()
        self._layer: int | None = None
        self.changed = threading.Condition()  # hold it to use `entries`; wakes when space is freed or a transfer ends

    def reserve(self, nbytes: int) -> None:
        """Reserve space for `nbytes` more, or raise. Call it before the first layer of a forward."""
        with self.changed:
            self._clean_up()
            self._reserve(nbytes)

    def start_layer(self) -> None:
        """Start a layer: its backward fetches the tensors that are put from now on in their order, not in reverse."""
        with self.changed:
            self._layer = next(self._numbers)

    def put(self, tensor: Tensor) -> Future:
        """Start to offload a tensor. Wait only while too much is in flight; hold the tensor only until it is offloaded.

        `tensor` is strided and must not be written to from now on. A tensor put twice is stored twice.
        """
        entry = self.entry_class(tensor)
        with self.changed:
            self._clean_up()
            self._start_storing(entry)
            entry.number = next(self._numbers)
            entry.layer = entry.number if self._layer is None else self._layer
            self.entries[entry.number] = entry
        return Future(self, entry)

    def fetch(self, entry: Entry) -> Tensor:
        """Return an entry's tensor, and start to fetch those before it."""
        with self.changed:
            self._clean_up()
            entry.check()
            data, fetch, entry.fetch = entry.data, entry.fetch, None
            if data is None and fetch is None:
                fetch = self._start_fetch(entry)
            self._prefetch_before(entry)
            if data is None:
                data = self._finish_fetch(entry, fetch)
        return entry.meta.view(data)

    # Below: with the lock held.

    @abstractmethod
    def _reserve(self, nbytes: int) -> None: ...

    @abstractmethod
    def _start_storing(self, entry: Any) -> None: ...

    @abstractmethod
    def _start_fetch(self, entry: Any) -> Any:
        """Return a value of the store's own that stands for the transfer."""

    @abstractmethod
    def _finish_fetch(self, entry: Any, fetch: Any) -> Tensor:
        """Wait for a fetch; return the bytes, uint8 `[nbytes]`."""

    @abstractmethod
    def _cancel_fetch(self, fetch: Any) -> None: ...

    @abstractmethod
    def _free(self, entry: Any) -> None:
        """Free a dropped entry's space, now or when nothing uses it any more."""

    def _clean_up(self) -> None:
        while self.abandoned:
            self.drop(self.abandoned.popleft())

    def drop(self, entry: Entry) -> None:
        if not entry.dropped:
            entry.dropped = True
            del self.entries[entry.number]
            self._stop_prefetch(entry)
            self._free(entry)

    def _stop_prefetch(self, entry: Entry) -> None:
        if entry.fetch is not None:
            self._cancel_fetch(entry.fetch)
            entry.fetch = None

    def _prefetch_before(self, entry: Entry) -> None:
        """Prefetch what a backward needs next, and cancel every other prefetch."""
        coming = self._next_in_backward(entry)
        for other in self.entries.values():
            if other not in coming:
                self._stop_prefetch(other)
        for other in coming:
            if other.data is None and other.fetch is None and not other.error:
                other.fetch = self._start_fetch(other)

    def _next_in_backward(self, entry: Entry) -> list[Entry]:
        """Return the entries that a backward reads after `entry`: the rest of its layer, then the layers before it.

        The list ends when it reaches `prefetch_bytes` and half of the largest entry: a layer may save a small tensor
        next to a large one.
        """
        if self._prefetch_bytes is None:
            return []
        enough = max(self._prefetch_bytes, max((e.nbytes for e in self.entries.values()), default=0) // 2)
        coming: list[Entry] = []
        total = 0
        rest = (other for other in self.entries.values() if other.layer == entry.layer and other.number > entry.number)
        before = (other for other in reversed(self.entries.values()) if other.layer < entry.layer)
        layers = (reversed(list(layer)) for _, layer in itertools.groupby(before, lambda other: other.layer))
        for other in itertools.chain(rest, itertools.chain.from_iterable(layers)):
            if coming and total >= enough:
                break
            coming.append(other)
            total += other.nbytes
        return coming
