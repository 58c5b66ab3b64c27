"""Offload saved activations to host memory or a local disk until the backward needs them.

`store_for` returns the `Store` that `Memory.offload` asks for:

    host.py            pinned host memory, copied on a side stream of the GPU
    disk.py            a file, written and read by threads; disk_file.py is the file itself
    store.py           what both share: a tensor as bytes, entries in order, futures
    allocator.py       byte ranges of a file or a buffer
    transfer_stats.py  bytes moved, seconds of moving, seconds waited
"""

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


class StoredTensor(Protocol):
    """A tensor that `Store.put` accepted."""

    def get(self) -> Tensor:
        """Return the tensor on its device, bit for bit; wait if necessary. May be called again until `drop`.

        It may share memory with the original, so write to neither. The call also starts to fetch the tensors that were
        put before this one, because a backward visits a forward in reverse.

        Raises:
            LongspanError: the tensor was dropped, or is lost: a disk error, or a write to it while it was offloaded.
        """

    def drop(self) -> None:
        """Free its space. Also happens when nothing refers to it any more."""


class Store(Protocol):
    """Where the tensors of one device are offloaded to. Every method may be called from any thread."""

    def put(self, tensor: Tensor) -> StoredTensor:
        """Start to offload a tensor. Wait only while too much is in flight; hold the tensor only until it is offloaded.

        Args:
            tensor: any strided tensor; must not be written to from now on. A tensor put twice is stored twice.

        Raises:
            LongspanError: no space is left, or a disk error lost an earlier tensor.
        """

    def reserve(self, nbytes: int) -> None:
        """Reserve space for `nbytes` more. Call it before the first layer of a forward.

        Raises:
            LongspanError: they do not fit; the message says how many bytes are needed and free.
        """

    def metrics(self) -> dict[str, float]:
        """Return `bytes_*`, `seconds_*` (of moving) and `waited_seconds_*` (of compute waiting) since `reset`, for each
        direction `out` and `in`."""

    def reset(self) -> None:
        """Reset the metrics to zero."""

    def close(self) -> None:
        """Free everything; stored tensors are lost."""


def store_for(memory: Memory, device: torch.device) -> Store | None:
    """Return the store for `memory.offload` on `device`; None for "none".

    Raises:
        LongspanError: the device or system does not support it.
    """
    if memory.offload == "none":
        return None
    if memory.offload == "host":
        if device.type == "cpu":
            raise LongspanError(
                "offload='host' moves activations from a GPU to host memory; this device is a CPU. Use offload='disk'"
            )
        if device.type != "cuda":
            raise LongspanError(f"offload='host' supports CUDA devices only; this device is {device.type}")
        return HostStore(CudaCopier(device))
    if device.type not in ("cpu", "cuda") or sys.platform != "linux":
        raise LongspanError(
            f"offload='disk' supports CPUs and CUDA devices on Linux only; this is {device.type} on {sys.platform}"
        )
    folder = memory.offload_folder or tempfile.gettempdir()
    if device.type == "cpu":
        # Tensors in flight occupy the memory that offload should save: write one while the next is computed, and read
        # none ahead. A CPU computes a layer about a hundred times longer than a disk reads its input.
        return DiskStore(folder, device, max_tensors=2, read_ahead=None, chunk_bytes=MIB // 2)
    return DiskStore(folder, device)
