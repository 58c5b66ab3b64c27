"""What a layout says, and the registry of all that are known by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from longspan.core.errors import LongspanError

if TYPE_CHECKING:
    from longspan.core.regions import Region

Span = tuple[int, int]
"""A run of tokens [start, stop)."""


class RingLayout(ABC):
    """How the blocks of a ring lie in the sequence."""

    name: ClassVar[str]
    """As users spell it: `SequenceSharding(mesh, layout=name)`, `--layout name`."""

    sees_mask: ClassVar[bool] = False
    """Whether `place` looks at the mask. If not, it is never given one."""

    def multiple(self, ring: int) -> int:
        """What the tokens of a block must be a multiple of; the sequence is padded until they are."""
        return 1

    @abstractmethod
    def place(self, n: int, ring: int, mask: Sequence[Region] | None = None) -> Sequence[Sequence[Span]]:
        """The tokens of every block.

        Args:
            n: tokens of the sequence, padding included: `ring` blocks of equal length, a multiple of `multiple(ring)`.
            ring: blocks, at least 2.
            mask: which queries attend to which keys, for a layout that balances their pairs (`sees_mask`); None where
                nobody has said: take it for causal.

        Returns:
            For each block its runs of tokens [start, stop), in ascending order. All blocks together hold each token
            once.
        """


LAYOUTS: dict[str, RingLayout] = {}
"""By name."""


def register_layout(placement: RingLayout) -> None:
    """Make a layout known by its name; on every rank alike, before a `SequenceSharding` is made.

    Raises:
        LongspanError: if the name is taken.
    """
    if placement.name == "auto" or placement.name in LAYOUTS:
        raise LongspanError(f"there is a layout {placement.name!r} already; give this one a name of its own")
    LAYOUTS[placement.name] = placement
