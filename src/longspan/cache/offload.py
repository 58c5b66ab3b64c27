"""A KV cache in host memory: copy a layer's keys and values to the device when it runs, and the next layer's meanwhile.

A layer's tokens are contiguous in host memory (pinned, for a GPU), each with its rows and heads, so that a layer, and
the new tokens written back, are one run of bytes each. One side stream does the copies of both directions in this
order: layer i to the device, its new tokens to the host, layer i + 1 to the device. So the host copy is complete before
it is read, no write back waits behind the next layer, and the device holds at most two layers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from longspan.cache.layer_cache import LayerCache
from longspan.core.errors import LongspanError
from longspan.core.tile_sizes import free_memory
from longspan.memory.offload.host import CudaCopier

if TYPE_CHECKING:
    from longspan.core.cache import CacheDtype
    from longspan.memory.offload.host import Copier, Copy


class _StagedLayer:
    """One layer's keys and values on the device.

    Attributes:
        parts: `[T, B, K, width]`, of the keys, then of the values, with room for the new tokens at the end.
    """

    def __init__(self, parts: list[Tensor]) -> None:
        self.parts = parts
        self._copies: list[tuple[Tensor, Copy]] = []

    def copy(self, copier: Copier, host: Tensor, device: Tensor, to_host: bool) -> Copy | None:
        """Start a copy between `host` and `device`, a view of `parts`; None if it is empty."""
        if not device.numel():
            return None
        copy = copier.begin(device, host) if to_host else copier.begin(host, device)
        self._copies.append((device, copy))
        return copy

    def join(self) -> None:
        """Make later work of the device run after the copies."""
        for tensor, copy in self._copies:
            copy.join(tensor)
        self._copies.clear()

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self.parts)


class Staging:
    """Copies offloaded layers of one cache to the device, in the order in which they run.

    Args:
        copier: the side stream.
        device: where layers run.

    Attributes:
        peak_bytes: the most bytes of keys and values that were on the device at once.
    """

    def __init__(self, copier: Copier, device: torch.device) -> None:
        self.copier, self.device, self.peak_bytes = copier, device, 0
        self._layers: list[OffloadedLayerCache] = []  # in the order in which they run
        self._staged: dict[int, _StagedLayer] = {}  # by index in `_layers`

    @classmethod
    def on(cls, device: torch.device) -> Staging | None:
        """Return a staging for a GPU; None for a CPU, whose memory is the host's.

        Raises:
            LongspanError: the device is neither.
        """
        if device.type not in ("cpu", "cuda"):
            raise LongspanError(f"a cache with offload='host' supports CUDA devices and CPUs; this is {device.type}")
        return cls(CudaCopier(device), device) if device.type == "cuda" else None

    def register(self, layer: OffloadedLayerCache) -> int:
        """Add the next layer, and return its index."""
        self._layers.append(layer)
        return len(self._layers) - 1

    def fetch(self, index: int, tokens: int) -> _StagedLayer:
        """Return a layer on the device, with room for `tokens` new ones; later work runs after the copy."""
        for other in [other for other in self._staged if other != index]:
            self.drop(other)  # another layer than the next one runs
        staged = self._staged.get(index)
        if staged is None or staged.parts[0].shape[0] != self._layers[index].count + tokens:
            self.drop(index)
            staged = self._start(index, tokens)
        staged.join()
        return staged

    def prefetch(self, index: int, tokens: int) -> None:
        """Start to copy a layer, if it exists and is not empty."""
        if index < len(self._layers) and index not in self._staged and self._layers[index].rows is not None:
            self._start(index, tokens)

    def drop(self, index: int) -> None:
        """Free a layer's memory on the device after its copies."""
        staged = self._staged.pop(index, None)
        if staged is not None:
            staged.join()

    def clear(self) -> None:
        """Free all memory on the device."""
        for index in list(self._staged):
            self.drop(index)

    def reset(self) -> None:
        """Forget all layers."""
        self.clear()
        self._layers = []

    def _start(self, index: int, tokens: int) -> _StagedLayer:
        layer = self._layers[index]
        hosts = layer.host_views(0, layer.count)
        parts = [x.new_empty(layer.count + tokens, *x.shape[1:], device=self.device) for x in hosts]
        staged = self._staged[index] = _StagedLayer(parts)
        for host, part in zip(hosts, parts, strict=True):
            staged.copy(self.copier, host, part[: layer.count], to_host=False)
        self.peak_bytes = max(self.peak_bytes, sum(one.nbytes for one in self._staged.values()))
        return staged


