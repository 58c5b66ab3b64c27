"""Send Python objects between ranks.

torch's own object collectives (`broadcast_object_list`, `all_gather_object`) return while a thread of gloo may still
hold their last tensor. A script that ends right then aborts ("terminate called without an active exception"): that
thread needs the interpreter to free the tensor. So every call here waits until gloo has released its tensors.
"""

from __future__ import annotations

import pickle
import time
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_RELEASE_S = 5.0


def gather_objects(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Return every rank's `value`, in rank order. Collective; `group` is None for one rank."""
    if group is None or group.size() == 1:
        return [value]
    gathered, sent = _gather(pickle.dumps(value), group)
    _wait_for_release(sent)
    return [pickle.loads(data) for data in gathered]


def broadcast_object(value: Any, group: dist.ProcessGroup | None) -> Any:
    """Return the `value` of the group's first rank on every rank. Collective; `group` is None for one rank."""
    if group is None or group.size() == 1:
        return value
    first = group.rank() == 0
    data, sent = _broadcast(pickle.dumps(value) if first else b"", group)
    _wait_for_release(sent)
    return value if first else pickle.loads(data)


def _gather(data: bytes, group: dist.ProcessGroup) -> tuple[list[bytes], list[weakref.ref[Tensor]]]:
    size = torch.tensor([len(data)], device=_device(group))
    sizes = [torch.empty_like(size) for _ in range(group.size())]
    dist.all_gather(sizes, size, group=group)
    lengths = [int(x) for x in sizes]
    padded = torch.frombuffer(bytearray(data.ljust(max(lengths))), dtype=torch.uint8).to(size.device)
    received = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(received, padded, group=group)
    gathered = [_bytes(x[:n]) for x, n in zip(received, lengths, strict=True)]
    return gathered, [weakref.ref(x) for x in (*sizes, size, padded, *received)]


def _broadcast(data: bytes, group: dist.ProcessGroup) -> tuple[bytes, list[weakref.ref[Tensor]]]:
    size = torch.tensor([len(data)], device=_device(group))
    dist.broadcast(size, group_src=0, group=group)
    x = torch.frombuffer(bytearray(data or bytes(int(size))), dtype=torch.uint8).to(size.device)
    dist.broadcast(x, group_src=0, group=group)
    return _bytes(x), [weakref.ref(size), weakref.ref(x)]


def _device(group: dist.ProcessGroup) -> torch.device:
    """Return the CPU if the group supports it, else this rank's GPU."""
    only_gpu = dist.get_backend(group) == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if only_gpu else torch.device("cpu")


def _bytes(x: Tensor) -> bytes:
    return x.cpu().numpy().tobytes()


def _wait_for_release(sent: list[weakref.ref[Tensor]]) -> None:
    """Wait until gloo has released the tensors that were sent, at most `_RELEASE_S` seconds."""
    deadline = time.monotonic() + _RELEASE_S
    while any(x() is not None for x in sent) and time.monotonic() < deadline:
        time.sleep(0.0001)
