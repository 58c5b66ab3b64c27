"""Differentiable sums over ranks, each of which computes a part of one number."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from longspan.comm.mesh import find_group, group_name

if TYPE_CHECKING:
    from longspan.comm.mesh import SequenceSharding


def sum_over_ranks(parts: Tensor, sp: SequenceSharding) -> Tensor:
    """Return the sum over data x sequence; the gradient of `parts` is that of the sum."""
    return sum_over(parts, sp.world_group)


def sum_over(parts: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return the sum over a group; None for one rank."""
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


# Every rank holds the sum and starts its backward from it, so each part gets the gradient of the sum.
_sum_of_parts.register_autograd(lambda ctx, grad: (grad, None))
