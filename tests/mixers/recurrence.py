"""The reference of `longspan.linear_attention`: token by token, in fp64, on one device; and its inputs."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import longspan

LIMIT = {torch.float32: 1e-5, torch.float64: 1e-10, torch.bfloat16: 1e-2}
"""Largest relative error of a tensor, by dtype; in bf16 results are rounded, by up to 4e-3."""

Rows = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Case:
    """One linear attention."""

    n: int = 24
    batch: int = 2
    heads: int = 2
    value_heads: int = 2
    dim: int = 4
    v_dim: int = 3
    # "none", "head", "key" (one per key dim), or "strong": per key dim, down to exp(-400) and to exp(-inf).
    decay: str = "none"
    beta: bool = False
    causal: bool = True
    documents: Rows | None = None  # an id for every token, by row; rows repeat up to the batch
    state: bool = False  # whether an initial state is given and the final one returned
    zero: str = ""  # the input that is 0 everywhere, as after a projection that is initialised with zeros
    dtype: torch.dtype = torch.float32
    seed: int = 0


def make(case: Case) -> dict[str, Tensor]:
    """Return the inputs and the gradients of the outputs, the same on every rank."""
    g = torch.Generator().manual_seed(case.seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    tokens = (case.batch, case.n)
    x = {
        "q": draw(*tokens, case.heads, case.dim),
        "k": F.normalize(draw(*tokens, case.heads, case.dim), dim=-1),
        "v": draw(*tokens, case.value_heads, case.v_dim),
        "dout": draw(*tokens, case.value_heads, case.v_dim),
    }
    if case.decay != "none":
        shape = (*tokens, case.value_heads, *([] if case.decay == "head" else [case.dim]))
        x["decay"] = -draw(*shape).abs() * 0.3
        if case.decay == "strong":
            x["decay"][draw(*shape) > 1] *= 1000
            x["decay"][draw(*shape) > 2] = -torch.inf
    if case.beta:
        x["beta"] = 2 * draw(*tokens, case.value_heads).sigmoid()
    if case.state:
        x["initial_state"] = draw(case.batch, case.value_heads, case.dim, case.v_dim)
        x["dfinal"] = draw(case.batch, case.value_heads, case.dim, case.v_dim)
    if case.zero:
        x[case.zero].zero_()
    return {name: t.to(case.dtype) for name, t in x.items()}


def ids_of(case: Case) -> Tensor | None:
    if case.documents is None:
        return None
    return torch.tensor([case.documents[b % len(case.documents)] for b in range(case.batch)])


def leaves_of(x: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.clone().requires_grad_() for name, t in x.items() if name not in ("dout", "dfinal")}


def one_row(
    q: Tensor, k: Tensor, v: Tensor, decay: Any, beta: Any, state: Tensor, causal: bool
) -> tuple[Tensor, Tensor]:
    """Return output and final state of one document `[tokens, heads, dim]`, from the definition."""
    outs = []
    for t in range(len(q)):
        if decay is not None:
            state = (decay[t].exp() if decay.dim() == 3 else decay[t].exp()[:, None])[..., None] * state
        if beta is None:
            state = state + k[t][..., None] * v[t][:, None]
        else:
            seen = torch.einsum("hk,hkv->hv", k[t], state)
            state = state + beta[t][:, None, None] * k[t][..., None] * (v[t] - seen)[:, None]
        outs.append(torch.einsum("hk,hkv->hv", q[t], state))
    return (torch.stack(outs) if causal else torch.einsum("thk,hkv->thv", q, state)), state


@functools.lru_cache(maxsize=256)
def truth_of(case: Case) -> dict[str, Tensor]:
    """Return output, final state and all gradients in fp64."""
    x = {name: t.double() for name, t in make(case).items()}
    leaves, ids = leaves_of(x), ids_of(case)
    repeats = case.value_heads // case.heads
    q, k = (leaves[name].repeat_interleave(repeats, 2) for name in "qk")
    outs, finals = [], []
    for b in range(case.batch):
        row = torch.zeros(case.n, dtype=torch.int64) if ids is None else ids[b]
        zero = torch.zeros(case.value_heads, case.dim, case.v_dim, dtype=torch.float64)
        state = leaves["initial_state"][b] if case.state else zero
        out = torch.zeros(case.n, case.value_heads, case.v_dim, dtype=torch.float64)
        for number, i in enumerate(row[row >= 0].unique_consecutive()):
            at = row == i
            gates = [leaves[name][b][at] if name in leaves else None for name in ("decay", "beta")]
            state = state if number == 0 else zero
            part, state = one_row(q[b][at], k[b][at], leaves["v"][b][at], *gates, state, case.causal)
            out = out.index_put((at,), part)
        outs.append(out)
        finals.append(state)
    found = {"out": torch.stack(outs)}
    loss = (found["out"] * x["dout"]).sum()
    if case.state:
        found["final"] = torch.stack(finals)
        loss = loss + (found["final"] * x["dfinal"]).sum()
    loss.backward()
    return {name: t.detach() for name, t in found.items()} | {f"d{name}": t.grad for name, t in leaves.items()}


def run(case: Case, sp: longspan.SequenceSharding, **more: Any) -> dict[str, Tensor]:
    """Return the same of `longspan.linear_attention`, gathered and summed over the ranks of `sp`."""
    x = make(case)
    leaves = leaves_of(x)
    local = {name: sp.shard(leaves[name]) for name in leaves if name != "initial_state"}
    options = {"length": case.n, "documents": ids_of(case), "causal": case.causal, "return_state": case.state}
    result = longspan.linear_attention(**local, sp=sp, initial_state=leaves.get("initial_state"), **{**options, **more})
    out, final = result if case.state else (result, None)
    loss = (out * sp.shard(x["dout"])).sum()
    if final is not None:
        # Every rank uses the state, each with another weight.
        loss = loss + (final * x["dfinal"]).sum() * (2 * (sp.rank + 1) / (sp.size * (sp.size + 1)))
    loss.backward()
    found = {"out": sp.gather(out.detach(), length=case.n)}
    if final is not None:
        found["final"] = final.detach()
    for name, leaf in leaves.items():
        assert leaf.grad is not None, name
        if sp.size > 1:
            dist.all_reduce(leaf.grad, group=sp.group)
        found[f"d{name}"] = leaf.grad
    return found


def relative_errors(found: dict[str, Tensor], truth: dict[str, Tensor]) -> dict[str, float]:
    """Return the relative error of each tensor; infinite if it has another shape or is not finite."""
    errors = {}
    for name, expected in truth.items():
        apart, size = (found[name].double() - expected).norm().item(), expected.norm().item()
        errors[name] = apart / size if size else (0.0 if apart == 0 else torch.inf)
        if found[name].shape != expected.shape or not errors[name] <= 1e9:
            errors[name] = torch.inf
    return errors
