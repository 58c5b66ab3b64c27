"""Offload saved activations to host memory until the backward needs them.

host.py   pinned host memory, copied on a side stream of the GPU
store.py  `Store`: tensors as bytes, entries in order, futures, prefetching, statistics
"""

from __future__ import annotations

import torch

from longspan.core.errors import LongspanError
from longspan.core.memory import Memory
from longspan.memory.offload.host import CudaCopier, HostStore
from longspan.memory.offload.store import Store


def store_for(memory: Memory, device: torch.device) -> Store | None:
    """Return the store for `memory.offload` on `device`, None for "none"; raise if it is not supported there."""
    if memory.offload == "none":
        return None
    if device.type != "cuda":
        raise LongspanError(
            f"offload='host' moves activations from a GPU to host memory; this device is {device.type}. Use "
            f"offload='none'"
        )
    return HostStore(CudaCopier(device))
