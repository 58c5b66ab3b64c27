"""AllGather, ReduceScatter and AllReduce as rings, written out step by step over sends and receives.

For reading, for tests and for benchmarks. The jobs call the backend's own collectives (`torch.distributed`), which do
the same with less overhead; what is here shows where the bytes go. The ring is that of Patarasuk and Yuan 2009,
"Bandwidth optimal all-reduce algorithms for clusters of workstations" (J. Parallel Distrib. Comput. 69, section 3).

P ranks hold parts of n bytes each. Bytes that a rank sends, and the time at a bandwidth of w bytes/s each way:

    ring_all_gather       every rank  n (P-1)                         n (P-1) / w
    naive_all_gather      root        n (P-1) P,  the others  n       n (P-1) (P+1) / w
    ring_reduce_scatter   every rank  n (P-1)                         n (P-1) / w
    ring_all_reduce       every rank  2 n (P-1)                       2 n (P-1) / w

The ring is the faster by P + 1, since each link carries each part once and all links work all the time; no algorithm
does better, because every rank has to receive n (P-1) bytes. Nothing here is differentiable.

Shapes: x is [n, ...] or [P*n, ...]; the first dimension is that of the parts, in the order of the group's ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from longspan.core.errors import LongspanError

if TYPE_CHECKING:
    from collections.abc import Sequence


@torch.no_grad()
def ring_all_gather(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Every rank's `x`, in rank order, on every rank. P - 1 steps, in each of which a part goes on to the next rank.

    Args:
        x: my part, `[n, ...]`, of the same shape and dtype on every rank.
        group: the ranks. None, or a group of one, returns `x` itself.

    Returns:
        `[P * n, ...]`, contiguous.

    Raises:
        LongspanError: if `x` has no dimension.
    """
    _check_dims(x, "ring_all_gather")
    if group is None or group.size() == 1:
        return x
    ranks, rank = group.size(), group.rank()
    parts = x.new_empty(ranks, *x.shape)
    parts[rank].copy_(x)
    for step in range(ranks - 1):
        # What arrived in the step before, and my own part in the first, is what the next rank lacks.
        _pass_on(parts[(rank - step) % ranks], parts[(rank - step - 1) % ranks], group)
    return parts.flatten(0, 1)


@torch.no_grad()
def naive_all_gather(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The same result by way of one rank: the group's first collects all parts, then sends the whole to every other.

    It is there to be compared with the ring: the first rank's link carries everything while the others wait.

    Args:
        x: my part, `[n, ...]`, of the same shape and dtype on every rank.
        group: the ranks. None, or a group of one, returns `x` itself.

    Returns:
        `[P * n, ...]`, contiguous.

    Raises:
        LongspanError: if `x` has no dimension.
    """
    _check_dims(x, "naive_all_gather")
    if group is None or group.size() == 1:
        return x
    parts = x.new_empty(group.size(), *x.shape)
    if group.rank() == 0:
        parts[0].copy_(x)
        others = range(1, group.size())
        _run([dist.P2POp(dist.irecv, parts[other], group=group, group_peer=other) for other in others])
        _run([dist.P2POp(dist.isend, parts, group=group, group_peer=other) for other in others])
    else:
        _run([dist.P2POp(dist.isend, x.contiguous(), group=group, group_peer=0)])
        _run([dist.P2POp(dist.irecv, parts, group=group, group_peer=0)])
    return parts.flatten(0, 1)


@torch.no_grad()
def ring_reduce_scatter(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """My part of the sum of all ranks' `x`. P - 1 steps, in each of which a partial sum goes on to the next rank.

    A partial sum travels in the dtype it is added in. For bf16 and fp16 that is fp32: rounded once at the end instead
    of at every step, for twice the bytes on the wire, 4 n (P-1) where n counts elements. Other dtypes travel as they
    are.

    Args:
        x: `[P * n, ...]`, of the same shape and dtype on every rank.
        group: the ranks. None, or a group of one, returns `x` itself.

    Returns:
        `[n, ...]`, contiguous, in the dtype of `x`. A part is added up in ring order, from the rank after its owner
        round to the owner, so floating point may differ from the backend's sum in the last digits.

    Raises:
        LongspanError: if `x` has no dimension, or its first does not divide by the ranks.
    """
    _check_dims(x, "ring_reduce_scatter")
    if group is None or group.size() == 1:
        return x
    ranks, rank = group.size(), group.rank()
    if x.shape[0] % ranks:
        raise LongspanError(
            f"ring_reduce_scatter: the first dimension of shape {tuple(x.shape)} does not divide over {ranks} ranks; "
            f"pad it to {-(-x.shape[0] // ranks) * ranks}"
        )
    wide = torch.float32 if x.dtype in (torch.bfloat16, torch.float16) else x.dtype
    parts = x.tensor_split(ranks)
    send = parts[(rank - 1) % ranks].to(wide).contiguous()
    for step in range(ranks - 1):
        receive = torch.empty_like(send)
        _pass_on(send, receive, group)
        # The parts go backwards round the ring, and the last to arrive is mine: rank - (P - 2) - 2 = rank mod P.
        send = receive.add_(parts[(rank - step - 2) % ranks])
    return send.to(x.dtype)


def ring_all_reduce(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The sum of all ranks' `x` on every rank, equal to the bit on all: a ring ReduceScatter, then a ring AllGather.

    bf16 and fp16 travel as fp32 in the first half (see `ring_reduce_scatter`) and as they are in the second.

    Args:
        x: `[P * n, ...]`, of the same shape and dtype on every rank.
        group: the ranks. None, or a group of one, returns `x` itself.

    Raises:
        LongspanError: if `x` has no dimension, or its first does not divide by the ranks.
    """
    return ring_all_gather(ring_reduce_scatter(x, group), group)


def _check_dims(x: Tensor, name: str) -> None:
    if x.ndim == 0:
        raise LongspanError(f"{name}: a tensor without dimensions has no parts; pass x.unsqueeze(0)")


def _pass_on(send: Tensor, receive: Tensor, group: dist.ProcessGroup) -> None:
    """`send` to the next rank and `receive` from the one before, both at once: each link is used in both directions."""
    after, before = (group.rank() + 1) % group.size(), (group.rank() - 1) % group.size()
    # The receive first: between two ranks gloo sends one way after the other if both have posted their send first.
    _run(
        [
            dist.P2POp(dist.irecv, receive, group=group, group_peer=before),
            dist.P2POp(dist.isend, send, group=group, group_peer=after),
        ]
    )


def _run(ops: Sequence[dist.P2POp]) -> None:
    for request in dist.batch_isend_irecv(list(ops)):
        request.wait()
