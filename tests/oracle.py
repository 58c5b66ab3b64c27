"""The oracle: attention on one device in fp64 with a dense mask, and its inputs."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import longspan
from tests.tolerance import eps, units


@dataclass(frozen=True)
class Case:
    """One attention problem: shapes, mask and dtype."""

    n: int = 16
    batch: int = 1
    q_heads: int = 4
    kv_heads: int = 2
    dim: int = 8
    v_dim: int = 8
    causal: bool = True
    window: int | None = None
    documents: tuple[int, ...] | None = None
    softcap: float | None = None
    sinks: bool = False
    scale: float | None = None
    dtype: torch.dtype = torch.float32
    seed: int = 0
    chunk_size: int | None = None
    prefix: int | tuple[int, ...] | None = None
    kv_n: int | None = None  # number of keys, by default that of queries
    q_start: int = 0
    kv_documents: tuple[int, ...] | None = None
    mod: str | None = None
    bias: str | None = None
    alibi: bool = False
    spans: tuple[tuple[tuple[int, int], ...], ...] | None = None  # bidirectional, of each row
    trees: tuple[tuple[tuple[int, int], ...], ...] | None = None  # of each row nodes in preorder: tokens and parent

    @property
    def keys(self) -> int:
        return self.n if self.kv_n is None else self.kv_n


def _striped(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    """Every second key, shifted in row 1, and the two keys before; all keys for head 0."""
    return ((q + kv + b) % 2 == 0) | (h == 0) | (q - kv < 2)


def _late(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return (kv >= q // 2 + h - 1) | (kv == 0)


MODS = {"striped": _striped, "late": _late}


def _waves(h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return torch.sin(0.3 * (q - kv) * (h + 1)) + 0.01 * kv


BIASES = {"waves": _waves}


def slopes(heads: int) -> Tensor:
    """ALiBi's slopes, fp64 [heads]."""
    return 2.0 ** (-8.0 * torch.arange(1, heads + 1, dtype=torch.float64) / heads)


