"""Attention to one block of keys and values, tile by tile, with its log-sum-exp: what a ring adds up.

A tile is one kernel call. Tiles without a mask, and triangles, run in torch's flash attention; tiles whose mask or
bias must be written out run there too on a CPU (it takes a mask), else as matrix products of at most
`longspan.core.regions.TILE`. Empty tiles do not exist. Both directions take the log-sum-exp of the WHOLE row of scores,
as flash attention's backward does (Dao et al. 2022, arXiv:2205.14135), so that partial results of different tiles,
blocks and ranks simply add up.

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

from longspan.attn.mask import Mask, row_groups
from longspan.attn.score import Scores
from longspan.core.layout import Span
from longspan.core.regions import Region, Tile, TileKind, meeting, tiles

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
    materialized: bool,
) -> tuple[tuple[Call, ...], ...]:
    """The tiles of my queries against every block of keys, block by block.

    Args:
        mask: without a `mod`, so that nothing of the user's is kept alive here.
        batch: rows of the batch.
        lengths: real queries and real keys of the whole sequence.
        q_runs: positions of my queries, in the order in which I hold them.
        k_runs: positions of all keys, run by run.
        owners: for each of them the block that it belongs to, where it lies behind the block's earlier runs.
        materialized: as in `longspan.core.regions.tiles`.
    """
    out: list[list[Call]] = [[] for _ in range(max(owners) + 1)]
    q_at, k_at = _places(q_runs, (0,) * len(q_runs)), _places(k_runs, owners)
    for rows in row_groups(mask, batch):
        for m, n, part in meeting(mask.regions(rows[0], *lengths), q_runs, k_runs):
            for tile in tiles(part, materialized=materialized):
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


def must_materialize(mask: Mask, scores: Scores) -> bool:
    """Whether every score is touched by something that no flash kernel computes."""
    return mask.mod is not None or scores.softcap is not None or scores.has_bias


class SoftmaxAccumulator:
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
        """Merge the attention to further keys: exponentials of at most 0, so nothing overflows.

        Written with exp and log, whose results do not depend on where an element lies, as those of `logaddexp` do on a
        CPU (vectors or, at the end, numbers): so a head's result is the same to the bit on whichever rank it is.
        """
        mine = slice(*rows), slice(None), slice(*queries)
        old, more = self.lse[mine], lse.to(self.lse.dtype)
        highest = torch.maximum(old, more)
        highest = torch.where(torch.isneginf(highest), 0.0, highest)  # -inf - -inf is NaN
        before, now = (old - highest).exp_(), (more - highest).exp_()
        total = before + now
        self.lse[mine] = highest + total.log()
        total = torch.where(total > 0, total, 1.0)  # nothing seen yet: all weights are 0
        self.out[mine].mul_((before / total)[..., None]).add_(out * (now / total)[..., None])


@dataclass(frozen=True, slots=True)
class Finished:
    """Queries whose attention to ALL blocks is computed: what every tile's backward needs of them.

    Attributes:
        q: [B, H, Q, D].
        out: [B, H, Q, Dv], the whole output.
        grad: its gradient.
        lse: [B, H, Q], the whole row's log-sum-exp, 0 where a query sees nothing at all.
    """

    q: Tensor
    out: Tensor
    grad: Tensor
    lse: Tensor

    def at(self, *index: slice) -> Finished:
        """Some rows, heads and queries of them."""
        return Finished(self.q[index], self.out[index], self.grad[index], self.lse[index])


def forward(
    partial: SoftmaxAccumulator,
    q_BHQD: Tensor,
    k_BKTD: Tensor,
    v_BKTD: Tensor,
    todo: tuple[Call, ...],
    mask: Mask,
    scores: Scores,
) -> None:
    """Add my queries' attention to one block of keys to `partial`."""
    q_BHQD, k_BKTD, v_BKTD = _for_device(q_BHQD, k_BKTD, v_BKTD)
    for call in todo:
        mine, theirs = _at(call)
        q = q_BHQD[mine]
        how = _how(call, mask, scores, q)
        if how is not None:
            partial.add(*_forward(q, k_BKTD[theirs], v_BKTD[theirs], how), call.rows, call.queries)


