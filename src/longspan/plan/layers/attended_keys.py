"""The keys that a query of a softmax layer attends to, and how KV blocks go round a ring for them."""

from __future__ import annotations

import dataclasses
import functools
from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from longspan.core.layout import Layout, Span
from longspan.core.regions import Region
from longspan.core.routes import Routes, ring_routes

MOST_RANKS = 64
"""Ranks of a ring, evenly spread, whose buffers are counted step by step."""


@dataclass(frozen=True)
class AttendedKeys(ABC):
    """The keys that a query attends to."""

    name: ClassVar[str]
    """The kind of layer, in reports."""

    @property
    def limit(self) -> int | None:
        """The most keys that a query attends to; None: no limit."""
        return None

    def limited_to(self, n: int) -> AttendedKeys:
        """Return the same mask over `n` tokens: plainly causal if the limit does not bind."""
        return self if self.limit is not None and self.limit < n else CAUSAL

    def seen(self, n: int) -> int:
        """Return the most keys out of `n` that a query attends to."""
        return min(n, self.limit or n)

    def cached_from(self, n: int) -> int:
        """Return the first of `n` tokens that the next query attends to: the start of a KV cache."""
        return 0

    @abstractmethod
    def pairs(self, n: int) -> float:
        """Return the (query, key) pairs of a sequence of `n` tokens."""

    @abstractmethod
    def regions(self, run: Span, n: int) -> Iterator[Region]:
        """Yield the regions of the mask that may contain tokens of `run`, as queries or as keys."""


@dataclass(frozen=True)
class Causal(AttendedKeys):
    """The token itself and all before it."""

    name: ClassVar[str] = "full"

    def pairs(self, n: int) -> float:
        return float(n) * (float(n) + 1) / 2

    def regions(self, run: Span, n: int) -> Iterator[Region]:
        yield Region(0, n, 0, n, 0)


CAUSAL = Causal()


@dataclass(frozen=True)
class Bidirectional(AttendedKeys):
    """All tokens (BERT)."""

    name: ClassVar[str] = "bidirectional"

    def limited_to(self, n: int) -> AttendedKeys:
        return self

    def pairs(self, n: int) -> float:
        return float(n) * float(n)

    def regions(self, run: Span, n: int) -> Iterator[Region]:
        yield Region(0, n, 0, n)


@dataclass(frozen=True)
class Window(AttendedKeys):
    """The last `tokens` tokens, including the query's own."""

    tokens: int
    name: ClassVar[str] = "sliding"

    @property
    def limit(self) -> int | None:
        return self.tokens

    def cached_from(self, n: int) -> int:
        return max(0, n - self.tokens + 1)

    def pairs(self, n: int) -> float:
        w = float(min(self.tokens, n))
        return w * (w + 1) / 2 + (float(n) - w) * w

    def regions(self, run: Span, n: int) -> Iterator[Region]:
        yield Region(0, n, 0, n, 0, self.tokens - 1)


