"""The protocol of a method: what turns my tokens' q, k, v into my tokens' output, over a sharding.

A method is a value, prepared for a batch: one device (`Whole`), blocks that come by (`Ring`, of any size from 1 on),
an exchange around another method (`Ulysses`). They compose by this protocol: USP is `Ulysses(inner=Ring(...))`.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from longspan.attn.score import Scores


class Method(Protocol):
    """Exact attention of the queries that are here."""

    def __call__(self, q_BLHD: Tensor, k_BLKD: Tensor, v_BLKD: Tensor, scores: Scores, /) -> Tensor:
        """`[B, L, H, Dv]` for q `[B, L, H, D]`, k `[B, M, K, D]`, v `[B, M, K, Dv]`, and the scores of these heads."""
