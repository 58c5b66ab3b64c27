"""Packing: a stream of documents becomes sequences of one length, dealt out to data ranks and micro-batches."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import queue
import threading
import zlib
from collections.abc import Iterator
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
class _Run:
    """Ids of one piece of a document, and where they were found."""

    place: Place
    piece: int
    ids: NDArray[np.int64]


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
        number = self._state["sequences"] if self._state else 0
        parts: list[NDArray[np.int64]] = []
        starts: list[int] = []
        filled = 0
        for run, offset in self._runs():
            while offset < len(run.ids):
                if run.piece == 0 and offset == 0:
                    starts.append(filled)
                part = run.ids[offset : offset + self.context - filled]
                parts.append(part)
                filled += len(part)
                offset += len(part)
                if filled == self.context:
                    number += 1
                    state = {**dataclasses.asdict(run.place), "piece": run.piece, "token": offset, "sequences": number}
                    whole = [Sequence(np.concatenate(parts), tuple(starts), state)]
                    parts, starts, filled = [], [], 0
                    yield whole.pop()  # while this waits to go on, it holds nothing of the sequence

    def _runs(self) -> Iterator[tuple[_Run, int]]:
        """The pieces from the state on, each with the number of its ids that are used up already."""
        place, piece, token = None, 0, 0
        if self._state:
            place = Place(**{field.name: self._state[field.name] for field in dataclasses.fields(Place)})
            piece, token = self._state["piece"], self._state["token"]
        whole_epoch, tokens, epoch = place is None, 0, place.epoch if place else 0
        for here, document in self.source.documents(place):
            if here.epoch != epoch:
                if whole_epoch and tokens < self.context:
                    self._refuse(tokens)
                whole_epoch, tokens, epoch = True, 0, here.epoch
            for number, ids in self.tokenizer.pieces(document):
                tokens += len(ids)
                if here != place or number >= piece:
                    yield _Run(here, number, ids), token if here == place and number == piece else 0

    def _refuse(self, tokens: int) -> None:
        raise LongspanError(
            f"not enough text for one sequence: --data {self.source.data} gives {tokens} tokens, --context needs "
            f"{self.context}; give more text or a smaller --context"
        )


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
