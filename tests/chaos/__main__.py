"""The whole campaign: seeded faults and bad input of every kind, within a time, and one table of the outcomes.

    python -m tests.chaos [--seed N] [--minutes M] [--only PART ...]

Exit code 0 if every attempt was refused clearly, survived or recovered from with the same bits; 1 if any hung, was
silent, raised a Python error or led to other bits. Parts that need root (network and disks) are skipped without it. The
same seed draws the same attempts; their number depends on the time.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

from tests.chaos.counts import Budget, Counts, table

SEED, MINUTES = 20261122, 20.0
PARTS = {"inputs": 0.1, "corruption": 0.05, "edges": 0.15, "ranks": 0.3, "network": 0.25, "disks": 0.15}
"""Modules whose `run` makes the attempts, with their share of the time."""


def run(part: str, seed: int, minutes: float, share: float) -> Counts:
    """Run one part; an exception of the part itself counts as a traceback."""
    print(f"\n{part}: seed {seed}", flush=True)
    start, counts = time.monotonic(), Counts(part)
    with tempfile.TemporaryDirectory(prefix="longspan-chaos-", ignore_cleanup_errors=True) as folder:
        budget = Budget(seed, Path(folder), minutes / MINUTES, start + 60 * minutes * share)
        try:
            importlib.import_module(f"tests.chaos.{part}").run(budget, counts)
        except Exception:
            counts.add("traceback", f"seed {seed}: {traceback.format_exc()}")
    print(f"{part}: {counts['tried']} tried in {time.monotonic() - start:.0f} s", flush=True)
    return counts


class _Stopped(BaseException):
    """SIGTERM as an exception, so that files are removed. Not SystemExit, which a command under test handles."""


def _stop(*_: object) -> None:
    raise _Stopped


def main(argv: list[str] | None = None) -> int:
    """Run the parts one after the other, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--minutes", type=float, default=MINUTES, help="about how long, on two idle cores")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help=str([*PARTS]))
    args = parser.parse_args(argv)
    if not 0 < args.minutes < 24 * 60:
        parser.error(f"--minutes {args.minutes:g}: give a number above 0, of at most a day")
    os.environ["HF_HUB_OFFLINE"] = "1"
    signal.signal(signal.SIGTERM, _stop)
    shares = sum(PARTS[part] for part in args.only)
    try:
        rows = [run(part, args.seed, args.minutes, PARTS[part] / shares) for part in args.only]
    except _Stopped:
        return 143
    print(f"\nseed {args.seed}, {args.minutes:g} minutes\n{table(rows)}")
    return 0 if all(row.good for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
