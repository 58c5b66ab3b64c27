"""All-gather and reduce-scatter along the first dimension, each the other's adjoint and registered as its gradient."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from longspan.comm.mesh import find_group

# torch 2.13 renames the two collectives and warns of the old names; older versions have only those.
_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
_SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"


def gather_into(out: Tensor, x: Tensor, group: dist.ProcessGroup) -> None:
    """The backend's all-gather: every rank's `x` one after the other in `out`."""
    getattr(dist, _GATHER)(out, x, group=group)


def scatter_into(out: Tensor, x: Tensor, group: dist.ProcessGroup) -> None:
    """The backend's reduce-scatter: my part of the sum of every rank's `x` in `out`."""
    getattr(dist, _SCATTER)(out, x, group=group)


@torch.library.custom_op("longspan::all_gather", mutates_args=())
def _all_gather(x: Tensor, size: int, group: str) -> Tensor:
    out = x.new_empty(size * x.shape[0], *x.shape[1:])
    gather_into(out, x.contiguous(), group=find_group(group))
    return out


@_all_gather.register_fake
def _(x: Tensor, size: int, group: str) -> Tensor:
    return x.new_empty(size * x.shape[0], *x.shape[1:])


@torch.library.custom_op("longspan::reduce_scatter", mutates_args=())
def _reduce_scatter(x: Tensor, size: int, group: str) -> Tensor:
    out = x.new_empty(x.shape[0] // size, *x.shape[1:])
    scatter_into(out, x.contiguous(), group=find_group(group))
    return out


@_reduce_scatter.register_fake
def _(x: Tensor, size: int, group: str) -> Tensor:
    return x.new_empty(x.shape[0] // size, *x.shape[1:])


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, ctx.size, ctx.group = inputs


_all_gather.register_autograd(
    lambda ctx, grad: (torch.ops.longspan.reduce_scatter(grad, ctx.size, ctx.group), None, None), setup_context=_setup
)
_reduce_scatter.register_autograd(
    lambda ctx, grad: (torch.ops.longspan.all_gather(grad, ctx.size, ctx.group), None, None), setup_context=_setup
)
