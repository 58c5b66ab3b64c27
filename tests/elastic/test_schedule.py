"""Schedules of elastic batches: valid, balanced, quick, and the same for the same arguments."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from longspan.attn.mask import Mask
from longspan.attn.prepare import pairs_of_blocks
from longspan.core.errors import LongspanError
from longspan.core.layout import choose_layout
from longspan.core.parallel import axes_of_width, widths_of
from longspan.elastic.scheduler import SampleCosts, Schedule, make_schedule
from longspan.plan import Job, ParallelConfig, read_hardware, read_model

MODEL = read_model("llama-3.1-8b")
MESHES = [ParallelConfig(1, 1, 2), ParallelConfig(1, 1, 4), ParallelConfig(1, 1, 8), ParallelConfig(1, 4, 2)]


def costs_on(mesh: ParallelConfig) -> SampleCosts:
    return SampleCosts(MODEL, Job(context=1, parallel=mesh), read_hardware("h100"))


def lengths_of(kind: str, count: int, scale: int = 1) -> list[int]:
    """Return lengths from 30 to 3,000, times `scale`."""
    draw = random.Random(f"{kind} {count}")
    made = {
        "uniform": lambda: draw.randint(30, 3000),
        "log-normal": lambda: min(3000, max(30, int(draw.lognormvariate(5.5, 1.1)))),
        "one long": lambda: draw.randint(30, 200),
    }[kind]
    lengths = [made() for _ in range(count)]
    return [scale * n for n in ([3000, *lengths[1:]] if kind == "one long" else lengths)]


def work_of_ranks(schedule: Schedule, lengths: list[int], mesh: ParallelConfig) -> list[list[float]]:
    """Count the FLOPs of each rank in each round: of its tokens, padding included, and of the pairs that it attends."""
    layer = MODEL.layers[0]
    per_token = 6.0 * (layer.matmul_params_active * len(MODEL.layers) + MODEL.vocab * MODEL.d_model)
    per_pair = 3.5 * 2 * layer.mixing.q_heads * (layer.mixing.head_dim + layer.mixing.v_head_dim) * len(MODEL.layers)
    rounds = []
    for groups in schedule.rounds:
        work = [0.0] * schedule.ranks
        for group in groups:
            ring, ulysses = axes_of_width(mesh.ulysses, group.width)
            layout, n = choose_layout("auto", ring, ulysses), sum(lengths[i] for i in group.samples)
            ends = list(itertools.accumulate((lengths[i] for i in group.samples), initial=0))
            mask = Mask(True, segments=(tuple(itertools.pairwise(ends)),))
            pairs = pairs_of_blocks(layout, (n, n), mask, 1)
            for rank in range(group.width):
                attended = sum(pairs[rank // ulysses]) / ulysses
                work[group.first + rank] = per_token * layout.local_length(n) + per_pair * attended
        rounds.append(work)
    return rounds


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("kind", ["uniform", "log-normal", "one long"])
def test_counted_work_is_balanced(kind: str, mesh: ParallelConfig) -> None:
    """The busiest ranks of the rounds do at most 1.12 of the mean.

    The schedule balances seconds, and per pair short samples' attention takes more of them than that of long ones.
    """
    costs = costs_on(mesh)
    for count, scale in ((64, 1), (200, 1), (64, 40)):
        lengths = lengths_of(kind, count, scale)
        schedule = make_schedule(lengths, costs, -(-max(lengths) // mesh.sequence_ranks))
        work = work_of_ranks(schedule, lengths, mesh)
        busiest = sum(map(max, work)) * schedule.ranks / sum(map(sum, work))
        assert busiest <= 1.12, (count, scale, busiest, str(schedule))


@pytest.mark.parametrize(
    "mesh",
    [ParallelConfig(1, 1, 6), ParallelConfig(2, 1, 4), ParallelConfig(2, 3, 2), ParallelConfig(3, 1, 1)],
    ids=str,
)
def test_valid(mesh: ParallelConfig) -> None:
    """Every sample has one group, groups of a round are disjoint and aligned, and no rank has too many tokens."""
    costs, room = costs_on(mesh), 1024
    for kind, count in itertools.product(("uniform", "log-normal", "one long"), (1, 2, 7, 50)):
        lengths = [min(n, room * mesh.sequence_ranks) for n in lengths_of(kind, count)]
        schedule = make_schedule(lengths, costs, room)
        assert schedule == make_schedule(lengths, costs_on(mesh), room)
        groups = [group for round_ in schedule.rounds for group in round_]
        assert sorted(i for group in groups for i in group.samples) == list(range(count))
        for group in groups:
            assert (
                group.width in widths_of(mesh.sequence_ranks) and group.first % mesh.sequence_ranks % group.width == 0
            )
            assert sum(lengths[i] for i in group.samples) <= room * group.width
        for round_, seconds in zip(schedule.rounds, schedule.seconds, strict=True):
            ranks = [rank for group in round_ for rank in range(group.first, group.first + group.width)]
            assert len(set(ranks)) == len(ranks) and max(ranks) < schedule.ranks
            assert [s > 0 for s in seconds] == [rank in ranks for rank in range(schedule.ranks)]
        of_rank = [schedule.groups_of(rank) for rank in range(schedule.ranks)]
        assert all(
            group in round_ or group is None
            for mine in of_rank
            for group, round_ in zip(mine, schedule.rounds, strict=True)
        )


def test_a_thousand_samples_are_balanced() -> None:
    costs, lengths = costs_on(ParallelConfig(1, 1, 8)), lengths_of("log-normal", 1000)
    assert make_schedule(lengths, costs, 1024).balance < 1.05


def test_costs_follow_the_planner() -> None:
    """Interpolated seconds are near those of the lengths themselves, and a row's fixed part counts once."""
    costs = costs_on(ParallelConfig(1, 1, 4))
    for width, n in itertools.product((1, 4), (16, 100, 777, 30_000)):
        whole = costs._row(n, width)
        assert costs.row(width) + costs.samples([n], width)[0] == pytest.approx(whole, rel=0.02)
    assert costs.row(1) == pytest.approx(0, abs=1e-5) and costs.row(4) > 0
    unknown = SampleCosts(None, Job(context=1).on(ulysses=4), read_hardware("h100"))
    assert unknown.samples([100], 4) == [25] and unknown.row(4) == unknown.weights == 0


