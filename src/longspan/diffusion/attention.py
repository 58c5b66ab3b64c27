"""Attention of sharded tokens, inside any processor that calls `scaled_dot_product_attention`.

While such a module runs, that one function attends to the tokens of all ranks: by Ulysses (all-to-all to all tokens of
some heads, the function itself, all-to-all back), or in a ring by `longspan.attention`. Nothing outside the module
changes, and the processor stays as it is. Of linear attention, a product over tokens is summed over the ranks.

Shape suffixes: B batch, H heads, h heads of this rank, L tokens of this rank, S tokens of all ranks, D head_dim.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from longspan.attn.api import prepare_attention
from longspan.attn.mask import Mask
from longspan.attn.score import Scores
from longspan.attn.segments import runs_of
from longspan.comm.collectives import all_gather, replicate, sum_over
from longspan.comm.mesh import group_name
from longspan.comm.reshard import gather_along, move_shards, move_shards_together, shard_along, shard_sizes
from longspan.compat.torch_api import not_compiled
from longspan.core.errors import LongspanError
from longspan.core.layout import Span
from longspan.core.regions import Region
from longspan.diffusion.structure import REPLICATED, Attention, is_over_rows, is_product
from longspan.diffusion.tokens import Tokens


def bind(attention: nn.Module, path: str, calls: Sequence[Attention], tokens: Tokens) -> None:
    """Make an attention module attend to the tokens of all ranks."""
    inner = attention.forward

    @not_compiled
    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        with ShardedAttention(tokens, calls) as mode:
            out = inner(*args, **kwargs)
        if mode.calls != len(calls):
            raise LongspanError(
                f"{path} called scaled_dot_product_attention {mode.calls} times, not {len(calls)}, so its tokens would "
                f"not attend to those of other ranks; reset its attention backend"
            )
        return out

    attention.forward = forward


class ShardedAttention(TorchFunctionMode):
    """Replace `scaled_dot_product_attention` in a `with` block, and count its calls."""

    def __init__(self, tokens: Tokens, calls: Sequence[Attention]) -> None:
        super().__init__()
        self.tokens, self.expected, self.calls = tokens, calls, 0
        self.others = {call.kind for call in calls} - {"softmax"}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.others and self.calls < len(self.expected):
            call = self.expected[self.calls]
            if call.kind == "sum" and is_product(func) and args[0].shape[-1] == self.tokens.held(call.queries[0]):
                self.calls += 1
                return _sum_of_ranks(func(*args, **kwargs), self.tokens.sp.group)
            if call.kind == "rows" and is_over_rows(func, args):
                self.calls += 1
                return convolve_rows(self.tokens, *args)
        if func is not F.scaled_dot_product_attention or self.calls == len(self.expected):
            self.calls += func is F.scaled_dot_product_attention
            return func(*args, **kwargs)
        self.calls += 1
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        return attend(self.tokens, self.expected[self.calls - 1], **dict(zip(names, args, strict=False)), **kwargs)


def attend(
    tokens: Tokens,
    call: Attention,
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
    rank's keys, `[..., 1, L]`. Of tokens that every rank holds, each rank brings its share, so that they count once.
    """
    if set(call.keys) == {REPLICATED}:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if dropout_p:
        raise LongspanError(f"attention dropout would depend on the number of ranks, got dropout_p={dropout_p}")
    sp = tokens.sp
    queries = _Sequence.of(tokens, call.queries, query)
    keys = _Sequence.of(tokens, call.keys, key)
    if value.shape[2] != key.shape[2]:
        raise LongspanError(f"{key.shape[2]} keys have {value.shape[2]} values")
    mask = None
    if attn_mask is not None or is_causal:
        mask = _mask(attn_mask, queries, keys, is_causal, tokens)
    query, key, value = queries.share(query), keys.share(key), keys.share(value)
    if sp.ring_size > 1:
        return queries.whole(_ring(tokens, queries, keys, query, key, value, mask, scale))
    if key.shape[1] != query.shape[1]:
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    heads = shard_sizes(query.shape[1], sp.size)
    if mask is not None and mask.dim() >= 3 and mask.shape[-3] > 1:
        mask = mask.narrow(-3, sum(heads[: sp.rank]), heads[sp.rank])
    if sp.size == 1:
        return F.scaled_dot_product_attention(query, key, value, mask, scale=scale)
    assert sp.group is not None
    if query.shape == key.shape == value.shape:
        q_BhSD, k_BhSD, v_BhSD = move_shards_together([query, key, value], sp.group, 2, 1, queries.of_ranks, heads)
    else:
        q_BhSD = move_shards(query, sp.group, 2, 1, queries.of_ranks, heads)
        k_BhSD, v_BhSD = (move_shards(x, sp.group, 2, 1, keys.of_ranks, heads) for x in (key, value))
    out_BhSD = F.scaled_dot_product_attention(q_BhSD, k_BhSD, v_BhSD, mask, scale=scale)
    return queries.whole(move_shards(out_BhSD, sp.group, 1, 2, heads, queries.of_ranks))


