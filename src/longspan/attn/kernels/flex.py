"""Kernel "flex": FlexAttention, one compiled call for any mask and score (torch.nn.attention.flex_attention).

Masks and scores use positions in the whole sequence, which are passed for queries and keys, so that the same call
serves one device, a Ulysses rank, and one block of a ring. It has no backward on a CPU.

The mask's regions determine which blocks are computed, and which of them without a mask (`flex_blocks.py`). Tokens are
padded to whole blocks, and the number of blocks is dynamic, so a kind of layer is compiled once for all lengths.

Shape suffixes: B batch, H query heads, K KV heads, Q queries, T keys, D head_dim.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from longspan.attn.kernels.base import (
    BY_REGIONS,
    BY_SCORES,
    BackwardInputs,
    BlockKernel,
    BlockRegion,
    Blocks,
    KernelRequest,
    register,
)
from longspan.attn.kernels.flex_blocks import block_lists
from longspan.attn.mask import Mask, MaskMod
from longspan.attn.score import Bias, Scores
from longspan.attn.tree import along_paths
from longspan.compat.torch_attention import compiled_whole, flex_attend, flex_attend_backward, mark_dynamic
from longspan.core.layout import Span

BLOCK = 128
"""Queries, and keys, of a FlexAttention block."""

_LARGEST = 256
"""Largest head_dim on a GPU. Wider heads are padded to 512; torch's tile of 64 queries and three stages of 32 keys and
values, in fp32 of 32 and 16, then need 256 KiB of shared memory, and no GPU has more than 227 for a block."""


@dataclass(frozen=True, eq=False)
class FlexBlock:
    """FlexAttention's inputs for the local queries and one KV block, for all layers, forward and backward."""

    mask: Mask  # of the whole sequence, without `mask_mod`, segments, prefix, spans and trees
    mod: MaskMod | None  # the mask's `mask_mod`
    counts: Span  # blocks of queries and blocks of keys; the last of each is padded
    i: Tensor  # positions of the queries, int64 [Q padded]; -1 for padding
    j: Tensor  # positions of the keys, int64 [T padded]
    # Segment of each query and each key, -1 for none, int32 [B, Q padded] and [B, T padded]; None without segments.
    ids: tuple[Tensor, Tensor] | None
    # How many keys each query sees in spite of causality, int64 [B, Q padded]; None if there is neither a prefix nor a
    # bidirectional span.
    prefixes: Tensor | None
    # Positions of queries and of keys along their paths, int64 [B, Q padded] and [B, T padded], and where the keys'
    # subtrees end; None without trees.
    paths: tuple[Tensor, Tensor, Tensor] | None
    lists: tuple[Tensor | None, ...]  # the blocks to compute, from `block_lists`

    def mask_mod(self, first_head: int) -> MaskMod:
        """Return the mask as FlexAttention's function of row, head, query and key indices."""
        mod = None if self.mod is None else _from_head(self.mod, first_head, self.i)
        return _mask_function(self.mask, mod, self.i, self.j, self.ids, self.prefixes, self.paths)

    def score_mod(self, scores: Scores) -> Any:
        """Return softcap and biases as FlexAttention's score function; None for neither."""
        if scores.softcap is None and not scores.kind.has_bias:
            return None
        bias = None if scores.bias is None else _bias_from_head(scores.bias, scores.first_head, self.i)
        return _score_function(scores.softcap, scores.alibi, bias, self.i, self.j)


