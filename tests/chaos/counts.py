"""What a part of the campaign may use, and the counts of its outcomes."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

# refused: a clear message names the rank or file. recovered: a job continued to the same bits. survived: it went on,
# with the same bits. harmless: no fault after all. skipped: cannot run on this machine. hung: no end within the limit.
# silent: no error. traceback: an error of Python. wrong: any other bad end (leftover files, other bits).
COLUMNS = (
    "tried", "refused", "recovered", "survived", "harmless", "skipped", "hung", "silent", "traceback", "wrong",
)  # fmt: skip
BAD = ("hung", "silent", "traceback", "wrong")


@dataclasses.dataclass(frozen=True)
class Budget:
    """A part's seed, folder, scale of its usual size, and the time (`time.monotonic`) after which nothing starts."""

    seed: int
    folder: Path
    scale: float = 1.0
    end: float = float("inf")

    def more(self) -> bool:
        return time.monotonic() < self.end

    def times(self, usual: int) -> int:
        return max(1, round(usual * self.scale))

    def seeds(self, usual: int) -> Iterator[int]:
        """Yield a seed for each round while there is time, at least one."""
        for number in range(self.times(usual)):
            if number and not self.more():
                return
            yield self.seed + number


@dataclasses.dataclass
class Outcome:
    """The outcome of one fault in a job.

    Attributes:
        fault: the fault.
        verdict: a name of `COLUMNS`.
        output: what the job printed.
        recovered: whether a job that ended continued to the same bits; None if that was not tried.
    """

    fault: Any
    verdict: str
    output: str
    recovered: bool | None = None


class Counts(Counter[str]):
    """One row of the table: how many attempts ended in each of `COLUMNS`. `notes` has a line for each bad one."""

    def __init__(self, part: str) -> None:
        super().__init__()
        self.part, self.notes = part, list[str]()

    @property
    def good(self) -> bool:
        return not any(self[name] for name in BAD) and bool(self["tried"] or self["skipped"])

    def add(self, verdict: str, note: str = "") -> None:
        """Count one attempt; keep the note if it ended badly."""
        if verdict not in COLUMNS[1:]:
            raise ValueError(f"no outcome: {verdict}; there are {', '.join(COLUMNS[1:])}")
        self["tried"] += verdict != "skipped"
        self._count(verdict, note)

    def add_job(self, seed: int, outcome: Outcome) -> None:
        """Count the outcome of a fault in a job, and its recovery."""
        print(f"{outcome.verdict:9} recovered: {outcome.recovered} {outcome.fault}", flush=True)
        note = f"seed {seed}: {outcome.fault}: {outcome.output.strip()[-400:]}"
        self.add(outcome.verdict, note)
        if outcome.recovered is not None:
            self._count("recovered" if outcome.recovered else "wrong", f"not recovered: {note}")

    def _count(self, verdict: str, note: str) -> None:
        self[verdict] += 1
        if note and verdict in (*BAD, "skipped"):
            self.notes.append(f"{verdict}: {note}")


def table(rows: Sequence[Counts]) -> str:
    """Return the notes of all parts, a row for each, and their sum."""
    total = Counts("all")
    for row in rows:
        total.update(row)
    lines = [f"{row.part}: {note}" for row in rows for note in row.notes]
    lines.append(f"{'':12}" + "".join(f"{name:>11}" for name in COLUMNS))
    lines += [f"{row.part:12}" + "".join(f"{row[name]:11}" for name in COLUMNS) for row in (*rows, total)]
    return "\n".join(lines)
