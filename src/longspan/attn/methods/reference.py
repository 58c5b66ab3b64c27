"""The ring by its definition, in plain operations: for reading, for tests, and as kernel="eager" on any mesh.

Every block goes all the way round, nothing overlaps and memory is O(S x T); learnt biases get their gradients, by
autograd.

Shape suffixes: B batch, S tokens of my block, T tokens of a block of keys, H query heads, K KV heads, D head_dim.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from longspan.attn.kernels.base import Blocks, without_autocast
from longspan.attn.score import Scores
from longspan.comm.p2p import ring_shift


@dataclass(frozen=True, eq=False)
class ReferenceRing:
    """`Ring` with every block's whole scores materialized, and an online softmax over them: a method.

    Attributes:
        group: the ranks; None for a ring of one.
        rank: my place.
        blocks: mask and positions.
        kv_head_index: for every query head its KV head, int64 [H], where they are not in equal groups.
    """

    group: dist.ProcessGroup | None
    rank: int
    blocks: Blocks
    kv_head_index: Tensor | None = None

    def __call__(self, q_BSHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, scores: Scores) -> Tensor:
        """Attention of my block's queries over the whole sequence: `[B, S, H, Dv]`."""
        if q_BSHD.shape[2] == 0:
            return scores.nothing(q_BSHD, v_BTKD)
        q, k, v = (x.transpose(1, 2) for x in (q_BSHD, k_BTKD, v_BTKD))
        with without_autocast(q.device):
            return self._attend(q, k, v, scores).transpose(1, 2)

    def _attend(self, q_BHSD: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Tensor:
        dtype = torch.promote_types(q_BHSD.dtype, torch.float32)
        batch, heads = q_BHSD.shape[:2]
        mask, ends = self.blocks.mask, self.blocks.ends
        # The highest score so far only keeps exp() in range; it cancels, so nothing is differentiated through it.
        highest = q_BHSD.new_full(q_BHSD.shape[:3], -1e30, dtype=dtype)
        if scores.sinks is not None:
            highest = torch.maximum(highest, scores.sinks.detach().to(dtype)[:, None])
        total = q_BHSD.new_zeros(q_BHSD.shape[:3], dtype=dtype)
        out = q_BHSD.new_zeros(*q_BHSD.shape[:3], v.shape[3], dtype=dtype)
        for step in range(self.blocks.count):
            i, j = self.blocks.positions((self.rank - step) % self.blocks.count)
            x_BHST = q_BHSD.to(dtype) @ self._of_heads(k, heads, dtype).transpose(2, 3)
            x_BHST = x_BHST * scores.scale_of(q_BHSD.shape[3])
            if scores.softcap is not None:
                x_BHST = scores.softcap * torch.tanh(x_BHST / scores.softcap)
            bias_HST = scores.bias_of(heads, i, j, dtype)
            if bias_HST is not None:
                x_BHST = x_BHST + bias_HST
            real = (i < ends[0])[:, None] & (j < ends[1])
            allowed = mask.dense(batch, heads, i, j, first_head=scores.first_head) & real
            x_BHST = x_BHST.masked_fill(~allowed, -math.inf)
            new_highest = torch.maximum(highest, x_BHST.detach().amax(-1))
            p_BHST = (x_BHST - new_highest[..., None]).exp()
            before = (highest - new_highest).exp()
            total = total * before + p_BHST.sum(-1)
            out = out * before[..., None] + p_BHST @ self._of_heads(v, heads, dtype)
            highest = new_highest
            if step + 1 < self.blocks.count:
                k, v = ring_shift(k, self.group), ring_shift(v, self.group)
        if scores.sinks is not None:
            total = total + (scores.sinks.to(dtype)[:, None] - highest).exp()
        return (out / torch.where(total > 0, total, 1)[..., None]).to(q_BHSD.dtype)

    def _of_heads(self, x_BKTD: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
        """A KV head for every query head: [B, H, T, D]."""
        if self.kv_head_index is not None:
            return x_BKTD.index_select(1, self.kv_head_index).to(dtype)
        return x_BKTD.repeat_interleave(heads // x_BKTD.shape[1], 1).to(dtype)
