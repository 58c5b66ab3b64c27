"""What all ranks of a job do together, or refuse together."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from longspan.checkpoint.disk import DiskFull
from longspan.comm.objects import broadcast_object, gather_objects
from longspan.core.errors import LongspanError
from longspan.core.system import format_os_error, is_full
from longspan.core.validation import format_value

T = TypeVar("T")

_FILES_LIMIT = timedelta(hours=2)
"""How long a rank waits for the others to write or read their files."""


@dataclass(frozen=True)
class _Outcome:
    """What became of an action on one rank: its value, or why there is none. Plain values, sent to the others."""

    value: Any = None
    problem: str | None = None
    full: bool = False
    unexpected: bool = False


@dataclass(frozen=True)
class Ranks:
    """The ranks of a process group (by default of the whole job), or this process alone without one."""

    group: dist.ProcessGroup | None = None

    @classmethod
    def apart(cls) -> Ranks:
        """All ranks, over a gloo group of their own: collective. For files, which take the time that they take.

        Neither a training that goes on meanwhile, nor a short limit of the job's own group, concerns it.
        """
        several = dist.is_initialized() and dist.get_world_size() > 1
        return cls(dist.new_group(backend="gloo", timeout=_FILES_LIMIT) if several else None)

    @classmethod
    def alone(cls) -> Ranks:
        """This process, though there may be others, who each have a group of their own: collective."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return cls()
        mine, _ = dist.new_subgroups(group_size=1, backend="gloo")
        return cls(mine)

    @property
    def size(self) -> int:
        """How many they are."""
        return dist.get_world_size(self.group) if dist.is_initialized() else 1

    @property
    def rank(self) -> int:
        """Which of them this is."""
        return dist.get_rank(self.group) if dist.is_initialized() else 0

    def gather(self, mine: Any) -> list[Any]:
        """Every rank's value, in rank order."""
        return [mine] if self.size == 1 else gather_objects(mine, self.group or dist.group.WORLD)

    def each(self, action: Callable[[], T]) -> T:
        """Run `action` on every rank and return this rank's result; if it fails on any, all raise.

        Raises:
            LongspanError: on every rank, of the first rank that could not.
        """
        outcome, error = _try(action)
        outcomes: list[_Outcome] = self.gather(dataclasses.replace(outcome, value=None))
        failed = [rank for rank, other in enumerate(outcomes) if other.problem is not None]
        if failed:
            alike = len({other.problem for other in outcomes}) == 1
            _raise(outcomes[failed[0]], None if alike else failed[0], error)
        return outcome.value  # type: ignore[no-any-return]

    def first(self, action: Callable[[], T]) -> T:
        """Run `action` on the first rank while the others wait, and return its result (plain values) on all.

        Raises:
            LongspanError: on every rank, if it fails there.
        """
        outcome, error = _try(action) if self.rank == 0 else (_Outcome(), None)
        if self.size > 1:
            outcome = broadcast_object(outcome, self.group or dist.group.WORLD)
        if outcome.problem is not None:
            _raise(outcome, None, error)
        return outcome.value  # type: ignore[no-any-return]


def checked_on_all(check: Callable[[], T], given: Mapping[str, Any]) -> T:
    """Check the arguments of a collective call on every rank: on its `ranks`, or else on those of the job."""
    ranks = given.get("ranks")
    return (ranks if isinstance(ranks, Ranks) else Ranks()).each(check)


def check_ranks(name: str, ranks: Any) -> None:
    """Raise unless `ranks` is a `Ranks` or None.

    Raises:
        LongspanError: with the value.
    """
    if ranks is not None and not isinstance(ranks, Ranks):
        raise LongspanError(f"`{name}` must be longspan.checkpoint.Ranks() or None, got {format_value(ranks)}")


def _try(action: Callable[[], Any]) -> tuple[_Outcome, Exception | None]:
    try:
        return _Outcome(action()), None
    except DiskFull as error:
        return _Outcome(problem=str(error), full=True), error
    except LongspanError as error:
        return _Outcome(problem=str(error)), error
    except OSError as error:
        return _Outcome(problem=format_os_error(error), full=is_full(error)), error
    except Exception as error:  # a fault of ours: the others must not wait for this rank
        return _Outcome(problem=f"{type(error).__name__}: {error}", unexpected=True), error


def _raise(outcome: _Outcome, rank: int | None, error: Exception | None) -> None:
    if outcome.unexpected and error is not None:
        raise error
    where = "" if rank is None else f"rank {rank}: "
    raise (DiskFull if outcome.full else LongspanError)(f"{where}{outcome.problem}") from error
