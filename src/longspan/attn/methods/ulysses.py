"""Ulysses attention: exchange, exact attention of all tokens on my heads, exchange back; and USP, whose tokens ring.

Jacobs et al. 2023, "DeepSpeed-Ulysses", arXiv:2309.14509. Per layer and direction it is two All-to-Alls: Q, K and V
travel packed in one, the output in another; each rank sends b*S*D*(2Hq + 2Hk)/P * (P-1)/P bytes for one forward.
With a ring (USP, Fang & Zhao 2024, arXiv:2405.07719) the same happens to the tokens of one block of the ring, and the
inner attention sees the other blocks come by.

Shape suffixes: B batch, S tokens of the block (of the sequence where there is no ring), L my tokens, H query heads, K
KV heads, D head_dim; lower-case h, k: this rank's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor

from longspan.comm.all_to_all import gather_heads, scatter_heads
from longspan.core.heads import HeadShard, split_heads

if TYPE_CHECKING:
    import torch.distributed as dist

    from longspan.attn.score import Scores

Inner = Callable[[Tensor, Tensor, Tensor, "Scores", HeadShard], Tensor]
"""Attention of all tokens of a block on some heads: q `[B, S, h, D]`, k and v `[B, S, k, D]`, the scores of these
heads, and which they are: its `group_sizes` tell how many query heads each KV head serves."""


def ulysses_attention(
    q_BLHD: Tensor,
    k_BLKD: Tensor,
    v_BLKD: Tensor,
    group: dist.ProcessGroup,
    scores: Scores,
    inner: Inner,
    *,
    lengths: tuple[int, int] | None = None,
    kv_replication: bool = True,
) -> Tensor:
    """Attention of my tokens' queries, exactly.

    Args:
        q_BLHD: my tokens, all query heads.
        k_BLKD: my tokens (of the keys' sequence, which may have another length), all KV heads.
        v_BLKD: as k.
        group: the ranks that share the block, each with L tokens.
        scores: scale, softcap, sinks, biases (all heads; each rank takes its own).
        inner: what computes the attention: a local kernel, or the ring.
        lengths: real queries and real keys, where what `inner` gets should be cut to them; what it gives is padded
            again.
        kv_replication: whether a KV head may go to several ranks.

    Returns:
        `[B, L, H, Dv]`.
    """
    D, Dv = q_BLHD.shape[3], v_BLKD.shape[3]
    shares = split_heads(q_BLHD.shape[2], k_BLKD.shape[2], group.size(), kv_replication=kv_replication)
    mine = shares[group.rank()]
    widths = [mine.q_heads * D, mine.kv_heads * D, mine.kv_heads * Dv]
    if q_BLHD.shape[1] == k_BLKD.shape[1] and (lengths is None or lengths[0] == lengths[1]):
        packed_SBW = _cut(scatter_heads([q_BLHD, k_BLKD, v_BLKD], ["q", "kv", "kv"], shares, group), lengths, 0)
        # One split (its gradient is one concatenation) into three views of what arrived: no copy.
        q, k, v = packed_SBW.split(widths, -1)
    else:  # keys have other tokens, so they travel on their own
        q = _cut(scatter_heads([q_BLHD], ["q"], shares, group), lengths, 0)
        k, v = _cut(scatter_heads([k_BLKD, v_BLKD], ["kv", "kv"], shares, group), lengths, 1).split(widths[1:], -1)
    q_BShD = q.unflatten(2, (mine.q_heads, D)).transpose(0, 1)
    k_BSkD = k.unflatten(2, (mine.kv_heads, D)).transpose(0, 1)
    v_BSkD = v.unflatten(2, (mine.kv_heads, Dv)).transpose(0, 1)
    out_BShD = inner(q_BShD, k_BSkD, v_BSkD, scores.of_heads(mine.q_start, mine.q_stop), mine)
    padding = q_BLHD.shape[1] * group.size() - out_BShD.shape[1]
    if padding:
        out_BShD = F.pad(out_BShD, (0, 0, 0, 0, 0, padding))
    return gather_heads(out_BShD, shares, group)


def _cut(packed_SBW: Tensor, lengths: tuple[int, int] | None, which: int) -> Tensor:
    if lengths is None or packed_SBW.shape[0] == lengths[which]:
        return packed_SBW
    return packed_SBW[: lengths[which]]
