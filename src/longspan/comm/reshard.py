"""Move a tensor's shards from one dimension to another: one all-to-all between any two dimensions.

This is the switch of Dynamic Sequence Parallelism (Zhao et al. 2024, arXiv:2403.10266). Shards need not be equal: they
differ by at most one entry, larger ones first, and a rank may hold none.

On the wire the gathered dimension comes first. The blocks of all ranks in order are then the whole dimension, so they
are copied when they are packed and not when they are received. The operator's adjoint is itself, with the two
dimensions swapped.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from longspan.comm.all_to_all import copy_wide
from longspan.comm.arguments import check_dim, check_group, check_tensor, check_two_dims
from longspan.comm.collectives import all_gather, operator
from longspan.comm.mesh import find_group, group_name
from longspan.core.errors import LongspanError
from longspan.core.validation import LARGEST_COUNT, check_number


@functools.lru_cache(maxsize=256)
def shard_sizes(length: int, ranks: int) -> tuple[int, ...]:
    """Return the entries that each rank holds: as even as possible, larger shards first."""
    return tuple(length // ranks + (rank < length % ranks) for rank in range(ranks))


def reshard(
    x: Tensor, group: dist.ProcessGroup | None, gather_dim: int, shard_dim: int, *, length: int | None = None
) -> Tensor:
    """Gather `gather_dim` and shard `shard_dim` instead: one all-to-all between any two dimensions.

    `seq_to_heads` is the case of tokens and heads. Its gradient is the reshard with the two dimensions swapped.

    Args:
        x: a tensor sharded along `gather_dim`.
        group: the ranks it is sharded over. None, or a group of one, returns `x` itself.
        gather_dim: the dimension to gather.
        shard_dim: the dimension to shard; its shards differ by at most one, larger ones first.
        length: entries of `gather_dim` on all ranks; default: local entries x ranks. If they do not divide evenly,
            every rank must pass it, because a rank cannot see how many the others hold.

    Returns:
        The same dimensions, in the wire's memory order (`gather_dim` outermost).

    Raises:
        LongspanError: if the two dimensions are the same or `x` does not have them, or if `x` is not this rank's shard
            of `length`.
    """
    check_tensor("x", x)
    gather_dim, shard_dim = check_two_dims(x, gather_dim, shard_dim)
    check_group(group)
    if length is not None:
        check_number("length", length, 1, LARGEST_COUNT, whole=True)
    if group is None or group.size() == 1:
        return x
    size, local = group.size(), x.shape[gather_dim]
    gathered = shard_sizes(local * size if length is None else length, size)
    if local != gathered[group.rank()]:
        raise LongspanError(
            f"reshard: rank {group.rank()} of {size} holds {local} entries of dimension {gather_dim}, but its shard of "
            f"length={length} is {gathered[group.rank()]}"
        )
    if not sum(gathered) or 0 in (n for dim, n in enumerate(x.shape) if dim != gather_dim):
        raise LongspanError(f"a tensor of shape {tuple(x.shape)} has nothing to send to {size} ranks")
    return move_shards(x, group, gather_dim, shard_dim, gathered, shard_sizes(x.shape[shard_dim], size))


def seq_to_heads(x: Tensor, group: dist.ProcessGroup | None, seq_dim: int = 1, head_dim: int = 2) -> Tensor:
    """Swap "local tokens, all heads" for "all tokens, local heads": one all-to-all. Its gradient is `heads_to_seq`.

    Args:
        x: local tokens and all heads, in any order of dimensions: `[B, L, H, D]`, `[B, H, L, D]`, `[L, H, D]`, ...
            Every rank holds the same number of tokens.
        group: the ranks that share the sequence. None, or a group of one, returns `x` itself.
        seq_dim: the dimension of the tokens.
        head_dim: the dimension of the heads. They are split as evenly as possible, in order, larger shards first; with
            fewer heads than ranks some ranks get none.

    Returns:
        The same dimensions with all tokens and the local heads. The memory order is the wire's (tokens outermost).

    Raises:
        LongspanError: if the two dimensions are the same or `x` does not have them.
    """
    return reshard(x, group, seq_dim, head_dim)


def heads_to_seq(
    x: Tensor, group: dist.ProcessGroup | None, seq_dim: int = 1, head_dim: int = 2, *, heads: int | None = None
) -> Tensor:
    """Swap "all tokens, local heads" for "local tokens, all heads": one all-to-all, the inverse of `seq_to_heads`.

    Args:
        x: all tokens (a multiple of the group's size) and the local shard of the heads, as `seq_to_heads` split them.
        group, seq_dim, head_dim: as for `seq_to_heads`.
        heads: total number of heads; default: local heads x ranks. If heads do not divide evenly, every rank must pass
            it, because a rank cannot see how many the others hold.

    Raises:
        LongspanError: if the tokens do not divide by the ranks, or the local heads are not this rank's shard of
            `heads`.
    """
    seq_dim, head_dim = check_two_dims(x, seq_dim, head_dim)
    check_group(group)
    if heads is not None:
        check_number("heads", heads, 1, LARGEST_COUNT, whole=True)
    size = 1 if group is None else group.size()
    if x.shape[seq_dim] % size:
        raise LongspanError(
            f"heads_to_seq: {x.shape[seq_dim]} tokens do not divide over {size} ranks; pad them to a multiple of {size}"
        )
    return reshard(x, group, head_dim, seq_dim, length=heads)


def move_shards(
    x: Tensor,
    group: dist.ProcessGroup,
    gather_dim: int,
    shard_dim: int,
    gathered: Sequence[int],
    sharded: Sequence[int],
) -> Tensor:
    """Do the same as `reshard` with shards of any sizes: what each rank holds of `gather_dim`, and gets of `shard_dim`.

    Dimensions are counted from 0.
    """
    return _reshard(x, gather_dim, shard_dim, gathered, sharded, group_name(group))


def move_shards_together(
    xs: Sequence[Tensor],
    group: dist.ProcessGroup,
    gather_dim: int,
    shard_dim: int,
    gathered: Sequence[int],
    sharded: Sequence[int],
) -> tuple[Tensor, ...]:
    """Run `move_shards` on several tensors of one shape, in one all-to-all: each is packed into the send buffer.

    The results are views of the received buffer, which an operator could not return: not for compiled code.
    """
    moved: tuple[Tensor, ...] = _MoveTogether.apply(group, gather_dim, shard_dim, gathered, sharded, *xs)  # type: ignore[no-untyped-call]
    return moved


def shard(x: Tensor, group: dist.ProcessGroup | None, dim: int) -> Tensor:
    """Return this rank's shard of a tensor that every rank holds whole, as `reshard` cuts it.

    Differentiable: the gradient is this rank's part, zero elsewhere.

    Args:
        x: the whole tensor.
        group: the ranks. None, or a group of one, returns `x` itself.
        dim: the dimension to shard; shards differ by at most one, larger ones first.
    """
    check_tensor("x", x)
    check_group(group)
    return shard_along(x, check_dim(x, dim), group)


def shard_along(x: Tensor, dim: int, group: dist.ProcessGroup | None) -> Tensor:
    """Return this rank's shard of a tensor that every rank holds whole. The gradient is zero outside the shard."""
    if group is None or group.size() == 1:
        return x
    sizes = shard_sizes(x.shape[dim], group.size())
    return x.narrow(dim, sum(sizes[: group.rank()]), sizes[group.rank()])


def gather_along(x: Tensor, dim: int, length: int, group: dist.ProcessGroup | None) -> Tensor:
    """Return the whole tensor of all ranks' shards, on every rank. Gradients are summed over the ranks and scattered.

    Args:
        x: this rank's shard of `length` along `dim`.
        dim: the sharded dimension.
        length: its entries on all ranks.
        group: the ranks.
    """
    if group is None or group.size() == 1:
        return x
    sizes = shard_sizes(length, group.size())
    rows = x.movedim(dim, 0)
    if missing := sizes[0] - rows.shape[0]:
        rows = torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])])
    whole = all_gather(rows, group_name(group))
    if len(set(sizes)) > 1:
        whole = torch.cat([part[:n] for part, n in zip(whole.split(sizes[0]), sizes, strict=True)])
    return whole.movedim(0, dim)


