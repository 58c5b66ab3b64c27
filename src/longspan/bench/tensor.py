"""Tensor parallelism and Megatron SP in a page, to be measured: the sums of hidden states around split products.

Shoeybi et al. 2019, "Megatron-LM", arXiv:1909.08053, section 3: `enter` (f) before a column-split product and `leave`
(g) after a row-split one. Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2: the same places with an all-gather
and a reduce-scatter, between which hidden states are sharded by tokens.

Shapes: x is [B, N, d]; by tokens [B, N / P, d].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from longspan.compat.torch_api import gather_into, scatter_into


@dataclass(frozen=True)
class Tensors:
    """The ranks of a tensor-parallel group.

    Attributes:
        group: the ranks.
        by_tokens: Megatron SP: hidden states between products are sharded by tokens.
    """

    group: dist.ProcessGroup
    by_tokens: bool

    def enter(self, x: Tensor) -> Tensor:
        """Into products whose columns are split: every token's hidden state; gradients are summed over the ranks."""
        out: Tensor = (_Gather if self.by_tokens else _Copy).apply(x, self.group)  # type: ignore[no-untyped-call]
        return out

    def leave(self, x: Tensor) -> Tensor:
        """Out of a product whose rows are split: the sum over the ranks, of all tokens or of mine."""
        out: Tensor = (_Scatter if self.by_tokens else _Sum).apply(x, self.group)  # type: ignore[no-untyped-call]
        return out

    def mine(self, x: Tensor) -> Tensor:
        """My tokens of all that every rank holds; gradients of all tokens come back. `x` itself without `by_tokens`."""
        if not self.by_tokens:
            return x
        out: Tensor = _Cut.apply(x, self.group)  # type: ignore[no-untyped-call]
        return out


def _summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    out = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, group=group)
    return out


def _gathered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Tokens first, as a gather puts one rank's part after the other's."""
    rows = x.transpose(0, 1).contiguous()
    out = rows.new_empty(group.size() * rows.shape[0], *rows.shape[1:])
    gather_into(out, rows, group=group)
    return out.transpose(0, 1)


def _scattered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    rows = x.transpose(0, 1).contiguous()
    out = rows.new_empty(rows.shape[0] // group.size(), *rows.shape[1:])
    scatter_into(out, rows, group=group)
    return out.transpose(0, 1)


class _Copy(torch.autograd.Function):
    """f of tensor parallelism: nothing, and the sum of the gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _summed(grad, ctx.group), None


class _Sum(torch.autograd.Function):
    """g of tensor parallelism: the sum, and nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _summed(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Gather(torch.autograd.Function):
    """f of Megatron SP: all tokens, and of the gradients' sum my tokens'."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _gathered(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _scattered(grad, ctx.group), None


class _Scatter(torch.autograd.Function):
    """g of Megatron SP: of the sum my tokens', and the gradients of all."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _scattered(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _gathered(grad, ctx.group), None


class _Cut(torch.autograd.Function):
    """My tokens of what is the same on every rank, and the gradients of all."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.chunk(group.size(), 1)[group.rank()].contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _gathered(grad, ctx.group), None
