"""Attention to one block of keys and values, tile by tile, with its log-sum-exp: what a ring adds up.

A tile is one kernel call. Tiles without a mask, and triangles, run in torch's flash attention; tiles whose mask or
bias must be written out run there too on a CPU (it takes a mask), else as matrix products of at most
`longspan.regions.TILE`. Empty tiles do not exist. Both directions take the log-sum-exp of the WHOLE row of scores, as
flash attention's backward does (Dao et al. 2022, arXiv:2205.14135), so that partial results of different tiles, blocks
and ranks simply add up.

Shape suffixes: B batch, H query heads, K KV heads, G queries to a KV head, Q queries, T keys, D head_dim.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from longspan.attention.mask import Mask, row_groups
from longspan.attention.scores import Scores
from longspan.layout import Span
from longspan.regions import Region, Tile, TileKind, meeting, tiles

_flash_cpu: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_cpu_backward: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_flash_cuda: Any = torch.ops.aten._scaled_dot_product_flash_attention
_flash_cuda_backward: Any = torch.ops.aten._scaled_dot_product_flash_attention_backward


@dataclass(frozen=True, slots=True)
class Call:
    """One tile, with where it lies in the tensors: rows of the batch, my queries, the block's keys."""

    rows: Span
    queries: Span
    keys: Span
    tile: Tile


@functools.lru_cache(maxsize=32)
def calls(
    mask: Mask,
    batch: int,
    lengths: Span,
    q_runs: tuple[Span, ...],
    k_runs: tuple[Span, ...],
    owners: tuple[int, ...],
    written_out: bool,
) -> tuple[tuple[Call, ...], ...]:
    """The tiles of my queries against every block of keys, block by block.

    Args:
        mask: without a `mod`, so that nothing of the user's is kept alive here.
        batch: rows of the batch.
        lengths: real queries and real keys of the whole sequence.
        q_runs: positions of my queries, in the order in which I hold them.
        k_runs: positions of all keys, run by run.
        owners: for each of them the block that it belongs to, where it lies behind the block's earlier runs.
        written_out: as in `longspan.regions.tiles`.
    """
    out: list[list[Call]] = [[] for _ in range(max(owners) + 1)]
    q_at, k_at = _places(q_runs, (0,) * len(q_runs)), _places(k_runs, owners)
    for rows in row_groups(mask, batch):
        for m, n, part in meeting(mask.regions(rows[0], *lengths), q_runs, k_runs):
            for tile in tiles(part, written_out=written_out):
                r = tile.region
                queries, keys = (r.q0 + q_at[m], r.q1 + q_at[m]), (r.k0 + k_at[n], r.k1 + k_at[n])
                out[owners[n]].append(Call(rows, queries, keys, tile))
    return tuple(map(tuple, out))


def _places(runs: tuple[Span, ...], owners: tuple[int, ...]) -> list[int]:
    """For each run what to add to a position in it to find its place in its block."""
    filled = dict.fromkeys(owners, 0)
    out = []
    for (start, stop), owner in zip(runs, owners, strict=True):
        out.append(filled[owner] - start)
        filled[owner] += stop - start
    return out


def must_write_out(mask: Mask, scores: Scores) -> bool:
    """Whether every score is touched by something that no flash kernel computes."""
    return mask.mod is not None or scores.softcap is not None or scores.has_bias


class Partial:
    """Output and log-sum-exp of the keys seen so far: starts with none, `add` merges more of them in, in fp32 at least.

    Attributes:
        out: [B, H, Q, Dv], the softmax over the keys seen so far times their values.
        lse: [B, H, Q], the log of the sum of their exponentials; -inf where nothing was seen.
    """

    def __init__(self, q_BHQD: Tensor, v_dim: int) -> None:
        dtype = torch.promote_types(q_BHQD.dtype, torch.float32)
        self.out = q_BHQD.new_zeros(*q_BHQD.shape[:3], v_dim, dtype=dtype)
        self.lse = q_BHQD.new_full(q_BHQD.shape[:3], -math.inf, dtype=dtype)

    def add(self, out: Tensor, lse: Tensor, rows: Span, queries: Span) -> None:
        """Merge the attention to further keys: weights exp(lse - new lse), at most 1, so nothing overflows."""
        mine = slice(*rows), slice(None), slice(*queries)
        old = self.lse[mine]
        new = torch.logaddexp(old, lse.to(old.dtype))
        finite = torch.where(torch.isneginf(new), 0.0, new)  # -inf - -inf is NaN; its weights are exp(-inf) = 0
        self.out[mine].mul_((old - finite).exp_()[..., None]).add_(out * (lse - finite).exp_()[..., None])
        self.lse[mine] = new


def forward(
    partial: Partial, q_BHQD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, todo: tuple[Call, ...], mask: Mask, scores: Scores
) -> None:
    """Add my queries' attention to one block of keys to `partial`."""
    scale = scores.scale_of(q_BHQD.shape[3])
    q_BHQD, k_BKTD, v_BKTD = _for_device(q_BHQD, k_BKTD, v_BKTD)
    for call in todo:
        q, k, v = _cut(call, q_BHQD, k_BKTD, v_BKTD)
        masked = _masked(call, mask, scores, q)
        if masked is None:
            continue
        out, lse = _forward(q, k, v, *masked, scale, scores.softcap)
        partial.add(out, lse, call.rows, call.queries)


