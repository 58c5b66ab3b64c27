"""Keys and values of one layer on one rank: its KV heads, its ring rank's tokens."""

from __future__ import annotations

from torch import Tensor

_ROOM = 64  # tokens that a store has room for at least
_GROWS = 8  # by an eighth, where nobody has said how long it will be


class Store:
    """One layer's keys and values, in the order in which they came.

    They grow in place into room that is made ahead; where it is full, an eighth more is made, for one layer at a time.

    Args:
        room: tokens to have room for from the start, where that is known.

    Attributes:
        count: tokens that are held.
        dropped: tokens before them that are not any more (a sliding window has left them behind).
    """

    def __init__(self, room: int = 0) -> None:
        self.room, self.count, self.dropped = room, 0, 0
        self._keys: Tensor | None = None
        self._values: Tensor | None = None
        self._start = 0

    def append(self, k_BKTD: Tensor, v_BKTD: Tensor) -> None:
        """Take in the next tokens' keys and values, copied."""
        tokens = k_BKTD.shape[2]
        self._make_room(k_BKTD, v_BKTD, tokens)
        assert self._keys is not None and self._values is not None
        at = slice(self._start + self.count, self._start + self.count + tokens)
        self._keys[:, :, at] = k_BKTD
        self._values[:, :, at] = v_BKTD
        self.count += tokens

    def _make_room(self, k: Tensor, v: Tensor, tokens: int) -> None:
        needed = self.count + tokens
        if self._keys is None or self._values is None:
            self._keys, self._values = (_empty(x, max(needed, self.room, _ROOM)) for x in (k, v))
            return
        held = self._keys.shape[2]
        if self._start + needed <= held:
            return
        room = held if needed <= held else max(needed, held + held // _GROWS, self.room)
        self._keys = _moved(self._keys, self._start, self.count, room)
        self._values = _moved(self._values, self._start, self.count, room)
        self._start = 0

    def drop_first(self, tokens: int) -> None:
        """Let go of the first so many tokens."""
        self._start, self.count, self.dropped = self._start + tokens, self.count - tokens, self.dropped + tokens

    def crop(self, count: int) -> None:
        """Keep the first `count` tokens alone."""
        self.count = min(self.count, count)

    @property
    def held(self) -> tuple[Tensor, Tensor]:
        """Keys [B, K, T, D] and values [B, K, T, Dv], views."""
        assert self._keys is not None and self._values is not None
        at = slice(self._start, self._start + self.count)
        return self._keys[:, :, at], self._values[:, :, at]

    @property
    def empty(self) -> bool:
        """Whether nothing has come yet."""
        return self._keys is None

    @property
    def nbytes(self) -> int:
        """Bytes of the tokens that are held."""
        return 0 if self._keys is None else sum(x.nbytes for x in self.held)

    @property
    def allocated(self) -> int:
        """Bytes of the tensors, room included."""
        return 0 if self._keys is None or self._values is None else self._keys.nbytes + self._values.nbytes

    def select_rows(self, rows: Tensor) -> None:
        """Rows of the batch, int64, in the place of those that are there (beam search)."""
        if self._keys is not None and self._values is not None:
            self._keys, self._values = (x.index_select(0, rows.to(x.device)) for x in (self._keys, self._values))


def _empty(x_BKTD: Tensor, room: int) -> Tensor:
    return x_BKTD.new_empty(*x_BKTD.shape[:2], room, x_BKTD.shape[3])


def _moved(x: Tensor, start: int, count: int, room: int) -> Tensor:
    out = _empty(x, room)
    out[:, :, :count] = x[:, :, start : start + count]
    return out
