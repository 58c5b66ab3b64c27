"""A fake side stream on a CPU that copies as late as possible, so that copies without order give wrong results."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from longspan.core.memory import Memory
from longspan.memory.offload.host import HostStore


class LateCopy:
    """A copy. It refers weakly to the device's tensor, which must be alive when the copy runs."""

    def __init__(self, side: LateSide, source: Tensor, into: Tensor) -> None:
        self.side, self.executed = side, False
        self.away = side.is_host(into)
        assert self.away != side.is_host(source)
        self.host, device = (into, source) if self.away else (source, into)
        self.device = weakref.ref(device)

    def run(self) -> None:
        device = self.device()
        assert device is not None, "the device's memory was freed before its copy was done"
        if self.away:
            self.host.copy_(device)
        else:
            device.copy_(self.host)
        self.executed = True

    def done(self) -> bool:
        return self.executed

    def seconds(self) -> float:
        return 1.0

    def join(self, tensor: Tensor) -> LateCopy:
        assert self.executed or tensor is self.device()
        while not self.executed:
            self.side.step()
        return self

    def wait(self) -> None:
        while not self.executed:
            self.side.step()


class LateSide:
    """The stream: copies run in order, one per `step`, and when a later one is joined."""

    def __init__(self) -> None:
        self.waiting: deque[LateCopy] = deque()
        self.begun: list[LateCopy] = []
        self.chunks: list[Tensor] = []

    def memory(self, nbytes: int) -> Tensor:
        self.chunks.append(torch.full((nbytes,), 0xEE, dtype=torch.uint8))
        return self.chunks[-1]

    def is_host(self, x: Tensor) -> bool:
        return any(c.data_ptr() <= x.data_ptr() < c.data_ptr() + c.nbytes for c in self.chunks)

    def begin(self, source: Tensor, into: Tensor) -> LateCopy:
        copy = LateCopy(self, source, into)
        self.waiting.append(copy)
        self.begun.append(copy)
        return copy

    def step(self) -> None:
        if self.waiting:
            self.waiting.popleft().run()


def offload_on_cpus(patch: Callable[[str, Any], None] | None = None) -> None:
    """Let `offload="host"` run on CPUs, through a late side stream; by default for the rest of this process."""
    import longspan.hf.memory
    import longspan.hf.preconditions

    def store_for(memory: Memory, _: torch.device) -> HostStore | None:
        return None if memory.offload == "none" else HostStore(LateSide())

    for module in (longspan.hf.memory, longspan.hf.preconditions):
        if patch is None:
            module.store_for = store_for  # type: ignore[attr-defined]
        else:
            patch(f"{module.__name__}.store_for", store_for)
