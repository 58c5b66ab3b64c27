"""Keys and values of one layer on one rank: its KV heads, its ring rank's tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from longspan.cache.codec import PLAIN
from longspan.core.errors import LongspanError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from longspan.cache.codec import Codec

_ROOM = 64  # tokens that a store has room for at least
_GROWS = 8  # by an eighth, where nobody has said how long it will be


class Store:
    """One layer's keys and values, in the order in which they came.

    They grow in place into room that is made ahead; where it is full, an eighth more is made, for one layer at a time.
    Room that is mostly empty, because no later token sees what was there, is given back.

    Args:
        room: tokens to have room for from the start, where that is known.
        codec: how keys and values are written.

    Attributes:
        shared: the values are the first so many elements of the keys, and not held beside them; 0: they are.
        start: the first token of the sequence that is held, here or on another rank of the ring: alike on all.
        count: tokens that are held here.
        heads: query heads and KV heads of the layer, on all ranks together.
        mine: KV heads [start, stop) that are held here.
    """

    def __init__(self, room: int = 0, codec: Codec = PLAIN) -> None:
        self.room, self.codec = room, codec
        self.start = self.count = self.shared = 0
        self.heads, self.mine = (0, 0), (0, 0)
        self._parts: list[Tensor] = []  # of the keys, then of the values; each [B, K, room, width]
        self._at = 0  # where the first token lies in them

    def append(self, k_BKTD: Tensor, v_BKTD: Tensor) -> None:
        """Take in the next tokens' keys and values, copied.

        Raises:
            LongspanError: for another dtype, number of rows, heads or head_dims than those that are held.
        """
        new = self.encoded(k_BKTD, v_BKTD)
        self.make_room(new, k_BKTD.shape[2])
        at = slice(self._at + self.count, self._at + self.count + k_BKTD.shape[2])
        for part, x in zip(self._parts, new, strict=True):
            part[:, :, at] = x
        self.count += k_BKTD.shape[2]

    def encoded(self, k_BKTD: Tensor, v_BKTD: Tensor) -> list[Tensor]:
        """What is held of keys and values: the parts of the keys, then those of the values, where there are any."""
        return [*self.codec.encode(k_BKTD), *(() if self.shared else self.codec.encode(v_BKTD))]

    def decoded(self, parts: list[Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values of such parts."""
        if self.shared:
            keys = self.codec.decode(parts, dtype)
            return keys, keys[..., : self.shared]
        half = len(parts) // 2
        return self.codec.decode(parts[:half], dtype), self.codec.decode(parts[half:], dtype)

    def make_room(self, new: list[Tensor], tokens: int) -> None:
        """Room for so many tokens more, of parts such as the new ones; what is held stays."""
        needed = self.count + tokens
        if not self._parts:
            self._parts = [self._empty(x, max(needed, self.room, _ROOM)) for x in new]
            return
        for part, x in zip(self._parts, new, strict=True):
            if part.dtype != x.dtype or _without_tokens(part) != _without_tokens(x):
                raise LongspanError(
                    f"the cache holds {_format_value(part)}, the new tokens have {_format_value(x)} ([rows, KV heads, "
                    "head_dim]); call the model as before, or make a new cache"
                )
        held = self._parts[0].shape[2]
        if self._at + needed > held:
            self._move(held if needed <= held else max(needed, held + held // _GROWS, self.room))

    def _move(self, room: int) -> None:
        """Into tensors of so much room, one after the other."""
        for i, x in enumerate(self._parts):
            self._parts[i] = self._empty(x, room)
            self._parts[i][:, :, : self.count] = x[:, :, self._at : self._at + self.count]
        self._at = 0

    def fill(self, parts: list[Tensor], start: int) -> None:
        """Hold what was written elsewhere: the parts of the keys, then those of the values, from token `start` on."""
        self.count, self.start, self._at = parts[0].shape[2], start, 0
        self._parts = parts
        if self.room > self.count:
            self._move(self.room)

    def keep_from(self, start: int, count: int) -> None:
        """Let go of the tokens before `start`.

        Args:
            start: the first token that later ones see.
            count: tokens of this rank from it on.
        """
        if start <= self.start:
            return
        self._at, self.count, self.start = self._at + self.count - count, count, start
        if self._parts and self._parts[0].shape[2] > max(_ROOM, 2 * count):
            self._move(max(_ROOM, count + count // _GROWS))

    def crop(self, count: int) -> None:
        """Keep the first `count` tokens alone."""
        self.count = min(self.count, count)

    def read(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys [B, K, T, D] and values [B, K, T, Dv] in `dtype`: views where they are held as they are."""
        return self.decoded(self.held, dtype)

    @property
    def held(self) -> list[Tensor]:
        """What is held, as it is written: the parts of the keys, then those of the values; views."""
        return [x[:, :, self._at : self._at + self.count] for x in self._parts]

    @property
    def rows(self) -> int | None:
        """Rows of the batch; None where nothing has come yet."""
        return self._parts[0].shape[0] if self._parts else None

    @property
    def nbytes(self) -> int:
        """Bytes of the tokens that are held."""
        return sum(x[:, :, : self.count].nbytes for x in self._parts)

    @property
    def allocated(self) -> int:
        """Bytes of the tensors, room included."""
        return sum(x.nbytes for x in self._parts)

    def select_rows(self, rows: Tensor) -> None:
        """Rows of the batch, int64, in the place of those that are there (beam search)."""
        for i, x in enumerate(self._parts):
            self._parts[i] = x.index_select(0, rows.to(x.device))

    def release(self) -> None:
        """The layer has attended: what was brought for it may go. Nothing was."""

    def _empty(self, x_BKTD: Tensor, room: int) -> Tensor:
        return x_BKTD.new_empty(*x_BKTD.shape[:2], room, x_BKTD.shape[3])


def _without_tokens(x_BKTD: Tensor) -> list[int]:
    return [*x_BKTD.shape[:2], x_BKTD.shape[3]]


def _format_value(x_BKTD: Tensor) -> str:
    return f"{str(x_BKTD.dtype).removeprefix('torch.')} {_without_tokens(x_BKTD)}"
