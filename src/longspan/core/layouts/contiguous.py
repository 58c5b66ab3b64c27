"""Blocks in the order of the ranks: shortest ways under a sliding window."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from longspan.core.layouts.base import RingLayout, Span

if TYPE_CHECKING:
    from longspan.core.regions import Region


class Contiguous(RingLayout):
    """Block i is the i-th of R equal runs of tokens."""

    name: ClassVar[str] = "contiguous"

    def place(self, n: int, ring: int, mask: Sequence[Region] | None = None) -> Sequence[Sequence[Span]]:
        size = n // ring
        return [((i * size, (i + 1) * size),) for i in range(ring)]
