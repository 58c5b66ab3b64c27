"""One device, or all tokens of a Ulysses rank, by a kernel that wants all keys and gives the output alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from longspan.attn.kernels.base import AutogradKernel
from longspan.attn.score import Scores


@dataclass(frozen=True, eq=False)
class LocalAttention:
    """A kernel, prepared for a batch: a method.

    Attributes:
        kernel: the kernel.
        prepared: what it prepared.
        kv_head_index: for every query head its KV head, int64 [H], where they are not in equal groups.
    """

    kernel: AutogradKernel
    prepared: Any
    kv_head_index: Tensor | None = None

    def laid(self, q_BSHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See `AutogradKernel.laid`."""
        if q_BSHD.shape[2] == 0 or self.kv_head_index is not None:
            return q_BSHD, k_BTKD, v_BTKD
        return self.kernel.laid(q_BSHD, k_BTKD, v_BTKD, self.prepared)

    def __call__(self, q_BSHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, scores: Scores) -> Tensor:
        """Exact attention of all tokens on these heads: `[B, S, H, Dv]`."""
        if q_BSHD.shape[2] == 0:
            return scores.nothing(q_BSHD, v_BTKD)
        if self.kv_head_index is not None:
            k_BTKD, v_BTKD = (x.index_select(2, self.kv_head_index) for x in (k_BTKD, v_BTKD))
        return self.kernel.run(q_BSHD, k_BTKD, v_BTKD, self.prepared, scores)
