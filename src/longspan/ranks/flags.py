"""The flags that every job has: its ranks on this machine, and how long they wait for each other."""

from __future__ import annotations

from dataclasses import dataclass

from longspan.core.validation import LARGEST_COUNT, LONGEST_WAIT_S, check_number
from longspan.ranks.rendezvous import START_TIMEOUT_S


@dataclass(frozen=True, kw_only=True)
class RankFlags:
    """The ranks on this machine, and timeouts."""

    nproc: int | None = None
    """Ranks on this machine. By default as many as the mesh needs."""
    timeout: int | None = None
    """Seconds after which a rank that stopped, hangs or is cut off ends the job and is named. By default 60, with GPUs
    300. Loading, a save or an export may take longer."""
    start_timeout: int = START_TIMEOUT_S
    """Seconds within which all ranks must have started."""

    def check_ranks(self) -> None:
        """Raise on a value out of range."""
        if self.nproc is not None:
            check_number("--nproc", self.nproc, 1, LARGEST_COUNT)
        if self.timeout is not None:
            check_number("--timeout", self.timeout, 1, LONGEST_WAIT_S)
        check_number("--start-timeout", self.start_timeout, 1, LONGEST_WAIT_S)
