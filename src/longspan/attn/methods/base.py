"""An attention method, from local q, k and v to the local output, and the plainest: one kernel on one device.

A method is a value, prepared for a batch: one device (`LocalAttention`), the KV blocks of a ring (`Ring`, of any size
from 1), or an all-to-all around another method (`Ulysses`). Methods compose: USP is `Ulysses(inner=Ring(...))`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from longspan.attn.kernels.base import AutogradKernel
from longspan.attn.score import Scores


class AttentionMethod(Protocol):
    """Exact attention of the local queries."""

    def __call__(self, q_BLHD: Tensor, k_BLKD: Tensor, v_BLKV: Tensor, scores: Scores, /) -> Tensor:
        """Return `[B, L, H, V]` for q `[B, L, H, D]`, k `[B, M, K, D]`, v `[B, M, K, V]` and these heads' scores."""


@dataclass(frozen=True, eq=False)
class LocalAttention:
    """One kernel call over all keys, with autograd's backward: an `AttentionMethod` of one device or Ulysses rank."""

    kernel: AutogradKernel
    prepared: Any  # what the kernel prepared for the batch
    kv_head_index: Tensor | None = None  # the KV head of every query head, int64 [H], if KV groups are uneven

    def to_kernel_layout(self, q_BSHD: Tensor, k_BTKD: Tensor, v_BTKV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See `AutogradKernel.to_kernel_layout`."""
        if q_BSHD.shape[2] == 0 or self.kv_head_index is not None:
            return q_BSHD, k_BTKD, v_BTKV
        return self.kernel.to_kernel_layout(q_BSHD, k_BTKD, v_BTKV, self.prepared)

    def __call__(self, q_BSHD: Tensor, k_BTKD: Tensor, v_BTKV: Tensor, scores: Scores) -> Tensor:
        """Return the attention of all tokens on these heads: `[B, S, H, V]`."""
        if q_BSHD.shape[2] == 0:
            return scores.output_without_heads(q_BSHD, v_BTKV)
        if self.kv_head_index is not None:
            k_BTKD, v_BTKV = (x.index_select(2, self.kv_head_index) for x in (k_BTKD, v_BTKV))
        out = self.kernel.run(q_BSHD, k_BTKD, v_BTKV, self.prepared, scores)
        inputs = [x for x in (q_BSHD, k_BTKD, v_BTKV, scores.sinks) if x is not None and x.requires_grad]
        if inputs and torch.is_grad_enabled() and not out.requires_grad:
            # Nothing attends, as all tokens are padding. Stay in the graph: other ranks have gradients to sum.
            out = out + torch.stack([x[:0].sum() for x in inputs]).sum().to(out.dtype)
        return out


class SavedAttentions(Protocol):
    """The saved attention outputs of one call of a checkpointed layer.

    The forward saves them; the recomputed forward, before the layer's backward, loads them again in the same order.
    """

    recomputing: bool  # whether the layer is being recomputed

    def save(self, tensors: Sequence[Tensor]) -> SavedTensors:
        """Save what one attention needs for its backward."""

    def load_next(self) -> SavedTensors:
        """Return what the layer's next attention has saved."""


class SavedTensors(Protocol):
    """What one attention has saved, on the device or offloaded."""

    def tensors(self) -> list[Tensor]:
        """Return the tensors on their device."""

    def release(self) -> None:
        """Free the tensors after their backward, unless the graph is kept for another one."""
