"""The protocol of a method: what turns my tokens' q, k, v into my tokens' output, over a sharding.

A method is a value, prepared for a batch: one device (`LocalAttention`), KV blocks of a ring (`Ring`, of any size
from 1), or an all-to-all around another method (`Ulysses`). They compose: USP is `Ulysses(inner=Ring(...))`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from longspan.attn.score import Scores


class AttentionMethod(Protocol):
    """Exact attention of the queries that are here."""

    def __call__(self, q_BLHD: Tensor, k_BLKD: Tensor, v_BLKD: Tensor, scores: Scores, /) -> Tensor:
        """`[B, L, H, Dv]` for q `[B, L, H, D]`, k `[B, M, K, D]`, v `[B, M, K, Dv]`, and the scores of these heads."""


class SavedAttentions(Protocol):
    """What a checkpointed layer keeps of its attention: recorded in the forward, found again when the layer is computed
    again for its backward, wherever it lay meanwhile. One for each call of a layer.

    Attributes:
        replaying: whether the layer is being computed again.
    """

    replaying: bool

    def keep(self, tensors: Sequence[Tensor]) -> SavedTensors:
        """Record what one attention keeps; in the order in which a layer calls its attentions."""

    def take(self) -> SavedTensors:
        """What the next attention of the layer has kept, when the layer is computed again."""


class SavedTensors(Protocol):
    """What one attention has kept."""

    def tensors(self) -> list[Tensor]:
        """The tensors, on their device again."""

    def drop(self) -> None:
        """They are not needed any more."""
