"""Ulysses attention: exchange, exact attention of all tokens on my heads, exchange back; and USP, whose tokens ring.

Jacobs et al. 2023, "DeepSpeed-Ulysses", arXiv:2309.14509. Per layer and direction it is two All-to-Alls: Q, K and V
travel packed in one, the output in another; each rank sends b*S*D*(2Hq + 2Hk)/P * (P-1)/P bytes for one forward.
With a ring (USP, Fang & Zhao 2024, arXiv:2405.07719) the same happens to the tokens of one block of the ring, and the
inner method sees the other blocks come by.

Shape suffixes: B batch, S tokens of the block (of the sequence where there is no ring), L my tokens, H query heads, K
KV heads, D head_dim; lower-case h, k: this rank's.
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
    from longspan.core.cache_dtype import CacheDtype
    from longspan.core.heads import HeadShard


@dataclass(frozen=True, eq=False)
class Ulysses:
    """The exchange around another method, prepared for a batch: a method.

    Attributes:
        group: the ranks that share the block, each with L tokens.
        shards: which heads each of them computes.
        inner: attention of all tokens of the block on my heads.
        lengths: real queries and real keys, where what `inner` gets is cut to them; what it gives is padded again.
            None with a ring, whose blocks keep their padding.
        code: how what is exchanged travels, of `longspan.core.cache_dtype.CACHE_DTYPES`.
    """

    group: dist.ProcessGroup
    shards: tuple[HeadShard, ...]
    inner: AttentionMethod
    lengths: tuple[int, int] | None = None
    code: CacheDtype = "exact"

    def __call__(self, q_BLHD: Tensor, k_BLKD: Tensor, v_BLKD: Tensor, scores: Scores) -> Tensor:
        """Attention of my tokens' queries, exactly: `[B, L, H, Dv]`. Keys may be tokens of another sequence."""
        group, shards, lengths, code = self.group, self.shards, self.lengths, self.code
        D, Dv = q_BLHD.shape[3], v_BLKD.shape[3]
        mine = shards[group.rank()]
        widths = [mine.q_heads * D, mine.kv_heads * D, mine.kv_heads * Dv]
        if q_BLHD.shape[1] == k_BLKD.shape[1] and (lengths is None or lengths[0] == lengths[1]):
            packed_SBW = _cut(
                scatter_heads([q_BLHD, k_BLKD, v_BLKD], ["q", "kv", "kv"], shards, group, code), lengths, 0
            )
            # One split (its gradient is one concatenation) into three views of what arrived: no copy.
            q, k, v = packed_SBW.split(widths, -1)
        else:  # keys have other tokens, so they travel on their own
            q = _cut(scatter_heads([q_BLHD], ["q"], shards, group, code), lengths, 0)
            k, v = _cut(scatter_heads([k_BLKD, v_BLKD], ["kv", "kv"], shards, group, code), lengths, 1).split(
                widths[1:], -1
            )
        q_BShD = q.unflatten(2, (mine.q_heads, D)).transpose(0, 1)
        k_BSkD = k.unflatten(2, (mine.kv_heads, D)).transpose(0, 1)
        v_BSkD = v.unflatten(2, (mine.kv_heads, Dv)).transpose(0, 1)
        if isinstance(self.inner, LocalAttention):
            q_BShD, k_BSkD, v_BSkD = self.inner.laid(q_BShD, k_BSkD, v_BSkD)
        packed_SBW = q = k = v = q_BLHD[:0]  # where they have been copied, what arrived is not kept beside the copies
        out_BShD = self.inner(q_BShD, k_BSkD, v_BSkD, scores.of_heads(mine.q_start, mine.q_stop))
        del q_BShD, k_BSkD, v_BSkD  # autograd has them, or a checkpoint does not want them: not here on the way home
        padding = q_BLHD.shape[1] * group.size() - out_BShD.shape[1]
        if padding:
            out_BShD = F.pad(out_BShD, (0, 0, 0, 0, 0, padding))
        return gather_heads(out_BShD, shards, group, code)


def _cut(packed_SBW: Tensor, lengths: tuple[int, int] | None, which: int) -> Tensor:
    if lengths is None or packed_SBW.shape[0] == lengths[which]:
        return packed_SBW
    return packed_SBW[: lengths[which]]
