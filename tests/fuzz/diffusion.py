"""Draw classes of diffusers, numbers of tokens and meshes, and compare each with one process: output and gradients.

    python -m tests.fuzz.diffusion [--minutes M] [--seed N]

A failure prints its case. A case with fewer tokens, rows or heads than ranks may be refused, equally on every rank.
"""

from __future__ import annotations

import argparse
import random
import time

from tests.diffusion.diffusing import CLASSES, MESHES, small_on_meshes
from tests.pool import RankError, RankPool


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="by default a new one")
    parser.add_argument("--minutes", type=float, default=10.0, help="start no case after this many minutes")
    args = parser.parse_args(argv)
    print(f"seed {args.seed}")
    draw, end, failed, equal = random.Random(args.seed), time.monotonic() + 60 * args.minutes, 0, 0
    while time.monotonic() < end:
        ranks = draw.choice(list(MESHES))
        pool = RankPool(ranks, warm=("torch", "diffusers"))
        for _ in range(12):
            grid = draw.randint(1, 5), draw.randint(1, 7), draw.randint(1, 7)
            case = draw.choice(CLASSES), draw.sample(MESHES[ranks], 2), grid, draw.randint(3, 12)
            try:
                pool.run(small_on_meshes, *case, timeout=300)
                equal += 1
            except RankError as error:
                refused = "LongspanError" in str(error) and f"{ranks} of {ranks} ranks failed" in str(error)
                plain = "in small_case" in str(error)  # the class itself cannot run these sizes
                if not (refused or plain):
                    failed += 1
                    print(f"failed: {case}\n{error}")
            if time.monotonic() > end:
                break
        pool.close()
    print(f"{equal} equal, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
