"""Fragments: the pieces of documents that a rank holds, as a table made once per batch.

A layout cuts the sequence into *runs*, contiguous spans of one rank. Documents cut runs into *fragments*. A recurrent
layer starts every document from a zero state, so a state goes from one run to the next only where a document does, and
a row needs one summary per run, however many documents it has.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from longspan.attn.segments import Segments, check_documents, document_segments
from longspan.comm.arguments import check_sharding
from longspan.core.errors import LongspanError
from longspan.core.layout import Layout, Span
from longspan.core.validation import LARGEST_COUNT, check_number

if TYPE_CHECKING:
    from longspan.comm.mesh import SequenceSharding

Flags = tuple[tuple[bool, ...], ...]
"""`flags[run][row]`."""


@dataclass(frozen=True)
class Fragment:
    """Some tokens of one document, in one run: [start, stop) of the local tensor."""

    start: int
    stop: int
    slot: int  # number of its run among the runs of its rank
    enters: bool  # whether its document began in an earlier run
    continues: bool  # whether its document continues in the next run
    first: bool  # whether it begins the first document of its row
    last: bool  # whether it is the last one in its run


class RowGroup(NamedTuple):
    """Neighbouring batch rows with the same documents, and their fragments on this rank, in order."""

    rows: slice
    fragments: tuple[Fragment, ...]


@dataclass(frozen=True, eq=False)
class FragmentTable:
    """The fragments of one rank, and what every rank knows about the runs of all ranks."""

    tokens: int  # length of the local tensor, padding included
    runs: tuple[tuple[int, int], ...]  # rank and slot of every run, in the order of the sequence
    slots: int  # the most runs of a rank
    mine: tuple[int, ...]  # this rank's runs, by slot
    enters: Flags  # whether a document began before the run and has tokens in it
    passes: Flags  # whether a run has tokens of one document only, which entered: its state depends on the state before
    filled: Flags  # whether a run has any tokens of documents
    sizes: tuple[tuple[int, ...], ...]  # `sizes[run][row]`: tokens of the run's last fragment
    rows: Sequence[Sequence[Span]]  # the documents of each row, in the whole sequence
    has_documents: bool  # whether any row has documents or padding of its own
    groups: tuple[RowGroup, ...]  # the fragments of this rank

    def earlier(self, run: int) -> list[range]:
        """Return for each row the earlier runs with tokens of the document that enters a run.

        For the number of runs, these are the runs of the row's last document.
        """
        rows = []
        for row in range(len(self.filled[0])):
            first = run - 1
            if run == len(self.runs):
                while first >= 0 and not self.filled[first][row]:
                    first -= 1
            elif not self.enters[run][row]:
                first = -1
            while first >= 0 and self.passes[first][row]:
                first -= 1
            rows.append(range(run if first < 0 else first, run))
        return rows

    def later(self, run: int) -> list[range]:
        """Return for each row the later runs with tokens of the run's last document."""
        rows = []
        for row in range(len(self.filled[0])):
            stop = run + 1
            while stop < len(self.runs) and self.enters[stop][row] and (stop == run + 1 or self.passes[stop - 1][row]):
                stop += 1
            rows.append(range(run + 1, stop))
        return rows

    def place(self, run: int) -> int:
        """Return the index of a run's summary among those of all ranks, `[ranks * slots, ...]`."""
        rank, slot = self.runs[run]
        return rank * self.slots + slot

    def rows_without_tokens(self) -> list[int]:
        """Return the rows that contain only padding."""
        return [row for row, filled in enumerate(zip(*self.filled, strict=True)) if not any(filled)]

    def stack_slots(self, of_runs: Mapping[tuple[int, int], Tensor], empty: Tensor) -> Tensor:
        """Return `[slots, batch, ...]` from tensors `[rows, ...]` by slot and first row; `empty` fills the others."""
        rows = [group.rows for group in self.groups]
        return torch.stack(
            [torch.cat([of_runs.get((slot, r.start), empty[r]) for r in rows]) for slot in range(self.slots)]
        )

    def join(self, of_fragments: Sequence[Sequence[Tensor]]) -> Tensor:
        """Return the local tensor `[batch, tokens, ...]` from tensors `[rows, tokens of the fragment, ...]` by group.

        Tokens outside of documents are zero.
        """
        like = next(x for tensors in of_fragments for x in tensors)
        groups = []
        for group, tensors in zip(self.groups, of_fragments, strict=True):
            parts, at = [], 0
            rows = group.rows.stop - group.rows.start
            for fragment, x in zip(group.fragments, tensors, strict=True):
                if fragment.start > at:
                    parts.append(like.new_zeros(rows, fragment.start - at, *like.shape[2:]))
                parts.append(x)
                at = fragment.stop
            if at < self.tokens:
                parts.append(like.new_zeros(rows, self.tokens - at, *like.shape[2:]))
            groups.append(parts[0] if len(parts) == 1 else torch.cat(parts, 1))
        return groups[0] if len(groups) == 1 else torch.cat(groups)


