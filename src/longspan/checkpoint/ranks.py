"""The ranks that save or load together, and checks on all of them that numbers are finite."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from longspan.comm.agree import gather_objects, on_every_rank, on_first_rank
from longspan.comm.weights import local_part
from longspan.core.errors import LongspanError, os_errors_as_longspan_errors

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

    @property
    def size(self) -> int:
        return dist.get_world_size(self.group) if dist.is_initialized() else 1

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group) if dist.is_initialized() else 0

    def gather(self, mine: Any) -> list[Any]:
        """Return every rank's value, in rank order. Collective."""
        return gather_objects(mine, self._group)

    def each(self, action: Callable[[], T]) -> T:
        """Run `action` on every rank, as `longspan.comm.agree.on_every_rank`. Collective."""
        return on_every_rank(os_errors_as_longspan_errors()(action), self._group)

    def first(self, action: Callable[[], T]) -> T:
        """Run `action` on the first rank, as `longspan.comm.agree.on_first_rank`. Collective."""
        return on_first_rank(os_errors_as_longspan_errors()(action), self._group)

    @property
    def _group(self) -> dist.ProcessGroup | None:
        return None if self.size == 1 else self.group or dist.group.WORLD


def check_finite(tensors: dict[str, Any], what: str, ranks: Ranks, hint: str) -> None:
    """Raise on every rank if a floating-point tensor holds NaN or infinity on any, naming the first. Collective."""
    local = {name: local_part(x) for name, x in tensors.items() if isinstance(x, Tensor) and x.is_floating_point()}
    # A sum takes a quarter of the time of `isfinite`, and is finite only if all numbers are. It may overflow, so
    # `isfinite` decides if one is not. One stacked tensor: each bool() would wait for a GPU's queue.
    sums = [x.sum(dtype=torch.float32) for x in local.values() if x.numel()]
    problem = None
    if sums and not bool(torch.isfinite(torch.stack([x.to(sums[0].device) for x in sums])).all()):
        problem = next((text for name, x in local.items() if (text := _problem(name, x))), None)
    problems = {rank: text for rank, text in enumerate(ranks.gather(problem)) if text}
    if problems:
        rank = min(problems)
        where = f" on rank {rank}" if ranks.size > 1 else ""
        raise LongspanError(f"{what}: {problems[rank]}{where} (of {len(problems)} ranks with such numbers); {hint}")


def short_name(name: str) -> str:
    """Return a tensor's name as users know it: "model." is that of a checkpoint's part."""
    return name.removeprefix("model.") if name.startswith("model.") else f"the optimizer's {name}"


def _problem(name: str, x: Tensor) -> str | None:
    wrong = ~torch.isfinite(x)
    count = int(wrong.sum())
    return f"{short_name(name)} holds {x[wrong][0].item()} ({count:,} of {x.numel():,} numbers)" if count else None
