"""Keys and values in the host's memory: a layer's come to the device when it runs, the next layer's meanwhile.

A layer's tokens lie one after the other in the host's memory (pinned, of a GPU), each with its rows and heads, so that
what comes, and what new tokens write back, is one run of bytes. One side stream does the copies in both directions, in
the order in which they were begun: of layer i what it holds, then its new tokens' way back, then what layer i + 1
holds. So nothing that is on its way back is waited for behind what comes for the next layer, what comes has been
written, and a device never has more than two layers' keys and values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from longspan.cache.codec import PLAIN
from longspan.cache.store import Store
from longspan.core.errors import LongspanError
from longspan.core.system import free_memory
from longspan.memory.offload.host import CudaCopier

if TYPE_CHECKING:
    from longspan.cache.codec import Codec
    from longspan.memory.offload.host import Copier, Copy


class Staged:
    """One layer's keys and values on the device.

    Attributes:
        parts: `[T, B, K, width]`, of the keys, then of the values; room for the new tokens at the end.
    """

    def __init__(self, parts: list[Tensor]) -> None:
        self.parts = parts
        self._moving: list[tuple[Tensor, Copy]] = []

    def copy(self, copier: Copier, host: Tensor, device: Tensor, back: bool) -> Copy | None:
        """Begin a copy to the host (`back`) or from it; `device` is of `parts`. None where there is nothing to copy."""
        if not device.numel():
            return None
        copy = copier.begin(device, host) if back else copier.begin(host, device)
        self._moving.append((device, copy))
        return copy

    def join(self) -> None:
        """What the device computes from now on runs behind what was begun."""
        for tensor, copy in self._moving:
            copy.join(tensor)
        self._moving.clear()

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return sum(x.nbytes for x in self.parts)


class Rooms:
    """What the offloaded layers of one cache share: the side stream, and what is on the device.

    Args:
        copier: the side stream.
        device: where layers run.

    Attributes:
        most: bytes of keys and values that the device had at once.
    """

    def __init__(self, copier: Copier, device: torch.device) -> None:
        self.copier, self.device, self.most = copier, device, 0
        self._order: list[OffloadedStore] = []  # as layers run
        self._staged: dict[int, Staged] = {}  # by place in the order

    @classmethod
    def on(cls, device: torch.device) -> Rooms:
        """Those of a device: a GPU's by a side stream, a CPU's, whose memory is the host's, by plain copies.

        Raises:
            LongspanError: for a device of another kind.
        """
        if device.type not in ("cpu", "cuda"):
            raise LongspanError(f"a cache offload='host' is made for CUDA devices and CPUs, and this is {device.type}")
        return cls(CudaCopier(device) if device.type == "cuda" else PlainCopier(), device)

    def join(self, store: OffloadedStore) -> int:
        """A layer more; its place in the order."""
        self._order.append(store)
        return len(self._order) - 1

    def fetch(self, place: int, tokens: int) -> Staged:
        """A layer's keys and values, with room for so many new tokens; what computes next runs behind the copy."""
        for other in [other for other in self._staged if other != place]:
            self.drop(other)  # another than the next layer ran
        staged = self._staged.get(place)
        if staged is None or staged.parts[0].shape[0] != self._order[place].count + tokens:
            self.drop(place)
            staged = self._begin(place, tokens)
        staged.join()
        return staged

    def expect(self, place: int, tokens: int) -> None:
        """Begin to bring a layer, where there is one that holds anything."""
        if place < len(self._order) and place not in self._staged and self._order[place].rows is not None:
            self._begin(place, tokens)

    def drop(self, place: int) -> None:
        """Let a layer's memory on the device go, once its copies are done."""
        staged = self._staged.pop(place, None)
        if staged is not None:
            staged.join()

    def clear(self) -> None:
        """Let go of all that is on the device."""
        for place in list(self._staged):
            self.drop(place)

    def reset(self) -> None:
        """Forget all layers."""
        self.clear()
        self._order = []

    def _begin(self, place: int, tokens: int) -> Staged:
        store = self._order[place]
        hosts = store.rows_of_bytes(0, store.count)
        parts = [x.new_empty(store.count + tokens, *x.shape[1:], device=self.device) for x in hosts]
        staged = self._staged[place] = Staged(parts)
        for host, part in zip(hosts, parts, strict=True):
            staged.copy(self.copier, host, part[: store.count], back=False)
        self.most = max(self.most, sum(one.nbytes for one in self._staged.values()))
        return staged


