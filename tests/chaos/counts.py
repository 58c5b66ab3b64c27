"""What became of all attempts of a part of the campaign, in one table with the other parts."""

from __future__ import annotations

import dataclasses
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

COLUMNS = (
    "tried", "refused", "recovered", "survived", "harmless", "skipped", "hung", "silent", "traceback", "wrong",
)  # fmt: skip
BAD = ("hung", "silent", "traceback", "wrong")


@dataclasses.dataclass
class Counts:
    """One row.

    Attributes:
        part: its name.
        tried: attempts.
        refused: that were refused clearly, or ended with a message that names the rank or file.
        recovered: jobs that came to the same bits afterwards.
        survived: jobs that went on, to the same bits.
        harmless: attempts that turned out to be no fault: accepted input that is right, a fault that came too late.
        skipped: parts that cannot be tried here; never counted as tried.
        hung: no end within the limit.
        silent: a fault that nobody minded.
        traceback: an error of Python's own.
        wrong: any other bad end: a message that names nothing, something left behind, other bits afterwards.
        said: a line for each that needs one.
    """

    part: str
    tried: int = 0
    refused: int = 0
    recovered: int = 0
    survived: int = 0
    harmless: int = 0
    skipped: int = 0
    hung: int = 0
    silent: int = 0
    traceback: int = 0
    wrong: int = 0
    said: list[str] = dataclasses.field(default_factory=list)

    @property
    def good(self) -> bool:
        """Whether nothing of this part ended badly, and it was tried or skipped."""
        return not any(getattr(self, name) for name in BAD) and bool(self.tried or self.skipped)

    def add(self, outcome: str, said: str = "") -> None:
        """Count one attempt, and say something of it where it ended badly."""
        if outcome not in COLUMNS[1:]:
            raise ValueError(f"no outcome: {outcome}; there are {', '.join(COLUMNS[1:])}")
        self.tried += outcome != "skipped"
        self.note(outcome, said)

    def note(self, outcome: str, said: str = "") -> None:
        """Count a further outcome of an attempt that is counted already."""
        setattr(self, outcome, getattr(self, outcome) + 1)
        if said and outcome in (*BAD, "skipped"):
            self.said.append(f"{outcome}: {said}")


def table(rows: Sequence[Counts]) -> str:
    """All parts as text, with what there is to say of them, and a sum."""
    total = Counts("all", **{name: sum(getattr(row, name) for row in rows) for name in COLUMNS})
    lines = [f"{'':12}" + "".join(f"{name:>11}" for name in COLUMNS)]
    lines += [f"{row.part:12}" + "".join(f"{getattr(row, name):11}" for name in COLUMNS) for row in (*rows, total)]
    return "\n".join([*_said(rows), *lines])


def _said(rows: Iterable[Counts]) -> list[str]:
    return [f"{row.part}: {line}" for row in rows for line in row.said]


def run_part(
    seed: int, attempts: Callable[[Path], list[Any]], good: Callable[[Any], bool], cannot: type[Exception]
) -> int:
    """Make a part's attempts in a folder that is removed, and print what became of them.

    Returns:
        0 if all are `good`, 1 if not, 2 where they cannot be made (`cannot` was raised).
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as an exception, so that what was made is removed
    print(f"seed {seed}")
    try:
        with tempfile.TemporaryDirectory(prefix="longspan-chaos-") as folder:
            outcomes = attempts(Path(folder))
    except cannot as error:
        print(f"skipped: {error}")
        return 2
    recovered = sum(outcome.recovered is True for outcome in outcomes)
    print(f"tried {len(outcomes)}, {dict(Counter(outcome.verdict for outcome in outcomes))}, recovered {recovered}")
    return 0 if all(map(good, outcomes)) else 1
