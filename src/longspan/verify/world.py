"""Communication between all ranks of a verification; without effect on a single process."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from longspan.comm.mesh import SequenceSharding
from longspan.comm.objects import gather_objects

_TIMEOUT = timedelta(days=2)
"""The ranks wait for rank 0's unsharded runs: in fp64 on a CPU, a real model takes hours."""


@dataclass(frozen=True)
class World:
    """All ranks of the mesh.

    Attributes:
        rank: this rank's index among them.
        group: for tensors on the device; None on a single process.
        cpu_group: for Python objects, with a long timeout; None on a single process.
        device: of this rank's tensors.
    """

    rank: int
    group: dist.ProcessGroup | None
    cpu_group: dist.ProcessGroup | None
    device: torch.device

    @classmethod
    def of(cls, sp: SequenceSharding) -> World:
        """Make the groups. Collective."""
        group = sp.mesh_group
        cpu_group = None if group is None else dist.new_group(backend="gloo", timeout=_TIMEOUT)
        rank = (sp.data_rank * sp.size + sp.rank) * sp.tensor_size + sp.tensor_rank
        return cls(rank, group, cpu_group, sp.device)

    def broadcast(self, x: Tensor) -> None:
        """Overwrite `x` with rank 0's."""
        if self.group is not None:
            dist.broadcast(x, group_src=0, group=self.group)

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in rank order."""
        return gather_objects(value, self.cpu_group)
