"""What stores of activations have in common: a tensor as bytes and back, entries in the order in which they came."""

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
class Form:
    """What it takes to make a tensor of its bytes again.

    Attributes:
        order: the dims from the slowest to the fastest in memory. A tensor without gaps comes back with its strides,
            since what is laid out for a kernel or for a projection is so for a reason.
    """

    dtype: torch.dtype
    device: torch.device
    shape: tuple[int, ...]
    order: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor without gaps."""
        return self.dtype.itemsize * torch.Size(self.shape).numel()

    def tensor(self, flat: Tensor) -> Tensor:
        """The tensor in uint8 `[nbytes]`, whose memory it shares."""
        laid = flat.view(self.dtype).view([self.shape[d] for d in self.order])
        return laid.permute([self.order.index(d) for d in range(len(self.order))])


def flattened(tensor: Tensor) -> tuple[Form, Tensor]:
    """A tensor's form, and its bytes, uint8 `[nbytes]`: the same memory where it has no gaps, else a copy."""
    if tensor.layout != torch.strided:
        raise LongspanError(f"a tensor of layout {tensor.layout} cannot be offloaded, only a strided one")
    x = tensor.detach().resolve_conj().resolve_neg()
    strides: tuple[int, ...] = x.stride()
    order = tuple(sorted(range(x.dim()), key=lambda d: -strides[d]))
    form = Form(x.dtype, x.device, tuple(x.shape), order)
    return form, x.permute(order).reshape(-1).view(torch.uint8)


class Entry:
    """A tensor that was put.

    Attributes:
        flat: its bytes, as long as they have to be held where they were.
        nbytes: how many.
        dropped: whether its place may be given back.
        problem: why it is lost; empty where it is not.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.form, flat = flattened(tensor)
        self.flat: Tensor | None = flat
        self.nbytes = flat.nbytes
        self.number = -1
        self.dropped = False
        self.problem = ""
        self._version = -1 if flat.is_inference() else version_of(flat)

    def check(self) -> None:
        """Refuse to give what is lost or dropped."""
        if self.dropped:
            raise LongspanError("an activation was asked for after it had been dropped; a backward can run once only")
        if self.problem:
            raise LongspanError(self.problem)

    def release(self) -> None:
        """Its bytes are elsewhere. Whether they are those that were put is only known if nothing was written there."""
        if self.flat is not None and self._version >= 0 and version_of(self.flat) != self._version:
            self.problem = (
                "a tensor was written to while it was being moved away (offload); what a layer takes and gives must "
                "not be changed in place, as autograd demands of what it saves"
            )
        self.flat = None


E = TypeVar("E", bound=Entry)


class Shelf(Generic[E]):
    """The entries of a store that have not been dropped, in the order in which they were put."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._entries: dict[int, E] = {}

    def __iter__(self) -> Iterator[E]:
        return iter(self._entries.values())

    def add(self, entry: E) -> None:
        """The last one now."""
        entry.number = next(self._numbers)
        self._entries[entry.number] = entry

    def remove(self, entry: E) -> None:
        """It is dropped."""
        self._entries.pop(entry.number, None)

    def next_after(self, entry: E, ahead: int = 0) -> list[E]:
        """The entries that a backward asks for after this one: those put before it, the latest first, until they
        are half of the largest entry (a layer may keep something small beside what is large) and `ahead` bytes."""
        enough = max(ahead, max((e.nbytes for e in self._entries.values()), default=0) // 2)
        found: list[E] = []
        total = 0
        for other in reversed(self._entries.values()):
            if other.number < entry.number:
                if found and total >= enough:
                    break
                found.append(other)
                total += other.nbytes
        return found


class Fetching(Protocol[E]):
    """A store, as a `Handle` sees it.

    Attributes:
        abandoned: entries whose handle is gone without a `drop`, which the next call of the store drops: a destructor
            may run anywhere, also while the store is in the middle of something.
    """

    abandoned: deque[E]

    def fetch(self, entry: E) -> Tensor:
        """The tensor, on its device."""

    def forget(self, entry: E) -> None:
        """Give its place back."""


class Handle(Generic[E]):
    """What `put` returns."""

    def __init__(self, store: Fetching[E], entry: E) -> None:
        self._store, self._entry = store, entry

    def get(self) -> Tensor:
        """The tensor on its device again, equal to the bit, not to be written to; as often as asked, until `drop`."""
        return self._store.fetch(self._entry)

    def drop(self) -> None:
        """Give its place back; a second time does nothing."""
        self._store.forget(self._entry)

    def __del__(self) -> None:
        if not self._entry.dropped:
            self._store.abandoned.append(self._entry)


class Owner:
    """The process that made a store: threads, streams and files' places are its own, and not a fork's."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self.closed = False

    @property
    def here(self) -> bool:
        """Whether this process is it."""
        return os.getpid() == self._pid

    def check(self) -> None:
        """Refuse a store that is closed, or that belongs to the process that this one was forked from."""
        if not self.here:
            raise LongspanError(
                f"a store of activations was made by process {self._pid} and cannot be used in process {os.getpid()}, "
                "which was forked from it; make the model there"
            )
        if self.closed:
            raise LongspanError("the store of activations is closed; what it held is gone")
