"""All-gather and reduce-scatter along the first dimension; each is registered as the other's gradient, its adjoint."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from longspan.compat.torch_api import find_group
from longspan.compat.torch_api import gather_into as gather_into
from longspan.compat.torch_api import scatter_into as scatter_into


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
