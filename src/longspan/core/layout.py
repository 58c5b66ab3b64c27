"""Which rank holds which tokens, and which heads. Standard library only: the planner uses it without torch.

Three facts decide every exchange: the tokens a rank holds between the attentions (`Layout`), how far they travel round
a ring (`Routes`), and the heads it computes inside an attention (`split_heads`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from longspan.core.errors import LongspanError

if TYPE_CHECKING:
    pass

Span = tuple[int, int]
"""A run of tokens [start, stop)."""


Kind = Literal["contiguous", "zigzag"]


@dataclass(frozen=True)
class Layout:
    """One sequence cut over ring x ulysses ranks, in blocks and then in parts.

    The ring holds one block of the sequence per ring rank; the Ulysses ranks of a block hold it in equal parts, in
    order, so that their exchange restores the block.

    - `contiguous`: block i is the i-th of R equal runs of tokens.
    - `zigzag`: of 2R equal runs, block i is the i-th from the front and the i-th from the back. Under a causal mask a
      late token costs more than an early one, and so every block costs the same (Zhu, "ring-flash-attention", 2024;
      Llama 3, arXiv:2407.21783, section 3.3.2).

    Every rank holds the same number of tokens; what is missing is padding, at the end of the sequence. Equal parts keep
    every collective regular, and padding at the end is the one place where a causal mask already hides it.

    Attributes:
        ring: number of blocks.
        ulysses: parts of a block.
        kind: how blocks lie in the sequence.
    """

    ring: int = 1
    ulysses: int = 1
    kind: Kind = "contiguous"

    @property
    def size(self) -> int:
        """Ranks that share the sequence."""
        return self.ring * self.ulysses

    def local_length(self, n: int) -> int:
        """Tokens per rank for a sequence of `n` tokens, padding included."""
        if n < 1:
            raise LongspanError(f"a sequence needs at least 1 token, this one has {n}")
        local = -(-n // self.size)
        # Zigzag's two runs of a block are equal, so a block needs an even number of tokens.
        odd = self.kind == "zigzag" and self.ring > 1 and local * self.ulysses % 2
        return local + odd

    def padded_length(self, n: int) -> int:
        """Tokens of all ranks together, padding included."""
        return self.local_length(n) * self.size

    def block(self, n: int, ring_rank: int) -> tuple[Span, ...]:
        """The runs of tokens [start, stop) of one block, in order; they reach into the padding."""
        size = self.local_length(n) * self.ulysses
        if self.kind == "contiguous" or self.ring == 1:
            return ((ring_rank * size, (ring_rank + 1) * size),)
        half, mirrored = size // 2, 2 * self.ring - 1 - ring_rank
        front, back = (ring_rank * half, (ring_rank + 1) * half), (mirrored * half, (mirrored + 1) * half)
        return ((front[0], back[1]),) if front[1] == back[0] else (front, back)

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
        clipped = ((start, min(stop, n)) for start, stop in self.padded_spans(n, rank))
        return tuple((start, stop) for start, stop in clipped if start < stop)


def _cut_runs(runs: tuple[Span, ...], start: int, stop: int) -> tuple[Span, ...]:
    """Items start to stop of the runs laid end to end, as runs."""
    out, at = [], 0
    for a, b in runs:
        first, last = max(start, at), min(stop, at + b - a)
        if first < last:
            out.append((a + first - at, a + last - at))
        at += b - a
    return tuple(out)
