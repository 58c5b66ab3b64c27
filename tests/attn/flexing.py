"""What stands in for FlexAttention where there is no GPU: its lists of blocks read as its kernel reads them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def listed(counts: Tensor | None, indices: Tensor | None, columns: int) -> Tensor | None:
    """Lists of blocks written out: bool [B, 1, rows, columns]. Each is ascending, without repetition, within bounds."""
    if counts is None or indices is None:
        return None
    assert counts.dtype == indices.dtype == torch.int32 and counts.is_contiguous() and indices.is_contiguous()
    assert counts.shape == indices.shape[:3] and int(indices.min()) >= 0 and int(indices.max()) < columns
    within = torch.arange(indices.shape[3]) < counts[..., None]
    assert (indices.diff() > 0)[within[..., 1:]].all()
    out = torch.zeros(*indices.shape[:3], columns + 1, dtype=torch.bool)
    return out.scatter_(3, torch.where(within, indices, columns).long(), True)[..., :columns]


def classes(blocks: tuple[Tensor | None, ...], counts: tuple[int, int]) -> Tensor:
    """0 for blocks that are left out, 1 for those with a mask, 2 for those without: int64 [B, 1, Q blocks, T blocks].

    The lists by blocks of queries, from which outputs and dq come, say the same as those by blocks of keys.
    """
    partial, full, partial_q, full_q = (
        listed(*blocks[at : at + 2], columns)
        for at, columns in zip(range(0, 8, 2), (counts[1], counts[1], counts[0], counts[0]), strict=True)
    )
    assert partial is not None and partial_q is not None and (full is None) == (full_q is None)
    assert torch.equal(partial, partial_q.mT)
    if full is None or full_q is None:
        return partial.long()
    assert torch.equal(full, full_q.mT) and not (full & partial).any()
    return partial + 2 * full


def differentiable_flex(compiled: bool) -> Callable[..., tuple[Tensor, Tensor]]:
    """The formula, with the mask function asked in partial blocks alone; it has a backward on a CPU."""

    def run(
        q: Tensor, k: Tensor, v: Tensor, blocks: tuple[Tensor | None, ...], mask_mod: Any, score_mod: Any,
        scale: float | None, enable_gqa: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        of_blocks = classes(blocks, (q.shape[2], k.shape[2]))
        of_pairs = of_blocks.repeat_interleave(q.shape[3], 2).repeat_interleave(k.shape[3], 3)
        q, k, v = (x.flatten(2, 3) for x in (q, k, v))
        B, H, Q, D = q.shape
        group = H // k.shape[1]
        assert enable_gqa == (group > 1)
        b, h = torch.arange(B)[:, None, None, None], torch.arange(H)[:, None, None]
        i, j = torch.arange(Q)[:, None], torch.arange(k.shape[2])
        x = q @ k.repeat_interleave(group, 1).transpose(2, 3) * (D**-0.5 if scale is None else scale)
        x = x if score_mod is None else score_mod(x, b, h, i, j)
        allowed = ((of_pairs == 2) | ((of_pairs == 1) & mask_mod(b, h, i, j))).expand_as(x)
        highest = x.detach().masked_fill(~allowed, -1e30).amax(-1, keepdim=True)
        # Masked before the exponential: where nothing is seen it is infinite, and its gradient 0 times that.
        weights = torch.where(allowed, (x - highest).masked_fill(~allowed, 0).exp(), 0)
        total = weights.sum(-1)
        seen = total > 0
        safe = torch.where(seen, total, 1)
        lse = torch.where(seen, safe.log() + highest[..., 0], -torch.inf)
        return weights @ v.repeat_interleave(group, 1) / safe[..., None], lse

    return run