@dataclass(frozen=True)
class _Sequence:
    """The tokens of queries or keys: parts that are sharded, and perhaps one that every rank holds."""

    lengths: tuple[int, ...]  # of each part, on all ranks together
    held: tuple[int, ...]  # of each part, in this rank's tensor
    of_ranks: tuple[int, ...]  # tokens that take part, by rank
    order: Tensor | None  # see `Tokens.order`
    group: dist.ProcessGroup | None
    is_replicated: tuple[bool, ...]

    @classmethod
    def of(cls, tokens: Tokens, parts: tuple[int, ...], x: Tensor) -> _Sequence:
        mine = {p: tokens.held(p) for p in parts if p != REPLICATED}
        rest = x.shape[2] - sum(mine.values())
        if rest < 0 or (rest and REPLICATED not in parts):
            raise LongspanError(
                f"q, k and v should hold this rank's {sum(mine.values())} tokens each, got {tuple(x.shape)}"
            )
        lengths = tuple(rest if p == REPLICATED else tokens.lengths[p] for p in parts)
        of_ranks = tokens.ranks_of(lengths)
        held = tuple(mine.get(p, rest) for p in parts)
        replicated = tuple(p == REPLICATED or tokens.lengths[p] < tokens.sp.size for p in parts)
        return cls(lengths, held, of_ranks, tokens.order_of(lengths, x.device), tokens.sp.group, replicated)

    def share(self, x: Tensor) -> Tensor:
        """Return this rank's tokens, `[B, H, L, D]`, with its share of those that every rank holds."""
        if not any(self.is_replicated):
            return x
        parts = zip(x.split(list(self.held), 2), self.is_replicated, strict=True)
        return torch.cat([shard_along(part, 2, self.group) if replicated else part for part, replicated in parts], 2)

    def whole(self, x: Tensor) -> Tensor:
        """Return the inverse of `share`."""
        if not any(self.is_replicated) or self.group is None:
            return x
        size, rank = self.group.size(), self.group.rank()
        mine = [shard_sizes(n, size)[rank] for n in self.lengths]
        parts = zip(x.split(mine, 2), self.lengths, self.is_replicated, strict=True)
        return torch.cat([gather_along(part, 2, n, self.group) if same else part for part, n, same in parts], 2)

    @property
    def total(self) -> int:
        return sum(self.lengths)


