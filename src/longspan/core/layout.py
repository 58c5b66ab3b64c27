"""Which rank of a sequence group holds which tokens. Standard library only: the planner uses it without torch."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from longspan.core.errors import LongspanError
from longspan.core.layouts import LAYOUTS, RingLayout, Span

if TYPE_CHECKING:
    from longspan.core.regions import Region

    LayoutName = str
else:  # the choices of the command line are those of the registry
    LayoutName = Literal[("auto", *LAYOUTS)]

__all__ = ["Layout", "LayoutName", "Span", "choose_layout", "layout_names"]


def layout_names() -> tuple[str, ...]:
    """What can be asked for: "auto" and every layout that is registered."""
    return ("auto", *LAYOUTS)


@dataclass(frozen=True)
class Layout:
    """One sequence cut over ring x ulysses ranks, in blocks and then in parts.

    The ring holds one block of the sequence per ring rank; the Ulysses ranks of a block hold it in equal parts, in
    order, so that their exchange restores the block. How blocks lie in the sequence is the `RingLayout` named by `kind`
    (`longspan.core.layouts`).

    Every rank holds the same number of tokens; what is missing is padding, at the end of the sequence. Equal parts keep
    every collective regular, and padding at the end is the one place where a causal mask already hides it.

    Attributes:
        ring: number of blocks.
        ulysses: parts of a block.
        kind: the name of a placement.
        mask: what a placement that looks at the mask balances; see `under`.
    """

    ring: int = 1
    ulysses: int = 1
    kind: str = "contiguous"
    mask: tuple[Region, ...] | None = None

    @property
    def size(self) -> int:
        """Ranks that share the sequence."""
        return self.ring * self.ulysses

    @property
    def placement(self) -> RingLayout:
        """How blocks lie in the sequence.

        Raises:
            LongspanError: if `kind` is not registered.
        """
        if self.kind not in LAYOUTS:
            raise LongspanError(f"layout {self.kind!r} is not registered; there are {', '.join(LAYOUTS)}")
        return LAYOUTS[self.kind]

    def under(self, mask: Sequence[Region]) -> Layout:
        """The layout of a sequence with this mask: another one only where the placement looks at masks."""
        return dataclasses.replace(self, mask=tuple(mask)) if self.placement.sees_mask else self

    def local_length(self, n: int) -> int:
        """Tokens per rank for a sequence of `n` tokens, padding included."""
        if n < 1:
            raise LongspanError(f"a sequence needs at least 1 token, this one has {n}")
        local = -(-n // self.size)
        if self.ring == 1:
            return local
        multiple = self.placement.multiple(self.ring)
        step = multiple // math.gcd(multiple, self.ulysses)  # so that `ulysses` such parts are a multiple
        return -(-local // step) * step

    def block(self, n: int, ring_rank: int) -> tuple[Span, ...]:
        """The runs of tokens [start, stop) of one block, in order; they reach into the padding."""
        return _blocks(self.kind, self.local_length(n) * self.size, self.ring, self.mask)[ring_rank]

    def runs(self, n: int) -> tuple[tuple[Span, ...], tuple[int, ...]]:
        """The runs of tokens of all blocks in the sequence's order, and whose block each belongs to."""
        held = sorted((run, rank) for rank in range(self.ring) for run in self.block(n, rank))
        return tuple(run for run, _ in held), tuple(rank for _, rank in held)

    def padded_spans(self, n: int, rank: int) -> tuple[Span, ...]:
        """The runs of tokens [start, stop) of `rank`, in the order in which it holds them; they reach into the
        padding.
        """
        ring_rank, part = divmod(rank, self.ulysses)
        local = self.local_length(n)
        return _cut_runs(self.block(n, ring_rank), part * local, (part + 1) * local)

    def spans(self, n: int, rank: int) -> tuple[Span, ...]:
        """The real tokens [start, stop) of `rank`, out of `n`; runs of padding alone are left out."""
        return _real(self.padded_spans(n, rank), n)

    def locate_token(self, n: int, token: int) -> tuple[int, int]:
        """The rank that holds a token of `n`, and where among its own the token lies."""
        for rank in range(self.size):
            before = 0
            for start, stop in self.padded_spans(n, rank):
                if start <= token < stop:
                    return rank, before + token - start
                before += stop - start
        raise LongspanError(f"there is no token {token} in a sequence of {n}")

    def block_spans(self, n: int, ring_rank: int) -> tuple[Span, ...]:
        """The real tokens [start, stop) of one block."""
        return _real(self.block(n, ring_rank), n)


def choose_layout(asked: str, ring: int, ulysses: int) -> Layout:
    """The layout that a name stands for on a mesh.

    "auto" is zigzag where there is a ring. Without one a Ulysses exchange restores the order of the tokens, so no other
    cut balances better than contiguous parts, whatever is asked for.
    """
    balanced = "zigzag" if asked == "auto" else asked
    return Layout(ring, ulysses, balanced if ring > 1 else "contiguous")


@functools.lru_cache(maxsize=64)
def _blocks(kind: str, n: int, ring: int, mask: tuple[Region, ...] | None) -> tuple[tuple[Span, ...], ...]:
    """Every block of `n` tokens (padding included), its adjacent runs joined, checked."""
    if ring == 1:
        return (((0, n),),)
    placement = Layout(ring, 1, kind).placement
    placed = placement.place(n, ring, mask) if placement.sees_mask else placement.place(n, ring)
    blocks = tuple(_joined(runs) for runs in placed)
    in_order = sorted(run for runs in blocks for run in runs)
    ends = [(0, 0), *in_order, (n, n)]
    sizes = {sum(stop - start for start, stop in runs) for runs in blocks}
    if (
        len(blocks) != ring
        or sizes != {n // ring}
        or any(a[1] != b[0] for a, b in itertools.pairwise(ends))
        or any(list(runs) != sorted(runs) for runs in blocks)
    ):
        raise LongspanError(
            f"layout {kind!r} must place each of {n} tokens once, in {ring} ascending blocks of {n // ring}; it gives "
            f"{len(blocks)} blocks of {sorted(sizes)} tokens; correct {type(placement).__name__}.place"
        )
    return blocks


def _joined(runs: Sequence[Span]) -> tuple[Span, ...]:
    joined: list[Span] = []
    for start, stop in runs:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return tuple(joined)


def _real(runs: Sequence[Span], n: int) -> tuple[Span, ...]:
    return tuple((start, min(stop, n)) for start, stop in runs if start < n)


def _cut_runs(runs: tuple[Span, ...], start: int, stop: int) -> tuple[Span, ...]:
    """Items start to stop of the runs laid end to end, as runs."""
    out, at = [], 0
    for a, b in runs:
        first, last = max(start, at), min(stop, at + b - a)
        if first < last:
            out.append((a + first - at, a + last - at))
        at += b - a
    return tuple(out)
