"""Collectives of a tensor-parallel layer; each operator's gradient is its adjoint (arXiv:1909.08053, figure 3).

The ranks of a tensor group hold the same tokens and shards of a layer's weights. A layer's input is replicated
(`copy_in`) or sharded by tokens (`gather_tokens`); its output is a partial sum (`sum_out`, `scatter_tokens`).

Shape suffixes: B rows, L tokens of this rank's sequence shard, T tokens of a tensor rank (L / size, rounded up).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from longspan.comm import gather
from longspan.comm.mesh import find_group, group_name
from longspan.core.tile_sizes import Span, even_span


@dataclass(frozen=True)
class Parts:
    """The entries of a weight's dimension that each rank of a group computes with.

    Attributes:
        length: entries of the whole dimension.
        spans: each rank's entries, in its module's order.
    """

    length: int
    spans: tuple[tuple[Span, ...], ...]

    @property
    def even(self) -> bool:
        """Whether each rank computes with its `DTensor` shard."""
        size = len(self.spans)
        return all(spans == (even_span(self.length, r, size),) for r, spans in enumerate(self.spans))

    def pieces(self, rank: int) -> list[tuple[int, int, int]]:
        """Split a rank's spans by the rank that holds them: `(holder, start, stop)`."""
        each = -(-self.length // len(self.spans))
        found = []
        for start, stop in self.spans[rank]:
            while start < stop:
                end = min(stop, (start // each + 1) * each)
                found.append((start // each, start, end))
                start = end
        return found

    def of_whole(self, x: Tensor, dim: int, rank: int) -> Tensor:
        """Return a rank's entries of a whole tensor."""
        return _joined([x.narrow(dim, start, stop - start) for start, stop in self.spans[rank]], dim)


@dataclass(frozen=True)
class TensorGroup:
    """The ranks that share a layer's weights.

    Attributes:
        name: of the process group.
        size: its ranks.
        rank: this one's place.
    """

    name: str
    size: int
    rank: int

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> TensorGroup:
        return cls(group_name(group), group.size(), group.rank())

    def copy_in(self, x: Tensor) -> Tensor:
        """Return a replicated input; the gradients of all ranks are summed."""
        if not (torch.is_grad_enabled() and x.requires_grad):
            return x  # an operator may not return its input, and would copy it
        out: Tensor = torch.ops.longspan.tensor_copy(x, self.name)
        return out

    def sum_out(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' `x`; each part gets the gradient of the sum."""
        out: Tensor = torch.ops.longspan.tensor_sum(x, self.name)
        return out

    def largest(self, x: Tensor) -> Tensor:
        """Return the elementwise maximum over ranks, without gradient."""
        out = x.detach().clone()
        dist.all_reduce(out, op=dist.ReduceOp.MAX, group=find_group(self.name))
        return out

    def smallest(self, x: Tensor) -> Tensor:
        """Return the elementwise minimum over ranks, without gradient."""
        return -self.largest(-x)

    def gather_tokens(self, x_BTD: Tensor) -> Tensor:
        """Return all ranks' tokens, `[B, size * T, ...]`; gradients are summed and scattered."""
        out: Tensor = torch.ops.longspan.all_gather(x_BTD.transpose(0, 1), self.size, self.name)
        return out.transpose(0, 1).contiguous()

    def scatter_tokens(self, x_BLD: Tensor) -> Tensor:
        """Return the local tokens of the sum of all ranks' `x`, `[B, T, ...]`, padded as by `padded`."""
        out: Tensor = torch.ops.longspan.reduce_scatter(self.padded(x_BLD).transpose(0, 1), self.size, self.name)
        return out.transpose(0, 1).contiguous()

    def tokens(self, length: int) -> int:
        """Return the tokens of a rank, if the group has `length` tokens."""
        return -(-length // self.size)

    def padded(self, x_BLD: Tensor) -> Tensor:
        """Pad with copies of the last token, without gradient, so that all ranks have the same number of tokens.

        Not with zeros: a layer that divides by its hidden states has an infinite derivative there, and 0 times infinity
        is NaN.
        """
        short = self.size * self.tokens(x_BLD.shape[1]) - x_BLD.shape[1]
        return torch.cat([x_BLD, x_BLD[:, -1:].detach().expand(-1, short, -1)], 1) if short else x_BLD

    def my_tokens(self, x_BLD: Tensor) -> Tensor:
        """Return the local tokens of a replicated tensor, `[B, T, ...]`, padded; gradients are gathered."""
        x = self.padded(x_BLD)
        out: Tensor = torch.ops.longspan.tensor_slice(x.transpose(0, 1), self.size, self.rank, self.name)
        return out.transpose(0, 1).contiguous()

    def whole_tokens(self, x_BTD: Tensor, length: int) -> Tensor:
        """Gather all ranks' tokens, `[B, length, ...]`, for computation that is replicated: gradients are sliced."""
        out: Tensor = torch.ops.longspan.tensor_join(x_BTD.transpose(0, 1), self.size, self.rank, self.name)
        return out.transpose(0, 1)[:, :length].contiguous()

    def whole_last(self, x: Tensor, length: int) -> Tensor:
        """Gather a last dimension of `length` entries that is sharded as a `DTensor`.

        Every rank continues with the same tensor, so the local gradient is a slice of its gradient, not a sum.
        """
        short = -(-length // self.size) - x.shape[-1]  # missing entries on the last ranks
        part = F.pad(x, (0, short)) if short else x
        joined: Tensor = torch.ops.longspan.tensor_join(part.movedim(-1, 0), self.size, self.rank, self.name)
        return joined[:length].movedim(0, -1)

    def fetch(self, x: Tensor, dim: int, parts: Parts) -> Tensor:
        """Return this rank's entries of a tensor that is sharded as a `DTensor`, by one all-to-all.

        The gradient of an entry that several ranks fetch is summed on the rank that holds it.
        """
        rows = x.movedim(dim, 0)
        first, _ = even_span(parts.length, self.rank, self.size)
        send = [
            [rows[a - first : b - first] for holder, a, b in parts.pieces(r) if holder == self.rank]
            for r in range(self.size)
        ]
        wanted = parts.pieces(self.rank)
        receive = [sum(b - a for holder, a, b in wanted if holder == r) for r in range(self.size)]
        sent = _joined([piece for pieces in send for piece in pieces] or [rows[:0]], 0)
        found = exchange_rows(sent, [sum(map(len, pieces)) for pieces in send], receive, self)
        # They arrive in the order of their holders.
        arrival = sorted(range(len(wanted)), key=lambda i: wanted[i][0])
        split = found.split([wanted[i][2] - wanted[i][1] for i in arrival])
        pieces = dict(zip(arrival, split, strict=True))
        return _joined([pieces[i] for i in range(len(wanted))], 0).movedim(0, dim)


def _joined(pieces: list[Tensor], dim: int) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


@torch.library.custom_op("longspan::tensor_copy", mutates_args=())
def _copy(x: Tensor, group: str) -> Tensor:
    return x.clone()


@torch.library.custom_op("longspan::tensor_sum", mutates_args=())
def _sum(x: Tensor, group: str) -> Tensor:
    out = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, group=find_group(group))
    return out


@torch.library.custom_op("longspan::tensor_slice", mutates_args=())
def _slice(x: Tensor, size: int, rank: int, group: str) -> Tensor:
    return x.chunk(size)[rank].clone(memory_format=torch.contiguous_format)


@torch.library.custom_op("longspan::tensor_join", mutates_args=())
def _join(x: Tensor, size: int, rank: int, group: str) -> Tensor:
    out = x.new_empty(size * x.shape[0], *x.shape[1:])
    gather.gather_into(out, x.contiguous(), group=find_group(group))
    return out


_copy.register_fake(lambda x, group: torch.empty_like(x))
_sum.register_fake(lambda x, group: torch.empty_like(x, memory_format=torch.contiguous_format))
_slice.register_fake(lambda x, size, rank, group: x.new_empty(x.shape[0] // size, *x.shape[1:]))
_join.register_fake(lambda x, size, rank, group: x.new_empty(x.shape[0] * size, *x.shape[1:]))


def _note(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.rest = inputs[1:]


_copy.register_autograd(lambda ctx, g: (torch.ops.longspan.tensor_sum(g, *ctx.rest), None), setup_context=_note)
_sum.register_autograd(lambda ctx, g: (g, None), setup_context=_note)
_slice.register_autograd(
    lambda ctx, g: (torch.ops.longspan.tensor_join(g, *ctx.rest), None, None, None), setup_context=_note
)
_join.register_autograd(
    lambda ctx, g: (torch.ops.longspan.tensor_slice(g, *ctx.rest), None, None, None), setup_context=_note
)


@torch.library.custom_op("longspan::tensor_exchange", mutates_args=())
def _exchange(x: Tensor, send: list[int], receive: list[int], group: str) -> Tensor:
    out = x.new_empty(sum(receive), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), receive, send, group=find_group(group))
    return out


_exchange.register_fake(lambda x, send, receive, group: x.new_empty(sum(receive), *x.shape[1:]))


def _exchange_back(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    send, receive, group = ctx.rest
    return torch.ops.longspan.tensor_exchange(grad, receive, send, group), None, None, None


_exchange.register_autograd(_exchange_back, setup_context=_note)


def exchange_rows(x: Tensor, send: list[int], receive: list[int], group: TensorGroup) -> Tensor:
    """Send rows to each rank and return those received, in rank order: one all-to-all. The gradient is its inverse."""
    out: Tensor = torch.ops.longspan.tensor_exchange(x, send, receive, group.name)
    return out


def exchange_counts(send: list[int], group: TensorGroup, device: torch.device) -> list[int]:
    """Return how many rows each rank will send to this one."""
    mine = torch.tensor(send, dtype=torch.int64, device=device)
    found = torch.empty_like(mine)
    dist.all_to_all_single(found, mine, group=find_group(group.name))
    return found.tolist()
