"""Ulysses attention: exchange, exact attention of all tokens on my heads, exchange back.

Jacobs et al. 2023, "DeepSpeed-Ulysses", arXiv:2309.14509. Per layer and direction it is two All-to-Alls: Q, K and V
travel packed in one, the output in another; each rank sends b*S*D*(2Hq + 2Hk)/P * (P-1)/P bytes for one forward.

Shape suffixes: B batch, S tokens, L my tokens, H query heads, K KV heads, D head_dim; lower-case h, k: this rank's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from longspan.attention.local import Kernel, Scores, local_attention
from longspan.exchange import gather_heads, scatter_qkv
from longspan.layout import HeadShare, split_heads

if TYPE_CHECKING:
    import torch.distributed as dist

    from longspan.attention.mask import Mask


def ulysses_attention(
    q_BLHD: Tensor,
    k_BLKD: Tensor,
    v_BLKD: Tensor,
    group: dist.ProcessGroup,
    length: int,
    mask: Mask,
    scores: Scores,
    kernel: Kernel = "auto",
    *,
    kv_replication: bool = True,
) -> Tensor:
    """Attention of my tokens' queries over the whole sequence, exactly.

    Args:
        q_BLHD: my tokens, all query heads.
        k_BLKD: my tokens, all KV heads.
        v_BLKD: my tokens, all KV heads.
        group: the ranks that share the sequence, each with L tokens.
        length: real tokens of the sequence; what the ranks hold beyond it is padding, and gives zero.
        mask: over the real tokens of the whole sequence.
        scores: scale, softcap, sinks (all heads; each rank takes its own).
        kernel: the local attention.
        kv_replication: whether a KV head may go to several ranks.

    Returns:
        `[B, L, H, Dv]`.
    """
    D, Dv = q_BLHD.shape[3], v_BLKD.shape[3]
    shares = split_heads(q_BLHD.shape[2], k_BLKD.shape[2], group.size(), kv_replication=kv_replication)
    mine = shares[group.rank()]
    packed_SBW = scatter_qkv(q_BLHD, k_BLKD, v_BLKD, shares, group)
    padded = packed_SBW.shape[0]
    if padded != length:
        packed_SBW = packed_SBW[:length]
    # One split (its gradient is one concatenation) into three views of what arrived: no copy.
    q, k, v = packed_SBW.split([mine.q_heads * D, mine.kv_heads * D, mine.kv_heads * Dv], -1)
    q_BShD = q.unflatten(2, (mine.q_heads, D)).transpose(0, 1)
    k_BSkD = k.unflatten(2, (mine.kv_heads, D)).transpose(0, 1)
    v_BSkD = v.unflatten(2, (mine.kv_heads, Dv)).transpose(0, 1)
    if not mine.is_regular:
        k_BSkD, v_BSkD = (_one_per_query(x, mine) for x in (k_BSkD, v_BSkD))
    if scores.sinks is not None:
        scores = Scores(scores.scale, scores.softcap, scores.sinks[mine.q_start : mine.q_stop])
    out_BShD = local_attention(q_BShD, k_BSkD, v_BSkD, mask, scores, kernel)
    if padded != length:
        out_BShD = F.pad(out_BShD, (0, 0, 0, 0, 0, padded - length))
    return gather_heads(out_BShD, shares, group)


def _one_per_query(x_BSkD: Tensor, share: HeadShare) -> Tensor:
    """KV heads repeated to one per query head of this rank, where its KV groups are cut unevenly.

    It happens after the exchange and only to this rank's heads: nothing more is sent.
    """
    index = [head for head, queries in enumerate(share.group_sizes) for _ in range(queries)]
    return x_BSkD.index_select(2, torch.tensor(index, device=x_BSkD.device))
