"""Ring layouts: which tokens of the sequence each block of a ring holds, and the registry of their names."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from longspan.core.errors import LongspanError

Span = tuple[int, int]
"""A run of tokens [start, stop)."""


class RingLayout(ABC):
    """How the blocks of a ring are cut from the sequence."""

    name: ClassVar[str]
    """For `SequenceSharding(mesh, layout=name)` and `--layout name`."""

    def multiple(self, ring: int) -> int:
        """Return the number that must divide a block's tokens; the sequence is padded to fit."""
        return 1

    @abstractmethod
    def blocks(self, n: int, ring: int) -> Sequence[Sequence[Span]]:
        """Return the tokens of each block as ascending spans [start, stop); together they hold each token once.

        Args:
            n: tokens of the sequence, padding included: `ring` equal blocks, each a multiple of `multiple(ring)`.
            ring: number of blocks, at least 2.
        """


class Contiguous(RingLayout):
    """Block i is the i-th of R equal spans: the shortest routes under a sliding window."""

    name: ClassVar[str] = "contiguous"

    def blocks(self, n: int, ring: int) -> Sequence[Sequence[Span]]:
        size = n // ring
        return [((i * size, (i + 1) * size),) for i in range(ring)]


class Zigzag(RingLayout):
    """Of 2R equal spans, block i is the i-th from the front and the i-th from the back.

    Under a causal mask a late token costs more than an early one, so every block costs the same (Zhu,
    "ring-flash-attention", 2024; Llama 3, arXiv:2407.21783, section 3.3.2).
    """

    name: ClassVar[str] = "zigzag"

    def multiple(self, ring: int) -> int:
        return 2  # a block's two spans are equal

    def blocks(self, n: int, ring: int) -> Sequence[Sequence[Span]]:
        half, last = n // (2 * ring), 2 * ring - 1
        return [((i * half, (i + 1) * half), ((last - i) * half, (last - i + 1) * half)) for i in range(ring)]


LAYOUTS: dict[str, RingLayout] = {}
"""The registry, by name."""


def register_layout(layout: RingLayout) -> None:
    """Register a layout, on every rank and before a `SequenceSharding` is made.

    Raises:
        LongspanError: if the name is taken.
    """
    if layout.name == "auto" or layout.name in LAYOUTS:
        raise LongspanError(f"there is a layout {layout.name!r} already; give this one another name")
    LAYOUTS[layout.name] = layout


register_layout(Contiguous())
register_layout(Zigzag())
