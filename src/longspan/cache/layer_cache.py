"""Keys and values of one layer on one rank: its KV heads and its ring rank's tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from longspan.cache.quantize import QUANTIZED_FORMATS
from longspan.core.errors import LongspanError

if TYPE_CHECKING:
    from torch import Tensor

    from longspan.core.cache import CacheDtype

_SMALLEST = 64  # tokens of capacity
_GROWTH = 8  # grow by an eighth
# Elements of a quantized cache that are decoded at a time: on a CPU they stay in its cache, on a GPU tiles are few.
_TILE, _TILE_ON_CPU = 1 << 26, 1 << 19


class LayerCache:
    """One layer's keys and values, in the order of their tokens.

    They grow in place within a capacity. A full cache grows its capacity by an eighth, one layer at a time. When no
    later token sees the first tokens any more, mostly empty capacity is freed.

    Args:
        room: initial capacity in tokens.
        dtype: "exact" stores keys and values as they are; the others one byte per element, `[B, K, T, D]`, and an fp32
            scale per head and token, `[B, K, T, 1]`, so that appending tokens never rewrites cached ones.

    Attributes:
        rate: tokens of the sequence that each stored one stands for (entries of DeepSeek-V4).
        shared: values are the first `shared` elements of the keys, and not stored; 0: they are stored.
        start: the first token of the sequence that is cached, here or on another rank of the ring; equal on all.
        count: tokens that are stored here.
        heads: query heads and KV heads of the layer over all ranks.
        local_kv_heads: KV heads [start, stop) that are stored here.
    """

    def __init__(self, room: int = 0, dtype: CacheDtype = "exact") -> None:
        self.room, self._format = room, QUANTIZED_FORMATS.get(dtype)
        self.start = self.count = self.shared = 0
        self.rate = 1
        self.heads, self.local_kv_heads = (0, 0), (0, 0)
        self._parts: list[Tensor] = []  # of the keys, then of the values; each [B, K, capacity, width]
        self._at = 0  # index of the first token in them

    def append(self, k_BKTD: Tensor, v_BKTV: Tensor) -> None:
        """Copy the next tokens' keys and values into the cache.

        Raises:
            LongspanError: their dtype, rows, heads or head_dims differ from the cached ones.
        """
        new = self.encoded(k_BKTD, v_BKTV)
        self.reserve(new, k_BKTD.shape[2])
        span = slice(self._at + self.count, self._at + self.count + k_BKTD.shape[2])
        for part, x in zip(self._parts, new, strict=True):
            part[:, :, span] = x
        self.count += k_BKTD.shape[2]

    def encoded(self, k_BKTD: Tensor, v_BKTV: Tensor) -> list[Tensor]:
        """Return the stored form of keys and values: the parts of the keys, then those of the values, if stored."""
        xs = (k_BKTD,) if self.shared else (k_BKTD, v_BKTV)
        if self._format is None:
            return list(xs)
        if k_BKTD.shape == v_BKTV.shape and not self.shared and k_BKTD.shape[2] < _SMALLEST:  # together: fewer launches
            codes, scales = self._format.encode(torch.stack(xs))
            return [codes[0], scales[0], codes[1], scales[1]]
        return [part for x in xs for part in self._format.encode(x)]

    def decoded(self, parts: list[Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return keys and values from their stored form."""
        if self._format is None:
            xs = [x.to(dtype) for x in parts]
        else:
            pairs = zip(parts[::2], parts[1::2], strict=True)
            xs = [self._format.decode(codes, scale, dtype) for codes, scale in pairs]
        return (xs[0], xs[0][..., : self.shared]) if self.shared else (xs[0], xs[1])

    def reserve(self, new: list[Tensor], tokens: int) -> None:
        """Make room for `tokens` more, of parts such as `new`; keep the cached ones."""
        needed = self.count + tokens
        if not self._parts:
            self._parts = [self._empty(x, max(needed, self.room, _SMALLEST)) for x in new]
            return
        for part, x in zip(self._parts, new, strict=True):
            if part.dtype != x.dtype or _shape_of_token(part) != _shape_of_token(x):
                raise LongspanError(
                    f"the cache contains {_describe(part)}, the new tokens have {_describe(x)} ([rows, KV heads, "
                    f"head_dim]); call the model as before, or make a new cache"
                )
        capacity = self._parts[0].shape[2]
        if self._at + needed > capacity:
            fits = needed + needed // _GROWTH <= capacity  # with less, a full window would move at every token
            self._reallocate(capacity if fits else max(needed, capacity + capacity // _GROWTH, self.room))

    def _reallocate(self, capacity: int) -> None:
        """Move the cached tokens to the start of new tensors, one tensor at a time."""
        for i, x in enumerate(self._parts):
            self._parts[i] = self._empty(x, capacity)
            self._parts[i][:, :, : self.count] = x[:, :, self._at : self._at + self.count]
        self._at = 0

    def fill(self, parts: list[Tensor], start: int) -> None:
        """Replace the content by stored parts, of the tokens from `start` on."""
        self.count, self.start, self._at = parts[0].shape[2], start, 0
        self._parts = parts
        if self.room > self.count:
            self._reallocate(self.room)

    def drop_before(self, start: int, count: int) -> None:
        """Drop the tokens before `start`.

        Args:
            start: the first token that later ones see.
            count: tokens of this rank from it on.
        """
        if start <= self.start:
            return
        self._at, self.count, self.start = self._at + self.count - count, count, start
        if self._parts and self._parts[0].shape[2] > max(_SMALLEST, 2 * count):
            self._reallocate(max(_SMALLEST, count + count // _GROWTH))

    def make_room(self, tokens: int) -> None:
        """Make room for `tokens` more, of zeros: a masked NaN would still spoil a sum."""
        if self._at + self.count + tokens > self._parts[0].shape[2]:
            self._reallocate(self.count + tokens)
        for part in self._parts:
            part[:, :, self._at + self.count :] = 0

    @property
    def layout(self) -> tuple[int, int, int]:
        """The first cached token, the index of this rank's first one in the tensors, and the capacity."""
        return self.start, self._at, self._parts[0].shape[2]

    def write(self, at: Tensor, k_BKTD: Tensor, v_BKTV: Tensor) -> None:
        """Write keys and values to the indices `at`, int64 on the device, without counting them."""
        for part, x in zip(self._parts, self.encoded(k_BKTD, v_BKTV), strict=True):
            part.index_copy_(2, at, x)

    def read_capacity(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """As `read`, of the whole capacity."""
        return self.decoded(self._parts, dtype)

    def crop(self, count: int) -> None:
        """Keep the first `count` tokens only."""
        self.count = min(self.count, count)

    def read(self, dtype: torch.dtype, start: int = 0, stop: int | None = None) -> tuple[Tensor, Tensor]:
        """Return keys `[B, K, T, D]` and values `[B, K, T, V]` of the stored tokens [start, stop), by default all, in
        `dtype`; views if they are stored so.
        """
        stop = self.count if stop is None else min(stop, self.count)
        return self.decoded([x[:, :, self._at + start : self._at + stop] for x in self._parts], dtype)

    def tile(self, elements: int, queries: int, device: torch.device) -> int | None:
        """Return how many tokens to read at a time; None for all, as they are stored as they are read.

        Args:
            elements: of one token.
            queries: some times as many tokens are not large next to them, and merging their outputs costs little.
            device: of the tokens.
        """
        if self._format is None:
            return None
        return max(1, 4 * queries, (_TILE_ON_CPU if device.type == "cpu" else _TILE) // max(1, elements))

    @property
    def parts(self) -> list[Tensor]:
        """Views of what is stored: the parts of the keys, then those of the values."""
        return [x[:, :, self._at : self._at + self.count] for x in self._parts]

    @property
    def rows(self) -> int | None:
        """Rows of the batch; None before the first tokens."""
        return self._parts[0].shape[0] if self._parts else None

    @property
    def nbytes(self) -> int:
        """Bytes of the cached tokens."""
        return sum(x[:, :, : self.count].nbytes for x in self._parts)

    @property
    def allocated(self) -> int:
        """Bytes of the capacity."""
        return sum(x.nbytes for x in self._parts)

    def select_rows(self, rows: Tensor) -> None:
        """Replace the rows of the batch by those of the indices `rows`, int64 (beam search)."""
        for i, x in enumerate(self._parts):
            self._parts[i] = x.index_select(0, rows.to(x.device))

    def release(self) -> None:
        """Called when the layer has attended, so that an offloaded cache can free its copy on the device."""

    def _empty(self, x_BKTD: Tensor, capacity: int) -> Tensor:
        return x_BKTD.new_empty(*x_BKTD.shape[:2], capacity, x_BKTD.shape[3])


def _shape_of_token(x_BKTD: Tensor) -> list[int]:
    return [*x_BKTD.shape[:2], x_BKTD.shape[3]]


def _describe(x_BKTD: Tensor) -> str:
    return f"{str(x_BKTD.dtype).removeprefix('torch.')} {_shape_of_token(x_BKTD)}"
