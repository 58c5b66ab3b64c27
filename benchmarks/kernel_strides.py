"""Cost for torch's CPU attention to read K and V as the all-to-all leaves them, against copying them heads-first.

    python benchmarks/kernel_strides.py

One process, no communication. An all-to-all delivers `[S, B, local heads of Q, K, V]`, packed. The kernel accepts these
strides, but on a CPU copying K and V first saves a little time, so `longspan.attention` does it there alone. Forward +
backward, causal, batch 1, medians of the ratios within a round, one thread.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import common
import torch
import torch.nn.functional as F

HEAD_DIM = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 4096, 8192])
    parser.add_argument("--heads", nargs="+", default=["4/4", "4/1", "2/2", "4/2"], help="query/KV heads of one rank")
    parser.add_argument("--repeats", type=int, default=5, help="timed rounds at 8,192 tokens; more below")
    parser.add_argument("--name", default="kernel-strides", help="name of the report")
    args = parser.parse_args()
    torch.set_num_threads(1)
    env = common.environment(["torch"])
    rows = []
    for tokens in args.tokens:
        for heads in args.heads:
            for dtype in common.DTYPES:
                rounds = args.repeats * max(1, min(4, 8192 // tokens))
                ratio = measure(tokens, *map(int, heads.split("/")), common.DTYPES[dtype], rounds)
                rows.append({"tokens": tokens, "heads": heads, "dtype": dtype, "as_it_lies_over_copied": ratio})
                print(rows[-1], flush=True)
    ratios = [row["as_it_lies_over_copied"] for row in rows]
    cells = [[f"{r['tokens']:,}", r["heads"], r["dtype"], f"{r['as_it_lies_over_copied']:.3f}"] for r in rows]
    text = common.table(["tokens", "heads", "dtype", "strided / copied"], cells) + (
        f"\n\n- strided over copied, time: median {common.median(ratios):.3f}, least {min(ratios):.3f}, most "
        f"{max(ratios):.3f}. Heads are one rank's, query/KV."
    )
    print(text)
    common.write_report(args.name, "torch's CPU attention: strided K and V against copied ones", env, text, rows)


def measure(tokens: int, q_heads: int, kv_heads: int, dtype: torch.dtype, rounds: int) -> float:
    """Return the median over rounds of the strided time over the time with K and V copied."""
    as_it_lies, copied = (step(tokens, q_heads, kv_heads, dtype, copy=copy) for copy in (False, True))
    as_it_lies()
    copied()
    ratios = []
    for turn in range(rounds):
        order = (as_it_lies, copied) if turn % 2 else (copied, as_it_lies)
        seconds = {run: run() for run in order}
        ratios.append(seconds[as_it_lies] / seconds[copied])
    return common.median(ratios)


def step(tokens: int, q_heads: int, kv_heads: int, dtype: torch.dtype, *, copy: bool) -> Callable[[], float]:
    widths = [heads * HEAD_DIM for heads in (q_heads, kv_heads, kv_heads)]
    packed = torch.randn(tokens, 1, sum(widths)).to(dtype).requires_grad_()
    grad = torch.randn(1, q_heads, tokens, HEAD_DIM).to(dtype)

    def run() -> float:
        packed.grad = None
        start = time.perf_counter()
        q, k, v = (x.unflatten(2, (-1, HEAD_DIM)).permute(1, 2, 0, 3) for x in packed.split(widths, -1))
        if copy:
            k, v = k.contiguous(), v.contiguous()
        F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q_heads != kv_heads).backward(grad)
        return time.perf_counter() - start

    return run


if __name__ == "__main__":
    main()
