"""Kernel "tiled": attention to one KV block by tiles, for every mask and score.

A tile is one kernel call. Full tiles and triangles run in torch's flash attention. Tiles whose mask or bias must be
materialized run there too on a CPU, whose kernel takes a mask; on a GPU as matrix products of at most
`longspan.core.regions.TILE`. There are no empty tiles, so the cost follows the mask.

Shape suffixes: B batch, H query heads, K KV heads, G queries to a KV head, Q queries, T keys, D head_dim of
q and k, V of v.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longspan.attn.kernels.base import (
    BY_REGIONS,
    BY_SCORES,
    BackwardInputs,
    BlockKernel,
    Blocks,
    GradientSum,
    KernelRequest,
    SoftmaxAccumulator,
    pad_heads,
    register,
    tokens_first,
)
from longspan.attn.mask import Mask
from longspan.attn.score import ScoreKind, Scores
from longspan.compat.torch_attention import flash_cpu as _flash_cpu
from longspan.compat.torch_attention import flash_cpu_backward as _flash_cpu_backward
from longspan.compat.torch_attention import flash_cuda as _flash_cuda
from longspan.compat.torch_attention import flash_cuda_backward as _flash_cuda_backward
from longspan.core.regions import Call, Region, TileKind, merge_calls, tiles


@dataclass(frozen=True, eq=False, slots=True)
class TiledBlock:
    """The tiles of the local queries with one KV block, and their mask."""

    calls: tuple[Call, ...]
    mask: Mask


def must_materialize(mask: Mask, kind: ScoreKind) -> bool:
    """Whether an option changes every score, which no flash kernel computes."""
    return mask.mask_mod is not None or kind.softcap is not None or kind.has_bias


def takes_flash(device: torch.device, dtype: torch.dtype, head_dims: tuple[int, int]) -> bool:
    """Whether torch's flash attention supports these tensors; otherwise their scores are materialized.

    CPUs: all tensors. GPUs: half precision, with a head_dim of at most 256 that divides by 8.
    """
    if device.type == "cpu":
        return True
    dim = max(head_dims)
    return dtype in (torch.float16, torch.bfloat16) and dim <= 256 and dim % 8 == 0


class TiledKernel(BlockKernel):
    """Every mask and score, by tiles; a subclass may override how a tile is computed."""

    name = "tiled"
    computes = BY_REGIONS | BY_SCORES

    def refuses(self, request: KernelRequest) -> str | None:
        return None

    def describe(self, request: KernelRequest) -> str:
        if request.device.type == "cpu" and request.scores.softcap is None:
            return "tiles through torch's flash attention for CPU, in fp32"
        fits = takes_flash(request.device, request.dtype, request.head_dims)
        if fits and not must_materialize(request.mask, request.scores.kind):
            return "tiles through torch's flash attention, those with a mask as matrix products"
        why = f"{str(request.dtype).removeprefix('torch.')} with head_dim {max(request.head_dims)}"
        why = why if not fits else "a mask function, softcap or bias"
        return f"tiles of 256 x 1024 as matrix products: torch's flash attention does not take {why}"

    def prepare(self, blocks: Blocks) -> Sequence[TiledBlock | None]:
        """Return the tiles of each block."""
        flash = takes_flash(blocks.device, blocks.dtype, blocks.head_dims)
        materialized = must_materialize(blocks.mask, blocks.kind) or not flash
        out: list[TiledBlock | None] = []
        for parts in blocks.parts:
            calls = merge_calls(
                Call(
                    part.rows,
                    (r.q0 + part.q_at, r.q1 + part.q_at),
                    (r.k0 + part.k_at, r.k1 + part.k_at),
                    tile.kind,
                    r if tile.kind == "masked" else None,
                )
                for part in parts
                for tile in tiles(part.region, materialized=materialized)
                for r in (tile.region,)
            )
            out.append(TiledBlock(tuple(calls), blocks.mask) if calls else None)
        return out

    def accumulate(
        self, into: SoftmaxAccumulator, q: Tensor, k: Tensor, v: Tensor, block: TiledBlock, scores: Scores
    ) -> None:
        scale, v_dim = scores.scale_of(k.shape[3]), v.shape[3]
        q, k, v = self.to_kernel_layout([q, k, v], v_dim, scores)
        for call in block.calls:
            tile_q = q[call.at_queries]
            how = _how(call, block.mask, scores, tile_q, scale)
            if how is not None:
                out, lse = self.tile_forward(tile_q, k[call.at_keys], v[call.at_keys], how)
                into.add(_cut(out, v_dim), lse, call.rows, call.queries)

    def accumulate_gradients(
        self,
        into: tuple[GradientSum, GradientSum, GradientSum],
        inputs: BackwardInputs,
        k: Tensor,
        v: Tensor,
        block: TiledBlock,
        scores: Scores,
    ) -> None:
        scale = scores.scale_of(k.shape[3])
        q, k, v, out, grad = self.to_kernel_layout([inputs.q, k, v, inputs.out, inputs.grad], v.shape[3], scores)
        if len(block.calls) > 1 and _flash_of(q, v.shape[3], scores.softcap) == "cuda":  # it would copy every tile
            out, grad = tokens_first(out), tokens_first(grad)
        inputs = BackwardInputs(q, out, grad, inputs.lse)
        for call in block.calls:
            part = inputs.at(*call.at_queries)
            how = _how(call, block.mask, scores, part.q, scale)
            if how is not None:
                parts = self.tile_backward(part, k[call.at_keys], v[call.at_keys], how)
                places = call.at_queries, call.at_keys, call.at_keys
                for total, at, more in zip(into, places, parts, strict=True):
                    total.add(_cut(more, total.shape[3]), at)

    def to_kernel_layout(self, xs: Sequence[Tensor], v_dim: int, scores: Scores) -> list[Tensor]:
        """Cast and pad tensors for `tile_forward` and `tile_backward`; no copy if nothing changes."""
        xs = for_device(*xs)
        dim = max(xs[0].shape[3], v_dim)
        return xs if _flash_of(xs[0], dim, scores.softcap) is None else [pad_heads(x, dim) for x in xs]

    def tile_forward(self, q: Tensor, k: Tensor, v: Tensor, how: TileScores) -> tuple[Tensor, Tensor]:
        """Return the output [B, H, Q, V] and log-sum-exp [B, H, Q] over one tile's keys."""
        flash = _flash_of(q, v.shape[3], how.softcap, how.bias)
        if flash is None:
            return attend_materialized(q, k, v, how)
        causal = how.kind == "causal"
        if flash == "cuda":
            out, lse, *_ = _flash_cuda(q, k, v, 0.0, causal, False, scale=how.scale)
            return out, lse
        out, lse = _flash_cpu(q, k, v, 0.0, causal, attn_mask=how.bias, scale=how.scale)
        if how.bias is not None:  # the kernel returns 0 for a row without keys
            lse = torch.where(torch.isneginf(how.bias).all(-1), -math.inf, lse)
        return out, lse

    def tile_backward(
        self, inputs: BackwardInputs, k: Tensor, v: Tensor, how: TileScores
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return dq, dk and dv of one tile, from the whole row's output and log-sum-exp."""
        flash = _flash_of(inputs.q, v.shape[3], how.softcap, how.bias)
        if flash is None:
            return attend_materialized_backward(inputs, k, v, how)
        q, out, grad, lse, causal = inputs.q, inputs.out, inputs.grad, inputs.lse, how.kind == "causal"
        if flash == "cpu":
            dq, dk, dv = _flash_cpu_backward(grad, q, k, v, out, lse, 0.0, causal, attn_mask=how.bias, scale=how.scale)
        else:
            lse = lse.float().contiguous()
            zero = torch.zeros((), dtype=torch.int64, device=q.device)  # random number state of the unused dropout
            sizes = q.shape[2], k.shape[2]
            dq, dk, dv = _flash_cuda_backward(
                grad, q, k, v, out, lse, None, None, *sizes, 0.0, causal, zero, zero, scale=how.scale
            )
        return dq, dk, dv


TILED = register(TiledKernel())


@dataclass(frozen=True, slots=True)
class TileScores:
    """How to compute a tile's scores."""

    kind: TileKind  # of the tile's mask
    bias: Tensor | None  # added to the scores, -inf where nothing attends: [B or 1, H or 1, Q, T]; None for none
    scale: float  # factor of q.k
    softcap: float | None  # as in `Scores`


def _how(call: Call, mask: Mask, scores: Scores, q: Tensor, scale: float) -> TileScores | None:
    """Return how to compute a call's scores; None if a mask_mod hides the whole tile."""
    of_kind = functools.partial(TileScores, scale=scale, softcap=scores.softcap)
    r = call.region
    if r is None:
        return of_kind(call.kind, None)
    dtype = torch.promote_types(q.dtype, torch.float32)
    i, j = torch.arange(r.q0, r.q1, device=q.device), torch.arange(r.k0, r.k1, device=q.device)
    added = scores.bias_of(q.shape[1], i, j, dtype)
    added = None if added is None else added[None]
    allowed = _band(r, i, j)
    if mask.mask_mod is not None:
        heads = scores.first_head, scores.first_head + q.shape[1]
        of_mod = mask.evaluate_mask_mod(call.rows, heads, i, j)
        allowed = of_mod if allowed is None else of_mod & allowed
        if q.device.type == "cpu":  # on a GPU this would synchronize
            if not bool(allowed.any()):
                return None
            allowed = None if bool(allowed.all()) else allowed
    if allowed is None:
        return of_kind("full" if added is None else "masked", added)
    if added is None:
        added = torch.zeros((), dtype=dtype, device=q.device)
    out = added.masked_fill(~allowed, -math.inf)
    return of_kind("masked", out if out.dim() == 4 else out.view(1, 1, *out.shape[-2:]))


def _band(r: Region, i: Tensor, j: Tensor) -> Tensor | None:
    distance = i[:, None] - j[None]
    allowed: Tensor | None = None
    if r.lo is not None and r.lo_binds:
        allowed = distance >= r.lo
    if r.hi is not None and r.hi_binds:
        near = distance <= r.hi
        allowed = near if allowed is None else allowed & near
    return allowed


# ---------------------------------------------------------------------------------------------------------------------
# One tile.


def for_device(*xs: Tensor) -> list[Tensor]:
    """Cast to fp32 on a CPU: partial outputs in bf16 would round once per block, and bf16 is not faster there."""
    return _wide(*xs) if xs[0].device.type == "cpu" else list(xs)


def _wide(*xs: Tensor) -> list[Tensor]:
    return [x.to(torch.promote_types(x.dtype, torch.float32)) for x in xs]


def _flash_of(q: Tensor, v_dim: int, softcap: float | None, bias: Tensor | None = None) -> str | None:
    """Return which flash attention computes a tile: "cpu" (any dtype, also with a bias), "cuda", or None."""
    if softcap is not None:
        return None
    if q.device.type == "cpu":
        return "cpu"
    return "cuda" if q.is_cuda and bias is None and takes_flash(q.device, q.dtype, (q.shape[3], v_dim)) else None


def _cut(x: Tensor, dim: int) -> Tensor:
    """Undo `pad_heads`."""
    return x if x.shape[3] == dim else x[..., :dim]


def _scores(q: Tensor, k: Tensor, how: TileScores) -> tuple[Tensor, Tensor | None]:
    """Return the scores [B, H, Q, T], in fp32 at least, and with a softcap their tanh, which the backward needs."""
    group = q.shape[1] // k.shape[1]
    x = _by_q_head(torch.matmul(_by_kv_head(q, k), k.transpose(2, 3)), group).mul_(how.scale)
    tanh: Tensor | None = None
    if how.softcap is not None:
        tanh = torch.tanh(x / how.softcap)
        x = tanh * how.softcap
    if how.bias is not None:
        x = x + how.bias
    if how.kind == "causal":
        x = x.masked_fill(torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).triu(1), -math.inf)
    return x, tanh


