"""Messages between ranks: collectives as operators, each registered with its adjoint as its gradient; point to point.

Operators take plain values, so a group is passed by its name (`longspan.comm.mesh.group_name`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from longspan.comm.arguments import check_group, check_tensor
from longspan.comm.mesh import find_group, group_name
from longspan.compat.torch_api import gather_into, scatter_into
from longspan.core.validation import LARGEST_COUNT, check_number
from longspan.ranks.watch import waiting

Collective = TypeVar("Collective", bound=Callable[..., Tensor])

_OPERATORS = torch.ops.longspan


def operator(fake: Callable[..., Tensor], adjoint: Callable[..., Any]) -> Callable[[Collective], Collective]:
    """Register a function of a tensor and plain values as a custom operator.

    `fake` returns an empty output, and `adjoint` the gradient of the tensor from that of the output and the values.
    """

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, *ctx.rest = inputs

    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return adjoint(grad, *ctx.rest), *(None for _ in ctx.rest)

    def register(function: Collective) -> Collective:
        made: Any = torch.library.custom_op(f"longspan::{function.__name__.lstrip('_')}", mutates_args=())(function)
        made.register_fake(fake)
        made.register_autograd(backward, setup_context=setup)
        registered: Collective = made
        return registered

    return register


def _gathered(x: Tensor, group: str) -> Tensor:
    return x.new_empty(find_group(group).size() * x.shape[0], *x.shape[1:])


def _scattered(x: Tensor, group: str) -> Tensor:
    return x.new_empty(x.shape[0] // find_group(group).size(), *x.shape[1:])


def _same_shape(x: Tensor, group: str) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@operator(_gathered, lambda grad, group: _OPERATORS.reduce_scatter(grad, group))
def all_gather(x: Tensor, group: str) -> Tensor:
    """Return the `x [n, ...]` of all ranks, `[P * n, ...]`. Gradients of ranks differ: they are reduce-scattered."""
    out = _gathered(x, group)
    gather_into(out, x.contiguous(), group=find_group(group))
    return out


@operator(_scattered, lambda grad, group: _OPERATORS.all_gather(grad, group))
def reduce_scatter(x: Tensor, group: str) -> Tensor:
    """Return this rank's part `[n, ...]` of the sum of all `x [P * n, ...]`. Gradients are all-gathered."""
    out = _scattered(x, group)
    scatter_into(out, x.contiguous(), group=find_group(group))
    return out


@operator(_same_shape, lambda grad, group: grad)
def all_reduce(x: Tensor, group: str) -> Tensor:
    """Return the sum of all ranks' `x`. Every rank starts its backward from it: `x` gets the gradient of the sum."""
    out = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, group=find_group(group))
    return out


def sum_over(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return the sum of all ranks' `x`, as `all_reduce`; `group` is None for one rank."""
    return x if group is None or group.size() == 1 else all_reduce(x, group_name(group))


def scale_gradient(x: Tensor, factor: float) -> Tensor:
    """Return `x`, and multiply its gradient by `factor`."""
    if factor == 1 or not (torch.is_grad_enabled() and x.requires_grad):
        return x
    out: Tensor = _ScaleGradient.apply(x, factor)  # type: ignore[no-untyped-call]
    return out


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * ctx.factor, None


def replicate(x: Tensor, group: str) -> Tensor:
    """Return `x`, which is equal on all ranks, for computation that is sharded. Gradients are all-reduced."""
    if not (torch.is_grad_enabled() and x.requires_grad):
        return x
    # An operator may not return its input and copies it: only the compiler, which could misread a Function, gets one.
    if torch.compiler.is_compiling():
        return _replicate(x, group)
    out: Tensor = _Replicate.apply(x, group)  # type: ignore[no-untyped-call]
    return out


@operator(lambda x, group: torch.empty_like(x), lambda grad, group: _OPERATORS.all_reduce(grad, group))
def _replicate(x: Tensor, group: str) -> Tensor:
    return x.clone()


class _Replicate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grads[0], ctx.group), None