# ---------------------------------------------------------------------------------------------------------------------
# The operator.


class _MoveTogether(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        group: dist.ProcessGroup,
        gather_dim: int,
        shard_dim: int,
        gathered: Sequence[int],
        sharded: Sequence[int],
        *xs: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.back = shard_dim, gather_dim, sharded, gathered, group
        return _move(xs, gather_dim, shard_dim, gathered, sharded, group)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return *(None,) * 5, *_move(grads, *ctx.back)


def _new_output(
    x: Tensor, gather_dim: int, shard_dim: int, gathered: Sequence[int], sharded: Sequence[int], group: str
) -> Tensor:
    received = _received([x], gather_dim, shard_dim, gathered, sharded[find_group(group).rank()])
    return received[:, 0].movedim(0, gather_dim)


def _received(xs: Sequence[Tensor], gather_dim: int, shard_dim: int, gathered: Sequence[int], mine: int) -> Tensor:
    """Return an empty buffer for my shard of each of `xs`, the gathered dimension first."""
    shape = list(xs[0].shape)
    shape[shard_dim] = mine
    del shape[gather_dim]
    return xs[0].new_empty(sum(gathered), len(xs), *shape)


@operator(
    _new_output,
    lambda grad, gather_dim, shard_dim, gathered, sharded, group: torch.ops.longspan.reshard(
        grad, shard_dim, gather_dim, sharded, gathered, group
    ),
)
def _reshard(
    x: Tensor, gather_dim: int, shard_dim: int, gathered: Sequence[int], sharded: Sequence[int], group: str
) -> Tensor:
    return _move([x], gather_dim, shard_dim, gathered, sharded, find_group(group))[0]


def _move(
    xs: Sequence[Tensor],
    gather_dim: int,
    shard_dim: int,
    gathered: Sequence[int],
    sharded: Sequence[int],
    group: dist.ProcessGroup,
) -> tuple[Tensor, ...]:
    """Send each rank its shard of all `xs`, and return mine of each: views of the received buffer."""
    rows = [x.movedim(gather_dim, 0) for x in xs]
    send = _pack(rows, shard_dim + (shard_dim < gather_dim), sharded)
    received = _received(xs, gather_dim, shard_dim, gathered, sharded[group.rank()])
    entry = len(xs) * math.prod(rows[0].shape[1:]) // sum(sharded)
    send_splits = [rows[0].shape[0] * entry * n for n in sharded]
    recv_splits = [n * entry * sharded[group.rank()] for n in gathered]
    dist.all_to_all_single(received.view(-1), send, recv_splits, send_splits, group=group)
    return tuple(x.movedim(0, gather_dim) for x in received.unbind(1))


def _pack(xs: Sequence[Tensor], at: int, sizes: Sequence[int]) -> Tensor:
    """Copy the part of each rank, along dimension `at`, into one send buffer. A row holds all tensors."""
    send = xs[0].new_empty(len(xs) * xs[0].numel())
    even = len(set(sizes)) == 1
    # One copy for all ranks, `[ranks, rows, ...]`, or one for each, `[rows, ...]`.
    parts = [[x.unflatten(at, (len(sizes), sizes[0])).movedim(at, 0)] if even else x.split(list(sizes), at) for x in xs]
    of_ranks = list(zip(*parts, strict=True))
    for block, of_rank in zip(send.split([len(xs) * x[0].numel() for x in of_ranks]), of_ranks, strict=True):
        shape, rows = of_rank[0].shape, 1 + even
        into = block.view(*shape[:rows], len(xs), *shape[rows:])
        for i, part in enumerate(of_rank):
            copy_wide(into.select(rows, i), part)
    return send
