"""Segments of a batch row: tokens that attend only to each other (documents). Standard library only."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from longspan.core.layout import Span

Segments = tuple[tuple[Span, ...], ...]
"""For each batch row the spans of tokens [start, stop) that attend only to each other."""


def chunk_segments(rows: Segments, chunk_size: int, starts: tuple[tuple[int, ...], ...] | None = None) -> Segments:
    """Cut every segment into chunks of `chunk_size` tokens (Llama-4's chunked attention).

    Chunks count from position 0, and `starts` are the position ids of the segments' first tokens; without `starts`
    every segment starts at position 0.
    """
    return tuple(
        tuple(
            span
            for (start, stop), position in zip(row, starts[b] if starts else (0,) * len(row), strict=True)
            for span in _cut_span(start, stop, start + chunk_size - position % chunk_size, chunk_size)
        )
        for b, row in enumerate(rows)
    )


def _cut_span(start: int, stop: int, first_cut: int, step: int) -> Iterator[Span]:
    return itertools.pairwise([start, *range(first_cut, stop, step), stop])
