"""Shard one tensor of the whole sequence, and gather it again, differentiably."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from longspan.comm.arguments import check_dim, check_tensor, describe
from longspan.comm.collectives import all_gather, scale_gradient, sum_over
from longspan.comm.mesh import group_name
from longspan.core.errors import LongspanError
from longspan.core.validation import LARGEST_COUNT, check_number

if TYPE_CHECKING:
    from longspan.comm.mesh import SequenceSharding
    from longspan.core.layout import Layout


def shard(x: Tensor, sp: SequenceSharding, dim: int = 1, pad_value: float = 0) -> Tensor:
    """Return the local tokens of `x` along `dim`, padded with `pad_value` after the end of the sequence.

    Differentiable: the gradient of `x` is this rank's part, zero outside the local tokens.

    Raises:
        LongspanError: if `x` is no tensor, or has no such dimension or no entries in it.
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
    # A rank that holds only padding stays connected to the graph of `x`.
    if len(parts) == 1 and sp.layout.spans(n, sp.rank):
        return parts[0]
    return torch.cat([x.narrow(dim, 0, 0), *parts], dim)


def gather(x: Tensor, sp: SequenceSharding, dim: int = 1, length: int | None = None) -> Tensor:
    """Return all tokens of `x` along `dim`, in order, on every rank; without padding if `length` is given.

    Differentiable: the gradient of the local part is the sum over all ranks of what their losses give it (a
    reduce-scatter).

    Raises:
        LongspanError: if `x` is no tensor or has no such dimension, or no sequence (of this `length`) is sharded into
            parts of this size.
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
        x = all_gather(x.movedim(dim, 0), group_name(sp.group))
        x = in_order(x, sp.layout, total).movedim(0, dim)
    return x if length is None else x.narrow(dim, 0, length)


def global_mean(x: Tensor, sp: SequenceSharding, mask: Tensor | None = None) -> Tensor:
    """Return the mean of all ranks' entries (data x sequence), equal on every rank. Collective.

        scores = longspan.token_logprobs(model, batch)                    # of my tokens
        loss = -longspan.global_mean(scores, sp, mask=labels != -100)     # labels of my tokens
        loss.backward()                                                   # the gradients of one process

    A mean over a rank's own entries counts as one of the ranks' means, which is the global mean only if every rank has
    the same number of entries. Use this function for all others.

    Args:
        x: floating tensor of any shape; ranks may hold different numbers of entries, or none.
        sp: the sharding.
        mask: bool, of the shape of `x`: the entries that count, by default all.

    Returns:
        A scalar, fp32 (fp64 for fp64); 0 if no entry of any rank counts. Its backward multiplies by the number of
        ranks, so that gradients averaged over the ranks are those of the mean.

    Raises:
        LongspanError: if `x` is no floating tensor, or `mask` no bool tensor of its shape.
    """
    check_tensor("x", x)
    if not x.is_floating_point():
        raise LongspanError(f"`x` must be a floating tensor, got {describe(x)}")
    if mask is None:
        mask = torch.ones_like(x, dtype=torch.bool)
    elif not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.shape != x.shape:
        raise LongspanError(f"`mask` must be a bool tensor of the shape {tuple(x.shape)} of `x`, got {describe(mask)}")
    total = torch.where(mask, x, 0).sum(dtype=torch.float64)
    sums = sum_over(torch.stack([total, mask.sum(dtype=torch.float64)]), sp.fsdp_group)
    mean = scale_gradient(sums, sp.fsdp_size)[0] / sums[1].detach().clamp(min=1)
    return mean.to(torch.promote_types(x.dtype, torch.float32))


def in_order(x: Tensor, layout: Layout, n: int) -> Tensor:
    """Reorder tokens along dimension 0 from rank order to sequence order; `n` tokens, padding included."""
    held = [span for rank in range(layout.size) for span in layout.padded_spans(n, rank)]
    order = sorted(range(len(held)), key=lambda i: held[i])
    if order == list(range(len(held))):
        return x
    parts = x.split([stop - start for start, stop in held])
    return torch.cat([parts[i] for i in order])
