"""Blocks of one run from the front and one from the back: all cost the same under a causal mask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from longspan.core.layouts.base import RingLayout, Span

if TYPE_CHECKING:
    from longspan.core.regions import Region


class Zigzag(RingLayout):
    """Of 2R equal runs, block i is the i-th from the front and the i-th from the back.

    Under a causal mask a late token costs more than an early one, and so every block costs the same (Zhu,
    "ring-flash-attention", 2024; Llama 3, arXiv:2407.21783, section 3.3.2).
    """

    name: ClassVar[str] = "zigzag"

    def multiple(self, ring: int) -> int:
        return 2  # the two runs of a block are equal

    def place(self, n: int, ring: int, mask: Sequence[Region] | None = None) -> Sequence[Sequence[Span]]:
        half, last = n // (2 * ring), 2 * ring - 1
        return [((i * half, (i + 1) * half), ((last - i) * half, (last - i + 1) * half)) for i in range(ring)]
