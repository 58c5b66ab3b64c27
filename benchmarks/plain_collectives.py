"""AllGather, ReduceScatter and AllReduce as rings, step by step over sends and receives: to read and to measure.

The library calls the backend's own collectives, which do the same with less overhead. The rings are those of Patarasuk
and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations" (J. Parallel Distrib. Comput. 69,
section 3).

P ranks hold parts of n bytes each. Bytes that a rank sends, and the time at a bandwidth of w bytes/s each way:

    ring_all_gather       every rank  n (P-1)                         n (P-1) / w
    naive_all_gather      root        n (P-1) P,  the others  n       n (P-1) (P+1) / w
    ring_reduce_scatter   every rank  n (P-1)                         n (P-1) / w
    ring_all_reduce       every rank  2 n (P-1)                       2 n (P-1) / w

The ring is faster by P + 1, because every link carries each part once and all links work all the time. No algorithm is
faster: every rank must receive n (P-1) bytes. Nothing here is differentiable.

`x` has the same shape and dtype on every rank; its first dimension holds the parts, in the order of the group's ranks.
Without a group, or in a group of one rank, each function returns `x` itself. A tensor without dimensions, or whose
first dimension does not divide by the ranks, raises a LongspanError.
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
    """Return every rank's `x`, in rank order. In each of P - 1 steps a part is passed to the next rank.

    `x` is `[n, ...]`, the result `[P * n, ...]`.
    """
    _check_dims(x, "ring_all_gather")
    if group is None or group.size() == 1:
        return x
    ranks, rank = group.size(), group.rank()
    parts = x.new_empty(ranks, *x.shape)
    parts[rank].copy_(x)
    for step in range(ranks - 1):
        # Pass on the part that arrived in the previous step; in the first step the local part.
        _pass_on(parts[(rank - step) % ranks], parts[(rank - step - 1) % ranks], group)
    return parts.flatten(0, 1)


@torch.no_grad()
def naive_all_gather(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return the same through one rank: the first collects all parts, then sends them to every other rank.

    To compare with the ring: the first rank's link carries everything while the others wait.

    `x` is `[n, ...]`, the result `[P * n, ...]`.
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
    """Return the local part of the sum of all ranks' `x`, in P - 1 steps that each pass a partial sum to the next rank.

    Partial sums of bf16 and fp16 are sent in fp32: rounded once at the end instead of at every step, for twice the
    bytes, 4 n (P-1) if n counts elements. Other dtypes are sent as they are.

    `x` is `[P * n, ...]`, the result `[n, ...]` in its dtype. A part is summed in ring order, from the rank after its
    destination to the destination, so it may differ from the backend's sum in the last digits.
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
        # The last part to arrive is the local one: rank - (P - 2) - 2 = rank mod P.
        send = receive.add_(parts[(rank - step - 2) % ranks])
    return send.to(x.dtype)


def ring_all_reduce(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return the sum of all ranks' `x`, equal bit for bit on all: a ring ReduceScatter, then a ring AllGather.

    bf16 and fp16 are sent as fp32 in the first half (see `ring_reduce_scatter`) and as they are in the second.

    `x` and the result are `[P * n, ...]`.
    """
    return ring_all_gather(ring_reduce_scatter(x, group), group)


def _check_dims(x: Tensor, name: str) -> None:
    if x.ndim == 0:
        raise LongspanError(f"{name}: a tensor without dimensions has no parts; pass x.unsqueeze(0)")


def _pass_on(send: Tensor, receive: Tensor, group: dist.ProcessGroup) -> None:
    """Send to the next rank and receive from the previous one concurrently: each link is used in both directions."""
    after, before = (group.rank() + 1) % group.size(), (group.rank() - 1) % group.size()
    # Post the receive first: if two gloo ranks both post their send first, the transfers run one after the other.
    _run(
        [
            dist.P2POp(dist.irecv, receive, group=group, group_peer=before),
            dist.P2POp(dist.isend, send, group=group, group_peer=after),
        ]
    )


def _run(ops: Sequence[dist.P2POp]) -> None:
    for request in dist.batch_isend_irecv(list(ops)):
        request.wait()
