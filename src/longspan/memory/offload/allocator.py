"""Allocate byte ranges of a file or a buffer, lowest first; free them in any order."""

from __future__ import annotations

import bisect


class Allocator:
    """Tracks which of `size` bytes are used. Freed ranges merge with free neighbours, so a training step needs no more
    bytes than the first one.

    Args:
        align: every range starts at a multiple of `align` bytes and is rounded up to one.
    """

    def __init__(self, align: int) -> None:
        self.align = align
        self.size = self.used = 0
        self._holes: list[tuple[int, int]] = []  # free (start, stop), ascending; no two touch

    def rounded(self, nbytes: int) -> int:
        return -(-nbytes // self.align) * self.align

    def allocate(self, nbytes: int) -> int | None:
        """Return the start of a range of `nbytes`; None if no hole is large enough."""
        nbytes = self.rounded(nbytes)
        for i, (start, stop) in enumerate(self._holes):
            if stop - start >= nbytes:
                self._holes[i : i + 1] = [(start + nbytes, stop)] if start + nbytes < stop else []
                self.used += nbytes
                return start
        return None

    def free(self, start: int, nbytes: int) -> None:
        """Free a range: the result of `allocate` and its argument."""
        nbytes = self.rounded(nbytes)
        self.used -= nbytes
        self._add_hole(start, start + nbytes)

    def size_for(self, nbytes: int) -> int:
        """Return the size that surely has a range of `nbytes` at its end."""
        tail = self._holes[-1][0] if self._holes and self._holes[-1][1] == self.size else self.size
        return max(self.size, tail + self.rounded(nbytes))

    def grow(self, size: int) -> None:
        """Grow to `size` bytes; never shrink."""
        if size > self.size:
            before, self.size = self.size, size
            self._add_hole(before, size)

    def _add_hole(self, start: int, stop: int) -> None:
        i = bisect.bisect(self._holes, (start, stop))
        if i < len(self._holes) and self._holes[i][0] == stop:
            stop = self._holes.pop(i)[1]
        if i and self._holes[i - 1][1] == start:
            i -= 1
            start = self._holes.pop(i)[0]
        self._holes.insert(i, (start, stop))
