"""Packing: a stream of documents becomes sequences of one length, dealt out to data ranks and micro-batches."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import queue
import threading
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
import torch

from longspan.core.errors import LongspanError
from longspan.data.source import DocumentSource, Place

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from longspan.data.tokens import TextTokenizer

Pack = Literal["stream", "documents"]
T = TypeVar("T")

_IGNORED = -100  # the label that no loss is computed for, everywhere in Hugging Face


@dataclass(frozen=True)
class Sequence:
    """`context` tokens of the stream.

    Attributes:
        ids: int64 [context].
        starts: where in it a document begins, ascending; position 0 is among them only if one begins there.
        state: what `SequenceStream` needs to go on after this sequence (plain values, to be kept in a checkpoint).
    """

    ids: NDArray[np.int64]
    starts: tuple[int, ...]
    state: dict[str, Any]

    def spans(self, pack: Pack) -> list[tuple[int, int]]:
        """The runs of tokens [begin, end) that attend to one another: all, or each document by itself.

        A document that the sequence before has begun counts from 0: its beginning is not in sight.
        """
        inner = self.starts if pack == "documents" else ()
        return list(itertools.pairwise(sorted({0, *inner, len(self.ids)})))


@dataclass(frozen=True)
class Piece:
    """A piece of a document that is tokenised by itself, and where it was found.

    Attributes:
        place: of the document.
        number: of the piece in it.
        last: whether the document ends with it.
        text: its characters.
    """

    place: Place
    number: int
    last: bool
    text: str


class SequenceStream:
    """Sequences of `context` tokens: documents one after the other, cut wherever a sequence is full, nothing dropped.

    After the last document of the data comes the first of the next epoch, in another order.

    Args:
        source: the documents.
        tokenizer: makes ids of them.
        context: tokens per sequence.
        state: of the sequence after which to go on; None for the beginning. It may come from another context.

    Raises (on iteration):
        LongspanError: if all the data gives fewer tokens than one sequence needs.
    """

    def __init__(
        self, source: DocumentSource, tokenizer: TextTokenizer, context: int, state: dict[str, Any] | None = None
    ) -> None:
        self.source, self.tokenizer, self.context = source, tokenizer, context
        self._state = state

    def __iter__(self) -> Iterator[Sequence]:
        return self.pack((piece, self.ids_of(piece)) for piece in self.pieces())

    def pieces(self) -> Iterator[Piece]:
        """What is to be tokenised from the state on; the pieces of its document that are used up are left out."""
        place, used = None, 0
        if self._state:
            place, used = _place_of(self._state), self._state["piece"]
        for here, document in self.source.documents(place):
            parts = self.tokenizer.parts(document)
            for number in range(used if here == place else 0, len(parts)):
                yield Piece(here, number, number == len(parts) - 1, parts[number])

    def ids_of(self, piece: Piece) -> NDArray[np.int64]:
        """The ids of a piece."""
        return self.tokenizer.ids(piece.text, first=piece.number == 0, last=piece.last)

    def pack(self, tokenised: Iterable[tuple[Piece, NDArray[np.int64]]]) -> Iterator[Sequence]:
        """The sequences, from the ids of `pieces`, whoever has made them.

        Raises:
            LongspanError: as iteration.
        """
        number = self._state["sequences"] if self._state else 0
        parts: list[NDArray[np.int64]] = []
        starts: list[int] = []
        filled = 0
        for piece, ids, offset in self._from_state(tokenised):
            while offset < len(ids):
                if piece.number == 0 and offset == 0:
                    starts.append(filled)
                part = ids[offset : offset + self.context - filled]
                parts.append(part)
                filled += len(part)
                offset += len(part)
                if filled == self.context:
                    number += 1
                    where = {"piece": piece.number, "token": offset, "sequences": number}
                    whole = [Sequence(np.concatenate(parts), tuple(starts), dataclasses.asdict(piece.place) | where)]
                    parts, starts, filled = [], [], 0
                    del part
                    yield whole.pop()  # while this waits to go on, it holds nothing of the sequence

    def _from_state(
        self, tokenised: Iterable[tuple[Piece, NDArray[np.int64]]]
    ) -> Iterator[tuple[Piece, NDArray[np.int64], int]]:
        """The pieces with the number of their ids that are used up already."""
        place = _place_of(self._state) if self._state else None
        whole_epoch, tokens, epoch = place is None, 0, place.epoch if place else 0
        for piece, ids in tokenised:
            if piece.place.epoch != epoch:
                if whole_epoch and tokens < self.context:
                    self._refuse(tokens)
                whole_epoch, tokens, epoch = True, 0, piece.place.epoch
            tokens += len(ids)
            at_state = self._state is not None and piece.place == place and piece.number == self._state["piece"]
            yield piece, ids, self._state["token"] if self._state is not None and at_state else 0

    def _refuse(self, tokens: int) -> None:
        raise LongspanError(
            f"not enough text for one sequence: --data {self.source.data} gives {tokens} tokens, --context needs "
            f"{self.context}; give more text or a smaller --context"
        )


def _place_of(state: dict[str, Any]) -> Place:
    return Place(**{field.name: state[field.name] for field in dataclasses.fields(Place)})


@dataclass(frozen=True)
class StepBatch:
    """What one data rank needs for one optimizer step.

    Attributes:
        micro_batches: model inputs: `input_ids` and `labels`, int64 [micro_batch, context], and with
            `pack="documents"` also `position_ids`, which begin again at 0 with every document.
        label_tokens: tokens that the loss of the whole step is averaged over, on all data ranks together.
        attention_pairs: pairs (query, key) of causal attention in the whole step, likewise.
        checksum: of the whole step's ids: equal on all ranks, or they do not read the same data.
        state: of the data after this step.
    """

    micro_batches: list[dict[str, Any]]
    label_tokens: int
    attention_pairs: int
    checksum: int
    state: dict[str, Any]


def deal(
    sequences: Iterator[Sequence], *, batch: int, micro_batch: int, data_size: int, data_rank: int, pack: Pack
) -> Iterator[StepBatch]:
    """Deal the next `batch` sequences of every optimizer step out to the data ranks, `micro_batch` at a time.

    Every rank reads all of them, keeps its own and counts the labels of all, so nothing need be exchanged.
    """
    while True:
        step = [next(sequences) for _ in range(batch)]
        spans = [span for sequence in step for span in sequence.spans(pack)]
        mine = [i for i in range(0, batch, micro_batch) if i // micro_batch % data_size == data_rank]
        checksum = 0
        for sequence in step:
            checksum = zlib.crc32(sequence.ids.tobytes(), checksum)
        dealt = [
            StepBatch(
                micro_batches=[_collate(step[i : i + micro_batch], pack) for i in mine],
                label_tokens=sum(end - begin - 1 for begin, end in spans),
                attention_pairs=sum((end - begin) * (end - begin + 1) // 2 for begin, end in spans),
                checksum=checksum,
                state=step[-1].state,
            )
        ]
        del step, sequence
        yield dealt.pop()  # held by whoever takes it alone


def _collate(sequences: list[Sequence], pack: Pack) -> dict[str, torch.Tensor]:
    input_ids = torch.from_numpy(np.stack([sequence.ids for sequence in sequences]))
    labels = input_ids.clone()
    if pack == "stream":
        return {"input_ids": input_ids, "labels": labels}
    positions = torch.empty_like(input_ids)
    for row, sequence in enumerate(sequences):
        for begin, end in sequence.spans(pack):
            positions[row, begin:end] = torch.arange(end - begin)
            labels[row, begin] = _IGNORED  # nothing in this document predicts its first token
    return {"input_ids": input_ids, "labels": labels, "position_ids": positions}


@contextlib.contextmanager
def prefetch(items: Iterator[T], depth: int = 2) -> Iterator[Iterator[T]]:
    """Make the next `depth` items in a thread, so that reading and tokenising overlap with the step before."""
    ready: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue(maxsize=depth)
    stop = threading.Event()

    def put(item: T | None, error: BaseException | None) -> None:
        while not stop.is_set():
            with contextlib.suppress(queue.Full):
                return ready.put((item, error), timeout=0.1)

    def work() -> None:
        try:
            for item in items:
                put(item, None)
                if stop.is_set():
                    return
            put(None, StopIteration())
        except BaseException as error:  # handed to the consumer
            put(None, error)

    def consume() -> Iterator[T]:
        while True:
            taken, error = ready.get()
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            held = [taken]
            del taken
            yield held.pop()  # type: ignore[misc]

    thread = threading.Thread(target=work, name="longspan-data", daemon=True)
    thread.start()
    try:
        yield consume()
    finally:
        stop.set()
        thread.join(timeout=10)
