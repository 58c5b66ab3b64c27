"""Live bytes on a fake GPU (`tests/syncs.py`): which memory a computation holds, to the byte, without a GPU.

Counted is every storage of a tensor on the device from the operator that allocates it until it is freed. Operators of
the library run, so that their buffers count. Of what torch's allocate and free inside, only the backward of flash
attention is known, and counted on request.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from longspan.plan.from_model import shape_from_config
from tests.syncs import tensors_in

NOTHING: dict[str, Any] = {"batch_isend_irecv": lambda _: []}
NOTHING |= dict.fromkeys(
    ("all_to_all_single", "all_reduce", "broadcast", "all_gather_into_tensor"), lambda *_, **__: None
)
"""Collectives of `torch.distributed` that send nothing."""

CONFIG = {
    "hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32,
    "vocab_size": 1024, "num_hidden_layers": 3, "max_position_embeddings": 1 << 20,
}  # fmt: skip
MODEL = shape_from_config({"model_type": "llama", **CONFIG}, "test")
"""A Llama of three layers, and its shape for the planner."""


class LiveBytes(TorchDispatchMode):
    """A context that counts the bytes of device tensors; within `on_gpu()`.

    Args:
        given: tensors that exist already and are not counted.
        inside: whether to count what flash attention's backward allocates and frees inside.

    Attributes:
        now: bytes allocated in this context that are alive.
        peak: the most since the start or `restart`.
        at: the operator that reached the peak.
    """

    supports_higher_order_operators = True

    def __init__(self, given: Iterable[Tensor] = (), *, inside: bool = False) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.at, self.inside = "", inside
        self._seen = {x.untyped_storage()._cdata: 0 for x in given}

    def restart(self) -> None:
        """Forget the peak so far."""
        self.peak = self.now

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = self._run(func, args, kwargs or {})
        for x in tensors_in(out):
            if x.device.type != "cpu":
                self._count(x, func)
        if self.inside and func.overloadpacket is torch.ops.aten._flash_attention_backward:
            self._reach(self.now + flash_backward_bytes(*args[:5]), func)
        return out

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        of_library = isinstance(func, OpOverload) and OPDEFS.get(func.name())
        if not of_library:
            return func(*args, **kwargs)
        with self:  # on fake tensors torch would compute the shape of the result alone
            return of_library._init_fn(*args, **kwargs)

    def _reach(self, live: int, func: Any) -> None:
        if live > self.peak:
            self.peak, self.at = live, str(func)

    def _count(self, x: Tensor, func: Any) -> None:
        storage = x.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._seen:
            return
        self._seen[key] = size
        self.now += size
        self._reach(self.now, func)
        weakref.finalize(storage, self._free, key)

    def _free(self, key: int) -> None:
        self.now -= self._seen.pop(key, 0)

    @contextlib.contextmanager
    def resizes(self) -> Iterator[None]:
        """Also count storages anew that change their size: FSDP frees and allocates gathered weights so."""
        resize = torch.UntypedStorage.resize_

        def counted(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            resize(storage, size)
            key = storage._cdata
            if key in self._seen:
                self.now += size - self._seen[key]
                self._seen[key] = size
                self._reach(self.now, "resize_")
            return storage

        with mock.patch.object(torch.UntypedStorage, "resize_", counted):
            yield


def flash_backward_bytes(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> int:
    """Return what torch's FlashAttention-2 allocates inside its backward (`attention_backward.cu`, `mha_bwd`).

    dQ in fp32; with grouped queries dK and dV of every query head; and copies of an output and a gradient that are not
    contiguous.
    """
    groups = q.shape[-2] // k.shape[-2]
    per_query_head = groups * (k.nbytes + v.nbytes) if groups > 1 else 0
    return 4 * q.numel() + per_query_head + sum(x.nbytes for x in (grad, out) if not x.is_contiguous())