@functools.lru_cache(maxsize=8)
def fragment_table(layout: Layout, rank: int, length: int, batch: int, segments: Segments | None) -> FragmentTable:
    """Return the table of one rank, from the last few if the same batch came before (the next layer).

    Args:
        layout: which rank holds which tokens.
        rank: this rank of the sequence group.
        length: tokens of the sequence.
        batch: rows.
        segments: the documents of each row; None if every row is one document.
    """
    rows = segments if segments is not None else (((0, length),),) * batch
    spans = [layout.padded_spans(length, r) for r in range(layout.size)]
    placed = sorted((span, r, slot) for r in range(layout.size) for slot, span in enumerate(spans[r]))
    cuts = [_cut_row(row, [span for span, _, _ in placed]) for row in rows]
    local_starts = [0, *itertools.accumulate(stop - start for start, stop in spans[rank])]
    mine = {run: slot for run, (_, r, slot) in enumerate(placed) if r == rank}
    groups, first_row = [], 0
    for row, same in itertools.groupby(rows):
        stop_row = first_row + len(list(same))
        fragments = tuple(
            Fragment(
                start=local_starts[slot] + start - placed[run][0][0],
                stop=local_starts[slot] + stop - placed[run][0][0],
                slot=slot,
                enters=start > row[document][0],
                continues=stop < row[document][1],
                first=document == 0 and start == row[0][0],
                last=number == len(cuts[first_row][run]) - 1,
            )
            for run, slot in mine.items()
            for number, (document, start, stop) in enumerate(cuts[first_row][run])
        )
        groups.append(RowGroup(slice(first_row, stop_row), fragments))
        first_row = stop_row
    enters, passes, filled, sizes = [], [], [], []
    for run in range(len(placed)):
        in_run = [cut[run] for cut in cuts]
        enters.append(tuple(bool(c) and c[0][1] > row[c[0][0]][0] for row, c in zip(rows, in_run, strict=True)))
        passes.append(tuple(e and len(c) == 1 for e, c in zip(enters[run], in_run, strict=True)))
        filled.append(tuple(bool(c) for c in in_run))
        sizes.append(tuple(c[-1][2] - c[-1][1] if c else 0 for c in in_run))
    return FragmentTable(
        tokens=layout.local_length(length),
        runs=tuple((r, slot) for _, r, slot in placed),
        slots=max(map(len, spans)),
        mine=tuple(mine),
        enters=tuple(enters),
        passes=tuple(passes),
        filled=tuple(filled),
        sizes=tuple(sizes),
        rows=rows,
        has_documents=segments is not None,
        groups=tuple(groups),
    )


def _cut_row(row: Sequence[Span], runs: Sequence[Span]) -> list[list[tuple[int, int, int]]]:
    """Return for every run its fragments (number of the document, start, stop)."""
    cut: list[list[tuple[int, int, int]]] = [[] for _ in runs]
    run = document = 0
    while run < len(runs) and document < len(row):
        start, stop = max(runs[run][0], row[document][0]), min(runs[run][1], row[document][1])
        if start < stop:
            cut[run].append((document, start, stop))
        if runs[run][1] <= row[document][1]:
            run += 1
        else:
            document += 1
    return cut


def read_documents(
    x: Tensor, sp: SequenceSharding, length: int | None, documents: Tensor | None
) -> tuple[int, Segments | None]:
    """Return the length of the sequence and its documents, for local tokens `x [batch, tokens, ...]`.

    Raises:
        LongspanError: if `length` or `documents` do not fit the tokens, equally on every rank.
    """
    check_sharding(sp)
    batch, tokens = x.shape[:2]
    if length is None:
        length = tokens * sp.size
    check_number("length", length, 1, LARGEST_COUNT, whole=True)
    if (local := sp.layout.local_length(length)) != tokens:
        raise LongspanError(
            f"a sequence of length={length} over {sp.size} ranks gives {local} tokens to each, the tensors have "
            f"{tokens}; cut them with sp.shard"
        )
    check_documents("documents", documents, (batch, length))
    return length, None if documents is None else document_segments(documents)
