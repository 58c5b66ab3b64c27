"""Self attention of sharded tokens, inside any processor that calls `scaled_dot_product_attention`.

While such an attention module runs, that one function is Ulysses: all-to-all to all tokens of some heads, the function
itself, all-to-all back. Nothing outside the module changes, and the processor stays as it is.

Shape suffixes: B batch, H heads, h heads of this rank, L tokens of this rank, S tokens of all ranks, D head_dim.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from longspan.comm.collectives import all_gather
from longspan.comm.mesh import group_name
from longspan.comm.reshard import move_shards, move_shards_together, shard_sizes
from longspan.compat.torch_api import not_compiled
from longspan.core.errors import LongspanError
from longspan.diffusion.tokens import Tokens


def bind(attention: nn.Module, path: str, tokens: Tokens) -> None:
    """Make an attention module attend to the tokens of all ranks."""
    inner = attention.forward

    @not_compiled
    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        tokens.check_lengths()
        with ShardedAttention(tokens) as mode:
            out = inner(*args, **kwargs)
        if mode.calls != 1:
            raise LongspanError(
                f"{path} called scaled_dot_product_attention {mode.calls} times, not once, so its tokens would not "
                f"attend to those of other ranks; reset its attention backend"
            )
        return out

    attention.forward = forward


class ShardedAttention(TorchFunctionMode):
    """Replace `scaled_dot_product_attention` in a `with` block, and count its calls."""

    def __init__(self, tokens: Tokens) -> None:
        super().__init__()
        self.tokens, self.calls = tokens, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        self.calls += 1
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        return ulysses(self.tokens, **dict(zip(names, args, strict=False)), **kwargs)


def ulysses(
    tokens: Tokens,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute attention of this rank's tokens `[B, H, L, D]` to the tokens of all ranks.

    `attn_mask` is for all queries and keys in the processor's order, `[..., S or 1, S]`, as is `is_causal`; or for this
    rank's keys, `[..., 1, L]`. Query and key have the same number of heads, so `enable_gqa` changes nothing.
    """
    if dropout_p:
        raise LongspanError(f"attention dropout would depend on the number of ranks, got dropout_p={dropout_p}")
    group, of_ranks = tokens.sp.group, tokens.of_ranks
    heads = shard_sizes(query.shape[1], tokens.sp.size)
    if query.shape[2] != of_ranks[tokens.sp.rank] or not query.shape == key.shape == value.shape:
        shapes = ", ".join(str(tuple(x.shape)) for x in (query, key, value))
        raise LongspanError(f"q, k and v should hold this rank's {of_ranks[tokens.sp.rank]} tokens each, got {shapes}")
    mask = None
    if attn_mask is not None or (is_causal and tokens.order(query.device) is not None):
        mask, is_causal = _mask(tokens, attn_mask, query, heads, is_causal), False
    if tokens.sp.size == 1:
        return F.scaled_dot_product_attention(query, key, value, mask, is_causal=is_causal, scale=scale)
    assert group is not None
    q_BhSD, k_BhSD, v_BhSD = move_shards_together([query, key, value], group, 2, 1, of_ranks, heads)
    out_BhSD = F.scaled_dot_product_attention(q_BhSD, k_BhSD, v_BhSD, mask, is_causal=is_causal, scale=scale)
    return move_shards(out_BhSD, group, 1, 2, heads, of_ranks)


def _mask(tokens: Tokens, mask: Tensor | None, query: Tensor, heads: Sequence[int], is_causal: bool) -> Tensor:
    """Return a mask of this rank's heads, with the tokens in the order of ranks."""
    of_ranks, rank = tokens.of_ranks, tokens.sp.rank
    total, order = sum(of_ranks), tokens.order(query.device)
    if is_causal:
        if mask is not None:
            raise LongspanError("an attention takes a mask or is_causal=True, not both")
        mask = torch.ones(total, total, dtype=torch.bool, device=query.device).tril()
    assert mask is not None
    queries, keys = mask.shape[-2:] if mask.dim() > 1 else (1, mask.shape[-1])
    if keys == total and queries in (1, total):
        if order is not None:
            mask = mask.index_select(-1, order)
            mask = mask if queries == 1 else mask.index_select(-2, order)
    elif keys == of_ranks[rank] and queries == 1:
        mask = _gather_keys(mask, of_ranks, tokens.sp.group)
    else:
        raise LongspanError(
            f"an attention mask of shape {tuple(mask.shape)} fits neither all {total} tokens nor this rank's "
            f"{of_ranks[rank]} keys"
        )
    if mask.dim() >= 3 and mask.shape[-3] > 1:
        mask = mask.narrow(-3, sum(heads[:rank]), heads[rank])
    return mask


def _gather_keys(mask: Tensor, of_ranks: Sequence[int], group: dist.ProcessGroup | None) -> Tensor:
    """Return a mask of all keys, of which each rank has its own. Masks have no gradient."""
    if group is None or group.size() == 1:
        return mask
    rows = mask.detach().movedim(-1, 0)
    rows = torch.cat([rows, rows.new_zeros(max(of_ranks) - rows.shape[0], *rows.shape[1:])])
    parts = all_gather(rows, group_name(group)).split(max(of_ranks))
    return torch.cat([part[:n] for part, n in zip(parts, of_ranks, strict=True)]).movedim(0, -1)
