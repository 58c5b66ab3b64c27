"""Point-to-point messages, posted together and waited for later; and the shift of a ring."""

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
    out: Tensor = torch.ops.longspan.ring_shift(x, hops, group_name(group))
    return out


@torch.library.custom_op("longspan::ring_shift", mutates_args=())
def _ring_shift(x: Tensor, hops: int, group: str) -> Tensor:
    out, ring = torch.empty_like(x, memory_format=torch.contiguous_format), find_group(group)
    rank, size = ring.rank(), ring.size()
    if hops % size == 0:
        return out.copy_(x)
    sent, received = P2PMessage(x.contiguous(), (rank + hops) % size, 0), P2PMessage(out, (rank - hops) % size, 0)
    wait_for(post([sent], [received], ring))
    return out


def _shift_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, ctx.hops, ctx.group = inputs


def _shift_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return torch.ops.longspan.ring_shift(grad, -ctx.hops, ctx.group), None, None


_ring_shift.register_fake(lambda x, hops, group: torch.empty_like(x, memory_format=torch.contiguous_format))
_ring_shift.register_autograd(_shift_backward, setup_context=_shift_setup)