def backward(
    grad_BHQD: Tensor,
    q_BHQD: Tensor,
    k_BKTD: Tensor,
    v_BKTD: Tensor,
    out_BHQD: Tensor,
    lse_BHQ: Tensor,
    todo: tuple[Call, ...],
    mask: Mask,
    scores: Scores,
    into: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Add the gradients of one block to `into` (dq of all my queries, dk and dv of the block), all in fp32 at least.

    Args:
        grad_BHQD: gradient of the whole output.
        q_BHQD: my queries.
        k_BKTD: the block's keys.
        v_BKTD: the block's values.
        out_BHQD: the whole output, of all blocks.
        lse_BHQ: the whole row's log-sum-exp, 0 where a query sees nothing at all.
        todo: as in `forward`.
        mask: as in `forward`.
        scores: as in `forward`.
        into: dq, dk, dv.
    """
    scale = scores.scale_of(q_BHQD.shape[3])
    dq, dk, dv = into
    grad_BHQD, q_BHQD, k_BKTD, v_BKTD, out_BHQD = _for_device(grad_BHQD, q_BHQD, k_BKTD, v_BKTD, out_BHQD)
    for call in todo:
        q, k, v = _cut(call, q_BHQD, k_BKTD, v_BKTD)
        mine = slice(*call.rows), slice(None), slice(*call.queries)
        masked = _masked(call, mask, scores, q)
        if masked is None:
            continue
        parts = _backward(grad_BHQD[mine], q, k, v, out_BHQD[mine], lse_BHQ[mine], *masked, scale, scores.softcap)
        theirs = slice(*call.rows), slice(None), slice(*call.keys)
        for total, at, part in ((dq, mine, parts[0]), (dk, theirs, parts[1]), (dv, theirs, parts[2])):
            total[at] += part


def _cut(call: Call, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows, queries, keys = slice(*call.rows), slice(*call.queries), slice(*call.keys)
    return q[rows, :, queries], k[rows, :, keys], v[rows, :, keys]


def _masked(call: Call, mask: Mask, scores: Scores, q: Tensor) -> tuple[TileKind, Tensor | None] | None:
    """The kind of a tile, and what is added to its scores, -inf where nothing attends: [B or 1, H or 1, Q, T].

    None where a mask function leaves nothing of the tile.
    """
    if call.tile.kind != "masked":
        return call.tile.kind, None
    r = call.tile.region
    dtype = torch.promote_types(q.dtype, torch.float32)
    i, j = torch.arange(r.q0, r.q1, device=q.device), torch.arange(r.k0, r.k1, device=q.device)
    added = scores.bias_of(q.shape[1], i, j, dtype)
    added = None if added is None else added[None]
    allowed = _band(r, i, j)
    if mask.mod is not None:
        heads = scores.first_head, scores.first_head + q.shape[1]
        of_mod = mask.mod_of(call.rows, heads, i, j)
        allowed = of_mod if allowed is None else of_mod & allowed
        if q.device.type == "cpu":  # on a GPU asking would wait for it
            if not bool(allowed.any()):
                return None
            allowed = None if bool(allowed.all()) else allowed
    if allowed is None:
        return "full" if added is None else "masked", added
    if added is None:
        added = torch.zeros((), dtype=dtype, device=q.device)
    out = added.masked_fill(~allowed, -math.inf)
    return "masked", out if out.dim() == 4 else out.view(1, 1, *out.shape[-2:])


def _band(r: Region, i: Tensor, j: Tensor) -> Tensor | None:
    distance = i[:, None] - j[None]
    allowed: Tensor | None = None
    if r.lo_binds:
        allowed = distance >= r.lo  # type: ignore[operator]
    if r.hi_binds:
        near = distance <= r.hi  # type: ignore[operator]
        allowed = near if allowed is None else allowed & near
    return allowed


# ---------------------------------------------------------------------------------------------------------------------
# One tile: out and log-sum-exp of its keys alone; gradients from the whole row's out and log-sum-exp.


def _forward(
    q: Tensor, k: Tensor, v: Tensor, kind: TileKind, bias: Tensor | None, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    flash = _flash_of(q, v, bias, softcap)
    if flash is None:
        return _written_out(q, k, v, kind, bias, scale, softcap)
    v_dim = v.shape[3]
    q, k, v = _one_dim(q, k, v)
    if flash == "cpu":
        out, lse = _flash_cpu(q, k, v, 0.0, kind == "causal", attn_mask=bias, scale=scale)
        if bias is not None:  # the kernel says 0 for a row without any key
            lse = torch.where(torch.isneginf(bias).all(-1), -math.inf, lse)
    else:
        out, lse, *_ = _flash_cuda(q, k, v, 0.0, kind == "causal", False, scale=scale)
    return out[..., :v_dim], lse


def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    kind: TileKind,
    bias: Tensor | None,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    flash = _flash_of(q, v, bias, softcap)
    if flash is None:
        return _written_out_backward(grad, q, k, v, out, lse, kind, bias, scale, softcap)
    dim, v_dim = q.shape[3], v.shape[3]
    q, k, v, grad, out = _one_dim(q, k, v, grad, out)
    if flash == "cpu":
        dq, dk, dv = _flash_cpu_backward(grad, q, k, v, out, lse, 0.0, kind == "causal", attn_mask=bias, scale=scale)
    else:
        lse = lse.float().contiguous()
        zero = torch.zeros((), dtype=torch.int64, device=q.device)  # the state of a dropout that is not used
        sizes = q.shape[2], k.shape[2]
        dq, dk, dv = _flash_cuda_backward(
            grad, q, k, v, out, lse, None, None, *sizes, 0.0, kind == "causal", zero, zero, scale=scale
        )
    return dq[..., :dim], dk[..., :dim], dv[..., :v_dim]


def _for_device(*xs: Tensor) -> list[Tensor]:
    """On a CPU in fp32: partial outputs in bf16 would round once per block, and bf16 is no faster there."""
    return _wide(*xs) if xs[0].device.type == "cpu" else list(xs)


def _wide(*xs: Tensor) -> list[Tensor]:
    return [x.to(torch.promote_types(x.dtype, torch.float32)) for x in xs]


def _flash_of(q: Tensor, v: Tensor, bias: Tensor | None, softcap: float | None) -> str | None:
    """Whose flash attention takes this tile: "cpu" (any dtype, a mask too), "cuda", or nobody's (None)."""
    if softcap is not None:
        return None
    if q.device.type == "cpu":
        return "cpu"
    half = q.dtype in (torch.float16, torch.bfloat16)
    dim = max(q.shape[3], v.shape[3])
    return "cuda" if q.is_cuda and half and bias is None and dim <= 256 and dim % 8 == 0 else None


def _one_dim(*xs: Tensor) -> list[Tensor]:
    """Zeros behind the shorter heads: flash attention wants one head_dim for q, k and v (MLA has two)."""
    dim = max(x.shape[3] for x in xs)
    return [x if x.shape[3] == dim else F.pad(x, (0, dim - x.shape[3])) for x in xs]


def _scores(
    q: Tensor, k: Tensor, kind: TileKind, bias: Tensor | None, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor | None]:
    """Scores [B, H, Q, T] in fp32 at least, and tanh of the capped ones (its square is what the backward needs)."""
    group = q.shape[1] // k.shape[1]
    q_BKGQD, k_BKTD = q.unflatten(1, (-1, group)), k
    x = torch.matmul(q_BKGQD.flatten(2, 3), k_BKTD.transpose(2, 3))
    x = x.unflatten(2, (group, -1)).flatten(1, 2).mul_(scale)
    tanh: Tensor | None = None
    if softcap is not None:
        tanh = torch.tanh(x / softcap)
        x = tanh * softcap
    if bias is not None:
        x = x + bias
    if kind == "causal":
        x = x.masked_fill(torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).triu(1), -math.inf)
    return x, tanh


