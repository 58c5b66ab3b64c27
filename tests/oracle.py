"""The oracle: attention on one device in fp64 with its mask written out, and the inputs that tests share."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


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


def make(case: Case) -> dict[str, Tensor]:
    """Whole q, k, v, the gradient of the output, and sinks: the same on every rank."""
    g = torch.Generator().manual_seed(case.seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(case.dtype)

    b, n = case.batch, case.n
    out = {
        "q": draw(b, n, case.q_heads, case.dim),
        "k": draw(b, n, case.kv_heads, case.dim),
        "v": draw(b, n, case.kv_heads, case.v_dim),
        "grad": draw(b, n, case.q_heads, case.v_dim),
    }
    if case.sinks:
        out["sinks"] = draw(case.q_heads)
    if case.documents is not None:
        out["documents"] = torch.tensor(case.documents)[None].expand(b, n).contiguous()
    return out


def allowed(case: Case, documents: Tensor | None) -> Tensor:
    """The mask as a boolean [B or 1, n, n], from the definitions alone."""
    i, j = torch.arange(case.n)[:, None], torch.arange(case.n)[None]
    ok = torch.ones(case.n, case.n, dtype=torch.bool)
    if case.causal:
        ok = ok & (j <= i)
    if case.window is not None:
        ok = ok & (i - j < case.window)
    if documents is None:
        return ok[None]
    same = documents[:, :, None] == documents[:, None, :]
    return ok[None] & same & (documents >= 0)[:, :, None]


def oracle(case: Case, x: dict[str, Tensor], dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Output and all gradients of the whole attention: out, dq, dk, dv and dsinks."""
    leaves = {k: v.to(dtype).requires_grad_() for k, v in x.items() if k in ("q", "k", "v", "sinks")}
    q, k, v = (leaves[name].transpose(1, 2) for name in ("q", "k", "v"))
    group = case.q_heads // case.kv_heads
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.transpose(2, 3) * (case.scale if case.scale is not None else 1 / math.sqrt(case.dim))
    if case.softcap is not None:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    ok = allowed(case, x.get("documents"))[:, None]
    weights = torch.exp(scores - scores.detach().amax(-1, keepdim=True)) * ok
    total = weights.sum(-1, keepdim=True)
    if "sinks" in leaves:
        total = total + torch.exp(leaves["sinks"].view(1, -1, 1, 1) - scores.detach().amax(-1, keepdim=True))
    p = torch.where(total > 0, weights / total.clamp_min(1e-300), 0)
    out = (p @ v).transpose(1, 2)
    out.backward(x["grad"].to(dtype))
    return {"out": out.detach(), **{f"d{name}": leaf.grad for name, leaf in leaves.items()}}


def relative_error(a: Tensor, b: Tensor) -> float:
    """||a - b|| / ||b|| in fp64; ||a - b|| where b is zero but for rounding (dq of a softmax over one key, say)."""
    a, b = a.double(), b.double()
    norm = float(b.norm())
    return float((a - b).norm()) / (norm if norm > 1e-6 else 1.0)
