"""What a part of the campaign may use, and the counts of its outcomes."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

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


@dataclasses.dataclass
class Counts:
    """One row of the table.

    Attributes:
        part: its name.
        tried: attempts.
        refused: ended with a clear message, which names the rank or file.
        recovered: jobs that continued to the same bits.
        survived: jobs that did not end, with the same bits.
        harmless: no fault after all: valid input, or a fault that came too late.
        skipped: parts that cannot run on this machine; not tried.
        hung: no end within the limit.
        silent: a fault without any error.
        traceback: an error of Python.
        wrong: any other bad end: a message that names nothing, leftover files, other bits.
        notes: a line for each bad or skipped one.
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
    notes: list[str] = dataclasses.field(default_factory=list)

    @property
    def good(self) -> bool:
        return not any(getattr(self, name) for name in BAD) and bool(self.tried or self.skipped)

    def add(self, verdict: str, note: str = "") -> None:
        """Count one attempt; keep the note if it ended badly."""
        if verdict not in COLUMNS[1:]:
            raise ValueError(f"no outcome: {verdict}; there are {', '.join(COLUMNS[1:])}")
        self.tried += verdict != "skipped"
        self._count(verdict, note)

    def add_job(self, seed: int, outcome: Outcome) -> None:
        """Count the outcome of a fault in a job, and its recovery."""
        print(f"{outcome.verdict:9} recovered: {outcome.recovered} {outcome.fault}", flush=True)
        note = f"seed {seed}: {outcome.fault}: {outcome.output.strip()[-400:]}"
        self.add(outcome.verdict, note)
        if outcome.recovered is not None:
            self._count("recovered" if outcome.recovered else "wrong", f"not recovered: {note}")

    def _count(self, verdict: str, note: str) -> None:
        setattr(self, verdict, getattr(self, verdict) + 1)
        if note and verdict in (*BAD, "skipped"):
            self.notes.append(f"{verdict}: {note}")


def table(rows: Sequence[Counts]) -> str:
    """Return the notes of all parts, a row for each, and their sum."""
    total = Counts("all", **{name: sum(getattr(row, name) for row in rows) for name in COLUMNS})
    lines = [f"{row.part}: {note}" for row in rows for note in row.notes]
    lines.append(f"{'':12}" + "".join(f"{name:>11}" for name in COLUMNS))
    lines += [f"{row.part:12}" + "".join(f"{getattr(row, name):11}" for name in COLUMNS) for row in (*rows, total)]
    return "\n".join(lines)
