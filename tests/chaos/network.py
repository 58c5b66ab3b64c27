"""Links that are cut while a job runs, each rank a host of its own: a seeded, bounded campaign.

    python -m tests.chaos.network --seed 1 --tries 5        # as root, on Linux, with iproute2

Every rank of a real job lives in a network namespace with one link to the others (`benchmarks/slow_link.py`). At a
random moment one link is cut, so that either frames vanish or the host sees its link go down. A cut of less than half
of --timeout has to be survived, with the same losses and exported weights, to the bit, as without; one for good has
to end the job on both sides within the limit, each naming a rank that it lost, and the same command, once the link is
back, has to come to the same bits.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import slow_link
from longspan.core.sections import replace
from longspan.train import TrainConfig
from tests.chaos.counts import run_part
from tests.chaos.ranks import LIMIT_S, base_config, environment, flags, result, wait_for

RANKS = 2
KINDS = ("short", "for good")
#: Of --timeout. TCP tries again at growing distances, so it may be silent for twice as long as the link was cut.
LONGEST_SHORT = 0.45


@dataclasses.dataclass(frozen=True)
class Cut:
    """A cut of one host's link, `after_s` seconds after `lines` reported steps, for `seconds` (None: for good)."""

    rank: int
    lines: int
    after_s: float
    seconds: float | None
    noticed: bool

    @property
    def kind(self) -> str:
        return "short" if self.seconds is not None else "for good"


@dataclasses.dataclass
class Outcome:
    """What became of one cut.

    `verdict` of a short one is "survived", of one for good "named" or "not named" (whoever lost whom); of both "ended"
    (it should not have), "silent" (code 0, other bits), "hung", or "too late" (all was done before). `recovered`:
    whether the job came to the same bits after it.
    """

    cut: Cut
    verdict: str
    said: str
    recovered: bool | None = None


def draw(rng: random.Random, kind: str, config: TrainConfig) -> Cut:
    """A random cut of a kind."""
    rank, lines, after_s = rng.randrange(config.parallel.ranks), rng.randrange(config.steps), rng.uniform(0, 0.3)
    assert config.timeout is not None
    seconds = rng.uniform(0.5, LONGEST_SHORT * config.timeout) if kind == "short" else None
    return Cut(rank, lines, after_s, seconds, rng.random() < 0.5)


def small_config(folder: Path) -> TrainConfig:
    """The job: one rank a host, and more steps than a cut needs to find one."""
    return base_config(folder, ring=1, ulysses=RANKS, steps=40, save_every=8)


def run_job(net: slow_link.Hosts, config: TrainConfig, cut: Cut | None, folder: Path) -> tuple[list[int | None], str]:
    """Run a job with a cut; by rank the exit codes (None if it hung) and what was said on stderr, in `split`'s form."""
    folder.mkdir(parents=True, exist_ok=True)
    with slow_link.started_on(net, "longspan", ["train", *flags(config)], folder, env=environment()) as ranks:
        try:
            if cut is not None and wait_for(ranks[0], config, cut.lines, cut.after_s):
                slow_link.cut(net, cut.rank, noticed=cut.noticed)
                if cut.seconds is not None:
                    time.sleep(cut.seconds)
                    slow_link.mend(net, cut.rank)
            _wait(ranks)
        finally:
            if cut is not None:
                slow_link.mend(net, cut.rank)
        codes = [process.poll() for process in ranks]
    return codes, "\0".join((folder / f"{rank}.err").read_text(errors="replace") for rank in range(len(ranks)))


def _wait(ranks: Sequence[subprocess.Popen[Any]]) -> None:
    end = time.monotonic() + LIMIT_S
    while any(process.poll() is None for process in ranks) and time.monotonic() < end:
        time.sleep(0.1)


def attempt(net: slow_link.Hosts, config: TrainConfig, cut: Cut, folder: Path, whole: Any) -> Outcome:
    """Cut a job's link once, judge how it ends, and, where it was for good, go on and compare with `whole`."""
    mine = replace(config, out=folder / "run")
    codes, said = run_job(net, mine, cut, folder)
    same = all(code == 0 for code in codes) and result(mine.out) == whole
    outcome = Outcome(cut, verdict(cut, codes, said.split("\0"), same), said)
    if cut.seconds is None and outcome.verdict in ("named", "not named"):
        codes, again = run_job(net, mine, None, folder)
        outcome.recovered = not any(codes) and result(mine.out) == whole
        outcome.said += "" if outcome.recovered else f"\nthe second time, codes {codes}: {again}"
    return outcome


def verdict(cut: Cut, codes: list[int | None], said: Sequence[str], same: bool) -> str:
    """Judge a job by its ranks' exit codes, their words, and whether its bits are the right ones."""
    if None in codes:
        return "hung"
    if not any(codes):
        survived = "survived" if cut.seconds is not None else "too late"
        return survived if same else "silent"
    if cut.seconds is not None:
        return "ended"
    # Rank 0 holds the job's store, so the others are the ones that are lost, whichever link was cut.
    ranks = set(range(len(codes)))
    far = ranks - {0} if cut.rank == 0 else {cut.rank}
    for rank, (code, text) in enumerate(zip(codes, said, strict=True)):
        if code and not _first_named(text) & (far if rank not in far else {rank} | ranks - far):
            return "not named"
    return "named"


def _first_named(text: str) -> set[int]:
    """The ranks that the last line of an error begins with."""
    lines = text.strip().splitlines()
    found = re.search(r"\branks?[ =]((?:\d+(?:, | and )?)+)", lines[-1], re.IGNORECASE) if lines else None
    return {int(number) for number in re.findall(r"\d+", found[1])} if found else set()


def campaign(seed: int, tries: dict[str, int], folder: Path, more: Callable[[], bool] = lambda: True) -> list[Outcome]:
    """So many cuts of each kind, the kinds in turn, one job after the other, as long as `more` says so.

    Raises:
        slow_link.CannotBuild: where there is no root or no `ip`; the message says what is missing.
    """
    rng, config = random.Random(seed), small_config(folder)
    kinds = [kind for number in range(max(tries.values())) for kind, most in tries.items() if number < most]
    outcomes: list[Outcome] = []
    with slow_link.hosts(config.parallel.ranks, rate=None) as net:
        codes, said = run_job(net, config, None, folder / "first")
        assert not any(codes), said
        whole = result(config.out)
        for count, kind in enumerate(kinds):
            if outcomes and not more():
                break
            outcomes.append(attempt(net, config, draw(rng, kind, config), folder / f"cut-{count}", whole))
            last = outcomes[-1]
            print(f"{last.verdict:9} recovered: {last.recovered} {last.cut}", flush=True)
            if not good(last):
                print(last.said.replace("\0", "\n--- next rank\n"), flush=True)
    return outcomes


def good(outcome: Outcome) -> bool:
    """Whether it ended as it should."""
    return outcome.verdict in ("survived", "named", "too late") and outcome.recovered is not False


def main() -> int:
    """Run the campaign, print its counts; 0 if every cut was survived, or named and recovered from; 2 if skipped."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tries", type=int, default=4, help="cuts of each kind")
    args = parser.parse_args()
    return run_part(
        args.seed,
        lambda folder: campaign(args.seed, dict.fromkeys(KINDS, args.tries), folder),
        good,
        slow_link.CannotBuild,
    )


if __name__ == "__main__":
    sys.exit(main())
