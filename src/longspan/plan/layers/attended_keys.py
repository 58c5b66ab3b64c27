"""The keys that a query of a softmax layer attends to, and how KV blocks go round a ring for them."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from longspan.core.layout import Layout, Span
from longspan.core.regions import Region
from longspan.core.routes import Routes, ring_routes

MOST_RANKS = 64
"""Ranks of a ring, evenly spread, whose buffers are counted round by round."""


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


class Held(NamedTuple):
    """Buffers of a rank while it computes the gradients of a remote block, adds them up, or starts to send them.

    Attributes:
        blocks: KV blocks: those received, and those that arrive for the next round.
        gradients: of KV blocks: those that arrive, leave, or have returned.
        queries: fraction of its queries that attend to the block; 0 if it computes none.
        keys: fraction of the block's keys whose gradients the kernel has returned.
    """

    blocks: int
    gradients: int
    queries: float
    keys: float


class HeldInForward(NamedTuple):
    """Buffers of a rank while it computes its queries' attention to a remote block.

    Attributes:
        blocks: KV blocks: those received that are still to be computed or sent on, and those that arrive.
        queries: fraction of its queries that attend to the block.
    """

    blocks: int
    queries: float


@dataclass(frozen=True)
class RingSchedule:
    """How KV blocks go round a ring in one attention.

    Attributes:
        routes: how far each block is sent, and so what each rank sends and receives.
        pairs: (query, key) pairs that each rank computes.
        own: fraction of the pairs of the rank with most pairs that lie in its own block, which it computes before any
            other block arrives.
        forward: buffers in a forward, of every rank and round.
        held: buffers in a backward, of every rank and round.
        first: KV blocks that arrive while a rank computes the first half of its own block's heads, max over ranks.
        last: gradients in flight while it computes the second half.
    """

    routes: Routes
    pairs: tuple[int, ...]
    own: float
    forward: frozenset[HeldInForward]
    held: frozenset[Held]
    first: int
    last: int


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
    return RingSchedule(routes, pairs, own / pairs[slowest], *_held(layout, n, keys, routes))


def _held(
    layout: Layout, n: int, keys: AttendedKeys, routes: Routes
) -> tuple[frozenset[HeldInForward], frozenset[Held], int, int]:
    """Return `forward`, `held`, `first` and `last` of a schedule."""
    size, rounds, forward, held = layout.ring, routes.rounds, set[HeldInForward](), set[Held]()
    if keys.limit is None:  # every block goes right; a causal zigzag ring computes half of the keys or of the queries
        part = 0.5 if keys == CAUSAL and layout.kind == "zigzag" else 1.0
        held.add(Held(min(rounds, 2), 0, 1.0, part))
        held |= {Held(1 + (rounds > 2), 2, 1.0, part)} if rounds > 1 else set()
        return frozenset({HeldInForward(min(rounds, 2), 1.0)}), frozenset(held), 1, 2
    first = last = 0
    for rank in range(0, size, -(-size // MOST_RANKS)):
        # Directions from which a block arrives, by round.
        arriving = [[d for d in (1, -1) if routes.has_hop((rank - d) % size, d, step)] for step in range(1, rounds + 2)]
        returned, before = 0, 0
        for step, (now, following) in enumerate(itertools.pairwise(arriving), 1):
            sent_on = 0
            for at, direction in enumerate(now):
                block = layout.block(n, (rank - direction * step) % size)
                queries, of_block = _attending(layout.block(n, rank), block, n, keys)
                forward.add(HeldInForward(len(now) - at + sent_on + len(following), queries))
                sent_on += routes.has_hop(rank, direction, step + 1)
                blocks, gradients = len(now) + len(following), returned + (len(now) if step > 1 else at)
                held.add(Held(blocks, gradients + (before if at == 0 else 0), queries, of_block))
                if step == 1:  # its gradient is made, and the kernel's added to it
                    held.add(Held(blocks, gradients + 1, 0.0, of_block))
            returned += sum(routes.hops(rank, direction) == step for direction in (1, -1))
            held.add(Held(len(now) + len(following), len(now) + len(following) + returned, 0.0, 0.0))
            before = len(now)
        first, last = max(first, len(arriving[0])), max(last, before + returned)
    return frozenset(forward), frozenset(held), first, last


def documents_in_forward(layout: Layout) -> HeldInForward:
    """Return what packed documents of the worst lengths need in a forward, as a search over random lengths found it."""
    most = 2 if layout.kind == "contiguous" else 4
    return HeldInForward(min(layout.ring - 1, most), 1.0)


def documents_held(layout: Layout) -> Held:
    """Return the same of a backward.

    Under zigzag their blocks arrive from both sides, while gradients return from earlier rounds.
    """
    if layout.kind == "contiguous":
        return Held(*{2: (1, 0), 3: (1, 2), 4: (1, 3)}.get(layout.ring, (2, 3)), 1.0, 1.0)
    few = {2: (1, 0, 1.0, 0.5), 3: (1, 3, 1.0, 0.5), 4: (1, 5, 1.0, 0.5)}
    return Held(*few.get(layout.ring, (3, 6, 1.0, 0.75)))


def _attending(queries: tuple[Span, ...], block: tuple[Span, ...], n: int, keys: AttendedKeys) -> tuple[float, float]:
    """Return the fraction of the queries that attend to a block, and of the block's keys that they attend to."""
    of_queries, of_keys, tokens = set[Span](), set[Span](), sum(stop - start for start, stop in block)
    for run, in_keys in itertools.product(queries, block):
        for region in keys.regions(run, n):
            part = region.within(run, in_keys)
            if part is not None:
                of_queries.add((part.q0, part.q1))
                of_keys.add((part.k0, part.k1))
    return _covered(of_queries) / tokens, _covered(of_keys) / tokens


def _covered(spans: set[Span]) -> int:
    covered = end = 0
    for start, stop in sorted(spans):
        covered += max(0, stop - max(start, end))
        end = max(end, stop)
    return covered


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
