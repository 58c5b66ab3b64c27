"""What both stores share: a tensor as bytes and back, entries in the order of `put`, futures."""

from __future__ import annotations

import itertools
import os
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from longspan.compat.torch_api import version_of
from longspan.core.errors import LongspanError


@dataclass(frozen=True)
class TensorMeta:
    """Metadata that rebuilds a tensor from its bytes.

    Attributes:
        order: dims from the slowest to the fastest in memory. A dense tensor gets its strides back, because a kernel or
            a projection chose that layout.
    """

    dtype: torch.dtype
    device: torch.device
    shape: tuple[int, ...]
    order: tuple[int, ...]

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
    """A stored tensor.

    Attributes:
        data: its bytes on the original device, until they are stored.
        number: its place in the order of `put`.
        dropped: whether its space may be reused.
        error: why it is lost; empty if it is not.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.meta, data = to_bytes(tensor)
        self.data: Tensor | None = data
        self.nbytes = data.nbytes
        self.number = -1
        self.dropped = False
        self.error = ""
        self._version = -1 if data.is_inference() else version_of(data)

    def check(self) -> None:
        """Raise if the entry is lost or dropped."""
        if self.dropped:
            raise LongspanError("an activation was read after it was dropped; a backward can run only once")
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


E = TypeVar("E", bound=Entry)


class EntryQueue(Generic[E]):
    """The entries of a store that have not been dropped, in the order of `put`."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._entries: dict[int, E] = {}

    def __iter__(self) -> Iterator[E]:
        return iter(self._entries.values())

    def append(self, entry: E) -> None:
        entry.number = next(self._numbers)
        self._entries[entry.number] = entry

    def remove(self, entry: E) -> None:
        self._entries.pop(entry.number, None)

    def next_in_backward(self, entry: E, ahead: int = 0) -> list[E]:
        """Return the entries that a backward reads after `entry`: those put before it, latest first.

        The list ends when it reaches `ahead` bytes and half of the largest entry: a layer may save a small tensor next
        to a large one.
        """
        enough = max(ahead, max((e.nbytes for e in self._entries.values()), default=0) // 2)
        coming: list[E] = []
        total = 0
        for other in reversed(self._entries.values()):
            if other.number < entry.number:
                if coming and total >= enough:
                    break
                coming.append(other)
                total += other.nbytes
        return coming


class EntryStore(Protocol[E]):
    """A store as a `Future` sees it.

    Attributes:
        abandoned: entries whose future was deleted without `drop`. The next call to the store drops them: a destructor
            may run anywhere, even while the store holds its lock.
    """

    abandoned: deque[E]

    def fetch(self, entry: E) -> Tensor:
        """Return the tensor on its device."""

    def forget(self, entry: E) -> None:
        """Free the entry's space."""


class Future(Generic[E]):
    """What `put` returns: see `longspan.memory.offload.StoredTensor`."""

    def __init__(self, store: EntryStore[E], entry: E) -> None:
        self._store, self._entry = store, entry

    def get(self) -> Tensor:
        return self._store.fetch(self._entry)

    def drop(self) -> None:
        self._store.forget(self._entry)

    def __del__(self) -> None:
        if not self._entry.dropped:
            self._store.abandoned.append(self._entry)


class StoreState:
    """Whether a store is usable: open, and in the process that made it. Threads, streams and files do not survive a
    fork."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self.closed = False

    @property
    def forked(self) -> bool:
        return os.getpid() != self._pid

    @property
    def usable(self) -> bool:
        return not self.forked and not self.closed

    def check(self) -> None:
        """Raise if the store is closed, or belongs to the process that this one was forked from."""
        if self.forked:
            raise LongspanError(
                f"process {self._pid} made this activation store, and its fork, process {os.getpid()}, cannot use it; "
                "build the model in the forked process"
            )
        if self.closed:
            raise LongspanError("the activation store is closed; its tensors are lost")
