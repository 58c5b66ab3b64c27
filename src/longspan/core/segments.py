"""Which tokens of a row attend among themselves: documents, or what padding leaves. Standard library only."""

from __future__ import annotations

import itertools

from longspan.core.layout import Span

Segments = tuple[tuple[Span, ...], ...]
"""For each row of the batch the runs of tokens [start, stop) that attend among themselves."""


def chunk_segments(rows: Segments, chunk: int, starts: tuple[tuple[int, ...], ...] | None = None) -> Segments:
    """Every run cut into chunks of `chunk` tokens, which count from the start of the run (Llama-4's chunked attention).

    Where position ids restart, chunks end where the position ids of a run pass a multiple of `chunk`: `starts` are
    those of the first tokens.
    """
    return tuple(
        tuple(
            span
            for (start, stop), at in zip(row, starts[b] if starts else (0,) * len(row), strict=True)
            for span in itertools.pairwise([start, *range(start + chunk - at % chunk, stop, chunk), stop])
        )
        for b, row in enumerate(rows)
    )
