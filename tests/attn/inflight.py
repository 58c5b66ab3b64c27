"""Watch messages in flight: detect buffers that are read before they arrive, or changed or freed before they are sent.

On gloo such a fault often goes unnoticed: small messages arrive at once, and the library keeps the tensors alive.
`watched` sends a copy of every message and makes the worst of it: a receive buffer holds NaN until it is waited for,
and a tensor that has changed when it is waited for is an error. It holds no reference to the caller's tensors, so that
a tensor that the caller releases is freed.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


class InFlight(AssertionError):
    """A tensor was changed or freed while its message was in flight."""


@dataclasses.dataclass
class Watch:
    """The messages that `watched` has seen.

    Attributes:
        works: messages that were posted.
        faults: descriptions of misuse.
        forget: number of the message whose `wait` does nothing, as if the call were missing; None for none.
    """

    works: list[_Work] = dataclasses.field(default_factory=list)
    faults: list[str] = dataclasses.field(default_factory=list)
    forget: int | None = None

    @property
    def posted(self) -> int:
        return len(self.works)


class WeakTensor:
    """A weak reference to a tensor's memory."""

    def __init__(self, x: Tensor) -> None:
        self.storage = StorageWeakRef(x.untyped_storage())
        self.like = x.dtype, x.device, x.storage_offset(), tuple(x.shape), x.stride()

    def __call__(self) -> Tensor | None:
        if self.storage.expired():
            return None
        dtype, device, offset, shape, stride = self.like
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        if storage is None:
            return None
        return torch.empty(0, dtype=dtype, device=device).set_(storage, offset, shape, stride)


class _Work:
    """A message; `wait` checks its tensor."""

    def __init__(self, watch: Watch, sends: bool, x: Tensor) -> None:
        self.watch, self.sends = watch, sends
        self.number, self.done = watch.posted, False
        watch.works.append(self)
        self.real: Any = None
        self.wire = x.detach().clone(memory_format=torch.contiguous_format)
        if not sends:
            with torch.no_grad():
                x.fill_(torch.nan if x.is_floating_point() else torch.iinfo(x.dtype).min)
        self.before = x.detach().clone()
        self.where = WeakTensor(x)

    def wait(self, *args: Any) -> bool:
        if self.number == self.watch.forget:
            return True
        self.real.wait()
        name = f"message {self.number}, a {'send' if self.sends else 'receive'} of {tuple(self.before.shape)}"
        x = None if self.done else self.where()
        if x is None and not self.done:
            self.watch.faults.append(f"{name}: its tensor was freed before it was waited for")
        elif x is not None:
            if not _same_bits(x, self.before):
                self.watch.faults.append(f"{name}: its tensor was changed before it was waited for")
            if not self.sends:
                x.copy_(self.wire.view_as(x))
        self.done = True
        return True


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return a.contiguous().view(torch.uint8).equal(b.contiguous().view(torch.uint8))


@contextlib.contextmanager
def watched(forget: int | None = None) -> Iterator[Watch]:
    """Watch messages that are posted in batches.

    Args:
        forget: as in `Watch`.

    Raises:
        InFlight: at the end, so that no other rank waits forever, with all faults.
    """
    watch = Watch(forget=forget)
    original = dist.batch_isend_irecv

    def batch_isend_irecv(ops: list[Any]) -> list[Any]:
        works = [_Work(watch, op.op is dist.isend, op.tensor) for op in ops]
        wires = [
            dist.P2POp(op.op, work.wire, group=op.group, tag=op.tag, group_peer=op.group_peer)
            for op, work in zip(ops, works, strict=True)
        ]
        for work, real in zip(works, original(wires), strict=True):
            work.real = real
        return works

    dist.batch_isend_irecv = batch_isend_irecv
    try:
        yield watch
    finally:
        dist.batch_isend_irecv = original
    left = [work.real for work in watch.works if not work.done]
    for work in left:
        work.wait()
    if len(left) > (forget is not None):
        watch.faults.append(f"{len(left)} of {watch.posted} messages were never waited for")
    if watch.faults:
        raise InFlight("\n".join(watch.faults))
