"""Which tokens of a batch belong together, as runs of tokens: from masks, ids, borders or chunks.

Everything here is read on the host, once per batch, and is alike on every rank, because all have the same batch.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from longspan.core.errors import LongspanError
from longspan.core.segments import Segments


def padding_segments(mask: Tensor) -> tuple[Segments | None, bool]:
    """Read a padding mask [B, n].

    Returns:
        For each row its tokens from the first real one to the last (none where all are padding), or None where nothing
        is padded. And whether any row has zeros between its ones.
    """
    real = mask.bool()
    if bool(real.all()):
        return None, False
    n = real.shape[1]
    count = real.sum(-1)
    first = real.int().argmax(-1)
    last = n - 1 - real.flip(-1).int().argmax(-1)
    found = torch.stack([count, first, last + 1], -1).tolist()
    rows = tuple(((start, stop),) if total else () for total, start, stop in found)
    return rows, any(total and total != stop - start for total, start, stop in found)


def document_segments(documents: Tensor, name: str = "documents") -> Segments | None:
    """The documents of each row, as runs of equal ids in `documents` [B, n]; an id below 0 marks padding.

    None where every row is one document. Only the borders travel to the host. `name` is what the caller's user calls
    the ids, for messages.

    Raises:
        LongspanError: if one id comes back after another: a document is one run of tokens.
    """
    n = documents.shape[1]
    border = documents.diff(dim=-1) != 0
    if not bool(border.any()) and bool((documents >= 0).all()):
        return None
    at = [[0] for _ in range(documents.shape[0])]
    for b, i in border.nonzero().tolist():
        at[b].append(i + 1)
    rows: list[tuple[tuple[int, int], ...]] = []
    for b, starts in enumerate(at):
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
    """The documents of one row from where they begin, [documents + 1], the row's length `n` at the end.

    `name` is what the caller's user calls them, for messages.

    Raises:
        LongspanError: if they do not begin at 0, do not rise, or do not sum up to `n`.
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
    spelled = ", ".join(str(number) for number in numbers[:8])
    return f"[{spelled}{', ...' if len(numbers) > 8 else ''}]"


def paired_segments(documents: Tensor, kv_documents: Tensor) -> tuple[Segments, Segments]:
    """For cross attention: run number m of the first attends to run number m of the second, which has its id.

    Raises:
        LongspanError: as `document_segments`.
    """
    out = []
    for b in range(len(documents)):
        q_runs, k_runs = (_runs_by_id(ids[b]) for ids in (documents, kv_documents))
        both = [i for i in q_runs if i in k_runs]
        out.append((tuple(q_runs[i] for i in both), tuple(k_runs[i] for i in both)))
    return tuple(q for q, _ in out), tuple(k for _, k in out)


def _runs_by_id(ids: Tensor) -> dict[int, tuple[int, int]]:
    rows = document_segments(ids[None])
    runs = rows[0] if rows is not None else ((0, len(ids)),)
    return {int(ids[start]): (start, stop) for start, stop in runs}