class FlexKernel(BlockKernel):
    """Every mask and score in one compiled call."""

    name = "flex"
    computes = BY_REGIONS | BY_SCORES

    def refuses(self, request: KernelRequest) -> str | None:
        if request.device.type == "cpu" and request.grad:
            return "kernel='flex': FlexAttention has no backward on CPU; use kernel='auto' or 'tiled'"
        dim = max(request.head_dims)
        if request.device.type != "cpu" and dim > _LARGEST:
            return f"kernel='flex' needs a head_dim of at most {_LARGEST}, these tensors have {dim}; use kernel='auto'"
        return None

    def describe(self, request: KernelRequest) -> str:
        return "FlexAttention compiles mask and scores"

    def prepare(self, blocks: Blocks) -> Sequence[FlexBlock | None]:
        """Return positions, segments and block lists for each KV block, on the device."""
        return [_prepared(blocks, block, parts) if parts else None for block, parts in enumerate(blocks.parts)]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, block: FlexBlock, scores: Scores) -> tuple[Tensor, Tensor]:
        out, lse = _flex_attention(q.device.type != "cpu")(
            *(_in_blocks(x, block.counts[at]) for x, at in ((q, 0), (k, 1), (v, 1))),
            *self._how(q, k, block, scores),
        )
        return out[:, :, : q.shape[2]], lse[:, :, : q.shape[2]]

    def backward(
        self, inputs: BackwardInputs, k: Tensor, v: Tensor, block: FlexBlock, scores: Scores
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Run FlexAttention's backward alone; before torch 2.13 the forward too, by `backward_by_autograd`."""
        run = _flex_backward(k.device.type != "cpu")
        if run is None:
            return backward_by_autograd(functools.partial(self.forward, block=block, scores=scores), inputs, k, v)
        q, (of_q, of_k) = inputs.q, block.counts
        lse_BHQ1 = inputs.lse.to(torch.promote_types(q.dtype, torch.float32))[..., None]
        dq, dk, dv = run(
            *(_in_blocks(x, count) for x, count in ((q, of_q), (k, of_k), (v, of_k))),
            *(_in_blocks(x, of_q) for x in (inputs.out, lse_BHQ1, inputs.grad)),
            *self._how(q, k, block, scores),
        )
        return dq[:, :, : q.shape[2]], dk[:, :, : k.shape[2]], dv[:, :, : k.shape[2]]

    def _how(self, q: Tensor, k: Tensor, block: FlexBlock, scores: Scores) -> tuple[Any, ...]:
        mask_mod, score_mod = block.mask_mod(scores.first_head), block.score_mod(scores)
        return block.lists, mask_mod, score_mod, scores.scale, k.shape[1] != q.shape[1]


def backward_by_autograd(forward: Any, inputs: BackwardInputs, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk and dv of a block from a differentiable `forward(q, k, v) -> (out, lse)`.

    The whole output O is the sum of partial outputs o_b with weights w_b = exp(lse_b - lse), so the gradient of o_b is
    w_b dO, and that of lse_b is w_b (dO . (o_b - O)).
    """
    with torch.enable_grad():
        q, k, v = (x.detach().requires_grad_() for x in (inputs.q, k, v))
        out, lse = forward(q, k, v)
    part, wide = out.detach().to(inputs.lse.dtype), inputs.grad.to(inputs.lse.dtype)
    weight = (lse.detach() - inputs.lse).exp()
    grad_out = weight[..., None] * wide
    grad_lse = (grad_out * (part - inputs.out)).sum(-1)
    dq, dk, dv = torch.autograd.grad([out, lse], [q, k, v], [grad_out.to(out.dtype), grad_lse.to(lse.dtype)])
    return dq, dk, dv


def compiles(device: torch.device) -> bool:
    """Whether FlexAttention can be compiled for a device, which needs Triton."""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None


def _prepared(blocks: Blocks, block: int, parts: Sequence[BlockRegion]) -> FlexBlock:
    mask, batch, device = blocks.mask, blocks.batch, blocks.device
    i, j = blocks.positions(block)
    counts = _blocks_of(len(i)), _blocks_of(len(j))
    rows = batch if mask.varies_by_row else 1
    lists = block_lists(parts, rows, counts, BLOCK, opaque=mask.mask_mod is not None, device=device)
    for of_class in lists:
        if of_class is not None:
            mark_dynamic(of_class, *range(2, of_class.dim()))
    prefixes = None
    if mask.prefix is not None or mask.bidirectional is not None:
        prefixes = _filled(mask.prefixes(i).expand(batch, -1), counts[0])
    ids = None
    if mask.segments is not None:
        q_ids, k_ids = (x.to(torch.int32) for x in mask.segment_ids(batch, i, j))
        ids = _filled(q_ids, counts[0]), _filled(k_ids, counts[1])
    paths = None
    if mask.nodes is not None:
        (at_q, _), (at_k, end_k) = along_paths(mask.nodes, i), along_paths(mask.nodes, j)
        paths = _filled(at_q, counts[0]), _filled(at_k, counts[1]), _filled(end_k, counts[1])
    i, j = (torch.where(x < end, x, -1) for x, end in zip((i, j), blocks.ends, strict=True))
    i, j = _filled(i, counts[0]), _filled(j, counts[1])
    return FlexBlock(_of_any_batch(mask), mask.mask_mod, counts, i, j, ids, prefixes, paths, lists)


def _of_any_batch(mask: Mask) -> Mask:
    """Drop this batch's numbers from the mask: a compiler would recompile for each."""
    prefix = None if mask.prefix is None else 0
    spans = None if mask.bidirectional is None else ()
    none: Any = dict.fromkeys(("mask_mod", "segments", "kv_segments", "nodes"))
    return replace(mask, prefix=prefix, bidirectional=spans, **none)


def _blocks_of(tokens: int) -> int:
    """Return the number of blocks for these tokens; at least 2, because a compiler specializes on 1."""
    return max(2, -(-tokens // BLOCK))


def _filled(x: Tensor, blocks: int) -> Tensor:
    """Pad the last dimension with -1 to this many blocks, and mark it dynamic for the compiler."""
    filled = torch.nn.functional.pad(x, (0, blocks * BLOCK - x.shape[-1]), value=-1)
    return mark_dynamic(filled, filled.dim() - 1)


def _in_blocks(x_BHSD: Tensor, blocks: int) -> Tensor:
    """Pad tokens to whole blocks and split them, [B, H, blocks, BLOCK, D]: a view if they are whole."""
    if not torch.is_grad_enabled():  # a view of an input of an autograd Function would still require gradients, and
        x_BHSD = x_BHSD.detach()  # be recompiled
    missing = blocks * BLOCK - x_BHSD.shape[2]
    if missing and x_BHSD.stride(2) > x_BHSD.stride(1):  # another order of strides would be recompiled
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
    paths: tuple[Tensor, Tensor, Tensor] | None,
) -> MaskMod:
    def allowed(b: Tensor, h: Tensor, at_q: Tensor, at_k: Tensor) -> Tensor:
        q, kv = i[at_q], j[at_k]
        ok = (q >= 0) & (kv >= 0)
        if paths is None:
            ok = ok & mask.pairwise(q, kv, 0 if prefixes is None else prefixes[b, at_q])
        else:
            ok = ok & mask.pairwise(paths[0][b, at_q], paths[1][b, at_k]) & (kv <= q) & (q < paths[2][b, at_k])
        if ids is not None:
            q_id, k_id = ids[0][b, at_q], ids[1][b, at_k]
            ok = ok & (q_id == k_id) & (q_id >= 0)
        if mod is not None:  # padding is hidden anyway; clamp its position so that the function's tables can be indexed
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
    """Shift the head index of `mod`. By a tensor, because a compiler would recompile for each number."""
    first = torch.full((), first_head, dtype=torch.int64, device=like.device)
    return lambda b, h, q, kv: mod(b, h + first, q, kv)


def _bias_from_head(bias: Bias, first_head: int, like: Tensor) -> Bias:
    first = torch.full((), first_head, dtype=torch.int64, device=like.device)
    return lambda h, q, kv: bias(h + first, q, kv)


@functools.cache
def _flex_attention(compiled: bool) -> Callable[..., tuple[Tensor, Tensor]]:
    return _compiled(flex_attend()) if compiled else flex_attend()


@functools.cache
def _flex_backward(compiled: bool) -> Callable[..., tuple[Tensor, Tensor, Tensor]] | None:
    attend = flex_attend_backward()
    return attend if attend is None or not compiled else _compiled(attend)


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return compiled_whole(
        function,
        "kernel='flex': FlexAttention",
        "use kernel='tiled'; a mask_mod or bias that changes with the batch must hold the batch's values in tensors, "
        "not in Python numbers",
    )


FLEX = register(FlexKernel())