def _mask(mask: Tensor | None, queries: _Sequence, keys: _Sequence, is_causal: bool, tokens: Tokens) -> Tensor:
    """Return a mask with the tokens in the order of ranks."""
    if is_causal:
        if mask is not None:
            raise LongspanError("an attention takes a mask or is_causal=True, not both")
        mask = torch.ones(queries.total, keys.total, dtype=torch.bool, device=tokens.sp.device).tril()
    assert mask is not None
    rank = tokens.sp.rank
    if mask.dim() == 2 and mask.shape[0] not in (1, queries.total):  # diffusers' form: keys of each row
        mask = mask[:, None, None]
    rows, columns = mask.shape[-2:] if mask.dim() > 1 else (1, mask.shape[-1])
    if columns == keys.total and rows in (1, queries.total):
        if keys.order is not None:
            mask = mask.index_select(-1, keys.order)
        if rows > 1 and queries.order is not None:
            mask = mask.index_select(-2, queries.order)
    elif columns == sum(keys.held) and (rows == 1 or rows == columns):
        if rows > 1:
            mask = _of_keys(mask)
        parts = zip(mask.split(list(keys.held), -1), keys.is_replicated, strict=True)
        local = [shard_along(part, mask.dim() - 1, keys.group) if same else part for part, same in parts]
        mask = _gather_keys(torch.cat(local, -1), keys.of_ranks, keys.group)
    else:
        raise LongspanError(
            f"an attention mask of shape {tuple(mask.shape)} fits neither all {keys.total} tokens nor this rank's "
            f"{keys.of_ranks[rank]} keys"
        )
    return mask


def _of_keys(mask: Tensor) -> Tensor:
    """Return the keys `[..., 1, L]` of a mask `[..., L, L]` in which padding neither sees nor is seen.

    What padding then sees is dropped: nothing reads its output.
    """
    real = mask.diagonal(dim1=-2, dim2=-1)
    if mask.dtype != torch.bool or not torch.equal(mask, real[..., None, :] & real[..., :, None]):
        raise LongspanError(f"an attention mask of shape {tuple(mask.shape)} hides other pairs than those of padding")
    return real[..., None, :]


def _gather_keys(mask: Tensor, of_ranks: Sequence[int], group: dist.ProcessGroup | None) -> Tensor:
    """Return a mask of all keys, of which each rank has its own. Masks have no gradient."""
    if group is None or group.size() == 1:
        return mask
    rows = mask.detach().movedim(-1, 0)
    rows = torch.cat([rows, rows.new_zeros(max(of_ranks) - rows.shape[0], *rows.shape[1:])])
    parts = all_gather(rows, group_name(group)).split(max(of_ranks))
    return torch.cat([part[:n] for part, n in zip(parts, of_ranks, strict=True)]).movedim(0, -1)