def make(case: Case) -> dict[str, Tensor]:
    """Return full q, k, v, the gradient of the output, and sinks, the same on every rank."""
    g = torch.Generator().manual_seed(case.seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(case.dtype)

    b, n = case.batch, case.n
    out = {
        "q": draw(b, n, case.q_heads, case.dim),
        "k": draw(b, case.keys, case.kv_heads, case.dim),
        "v": draw(b, case.keys, case.kv_heads, case.v_dim),
        "grad": draw(b, n, case.q_heads, case.v_dim),
    }
    if case.sinks:
        out["sinks"] = draw(case.q_heads)
    if case.documents is not None:
        out["documents"] = torch.tensor(case.documents)[None].expand(b, -1).contiguous()
    if case.kv_documents is not None:
        out["kv_documents"] = torch.tensor(case.kv_documents)[None].expand(b, -1).contiguous()
    if case.alibi:
        out["alibi"] = slopes(case.q_heads)
    return out


def options(case: Case, x: dict[str, Tensor]) -> dict[str, Any]:
    """Return the arguments of `longspan.attention` for this case, without sinks."""
    of_mask = {
        "causal": case.causal,
        "window": case.window,
        "chunk_size": case.chunk_size,
        "prefix": case.prefix,
        "q_start": case.q_start,
        "mask_mod": None if case.mod is None else MODS[case.mod],
    }
    if case.trees is not None:
        names = ("window", "chunk_size", "mask_mod")
        of_mask = {"mask": longspan.TreeMask(*intervals(case.trees), **{name: of_mask[name] for name in names})}
    elif case.spans is not None:
        of_mask = {"mask": longspan.Mask(**of_mask, bidirectional=case.spans)}
    return of_mask | {
        "length": case.n,
        "kv_length": case.kv_n,
        "documents": x.get("documents"),
        "kv_documents": x.get("kv_documents"),
        "bias": None if case.bias is None else BIASES[case.bias],
        "alibi": x["alibi"].float() if case.alibi and case.dtype != torch.float64 else x.get("alibi"),
        "softcap": case.softcap,
        "scale": case.scale,
    }


def intervals(trees: tuple[tuple[tuple[int, int], ...], ...]) -> list[Tensor]:
    """Return `tin` and `tout` of trees whose nodes are (tokens, number of the parent or -1)."""
    found = []
    for row in trees:
        stops = [node + 1 for node in range(len(row))]  # number behind the last descendant
        for node in reversed(range(len(row))):
            if row[node][1] >= 0:
                stops[row[node][1]] = max(stops[row[node][1]], stops[node])
        found.append(torch.tensor([(node, stops[node]) for node, (size, _) in enumerate(row) for _ in range(size)]))
    return list(torch.stack(found).unbind(2))


def paths_of(row: tuple[tuple[int, int], ...]) -> list[list[int]]:
    """Return the path of each token of a tree, from the root to itself, by parents alone."""
    found: list[list[int]] = []
    of_nodes: list[list[int]] = []  # of each node's last token
    for size, parent in row:
        path = [] if parent < 0 else of_nodes[parent]
        for _ in range(size):
            path = [*path, len(found)]
            found.append(path)
        of_nodes.append(path)
    return found


def _on_paths(case: Case) -> Tensor:
    """Return which keys each query of trees sees, bool [B, n, n]; windows and chunks count along paths."""
    assert case.trees is not None
    ok = torch.zeros(len(case.trees), case.n, case.n, dtype=torch.bool)
    for b, row in enumerate(case.trees):
        for i, path in enumerate(paths_of(row)):
            first = 0 if case.window is None else max(0, len(path) - case.window)
            if case.chunk_size is not None:
                first = max(first, (len(path) - 1) // case.chunk_size * case.chunk_size)
            ok[b, i, path[first:]] = True
    return ok


def allowed(case: Case, x: dict[str, Tensor]) -> Tensor:
    """Return the mask, bool [B or 1, H or 1, n, keys], from the definitions alone."""
    i, j = torch.arange(case.n)[:, None] + case.q_start, torch.arange(case.keys)[None]
    ok = torch.ones(1, case.n, case.keys, dtype=torch.bool)
    if case.causal:
        ok = ok & (j <= i)
    if case.spans is not None:  # of a row, queries of a span and keys of it
        within = [[(a <= i) & (i < b) & (a <= j) & (j < b) for a, b in row] for row in case.spans]
        ok = ok | torch.stack([sum(row, torch.zeros(case.n, case.keys)) > 0 for row in within])
        ok = ok if case.window is None else ok & (i - j < case.window)
    elif case.window is not None:
        ok = ok & ((i - j).abs() < case.window)
    if case.chunk_size is not None:
        ok = ok & (i // case.chunk_size == j // case.chunk_size)
    if case.trees is not None:
        ok = _on_paths(case)
    if case.prefix is not None:
        prefixes = case.prefix if isinstance(case.prefix, tuple) else (case.prefix,)
        ok = ok | (j < torch.tensor(prefixes)[:, None, None])
    if "documents" in x:
        keys = x.get("kv_documents", x["documents"])
        queries = x["documents"][:, case.q_start : case.q_start + case.n]
        ok = ok & (queries[:, :, None] == keys[:, None, :]) & (queries >= 0)[:, :, None]
    ok = ok[:, None]
    if case.mod is not None:
        b, h = torch.arange(case.batch)[:, None, None, None], torch.arange(case.q_heads)[:, None, None]
        ok = ok & MODS[case.mod](b, h, i, j)
    return ok


def oracle(case: Case, x: dict[str, Tensor], dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Return output and all gradients of the full attention: out, dq, dk, dv and dsinks."""
    leaves = {k: v.to(dtype).requires_grad_() for k, v in x.items() if k in ("q", "k", "v", "sinks")}
    q, k, v = (leaves[name].transpose(1, 2) for name in ("q", "k", "v"))
    group = case.q_heads // case.kv_heads
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.transpose(2, 3) * (case.scale if case.scale is not None else 1 / math.sqrt(case.dim))
    if case.softcap is not None:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    if case.alibi:
        i, j = torch.arange(case.n)[:, None] + case.q_start, torch.arange(case.keys)
        scores = scores - x["alibi"].to(dtype)[:, None, None] * (i - j).abs()
    if case.bias is not None:
        i, j = torch.arange(case.n)[:, None] + case.q_start, torch.arange(case.keys)
        scores = scores + BIASES[case.bias](torch.arange(case.q_heads, dtype=dtype)[:, None, None], i, j)
    ok = allowed(case, x)
    weights = torch.exp(scores - scores.detach().amax(-1, keepdim=True)) * ok
    total = weights.sum(-1, keepdim=True)
    if "sinks" in leaves:
        total = total + torch.exp(leaves["sinks"].view(1, -1, 1, 1) - scores.detach().amax(-1, keepdim=True))
    p = torch.where(total > 0, weights / total.clamp_min(1e-300), 0)
    out = (p @ v).transpose(1, 2)
    out.backward(x["grad"].to(dtype))
    return {"out": out.detach(), **{f"d{name}": leaf.grad for name, leaf in leaves.items()}}


def sizes(case: Case, x: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the unit of errors of out and every gradient: for each number the sum of its terms' absolute values.

    fp64, to first order: the error of a rounded input of a step is propagated through the derivative (`E_*` below, in
    units of eps). Where terms cancel, the number is small and its size is not; without keys, both are 0.
    """
    group = case.q_heads // case.kv_heads
    q, g = (x[name].double().transpose(1, 2) for name in ("q", "grad"))
    k, v = (x[name].double().transpose(1, 2).repeat_interleave(group, 1) for name in ("k", "v"))
    scale = case.scale if case.scale is not None else 1 / math.sqrt(case.dim)
    i, j = torch.arange(case.n)[:, None] + case.q_start, torch.arange(case.keys)
    s, E_s = q @ k.mT * scale, q.abs() @ k.abs().mT * scale
    slope = E_slope = torch.ones(())
    if case.softcap is not None:
        t = torch.tanh(s / case.softcap)
        slope = 1 - t.square()
        s, E_s = case.softcap * t, slope * E_s + case.softcap * t.abs()
        E_slope = 1 + 2 * t.abs() * E_s / case.softcap
    if case.alibi:
        bias = x["alibi"].double()[:, None, None] * (i - j).abs()
        s, E_s = s - bias, E_s + bias
    if case.bias is not None:
        heads = torch.arange(case.q_heads, dtype=torch.float64)[:, None, None]
        bias = BIASES[case.bias](heads, i, j)
        # The function rounds too, in fp32 for integer positions: compare its values with those in fp64.
        inside = (BIASES[case.bias](heads.long(), i, j).double() - bias).abs() / eps(case.dtype)
        s, E_s = s + bias, E_s + bias.abs() + inside
    s = s.masked_fill(~allowed(case, x), -math.inf)
    sink = x["sinks"].double().view(1, -1, 1, 1) if case.sinks else torch.full((1, 1, 1, 1), -math.inf)
    lse = torch.logsumexp(torch.cat([s, sink.expand(*s.shape[:3], 1).double()], -1), -1, keepdim=True)
    lse = lse.masked_fill(lse == -math.inf, 0)
    p, p_sink = (s - lse).exp(), (sink - lse).exp()
    E_sink = torch.where(p_sink > 0, sink.abs(), 0)
    E_s = torch.where(p > 0, E_s, 0)
    # A weight is exp(s - lse), with the errors of both; the error of lse is the mean of those of its scores.
    E_lse = lse.abs() + (p * E_s).sum(-1, keepdim=True) + p_sink * E_sink
    E_p = p * (1 + E_s + E_lse)
    E_out = E_p @ v.abs()
    dp, E_dp = g @ v.mT, g.abs() @ v.abs().mT
    delta, E_delta = (p * dp).sum(-1, keepdim=True), (g.abs() * E_out).sum(-1, keepdim=True)
    ds = p * (dp - delta)
    E_ds = (E_p * (dp - delta).abs() + p * (E_dp + E_delta)) * slope + ds.abs() * E_slope

    def per_kv_head(y: Tensor) -> Tensor:
        return y.unflatten(1, (case.kv_heads, group)).sum(2)

    found = {
        "out": E_out,
        "dq": scale * E_ds @ k.abs(),
        "dk": per_kv_head(scale * E_ds.mT @ q.abs()),
        "dv": per_kv_head(E_p.mT @ g.abs()),
    }
    found = {name: y.transpose(1, 2) for name, y in found.items()}
    if case.sinks:
        E = p_sink * (1 + E_sink + E_lse) * delta.abs() + p_sink * E_delta
        found["dsinks"] = E.sum((0, 2, 3))
    return found


@functools.lru_cache(maxsize=256)
def truth_of(case: Case) -> dict[str, Tensor]:
    """Return the oracle's result, computed once per process for all meshes."""
    return oracle(case, make(case))


@functools.lru_cache(maxsize=256)
def sizes_of(case: Case) -> dict[str, Tensor]:
    """Return `sizes` of a case, computed once per process."""
    return sizes(case, make(case))


def errors(case: Case, found: dict[str, Tensor], truth: dict[str, Tensor] | None = None) -> dict[str, float]:
    """Return the error of each of `found` (out, dq, dk, dv, dsinks) in `units`, against the oracle or `truth`."""
    expected, size = truth or truth_of(case), sizes_of(case)
    return {name: units(y, expected[name], size[name], case.dtype) for name, y in found.items()}


def plain_divergence(student: Tensor, teacher: Tensor, beta: float, temperature: float, top_k: int | None) -> Tensor:
    """Return each token's divergence, from logits `[..., V]`: TRL's formulas, and its bucket for all other tokens."""
    log_p, log_q = (torch.log_softmax(x / temperature, -1) for x in (student, teacher))
    if top_k is not None:
        index = log_q.sort(dim=-1, descending=True, stable=True).indices
        chosen, rest = index[..., :top_k], index[..., top_k:]
        log_p, log_q = (
            torch.cat([x.gather(-1, chosen), x.gather(-1, rest).logsumexp(-1, keepdim=True)], -1)
            for x in (log_p, log_q)
        )
    if beta == 0:
        return F.kl_div(log_p, log_q, reduction="none", log_target=True).sum(-1)
    if beta == 1:
        return F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)
    weights = torch.tensor([1 - beta, beta], dtype=log_p.dtype).log()
    log_m = torch.logsumexp(torch.stack([log_p + weights[0], log_q + weights[1]]), 0)
    of_q, of_p = (F.kl_div(log_m, x, reduction="none", log_target=True).sum(-1) for x in (log_q, log_p))
    return beta * of_q + (1 - beta) * of_p
