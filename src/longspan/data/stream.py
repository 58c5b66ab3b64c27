"""From documents to batches: tokenised, packed into sequences of one length, dealt to data ranks and micro-batches."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
import torch

from longspan.core.errors import LongspanError
from longspan.data.packing import TooLong, WholeDocuments
from longspan.data.rows import Document
from longspan.data.source import DocumentSource, MixedPlace, Mixture, Place
from longspan.data.tokenizer import Tokenizer
from longspan.hf.prompts import split_text

if TYPE_CHECKING:
    from numpy.typing import NDArray


Pack = Literal["stream", "documents", "best-fit", "none"]
"""How documents become sequences; see `longspan.train.config.DataSection`."""

T = TypeVar("T")

_IGNORED = -100  # Hugging Face's label without a loss


@dataclass(frozen=True)
class Sequence:
    """Tokens for one row of a batch."""

    ids: NDArray[np.int64]  # [context], or fewer, which the batch pads
    starts: tuple[int, ...]  # where a document starts, ascending
    state: dict[str, Any]  # where `SequenceStream` resumes after this sequence, as plain values for a checkpoint
    trained: NDArray[np.bool_] | None = None  # [context], which tokens have a loss; None if all have
    where: tuple[str, ...] = ()  # file or dataset with the row of each document in `starts`, for messages
    shown: Document | None = None  # a chat with images, which are read for its batch; the only document

    def spans(self, pack: Pack) -> list[tuple[int, int]]:
        """Return the runs of tokens [start, end) that attend to one another: the whole sequence, or each document.

        A document that started in the previous sequence counts from 0.
        """
        inner = () if pack == "stream" else self.starts
        return list(itertools.pairwise(sorted({0, *inner, len(self.ids)})))

    def label_tokens(self, pack: Pack) -> int:
        """Return the number of tokens with a loss. The first token of a span has none: no token predicts it."""
        if self.trained is None:
            return sum(end - start - 1 for start, end in self.spans(pack))
        return sum(int(self.trained[start + 1 : end].sum()) for start, end in self.spans(pack))


def make_sequence(
    tokens: NDArray[np.int64],
    starts: tuple[int, ...],
    state: dict[str, Any],
    where: tuple[str, ...] = (),
    shown: Document | None = None,
) -> Sequence:
    """Return a sequence from ids that are stored as `~id` where they have no loss."""
    trained = tokens >= 0
    if trained.all():
        return Sequence(tokens, starts, state, None, where, shown)
    return Sequence(np.where(trained, tokens, ~tokens), starts, state, trained, where, shown)


@dataclass(frozen=True)
class Piece:
    """A part of a document that is tokenised by itself; `number` and `last` are its place in the document."""

    place: Place | MixedPlace
    number: int
    last: bool
    document: Document

    @property
    def text(self) -> str:
        return self.document.text

    def without_text(self) -> Piece:
        """Return the piece after it is tokenised; the references to images stay."""
        if self.document.kind == "images":
            return self
        return dataclasses.replace(self, document=dataclasses.replace(self.document, text=""))


class SequenceStream:
    """Sequences of `context` tokens, epoch after epoch.

    With `pack="stream"` and "documents" the documents are concatenated and cut, and nothing is dropped but sequences
    without any loss (within a prompt that is longer than the context). Otherwise documents stay whole, and sequences
    may be shorter; see `longspan.data.packing`.

    Args:
        source, tokenizer: the documents, and what makes ids of them.
        context: tokens of a sequence.
        state: that of the sequence to resume after; None for the beginning. It may come from another context.
        pack, too_long, window: see `longspan.train.config.DataSection`.
        epochs: passes over the documents; the last sequence may then be shorter. None: without end.
    """

    def __init__(
        self,
        source: DocumentSource | Mixture,
        tokenizer: Tokenizer,
        context: int,
        state: dict[str, Any] | None = None,
        *,
        pack: Pack = "stream",
        too_long: TooLong = "truncate",
        window: int = 32,
        epochs: int | None = None,
    ) -> None:
        self.source: Any = source
        self.tokenizer, self.context = tokenizer, context
        self.packing, self.too_long, self.epochs = pack, too_long, epochs
        self.window = window if pack == "best-fit" else 0
        self._state = state
        self._place = source.place(state["place"]) if state else None

    def __iter__(self) -> Iterator[Sequence]:
        return self.pack((piece, self.ids_of(piece)) for piece in self.pieces())

    def pieces(self) -> Iterator[Piece]:
        """Yield the pieces of text from the state on."""
        used = self._state["piece"] if self._state else 0
        for place, document in self.source.documents(self._place, self.epochs):
            texts = split_text(document.text) if document.kind == "text" else [document.text]
            for number in range(used if place == self._place else 0, len(texts)):
                part = dataclasses.replace(document, text=texts[number])
                yield Piece(place, number, number == len(texts) - 1, part)

    def ids_of(self, piece: Piece) -> NDArray[np.int64]:
        """Return the ids of a piece, `~id` where a token has no loss."""
        document = piece.document
        if document.kind == "text":
            return self.tokenizer.text_ids(piece.text, first=piece.number == 0, last=piece.last)
        return self.tokenizer.ids(document.text, document.kind, document.where)

    def pack(self, tokenised: Iterable[tuple[Piece, NDArray[np.int64]]]) -> Iterator[Sequence]:
        """Yield the sequences, from `pieces` and their ids."""
        if self.packing in ("best-fit", "none"):
            return WholeDocuments(self.context, self.window, self.too_long, self._state, self.source.data)(tokenised)
        return self._cut(tokenised)

    def _cut(self, tokenised: Iterable[tuple[Piece, NDArray[np.int64]]]) -> Iterator[Sequence]:
        number = self._state["sequences"] if self._state else 0
        counts: dict[str, int] = dict(self._state["counts"]) if self._state else {"truncated": 0, "left_out": 0}
        parts: list[NDArray[np.int64]] = []
        starts: list[int] = []
        where: list[str] = []
        filled = 0
        at: dict[str, Any] = {}
        for piece, ids, offset in self._from_state(tokenised):
            while offset < len(ids):
                if piece.number == 0 and offset == 0:
                    starts.append(filled)
                    where.append(piece.document.where)
                end = min(len(ids), offset + self.context - filled)
                parts.append(ids[offset:end])
                filled, offset = filled + end - offset, end
                at = {"place": dataclasses.asdict(piece.place), "piece": piece.number, "token": offset}
                if filled == self.context:
                    made = [make_sequence(_pop_concatenated(parts), tuple(starts), at, tuple(where))]
                    starts, where, filled = [], [], 0
                    if not made[0].label_tokens(self.packing):
                        counts["left_out"] += 1
                    else:
                        number += 1
                        at |= {"sequences": number, "counts": dict(counts)}
                        yield made.pop()  # no local variable holds the sequence while the generator waits
        if filled:  # after the last of `epochs`
            at |= {"sequences": number + 1, "counts": counts}
            last = make_sequence(_pop_concatenated(parts), tuple(starts), at, tuple(where))
            if last.label_tokens(self.packing):
                yield last

    def _from_state(
        self, tokenised: Iterable[tuple[Piece, NDArray[np.int64]]]
    ) -> Iterator[tuple[Piece, NDArray[np.int64], int]]:
        """Yield the pieces with the number of their ids that are used already."""
        complete, tokens, epoch = self._place is None, 0, self._place.epoch if self._place else 0
        for piece, ids in tokenised:
            if piece.place.epoch != epoch:
                if complete and tokens < self.context:
                    raise LongspanError(
                        f"not enough text for one sequence: --data {self.source.data} gives {tokens} tokens, --context "
                        f"needs {self.context}; give more text or a smaller --context",
                        code="LS504",
                    )
                complete, tokens, epoch = True, 0, piece.place.epoch
            tokens += len(ids)
            resumed = self._state and (piece.place, piece.number) == (self._place, self._state["piece"])
            yield piece, ids, self._state["token"] if self._state and resumed else 0


def _pop_concatenated(parts: list[NDArray[np.int64]]) -> NDArray[np.int64]:
    ids = np.concatenate(parts)
    parts.clear()
    return ids


@dataclass(frozen=True)
class StepBatch:
    """The batches of one data rank for one optimizer step (see `collate`); all numbers are those of all data ranks."""

    micro_batches: list[dict[str, Any]]
    tokens: int  # without padding
    padded: int  # with padding
    label_tokens: int  # that the loss is averaged over
    attention_pairs: int  # (query, key), of causal attention
    documents: int  # that start in the sequences; each answer of a preference is one
    checksum: int  # of all ids, to compare the ranks' data
    state: dict[str, Any]  # of the data after this step


def deal(
    sequences: Iterator[Sequence],
    *,
    batch: int,
    micro_batch: int,
    data_size: int,
    data_rank: int,
    pack: Pack,
    context: int | None = None,
    images: Tokenizer | None = None,
    split: Callable[[list[Sequence]], list[dict[str, Any]]] | None = None,
) -> Iterator[StepBatch]:
    """Yield a data rank's batches: of every `batch` sequences, each `data_size`-th group of `micro_batch`, or what
    `split` makes of them, without padding.

    Every rank reads all sequences and counts the labels of all, so no communication is needed. A rank reads the images
    of its own micro-batches only, with the processor of `images`.
    """

    def next_step() -> StepBatch:
        step = [next(sequences) for _ in range(batch)]
        spans = [span for sequence in step for span in sequence.spans(pack)]
        groups = [step[i : i + micro_batch] for i in range(0, batch, micro_batch)]
        checksum = 0
        for sequence in step:
            checksum = zlib.crc32(sequence.ids.tobytes(), checksum)
            checksum = checksum if sequence.trained is None else zlib.crc32(sequence.trained.tobytes(), checksum)
        return StepBatch(
            micro_batches=(
                [collate(group, pack, context, images) for group in groups[data_rank::data_size]]
                if split is None
                else split(step)
            ),
            tokens=sum(len(sequence.ids) for sequence in step),
            padded=sum(
                sum(len(sequence.ids) for sequence in group)
                if split is not None
                else len(group) * _padded_length(group, context)
                for group in groups
            ),
            label_tokens=sum(sequence.label_tokens(pack) for sequence in step),
            attention_pairs=sum((end - start) * (end - start + 1) // 2 for start, end in spans),
            documents=sum(len(sequence.starts) for sequence in step),
            checksum=checksum,
            state=step[-1].state,
        )

    return iter(next_step, None)  # a function and no generator: it holds nothing between steps


_PADDED_TO = 64  # tokens; so that few lengths occur


def _padded_length(sequences: list[Sequence], context: int | None) -> int:
    longest = max(len(sequence.ids) for sequence in sequences)
    return min(-(-longest // _PADDED_TO) * _PADDED_TO, longest if context is None else max(context, longest))


def collate(
    sequences: list[Sequence], pack: Pack, context: int | None = None, images: Tokenizer | None = None
) -> dict[str, torch.Tensor]:
    """Return sequences as a model's inputs, padded to the longest, in steps of 64 tokens up to `context`.

    They are `input_ids` and `labels`, int64 [sequences, tokens]; unless documents share attention also `position_ids`,
    which restart at 0 with every document, and with padding `document_ids`, which are -1 there. With `images`, the
    sequences are chats that may have images, which are read here; the model computes the positions.
    """
    shape = len(sequences), _padded_length(sequences, context)
    input_ids, labels = torch.zeros(shape, dtype=torch.int64), torch.full(shape, _IGNORED)
    positions, documents = torch.arange(shape[1]).repeat(shape[0], 1), torch.full(shape, -1)
    for row, sequence in enumerate(sequences):
        n = len(sequence.ids)
        input_ids[row, :n] = torch.from_numpy(sequence.ids)
        trained = slice(n) if sequence.trained is None else torch.from_numpy(np.flatnonzero(sequence.trained))
        labels[row, trained] = input_ids[row, trained]
        for number, (start, end) in enumerate(sequence.spans(pack)):
            positions[row, start:end] = torch.arange(end - start)
            documents[row, start:end] = number
            if pack != "stream":
                labels[row, start] = _IGNORED  # no token of this document predicts its first one
    out = {"input_ids": input_ids, "labels": labels}
    if images is not None:
        return out | {"attention_mask": (documents >= 0).long()} | _pictures(sequences, shape, images)
    if pack != "stream":
        out["position_ids"] = positions
    if any(len(sequence.ids) < shape[1] for sequence in sequences):
        out |= {"position_ids": positions, "document_ids": documents}
    return out


def _pictures(sequences: list[Sequence], shape: tuple[int, int], tokenizer: Tokenizer) -> dict[str, torch.Tensor]:
    """Return what the processor makes of the images of a batch; values per token are padded with 0."""
    out: dict[str, Any] = {}
    for row, sequence in enumerate(sequences):
        if sequence.shown is not None:
            for key, x in tokenizer.pictures(sequence.shown.text, sequence.shown.where, sequence.ids).items():
                if key in ("mm_token_type_ids", "token_type_ids"):
                    out.setdefault(key, x.new_zeros(shape))[row, : x.shape[1]] = x[0]
                else:
                    out[key] = _joined(out[key], x) if key in out else x
    return out


def _joined(*xs: torch.Tensor) -> torch.Tensor:
    """Concatenate tensors, padded with 0 to the largest."""
    largest = [max(sizes) for sizes in zip(*(x.shape[1:] for x in xs), strict=True)]
    pads = [
        [n for has, wanted in zip(x.shape[:0:-1], largest[::-1], strict=True) for n in (0, wanted - has)] for x in xs
    ]
    return torch.cat([torch.nn.functional.pad(x, pad) for x, pad in zip(xs, pads, strict=True)])


@contextlib.contextmanager
def prefetch(items: Iterator[T], depth: int = 2) -> Iterator[Iterator[T]]:
    """Make the next `depth` items in a thread, so that reading and tokenising overlap with the training."""
    thread = ThreadPoolExecutor(1, "longspan-data")
    ahead = deque(thread.submit(next, items) for _ in range(depth))

    def take() -> T:
        item = ahead.popleft().result()  # or what `items` raised, StopIteration too
        ahead.append(thread.submit(next, items))
        return item

    try:
        yield iter(take, None)  # a function and no generator: it holds no item
    finally:
        thread.shutdown(cancel_futures=True)