def _written_out(
    q: Tensor, k: Tensor, v: Tensor, kind: TileKind, bias: Tensor | None, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    q, k, v = _wide(q, k, v)
    x, _ = _scores(q, k, kind, bias, scale, softcap)
    lse = torch.logsumexp(x, -1)
    p = (x - torch.where(torch.isneginf(lse), 0.0, lse)[..., None]).exp_()
    group = q.shape[1] // k.shape[1]
    out = torch.matmul(p.unflatten(1, (-1, group)).flatten(2, 3), v)
    return out.unflatten(2, (group, -1)).flatten(1, 2), lse


def _written_out_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    kind: TileKind,
    bias: Tensor | None,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dS = P * (dO V^T - rowsum(dO * O)), through the cap, and from there to Q and K."""
    grad, q, k, v, out = _wide(grad, q, k, v, out)
    group = q.shape[1] // k.shape[1]
    x, tanh = _scores(q, k, kind, bias, scale, softcap)
    p = x.sub_(lse[..., None]).exp_().unflatten(1, (-1, group)).flatten(2, 3)  # [B, K, G * Q, T]
    grad_rows = grad.unflatten(1, (-1, group)).flatten(2, 3)
    delta = (grad * out).sum(-1, keepdim=True).unflatten(1, (-1, group)).flatten(2, 3)
    dv = torch.matmul(p.transpose(2, 3), grad_rows)
    ds = torch.matmul(grad_rows, v.transpose(2, 3)).sub_(delta).mul_(p)
    if tanh is not None:
        ds = ds.mul_(1 - tanh.unflatten(1, (-1, group)).flatten(2, 3).square())
    ds = ds.mul_(scale)
    dq = torch.matmul(ds, k).unflatten(2, (group, -1)).flatten(1, 2)
    dk = torch.matmul(ds.transpose(2, 3), q.unflatten(1, (-1, group)).flatten(2, 3))
    return dq, dk, dv
