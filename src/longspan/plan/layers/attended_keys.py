"""The keys that a query of a softmax layer attends to: all, all before it, a window, or those of its chunk."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from longspan.core.layout import Span
from longspan.core.regions import Region

MOST_CHUNKS = 1 << 18
"""Chunks of a context that can be planned: each is one region."""


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

    def refusal(self, n: int) -> str | None:
        """Return the reason why `n` tokens cannot be planned, or None."""
        return None


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

    def refusal(self, n: int) -> str | None:
        if n <= MOST_CHUNKS * self.tokens:
            return None
        return f"a context of {n} has more chunks of {self.tokens} than the {MOST_CHUNKS} that can be planned"
