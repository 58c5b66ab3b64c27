"""Width per sample: which ranks compute which samples of a batch, and in which round.

A round is one forward and backward of every rank. In it the ranks form groups of neighbours. A group of `width` ranks
shares one row of one or several samples: its tokens are sharded over the sequence axes, its samples are packed
documents. Ranks gather weights together, so they wait for each other in every layer, and a round takes as long as its
busiest rank. The schedule keeps rounds short: a long sample gets many ranks, short ones share a rank.

This module needs no torch. Costs are the planner's: attention by its mask, the rest by tokens, communication by width.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

from longspan.core.errors import LongspanError
from longspan.core.formatting import listed
from longspan.core.parallel import axes_of_width, widths_of
from longspan.core.validation import LARGEST_COUNT, check_number
from longspan.plan.cost.communication import method_sent
from longspan.plan.cost.times import head_seconds, hidden_layer_seconds, layer_seconds, seconds_of
from longspan.plan.cost.weights import layer_weights_sent
from longspan.plan.hardware import Hardware
from longspan.plan.job import CostContext, Job
from longspan.plan.shape import ModelShape

_SHORTEST = 32  # tokens; shorter samples cost in proportion
_PER_OCTAVE = 3  # lengths whose costs are computed; between them they are interpolated
_SLACK = 1.02  # load of a rank over the mean, above which a sample gets more ranks
_GOOD = 1.03  # of the ideal time; below it more rounds are not tried
_TRIES = 2  # of more rounds, after the best


@dataclass(frozen=True)
class SampleCosts:
    """The planner's seconds for samples of a model on a mesh.

    Attributes:
        model: the model; None if the planner cannot read it: a rank's work is then its tokens.
        job: its dtype, memory options and collectives, on the mesh of all ranks; the widest group has its ring and
            ulysses axes. Its context and batch do not count.
        hardware: the kind of GPU.
    """

    model: ModelShape | None
    job: Job
    hardware: Hardware
    _rows: dict[tuple[int, int], float] = field(default_factory=dict, compare=False, repr=False)

    def samples(self, lengths: Sequence[int], width: int) -> list[float]:
        """Return the seconds that each sample adds to a row, for each of the row's `width` ranks."""
        grid, base = [0.0, float(_SHORTEST)], self.row(width)
        while lengths and grid[-1] < max(lengths):
            grid.append(math.ceil(_SHORTEST * 2 ** ((len(grid) - 1) / _PER_OCTAVE)))
        seconds = [0.0, *(self._row(int(tokens), width) - base for tokens in grid[1:])]
        slopes = [(y - x) / (b - a) for (a, b), (x, y) in zip(pairwise(grid), pairwise(seconds), strict=True)]
        places = (bisect.bisect_left(grid, n) - 1 for n in lengths)
        return [seconds[i] + slopes[i] * (n - grid[i]) for n, i in zip(lengths, places, strict=True)]

    def row(self, width: int) -> float:
        """Return the seconds of a row that do not depend on its samples: of messages, however short."""
        return max(0.0, 2 * self._row(_SHORTEST, width) - self._row(2 * _SHORTEST, width))

    @cached_property
    def weights(self) -> float:
        """Seconds of the weights' communication in a round, which a GPU overlaps with computing."""
        if self.model is None:
            return 0.0
        c = CostContext(self.model, self.job)
        return sum(
            n * seconds_of(layer_weights_sent(layer, c), c, self.hardware) for layer, n in self.model.layer_kinds
        )

    def _row(self, tokens: int, width: int) -> float:
        """Return the seconds of a row of one sample."""
        if self.model is None:
            return tokens / width
        key = tokens, width
        if key not in self._rows:
            ring, ulysses = axes_of_width(self.job.parallel.ulysses, width)
            job = replace(self.job, context=tokens, batch=1).on(data=1, ring=ring, ulysses=ulysses)
            c = CostContext(self.model, job)
            seconds = head_seconds(c, self.hardware)
            for layer, count in self.model.layer_kinds:
                computing = layer_seconds(layer, c, self.hardware)
                sent = seconds_of(method_sent(layer, c), c, self.hardware)
                exposed = max(0.0, sent - hidden_layer_seconds(layer, computing, c, self.hardware))
                seconds += count * (computing.forward + computing.backward + exposed)
            self._rows[key] = seconds
        return self._rows[key]


@dataclass(frozen=True)
class Group:
    """Neighbouring ranks that share a row of samples in one round.

    Attributes:
        first: its first rank, in the order of data x ring x ulysses.
        width: number of its ranks; they begin at a multiple of it within their sequence group.
        samples: indices of its samples, ascending.
    """

    first: int
    width: int
    samples: tuple[int, ...]


