"""Ring Attention by its definition, in plain operations: for reading, for tests, and as kernel="eager".

Every block visits every rank, nothing overlaps and memory is O(S x T). Autograd computes the
gradients, also of learnt biases.

Shape suffixes: B batch, S tokens of the local block, T tokens of a KV block, H query heads, K KV heads, D head_dim of q
and k, V of v.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from longspan.attn.kernels.base import Blocks, without_autocast
from longspan.attn.score import Scores
from longspan.comm.collectives import ring_shift


@dataclass(frozen=True, eq=False)
class ReferenceRing:
    """`Ring` with materialized scores and an online softmax over the blocks: an `AttentionMethod`."""

    group: dist.ProcessGroup | None  # the ranks; None for a ring of one
    blocks: Blocks  # mask and positions
    kv_head_index: Tensor | None = None  # the KV head of every query head, int64 [H], if KV groups are uneven

    def __call__(self, q_BSHD: Tensor, k_BTKD: Tensor, v_BTKV: Tensor, scores: Scores) -> Tensor:
        """Attend from the local block's queries to the whole sequence: `[B, S, H, V]`."""
        if q_BSHD.shape[2] == 0:
            return scores.output_without_heads(q_BSHD, v_BTKV)
        q_BHSD, k_BKTD, v_BKTV = (x.transpose(1, 2) for x in (q_BSHD, k_BTKD, v_BTKV))
        with without_autocast(q_BSHD.device):
            return self._attend(q_BHSD, k_BKTD, v_BKTV, scores).transpose(1, 2)

    def _attend(self, q_BHSD: Tensor, k_BKTD: Tensor, v_BKTV: Tensor, scores: Scores) -> Tensor:
        dtype = torch.promote_types(q_BHSD.dtype, torch.float32)
        batch, heads = q_BHSD.shape[:2]
        mask, ends = self.blocks.mask, self.blocks.ends
        rank = 0 if self.group is None else self.group.rank()
        # The highest score so far keeps exp() in range. It cancels, so it needs no gradient.
        highest_BHS = q_BHSD.new_full(q_BHSD.shape[:3], -1e30, dtype=dtype)
        if scores.sinks is not None:
            highest_BHS = torch.maximum(highest_BHS, scores.sinks.detach().to(dtype)[:, None])
        total_BHS = q_BHSD.new_zeros(q_BHSD.shape[:3], dtype=dtype)
        out_BHSV = q_BHSD.new_zeros(*q_BHSD.shape[:3], v_BKTV.shape[3], dtype=dtype)
        for step in range(self.blocks.count):
            i, j = self.blocks.positions((rank - step) % self.blocks.count)
            s_BHST = q_BHSD.to(dtype) @ self._of_heads(k_BKTD, heads, dtype).transpose(2, 3)
            s_BHST = s_BHST * scores.scale_of(q_BHSD.shape[3])
            if scores.softcap is not None:
                s_BHST = scores.softcap * torch.tanh(s_BHST / scores.softcap)
            bias_HST = scores.bias_of(heads, i, j, dtype)
            if bias_HST is not None:
                s_BHST = s_BHST + bias_HST
            real = (i < ends[0])[:, None] & (j < ends[1])
            allowed_BHST = mask.dense(batch, heads, i, j, first_head=scores.first_head) & real
            s_BHST = s_BHST.masked_fill(~allowed_BHST, -math.inf)
            new_highest_BHS = torch.maximum(highest_BHS, s_BHST.detach().amax(-1))
            p_BHST = (s_BHST - new_highest_BHS[..., None]).exp()
            rescale_BHS = (highest_BHS - new_highest_BHS).exp()
            total_BHS = total_BHS * rescale_BHS + p_BHST.sum(-1)
            out_BHSV = out_BHSV * rescale_BHS[..., None] + p_BHST @ self._of_heads(v_BKTV, heads, dtype)
            highest_BHS = new_highest_BHS
            if step + 1 < self.blocks.count:
                k_BKTD, v_BKTV = ring_shift(k_BKTD, self.group), ring_shift(v_BKTV, self.group)
        if scores.sinks is not None:
            total_BHS = total_BHS + (scores.sinks.to(dtype)[:, None] - highest_BHS).exp()
        return (out_BHSV / torch.where(total_BHS > 0, total_BHS, 1)[..., None]).to(q_BHSD.dtype)

    def _of_heads(self, x_BKTD: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
        """Repeat KV heads, one for every query head: [B, H, T, D]."""
        if self.kv_head_index is not None:
            return x_BKTD.index_select(1, self.kv_head_index).to(dtype)
        return x_BKTD.repeat_interleave(heads // x_BKTD.shape[1], 1).to(dtype)
