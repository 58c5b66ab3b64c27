"""Messages between two ranks: posted together, waited for when they are needed; and the shift of a whole ring."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from longspan.comm.arguments import check_group, check_tensor
from longspan.comm.mesh import find_group, group_name
from longspan.core.validation import LARGEST_COUNT, check_number
from longspan.ranks.heartbeat import waiting

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class P2PMessage:
    """A tensor to send to, or receive from, rank `peer` of a group. What belongs together has the same `tag` there."""

    tensor: Tensor
    peer: int
    tag: int


def post(sends: Sequence[P2PMessage], receives: Sequence[P2PMessage], group: dist.ProcessGroup) -> list[dist.Work]:
    """Start all of them and return; wait for each of the results before touching the tensors.

    Both sides list their parcels in the order of the tags: NCCL knows no tags and goes by the order between two ranks.
    Receives come first: a gloo rank that sends before it has said where to receive sends and receives in turns, which
    takes twice as long.
    """
    ops = [dist.P2POp(dist.irecv, r.tensor, group=group, tag=r.tag, group_peer=r.peer) for r in _by_tag(receives)]
    ops += [dist.P2POp(dist.isend, s.tensor, group=group, tag=s.tag, group_peer=s.peer) for s in _by_tag(sends)]
    return dist.batch_isend_irecv(ops) if ops else []


def wait_for(works: Sequence[dist.Work]) -> None:
    """Wait until all of these messages are sent and received."""
    with waiting():
        for work in works:
            work.wait()


def _by_tag(parcels: Sequence[P2PMessage]) -> list[P2PMessage]:
    return sorted(parcels, key=lambda parcel: parcel.tag)


def ring_shift(x: Tensor, group: dist.ProcessGroup | None, hops: int = 1) -> Tensor:
    """What rank - hops holds, while mine goes to rank + hops. Its gradient is the shift by -hops.

    Args:
        x: of the same shape and dtype on every rank.
        group: the ring. None, or a group of one, returns `x` itself.
        hops: how far; negative is to the left.

    Raises:
        LongspanError: for what is no tensor, no group, or no whole number of hops.
    """
    check_tensor("x", x)
    check_group(group)
    check_number("hops", hops, -LARGEST_COUNT, LARGEST_COUNT, whole=True)
    if group is None or group.size() == 1:
        return x
    out: Tensor = torch.ops.longspan.ring_shift(x, hops, group.size(), group.rank(), group_name(group))
    return out


@torch.library.custom_op("longspan::ring_shift", mutates_args=())
def _ring_shift(x: Tensor, hops: int, size: int, rank: int, group: str) -> Tensor:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if hops % size == 0:
        return out.copy_(x)
    mine = P2PMessage(x.contiguous(), (rank + hops) % size, 0)
    wait_for(post([mine], [P2PMessage(out, (rank - hops) % size, 0)], find_group(group)))
    return out


@_ring_shift.register_fake
def _(x: Tensor, hops: int, size: int, rank: int, group: str) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _shift_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, ctx.hops, ctx.size, ctx.rank, ctx.group = inputs


def _shift_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return torch.ops.longspan.ring_shift(grad, -ctx.hops, ctx.size, ctx.rank, ctx.group), None, None, None, None


_ring_shift.register_autograd(_shift_backward, setup_context=_shift_setup)
