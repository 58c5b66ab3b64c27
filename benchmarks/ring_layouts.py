"""Zigzag and contiguous blocks with a causal mask: the busiest rank's work, counted and timed.

    python -m benchmarks.ring_layouts

The slowest rank determines the time. Counted: pairs of query and key that attend, by rank, for rings of 2, 4 and 8.
Timed: a ring of 2, one core for each rank, wall time of forward and of forward + backward; and a ring of 4, whose ranks
may share cores, so there the CPU seconds of the busiest rank count.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import longspan
from benchmarks import common
from longspan.attn.mask import Mask
from longspan.attn.prepare import pairs_of_blocks
from longspan.core.layout import Layout

HEADS, KV_HEADS, DIM = 4, 2, 64


def counted(ring: int, n: int) -> dict[str, Any]:
    out: dict[str, Any] = {"ring": ring}
    for kind in ("zigzag", "contiguous"):
        work = [sum(row) for row in pairs_of_blocks(Layout(ring, 1, kind), (n, n), Mask(), 1)]  # type: ignore[arg-type]
        out[kind] = max(work) * ring / sum(work)
    out["ratio"] = out["contiguous"] / out["zigzag"]
    return out


def body(ring: int, n: int, repeats: int) -> dict[str, Any]:
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[dist.get_rank() % len(cores)]})
    steps: dict[str, Callable[[], object]] = {}
    for kind in ("zigzag", "contiguous"):
        sp = longspan.SequenceSharding(longspan.init_mesh(ring=ring), layout=kind)
        local = sp.layout.local_length(n)
        q, k, v = (torch.randn(1, local, h, DIM).requires_grad_() for h in (HEADS, KV_HEADS, KV_HEADS))
        grad = torch.randn(1, local, HEADS, DIM)

        def forward(sp: Any = sp, q: Any = q, k: Any = k, v: Any = v) -> Any:
            with torch.no_grad():
                return longspan.attention(q, k, v, sp, length=n)

        def both(sp: Any = sp, q: Any = q, k: Any = k, v: Any = v, grad: Any = grad) -> Any:
            longspan.attention(q, k, v, sp, length=n).backward(grad)

        steps |= {f"{kind} forward": forward, f"{kind} forward + backward": both}
    wall, cpu = common.alternate(steps, repeats, max_over_ranks=True)
    return {"ring": ring, "wall": wall, "cpu": cpu}


def main(tokens: int = 16384, repeats: int = 5, name: str = "ring-layouts") -> None:
    """Count and time both layouts."""
    env = common.environment(["torch"])
    counts = [counted(ring, tokens) for ring in (2, 4, 8)]
    text = common.table(
        ["ring", "zigzag", "contiguous", "contiguous / zigzag"],
        [[str(c["ring"]), f"{c['zigzag']:.4f}", f"{c['contiguous']:.4f}", f"{c['ratio']:.3f}"] for c in counts],
    )
    text = f"Counted: the busiest rank's work over the mean of all ranks.\n\n{text}\n\n"
    timed = [common.run_ranks(body, ring, ring, tokens, repeats) for ring in (2, 4)]
    cells = []
    for run in timed:
        for part in ("forward", "forward + backward"):
            for clock in ("wall", "cpu"):
                a, b = run[clock][f"contiguous {part}"], run[clock][f"zigzag {part}"]
                cells.append([str(run["ring"]), part, clock, f"{common.median(a):.3f}", f"{common.median(b):.3f}",
                              f"{common.paired_ratio(a, b):.3f}"])  # fmt: skip
    text += f"Timed: {tokens:,} tokens, {HEADS}/{KV_HEADS} heads of {DIM}, fp32, causal; seconds of the busiest rank."
    text += "\n\n" + common.table(["ring", "part", "clock", "contiguous", "zigzag", "contiguous / zigzag"], cells)
    text += f"\n\nA ring of 4 shares {env['cores']} cores here: its wall time is no rank's own, its CPU time is."
    common.write_report(name, "Zigzag against contiguous blocks", env, text, {"counted": counts, "timed": timed})


if __name__ == "__main__":
    common.command(main, __doc__)