def _by_kv_head(x_BHQD: Tensor, k_BKTD: Tensor) -> Tensor:
    """Stack the rows of all query heads of a KV head: `[B, K, G * Q, ...]`."""
    rows: Tensor = x_BHQD.unflatten(1, (k_BKTD.shape[1], -1)).flatten(2, 3)
    return rows


def _by_q_head(x: Tensor, group: int) -> Tensor:
    """Undo `_by_kv_head`: `[B, H, Q, ...]`."""
    heads: Tensor = x.unflatten(2, (group, -1)).flatten(1, 2)
    return heads


def attend_materialized(q: Tensor, k: Tensor, v: Tensor, how: TileScores) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp by the formula, in fp32 at least."""
    q, k, v = _wide(q, k, v)
    x, _ = _scores(q, k, how)
    lse = torch.logsumexp(x, -1)
    p = (x - torch.where(torch.isneginf(lse), 0.0, lse)[..., None]).exp_()
    return _by_q_head(torch.matmul(_by_kv_head(p, k), v), q.shape[1] // k.shape[1]), lse


def attend_materialized_backward(
    inputs: BackwardInputs, k: Tensor, v: Tensor, how: TileScores
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute dS = P * (dO V^T - rowsum(dO * O)), then its gradient through the softcap, then dQ and dK."""
    grad, q, k, v, out = _wide(inputs.grad, inputs.q, k, v, inputs.out)
    x, tanh = _scores(q, k, how)
    p = _by_kv_head(x.sub_(inputs.lse[..., None]).exp_(), k)  # [B, K, G * Q, T]
    grad_rows, q_rows = _by_kv_head(grad, k), _by_kv_head(q, k)
    delta = _by_kv_head((grad * out).sum(-1, keepdim=True), k)
    dv = torch.matmul(p.transpose(2, 3), grad_rows)
    ds = torch.matmul(grad_rows, v.transpose(2, 3)).sub_(delta).mul_(p)
    if tanh is not None:
        ds = ds.mul_(1 - _by_kv_head(tanh, k).square())
    ds = ds.mul_(how.scale)
    dq = _by_q_head(torch.matmul(ds, k), q.shape[1] // k.shape[1])
    return dq, torch.matmul(ds.transpose(2, 3), q_rows), dv
