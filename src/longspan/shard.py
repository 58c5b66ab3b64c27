"""One tensor of the whole sequence <-> this rank's part of it, differentiably.

`shard` cuts as the layout says and pads; `gather` puts all parts in order again. (A whole training batch: `batch.py`.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from longspan.arguments import check_dim, check_tensor, describe
from longspan.checked import LARGEST_COUNT, check_number
from longspan.errors import LongspanError
from longspan.mesh import find_group, group_name

if TYPE_CHECKING:
    from longspan.layout import Layout
    from longspan.mesh import SequenceSharding


def shard(x: Tensor, sp: SequenceSharding, dim: int = 1, pad_value: float = 0) -> Tensor:
    """My part of `x` along `dim`, as `sp.layout` cuts it, padded with `pad_value` behind the end of the sequence.

    Differentiable: the gradient of `x` is this rank's part of it, zero outside my tokens.

    Raises:
        LongspanError: for what is no tensor, a dimension that it does not have, or one without entries.
    """
    check_tensor("x", x)
    dim = check_dim(x, dim)
    if not isinstance(pad_value, int | float):
        raise LongspanError(f"`pad_value` must be a number, got {describe(pad_value)}")
    if sp.size == 1:
        return x
    n = x.shape[dim]
    parts = []
    for start, stop in sp.layout.padded_spans(n, sp.rank):
        real = max(0, min(stop, n) - start)
        if real:
            parts.append(x.narrow(dim, start, real))
        if real < stop - start:
            shape = list(x.shape)
            shape[dim] = stop - start - real
            parts.append(x.new_full(shape, pad_value))
    # A rank that holds padding alone still belongs to the graph of `x`.
    if len(parts) == 1 and sp.layout.spans(n, sp.rank):
        return parts[0]
    return torch.cat([x.narrow(dim, 0, 0), *parts], dim)


def gather(x: Tensor, sp: SequenceSharding, dim: int = 1, length: int | None = None) -> Tensor:
    """All ranks' parts of `x` along `dim`, in the sequence's order, on every rank; cut to `length` tokens if given.

    Differentiable: each rank uses the whole for its own part of the loss, so the gradient of my part is the sum of
    what all ranks send back for it (a reduce-scatter).

    Raises:
        LongspanError: if `length` does not belong to parts of this size, or no sequence is cut into such parts; for
            what is no tensor, or a dimension that it does not have.
    """
    check_tensor("x", x)
    dim = check_dim(x, dim)
    local = x.shape[dim]
    total = local * sp.size
    if sp.size > 1 and (local == 0 or sp.layout.local_length(total) != local):
        raise LongspanError(
            f"gather: no sequence gives {sp.size} ranks {local} entries each under the layout {sp.layout.kind}; gather "
            "what sp.shard cut, along the same dim"
        )
    if length is not None:
        check_number("length", length, 1, LARGEST_COUNT, whole=True)
    if length is not None and sp.layout.local_length(length) != local:
        lengths = range(max(1, total - 2 * sp.size), total + 1)
        shortest = next((n for n in lengths if sp.layout.local_length(n) == local), total)
        raise LongspanError(
            f"gather: {sp.size} ranks hold {local} entries each, which is a sequence of {shortest} to {total}, not of "
            f"length={length}"
        )
    if sp.size > 1:
        assert sp.group is not None
        first = x.movedim(dim, 0)
        x = torch.ops.longspan.all_gather(first.contiguous(), sp.size, group_name(sp.group))
        x = in_order(x, sp.layout, total).movedim(0, dim)
    return x if length is None else x.narrow(dim, 0, length)


def in_order(x: Tensor, layout: Layout, n: int) -> Tensor:
    """Tokens along dimension 0, rank after rank, put into the sequence's order; `n` tokens, padding included."""
    held = [span for rank in range(layout.size) for span in layout.padded_spans(n, rank)]
    order = sorted(range(len(held)), key=lambda i: held[i])
    if order == list(range(len(held))):
        return x
    pieces = x.split([stop - start for start, stop in held])
    return torch.cat([pieces[i] for i in order])


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
