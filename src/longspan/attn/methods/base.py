"""An attention method: from local q, k and v to the local output.

A method is a value, prepared for a batch: one device (`LocalAttention`), the KV blocks of a ring (`Ring`), or an
all-to-all around another method (`Ulysses`). Methods compose: USP is `Ulysses(inner=Ring(...))`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from longspan.attn.score import Scores


class AttentionMethod(Protocol):
    """Exact attention of the local queries."""

    def __call__(self, q_BLHD: Tensor, k_BLKD: Tensor, v_BLKV: Tensor, scores: Scores, /) -> Tensor:
        """Return `[B, L, H, V]` for q `[B, L, H, D]`, k `[B, M, K, D]`, v `[B, M, K, V]` and these heads' scores."""


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
