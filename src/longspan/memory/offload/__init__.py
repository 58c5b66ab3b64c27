"""Offload saved activations to host memory or a local disk until the backward needs them.

host.py   pinned host memory, copied on a side stream of the GPU
disk.py   a file, written and read by threads; disk_file.py is the file itself
store.py  `Store`, what both share: tensors as bytes, entries in order, futures, prefetching, statistics
"""

from __future__ import annotations

import sys
import tempfile

import torch

from longspan.core.errors import LongspanError
from longspan.core.memory import Memory
from longspan.memory.offload.disk import MIB, DiskStore
from longspan.memory.offload.host import CudaCopier, HostStore
from longspan.memory.offload.store import Store


def store_for(memory: Memory, device: torch.device) -> Store | None:
    """Return the store for `memory.offload` on `device`, None for "none"; raise if it is not supported there."""
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