@dataclass(frozen=True)
class Schedule:
    """The rounds of one batch.

    Attributes:
        rounds: of each round its groups, by their first ranks. A rank without a group is idle.
        ranks: of the mesh without its tensor axis.
        seconds: of each round, by the planner, the time of each rank.
    """

    rounds: tuple[tuple[Group, ...], ...]
    ranks: int
    seconds: tuple[tuple[float, ...], ...]

    def groups_of(self, rank: int) -> tuple[Group | None, ...]:
        """Return the group of a rank in each round; None where it is idle."""
        return tuple(
            next((group for group in groups if group.first <= rank < group.first + group.width), None)
            for groups in self.rounds
        )

    @property
    def balance(self) -> float:
        """The busiest rank of each round over the mean of all ranks, summed over the rounds: 1 is the best."""
        total = sum(map(sum, self.seconds))
        return sum(map(max, self.seconds)) * self.ranks / total if total else 1.0

    def __str__(self) -> str:
        lines = [f"{len(self.rounds)} rounds, busiest rank {self.balance:.2f} of the mean"]
        for number, groups in enumerate(self.rounds):
            rows = (f"{g.width} x {len(g.samples)}" for g in groups)
            lines.append(f"round {number}: {listed(list(rows))} (ranks x samples)")
        return "\n".join(lines)


