"""A real limit: the longest context that each completes when a rank may take so much memory for a step and no more.

    python benchmarks/real_limit.py [--quick]

Every try is a fresh group of ranks. When model, gradients and the optimizer's states are there, each rank limits itself
(RLIMIT_DATA: what it holds, and so many MiB), the same for all methods, and takes one training step of a Llama; a rank
that needs more gets an out-of-memory error from the system. Lengths go up by half until one fails, then by bisection.
The model is deep and narrow, like a real one by its ratio of layers to what one layer needs.
Methods: longspan with memory="longest", the same with what is kept on a disk, and ALST at its longest settings (tiled
loss, tiled MLP, gradient checkpointing).
"""

from __future__ import annotations

import argparse
import math
import resource
import time
from pathlib import Path
from typing import Any

import common
import hf_step_vs_alst as steps
import torch

METHODS = ("longspan longest", "longspan disk", "alst longest")
MIB = 2**20


def main() -> None:
    args = parse_args()
    env = common.environment(["longspan", "torch", "transformers", "deepspeed"])
    shape = vars(args)
    rows: list[dict[str, Any]] = []
    for method in args.methods:
        tries = search(lambda tokens, method=method: attempt(args, shape, tokens, method), args)
        rows.append({"method": method, "tries": tries, "longest": max((n for n, s in tries if s), default=0)})
        print(f"{method}: {rows[-1]['longest']:,} tokens", flush=True)
    text = render(rows, shape)
    print(text)
    common.write_report(args.name, "A real limit", env, text, {"shape": shape, "rows": rows})
    if args.png:
        draw(rows, shape, args.png)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--mib",
        type=int,
        default=96,
        help="what a rank may take for a step beside weights, gradients and optimizer states",
    )
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--start", type=int, default=2048, help="tokens of the first try")
    parser.add_argument("--within", type=float, default=0.06, help="how closely the limit is found")
    parser.add_argument("--ranks", type=int, default=2, help="sequence-parallel ranks (Ulysses)")
    parser.add_argument("--dtype", choices=list(common.DTYPES), default="fp32")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--ffn", type=int, default=512)
    parser.add_argument("--q-heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--vocab", type=int, default=2048)
    parser.add_argument("--tile-mib", type=int, default=4, help="logits per tile in ALST's TiledFusedLogitsLoss")
    parser.add_argument("--quick", action="store_true", help="two layers and 32 MiB, for a first look")
    parser.add_argument("--png", type=Path, default=None, help="draw the limits")
    parser.add_argument("--name", default="real-limit", help="name of the report")
    args = parser.parse_args()
    if args.quick:
        args.layers, args.mib, args.name = 2, 32, args.name + "-quick"
    return args


def search(attempt: Any, args: argparse.Namespace) -> list[tuple[int, bool]]:
    """Lengths that were tried and whether they completed."""
    tries: list[tuple[int, bool]] = []

    def tried(tokens: int) -> bool:
        ok = attempt(tokens)
        tries.append((tokens, ok))
        return ok

    unit = 128 * args.ranks
    good, bad = 0, args.start
    while tried(bad):
        good, bad = bad, rounded(bad * 1.5, unit)
    while bad - good > max(unit, args.within * bad):
        middle = rounded((good + bad) / 2, unit)
        if middle in (good, bad):
            break
        if tried(middle):
            good = middle
        else:
            bad = middle
    return tries


def rounded(tokens: float, unit: int) -> int:
    return max(unit, round(tokens / unit) * unit)


def attempt(args: argparse.Namespace, shape: dict[str, Any], tokens: int, method: str) -> bool:
    start = time.perf_counter()
    try:
        loss = common.run_ranks(one_step, args.ranks, shape, tokens, args.dtype, method, args.mib, env=steps.MALLOC)
    except Exception as error:
        said = str(error)
        if "allocate memory" not in said and "MemoryError" not in said and "Cannot allocate" not in said:
            raise  # not the limit
        loss = math.nan
    ok = math.isfinite(loss)
    print(
        f"{method}: {tokens:,} tokens {'completes' if ok else 'fails'}, {time.perf_counter() - start:.0f} s", flush=True
    )
    return ok


def one_step(shape: dict[str, Any], tokens: int, dtype: str, name: str, mib: int) -> float:
    import peers

    if not name.startswith("longspan"):
        peers.start_deepspeed()
    method = steps.Method(name, shape, tokens, dtype)
    for p in method.model.parameters():
        p.grad = torch.zeros_like(p)
    method.optimizer.step()  # its states now exist
    held = steps.status_kib("VmData") * 1024
    method.optimizer.zero_grad(set_to_none=True)  # a step makes them again
    resource.setrlimit(resource.RLIMIT_DATA, (held + mib * MIB, resource.RLIM_INFINITY))
    return method.step()


def render(rows: list[dict[str, Any]], shape: dict[str, Any]) -> str:
    theirs = next((row["longest"] for row in rows if row["method"].startswith("alst")), 0)
    cells = [
        [row["method"], f"{row['longest']:,}", f"{row['longest'] / theirs:.2f}" if theirs else "",
         ", ".join(f"{n:,}{'' if ok else ' fails'}" for n, ok in sorted(row["tries"]))]
        for row in rows
    ]  # fmt: skip
    return (
        common.table(["method", "longest context, tokens", "of ALST's", "tried"], cells)
        + f"\n\n{shape['mib']} MiB a rank for a step, beside its weights, gradients and optimizer states;"
        f" {shape['ranks']} ranks, weights whole on each. Llama: {shape['layers']} layers, hidden {shape['hidden']},"
        f" {shape['q_heads']} query and {shape['kv_heads']} KV heads, FFN {shape['ffn']}, vocabulary"
        f" {shape['vocab']:,}; {shape['dtype']}, batch 1, AdamW."
    )


def draw(rows: list[dict[str, Any]], shape: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    fig, ax = plt.subplots(figsize=(7, 2.6))
    names = [row["method"] for row in rows]
    values = [row["longest"] for row in rows]
    bars = ax.barh(names, values, color=["#b5b5b5" if n.startswith("alst") else "#2b6cb0" for n in names])
    ax.bar_label(bars, labels=[f"{v:,}" for v in values], padding=4)
    ax.set_xlim(0, 1.15 * max(values))
    ax.set_xlabel("longest context that completes a training step, tokens")
    ax.set_title(f"{shape['mib']} MiB a rank for a step, {shape['ranks']} ranks, {shape['layers']} layers")
    ax.invert_yaxis()
    ax.spines[["top", "right"]].set_visible(False)
    fig.tight_layout()
    fig.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
