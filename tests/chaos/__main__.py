"""The whole campaign: faults and bad input of every kind, by a seed, within a time, and one table of what came of them.

    python -m tests.chaos [--seed N] [--minutes M] [--only PART ...]

0 if every attempt was refused clearly, survived or recovered from to the bit; 1 if any hung, was silent, gave a
traceback or did not come to the same bits. A part that cannot be tried here (network and disks need root) is skipped
and says so. The same seed draws the same attempts; how many of them depends on the time there is.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.chaos.counts import Counts, table

SEED, MINUTES = 20261122, 20.0
LIMIT_S = 120.0
"""Of one bad input. The first ones import what they need, and another program may use the cores."""


@dataclasses.dataclass(frozen=True)
class Budget:
    """What a part has: a seed, a folder, how much of its usual size, and until when it may begin something."""

    seed: int
    folder: Path
    scale: float
    end: float

    def more(self) -> bool:
        """Whether there is time to begin something."""
        return time.monotonic() < self.end

    def times(self, usual: int) -> int:
        """A usual number of attempts, in scale, at least one."""
        return max(1, round(usual * self.scale))

    def seeds(self, usual: int) -> Iterator[int]:
        """A seed for each round, as many as there is time for, at least one."""
        for number in range(self.times(usual)):
            if number and not self.more():
                return
            yield self.seed + number


# --- the parts, each with its own kind of result, as counts


def inputs(budget: Budget) -> Counts:
    """Bad command lines, files and data, and calls of the public functions, in this process."""
    from tests.chaos import inputs as part

    names = {"accepted": "harmless", "crashed": "traceback", "left behind": "wrong"}
    counts = Counts("inputs")
    for seed in budget.seeds(20):
        for result in part.campaign(seed, 100, limit_s=LIMIT_S) + part.api_campaign(seed, 100, limit_s=LIMIT_S):
            said = f"seed {seed}: {result.attempt.kind}: {result.attempt.what}: {result.said.strip()[-300:]}"
            counts.add(names.get(result.outcome, result.outcome), said)
    return counts


def corruption(budget: Budget) -> Counts:
    """Damaged checkpoints, in this process."""
    from tests.chaos import corruption as part

    counts = Counts("corruption")
    for seed in budget.seeds(10):
        folder = budget.folder / f"{seed}"
        folder.mkdir()
        done = part.run(50, seed, folder)
        counts.tried += done.tried
        counts.refused += done.refused.total()
        for outcome, texts in (("silent", done.silent), ("traceback", done.tracebacks)):
            for text in texts:
                counts.note(outcome, text)
    return counts


def edges(budget: Budget) -> Counts:
    """One rank that differs, at the API, on a pool of four."""
    from tests.chaos import edges as part
    from tests.pool import RankPool

    pool = RankPool(4, warm=("torch", "transformers"))
    try:
        done = part.campaign(pool, budget.times(200), budget.seed, budget.end - time.monotonic())
    finally:
        pool.close()
    counts = Counts("edges", tried=done.counts["tried"], refused=done.counts["refused"])
    for text in done.wrong:
        outcome = text.partition(":")[0]
        counts.note("traceback" if part.RAW in text else {"unclear": "wrong"}.get(outcome, outcome), text)
    return counts


def ranks(budget: Budget) -> Counts:
    """Ranks of real jobs that are killed, stopped, that leave or were told something else."""
    from tests.chaos import ranks as part

    counts = Counts("ranks")
    names = {"named": "refused", "too late": "harmless", "not named": "wrong"}
    for seed in budget.seeds(3):
        kinds = dict.fromkeys(part.KINDS, 1)
        folder = budget.folder / f"{seed}"
        folder.mkdir()
        for outcome in part.campaign(seed, kinds, folder, budget.more):
            said = f"seed {seed}: {outcome.fault}: {_end(outcome.said)}"
            counts.add(names.get(outcome.verdict, outcome.verdict), said)
            _recovery(counts, outcome.recovered, said)
    return counts


def network(budget: Budget) -> Counts:
    """Links that are cut, each rank in a network namespace."""
    from benchmarks.slow_link import CannotBuild
    from tests.chaos import network as part

    counts = Counts("network")
    names = {"named": "refused", "too late": "harmless", "not named": "wrong", "ended": "wrong"}
    try:
        kinds = dict.fromkeys(part.KINDS, budget.times(4))
        outcomes = part.campaign(budget.seed, kinds, budget.folder, budget.more)
    except CannotBuild as error:
        counts.add("skipped", str(error))
        return counts
    for outcome in outcomes:
        said = f"seed {budget.seed}: {outcome.cut}: {_end(outcome.said)}"
        counts.add(names.get(outcome.verdict, outcome.verdict), said)
        _recovery(counts, outcome.recovered, said)
    return counts


def disks(budget: Budget) -> Counts:
    """Disks that become full while a job runs."""
    from tests.chaos import disks as part

    counts = Counts("disks")
    names = {"damaged": "wrong", "unclear": "wrong"}
    try:
        outcomes = part.campaign(budget.seed, budget.times(8), budget.folder, budget.more)
    except part.CannotMount as error:
        counts.add("skipped", str(error))
        return counts
    for outcome in outcomes:
        said = f"seed {budget.seed}: {outcome.full}: {_end(outcome.said)}"
        counts.add(names.get(outcome.verdict, outcome.verdict), said)
        _recovery(counts, outcome.recovered, said)
    return counts


def _recovery(counts: Counts, recovered: bool | None, said: str) -> None:
    if recovered is not None:
        counts.note("recovered" if recovered else "wrong", f"not recovered: {said}")


def _end(said: str) -> str:
    return said.strip()[-400:]


Part = Callable[[Budget], Counts]
PARTS: dict[str, tuple[Part, float]] = {
    "inputs": (inputs, 0.1),
    "corruption": (corruption, 0.05),
    "edges": (edges, 0.15),
    "ranks": (ranks, 0.3),
    "network": (network, 0.25),
    "disks": (disks, 0.15),
}
"""Each with its share of the time."""


def run(part: str, seed: int, minutes: float, share: float) -> Counts:
    """One part, with `share` of so many minutes; an error of its own counts as a traceback."""
    print(f"\n{part}: seed {seed}", flush=True)
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="longspan-chaos-", ignore_cleanup_errors=True) as folder:
        budget = Budget(seed, Path(folder), minutes / MINUTES, start + 60 * minutes * share)
        try:
            counts = PARTS[part][0](budget)
        except Exception:
            counts = Counts(part)
            counts.add("traceback", f"seed {seed}: {traceback.format_exc()}")
    print(f"{part}: {counts.tried} tried in {time.monotonic() - start:.0f} s", flush=True)
    return counts


class _Stopped(BaseException):
    """SIGTERM as an exception, so that what was made is removed. Not SystemExit, which a command under test answers."""


def _stop(*_: object) -> None:
    raise _Stopped


def main(argv: list[str] | None = None) -> int:
    """Run the parts one after the other, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--minutes", type=float, default=MINUTES, help="about how long, on two quiet cores")
    parser.add_argument(
        "--only", nargs="+", choices=list(PARTS), default=list(PARTS), metavar="PART", help=str([*PARTS])
    )
    args = parser.parse_args(argv)
    if not 0 < args.minutes < 24 * 60:
        parser.error(f"--minutes {args.minutes:g}: give a number above 0, of a day at most")
    os.environ["HF_HUB_OFFLINE"] = "1"
    signal.signal(signal.SIGTERM, _stop)
    shares = sum(PARTS[part][1] for part in args.only)
    try:
        rows = [run(part, args.seed, args.minutes, PARTS[part][1] / shares) for part in args.only]
    except _Stopped:
        return 143
    print(f"\nseed {args.seed}, {args.minutes:g} minutes\n{table(rows)}")
    return 0 if all(row.good for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
