"""Kernel "flex": FlexAttention, one compiled call for any mask and score (torch.nn.attention.flex_attention).

Masks and scores go by positions in the whole sequence, given for queries and keys, so that the same call serves one
device, all tokens of a Ulysses rank, and one block of a ring. It has no backward on a CPU.

Which blocks are computed, and which of them without a mask, follows from the mask's regions (`flex_blocks.py`). Tokens
are padded to whole blocks, and the number of blocks is left open: a kind of layer is compiled once for all lengths.

Shape suffixes: B batch, H query heads, K KV heads, Q queries, T keys, D head_dim.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longspan.attn.kernels.base import BackwardInputs, BlockKernel, BlockRegion, Blocks, KernelRequest, register
from longspan.attn.kernels.flex_blocks import BlockLists, block_lists
from longspan.attn.mask import Mask, MaskMod
from longspan.attn.score import Bias, Scores
from longspan.compat.torch_attention import compiled_whole, flex_attend, mark_dynamic
from longspan.core.layout import Span

BLOCK = 128
"""Tokens of a block, of queries and of keys: FlexAttention's own."""


@dataclass(frozen=True, eq=False)
class FlexBlock:
    """My queries and a block's keys, as FlexAttention takes them; made once, for all layers, forward and backward.

    Attributes:
        mask: of the whole sequence, but for `mod` and what `ids` and `prefixes` say of this batch.
        mod: its function.
        counts: blocks of queries and blocks of keys, the last of them filled up.
        i: positions of the queries, int64 [Q filled up]; -1 for padding.
        j: positions of the keys, int64 [T filled up].
        ids: for each row and query, and for each row and key, the segment that it lies in, -1 for none; None where
            there are no segments. int32 [B, Q filled up] and [B, T filled up].
        prefixes: for each row how many keys are seen by all, int64 [B]; None where there is no prefix.
        lists: the blocks that are seen.
    """

    mask: Mask
    mod: MaskMod | None
    counts: Span
    i: Tensor
    j: Tensor
    ids: tuple[Tensor, Tensor] | None
    prefixes: Tensor | None
    lists: BlockLists

    def mask_mod(self, first_head: int) -> MaskMod:
        """The mask as FlexAttention takes it: of a row, head, query and key, by their places in the tensors."""
        mod = None if self.mod is None else _from_head(self.mod, first_head, self.i)
        return _mask_function(self.mask, mod, self.i, self.j, self.ids, self.prefixes)

    def score_mod(self, scores: Scores) -> Any:
        """Softcap and biases as FlexAttention takes them; None for neither."""
        if scores.softcap is None and not scores.has_bias:
            return None
        bias = None if scores.bias is None else _bias_from_head(scores.bias, scores.first_head, self.i)
        return _score_function(scores.softcap, scores.alibi, bias, self.i, self.j)


