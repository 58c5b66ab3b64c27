"""Attention of sharded tokens, inside any processor that calls `scaled_dot_product_attention`.

While such a module runs, that one function attends to the tokens of all ranks: by Ulysses (all-to-all to all tokens of
some heads, the function itself, all-to-all back), or in a ring by `longspan.attention`. Nothing outside the module
changes, and the processor stays as it is. Of linear attention, a product over tokens is summed over the ranks.

Shape suffixes: B batch, H heads, h heads of this rank, L tokens of this rank, S tokens of all ranks, D head_dim.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from longspan.attn.api import prepare_attention
from longspan.attn.mask import Mask
from longspan.attn.score import Scores
from longspan.attn.segments import runs_of
from longspan.comm.collectives import all_gather, replicate, sum_over
from longspan.comm.mesh import SequenceSharding, group_name
from longspan.comm.reshard import move_shards, move_shards_together, shard_sizes
from longspan.compat.torch_api import not_compiled, version_of
from longspan.core.errors import LongspanError
from longspan.core.layout import Span
from longspan.core.regions import Region
from longspan.diffusion.structure import REPLICATED, Attention, Structure, block_lists, made_of, mixing
from longspan.diffusion.tokens import Parts, Tokens


def shard_tokens(model: nn.Module, structure: Structure, tokens: Tokens) -> int:
    """Hook splits, joins and attention into a model; return the number of its attention modules."""
    lists, found = block_lists(model), 0
    for region, arguments in structure.regions.items():
        blocks = [(path, i, block) for path in region for i, block in enumerate(lists[path])]
        for path, i, module in blocks:
            block = structure.blocks[path][made_of(module)]
            tokens.blocks[module] = block, arguments if module is blocks[0][2] else ()
            module.register_forward_pre_hook(tokens.split_all, with_kwargs=True)
            if block.switched:
                module.register_forward_hook(tokens.switch_back)
            for name, calls in block.attention.items() if tokens.sp.size > 1 else ():
                bind(module.get_submodule(name), f"{path}.{i}.{name}".rstrip("."), calls, tokens)
            found += len(block.attention)
        if not structure.exits:
            blocks[-1][2].register_forward_hook(tokens.join)
    for path, stream in structure.exits.items():
        tokens.exits[model.get_submodule(path)] = stream
        model.get_submodule(path).register_forward_hook(tokens.join_exit)
    return found


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
    """Replace the calls that mix tokens in a `with` block, and count them."""

    def __init__(self, tokens: Tokens, calls: Sequence[Attention]) -> None:
        super().__init__()
        self.tokens, self.expected, self.calls = tokens, calls, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        kind, queries, _ = mixing(func, args, kwargs)
        call = self.expected[self.calls] if self.calls < len(self.expected) else None
        is_softmax = kind == "softmax"
        if call is None or call.kind != kind or not (is_softmax or queries == self.tokens.parts(call.queries).here):
            self.calls += is_softmax
            return func(*args, **kwargs)
        self.calls += 1
        if kind == "sum":
            group = self.tokens.sp.group
            assert group is not None
            # The queries of each rank read the sum: gradients are summed over the ranks, too.
            return replicate(sum_over(func(*args, **kwargs), group), group_name(group))
        if kind == "rows":
            return convolve_rows(self.tokens, *args)
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        return attend(self.tokens, call, **dict(zip(names, args, strict=False)), **kwargs)


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
    if set(call.keys) == {REPLICATED} or tokens.sizes.rows:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if dropout_p:
        raise LongspanError(f"attention dropout would depend on the number of ranks, got dropout_p={dropout_p}")
    queries, keys = tokens.parts(call.queries, query.shape[2]), tokens.parts(call.keys, key.shape[2])
    if is_causal:
        attn_mask = torch.ones(sum(queries.lengths), sum(keys.lengths), dtype=torch.bool, device=query.device).tril()
    q, k, v = queries.share(query, 2), keys.share(key, 2), keys.share(value, 2)
    if tokens.sp.ring_size > 1:
        return queries.whole(_ring(tokens, call, queries, keys, q, k, v, attn_mask, scale), 2)
    mask = None if attn_mask is None else _in_order_of_ranks(attn_mask, queries, keys)
    return queries.whole(_ulysses(tokens.sp, queries, keys, q, k, v, mask, scale), 2)


def _ulysses(
    sp: SequenceSharding, queries: Parts, keys: Parts, query: Tensor, key: Tensor, value: Tensor,
    mask: Tensor | None, scale: float | None,
) -> Tensor:  # fmt: skip
    if key.shape[1] != query.shape[1]:
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    heads = shard_sizes(query.shape[1], sp.size)
    if mask is not None and mask.shape[1] > 1:
        mask = mask.narrow(1, sum(heads[: sp.rank]), heads[sp.rank])
    assert sp.group is not None
    if queries == keys and key.shape == value.shape:
        q_BhSD, k_BhSD, v_BhSD = move_shards_together([query, key, value], sp.group, 2, 1, queries.of_ranks, heads)
    else:
        q_BhSD = move_shards(query, sp.group, 2, 1, queries.of_ranks, heads)
        k_BhSD, v_BhSD = (move_shards(x, sp.group, 2, 1, keys.of_ranks, heads) for x in (key, value))
    out_BhSD = F.scaled_dot_product_attention(q_BhSD, k_BhSD, v_BhSD, mask, scale=scale)
    return move_shards(out_BhSD, sp.group, 1, 2, heads, queries.of_ranks)


def _in_order_of_ranks(mask: Tensor, queries: Parts, keys: Parts) -> Tensor:
    """Return a mask of all tokens in the order of ranks, from one in the processor's order or of this rank's keys."""
    shape = tuple(mask.shape)
    if mask.dim() == 2 and mask.shape[0] not in (1, sum(queries.lengths)):  # diffusers' form: keys of each row
        mask = mask[:, None, None]
    mask = mask[(None,) * (4 - mask.dim())].detach()
    rows, columns = mask.shape[-2:]
    if columns != sum(keys.lengths) or rows not in (1, sum(queries.lengths)):
        if columns != keys.here or rows not in (1, columns):
            raise LongspanError(
                f"an attention mask of shape {shape} fits neither all {sum(keys.lengths)} tokens nor this "
                f"rank's {keys.here} keys"
            )
        if rows > 1:  # padding neither sees nor is seen; what it sees is dropped, as nothing reads its output
            real = mask.diagonal(dim1=-2, dim2=-1)[..., None, :]
            if mask.dtype != torch.bool or not torch.equal(mask, real & real.mT):
                raise LongspanError(f"an attention mask of shape {shape} hides other pairs than those of padding")
            mask = real
        mask = keys.join(mask, 3)
    mask = keys.in_order_of_ranks(mask, 3)
    return mask if mask.shape[2] == 1 else queries.in_order_of_ranks(mask, 2)


def convolve_rows(
    tokens: Tokens, x_BCLW: Tensor, weight: Tensor, bias: Tensor | None, stride: Any, padding: Any, *more: Any
) -> Tensor:
    """Convolve this rank's rows of pixels with those of its neighbours beside them; beyond the image are zeros."""
    sp, rank = tokens.sp, tokens.sp.rank
    assert sp.group is not None
    if weight.shape[-2] != 3 or stride[0] != 1 or padding[0] != 1:
        raise LongspanError(f"a convolution over rows with kernel {tuple(weight.shape[-2:])} and stride {stride}")
    edges = torch.stack([x_BCLW[:, :, 0], x_BCLW[:, :, -1]])
    first_and_last = [*all_gather(edges, group_name(sp.group)).unbind()]
    nothing = torch.zeros_like(first_and_last[0])
    above = first_and_last[2 * rank - 1] if rank else nothing
    below = first_and_last[2 * rank + 2] if rank + 1 < sp.size else nothing
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
    tokens: Tokens, call: Attention, queries: Parts, keys: Parts, q_BHLD: Tensor, k_BHLD: Tensor, v_BHLD: Tensor,
    mask: Tensor | None, scale: float | None,
) -> Tensor:  # fmt: skip
    """Compute the attention by `longspan.attention`: of ranks with equally many tokens, the last ones padding."""
    q, k, v = (
        F.pad(x.transpose(1, 2), (0, 0, 0, 0, 0, max(of.of_ranks) - x.shape[2]))
        for x, of in ((q_BHLD, queries), (k_BHLD, keys), (v_BHLD, keys))
    )
    # All layers of a forward may have one mask: it is read on the host once.
    of_mask = None if mask is None else (id(mask), version_of(mask))
    fact = call, tokens.sizes, q.shape, k.shape, q.dtype, q.requires_grad, scale, of_mask
    if (found := tokens.plans.get(fact)) is None:
        visible = _visible(mask, queries, keys, len(q))
        found = prepare_attention(q, k, v, tokens.sp, **visible, scale=scale), mask  # which keeps its id
        tokens.plans = {fact: found} | dict(list(tokens.plans.items())[:7])
    return found[0](q, k, v, Scores(scale=scale))[:, : queries.of_ranks[tokens.sp.rank]].transpose(1, 2)