@pytest.mark.parametrize(("count", "ranks", "seconds"), [(3, 4, 768), (5, 8, 640), (9, 8, 1152)])
def test_few_long_samples_share_all_ranks(count: int, ranks: int, seconds: float) -> None:
    costs = SampleCosts(None, Job(context=1).on(ulysses=ranks), read_hardware("h100"))  # a token costs 1
    schedule = make_schedule([1024] * count, costs, 1024)
    assert sum(map(max, schedule.seconds)) <= seconds, str(schedule)


def test_slow_links_make_narrow_groups() -> None:
    """Where messages take longest, steps take at most 1.15 of the least time: no sample wider than its tokens need."""
    h100 = read_hardware("h100")
    slow = replace(h100, gpus_per_node=1, inter=replace(h100.inter, bandwidth=1e8))
    for ranks, count in itertools.product((4, 8), (64, 128, 500)):
        lengths = lengths_of("log-normal", count)
        room = -(-max(lengths) // ranks)
        costs = SampleCosts(MODEL, Job(context=1, weight_sharding=False).on(ulysses=ranks), slow)
        narrowest = [next(w for w in widths_of(ranks) if n <= w * room) for n in lengths]
        least = sum(w * costs.samples([n], w)[0] for n, w in zip(lengths, narrowest, strict=True)) / ranks
        schedule = make_schedule(lengths, costs, room)
        assert sum(map(max, schedule.seconds)) < 1.15 * least, (ranks, count)


def test_refusals() -> None:
    costs = costs_on(ParallelConfig(1, 1, 4))
    for lengths, message in (
        ([5, 0], "length of sample 1"),
        ([5, -2], "length of sample 1"),
        ([5, 2.5], "length of sample 1"),
        ([5, True], "length of sample 1"),
        ([100], "sample 0 has 100 tokens, and 4 ranks of 16 tokens hold 64; use a mesh with ring x ulysses of at "
                "least 7, or tokens_per_rank of at least 25"),
    ):  # fmt: skip
        with pytest.raises(LongspanError, match=message):
            make_schedule(lengths, costs, 16)
    with pytest.raises(LongspanError, match="tokens_per_rank"):
        make_schedule([5], costs, 0)
    empty = make_schedule([], costs, 16)
    assert empty.rounds == () and empty.groups_of(0) == () and empty.balance == 1
