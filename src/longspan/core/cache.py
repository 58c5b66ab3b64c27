"""The KV cache: its dtypes and bytes, and which ring rank holds which tokens of a growing sequence.

A batch's `Layout` moves every token when the length changes; in a cache no token moves. A prompt chunk is split over
the ring by the layout of that chunk (zigzag: every rank gets the same number of query-key pairs). A few tokens of one
forward are split evenly. Generated tokens go in short runs to the rank with the fewest tokens."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from longspan.core.layout import Span, append_span
from longspan.core.reading import OneFlag
from longspan.core.validation import check_choice, check_flag

if TYPE_CHECKING:
    from longspan.core.layout import Layout


CacheDtype = Literal["exact", "int8", "fp8"]

CACHE_DTYPES: tuple[CacheDtype, ...] = get_args(CacheDtype)
"""exact: as the model computes them. int8, fp8: one byte per element and an fp32 scale per head and token."""

CacheOffload = Literal["none", "host"]

OFFLOADS: tuple[CacheOffload, ...] = get_args(CacheOffload)
"""none: on the device. host: in host memory; a layer is copied to the device when it runs."""

SCALE_BYTES = 4


@dataclass(frozen=True)
class CacheConfig(OneFlag):
    """How a KV cache is stored."""

    dtype: CacheDtype = "exact"
    """exact: the model's. int8, fp8: an approximation, one byte per element and an fp32 scale per head and token."""
    offload: CacheOffload = "none"
    """Where the cache is stored. host: in host memory; the GPU holds two layers of it at a time, the running one and
    the next."""
    latent: bool = True
    """For DeepSeek's attention (MLA), cache the latent vectors if they take less memory on these ranks. false: cache
    keys and values."""

    def __post_init__(self) -> None:
        check_choice("dtype", self.dtype, CACHE_DTYPES)
        check_choice("offload", self.offload, OFFLOADS)
        check_flag("latent", self.latent)


def holds_latent(latent: int, kv_heads: int, elements: int, shared: bool) -> bool:
    """Return whether a cache stores the latent vectors of a layer (MLA) instead of its keys and values.

    Args:
        latent: elements of a token's latent vector and rotary part; 0 for other attention.
        kv_heads: of the rank with most KV heads.
        elements: of a head's key and value together.
        shared: whether every rank may store the vectors, which belong to all heads.
    """
    return shared and 0 < latent < kv_heads * elements


def vector_bytes(code: str, elements: int, bytes_per_element: int) -> int:
    """Return the bytes of one key or value of one head; `bytes_per_element` are the model's."""
    return elements * bytes_per_element if code == "exact" else elements + SCALE_BYTES


GENERATED_RUN = 64
"""Consecutive generated tokens of one rank: few, so that ranks stay balanced; more than one, so that a rank holds few
spans."""

FEW = 4
"""Largest number of new tokens per rank that every rank computes: sharding them would cost more than it saves."""

PREFILL_CHUNK = 8192
"""Default tokens per rank of a prompt chunk; it bounds the memory of a prefill."""


def is_sharded(layout: Layout, tokens: int) -> bool:
    """Whether `tokens` new tokens are sharded over the ranks; otherwise every rank computes all of them."""
    return layout.size > 1 and tokens > FEW * layout.size


class KVPlacement:
    """The tokens that each rank of a ring holds, in the sequence's order.

    Attributes:
        length: tokens of the whole sequence.
        runs: for each rank its ascending spans of tokens [start, stop).
    """

    def __init__(self, ring: int) -> None:
        self.length = 0
        self.runs: list[list[Span]] = [[] for _ in range(ring)]
        self._growing, self._left = 0, 0  # the rank that gets the next generated tokens, and how many

    def count(self, rank: int, start: int = 0) -> int:
        """Return how many tokens a rank holds, from token `start` on."""
        return sum(b - max(a, start) for a, b in self.runs[rank] if b > start)

    def held(self, rank: int, start: int = 0) -> tuple[Span, ...]:
        """Return a rank's spans from token `start` on."""
        return tuple((max(a, start), b) for a, b in self.runs[rank] if b > start)

    def of_entries(self, rate: int) -> KVPlacement:
        """Return the placement of entries of `rate` tokens each; the rank of its last token holds an entry."""
        entries = KVPlacement(len(self.runs))
        entries.length = self.length // rate
        entries.runs = [runs_of_entries(runs, rate) for runs in self.runs]
        return entries

    def add(self, layout: Layout, tokens: int) -> bool:
        """Append the tokens of one forward; return whether they are sharded."""
        sharded = is_sharded(layout, tokens)
        if sharded:
            self._add_chunk([layout.block_spans(tokens, rank) for rank in range(layout.ring)], tokens)
        elif tokens > 1:
            self._add_evenly(tokens)
        else:
            self.grow(1)
        return sharded

    def _add_chunk(self, blocks: Sequence[Sequence[Span]], tokens: int) -> None:
        for runs, block in zip(self.runs, blocks, strict=True):
            for a, b in block:
                append_span(runs, (self.length + a, self.length + b))
        self.length += tokens
        self._left = 0

    def _add_evenly(self, tokens: int) -> None:
        """Append tokens that every rank has computed: one span for each rank."""
        each = -(-tokens // len(self.runs))
        while tokens:
            self._growing, self._left = self._emptiest(), min(each, tokens)
            tokens -= self._left
            self.grow(self._left)

    def _emptiest(self) -> int:
        counts = [self.count(rank) for rank in range(len(self.runs))]
        return counts.index(min(counts))

    def grow(self, tokens: int) -> None:
        """Append generated tokens, which every rank has computed, in runs."""
        while tokens:
            if not self._left:
                self._growing, self._left = self._emptiest(), GENERATED_RUN
            taken = min(tokens, self._left)
            append_span(self.runs[self._growing], (self.length, self.length + taken))
            self.length, self._left, tokens = self.length + taken, self._left - taken, tokens - taken

    def crop(self, length: int) -> None:
        """Drop the tokens from `length` on."""
        self.runs = [[(a, min(b, length)) for a, b in runs if a < length] for runs in self.runs]
        self.length, self._left = min(self.length, length), 0


def runs_of_entries(runs: Sequence[Span], rate: int) -> list[Span]:
    """Return the spans of entries that each stand for `rate` tokens, and whose last token is in these spans."""
    return [(a // rate, b // rate) for a, b in runs if a // rate < b // rate]


@functools.lru_cache(maxsize=4096)
def tokens_per_rank(
    layout: Layout, prompt: int, generated: int = 0, start: int = 0, chunk: int | None = None, rate: int = 1
) -> tuple[int, ...]:
    """Return how many tokens from `start` on each ring rank holds of a prompt and of the tokens generated after it.

    The prompt is processed in chunks of `chunk` tokens, by default `PREFILL_CHUNK` per rank. `rate`: return how many
    entries of so many tokens each holds.
    """
    if layout.ring == 1:
        return (max(0, (prompt + generated - start) // rate),)
    chunk = chunk or PREFILL_CHUNK * layout.size
    placement = KVPlacement(layout.ring)
    for begin in range(0, prompt, chunk):
        placement.add(layout, min(chunk, prompt - begin))
    placement.grow(generated)
    placement = placement.of_entries(rate)
    return tuple(placement.count(rank, start) for rank in range(layout.ring))
