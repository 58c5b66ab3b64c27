"""Send Python objects between ranks.

torch's own object collectives (`broadcast_object_list`, `all_gather_object`) return while a thread of gloo may still
hold their last tensor. A script that ends right then aborts ("terminate called without an active exception"): that
thread needs the interpreter to free the tensor. So every call here waits until gloo has released its tensors.
"""

from __future__ import annotations

import pickle
import time
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    Sent = tuple[list[bytes], list["weakref.ref[Tensor]"]]

_RELEASE_S = 5.0


def gather_objects(mine: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Return every rank's `mine`, in rank order. Collective; `group` is None for one rank."""
    if group is None or group.size() == 1:
        return [mine]
    return [pickle.loads(found) for found in _released(_gather(pickle.dumps(mine), group))]


def broadcast_object(mine: Any, group: dist.ProcessGroup | None) -> Any:
    """Return the `mine` of the group's first rank on every rank. Collective; `group` is None for one rank."""
    if group is None or group.size() == 1:
        return mine
    first = group.rank() == 0
    (found,) = _released(_broadcast(pickle.dumps(mine) if first else b"", group))
    return mine if first else pickle.loads(found)


def _gather(mine: bytes, group: dist.ProcessGroup) -> Sent:
    device = _device(group)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(group.size())]
    size = torch.tensor([len(mine)], dtype=torch.int64, device=device)
    dist.all_gather(sizes, size, group=group)
    lengths = [int(x) for x in sizes]
    sent = torch.zeros(max(lengths), dtype=torch.uint8)
    sent[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
    sent = sent.to(device)
    every = [torch.empty_like(sent) for _ in lengths]
    dist.all_gather(every, sent, group=group)
    found = [_bytes(x[:n]) for x, n in zip(every, lengths, strict=True)]
    return found, _references([*sizes, size, sent, *every])


def _broadcast(mine: bytes, group: dist.ProcessGroup) -> Sent:
    device = _device(group)
    size = torch.tensor([len(mine)], dtype=torch.int64, device=device)
    dist.broadcast(size, group_src=0, group=group)
    x = torch.frombuffer(bytearray(mine), dtype=torch.uint8) if mine else torch.empty(int(size), dtype=torch.uint8)
    x = x.to(device)
    dist.broadcast(x, group_src=0, group=group)
    return [_bytes(x)], _references([size, x])


def _device(group: dist.ProcessGroup) -> torch.device:
    """Return the CPU if the group supports it, else this rank's GPU."""
    only_gpu = dist.get_backend(group) == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if only_gpu else torch.device("cpu")


def _bytes(x: Tensor) -> bytes:
    return x.cpu().numpy().tobytes()


def _references(xs: Sequence[Tensor]) -> list[weakref.ref[Tensor]]:
    return [weakref.ref(x) for x in xs if x.device.type == "cpu"]


def _released(sent: Sent) -> list[bytes]:
    """Return the bytes once gloo has released the tensors that were sent, or after `_RELEASE_S` seconds."""
    found, references = sent
    deadline = time.monotonic() + _RELEASE_S
    while any(x() is not None for x in references) and time.monotonic() < deadline:
        time.sleep(0.0001)
    return found