class OffloadedStore(Store):
    """A `Store` whose tensors lie in the host's memory.

    Args:
        rooms: of the cache.
        room: as of `Store`.
        codec: as of `Store`; what is written is what travels.
    """

    def __init__(self, rooms: Rooms, room: int = 0, codec: Codec = PLAIN) -> None:
        super().__init__(room, codec)
        self._rooms = rooms
        self._place = rooms.join(self)
        self._written: Copy | None = None  # the last copy into the host's memory
        self._now: Staged | None = None

    def append(self, k_BKTD: Tensor, v_BKTD: Tensor) -> None:
        """As `Store`; brings what is held to the device, and begins to bring the next layer's."""
        new = self.encoded(k_BKTD, v_BKTD)
        tokens, rooms = k_BKTD.shape[2], self._rooms
        self.make_room(new, tokens)
        self._now = staged = rooms.fetch(self._place, tokens)
        hosts = self.rows_of_bytes(self.count, self.count + tokens)
        for host, part, x in zip(hosts, staged.parts, new, strict=True):
            mine = part[self.count :]
            mine.copy_(x.permute(2, 0, 1, 3))
            self._written = staged.copy(rooms.copier, host, mine, back=True) or self._written
        self.count += tokens
        rooms.expect(self._place + 1, tokens)

    def read(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """As `Store`, on the device: between `append` and `release`."""
        assert self._now is not None
        return self.decoded([x.permute(1, 2, 0, 3) for x in self._now.parts], dtype)

    def release(self) -> None:
        """Let the device's memory go."""
        self._now = None
        self._rooms.drop(self._place)

    def fill(self, parts: list[Tensor], start: int) -> None:
        """As `Store`; the parts may lie anywhere."""
        self.release()
        self.count, self.start, self._at = parts[0].shape[2], start, 0
        self._parts = [self._empty(x, max(self.count, self.room)) for x in parts]
        for host, x in zip(self.rows_of_bytes(0, self.count), parts, strict=True):
            host.copy_(x.permute(2, 0, 1, 3))

    def select_rows(self, rows: Tensor) -> None:
        """As `Store`, by the host."""
        held, room = self.held, self._parts[0].shape[2] if self._parts else 0
        for i, x in enumerate(held):
            chosen = x.index_select(0, rows.to(x.device))
            self._parts[i] = self._empty(chosen, room)
            self._parts[i][:, :, : self.count] = chosen
        self._at = 0

    @property
    def held(self) -> list[Tensor]:
        """As `Store`, in the host's memory."""
        self._settle()
        return super().held

    def rows_of_bytes(self, start: int, stop: int) -> list[Tensor]:
        """Tokens in the host's memory, `[T, B, K, width]` without gaps; they may still be on their way there."""
        return [x[:, :, self._at + start : self._at + stop].permute(2, 0, 1, 3) for x in self._parts]

    def _move(self, room: int) -> None:
        self._settle()
        super()._move(room)

    def _settle(self) -> None:
        """The host waits until all is there that was written."""
        if self._written is not None:
            self._written.wait()
            self._written = None

    def _empty(self, x_BKTD: Tensor, room: int) -> Tensor:
        """`[B, K, room, width]` whose tokens lie one after the other."""
        B, K, _, width = x_BKTD.shape
        nbytes = B * K * room * width * x_BKTD.element_size()
        free = free_memory()
        if free is not None and nbytes > free:
            raise LongspanError(_format_memory_full(nbytes, free))
        try:
            memory = self._rooms.copier.memory(nbytes)
        except RuntimeError as error:  # what CUDA gives where it cannot pin
            raise LongspanError(f"{_format_memory_full(nbytes, free)} ({error})") from error
        return memory.view(x_BKTD.dtype).view(room, B, K, width).permute(1, 2, 0, 3)


def _format_memory_full(needed: int, free: int | None) -> str:
    has = "an unknown number of" if free is None else f"{free:,}"
    return (
        f"the KV cache does not fit in the host's memory: {needed:,} bytes more are needed for a layer of this rank, "
        f"and {has} bytes are free for all ranks of this machine; use dtype='int8', or share the sequence among more "
        f"ranks"
    )


class PlainCopier:
    """A CPU's: what is begun is done."""

    def memory(self, nbytes: int) -> Tensor:
        """As any."""
        return torch.empty(nbytes, dtype=torch.uint8)

    def begin(self, source: Tensor, into: Tensor) -> Copy:
        """Copies."""
        into.copy_(source)
        return _Done()


class _Done:
    def done(self) -> bool:
        """Yes."""
        return True

    def seconds(self) -> float:
        """None that a device would count."""
        return 0.0

    def join(self, tensor: Tensor) -> _Done:
        """Nothing is waited for."""
        return self

    def wait(self) -> None:
        """Nothing is waited for."""
