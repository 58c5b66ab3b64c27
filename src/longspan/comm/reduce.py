"""Sums over ranks of parts that each rank computes of one number, differentiable."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from longspan.comm.mesh import find_group, group_name

if TYPE_CHECKING:
    from longspan.comm.mesh import SequenceSharding


def sum_over_ranks(parts: Tensor, sp: SequenceSharding) -> Tensor:
    """The sum over data x sequence, on every rank; the gradient of `parts` is that of the sum."""
    return sum_over(parts, sp.world_group)


def sum_over(parts: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return the sum over a group; None is a group of one."""
    if group is None or group.size() == 1:
        return parts
    total: Tensor = torch.ops.longspan.sum_of_parts(parts, group_name(group))
    return total


@torch.library.custom_op("longspan::sum_of_parts", mutates_args=())
def _sum_of_parts(x: Tensor, group: str) -> Tensor:
    out = x.clone()
    dist.all_reduce(out, group=find_group(group))
    return out


@_sum_of_parts.register_fake
def _(x: Tensor, group: str) -> Tensor:
    return torch.empty_like(x)


# The sum is one number that every rank holds; each rank's backward starts from it and goes on with its own part.
_sum_of_parts.register_autograd(lambda ctx, grad: (grad, None))