@operator(_gathered, lambda grad, group: _OPERATORS.local_part(grad, group))
def join(x: Tensor, group: str) -> Tensor:
    """Return the `x [n, ...]` of all ranks, `[P * n, ...]`, for computation that is replicated. Gradients are cut."""
    out = _gathered(x, group)
    gather_into(out, x.contiguous(), group=find_group(group))
    return out


@operator(_scattered, lambda grad, group: _OPERATORS.join(grad, group))
def local_part(x: Tensor, group: str) -> Tensor:
    """Return this rank's part `[n, ...]` of an `x [P * n, ...]` that is equal on all ranks. Gradients are joined."""
    ranks = find_group(group)
    return x.chunk(ranks.size())[ranks.rank()].clone(memory_format=torch.contiguous_format)


@operator(
    lambda x, send, receive, group: x.new_empty(sum(receive), *x.shape[1:]),
    lambda grad, send, receive, group: _OPERATORS.all_to_all_rows(grad, receive, send, group),
)
def all_to_all_rows(x: Tensor, send: list[int], receive: list[int], group: str) -> Tensor:
    """Send rows to each rank and return those received, in rank order: one all-to-all. Its gradient is the way back.

    Args:
        x: rows to the first rank, then those to the second, ...
        send: rows to each rank.
        receive: rows from each rank.
        group: the ranks.
    """
    out = x.new_empty(sum(receive), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), receive, send, group=find_group(group))
    return out


# ---------------------------------------------------------------------------------------------------------------------
# Point to point.


@dataclass(frozen=True)
class P2PMessage:
    """A tensor to send to, or receive from, rank `peer` of a group; both sides use the same `tag`."""

    tensor: Tensor
    peer: int
    tag: int


def post(sends: Sequence[P2PMessage], receives: Sequence[P2PMessage], group: dist.ProcessGroup) -> list[dist.Work]:
    """Start all messages; wait for each result before using its tensor.

    Both sides post in the order of the tags: NCCL ignores tags and matches messages of two ranks by order. Receives
    come first: a gloo rank that posts its send first sends and receives one after the other, in twice the time.
    """
    ops = [
        dist.P2POp(op, message.tensor, group=group, tag=message.tag, group_peer=message.peer)
        for op, messages in ((dist.irecv, receives), (dist.isend, sends))
        for message in sorted(messages, key=lambda message: message.tag)
    ]
    return dist.batch_isend_irecv(ops) if ops else []


def wait_for(works: Sequence[dist.Work]) -> None:
    """Wait until all messages are sent and received."""
    with waiting():
        for work in works:
            work.wait()


def ring_shift(x: Tensor, group: dist.ProcessGroup | None, hops: int = 1) -> Tensor:
    """Send `x` to rank + hops and return the tensor of rank - hops. The gradient is the shift by -hops.

    Args:
        x: of the same shape and dtype on every rank.
        group: the ring. None, or a group of one, returns `x` itself.
        hops: an integer; negative shifts to the left.

    Raises:
        LongspanError: for arguments of another type.
    """
    check_tensor("x", x)
    check_group(group)
    check_number("hops", hops, -LARGEST_COUNT, LARGEST_COUNT, whole=True)
    if group is None or group.size() == 1:
        return x
    return _ring_shift(x, hops, group_name(group))


@operator(
    lambda x, hops, group: torch.empty_like(x, memory_format=torch.contiguous_format),
    lambda grad, hops, group: _OPERATORS.ring_shift(grad, -hops, group),
)
def _ring_shift(x: Tensor, hops: int, group: str) -> Tensor:
    out, ring = torch.empty_like(x, memory_format=torch.contiguous_format), find_group(group)
    rank, size = ring.rank(), ring.size()
    if hops % size == 0:
        return out.copy_(x)
    sent, received = P2PMessage(x.contiguous(), (rank + hops) % size, 0), P2PMessage(out, (rank - hops) % size, 0)
    wait_for(post([sent], [received], ring))
    return out
