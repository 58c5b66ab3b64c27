"""Which ring rank holds which tokens of a sequence that grows: the layout of a KV cache.

The layout of a batch (`Layout`) moves every token when the length changes. In a cache no token moves: a chunk of a
prompt is dealt to the ring by the layout of that chunk (zigzag: as many pairs of a query and a key for each rank,
within the chunk as before it), a few tokens at once in equal runs, and what is generated goes in short runs to
whichever rank holds the fewest tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from longspan.core.layout import Span

if TYPE_CHECKING:
    from longspan.core.layout import Layout

GENERATED_RUN = 64
"""Generated tokens that go to one rank in a row: short, so that ranks stay balanced, and not one by one, so that what a
rank holds stays a few runs."""

FEW = 4
"""New tokens per rank, up to which all ranks compute all of them: cutting them would save less than it costs."""

PREFILL_CHUNK = 8192
"""Tokens per rank of a prompt's chunk, unless the caller says otherwise: what bounds a prefill's memory."""


def is_sharded(layout: Layout, tokens: int) -> bool:
    """Whether so many new tokens are cut over the ranks; else every rank computes all of them."""
    return layout.size > 1 and tokens > FEW * layout.size


class KVPlacement:
    """The tokens of each ring rank, in the order in which it holds them, which is the sequence's.

    Args:
        ring: ranks of the ring.

    Attributes:
        length: tokens of the whole sequence.
        runs: for each rank its runs of tokens [start, stop), ascending.
    """

    def __init__(self, ring: int) -> None:
        self.length = 0
        self.runs: list[list[Span]] = [[] for _ in range(ring)]
        self._owner, self._left = 0, 0

    def count(self, rank: int, start: int = 0) -> int:
        """Tokens that a rank holds, from token `start` on."""
        return sum(b - max(a, start) for a, b in self.runs[rank] if b > start)

    def held(self, rank: int, start: int = 0) -> tuple[Span, ...]:
        """A rank's runs from token `start` on."""
        return tuple((max(a, start), b) for a, b in self.runs[rank] if b > start)

    def add(self, layout: Layout, tokens: int) -> bool:
        """Append the tokens of one forward; whether they are cut."""
        cut = is_sharded(layout, tokens)
        if cut:
            self.deal([layout.block_spans(tokens, rank) for rank in range(layout.ring)], tokens)
        elif tokens > 1:
            self.spread(tokens)
        else:
            self.grow(1)
        return cut

    def deal(self, blocks: Sequence[Sequence[Span]], tokens: int) -> None:
        """Append a chunk of so many tokens.

        Args:
            blocks: for each ring rank its runs, counted from the chunk's start (`Layout.block_spans`).
            tokens: of the chunk.
        """
        for runs, block in zip(self.runs, blocks, strict=True):
            for a, b in block:
                _append(runs, (self.length + a, self.length + b))
        self.length += tokens
        self._left = 0

    def spread(self, tokens: int) -> None:
        """Append so many tokens of one forward, which every rank has computed, in a run for each rank."""
        each = -(-tokens // len(self.runs))
        while tokens:
            self._owner, self._left = self._emptiest(), min(each, tokens)
            tokens -= self._left
            self.grow(self._left)

    def _emptiest(self) -> int:
        counts = [self.count(rank) for rank in range(len(self.runs))]
        return counts.index(min(counts))

    def grow(self, tokens: int) -> None:
        """Append so many tokens, one by one, that every rank has computed, in runs."""
        while tokens:
            if not self._left:
                self._owner, self._left = self._emptiest(), GENERATED_RUN
            taken = min(tokens, self._left)
            _append(self.runs[self._owner], (self.length, self.length + taken))
            self.length, self._left, tokens = self.length + taken, self._left - taken, tokens - taken

    def crop(self, length: int) -> None:
        """Forget the tokens from `length` on."""
        self.runs = [[(a, min(b, length)) for a, b in runs if a < length] for runs in self.runs]
        self.length, self._left = min(self.length, length), 0


@functools.lru_cache(maxsize=4096)
def tokens_per_rank(
    layout: Layout, prompt: int, generated: int = 0, start: int = 0, chunk: int | None = None
) -> tuple[int, ...]:
    """Tokens from `start` on that each ring rank holds of a prompt and what was generated behind it.

    Whole chunks give every rank as many tokens, so of those in the middle one alone is looked at.

    Args:
        layout: of the ranks.
        prompt: tokens of the prompt, which comes in chunks.
        generated: tokens behind it, which came one by one.
        start: the first token that counts.
        chunk: tokens of a chunk; `PREFILL_CHUNK` per rank if None.
    """
    if layout.ring == 1:
        return (max(0, prompt + generated - start),)
    chunk = chunk or PREFILL_CHUNK * layout.size
    before = between = 0  # whole chunks
    if is_sharded(layout, chunk) and layout.local_length(chunk) * layout.size == chunk:
        whole = prompt // chunk
        before = min(start // chunk, whole)
        between = max(0, whole - before - 1)
    places, rest = KVPlacement(layout.ring), prompt - (before + between) * chunk
    while rest:
        places.add(layout, min(chunk, rest))
        rest -= min(chunk, rest)
    places.grow(generated)
    each = between * chunk // layout.ring
    return tuple(places.count(rank, start - before * chunk) + each for rank in range(layout.ring))


def _append(runs: list[Span], run: Span) -> None:
    if run[0] == run[1]:
        return
    if runs and runs[-1][1] == run[0]:
        run = runs.pop()[0], run[1]
    runs.append(run)
