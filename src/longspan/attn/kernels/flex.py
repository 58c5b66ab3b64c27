"""Kernel "flex": FlexAttention, one compiled call for any mask and score (torch.nn.attention.flex_attention).

Masks and scores go by positions in the whole sequence, given for queries and keys, so that the same call serves one
device, all tokens of a Ulysses rank, and one block of a ring. It has no backward on a CPU.

Shape suffixes: B batch, H query heads, K KV heads, Q queries, T keys, D head_dim.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from longspan.attn.kernels.base import BlockKernel, Blocks, Finished, Need, register
from longspan.attn.mask import Mask
from longspan.attn.score import Scores
from longspan.compat.torch_attention import flex_attention, flex_block_mask
from longspan.core.layout import Span


@dataclass(frozen=True, eq=False)
class FlexBlock:
    """Where my queries and a block's keys lie in the whole sequence, and their mask as FlexAttention takes it.

    Attributes:
        mask: of the whole sequence.
        batch: rows of the batch.
        i: positions of the queries, int64 [Q].
        j: positions of the keys, int64 [T].
        ends: positions from which on queries and keys are padding.
        ids: for each row and query, and for each row and key, the segment that it lies in, -1 for none.
        prefixes: for each row how many keys are seen by all.
        made: block masks by heads [first, last): made once, for all layers, forward and backward.
    """

    mask: Mask
    batch: int
    i: Tensor
    j: Tensor
    ends: Span
    ids: tuple[Tensor, Tensor]
    prefixes: Tensor
    made: dict[Span, Any] = field(default_factory=dict)

    def allowed(self, first_head: int) -> Any:
        """The mask as FlexAttention takes it: of a row, head, query and key, by their places in the tensors."""
        mask, i, j, ends, (q_ids, k_ids), prefixes = self.mask, self.i, self.j, self.ends, self.ids, self.prefixes

        def of(b: Tensor, h: Tensor, at_q: Tensor, at_k: Tensor) -> Tensor:
            q, kv = i[at_q], j[at_k]
            ok = mask.pairwise(q, kv, prefixes[b])
            if mask.segments is not None:
                ok = ok & (q_ids[b, at_q] == k_ids[b, at_k]) & (q_ids[b, at_q] >= 0)
            ok = ok & (q < ends[0]) & (kv < ends[1])
            return ok if mask.mod is None else ok & mask.mod(b, h + first_head, q, kv)

        return of

    def block_mask(self, heads: Span) -> Any:
        """FlexAttention's BlockMask for these query heads of the whole model (all of them, unless a function asks)."""
        by_head = self.mask.mod is not None
        key = heads if by_head else (0, 0)
        if key not in self.made:
            on_gpu = self.i.device.type != "cpu"
            rows = self.batch if self.mask.by_row or by_head else None
            count = heads[1] - heads[0] if by_head else None
            sizes = len(self.i), len(self.j)
            allowed = self.allowed(heads[0])
            self.made[key] = flex_block_mask(allowed, rows, count, *sizes, device=self.i.device, _compile=on_gpu)
        return self.made[key]


class FlexKernel(BlockKernel):
    """Every mask and score in one compiled call."""

    name = "flex"

    def refuses(self, need: Need) -> str | None:
        """A backward on a CPU."""
        if need.device.type == "cpu" and need.grad:
            return "kernel='flex': FlexAttention has no backward on CPU; use kernel='auto' or 'tiled'"
        return None

    def describe(self, need: Need) -> str:
        """What it does."""
        return "FlexAttention compiles mask and scores"

    def prepare(self, blocks: Blocks) -> Sequence[FlexBlock | None]:
        """Positions and segments of each block, on the device."""
        mask, prefix = blocks.mask, blocks.mask.prefix
        prefixes = torch.tensor(
            prefix if isinstance(prefix, tuple) else [prefix or 0] * blocks.batch, device=blocks.device
        )
        out: list[FlexBlock | None] = []
        for block, parts in enumerate(blocks.parts):
            i, j = blocks.positions(block)
            ids = mask.ids(blocks.batch, i, j)
            made = FlexBlock(mask, blocks.batch, i, j, blocks.ends, ids, prefixes) if parts else None
            if made is not None:
                made.block_mask((blocks.first_head, blocks.first_head + blocks.heads))
            out.append(made)
        return out

    def forward(self, q: Tensor, k: Tensor, v: Tensor, block: FlexBlock, scores: Scores) -> tuple[Tensor, Tensor]:
        """One call; see `BlockKernel`."""
        heads = q.shape[1]
        found: tuple[Tensor, Tensor] = _flex_attention(q.device.type != "cpu")(
            q,
            k,
            v,
            score_mod=_score_function(scores, block),
            block_mask=block.block_mask((scores.first_head, scores.first_head + heads)),
            scale=scores.scale,
            enable_gqa=k.shape[1] != heads,
        )
        return found

    def backward(
        self, done: Finished, k: Tensor, v: Tensor, block: FlexBlock, scores: Scores
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Its forward once more, and FlexAttention's own backward; see `backward_by_autograd`."""
        return backward_by_autograd(functools.partial(self.forward, block=block, scores=scores), done, k, v)


def backward_by_autograd(forward: Any, done: Finished, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
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


def _score_function(scores: Scores, block: FlexBlock) -> Any:
    """Softcap and biases as FlexAttention takes them; None for neither."""
    if scores.softcap is None and not scores.has_bias:
        return None

    def changed(score: Tensor, b: Tensor, h: Tensor, at_q: Tensor, at_k: Tensor) -> Tensor:
        q, kv = block.i[at_q], block.j[at_k]
        if scores.softcap is not None:
            score = scores.softcap * torch.tanh(score / scores.softcap)
        if scores.alibi is not None:
            score = score - scores.alibi[h] * (q - kv).abs()
        if scores.bias is not None:
            score = score + scores.bias(h + scores.first_head, q, kv)
        return score

    return changed


@functools.cache
def _flex_attention(compiled: bool) -> Any:
    return torch.compile(flex_attention, dynamic=False) if compiled else flex_attention


FLEX = FlexKernel()
register(FLEX)
