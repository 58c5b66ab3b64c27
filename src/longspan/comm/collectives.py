"""Collectives as operators, each registered with its adjoint as its gradient.

Operators take plain values, so a group is passed by its name (`longspan.comm.mesh.group_name`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from longspan.comm.mesh import find_group, group_name
from longspan.compat.torch_api import gather_into, scatter_into


def all_gather(x: Tensor, group: str) -> Tensor:
    """Return the `x [n, ...]` of all ranks, `[P * n, ...]`. Gradients of ranks differ: they are reduce-scattered."""
    out: Tensor = torch.ops.longspan.all_gather(x, group)
    return out


def reduce_scatter(x: Tensor, group: str) -> Tensor:
    """Return this rank's part `[n, ...]` of the sum of all `x [P * n, ...]`. Gradients are all-gathered."""
    out: Tensor = torch.ops.longspan.reduce_scatter(x, group)
    return out


def all_reduce(x: Tensor, group: str) -> Tensor:
    """Return the sum of all ranks' `x`. Every rank starts its backward from it: `x` gets the gradient of the sum."""
    out: Tensor = torch.ops.longspan.all_reduce(x, group)
    return out


def sum_over(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return the sum of all ranks' `x`, as `all_reduce`; `group` is None for one rank."""
    return x if group is None or group.size() == 1 else all_reduce(x, group_name(group))


def replicate(x: Tensor, group: str) -> Tensor:
    """Return `x`, which is equal on all ranks, for computation that is sharded. Gradients are all-reduced."""
    if not (torch.is_grad_enabled() and x.requires_grad):
        return x
    # An operator may not return its input and copies it: only the compiler, which could misread a Function, gets one.
    if torch.compiler.is_compiling():
        compiled: Tensor = torch.ops.longspan.replicate(x, group)
        return compiled
    out: Tensor = _Replicate.apply(x, group)  # type: ignore[no-untyped-call]
    return out


def join(x: Tensor, group: str) -> Tensor:
    """Return the `x [n, ...]` of all ranks, `[P * n, ...]`, for computation that is replicated. Gradients are cut."""
    out: Tensor = torch.ops.longspan.join(x, group)
    return out


def local_part(x: Tensor, group: str) -> Tensor:
    """Return this rank's part `[n, ...]` of an `x [P * n, ...]` that is equal on all ranks. Gradients are joined."""
    out: Tensor = torch.ops.longspan.local_part(x, group)
    return out


def exchange_rows(x: Tensor, send: list[int], receive: list[int], group: str) -> Tensor:
    """Send rows to each rank and return those received, in rank order: one all-to-all. Its gradient is the way back.

    Args:
        x: rows to the first rank, then those to the second, ...
        send: rows to each rank.
        receive: rows from each rank.
        group: the ranks.
    """
    out: Tensor = torch.ops.longspan.exchange_rows(x, send, receive, group)
    return out


def exchange_counts(counts: Tensor, group: str) -> tuple[Tensor, list[int], list[int]]:
    """Exchange the numbers of rows that are about to be sent: one all-to-all, then one wait of the host.

    Args:
        counts: `[ranks, kinds]` int64, the rows of each kind to each rank.
        group: the ranks.

    Returns:
        The rows of each kind from each rank; of all kinds, the rows to each rank and those from each rank.
    """
    received = torch.empty_like(counts)
    dist.all_to_all_single(received, counts, group=find_group(group))
    send, receive = torch.stack([counts.sum(1), received.sum(1)]).tolist()
    return received, send, receive


class _Replicate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grads[0], ctx.group), None


# ---------------------------------------------------------------------------------------------------------------------
# The operators.


def _gathered(x: Tensor, group: str) -> Tensor:
    return x.new_empty(find_group(group).size() * x.shape[0], *x.shape[1:])


def _scattered(x: Tensor, group: str) -> Tensor:
    return x.new_empty(x.shape[0] // find_group(group).size(), *x.shape[1:])


@torch.library.custom_op("longspan::all_gather", mutates_args=())
def _all_gather(x: Tensor, group: str) -> Tensor:
    out = _gathered(x, group)
    gather_into(out, x.contiguous(), group=find_group(group))
    return out


@torch.library.custom_op("longspan::reduce_scatter", mutates_args=())
def _reduce_scatter(x: Tensor, group: str) -> Tensor:
    out = _scattered(x, group)
    scatter_into(out, x.contiguous(), group=find_group(group))
    return out


@torch.library.custom_op("longspan::all_reduce", mutates_args=())
def _all_reduce(x: Tensor, group: str) -> Tensor:
    out = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, group=find_group(group))
    return out


@torch.library.custom_op("longspan::replicate", mutates_args=())
def _replicate(x: Tensor, group: str) -> Tensor:
    return x.clone()


@torch.library.custom_op("longspan::join", mutates_args=())
def _join(x: Tensor, group: str) -> Tensor:
    out = _gathered(x, group)
    gather_into(out, x.contiguous(), group=find_group(group))
    return out


@torch.library.custom_op("longspan::local_part", mutates_args=())
def _local_part(x: Tensor, group: str) -> Tensor:
    ranks = find_group(group)
    return x.chunk(ranks.size())[ranks.rank()].clone(memory_format=torch.contiguous_format)


@torch.library.custom_op("longspan::exchange_rows", mutates_args=())
def _exchange_rows(x: Tensor, send: list[int], receive: list[int], group: str) -> Tensor:
    out = x.new_empty(sum(receive), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), receive, send, group=find_group(group))
    return out


_all_gather.register_fake(_gathered)
_reduce_scatter.register_fake(_scattered)
_all_reduce.register_fake(lambda x, group: torch.empty_like(x, memory_format=torch.contiguous_format))
_replicate.register_fake(lambda x, group: torch.empty_like(x))
_join.register_fake(_gathered)
_local_part.register_fake(_scattered)
_exchange_rows.register_fake(lambda x, send, receive, group: x.new_empty(sum(receive), *x.shape[1:]))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, *ctx.rest = inputs


def _exchange_back(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    send, receive, group = ctx.rest
    return exchange_rows(grad, receive, send, group), None, None, None


_all_gather.register_autograd(lambda ctx, grad: (reduce_scatter(grad, *ctx.rest), None), setup_context=_setup)
_reduce_scatter.register_autograd(lambda ctx, grad: (all_gather(grad, *ctx.rest), None), setup_context=_setup)
_all_reduce.register_autograd(lambda ctx, grad: (grad, None))
_replicate.register_autograd(lambda ctx, grad: (all_reduce(grad, *ctx.rest), None), setup_context=_setup)
_join.register_autograd(lambda ctx, grad: (local_part(grad, *ctx.rest), None), setup_context=_setup)
_local_part.register_autograd(lambda ctx, grad: (join(grad, *ctx.rest), None), setup_context=_setup)
_exchange_rows.register_autograd(_exchange_back, setup_context=_setup)
