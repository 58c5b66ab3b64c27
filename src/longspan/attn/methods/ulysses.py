"""Ulysses attention: all-to-all, attention of all tokens on the local heads, all-to-all back; with a ring inside: USP.

Jacobs et al. 2023, "DeepSpeed-Ulysses", arXiv:2309.14509. A forward is two all-to-alls: one sends q, k and v packed,
the other the output; of N tokens over P ranks each rank sends b*N*D*(2H + 2K)/P * (P-1)/P bytes (b bytes per element,
batch 1, D = V); with K < P a KV head goes to several ranks. In USP (Fang & Zhao 2024, arXiv:2405.07719) the tokens are
those of one ring block, and the inner method receives the other blocks.

Shape suffixes: B batch, L local tokens, S tokens of the block (the sequence if there is no ring), T keys of the block,
H query heads, K KV heads, h and k those of this rank, D head_dim of q and k, V of v, W packed row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor

from longspan.attn.methods.base import AttentionMethod
from longspan.attn.methods.local import LocalAttention
from longspan.comm.all_to_all import gather_heads, scatter_heads

if TYPE_CHECKING:
    import torch.distributed as dist

    from longspan.attn.score import Scores
    from longspan.core.heads import HeadShard


@dataclass(frozen=True, eq=False)
class Ulysses:
    """All-to-alls around another method: an `AttentionMethod`."""

    group: dist.ProcessGroup  # the ranks that share the block, each with L tokens
    shards: tuple[HeadShard, ...]  # the heads of each rank
    inner: AttentionMethod  # attention of all tokens of the block on the local heads
    # Numbers of queries and of keys without padding, for `inner`; None in a ring, whose blocks keep their padding.
    trim_to: tuple[int, int] | None = None

    def __call__(self, q_BLHD: Tensor, k_BLKD: Tensor, v_BLKV: Tensor, scores: Scores) -> Tensor:
        """Return the attention of the local queries, `[B, L, H, V]`.

        K and V may come from another sequence (cross-attention).
        """
        shards, trim_to = self.shards, self.trim_to
        D, V = q_BLHD.shape[3], v_BLKV.shape[3]
        local = shards[self.group.rank()]
        widths = [local.q_heads * D, local.kv_heads * D, local.kv_heads * V]

        # Scatter heads, gather tokens.
        if q_BLHD.shape[1] == k_BLKD.shape[1] and (trim_to is None or trim_to[0] == trim_to[1]):
            packed_SBW = self._scatter([q_BLHD, k_BLKD, v_BLKV], ["q", "kv", "kv"], trim_to and trim_to[0])
            # One split (its gradient is one concatenation) into three views: no copy.
            q_SBW, k_TBW, v_TBW = packed_SBW.split(widths, -1)
        else:  # keys have other tokens: send them separately
            packed_SBW = q_SBW = self._scatter([q_BLHD], ["q"], trim_to and trim_to[0])
            k_TBW, v_TBW = self._scatter([k_BLKD, v_BLKV], ["kv", "kv"], trim_to and trim_to[1]).split(widths[1:], -1)
        q_BShD = q_SBW.unflatten(2, (local.q_heads, D)).transpose(0, 1)
        k_BTkD = k_TBW.unflatten(2, (local.kv_heads, D)).transpose(0, 1)
        v_BTkV = v_TBW.unflatten(2, (local.kv_heads, V)).transpose(0, 1)

        # Attend on the local heads.
        if isinstance(self.inner, LocalAttention):
            q_BShD, k_BTkD, v_BTkV = self.inner.own_inputs(q_BShD, k_BTkD, v_BTkV)
        del packed_SBW, q_SBW, k_TBW, v_TBW  # frees the received buffer if `own_inputs` copied it
        out_BShV = self.inner(q_BShD, k_BTkD, v_BTkV, scores.of_heads(local.q_start, local.q_stop))
        del q_BShD, k_BTkD, v_BTkV  # autograd saves them, or a checkpoint frees them before the second all-to-all

        # Gather heads, scatter tokens.
        padding = q_BLHD.shape[1] * self.group.size() - out_BShV.shape[1]
        if padding:
            out_BShV = F.pad(out_BShV, (0, 0, 0, 0, 0, padding))
        return gather_heads(out_BShV, shards, self.group)

    def _scatter(self, xs_BLHD: list[Tensor], kinds: list[str], length: int | None) -> Tensor:
        """Return `[S, B, W]`: the local heads of all tokens, without padding if `length` is given."""
        packed_SBW = scatter_heads(xs_BLHD, kinds, self.shards, self.group)
        return packed_SBW if length is None or packed_SBW.shape[0] == length else packed_SBW[:length]
