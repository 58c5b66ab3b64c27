"""Segments of a batch (documents, or tokens that are not padding), read from masks, ids or borders.

Everything here is read on the host, once per batch, and is the same on every rank, because all have the same batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from longspan.comm.arguments import check_integers, check_tensor
from longspan.core.errors import LongspanError
from longspan.core.layout import Span

Segments = tuple[tuple[Span, ...], ...]
"""For each batch row the spans of tokens [start, stop) that attend only to each other."""


def padding_segments(mask: Tensor) -> tuple[Segments | None, bool]:
    """Read a padding mask [B, n].

    Returns:
        Each row's tokens from the first real one to the last (none if all are padding), or None if nothing is padded;
        and whether any row has zeros between its ones.
    """
    real = mask.bool()
    if bool(real.all()):
        return None, False
    n = real.shape[1]
    count = real.sum(-1)
    first = real.int().argmax(-1)
    last = n - 1 - real.flip(-1).int().argmax(-1)
    rows = torch.stack([count, first, last + 1], -1).tolist()
    segments = tuple(((start, stop),) if total else () for total, start, stop in rows)
    return segments, any(total and total != stop - start for total, start, stop in rows)


def runs_of(marked: Tensor) -> Segments:
    """Return the runs of True in each row of `marked`, bool [B, n]."""
    borders = torch.nn.functional.pad(marked.int(), (1, 1)).diff(dim=-1)
    rows: list[tuple[list[int], list[int]]] = [([], []) for _ in marked]
    for side, change in enumerate((1, -1)):
        for b, i in (borders == change).nonzero().tolist():
            rows[b][side].append(i)
    return tuple(tuple(zip(starts, stops, strict=True)) for starts, stops in rows)


def check_documents(name: str, ids: Tensor | None, shape: tuple[int, int]) -> None:
    """Raise unless `ids` has an integer for every token, if given."""
    if ids is None:
        return
    check_tensor(name, ids)
    if tuple(ids.shape) != shape:
        raise LongspanError(
            f"`{name}` has the shape {tuple(ids.shape)}, it needs an id for every token of the whole sequence: {shape}"
        )
    check_integers(name, ids)


def document_segments(documents: Tensor, name: str = "documents") -> Segments | None:
    """Return the runs of equal ids in each row of `documents` [B, n]; an id below 0 marks padding.

    Returns None if every row is one document. Only the borders are copied to the host.

    Args:
        documents: ids of the tokens.
        name: the argument's name in error messages.

    Raises:
        LongspanError: if an id comes back after another: a document is one run of tokens.
    """
    n = documents.shape[1]
    border = documents.diff(dim=-1) != 0
    if not bool(border.any()) and bool((documents >= 0).all()):
        return None
    starts_of_row = [[0] for _ in range(documents.shape[0])]
    for b, i in border.nonzero().tolist():
        starts_of_row[b].append(i + 1)
    rows: list[tuple[Span, ...]] = []
    for b, starts in enumerate(starts_of_row):
        ids = documents[b, torch.tensor(starts, device=documents.device)].tolist()
        real = [i for i in ids if i >= 0]
        if len(set(real)) != len(real):
            twice = next(i for i in real if real.count(i) > 1)
            raise LongspanError(
                f"`{name}` of row {b}: id {twice} comes back after another document; each document must be one "
                f"run of tokens with an id of its own"
            )
        spans = zip(ids, starts, [*starts[1:], n], strict=True)
        rows.append(tuple((start, stop) for i, start, stop in spans if i >= 0))
    return tuple(rows)


def cu_seqlens_segments(cu_seqlens: Tensor, n: int, name: str = "cu_seqlens") -> Segments:
    """Return the documents of one row of `n` tokens from flash attention's `cu_seqlens` [documents + 1].

    Args:
        cu_seqlens: starts of the documents, and `n` at the end.
        n: length of the row.
        name: the argument's name in error messages.

    Raises:
        LongspanError: if the entries do not begin at 0, do not rise, or do not end at `n`.
    """
    ends = [int(end) for end in cu_seqlens.reshape(-1).tolist()]
    if len(ends) < 2 or ends[0] != 0 or any(b < a for a, b in itertools.pairwise(ends)):
        raise LongspanError(f"`{name}` must rise from 0 to the length, one entry more than documents; got {_few(ends)}")
    if ends[-1] != n:
        raise LongspanError(
            f"the documents of `{name}` have {ends[-1]} tokens together, the sequence has {n}; its last entry "
            f"must be {n}"
        )
    return (tuple((a, b) for a, b in itertools.pairwise(ends) if b > a),)


def _few(numbers: list[int]) -> str:
    listed = ", ".join(str(number) for number in numbers[:8])
    return f"[{listed}{', ...' if len(numbers) > 8 else ''}]"


def paired_segments(documents: Tensor, kv_documents: Tensor) -> tuple[Segments, Segments]:
    """Return the query and key segments of cross attention: number m of both has the same id.

    Raises:
        LongspanError: as `document_segments`.
    """
    pairs = []
    for b in range(len(documents)):
        q_spans, k_spans = _span_by_id(documents[b]), _span_by_id(kv_documents[b])
        shared = [i for i in q_spans if i in k_spans]
        pairs.append((tuple(q_spans[i] for i in shared), tuple(k_spans[i] for i in shared)))
    return tuple(q for q, _ in pairs), tuple(k for _, k in pairs)


def _span_by_id(ids: Tensor) -> dict[int, Span]:
    rows = document_segments(ids[None])
    spans = rows[0] if rows is not None else ((0, len(ids)),)
    return {int(ids[start]): (start, stop) for start, stop in spans}


def chunk_segments(rows: Segments, chunk_size: int, starts: tuple[tuple[int, ...], ...] | None = None) -> Segments:
    """Cut every segment into chunks of `chunk_size` tokens (Llama-4's chunked attention).

    Chunks count from position 0, and `starts` are the position ids of the segments' first tokens; without `starts`
    every segment starts at position 0.
    """
    return tuple(
        tuple(
            span
            for (start, stop), position in zip(row, starts[b] if starts else (0,) * len(row), strict=True)
            for span in cut_span(start, stop, start + chunk_size - position % chunk_size, chunk_size)
        )
        for b, row in enumerate(rows)
    )


def cut_span(start: int, stop: int, first_cut: int, step: int) -> Iterator[Span]:
    """Yield the parts of a span that is cut at every `step` tokens from `first_cut` on."""
    return itertools.pairwise([start, *range(first_cut, stop, step), stop])
