"""Places in a row of bytes, a file's or a buffer's: given out lowest first, and given back in any order."""

from __future__ import annotations

import bisect


class Slots:
    """Which of `size` bytes are taken. What is given back joins its free neighbours, so that putting and dropping the
    same amounts step after step needs no more bytes than the first step.

    Args:
        align: bytes that every place starts at a multiple of and is rounded up to.

    Attributes:
        size: bytes that there are.
        used: of them, bytes that are taken.
    """

    def __init__(self, align: int) -> None:
        self.align = align
        self.size = self.used = 0
        self._free: list[tuple[int, int]] = []  # (start, stop), ascending, never two that touch

    def rounded(self, nbytes: int) -> int:
        """The bytes that `nbytes` take."""
        return -(-nbytes // self.align) * self.align

    def take(self, nbytes: int) -> int | None:
        """The start of a place of `nbytes`; None where there is none as large."""
        nbytes = self.rounded(nbytes)
        for i, (start, stop) in enumerate(self._free):
            if stop - start >= nbytes:
                self._free[i : i + 1] = [(start + nbytes, stop)] if start + nbytes < stop else []
                self.used += nbytes
                return start
        return None

    def give(self, start: int, nbytes: int) -> None:
        """Give a place back, by what `take` returned and was asked for."""
        nbytes = self.rounded(nbytes)
        self.used -= nbytes
        self._insert(start, start + nbytes)

    def size_for(self, nbytes: int) -> int:
        """The size at which a place of `nbytes` is there for certain, at the end."""
        tail = self._free[-1][0] if self._free and self._free[-1][1] == self.size else self.size
        return max(self.size, tail + self.rounded(nbytes))

    def grow(self, size: int) -> None:
        """There are `size` bytes now; no fewer than before."""
        if size > self.size:
            before, self.size = self.size, size
            self._insert(before, size)

    def _insert(self, start: int, stop: int) -> None:
        i = bisect.bisect(self._free, (start, stop))
        if i < len(self._free) and self._free[i][0] == stop:
            stop = self._free.pop(i)[1]
        if i and self._free[i - 1][1] == start:
            i -= 1
            start = self._free.pop(i)[0]
        self._free.insert(i, (start, stop))
