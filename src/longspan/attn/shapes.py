"""The tensors of an attention: their checks, and their shapes as a value."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from longspan.attn.score import Scores
from longspan.comm.arguments import describe
from longspan.core.errors import LongspanError


@dataclass(frozen=True)
class Shapes:
    """The local tensors that a plan is made for."""

    q: torch.Size  # `[batch, tokens, query heads, head_dim]`
    k: torch.Size  # `[batch, tokens, KV heads, head_dim]`
    v: torch.Size  # as `k`; its head_dim may differ
    dtype: torch.dtype  # of all three
    device: torch.device  # of all three
    grad: bool  # whether gradients are needed

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Shapes:
        inputs = (q, k, v, scores.sinks, scores.alibi)
        grad = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
        return cls(q.shape, k.shape, v.shape, q.dtype, q.device, grad)

    @property
    def head_dims(self) -> tuple[int, int]:
        """The head_dim of q and k, and that of v."""
        return self.q[3], self.v[3]

    def __str__(self) -> str:
        sizes = ", ".join(f"{name} {tuple(shape)}" for name, shape in (("q", self.q), ("k", self.k), ("v", self.v)))
        return f"{sizes}, {str(self.dtype).removeprefix('torch.')} on {self.device}"


def check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise unless these are q, k and v of one attention.

    Raises:
        LongspanError: with their shapes.
    """
    tensors = {"q": q, "k": k, "v": v}
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise LongspanError(f"`{name}` must be a tensor, got {describe(x)}")

    def listed() -> str:
        return ", ".join(f"{name} {tuple(x.shape)}" for name, x in tensors.items())

    if not q.dim() == k.dim() == v.dim() == 4:
        raise LongspanError(f"attention needs [batch, tokens, heads, head_dim], four dimensions each, got {listed()}")
    if not q.device == k.device == v.device:
        raise LongspanError(f"q, k and v must be on one device, got q {q.device}, k {k.device}, v {v.device}")
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        raise LongspanError(
            f"attention needs q, k and v of one floating dtype, got q {q.dtype}, k {k.dtype}, v {v.dtype}; cast them"
        )
    if not q.shape[0] == k.shape[0] == v.shape[0] or k.shape[1] != v.shape[1]:
        raise LongspanError(f"q, k and v must have the same batch, k and v the same tokens, got {listed()}")
    if min(*q.shape[:2], k.shape[1]) < 1:
        raise LongspanError(f"attention over no tokens: {listed()}")
    if q.shape[3] != k.shape[3] or k.shape[2] != v.shape[2]:
        raise LongspanError(f"q and k need the same head_dim, k and v the same number of heads, got {listed()}")
