"""Attention of one device, or of all tokens of a Ulysses rank, by a kernel with autograd's backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longspan.attn.kernels.base import AutogradKernel
from longspan.attn.score import Scores


@dataclass(frozen=True, eq=False)
class LocalAttention:
    """One kernel call over all keys: an `AttentionMethod`.

    Attributes:
        kernel: the kernel.
        prepared: what the kernel prepared for the batch.
        kv_head_index: the KV head of every query head, int64 [H], if KV groups are uneven.
    """

    kernel: AutogradKernel
    prepared: Any
    kv_head_index: Tensor | None = None

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