def backward(
    done: Finished,
    k_BKTD: Tensor,
    v_BKTD: Tensor,
    todo: tuple[Call, ...],
    mask: Mask,
    scores: Scores,
    into: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Add the gradients of one block to `into` (dq of all my queries, dk and dv of the block), all in fp32 at least."""
    dq, dk, dv = into
    q, out, grad, k_BKTD, v_BKTD = _for_device(done.q, done.out, done.grad, k_BKTD, v_BKTD)
    done = Finished(q, out, grad, done.lse)
    for call in todo:
        mine, theirs = _at(call)
        part = done.at(*mine)
        how = _how(call, mask, scores, part.q)
        if how is not None:
            parts = _backward(part, k_BKTD[theirs], v_BKTD[theirs], how)
            for total, at, more in ((dq, mine, parts[0]), (dk, theirs, parts[1]), (dv, theirs, parts[2])):
                total[at] += more


def _at(call: Call) -> tuple[tuple[slice, slice, slice], tuple[slice, slice, slice]]:
    """A tile's queries, and its keys, in `[B, heads, tokens, ...]`."""
    rows, heads = slice(*call.rows), slice(None)
    return (rows, heads, slice(*call.queries)), (rows, heads, slice(*call.keys))


@dataclass(frozen=True, slots=True)
class _How:
    """How a tile makes its scores.

    Attributes:
        kind: of its mask.
        bias: what is added, -inf where nothing attends: [B or 1, H or 1, Q, T]; None for nothing.
        scale: the factor of q.k.
        softcap: as in `Scores`.
    """

    kind: TileKind
    bias: Tensor | None
    scale: float
    softcap: float | None


def _how(call: Call, mask: Mask, scores: Scores, q: Tensor) -> _How | None:
    """How `call` makes its scores; None where a mask function leaves nothing of the tile."""
    of_kind = functools.partial(_How, scale=scores.scale_of(q.shape[3]), softcap=scores.softcap)
    if call.tile.kind != "masked":
        return of_kind(call.tile.kind, None)
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
# One tile: out and log-sum-exp of its keys alone; gradients from the whole row's out and log-sum-exp.


def _forward(q: Tensor, k: Tensor, v: Tensor, how: _How) -> tuple[Tensor, Tensor]:
    flash = _flash_of(q, v, how)
    if flash is None:
        return _materialized(q, k, v, how)
    v_dim, causal = v.shape[3], how.kind == "causal"
    q, k, v = _one_dim(q, k, v)
    if flash == "cpu":
        out, lse = _flash_cpu(q, k, v, 0.0, causal, attn_mask=how.bias, scale=how.scale)
        if how.bias is not None:  # the kernel says 0 for a row without any key
            lse = torch.where(torch.isneginf(how.bias).all(-1), -math.inf, lse)
    else:
        out, lse, *_ = _flash_cuda(q, k, v, 0.0, causal, False, scale=how.scale)
    return out[..., :v_dim], lse


def _backward(done: Finished, k: Tensor, v: Tensor, how: _How) -> tuple[Tensor, Tensor, Tensor]:
    flash = _flash_of(done.q, v, how)
    if flash is None:
        return _materialized_backward(done, k, v, how)
    dim, v_dim, causal, lse = done.q.shape[3], v.shape[3], how.kind == "causal", done.lse
    q, k, v, grad, out = _one_dim(done.q, k, v, done.grad, done.out)
    if flash == "cpu":
        dq, dk, dv = _flash_cpu_backward(grad, q, k, v, out, lse, 0.0, causal, attn_mask=how.bias, scale=how.scale)
    else:
        lse = lse.float().contiguous()
        zero = torch.zeros((), dtype=torch.int64, device=q.device)  # the state of a dropout that is not used
        sizes = q.shape[2], k.shape[2]
        dq, dk, dv = _flash_cuda_backward(
            grad, q, k, v, out, lse, None, None, *sizes, 0.0, causal, zero, zero, scale=how.scale
        )
    return dq[..., :dim], dk[..., :dim], dv[..., :v_dim]


def _for_device(*xs: Tensor) -> list[Tensor]:
    """On a CPU in fp32: partial outputs in bf16 would round once per block, and bf16 is no faster there."""
    return _wide(*xs) if xs[0].device.type == "cpu" else list(xs)


def _wide(*xs: Tensor) -> list[Tensor]:
    return [x.to(torch.promote_types(x.dtype, torch.float32)) for x in xs]


def _flash_of(q: Tensor, v: Tensor, how: _How) -> str | None:
    """Whose flash attention takes this tile: "cpu" (any dtype, a mask too), "cuda", or nobody's (None)."""
    if how.softcap is not None:
        return None
    if q.device.type == "cpu":
        return "cpu"
    half = q.dtype in (torch.float16, torch.bfloat16)
    dim = max(q.shape[3], v.shape[3])
    return "cuda" if q.is_cuda and half and how.bias is None and dim <= 256 and dim % 8 == 0 else None


def _one_dim(*xs: Tensor) -> list[Tensor]:
    """Zeros behind the shorter heads: flash attention wants one head_dim for q, k and v (MLA has two)."""
    dim = max(x.shape[3] for x in xs)
    return [x if x.shape[3] == dim else F.pad(x, (0, dim - x.shape[3])) for x in xs]


def _scores(q: Tensor, k: Tensor, how: _How) -> tuple[Tensor, Tensor | None]:
    """Scores [B, H, Q, T] in fp32 at least, and tanh of the capped ones (its square is what the backward needs)."""
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
    """`[B, K, G * Q, ...]`: the rows of all query heads of a KV head below each other."""
    rows: Tensor = x_BHQD.unflatten(1, (k_BKTD.shape[1], -1)).flatten(2, 3)
    return rows


def _by_q_head(x: Tensor, group: int) -> Tensor:
    """The inverse: `[B, H, Q, ...]`."""
    heads: Tensor = x.unflatten(2, (group, -1)).flatten(1, 2)
    return heads


def _materialized(q: Tensor, k: Tensor, v: Tensor, how: _How) -> tuple[Tensor, Tensor]:
    q, k, v = _wide(q, k, v)
    x, _ = _scores(q, k, how)
    lse = torch.logsumexp(x, -1)
    p = (x - torch.where(torch.isneginf(lse), 0.0, lse)[..., None]).exp_()
    return _by_q_head(torch.matmul(_by_kv_head(p, k), v), q.shape[1] // k.shape[1]), lse


def _materialized_backward(done: Finished, k: Tensor, v: Tensor, how: _How) -> tuple[Tensor, Tensor, Tensor]:
    """dS = P * (dO V^T - rowsum(dO * O)), through the cap, and from there to Q and K."""
    grad, q, k, v, out = _wide(done.grad, done.q, k, v, done.out)
    x, tanh = _scores(q, k, how)
    p = _by_kv_head(x.sub_(done.lse[..., None]).exp_(), k)  # [B, K, G * Q, T]
    grad_rows, q_rows = _by_kv_head(grad, k), _by_kv_head(q, k)
    delta = _by_kv_head((grad * out).sum(-1, keepdim=True), k)
    dv = torch.matmul(p.transpose(2, 3), grad_rows)
    ds = torch.matmul(grad_rows, v.transpose(2, 3)).sub_(delta).mul_(p)
    if tanh is not None:
        ds = ds.mul_(1 - _by_kv_head(tanh, k).square())
    ds = ds.mul_(how.scale)
    dq = _by_q_head(torch.matmul(ds, k), q.shape[1] // k.shape[1])
    return dq, torch.matmul(ds.transpose(2, 3), q_rows), dv