def _sum_of_ranks(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return the sum of all ranks' states, which the queries of each read: gradients are summed over the ranks, too."""
    return x if group is None else replicate(sum_over(x, group), group_name(group))


def convolve_rows(
    tokens: Tokens, x_BCLW: Tensor, weight: Tensor, bias: Tensor | None, stride: Any, padding: Any, *more: Any
) -> Tensor:
    """Convolve this rank's rows of pixels with those of its neighbours beside them; beyond the image are zeros."""
    group, rank = tokens.sp.group, tokens.sp.rank
    if group is None or group.size() == 1:
        return F.conv2d(x_BCLW, weight, bias, stride, padding, *more)
    if weight.shape[-2] != 3 or stride[0] != 1 or padding[0] != 1:
        raise LongspanError(f"a convolution over rows with kernel {tuple(weight.shape[-2:])} and stride {stride}")
    edges = torch.stack([x_BCLW[:, :, 0], x_BCLW[:, :, -1]])
    first_and_last = [*all_gather(edges, group_name(group)).unbind()]
    nothing = torch.zeros_like(first_and_last[0])
    above = first_and_last[2 * rank - 1] if rank else nothing
    below = first_and_last[2 * rank + 2] if rank + 1 < group.size() else nothing
    x = torch.cat([above[:, :, None], x_BCLW, below[:, :, None]], 2)
    return F.conv2d(x, weight, bias, stride, (0, padding[1]), *more)


# ---------------------------------------------------------------------------------------------------------------------
# In a ring.


@dataclass(frozen=True)
class KeySpans(Mask):
    """Every query sees the keys in some spans of its row: those that are no padding."""

    def _segment_pairs(self, row: int, queries: Span, keys: Span) -> Iterator[tuple[Span, Span]]:
        assert self.kv_segments is not None
        return ((queries, span) for span in self.kv_segments[row])

    def segment_regions(self, row: int, queries: Span, keys: Span) -> Iterator[Region]:
        yield Region(*queries, *keys)


def _ring(
    tokens: Tokens,
    queries: _Sequence,
    keys: _Sequence,
    q_BHLD: Tensor,
    k_BHLD: Tensor,
    v_BHLD: Tensor,
    mask: Tensor | None,
    scale: float | None,
) -> Tensor:
    """Compute the attention by `longspan.attention`: of ranks with equally many tokens, the last ones padding."""
    q, k, v = (
        F.pad(x.transpose(1, 2), (0, 0, 0, 0, 0, max(of.of_ranks) - x.shape[2]))
        for x, of in ((q_BHLD, queries), (k_BHLD, keys), (v_BHLD, keys))
    )
    batch = len(q)
    real = torch.cat([torch.arange(max(keys.of_ranks)) < n for n in keys.of_ranks])[None]
    options: dict[str, Any] = {"causal": False}
    if (
        mask is not None
        and mask.dtype == torch.bool
        and (mask.dim() == 1 or mask.shape[-2] == 1)
        and not (mask.dim() > 2 and mask.shape[-3] > 1)
    ):
        rows = mask.reshape(-1, mask.shape[-1]).cpu()
        real = torch.zeros(len(rows), real.shape[1], dtype=torch.bool).masked_scatter(real.expand(len(rows), -1), rows)
        mask = None
    if not bool(real.all()):
        options["mask"] = KeySpans(causal=False, kv_segments=tuple(runs_of(real) * (batch // len(real))))
        del options["causal"]
    if mask is not None:
        options |= _each_score(mask, queries, keys, batch)
    scores = {name: options.pop(name) for name in ("bias",) if name in options} | {"scale": scale}
    found = (
        (q.shape, k.shape, v.shape, q.dtype, q.requires_grad, str(options), scale) if not scores.get("bias") else None
    )
    plan = tokens.plans.get(found)
    if plan is None:
        plan = prepare_attention(q, k, v, tokens.sp, **options, **scores)
        if found is not None and mask is None:
            tokens.plans.clear() if len(tokens.plans) > 7 else None
            tokens.plans[found] = plan
    out = plan(q, k, v, Scores(**scores))
    return out[:, : queries.of_ranks[tokens.sp.rank]].transpose(1, 2)


def _each_score(mask: Tensor, queries: _Sequence, keys: _Sequence, batch: int) -> dict[str, Any]:
    """Return the option for a mask that differs between queries or heads, or is added to the scores."""
    while mask.dim() < 4:
        mask = mask[None]
    if mask.shape[0] > 1 and mask.dtype != torch.bool:
        raise LongspanError(
            f"a ring cannot add a mask of numbers that differ from row to row, got {tuple(mask.shape)}; use a mask of "
            f"booleans, or a mesh of `ulysses` alone"
        )
    if mask.shape[-2] == 1:
        mask = mask.expand(*mask.shape[:2], queries.total, -1)
    q_at, k_at = (
        torch.cat([torch.arange(max(of.of_ranks)).clamp(max=max(n - 1, 0)) + start for n, start in _starts(of)])
        .clamp(max=of.total - 1)
        .to(mask.device)
        for of in (queries, keys)
    )
    rows, heads = mask.shape[0] > 1, mask.shape[1] > 1
    table = mask[:, :, q_at][..., k_at]
    if mask.dtype == torch.bool:
        return {"mask_mod": lambda b, h, i, j: table[b if rows else 0, h if heads else 0, i, j]}
    return {"bias": lambda h, i, j: table[0, h if heads else 0, i, j]}


def _starts(of: _Sequence) -> Iterator[tuple[int, int]]:
    return zip(of.of_ranks, (0, *itertools.accumulate(of.of_ranks)), strict=False)
