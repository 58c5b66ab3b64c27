"""Cost of masks: time of attention forward + backward relative to the full causal mask, next to the attending pairs.

    python -m benchmarks.mask_cost

One process, one thread. A window of W should cost O(S W), documents the sum of their squares, chunks likewise, and a
mask function the 256 x 1024 tiles that it does not empty. Candidates alternate within a round; ratios to the causal
attention of the same kernel are medians over rounds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import longspan
from benchmarks import common
from longspan.attn.mask import Mask
from longspan.attn.prepare import pairs_of_blocks
from longspan.attn.segments import cu_seqlens_segments
from longspan.core.layout import Layout

HEADS, KV_HEADS, DIM = 4, 2, 64


def local_blocks(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    """As a user would write a window of 1,024 for FlexAttention."""
    return (q >= kv) & (q - kv < 1024)


def masks(n: int) -> dict[str, dict[str, Any]]:
    ends = [0, n // 16, n // 16 + n // 8, n // 2, n]
    return {
        "causal": {},
        "bidirectional": {"causal": False},
        "window 256": {"window": 256},
        "window 1,024": {"window": 1024},
        "window 4,096": {"window": 4096},
        "chunks of 1,024": {"chunk_size": 1024},
        "4 documents": {"cu_seqlens": torch.tensor(ends)},
        "16 documents": {"cu_seqlens": torch.arange(0, n + 1, n // 16)},
        "256 documents": {"cu_seqlens": torch.arange(0, n + 1, n // 256)},
        "prefix of a quarter": {"prefix": n // 4},
        "mask_mod: window 1,024": {"mask_mod": local_blocks},
    }


def pairs(n: int, options: dict[str, Any]) -> int:
    """Pairs of query and key that attend, for masks that are known by name."""
    named = {k: v for k, v in options.items() if k not in ("cu_seqlens", "mask_mod")}
    rows = cu_seqlens_segments(options["cu_seqlens"], n) if "cu_seqlens" in options else None
    if "mask_mod" in options:
        named["window"] = 1024
    return pairs_of_blocks(Layout(), (n, n), Mask(segments=rows, **named), 1)[0][0]


def step(n: int, kernel: str, options: dict[str, Any]) -> Callable[[], None]:
    sp = longspan.SequenceSharding(longspan.init_mesh())
    q, k, v = (torch.randn(1, n, heads, DIM).requires_grad_() for heads in (HEADS, KV_HEADS, KV_HEADS))
    grad = torch.randn(1, n, HEADS, DIM)

    def run() -> None:
        longspan.attention(q, k, v, sp, kernel=kernel, **options).backward(grad)

    return run


def main(tokens: int = 16384, repeats: int = 3, name: str = "mask-cost") -> None:
    """Time every mask."""
    torch.set_num_threads(1)
    env = common.environment(["torch"])
    rows = []
    for kernel in ("sdpa", "tiled"):
        runs = {
            name: step(tokens, kernel, options)
            for name, options in masks(tokens).items()
            if kernel == "tiled" or options.keys() <= {"causal"}
        }
        seconds, _ = common.alternate(dict(runs), repeats)
        whole = pairs(tokens, {})
        for mask, options in masks(tokens).items():
            if mask in runs:
                ratio = common.paired_ratio(seconds[mask], seconds["causal"])
                share = pairs(tokens, options) / whole
                rows.append({"kernel": kernel, "mask": mask, "pairs": share, "time": ratio,
                             "seconds": common.median(seconds[mask])})  # fmt: skip
    cells = [[r["kernel"], r["mask"], f"{r['pairs']:.3f}", f"{r['time']:.3f}", f"{r['seconds']:.2f}"] for r in rows]
    text = common.table(["kernel", "mask", "pairs / causal", "time / causal", "seconds"], cells) + (
        f"\n\n{tokens:,} tokens, {HEADS}/{KV_HEADS} heads of {DIM}, fp32, forward + backward; medians of "
        f"{repeats} rounds."
    )
    common.write_report(name, "What a mask costs", env, text, rows)


if __name__ == "__main__":
    common.command(main, __doc__)