def _visible(mask: Tensor | None, queries: Parts, keys: Parts, batch: int) -> dict[str, Any]:
    """Return the options of `longspan.attention` for a mask and for the padding of ranks."""
    seen = torch.ones(1, 1, 1, sum(keys.lengths), dtype=torch.bool)
    if mask is not None:
        seen = mask = _in_order_of_ranks(mask, queries, keys)
    if mask is not None and mask.dtype != torch.bool:
        seen = mask > -1e4  # diffusers adds this or less to hide a key
        if not bool((seen == (mask == 0)).all() and seen.any(-1).all()):
            raise LongspanError(
                f"a ring takes masks of booleans, or of 0 and -10000 or less, and another was given, "
                f"{tuple(mask.shape)}; use a mesh of `ulysses` alone"
            )
    seen = _padded(seen, 3, keys, value=False)
    if seen.shape[1:3] != (1, 1):
        table = _padded(seen, 2, queries, value=True) if seen.shape[2] > 1 else seen
        each_row, each_head, each_query = (n > 1 for n in table.shape[:3])
        return {"causal": False, "mask_mod": lambda b, h, i, j: table[b * each_row, h * each_head, i * each_query, j]}
    if bool(seen.all()):
        return {"causal": False}
    return {"mask": KeySpans(causal=False, kv_segments=tuple(runs_of(seen[:, 0, 0].cpu()) * (batch // len(seen))))}


def _padded(mask: Tensor, dim: int, of: Parts, *, value: bool) -> Tensor:
    """Return a mask of all tokens in the order of ranks with the padding of each rank."""
    parts = [part.movedim(dim, -1) for part in mask.split(of.of_ranks, dim)]
    longest = max(of.of_ranks)
    return torch.cat([F.pad(x, (0, longest - x.shape[-1]), value=value).movedim(-1, dim) for x in parts], dim)