def make_schedule(lengths: Sequence[int], costs: SampleCosts, tokens_per_rank: int) -> Schedule:
    """Return which ranks compute which samples, in which round; the same for the same arguments.

    Args:
        lengths: tokens of each sample.
        costs: of the model on its mesh.
        tokens_per_rank: the most tokens of a rank in a round, limited by its memory.

    Raises:
        LongspanError: for a sample without tokens, or one that all ranks of a sequence group cannot hold.
    """
    mesh = costs.job.parallel
    check_lengths(lengths, mesh.sequence_ranks, tokens_per_rank)
    ranks = mesh.data * mesh.sequence_ranks
    if not lengths:
        return Schedule((), ranks, ())
    samples = _Samples(lengths, costs, tokens_per_rank)
    fewest, most = -(-sum(lengths) // (ranks * tokens_per_rank)), len(lengths) + 1  # each alone in a round fits
    best: _Packing | None = None
    first = tries = 0

    def pays(rounds: int) -> bool:
        ideal = samples.seconds_narrowest / ranks
        return best is None or best.total > max(_GOOD * ideal, rounds * costs.weights)

    # Every rank busy for about the same time in every round: long samples get many ranks.
    rounds = fewest
    while tries <= _TRIES and pays(rounds):
        other = _Packing(samples, rounds)
        if other.fill(_SLACK * samples.target(rounds)) and (best is None or other.total < best.total):
            best, first, tries = other, first or rounds, 0
        tries += best is not None
        if rounds == most:
            break
        rounds = min(most, rounds + 1 + rounds // 8)
    assert best is not None
    # No sample wider than its tokens need: fewest messages.
    for rounds in sorted({first, max(first, samples.rounds_of_narrowest)}):
        other = _Packing(samples, rounds)
        if pays(rounds) and other.fill(math.inf) and other.total < best.total:
            best = other
    return best.schedule()


def check_lengths(lengths: Sequence[int], size: int, tokens_per_rank: int) -> None:
    """Raise for a sample without tokens, or one that `size` ranks cannot hold."""
    check_number("tokens_per_rank", tokens_per_rank, 1, LARGEST_COUNT, whole=True)
    most = size * tokens_per_rank
    for index, length in enumerate(lengths):
        if type(length) is not int or not 0 < length <= most:
            check_number(f"the length of sample {index}", length, 1, LARGEST_COUNT, whole=True)
            raise LongspanError(
                f"sample {index} has {length} tokens, and {size} ranks of {tokens_per_rank} tokens hold {most}; use a "
                f"mesh with ring x ulysses of at least {-(-length // tokens_per_rank)}, or tokens_per_rank of at least "
                f"{-(-length // size)}, or shorten the sample"
            )


class _Samples:
    """The samples of a batch by length, the shortest first, with their seconds at each width."""

    def __init__(self, lengths: Sequence[int], costs: SampleCosts, room: int) -> None:
        self.costs, self.room = costs, room
        self.size = costs.job.parallel.sequence_ranks
        self.ranks = costs.job.parallel.data * self.size
        self.widths = widths_of(self.size)
        self.order = sorted(range(len(lengths)), key=lambda index: (lengths[index], -index))
        self.lengths = [lengths[index] for index in self.order]
        self.seconds = {width: costs.samples(self.lengths, width) for width in self.widths}
        narrowest = [next(w for w in self.widths if n <= w * room) for n in self.lengths]
        self.seconds_narrowest = sum(w * self.seconds[w][place] for place, w in enumerate(narrowest))
        # Two samples that need several ranks rarely fit into one group: a narrower one would do for one of them.
        of_one = sum(n for n, w in zip(self.lengths, narrowest, strict=True) if w == 1)
        self.rounds_of_narrowest = -(-(sum(w for w in narrowest if w > 1) + -(-of_one // room)) // self.ranks) + 1
        self.sums = {width: [0.0, *itertools.accumulate(self.seconds[width])] for width in self.widths}

    def ends(self, limit: float) -> dict[int, int]:
        """Return for each width the first sample that needs more ranks, to take at most `limit` seconds if it can."""
        ends, last = {}, 0
        for width in self.widths:
            fits = bisect.bisect_right(self.lengths, width * self.room)
            quick = bisect.bisect_right(self.seconds[width], limit)
            last = ends[width] = max(last, len(self.order) if width == self.size else min(fits, quick))
        return ends

    def target(self, rounds: int) -> float:
        """Return the seconds that a rank should be busy in each of `rounds` rounds.

        A sample that keeps all ranks of its group busy for longer has a round of its own, and does not count.
        """
        target = math.inf
        for _ in range(3):
            ends = self.ends(_SLACK * target)
            start, total = 0, 0.0
            for width in self.widths:
                total += width * (self.sums[width][ends[width]] - self.sums[width][start])
                start = ends[width]
            giants = len(self.order) - bisect.bisect_right(self.seconds[self.size], target)
            total -= self.size * (self.sums[self.size][-1] - self.sums[self.size][len(self.order) - giants])
            free = self.ranks * rounds - self.size * giants
            if free <= 0 or total <= 0:
                return self.seconds[self.size][-1]
            target = total / free
        return target


@dataclass
class _Open:
    """A group in the making."""

    round: int
    first: int
    width: int
    load: float
    tokens: int = 0
    samples: list[int] = field(default_factory=list)


class _Packing:
    """Samples in groups of `rounds` rounds.

    A sample gets the fewest ranks that hold it and take at most `limit` seconds. Samples of several ranks come first,
    the longest first, each in the fullest group of its width that has time for it (best-fit decreasing). The others go
    to the rank that is least busy, the longest first.
    """

    def __init__(self, samples: _Samples, rounds: int) -> None:
        self.samples = samples
        self.used = [[False] * samples.ranks for _ in range(rounds)]
        self.groups = list[_Open]()

    def fill(self, limit: float) -> bool:
        """Put all samples into groups; return False if they do not fit."""
        samples, start = self.samples, len(self.samples.order)
        ends = samples.ends(limit)
        for width in reversed(samples.widths):
            narrower = max((ends[w] for w in samples.widths if w < width), default=0)
            places, blocks, own, late = range(start - 1, narrower - 1, -1), self._free_blocks(width), list[_Open](), []
            start = narrower
            if width == 1:
                self.groups += [self._opened(*block, 1) for block in blocks]
            for place in places:
                free = [g for g in own if g.load + samples.seconds[width][place] <= limit and self._holds(g, place)]
                block = None if free or width == 1 else next(blocks, None)
                if block is not None:
                    free = [self._opened(*block, width)]
                    own += free
                    self.groups += free
                if free:
                    self._put(max(free, key=lambda group: group.load), place)
                else:
                    late.append(place)
            for place in late:
                wide = [g for g in self.groups if g.width >= width and self._holds(g, place)]
                if not wide:
                    return False
                self._put(min(wide, key=lambda g: g.load + samples.seconds[g.width][place]), place)
        return True

    def _free_blocks(self, width: int) -> Iterator[tuple[int, int]]:
        """Yield round and first rank of each place for a group."""
        for number, used in enumerate(self.used):
            for first in range(0, self.samples.ranks, width):
                if not any(used[first : first + width]):
                    yield number, first

    def _opened(self, number: int, first: int, width: int) -> _Open:
        self.used[number][first : first + width] = [True] * width
        return _Open(number, first, width, self.samples.costs.row(width))

    def _holds(self, group: _Open, place: int) -> bool:
        return group.tokens + self.samples.lengths[place] <= group.width * self.samples.room

    def _put(self, group: _Open, place: int) -> None:
        group.load += self.samples.seconds[group.width][place]
        group.tokens += self.samples.lengths[place]
        group.samples.append(self.samples.order[place])

    # --- its time

    @cached_property
    def seconds(self) -> list[list[float]]:
        """Seconds of each rank in each round."""
        seconds = [[0.0] * self.samples.ranks for _ in self.used]
        for group in self.groups:
            if group.samples:
                seconds[group.round][group.first : group.first + group.width] = [group.load] * group.width
        return seconds

    @property
    def total(self) -> float:
        """Seconds of all rounds."""
        costs = self.samples.costs
        rounds = [max(row) for row in self.seconds if any(row)]
        if costs.hardware.overlaps:
            return sum(max(seconds, costs.weights) for seconds in rounds)
        return sum(rounds) + costs.weights * len(rounds)

    def schedule(self) -> Schedule:
        rounds = [list[Group]() for _ in self.used]
        for group in sorted(self.groups, key=lambda group: group.first):
            if group.samples:
                rounds[group.round].append(Group(group.first, group.width, tuple(sorted(group.samples))))
        kept = [number for number, groups in enumerate(rounds) if groups]
        seconds = self.seconds
        return Schedule(
            tuple(tuple(rounds[number]) for number in kept),
            self.samples.ranks,
            tuple(tuple(seconds[number]) for number in kept),
        )
