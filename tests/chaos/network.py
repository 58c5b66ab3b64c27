"""Seeded cuts of links of a real job, each rank on a host of its own (root, Linux and iproute2).

Every rank runs in a network namespace with one link to the others (`benchmarks/cluster.py`). At a random moment one
link is cut: frames vanish, or the host notices. A job must survive a cut of less than half of --timeout, with exactly
the losses and exported weights of a job without one. A permanent cut must end the job on both sides within the limit,
each side naming a rank that it lost; the same command then continues to the same result.
"""

from __future__ import annotations

import dataclasses
import random
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import cluster
from tests.chaos.counts import Budget, Counts, Outcome
from tests.chaos.ranks import LIMIT_S, base_config, environment, result, wait_for
from tests.train.training import Job

RANKS = 2
KINDS = ("short", "permanent")
#: Part of --timeout. TCP retries at growing intervals, so it may pause for twice as long as the link was cut.
LONGEST_SHORT = 0.45


@dataclasses.dataclass(frozen=True)
class Cut:
    """A cut of one host's link, `after_s` seconds after `lines` reported steps, for `seconds` (None: permanent)."""

    rank: int
    lines: int
    after_s: float
    seconds: float | None
    noticed: bool


def draw(rng: random.Random, kind: str, config: Job) -> Cut:
    """Return a random cut of a kind."""
    rank, lines, after_s = rng.randrange(RANKS), rng.randrange(config.max_steps), rng.uniform(0, 0.3)
    seconds = rng.uniform(0.5, LONGEST_SHORT * config.timeout) if kind == "short" else None
    return Cut(rank, lines, after_s, seconds, rng.random() < 0.5)


def small_config(folder: Path) -> Job:
    """Return a job with one rank per host, which runs for longer than a cut takes."""
    return base_config(folder, ring=1, ulysses=RANKS, max_steps=40, save_steps=8)


def run_job(net: cluster.Hosts, config: Job, cut: Cut | None, folder: Path) -> tuple[list[int | None], list[str]]:
    """Run a job with a cut; return exit codes (None: hung) and stderr by rank."""
    folder.mkdir(parents=True, exist_ok=True)
    words = [sys.executable, "-m", "longspan", "train", *config.argv]
    with cluster.started(net, words, folder, env=environment()) as ranks:
        try:
            if cut is not None and wait_for(ranks[0], folder / "0.out", cut.lines, cut.after_s):
                cluster.cut(net, cut.rank, noticed=cut.noticed)
                if cut.seconds is not None:
                    time.sleep(cut.seconds)
                    cluster.mend(net, cut.rank)
            _wait(ranks)
        finally:
            if cut is not None:
                cluster.mend(net, cut.rank)
        codes = [process.poll() for process in ranks]
    return codes, [(folder / f"{rank}.err").read_text(errors="replace") for rank in range(len(ranks))]


def _wait(ranks: Sequence[subprocess.Popen[Any]]) -> None:
    end = time.monotonic() + LIMIT_S
    while any(process.poll() is None for process in ranks) and time.monotonic() < end:
        time.sleep(0.1)


def attempt(net: cluster.Hosts, config: Job, cut: Cut, folder: Path, expected: Any) -> Outcome:
    """Cut a link once and judge the job's end; after a permanent cut, continue and compare the result."""
    mine = config.but(output_dir=str(folder / "run"))
    codes, errors = run_job(net, mine, cut, folder)
    same = all(code == 0 for code in codes) and result(mine.out) == expected
    outcome = Outcome(cut, verdict(cut, codes, errors, same), "\n--- next rank\n".join(errors))
    if cut.seconds is None and outcome.verdict in ("refused", "wrong"):
        codes, errors = run_job(net, mine, None, folder)
        outcome.recovered = not any(codes) and result(mine.out) == expected
        outcome.output += "" if outcome.recovered else f"\nthe second time, codes {codes}: {errors}"
    return outcome


def verdict(cut: Cut, codes: list[int | None], errors: Sequence[str], same: bool) -> str:
    """Judge a job by its ranks' exit codes and stderr, and whether its result is the expected one."""
    if None in codes:
        return "hung"
    if not any(codes):
        survived = "survived" if cut.seconds is not None else "harmless"
        return survived if same else "silent"
    if cut.seconds is not None:
        return "wrong"
    # Rank 0 hosts the job's store, so the others are lost even if its link is cut.
    ranks = set(range(len(codes)))
    far = ranks - {0} if cut.rank == 0 else {cut.rank}
    for rank, (code, text) in enumerate(zip(codes, errors, strict=True)):
        if code and not _first_named(text) & (far if rank not in far else {rank} | ranks - far):
            return "wrong"
    return "refused"


def _first_named(text: str) -> set[int]:
    """Return the ranks that the last line of an error names first."""
    lines = text.strip().splitlines()
    found = re.search(r"\branks?[ =]((?:\d+(?:, | and )?)+)", lines[-1], re.IGNORECASE) if lines else None
    return {int(number) for number in re.findall(r"\d+", found[1])} if found else set()


def run(budget: Budget, counts: Counts) -> None:
    """Cut links of both kinds in turn; skipped without root or `ip`."""
    rng, config = random.Random(budget.seed), small_config(budget.folder)
    try:
        with cluster.hosts(RANKS, rate=None) as net:
            codes, errors = run_job(net, config, None, budget.folder / "first")
            assert not any(codes), errors
            expected = result(config.out)
            for count in range(budget.times(4) * len(KINDS)):
                if counts["tried"] and not budget.more():
                    return
                cut = draw(rng, KINDS[count % len(KINDS)], config)
                counts.add_job(budget.seed, attempt(net, config, cut, budget.folder / f"cut-{count}", expected))
    except cluster.CannotBuild as error:
        counts.add("skipped", str(error))
