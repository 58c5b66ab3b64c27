"""Attention scores as a value: what is applied to q.k before the softmax."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from longspan.attn.mask import over_indices
from longspan.comm.arguments import check_tensor
from longspan.core.errors import LongspanError
from longspan.core.validation import check_function, check_number, format_value

Bias = Callable[[Tensor, Tensor, Tensor], Tensor]
"""`bias(h, q, kv) -> float`: added to the score of query head h, query position q and key position kv."""


class ScoreKind(NamedTuple):
    """The parts of `Scores` that decide how attention is computed: layers of one kind share a plan."""

    softcap: float | None
    sinks: bool
    alibi: bool
    bias: bool

    @property
    def has_bias(self) -> bool:
        """Whether the score depends on positions."""
        return self.alibi or self.bias


@dataclass(frozen=True, eq=False)
class Scores:
    """scale * q.k, then softcap, then biases; sinks join the softmax's denominator.

    `longspan.attention` accepts every field but `first_head` as a keyword argument.
    """

    scale: float | None = None  # None for 1/sqrt(head_dim)
    softcap: float | None = None  # scores become softcap * tanh(scores / softcap) (Gemma-2)
    # One learnt logit per query head, [H]; it takes weight from the keys and adds no value (gpt-oss).
    sinks: Tensor | None = None
    # One slope per query head, [H]: slope * -|i - j| is added (Press et al. 2021, arXiv:2108.12409).
    alibi: Tensor | None = None
    # A function of head and positions whose value is added. Heads and positions are those of the whole model and
    # sequence, on every rank.
    bias: Bias | None = None
    # Index of the first local query head in the whole model; `bias` and a mask_mod count from 0 there.
    first_head: int = 0

    def __post_init__(self) -> None:
        if self.softcap is not None:
            check_number(f"softcap={format_value(self.softcap)}", self.softcap, 0, above=True)
        if self.scale is not None:
            check_number("scale", self.scale)
        for name in ("sinks", "alibi"):
            if getattr(self, name) is not None:
                check_tensor(name, getattr(self, name), 1)
        if self.bias is not None:
            check_function("bias", self.bias, "h, q, kv")

    @property
    def kind(self) -> ScoreKind:
        return ScoreKind(self.softcap, self.sinks is not None, self.alibi is not None, self.bias is not None)

    def scale_of(self, head_dim: int) -> float:
        return 1 / math.sqrt(head_dim) if self.scale is None else self.scale

    def of_heads(self, start: int, stop: int) -> Scores:
        """Return the scores of query heads [start, stop) of these."""
        if start == 0 and self.sinks is None and self.alibi is None:
            return self
        sinks = None if self.sinks is None else self.sinks[start:stop]
        alibi = None if self.alibi is None else self.alibi[start:stop]
        return replace(self, sinks=sinks, alibi=alibi, first_head=self.first_head + start)

    def output_without_heads(self, q: Tensor, v: Tensor) -> Tensor:
        """Return the output of an attention without query heads, still connected to the graph of its inputs.

        Otherwise the all-to-all before it would have no backward on this rank, and the sinks no gradient, which FSDP
        sums over all ranks.

        Args:
            q: has no head; the output has its shape with the head_dim of `v`.
            v: values.
        """
        zero = q.sum() if self.sinks is None else q.sum() + self.sinks.sum().to(q.dtype)
        return q.new_empty(*q.shape[:3], v.shape[3]) + zero

    def check(self, heads: int) -> None:
        """Raise if `sinks` or `alibi` do not have one entry for each of `heads` query heads."""
        for name in ("sinks", "alibi"):
            value = getattr(self, name)
            if value is not None and tuple(value.shape) != (heads,):
                raise LongspanError(f"`{name}` has the shape {tuple(value.shape)}, one per query head is {(heads,)}")

    def bias_of(self, heads: int, i: Tensor, j: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Return the sum of all biases for queries at positions `i` and keys at `j`: [H, Q, K], or None."""
        total_HQK: Tensor | None = None
        if self.alibi is not None:
            distance_QK = (i[:, None] - j[None]).abs().to(dtype)
            total_HQK = -self.alibi.to(dtype)[:, None, None] * distance_QK
        if self.bias is not None:
            h = torch.arange(self.first_head, self.first_head + heads, device=i.device)
            bias_HQK = over_indices("bias", self.bias, h, i, j).to(dtype)
            total_HQK = bias_HQK if total_HQK is None else total_HQK + bias_HQK
        return total_HQK