@dataclass(frozen=True)
class Chunk(AttendedKeys):
    """The query's own token and those before it in its chunk of `tokens` (Llama-4)."""

    tokens: int
    name: ClassVar[str] = "chunked"

    @property
    def limit(self) -> int | None:
        return self.tokens

    def cached_from(self, n: int) -> int:
        return n // self.tokens * self.tokens

    def pairs(self, n: int) -> float:
        whole, rest = divmod(n, self.tokens)
        return whole * self.tokens * (self.tokens + 1) / 2 + rest * (rest + 1) / 2

    def regions(self, run: Span, n: int) -> Iterator[Region]:
        size = self.tokens
        for start in range(run[0] // size * size, min(run[1], n), size):
            yield Region(start, min(start + size, n), start, min(start + size, n), 0)


# ---------------------------------------------------------------------------------------------------------------------
# A ring: the same layout, regions and routes as `longspan.attn.methods.ring`. No table of ranks x ranks is built, so
# that rings of thousands cost nothing.


@dataclass(frozen=True)
class RingSchedule:
    """How KV blocks go round a ring in one attention."""

    routes: Routes  # how far each block is sent, and so what each rank sends and receives
    pairs: tuple[int, ...]  # (query, key) pairs that each rank computes
    # fraction of the pairs of the rank with most pairs that lie in its own block, which it computes before any other
    # block arrives
    own: float
    blocks: int  # most KV blocks that a rank holds besides its own: those received, and those that arrive
    gradients: int  # most gradients of KV blocks that it holds: those that arrive, leave, or have returned
    keys: float  # most of a block's keys whose gradients the kernel returns in one call, as a fraction


@functools.lru_cache(maxsize=4096)
def ring_schedule(layout: Layout, n: int, keys: AttendedKeys) -> RingSchedule:
    """Return the schedule of one attention over `n` tokens, padding left out."""
    # How many Ulysses ranks share a block matters only if it changes the block's length: then the cache hits more.
    alone = dataclasses.replace(layout, ulysses=1)
    same = alone.local_length(n) == layout.local_length(n) * layout.ulysses
    return _schedule(alone if same else layout, n, keys.limited_to(n))


@functools.lru_cache(maxsize=4096)
def _schedule(layout: Layout, n: int, keys: AttendedKeys) -> RingSchedule:
    size = layout.ring
    blocks = [layout.block(n, rank) for rank in range(size)]
    pairs = tuple(sum(_pairs(run, (0, n), n, keys) for run in runs) for runs in blocks)
    slowest = max(range(size), key=pairs.__getitem__)
    own = sum(_pairs(q, k, n, keys) for q in blocks[slowest] for k in blocks[slowest])
    routes = ring_routes(_readers(layout, blocks, n, keys))
    if keys.limit is not None:
        return RingSchedule(routes, pairs, own / pairs[slowest], *from_both_sides(layout, routes.steps), 1.0)
    # Every block goes right; a causal zigzag ring computes half of the keys or of the queries.
    part, steps = 0.5 if keys == CAUSAL and layout.kind == "zigzag" else 1.0, routes.steps
    return RingSchedule(routes, pairs, own / pairs[slowest], min(steps, 2), 2 * (steps > 1), part)


def from_both_sides(layout: Layout, steps: int) -> tuple[int, int]:
    """Return `blocks` and `gradients` of windows, chunks and packed documents.

    Under zigzag their blocks arrive from both sides, while gradients return from earlier steps. An upper bound, at
    most 3 % of a step's memory too high.
    """
    sides, others = 1 if layout.kind == "contiguous" else 2, layout.ring - 1
    gradients = 3 * sides if steps > 1 else 2 * sides - 1
    return min(others, sides * min(steps, 2)), min(sides * others - (sides - 1), gradients)


def _pairs(queries: Span, in_keys: Span, n: int, keys: AttendedKeys) -> int:
    parts = (region.within(queries, in_keys) for region in keys.regions(queries, n))
    return sum(part.pairs for part in parts if part is not None)


def _readers(layout: Layout, blocks: list[tuple[Span, ...]], n: int, keys: AttendedKeys) -> list[set[int]]:
    """Return for each block the ranks whose queries attend to any of its keys."""
    runs, owners = layout.runs(n)
    starts = [start for start, _ in runs]
    everyone = set(owners)
    last_run_of = {rank: at for at, rank in enumerate(owners)}
    all_follow = min(last_run_of.values())  # from this run to the end every rank owns one
    readers: list[set[int]] = []
    for block in blocks:
        ranks: set[int] = set()
        for run in block:
            for region in keys.regions(run, n):
                part = region.within((0, n), run)
                if part is None:
                    continue
                # The queries that attend to a run form one interval, for causal masks, windows and chunks alike.
                first, stop = bisect_right(starts, part.q0) - 1, bisect_left(starts, part.q1)
                to_the_end = first <= all_follow and stop == len(owners)
                ranks = everyone if to_the_end else ranks | set(owners[first:stop])
            if len(ranks) == len(everyone):
                break
        readers.append(ranks)
    return readers
