"""LASP-2H (arXiv:2502.07563): a stack of linear and softmax attention on one sharding equals its definition in fp64."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import longspan
from tests.choose import confirming
from tests.mixers.recurrence import LIMIT, relative_errors

BATCH, N, FEATURES, HEADS, DIM = 2, 23, 12, 4, 3
DOCUMENTS = torch.tensor([[0] * 3 + [1] * 12 + [2] * 8, [0] * 1 + [1] * 5 + [2] * 17])
CASES = [(causal, documents) for causal in (True, False) for documents in (None, DOCUMENTS)]

Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""From q, k, v and a decay (of linear layers) to the output."""


class Layer(nn.Module):
    """Attention of one kind: "linear", "decay" (linear, with a decay per head and token) or "softmax"."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.norm = nn.RMSNorm(FEATURES)
        self.qkv, self.out = nn.Linear(FEATURES, 3 * HEADS * DIM), nn.Linear(HEADS * DIM, FEATURES)
        self.gate = nn.Linear(FEATURES, HEADS) if kind == "decay" else None

    def forward(self, x: Tensor, linear: Attend, softmax: Attend) -> Tensor:
        y = self.norm(x)
        q, k, v = self.qkv(y).unflatten(-1, (3, HEADS, DIM)).unbind(2)
        decay = None if self.gate is None else F.logsigmoid(self.gate(y))
        mixed = (softmax if self.kind == "softmax" else linear)(q, k, v, decay)
        return x + self.out(mixed.flatten(2))


def _stack(causal: bool) -> nn.ModuleList:
    torch.manual_seed(0)
    kinds = ["linear", "softmax", "decay" if causal else "linear", "linear", "softmax"]
    return nn.ModuleList(Layer(kind) for kind in kinds).double()


def _run(layers: nn.ModuleList, x: Tensor, linear: Attend, softmax: Attend) -> Tensor:
    for layer in layers:
        x = layer(x, linear, softmax)
    return x


def _inputs() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    x, dout = (torch.randn(BATCH, N, FEATURES, generator=g, dtype=torch.float64) for _ in "xd")
    return x.requires_grad_(), dout


def _found(out: Tensor, x: Tensor, layers: nn.ModuleList) -> dict[str, Tensor]:
    found = {"out": out.detach()}
    for name, leaf in [("x", x), *layers.named_parameters()]:
        assert leaf.grad is not None, name
        found[f"d{name}"] = leaf.grad
    return found


@functools.cache
def _truth(causal: bool, documents: Tensor | None) -> dict[str, Tensor]:
    """Compute on one device, with every pair of tokens written out."""
    ids = torch.zeros(BATCH, N) if documents is None else documents
    seen_BTS = ids[:, :, None] == ids[:, None, :]
    hidden_B1TS = ~(seen_BTS.tril() if causal else seen_BTS)[:, None]

    def linear(q: Tensor, k: Tensor, v: Tensor, decay_BTH: Tensor | None) -> Tensor:
        pairs_BHTS = torch.einsum("bthk,bshk->bhts", q, k)
        if decay_BTH is not None:
            b_BHT = decay_BTH.mT.cumsum(-1)
            pairs_BHTS = pairs_BHTS * (b_BHT[..., :, None] - b_BHT[..., None, :]).masked_fill(hidden_B1TS, 0).exp()
        return torch.einsum("bhts,bshv->bthv", pairs_BHTS.masked_fill(hidden_B1TS, 0), v)

    def softmax(q: Tensor, k: Tensor, v: Tensor, _: Tensor | None) -> Tensor:
        scores_BHTS = torch.einsum("bthk,bshk->bhts", q, k) * DIM**-0.5
        return torch.einsum("bhts,bshv->bthv", scores_BHTS.masked_fill(hidden_B1TS, -torch.inf).softmax(-1), v)

    layers, (x, dout) = _stack(causal), _inputs()
    out = _run(layers, x, linear, softmax)
    (out * dout).sum().backward()
    return _found(out, x, layers)


def _sharded(ring: int, layout: str) -> list[dict[str, Tensor]]:
    mesh = longspan.init_mesh(ring=ring, ulysses=dist.get_world_size() // ring)
    sp = longspan.SequenceSharding(mesh, layout)
    results = []
    for causal, documents in CASES:
        options: dict[str, Any] = {"causal": causal, "length": N, "documents": documents}

        def linear(q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, options: Any = options) -> Any:
            return longspan.linear_attention(q, k, v, sp, decay=decay, **options)

        def softmax(q: Tensor, k: Tensor, v: Tensor, _: Tensor | None, options: Any = options) -> Any:
            return longspan.attention(q, k, v, sp, **options)

        layers, (x, dout) = _stack(causal), _inputs()
        out = _run(layers, sp.shard(x), linear, softmax)
        (out * sp.shard(dout)).sum().backward()
        found = _found(sp.gather(out, length=N), x, layers)
        for name in found.keys() - {"out"}:
            dist.all_reduce(found[name])
        results.append(found)
    return results


# Softmax layers run Ulysses, a ring, or both (USP).
@pytest.mark.parametrize(
    ("ranks", "ring", "layout"),
    [
        (2, 1, "auto"), (4, 4, "contiguous"), (4, 2, "zigzag"),
        *confirming([(2, 2, "zigzag"), (4, 1, "auto"), (4, 4, "zigzag")]),
    ],
)  # fmt: skip
def test_hybrid_stacks_are_exact(get_pool: Any, ranks: int, ring: int, layout: str) -> None:
    for results in get_pool(ranks).run(_sharded, ring, layout):
        for (causal, documents), found in zip(CASES, results, strict=True):
            errors = relative_errors(found, _truth(causal, documents))
            assert max(errors.values()) <= LIMIT[torch.float64], errors
