"""Where what checkpointing keeps of a layer lies until its backward: in the host's memory, or on a disk."""

from __future__ import annotations

import sys
import tempfile
from typing import Protocol

import torch
from torch import Tensor

from longspan.core.errors import LongspanError
from longspan.core.memory import Memory
from longspan.memory.offload.disk import MIB, DiskStore
from longspan.memory.offload.host import CudaCopier, HostStore


class Stored(Protocol):
    """A tensor that was put."""

    def get(self) -> Tensor:
        """The tensor on its device again, equal to the bit; waits if it must. As often as asked, until `drop`.

        It may share its memory with the one that was put, where that is still there: write to neither. The last one put
        before it that is still stored begins to come, since a backward goes through a forward in reverse.

        Raises:
            LongspanError: it is lost (the disk's error, or it was written to while it was moved away), or dropped.
        """

    def drop(self) -> None:
        """Give its place back. Also done when nothing refers to it any more."""


class Store(Protocol):
    """What `offload` says, for the tensors of one device. Every call may be made from any thread."""

    def put(self, tensor: Tensor) -> Stored:
        """Begin to move it away, and return at once where not too much is on its way; held only until it is away.

        Args:
            tensor: any strided one; must not be written to from now on. Put twice, it is two entries.

        Raises:
            LongspanError: there is no room, or one that was put before is lost by the disk's error.
        """

    def reserve(self, nbytes: int) -> None:
        """Have room for so many bytes beside what is stored; to be called before the first layer of a forward.

        Raises:
            LongspanError: there is none, with the bytes that are needed and free.
        """

    def metrics(self) -> dict[str, float]:
        """`bytes_away`, `bytes_back`; `seconds_away`, `seconds_back` of moving; `waited_seconds_away`,
        `waited_seconds_back`, which computing waited for; since the last `reset`."""

    def reset(self) -> None:
        """Count from zero."""

    def close(self) -> None:
        """Give everything back; what is stored is gone."""


def store_for(memory: Memory, device: torch.device) -> Store | None:
    """The store that `memory.offload` asks for on `device`; None for "none".

    Raises:
        LongspanError: it cannot be had there, with the reason.
    """
    if memory.offload == "none":
        return None
    if memory.offload == "host":
        if device.type == "cpu":
            raise LongspanError(
                "offload='host' moves activations from a GPU to the host's memory, and on a CPU they are in it "
                "already; use offload='disk'"
            )
        if device.type != "cuda":
            raise LongspanError(f"offload='host' is made for CUDA devices, and this is {device.type}")
        return HostStore(CudaCopier(device))
    if device.type not in ("cpu", "cuda") or sys.platform != "linux":
        raise LongspanError(
            f"offload='disk' is made for CPUs and CUDA devices under Linux, and this is {device.type} under "
            f"{sys.platform}"
        )
    folder = memory.offload_folder or tempfile.gettempdir()
    if device.type == "cpu":
        # What is on its way lies in the memory that is to be saved: one leaves while one is made. None comes before it
        # is asked for: it would lie there beside a whole layer's backward, and a CPU computes a layer's tokens a
        # hundred times longer than a disk takes to read them.
        return DiskStore(folder, device, tensors=2, ahead=None, piece=MIB // 2)
    return DiskStore(folder, device)