class FlexKernel(BlockKernel):
    """Every mask and score in one compiled call."""

    name = "flex"

    def refuses(self, need: KernelRequest) -> str | None:
        """A backward on a CPU."""
        if need.device.type == "cpu" and need.grad:
            return "kernel='flex': FlexAttention has no backward on CPU; use kernel='auto' or 'tiled'"
        return None

    def describe(self, need: KernelRequest) -> str:
        """What it does."""
        return "FlexAttention compiles mask and scores"

    def prepare(self, blocks: Blocks) -> Sequence[FlexBlock | None]:
        """Positions, segments and lists of blocks for each block of the ring, on the device."""
        return [_prepared(blocks, block, parts) if parts else None for block, parts in enumerate(blocks.parts)]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, block: FlexBlock, scores: Scores) -> tuple[Tensor, Tensor]:
        """One call; see `BlockKernel`."""
        heads, queries = q.shape[1:3]
        out, lse = _flex_attention(q.device.type != "cpu")(
            _in_blocks(q, block.counts[0]),
            _in_blocks(k, block.counts[1]),
            _in_blocks(v, block.counts[1]),
            block.lists.tensors,
            block.mask_mod(scores.first_head),
            block.score_mod(scores),
            scores.scale,
            k.shape[1] != heads,
        )
        return out[:, :, :queries], lse[:, :, :queries]

    def backward(
        self, done: BackwardInputs, k: Tensor, v: Tensor, block: FlexBlock, scores: Scores
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Its forward once more, and FlexAttention's own backward; see `backward_by_autograd`."""
        return backward_by_autograd(functools.partial(self.forward, block=block, scores=scores), done, k, v)


def backward_by_autograd(forward: Any, done: BackwardInputs, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv of a block, from a differentiable `forward(q, k, v) -> (out, lse)` of it.

    The whole output is the sum of partial outputs o_b with weights w_b = exp(lse_b - lse), so the gradient that
    reaches o_b is w_b dO, and the one that reaches lse_b is w_b (dO . (o_b - O)).
    """
    with torch.enable_grad():
        q, k, v = (x.detach().requires_grad_() for x in (done.q, k, v))
        out, lse = forward(q, k, v)
    part, wide = out.detach().to(done.lse.dtype), done.grad.to(done.lse.dtype)
    weight = (lse.detach() - done.lse).exp()
    grad_out = weight[..., None] * wide
    grad_lse = (grad_out * (part - done.out)).sum(-1)
    dq, dk, dv = torch.autograd.grad([out, lse], [q, k, v], [grad_out.to(out.dtype), grad_lse.to(lse.dtype)])
    return dq, dk, dv


def compiles(device: torch.device) -> bool:
    """Whether FlexAttention can be compiled for a device: it needs Triton."""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None


def _prepared(blocks: Blocks, block: int, parts: Sequence[BlockRegion]) -> FlexBlock:
    mask, batch, device = blocks.mask, blocks.batch, blocks.device
    i, j = blocks.positions(block)
    counts = _blocks_of(len(i)), _blocks_of(len(j))
    rows = batch if mask.by_row else 1
    lists = block_lists(parts, rows, counts, BLOCK, opaque=mask.mod is not None, device=device)
    for of_class in (lists.partial, lists.full, lists.partial_q, lists.full_q):
        if of_class is not None:
            mark_dynamic(of_class.counts, 2)
            mark_dynamic(of_class.indices, 2, 3)
    prefix = mask.prefix
    prefixes = None
    if prefix is not None:
        prefixes = torch.tensor(prefix if isinstance(prefix, tuple) else [prefix] * batch, device=device)
    ids = None
    if mask.segments is not None:
        q_ids, k_ids = (x.to(torch.int32) for x in mask.ids(batch, i, j))
        ids = _filled(q_ids, counts[0]), _filled(k_ids, counts[1])
    i, j = (torch.where(x < end, x, -1) for x, end in zip((i, j), blocks.ends, strict=True))
    i, j = _filled(i, counts[0]), _filled(j, counts[1])
    return FlexBlock(_of_any_batch(mask), mask.mod, counts, i, j, ids, prefixes, lists)


def _of_any_batch(mask: Mask) -> Mask:
    """A mask without the numbers of this batch, which a compiler would make part of its program."""
    out = copy(mask)
    object.__setattr__(out, "prefix", None if mask.prefix is None else 0)
    for name in ("mod", "segments", "kv_segments"):
        object.__setattr__(out, name, None)
    return out


def _blocks_of(tokens: int) -> int:
    """Blocks that hold so many tokens; at least 2, because of a single one a compiler makes a program of its own."""
    return max(2, -(-tokens // BLOCK))


def _filled(x: Tensor, blocks: int) -> Tensor:
    """The last dimension filled up to so many blocks, with -1, and left open to a compiler."""
    filled = torch.nn.functional.pad(x, (0, blocks * BLOCK - x.shape[-1]), value=-1)
    return mark_dynamic(filled, filled.dim() - 1)


def _in_blocks(x_BHSD: Tensor, blocks: int) -> Tensor:
    """Tokens filled up to whole blocks and cut into them, [B, H, blocks, BLOCK, D]: a view where they are whole."""
    missing = blocks * BLOCK - x_BHSD.shape[2]
    if missing and x_BHSD.stride(2) > x_BHSD.stride(1):  # strides of another order would need a program of their own
        x_BHSD = torch.nn.functional.pad(x_BHSD.transpose(1, 2), (0, 0, 0, 0, 0, missing)).transpose(1, 2)
    elif missing:
        x_BHSD = torch.nn.functional.pad(x_BHSD, (0, 0, 0, missing))
    return mark_dynamic(x_BHSD.unflatten(2, (blocks, BLOCK)), 2)


def _mask_function(
    mask: Mask,
    mod: MaskMod | None,
    i: Tensor,
    j: Tensor,
    ids: tuple[Tensor, Tensor] | None,
    prefixes: Tensor | None,
) -> MaskMod:
    def allowed(b: Tensor, h: Tensor, at_q: Tensor, at_k: Tensor) -> Tensor:
        q, kv = i[at_q], j[at_k]
        ok = mask.pairwise(q, kv, 0 if prefixes is None else prefixes[b]) & (q >= 0) & (kv >= 0)
        if ids is not None:
            q_id, k_id = ids[0][b, at_q], ids[1][b, at_k]
            ok = ok & (q_id == k_id) & (q_id >= 0)
        if mod is not None:  # padding is hidden whatever it says, and has a position that its tables have too
            ok = ok & mod(b, h, q.clamp(min=0), kv.clamp(min=0))
        return ok

    return allowed


def _score_function(
    softcap: float | None, alibi: Tensor | None, bias: Bias | None, i: Tensor, j: Tensor
) -> Callable[..., Tensor]:
    def changed(score: Tensor, b: Tensor, h: Tensor, at_q: Tensor, at_k: Tensor) -> Tensor:
        q, kv = i[at_q].clamp(min=0), j[at_k].clamp(min=0)
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        if alibi is not None:
            score = score - alibi[h] * (q - kv).abs()
        if bias is not None:
            score = score + bias(h, q, kv)
        return score

    return changed


def _from_head(mod: MaskMod, first_head: int, like: Tensor) -> MaskMod:
    """`mod` by the numbers of these heads. A tensor, since a compiler would make a program for each number."""
    first = torch.full((), first_head, dtype=torch.int64, device=like.device)
    return lambda b, h, q, kv: mod(b, h + first, q, kv)


def _bias_from_head(bias: Bias, first_head: int, like: Tensor) -> Bias:
    """Likewise."""
    first = torch.full((), first_head, dtype=torch.int64, device=like.device)
    return lambda h, q, kv: bias(h + first, q, kv)


@functools.cache
def _flex_attention(compiled: bool) -> Callable[..., tuple[Tensor, Tensor]]:
    attend = flex_attend()
    if not compiled:
        return attend
    return compiled_whole(
        attend,
        "kernel='flex': FlexAttention",
        "use kernel='tiled'; a mask_mod or bias that is made anew for each batch must hold what it knows of it in "
        "tensors, not in numbers",
    )


FLEX = FlexKernel()
register(FLEX)
