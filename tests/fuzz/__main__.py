"""Draw models, batches, meshes, options and jobs, and compare each with plain transformers in one process.

    python -m tests.fuzz [--minutes M] [--seed N] [--family NAME ...] [--ranks N ...]
    python -m tests.fuzz --case '{"family": "causal/llama", "mesh": {"ring": 2}}'

Families are those of transformers' own lists of causal and masked language models. A case is equal (loss, logits,
every gradient, generated ids, logs), or refused by a LongspanError that is the same on every rank, or it failed: other
numbers, another exception, a rank that hangs or refuses alone. "plain" counts cases that transformers itself cannot
run. The exit code is 1 if any failed. The same seed draws the same cases, as many as there is time for; each failure
prints the case that reproduces it.
"""

from __future__ import annotations

import argparse
import functools
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable

from tests.fuzz.cases import MESHES, Case, drawn
from tests.fuzz.families import families
from tests.fuzz.run import Outcome, judge, refusal
from tests.pool import RankPool

BLOCK = 12
"""How many cases on one mesh share its ranks and process groups."""


class Pools:
    """The pool for plain runs, and the pool with the last number of ranks."""

    def __init__(self) -> None:
        self.pools: dict[int, RankPool] = {}

    def __call__(self, ranks: int) -> RankPool:
        for other in self.pools.keys() - {1, ranks}:
            self.pools.pop(other).close()
        return self.pools.setdefault(ranks, RankPool(ranks, warm=("torch", "transformers")))

    def close(self) -> None:
        for pool in self.pools.values():
            pool.close()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=None, help="seed; by default a new one, which is printed")
    parser.add_argument("--minutes", type=float, default=10.0, help="start no case after this many minutes")
    parser.add_argument("--case", type=Case.read, help="run this case alone")
    parser.add_argument("--family", nargs="+", help="only these families, such as causal/llama")
    parser.add_argument("--ranks", nargs="+", type=int, choices=list(MESHES), default=list(MESHES))
    args = parser.parse_args(argv)
    os.environ["HF_HUB_OFFLINE"] = "1"
    pools = Pools()
    try:
        if args.case is not None:
            (outcome,) = judge([args.case], pools)
            print(f"{outcome.kind}: {outcome.text}")
            return int(outcome.kind == "failed")
        seed = random.SystemRandom().randrange(2**32) if args.seed is None else args.seed
        return campaign(pools, seed, args.minutes, args.family or families(), args.ranks)
    finally:
        pools.close()


def campaign(pools: Callable[[int], RankPool], seed: int, minutes: float, names: list[str], ranks: list[int]) -> int:
    """Draw and judge cases until the time is up; return 1 if any case failed."""
    print(f"seed {seed}, {len(names)} families, {minutes:g} minutes", flush=True)
    end, counts, reasons = time.monotonic() + 60 * minutes, Counter[str](), Counter[str]()
    accepted = functools.cache(lambda family: refusal(family, pools).kind == "equal")
    block = 0
    while time.monotonic() < end:
        rng = random.Random(f"{seed} {block}")
        mesh = rng.choice(MESHES[rng.choice(ranks)])
        cases = [drawn(rng, _family(rng, names, accepted), mesh) for _ in range(BLOCK)]
        for case, outcome in zip(cases, judge(cases, pools), strict=True):
            counts[outcome.kind] += 1
            report(case, outcome)
            if outcome.kind == "refused":
                reasons[outcome.text[:100]] += 1
        block += 1
    print("\n" + "\n".join(f"{count:5} refused: {text}" for text, count in reasons.most_common(20)))
    total = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
    print(f"\nseed {seed}: {counts.total()} cases: {total}")
    return int(counts["failed"] > 0)


def _family(rng: random.Random, names: list[str], accepted: Callable[[str], bool]) -> str:
    """Draw a family; one that is refused with any options only now and then."""
    for family in rng.sample(names, len(names)):
        if accepted(family) or rng.random() < 0.05:
            return family
    return names[0]


def report(case: Case, outcome: Outcome) -> None:
    """Print a line for a case; for a failed one also the failure, and the command that repeats it."""
    text = outcome.text if outcome.kind == "failed" else outcome.text.strip().rpartition("\n")[2][:110]
    print(f"{outcome.kind:8} {case.family} {case.job} {case.mesh}  {text}", flush=True)
    if outcome.kind == "failed":
        print(f"         again: python -m tests.fuzz --case '{case}'", flush=True)


if __name__ == "__main__":
    sys.exit(main())
