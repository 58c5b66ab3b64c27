"""The ranks that save or load together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from longspan.comm.errors import on_every_rank, on_first_rank
from longspan.comm.objects import gather_objects
from longspan.core.errors import LongspanError
from longspan.core.system import os_errors_as_longspan_errors
from longspan.core.validation import format_value

T = TypeVar("T")

_FILES_TIMEOUT = timedelta(hours=2)
"""How long a rank waits for others that write or read files."""


@dataclass(frozen=True)
class Ranks:
    """The ranks of a process group (by default of the whole job), or this process alone without one."""

    group: dist.ProcessGroup | None = None

    @classmethod
    def apart(cls) -> Ranks:
        """Return all ranks, over a new gloo group. Collective.

        Files take long, so they wait neither for the training nor for the short timeout of the job's own group.
        """
        several = dist.is_initialized() and dist.get_world_size() > 1
        return cls(dist.new_group(backend="gloo", timeout=_FILES_TIMEOUT) if several else None)

    @classmethod
    def alone(cls) -> Ranks:
        """Return this process only, as every rank of the job does. Collective: each gets a group of one."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return cls()
        mine, _ = dist.new_subgroups(group_size=1, backend="gloo")
        return cls(mine)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return dist.get_world_size(self.group) if dist.is_initialized() else 1

    @property
    def rank(self) -> int:
        """This rank's place among them."""
        return dist.get_rank(self.group) if dist.is_initialized() else 0

    def gather(self, mine: Any) -> list[Any]:
        """Return every rank's value, in rank order. Collective."""
        return gather_objects(mine, self._group)

    def each(self, action: Callable[[], T]) -> T:
        """Run `action` on every rank, as `longspan.comm.errors.on_every_rank`. Collective."""
        return on_every_rank(os_errors_as_longspan_errors()(action), self._group)

    def first(self, action: Callable[[], T]) -> T:
        """Run `action` on the first rank, as `longspan.comm.errors.on_first_rank`. Collective."""
        return on_first_rank(os_errors_as_longspan_errors()(action), self._group)

    @property
    def _group(self) -> dist.ProcessGroup | None:
        return None if self.size == 1 else self.group or dist.group.WORLD


def checked_on_all(check: Callable[[], T], given: Mapping[str, Any]) -> T:
    """Check the arguments of a collective call on every rank of its `ranks`, by default those of the job."""
    ranks = given.get("ranks")
    return (ranks if isinstance(ranks, Ranks) else Ranks()).each(check)


def check_ranks(name: str, ranks: Any) -> None:
    """Raise unless `ranks` is a `Ranks` or None."""
    if ranks is not None and not isinstance(ranks, Ranks):
        raise LongspanError(f"`{name}` must be longspan.checkpoint.Ranks() or None, got {format_value(ranks)}")
