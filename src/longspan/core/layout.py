"""Which rank of a sequence group holds which tokens. Standard library only: the planner uses it without torch."""

from __future__ import annotations

import functools
import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from longspan.core.errors import LongspanError

Span = tuple[int, int]
"""A run of tokens [start, stop)."""

Lengths = tuple[int, int]
"""Numbers of real queries and real keys of the whole sequence."""


class RingLayout(ABC):
    """Which tokens of the sequence each block of a ring holds; registered by its name."""

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

if TYPE_CHECKING:
    LayoutName = str
else:  # the command line's choices are those of the registry
    LayoutName = Literal[("auto", *LAYOUTS)]


@dataclass(frozen=True)
class Layout:
    """One sequence cut over ring x ulysses ranks: first into ring blocks, then each block into equal parts.

    The Ulysses ranks of a block hold its parts in order, so that their all-to-all restores the block. Every rank holds
    the same number of tokens; padding is at the end of the sequence, where a causal mask already hides it. `kind` names
    the registered `RingLayout` of the blocks.
    """

    ring: int = 1
    ulysses: int = 1
    kind: str = "contiguous"

    @property
    def size(self) -> int:
        return self.ring * self.ulysses

    def local_length(self, n: int) -> int:
        """Return the tokens per rank, padding included, of a sequence of `n` tokens."""
        if n < 1:
            raise LongspanError(f"a sequence needs at least 1 token, this one has {n}")
        local = -(-n // self.size)
        if self.ring == 1:
            return local
        multiple = LAYOUTS[self.kind].multiple(self.ring)
        step = multiple // math.gcd(multiple, self.ulysses)  # so that `ulysses` parts are a multiple
        return -(-local // step) * step

    def block(self, n: int, ring_rank: int) -> tuple[Span, ...]:
        """Return the spans of one block, in order, padding included."""
        return _blocks(self.kind, self.local_length(n) * self.size, self.ring)[ring_rank]

    def runs(self, n: int) -> tuple[tuple[Span, ...], tuple[int, ...]]:
        """Return the spans of all blocks in the sequence's order, and the ring rank of each."""
        held = sorted((span, rank) for rank in range(self.ring) for span in self.block(n, rank))
        return tuple(span for span, _ in held), tuple(rank for _, rank in held)

    def padded_spans(self, n: int, rank: int) -> tuple[Span, ...]:
        """Return the spans of `rank`, in the order of its local tensor, padding included."""
        ring_rank, part = divmod(rank, self.ulysses)
        local = self.local_length(n)
        return _slice_spans(self.block(n, ring_rank), part * local, (part + 1) * local)

    def spans(self, n: int, rank: int) -> tuple[Span, ...]:
        """Return the real tokens of `rank`, out of `n`."""
        return _without_padding(self.padded_spans(n, rank), n)

    def locate_token(self, n: int, token: int) -> tuple[int, int]:
        """Return the rank that holds a token of `n`, and the token's index in that rank's local tensor."""
        for rank in range(self.size):
            before = 0
            for start, stop in self.padded_spans(n, rank):
                if start <= token < stop:
                    return rank, before + token - start
                before += stop - start
        raise LongspanError(f"there is no token {token} in a sequence of {n}")

    def block_spans(self, n: int, ring_rank: int) -> tuple[Span, ...]:
        """Return the real tokens of one block."""
        return _without_padding(self.block(n, ring_rank), n)


def choose_layout(name: str, ring: int, ulysses: int) -> Layout:
    """Return the layout that a name stands for on a mesh.

    "auto" is zigzag in a ring. Without a ring it is contiguous, whatever the name: the Ulysses all-to-all restores the
    order of the tokens, so no other layout balances better.
    """
    kind = "zigzag" if name == "auto" else name
    return Layout(ring, ulysses, kind if ring > 1 else "contiguous")


@functools.lru_cache(maxsize=64)
def _blocks(kind: str, n: int, ring: int) -> tuple[tuple[Span, ...], ...]:
    """Return every block of `n` tokens, padding included, with adjacent spans joined; check what the layout returns."""
    if ring == 1:
        return (((0, n),),)
    layout = LAYOUTS[kind]
    blocks = tuple(_join_adjacent(spans) for spans in layout.blocks(n, ring))
    in_order = sorted(span for spans in blocks for span in spans)
    ends = [(0, 0), *in_order, (n, n)]
    sizes = {sum(stop - start for start, stop in spans) for spans in blocks}
    if (
        len(blocks) != ring
        or sizes != {n // ring}
        or any(a[1] != b[0] for a, b in itertools.pairwise(ends))
        or any(list(spans) != sorted(spans) for spans in blocks)
    ):
        raise LongspanError(
            f"layout {kind!r} must place each of {n} tokens once, in {ring} ascending blocks of {n // ring}; it gives "
            f"{len(blocks)} blocks of {sorted(sizes)} tokens; correct {type(layout).__name__}.blocks"
        )
    return blocks


def append_span(spans: list[Span], span: Span) -> None:
    """Append a span, joined with the last one if they touch; skip an empty one."""
    if spans and spans[-1][1] == span[0]:
        span = spans.pop()[0], span[1]
    if span[0] < span[1]:
        spans.append(span)


def _join_adjacent(spans: Sequence[Span]) -> tuple[Span, ...]:
    joined: list[Span] = []
    for span in spans:
        append_span(joined, span)
    return tuple(joined)


def _without_padding(spans: Sequence[Span], n: int) -> tuple[Span, ...]:
    return tuple((start, min(stop, n)) for start, stop in spans if start < n)


def _slice_spans(spans: tuple[Span, ...], start: int, stop: int) -> tuple[Span, ...]:
    """Return items start to stop of the concatenated spans."""
    out, at = [], 0
    for a, b in spans:
        first, last = max(start, at), min(stop, at + b - a)
        if first < last:
            out.append((a + first - at, a + last - at))
        at += b - a
    return tuple(out)


def split_by_cost(costs: Sequence[int], ranks: int) -> tuple[Span, ...]:
    """Split a row of items into one span [start, stop) per rank, in order, so that the most expensive span costs least.

    With few items some ranks get an empty span.
    """
    low, high = max(costs, default=0), sum(costs)
    while low < high:  # the smallest limit per rank with which the items fit
        limit = (low + high) // 2
        if len(_fill(costs, limit)) <= ranks:
            high = limit
        else:
            low = limit + 1
    spans = _fill(costs, high)
    return (*spans, *[(len(costs), len(costs))] * (ranks - len(spans)))


def _fill(costs: Sequence[int], limit: int) -> list[Span]:
    """Give each rank as many of the next items as `limit` allows."""
    spans, start, cost = list[Span](), 0, 0
    for i, more in enumerate(costs):
        if cost + more > limit and i > start:
            spans.append((start, i))
            start, cost = i, 0
        cost += more
    return [*spans, (start, len(costs))]
