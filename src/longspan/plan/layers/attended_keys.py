"""What the queries of a softmax layer see: all tokens before them, the last few, or those of their chunk."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from longspan.core.layout import Span
from longspan.core.regions import Region

MOST_CHUNKS = 1 << 18
"""Chunks of a context that are planned: each is a region of its own."""


@dataclass(frozen=True)
class Reach(ABC):
    """What a query sees."""

    name: ClassVar[str]
    """The kind of a layer that has it."""

    @property
    def limit(self) -> int | None:
        """Tokens that a query sees at most, None for all."""
        return None

    def limited_to(self, n: int) -> Reach:
        """The same over `n` tokens: plainly causal where the limit is no less than these."""
        return self if self.limit is not None and self.limit < n else CAUSAL

    def seen(self, n: int) -> int:
        """Tokens that a query sees at most, out of `n`."""
        return min(n, self.limit or n)

    def kept_from(self, n: int) -> int:
        """The first of `n` tokens that the next one will see: what a KV cache begins with."""
        return 0

    def pairs(self, n: int) -> float:
        """Pairs (query, key) of a sequence of `n` tokens."""
        return self.limited_to(n)._pairs(n)

    @abstractmethod
    def _pairs(self, n: int) -> float:
        """`pairs`, where the limit binds."""

    @abstractmethod
    def regions(self, run: Span, n: int) -> Iterator[Region]:
        """The parts of the mask that tokens of `run` may lie in, as queries or as keys."""

    def refusal(self, n: int) -> str | None:
        """Why so long a sequence is not planned, None where it is."""
        return None


@dataclass(frozen=True)
class Causal(Reach):
    """Every token before it, and itself."""

    name: ClassVar[str] = "full"

    def _pairs(self, n: int) -> float:
        return float(n) * (float(n) + 1) / 2

    def regions(self, run: Span, n: int) -> Iterator[Region]:
        yield Region(0, n, 0, n, 0)


CAUSAL = Causal()


@dataclass(frozen=True)
class Bidirectional(Reach):
    """Every token, before and behind it (BERT)."""

    name: ClassVar[str] = "bidirectional"

    def limited_to(self, n: int) -> Reach:
        return self

    def _pairs(self, n: int) -> float:
        return float(n) * float(n)

    def regions(self, run: Span, n: int) -> Iterator[Region]:
        yield Region(0, n, 0, n)


@dataclass(frozen=True)
class Window(Reach):
    """The last `tokens` tokens, itself among them."""

    tokens: int
    name: ClassVar[str] = "sliding"

    @property
    def limit(self) -> int | None:
        return self.tokens

    def kept_from(self, n: int) -> int:
        return max(0, n - self.tokens + 1)

    def _pairs(self, n: int) -> float:
        w = float(self.tokens)
        return w * (w + 1) / 2 + (float(n) - w) * w

    def regions(self, run: Span, n: int) -> Iterator[Region]:
        yield Region(0, n, 0, n, 0, self.tokens - 1)


@dataclass(frozen=True)
class Chunk(Reach):
    """The tokens of its chunk of `tokens` before it, and itself (Llama-4)."""

    tokens: int
    name: ClassVar[str] = "chunked"

    @property
    def limit(self) -> int | None:
        return self.tokens

    def kept_from(self, n: int) -> int:
        return n // self.tokens * self.tokens

    def _pairs(self, n: int) -> float:
        whole, rest = divmod(n, self.tokens)
        return whole * self.tokens * (self.tokens + 1) / 2 + rest * (rest + 1) / 2

    def regions(self, run: Span, n: int) -> Iterator[Region]:
        size = self.tokens
        for start in range(run[0] // size * size, min(run[1], n), size):
            yield Region(start, min(start + size, n), start, min(start + size, n), 0)

    def refusal(self, n: int) -> str | None:
        if n <= MOST_CHUNKS * self.tokens:
            return None
        return f"a context of {n} has more chunks of {self.tokens} than the {MOST_CHUNKS} that are planned"