class OffloadedLayerCache(LayerCache):
    """A `LayerCache` in host memory; what is copied between host and device has its `dtype`, too."""

    def __init__(self, staging: Staging, room: int = 0, dtype: CacheDtype = "exact") -> None:
        super().__init__(room, dtype)
        self._staging = staging
        self._index = staging.register(self)
        self._last_write: Copy | None = None
        self._current: _StagedLayer | None = None

    def append(self, k_BKTD: Tensor, v_BKTV: Tensor) -> None:
        """As `LayerCache.append`; also copy the layer to the device, and start to copy the next one."""
        new = self.encoded(k_BKTD, v_BKTV)
        tokens, staging = k_BKTD.shape[2], self._staging
        self.reserve(new, tokens)
        self._current = staged = staging.fetch(self._index, tokens)
        hosts = self.host_views(self.count, self.count + tokens)
        for host, part, x in zip(hosts, staged.parts, new, strict=True):
            on_device = part[self.count :]
            on_device.copy_(x.permute(2, 0, 1, 3))
            self._last_write = staged.copy(staging.copier, host, on_device, to_host=True) or self._last_write
        self.count += tokens
        staging.prefetch(self._index + 1, tokens)

    def read(self, dtype: torch.dtype, start: int = 0, stop: int | None = None) -> tuple[Tensor, Tensor]:
        """As `LayerCache.read`, on the device; valid between `append` and `release`."""
        assert self._current is not None
        return self.decoded([x[start:stop].permute(1, 2, 0, 3) for x in self._current.parts], dtype)

    def release(self) -> None:
        """Free the copy on the device."""
        self._current = None
        self._staging.drop(self._index)

    def fill(self, parts: list[Tensor], start: int) -> None:
        """As `LayerCache.fill`; the parts may be on any device."""
        self.release()
        self.count, self.start, self._at = parts[0].shape[2], start, 0
        self._parts = [self._empty(x, max(self.count, self.room)) for x in parts]
        for host, x in zip(self.host_views(0, self.count), parts, strict=True):
            host.copy_(x.permute(2, 0, 1, 3))

    def select_rows(self, rows: Tensor) -> None:
        """As `LayerCache.select_rows`, on the host."""
        stored, capacity = self.parts, self._parts[0].shape[2] if self._parts else 0
        for i, x in enumerate(stored):
            chosen = x.index_select(0, rows.to(x.device))
            self._parts[i] = self._empty(chosen, capacity)
            self._parts[i][:, :, : self.count] = chosen
        self._at = 0

    @property
    def parts(self) -> list[Tensor]:
        """As `LayerCache.parts`, in host memory."""
        self._wait()
        return super().parts

    def host_views(self, start: int, stop: int) -> list[Tensor]:
        """Return tokens in host memory, contiguous `[T, B, K, width]`; their copies may still be in flight."""
        return [x[:, :, self._at + start : self._at + stop].permute(2, 0, 1, 3) for x in self._parts]

    def _reallocate(self, capacity: int) -> None:
        self._wait()
        super()._reallocate(capacity)

    def _wait(self) -> None:
        """Block the host until all new tokens are in its memory."""
        if self._last_write is not None:
            self._last_write.wait()
            self._last_write = None

    def _empty(self, x_BKTD: Tensor, capacity: int) -> Tensor:
        """Allocate `[B, K, capacity, width]` with contiguous tokens."""
        B, K, _, width = x_BKTD.shape
        nbytes = B * K * capacity * width * x_BKTD.element_size()
        free = free_memory()
        if free is not None and nbytes > free:
            raise LongspanError(_out_of_memory(nbytes, free))
        try:
            memory = self._staging.copier.memory(nbytes)
        except RuntimeError as error:  # CUDA cannot pin it
            raise LongspanError(f"{_out_of_memory(nbytes, free)} ({error})") from error
        return memory.view(x_BKTD.dtype).view(capacity, B, K, width).permute(1, 2, 0, 3)


def _out_of_memory(needed: int, free: int | None) -> str:
    available = "an unknown number of" if free is None else f"{free:,}"
    return (
        f"the KV cache does not fit in host memory: a layer of this rank needs {needed:,} bytes more, and {available} "
        f"bytes are free for all ranks of this machine; use dtype='int8', or shard the sequence over more ranks"
    )
