"""A custom kernel from a function that returns the output and its log-sum-exp, on one device and in rings.

For more control, inherit from `BlockKernel`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from longspan.attn.kernels.base import BackwardInputs, KernelRequest
from longspan.attn.kernels.flex import backward_by_autograd
from longspan.attn.kernels.tiled import TiledKernel, TileScores, for_device
from longspan.attn.score import Scores
from longspan.core.errors import LongspanError
from longspan.core.validation import check_function


class LseKernel(TiledKernel):
    """A function that returns output and log-sum-exp, called tile by tile; see `kernel_with_lse`."""

    computes = TiledKernel.computes - {"softcap"}

    def __init__(self, function: Callable[..., tuple[Tensor, Tensor]]) -> None:
        self.function = function
        self.name = getattr(function, "__name__", repr(function))

    def refuses(self, request: KernelRequest) -> str | None:
        return None

    def describe(self, request: KernelRequest) -> str:
        return "a custom function that returns log-sum-exps, called tile by tile"

    def to_kernel_layout(self, xs: Sequence[Tensor], v_dim: int, scores: Scores) -> list[Tensor]:
        return for_device(*xs)

    def tile_forward(self, q: Tensor, k: Tensor, v: Tensor, how: TileScores) -> tuple[Tensor, Tensor]:
        bias, empty = how.bias, None
        if bias is not None:  # unmask rows that see nothing: the gradient of their log-sum-exp would be NaN
            empty = torch.isneginf(bias).all(-1)
            bias = bias.masked_fill(empty[..., None], 0.0)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        result: Any = self.function(q, k, v, causal=how.kind == "causal", scale=how.scale, bias=bias)
        shapes = [tuple(x.shape) for x in result] if isinstance(result, tuple) else [type(result).__name__]
        B, Q, H = q.shape[:3]
        expected = [(B, Q, H, v.shape[3]), (B, H, Q)]
        if shapes != expected:
            raise LongspanError(
                f"the kernel {self.name} returned {shapes}; (out, lse) of [B, Q, H, V] and [B, H, Q] is needed: "
                f"{expected}"
            )
        out, lse = result
        if empty is not None:
            empty = empty.expand(lse.shape)
            lse = torch.where(empty, -torch.inf, lse)
            out = torch.where(empty.transpose(1, 2)[..., None], 0.0, out)
        return out.transpose(1, 2), lse

    def tile_backward(
        self, inputs: BackwardInputs, k: Tensor, v: Tensor, how: TileScores
    ) -> tuple[Tensor, Tensor, Tensor]:
        return backward_by_autograd(functools.partial(self.tile_forward, how=how), inputs, k, v)


def kernel_with_lse(function: Callable[..., tuple[Tensor, Tensor]]) -> LseKernel:
    """Make a kernel from a function that returns the log-sum-exp, so that it works in rings. Usable as a decorator.

    Args:
        function: `f(q, k, v, *, causal, scale, bias) -> (out, lse)` for one tile, differentiable in both outputs. q is
            `[B, Q, H, D]`, k and v `[B, T, K, D]` with K dividing H. `causal` is True only for Q = T, a tile on the
            diagonal. `bias` is added to the scores, -inf where a mask hides a key, broadcastable to `[B, H, Q, T]`, or
            None. `out` is `[B, Q, H, V]`, `lse` the log-sum-exp of the scores, `[B, H, Q]`, fp32 at least.

    Returns:
        A kernel for `longspan.attention(kernel=...)` and `longspan.parallelize(kernel=...)`.
    """
    check_function("function", function, "q, k, v, *, causal, scale, bias")
    return LseKernel(function)
