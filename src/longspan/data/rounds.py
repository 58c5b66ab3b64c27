"""Tokenising shared out over the ranks: each makes the ids of its pieces, and all get the ids of all.

Where a sequence begins depends on how many ids everything before it has, so no rank can know its own sequences from its
own share of the text. Ids are small, though (4 bytes a token), and making them is not. So pieces of text are dealt out
in rounds, by a rule that every rank follows alone; each rank tokenises its own, ahead of the training, in a thread; and
when a round is needed, one sum over the ranks puts its ids together. The stream is the same to the bit as on one rank.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

import numpy as np
import torch
import torch.distributed as dist

from longspan.comm.objects import gather_objects
from longspan.core.errors import LongspanError
from longspan.core.rank_differences import odd_ones
from longspan.data.stream import Piece, SequenceStream

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ids = NDArray[np.int64]

ROUNDS_AHEAD = 10
"""Rounds whose own share a rank has tokenised in advance: a step takes one to five, by the characters of a token."""


@dataclass(frozen=True)
class Round:
    """Pieces that follow one another, shared out.

    Attributes:
        pieces: without their text.
        mine: the ids of those that this rank has tokenised, by their number in the round.
        checksum: of all their text: equal on all ranks, or they do not read the same data.
    """

    pieces: list[Piece]
    mine: dict[int, Ids]
    checksum: int


def rounds(stream: SequenceStream, characters: int, ranks: int, rank: int) -> Iterator[Round]:
    """The pieces of `stream` in rounds of at least `characters`, this rank's tokenised.

    A piece is given to the rank that has had the fewest characters so far, so that all have about as much to do.
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
        pieces.append(dataclasses.replace(piece, text=""))
        if size >= characters:
            yield Round(pieces, mine, checksum)
            pieces, mine, size, checksum = [], {}, 0, 0


def together(
    own: Iterator[Round], group: dist.ProcessGroup, refuse: Callable[[list[int]], NoReturn]
) -> Iterator[tuple[Piece, Ids]]:
    """All pieces in order with their ids, from the rounds of every rank. Collective: all ranks ask alike.

    Args:
        own: this rank's `rounds`.
        group: of all ranks, of hosts.
        refuse: is called, on every rank, with those that read other text than most.

    Raises:
        LongspanError: on every rank, if one cannot read or tokenise.
    """
    while True:
        mine, problem = _next(own)
        lengths = {} if mine is None else {n: len(ids) for n, ids in mine.mine.items()}
        said = gather_objects((problem and str(problem), mine and mine.checksum, lengths), group)
        if problem is not None and not isinstance(problem, LongspanError):
            raise problem
        problems = [text for text, _, _ in said if text]
        if problems:
            alike = len(problems) == len(said) and len(set(problems)) == 1
            where = "" if alike else f"rank {next(rank for rank, (text, _, _) in enumerate(said) if text)}: "
            raise LongspanError(f"{where}{problems[0]}") from problem
        if odd := odd_ones([checksum for _, checksum, _ in said]):
            refuse(odd)
        assert mine is not None
        every = {number: length for _, _, of_rank in said for number, length in of_rank.items()}
        pieces = list(zip(mine.pieces, _sum(mine.mine, [every[n] for n in range(len(every))], group), strict=True))
        del mine
        pieces.reverse()
        while pieces:
            yield pieces.pop()  # what has been taken is not held


def _next(own: Iterator[Round]) -> tuple[Round | None, Exception | None]:
    try:
        return next(own), None
    except Exception as error:  # the other ranks must hear of it
        return None, error


def _sum(mine: dict[int, Ids], lengths: list[int], group: dist.ProcessGroup) -> list[Ids]:
    """The ids of every piece: each rank adds its own to zeros."""
    ends = np.cumsum(lengths)
    whole = torch.zeros(int(ends[-1]), dtype=torch.int32)
    for number, ids in mine.items():
        whole[int(ends[number]) - len(ids) : int(ends[number])] = torch.from_numpy(ids)
    dist.all_reduce(whole, group=group)
    return [ids.astype(np.int64) for ids in np.split(whole.numpy(), ends[:-1])]
