"""Pack whole documents into sequences: none is cut, unless it is longer than a sequence.

Best-fit decreasing, within a window of documents: the longest document first, each into the fullest sequence that has
room for it (Ding et al., "Fewer Truncations Improve Language Modeling", 2024).
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from longspan.core.errors import LongspanError
from longspan.data.tokenizer import answers_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from longspan.data.rows import Kind
    from longspan.data.stream import Piece, Sequence

    Ids = NDArray[np.int64]

TooLong = Literal["truncate", "drop"]
"""What happens to a document that is longer than a sequence. Of a preference, the longer answer is cut first."""


def best_fit(lengths: list[tuple[int, int]], context: int) -> list[list[int]]:
    """Return the documents of each sequence, from pairs (number of a document, its tokens: at most `context`).

    Documents of a sequence are in their order. Sequences are in the order of their longest documents, which is random
    if the documents' order is. Leaving out all documents of some sequences does not change the others.
    """
    opened: list[list[int]] = []
    room: list[tuple[int, int]] = []  # of each sequence, and its place in `opened`; ascending
    for number, length in sorted(lengths, key=lambda item: (-item[1], item[0])):
        best = bisect.bisect_left(room, (length, 0))
        if best == len(room):
            opened.append([])
            left, chosen = context, len(opened) - 1
        else:
            left, chosen = room.pop(best)
        opened[chosen].append(number)
        bisect.insort(room, (left - length, chosen))
    return [sorted(numbers) for numbers in sorted(opened, key=lambda numbers: numbers[0])]


@dataclass(frozen=True)
class _Whole:
    """A tokenised document; `ids` is empty if it is left out."""

    piece: Piece
    ids: Ids

    @property
    def parts(self) -> list[Ids]:
        """The document, or each answer of a preference; attention stays within a part."""
        return answers_of(self.ids) if self.piece.document.kind == "preference" else [self.ids]


class WholeDocuments:
    """Sequences of whole documents, from the tokenised pieces of a stream; the arguments are those of `SequenceStream`.

    With `window` 0 a document is a sequence. Longer documents with images, and those without a loss, are left out.
    `data` is `--data`, for messages.
    """

    def __init__(self, context: int, window: int, too_long: TooLong, state: dict[str, Any] | None, data: str) -> None:
        self.context, self.window, self.too_long, self.data = context, window, too_long, data
        self._number = state["sequences"] if state else 0
        self._counts: dict[str, int] = dict(state["counts"]) if state else {"truncated": 0, "left_out": 0}
        # Of the first window, which is read and packed again: the documents of sequences that are done.
        self._used: set[int] = set(state["used"]) if state else set()
        self._counted = state is not None

    def __call__(self, tokenised: Iterable[tuple[Piece, Ids]]) -> Iterator[Sequence]:
        """Yield the sequences."""
        window: list[_Whole] = []
        tokens, least = 0, max(self._used, default=-1) + 1
        for document in self._documents(tokenised):
            if window and window[0].piece.place.epoch != document.piece.place.epoch:
                yield from self._sequences(window)  # a sequence has no document twice
                window, tokens, least = [], 0, 0
            window.append(document)
            tokens += len(document.ids)
            del document
            if tokens >= self.window * self.context and len(window) >= least:
                yield from self._sequences(window)
                window, tokens, least = [], 0, 0
        if window:  # after the last epoch
            yield from self._sequences(window)

    def _documents(self, tokenised: Iterable[tuple[Piece, Ids]]) -> Iterator[_Whole]:
        """Yield the documents of the pieces, cut to the context. Raise if none of a whole epoch can be used."""
        parts: list[Ids] = []
        complete, epoch, read, used = not self._counted, 0, 0, 0
        for piece, ids in tokenised:
            if piece.place.epoch != epoch:
                if complete and read and not used:
                    raise LongspanError(
                        f"--data {self.data}: none of {read} documents can be used: they are longer than --context "
                        f"{self.context}, or have no loss within it; give a larger --context",
                        code="LS504",
                    )
                complete, epoch, read, used = True, piece.place.epoch, 0, 0
            parts.append(ids)
            if piece.last:
                whole = np.concatenate(parts) if len(parts) > 1 else ids
                parts = []
                fitted = self._fitted(whole, piece.document.kind)
                read, used = read + 1, used + (len(fitted) > 0)
                yield _Whole(dataclasses.replace(piece.without_text(), number=0), fitted)

    def _fitted(self, ids: Ids, kind: Kind) -> Ids:
        reason, parts = "", answers_of(ids) if kind == "preference" else [ids]
        if len(ids) > self.context:
            reason = "truncated"
            most = max(self.context - min(map(len, parts)), self.context // 2) if kind == "preference" else self.context
            parts = [part[:most] for part in parts]
        drop = self.too_long == "drop" or kind == "images"  # it might lose some
        if (reason and drop) or not all((part[1:] >= 0).any() for part in parts):
            reason, parts = "left_out", [ids[:0]]
        ids = np.concatenate(parts) if kind == "preference" else parts[0]
        if reason and not self._counted:
            self._counts[reason] += 1
        return ids

    def _sequences(self, window: list[_Whole]) -> Iterator[Sequence]:
        from longspan.data.stream import make_sequence

        place = dataclasses.asdict(window[0].piece.place)
        lengths = [(i, len(w.ids)) for i, w in enumerate(window) if len(w.ids) and i not in self._used]
        used, self._used = sorted(self._used), set()
        self._counted = False
        for numbers in best_fit(lengths, self.context):
            documents = [window[number] for number in numbers]
            for number in numbers:
                window[number] = _Whole(window[number].piece, documents[0].ids[:0])  # frees its ids
            used = sorted([*used, *numbers])
            self._number += 1
            state = {"place": place, "sequences": self._number, "used": used, "counts": dict(self._counts)}
            parts = [part for document in documents for part in document.parts]
            starts = np.cumsum([0, *map(len, parts)])[:-1]
            names = ("", ", rejected")  # of parts
            where = tuple(d.piece.document.where + names[i] for d in documents for i in range(len(d.parts)))
            shown = documents[0].piece.document if documents[0].piece.document.kind == "images" else None
            made = [
                make_sequence(
                    np.concatenate(parts),
                    tuple(int(start) for start in starts),
                    {"piece": 0, "token": 0, **state},
                    where,
                    shown,
                )
            ]
            del documents, parts
            yield made.pop()  # no local variable holds the sequence while the generator waits
