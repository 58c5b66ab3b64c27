"""Errors of ring and USP in bf16 against fp64, compared with flash attention in bf16 on one device.

    python -m benchmarks.ring_accuracy

Output and gradients against one plain fp64 attention; the error is ||a - b|| / ||b||. Rings of 2, 4 and 8 ranks, USP of
2 x 2 and 4 x 2, both ring implementations, causal and zigzag. The goal is at most 1.2 times the one-device error.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import longspan
from benchmarks import common
from longspan.comm.mesh import MeshGroups

MESHES = [(2, 1), (4, 1), (8, 1), (2, 2), (4, 2)]


def truth(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> dict[str, Tensor]:
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    group = q.shape[2] // k.shape[2]
    qh, kh, vh = (x.transpose(1, 2) for x in leaves)
    scores = qh @ kh.repeat_interleave(group, 1).transpose(2, 3) / math.sqrt(q.shape[3])
    scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
    out = (scores.softmax(-1) @ vh.repeat_interleave(group, 1)).transpose(1, 2)
    out.backward(grad.double())
    return {"out": out.detach(), **{f"d{n}": x.grad for n, x in zip("qkv", leaves, strict=True)}}  # type: ignore[dict-item]


def attention(inputs: list[Tensor], sp: Any, kernel: str) -> dict[str, Tensor]:
    *qkv, grad = inputs
    n = grad.shape[1]
    leaves = [x.clone().requires_grad_() for x in qkv]
    out = longspan.attention(*(sp.shard(x) for x in leaves), sp, length=n, kernel=kernel)
    out.backward(sp.shard(grad))
    result = {"out": sp.gather(out.detach(), length=n)}
    for name, leaf in zip("qkv", leaves, strict=True):
        assert leaf.grad is not None
        if sp.size > 1:  # each rank has its own tokens' part and zeros: the sum loses nothing
            dist.all_reduce(leaf.grad, group=sp.group)
        result[f"d{name}"] = leaf.grad
    return result


def body(ring: int, ulysses: int, tokens: int) -> list[dict[str, Any]]:
    sp = longspan.SequenceSharding(longspan.init_mesh(ring=ring, ulysses=ulysses))
    one = longspan.SequenceSharding(MeshGroups("cpu"))
    rows = []
    for heads in ((8, 8), (8, 2)):
        g = torch.Generator().manual_seed(0)
        shapes = [(1, tokens, h, 64) for h in (heads[0], heads[1], heads[1], heads[0])]
        inputs = [torch.randn(shape, generator=g).bfloat16() for shape in shapes]
        expected = truth(*inputs) if dist.get_rank() == 0 else {}
        ours = attention(inputs, sp, "auto")
        single = attention(inputs, one, "sdpa") if dist.get_rank() == 0 else {}
        for name in expected:
            error = {
                who: float((x[name].double() - expected[name]).norm() / expected[name].norm())
                for who, x in (("ours", ours), ("single", single))
            }
            rows.append({"ring": ring, "ulysses": ulysses, "heads": f"{heads[0]}/{heads[1]}", "of": name, **error})
    return rows


def main(tokens: int = 2048, name: str = "ring-accuracy") -> None:
    """Compare errors."""
    env = common.environment(["torch"])
    rows: list[dict[str, Any]] = []
    for ring, ulysses in MESHES:
        rows += common.run_ranks(body, ring * ulysses, ring, ulysses, tokens)
    cells = [
        [f"{r['ring']} x {r['ulysses']}", r["heads"], r["of"], f"{r['ours']:.2e}", f"{r['single']:.2e}",
         f"{r['ours'] / r['single']:.3f}"]
        for r in rows
    ]  # fmt: skip
    ratios = [r["ours"] / r["single"] for r in rows]
    header = ["ring x ulysses", "heads", "of", "error", "one device", "ratio"]
    text = common.table(header, cells) + (
        f"\n\n{tokens:,} tokens, head_dim 64, causal, zigzag, bf16. Ratio: median {common.median(ratios):.3f}, most "
        f"{max(ratios):.3f}."
    )
    common.write_report(name, "Ring and USP in bf16 against fp64", env, text, rows)


if __name__ == "__main__":
    common.command(main, __doc__)
