"""Share tokenisation over the ranks: each tokenises some pieces of text, and all receive the ids of all.

Where a sequence starts depends on the number of ids before it, so no rank can find its own sequences from a part of the
text. Ids are small (4 bytes a token), but making them is slow. So pieces of text are assigned to ranks in rounds, by a
rule that every rank follows alone; each rank tokenises its pieces ahead of the training, in a thread; and an all-reduce
merges the ids of a round. The stream equals that of one rank, to the bit.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist

from longspan.comm.objects import gather_objects, on_every_rank
from longspan.core.errors import LongspanError
from longspan.core.formatting import format_ranks, odd_ones
from longspan.data.stream import Piece, SequenceStream, prefetch
from longspan.data.stream import Sequence as TokenSequence

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ids = NDArray[np.int64]

ROUNDS_AHEAD = 10
"""Rounds that a rank tokenises in advance: a step takes one to five, by the characters of a token."""


@dataclass(frozen=True)
class Round:
    """Consecutive pieces without text, the ids of those that this rank tokenised, and a checksum of all text."""

    pieces: list[Piece]
    mine: dict[int, Ids]
    checksum: int


def rounds(stream: SequenceStream, characters: int, ranks: int, rank: int) -> Iterator[Round]:
    """Yield the pieces of `stream` in rounds of at least `characters`; tokenise this rank's.

    A piece is assigned to the rank with the fewest characters so far, which balances the work.
    """
    loads = [0] * ranks
    pieces: list[Piece] = []
    mine: dict[int, Ids] = {}
    size = checksum = 0
    for piece in stream.pieces():
        owner = loads.index(min(loads))
        loads[owner] += len(piece.text)
        if owner == rank:
            mine[len(pieces)] = stream.ids_of(piece)
        checksum = zlib.crc32(f"{piece.place} {piece.number} {piece.text}".encode(), checksum)
        size += len(piece.text)
        pieces.append(piece.without_text())
        if size >= characters:
            yield Round(pieces, mine, checksum)
            pieces, mine, size, checksum = [], {}, 0, 0
    if pieces:  # after the last of the stream's epochs
        yield Round(pieces, mine, checksum)


def merge_rounds(mine: Iterator[Round], group: dist.ProcessGroup, data: str) -> Iterator[tuple[Piece, Ids]]:
    """Yield all pieces in order with their ids, from each rank's `rounds`. Collective over `group`: all ranks' hosts.

    Raise on every rank if one cannot read or tokenise its text, or ranks read different text.
    """
    while True:
        now = on_every_rank(lambda: next(mine, None), group)
        if now is None:
            return
        lengths = {index: len(ids) for index, ids in now.mine.items()}
        checksums, every_length = zip(*gather_objects((now.checksum, lengths), group), strict=True)
        check_same_text(checksums, data)
        merged = {index: length for of_rank in every_length for index, length in of_rank.items()}
        ids = _sum(now.mine, [merged[index] for index in range(len(merged))], group)
        pieces = list(zip(now.pieces, ids, strict=True))[::-1]
        del now, ids
        while pieces:
            yield pieces.pop()  # do not hold consumed ids


@contextlib.contextmanager
def shared_sequences(
    stream: SequenceStream, characters: int, group: dist.ProcessGroup | None
) -> Iterator[Iterator[TokenSequence]]:
    """Yield the sequences of a stream on every rank of `group`, in rounds of `characters` that are made ahead."""
    if group is None:
        yield iter(stream)
        return
    mine = rounds(stream, characters, dist.get_world_size(group), dist.get_rank(group))
    with prefetch(mine, depth=ROUNDS_AHEAD) as ahead:
        yield stream.pack(merge_rounds(ahead, group, stream.source.data))


def check_same_text(checksums: Sequence[int], data: str) -> None:
    """Raise if the ranks' checksums of their text differ, naming the ranks that differ from most."""
    if odd := odd_ones(checksums):
        raise LongspanError(
            f"the ranks read different data (unlike most: {format_ranks(odd)}); every machine needs the same files in "
            f"--data {data}, and the same tokenizer"
        )


def _sum(mine: dict[int, Ids], lengths: list[int], group: dist.ProcessGroup) -> list[Ids]:
    """Return the ids of every piece: the sum over ranks, each with zeros for the others' pieces."""
    ends = np.cumsum(lengths)
    merged = torch.zeros(int(ends[-1]), dtype=torch.int32)
    for index, ids in mine.items():
        merged[int(ends[index]) - len(ids) : int(ends[index])] = torch.from_numpy(ids)
    dist.all_reduce(merged, group=group)
    return [ids.astype(np.int64) for ids in np.split(merged.numpy(), ends[:-1])]
