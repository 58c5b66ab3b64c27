"""The longest context of a training step within a memory limit per rank.

    python benchmarks/real_limit.py [--quick]

Every try starts new ranks. After model and optimizer are made, each rank enters a control group (cgroup) that allows
the limit and the bytes of its gradients, the same for all methods (without cgroups: RLIMIT_DATA). It then takes one
training step of a Llama; the kernel kills a rank that needs more. Lengths grow by half until one fails, followed by a
bisection.

Methods: longspan with memory="longest"; the same with fewer checkpoints (`layers_per_checkpoint=0`), with checkpoints
on disk, and with all of attention on disk; and ALST at its longest settings (tiled loss, tiled MLP, gradient
checkpointing). There is a shallow and a deep model: memory of checkpoints grows with layers, that of one layer does
not.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import resource
import time
from pathlib import Path
from typing import Any

import common
import hf_step_vs_alst as steps
import torch

METHODS = ("alst longest", "longspan longest", "longspan few", "longspan disk", "longspan all on disk")
LABELS = {  # in the picture
    "alst longest": "ALST, longest settings",
    "longspan longest": 'longspan, memory="longest"',
    "longspan few": "longest, layers_per_checkpoint=0",
    "longspan disk": 'longest, offload="disk"',
    "longspan all on disk": "longest, attention on disk too",
}
SHAPES = {  # 80 layers are those of a 70B
    "shallow": {"layers": 4, "hidden": 256, "ffn": 512, "mib": 96},
    "deep": {"layers": 80, "hidden": 64, "ffn": 128, "mib": 48},
}
# Length of the first try, over ALST's longest: a long step takes minutes.
FIRST = {"longspan few": 1.5, "longspan disk": 4.0, "longspan all on disk": 4.0}
MIB = 2**20
GROUPS = (  # version 1 and 2: the hierarchy, the file that sets the limit
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
    (Path("/sys/fs/cgroup"), "memory.max"),
)


def main() -> None:
    args = parse_args()
    env = common.environment(["longspan", "torch", "transformers", "deepspeed"])
    rows: list[dict[str, Any]] = []
    before = measured_before(args) if args.resume else []
    for name in args.shapes:
        shape = {**vars(args), **SHAPES[name]} | ({"mib": args.mib} if args.mib else {})
        theirs = 0
        for method in args.methods:
            done = [row for row in before if (row["shape"], row["method"]) == (name, method)]
            if done:
                rows += done
                theirs = done[0]["longest"] if method.startswith("alst") else theirs
                continue
            start = rounded(max(args.start, FIRST.get(method, 1.0) * theirs), 128 * args.ranks)
            tries = search(lambda tokens, shape=shape, method=method: attempt(args, shape, tokens, method), args, start)
            most = max((n for n, ok in tries if ok), default=0)
            theirs = most if method.startswith("alst") else theirs
            rows.append({"shape": name, "method": method, "tries": tries, "longest": most})
            print(f"{name}, {method}: {most:,} tokens", flush=True)
            text = render(rows, vars(args))
            common.write_report(args.name, "A real limit", env, text, {"shape": str(vars(args)), "rows": rows})
    print(text)
    if args.png:
        draw(rows, vars(args), args.png)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--mib",
        type=int,
        default=None,
        help="memory of a rank for a step, without weights, gradients and optimizer states; by default 96 for the"
        " shallow model and 48 for the deep one",
    )
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--start", type=int, default=2048, help="tokens of the first try")
    parser.add_argument("--within", type=float, default=0.08, help="how closely the limit is found")
    parser.add_argument(
        "--patience", type=float, default=400.0, help="seconds of a try after which no longer one is made"
    )
    parser.add_argument("--ranks", type=int, default=2, help="sequence-parallel ranks (Ulysses)")
    parser.add_argument("--dtype", choices=list(common.DTYPES), default="fp32")
    parser.add_argument("--q-heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--vocab", type=int, default=2048)
    parser.add_argument("--tile-mib", type=int, default=4, help="logits per tile, of both sides")
    parser.add_argument("--quick", action="store_true", help="the shallow one and 32 MiB, for a first look")
    parser.add_argument("--png", type=Path, default=None, help="draw the limits")
    parser.add_argument("--resume", type=Path, default=None, help="a report (.json) whose methods are not run again")
    parser.add_argument("--name", default="real-limit", help="name of the report")
    args = parser.parse_args()
    if args.quick:
        args.shapes, args.mib, args.name = ["shallow"], 32, args.name + "-quick"
    return args


def measured_before(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the rows of the report to resume, which must have the same settings."""
    results = json.loads(args.resume.read_text())["results"]
    names = ("mib", "start", "within", "patience", "ranks", "dtype", "q_heads", "kv_heads", "vocab", "tile_mib")
    other = [name for name in names if f"{name!r}: {getattr(args, name)!r}," not in results["shape"]]
    if other:
        raise SystemExit(f"{args.resume} has another {', '.join(other)}; give the same, or no --resume")
    rows: list[dict[str, Any]] = results["rows"]
    return rows


def search(attempt: Any, args: argparse.Namespace, start: int) -> list[tuple[int, bool]]:
    """Return the lengths that were tried, and whether they completed."""
    tries: list[tuple[int, bool]] = []

    def tried(tokens: int) -> bool:
        ok = attempt(tokens)
        tries.append((tokens, ok))
        return ok

    unit = 128 * args.ranks
    good, bad = 0, start
    while True:
        begun = time.perf_counter()
        if not tried(bad):
            break
        if time.perf_counter() - begun > args.patience:
            return tries  # the longest is at least this
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
        loss = common.run_ranks(one_step, args.ranks, shape, tokens, args.dtype, method, shape["mib"], env=steps.MALLOC)
    except Exception as error:
        if not any(limit in str(error) for limit in ("SIGKILL", "allocate memory", "MemoryError")):
            raise  # not the limit
        loss = math.nan
    finally:
        for root, _ in GROUPS:
            for group in root.glob("longspan-limit-*"):
                with contextlib.suppress(OSError):  # a rank that is just being killed
                    group.rmdir()
    ok = math.isfinite(loss)
    print(
        f"{method}: {tokens:,} tokens {'completes' if ok else 'fails'}, {time.perf_counter() - start:.0f} s", flush=True
    )
    return ok


def one_step(shape: dict[str, Any], tokens: int, dtype: str, name: str, mib: int) -> float:
    from longspan.bench import peers
    from longspan.core import tile_sizes

    # The default sizes are for real models; here both sides compute logits in tiles of the same bytes.
    tile_sizes.HEAD_TILE = (tile_sizes.HEAD_TILE[0], (shape["tile_mib"] << 18, 64))
    if not name.startswith("longspan"):
        peers.start_deepspeed()
    method = steps.Method(name, shape, tokens, dtype)
    for p in method.model.parameters():
        p.grad = torch.zeros_like(p)
    method.optimizer.step()  # its states now exist
    method.optimizer.zero_grad(set_to_none=True)  # a step makes them again
    limit(mib * MIB + sum(p.nbytes for p in method.model.parameters()))
    return method.step()


def limit(nbytes: int) -> None:
    """Limit the memory that this process may allocate from now on."""
    for root, name in GROUPS:
        if (root / name).exists() or "memory" in _controllers(root):
            group = root / f"longspan-limit-{os.getpid()}"
            group.mkdir()
            (group / name).write_text(str(nbytes))
            (group / "cgroup.procs").write_text(str(os.getpid()))
            return
    held = steps.status_kib("VmData") * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (held + nbytes, resource.RLIM_INFINITY))


def _controllers(root: Path) -> list[str]:
    file = root / "cgroup.subtree_control"
    return file.read_text().split() if file.exists() else []


def render(rows: list[dict[str, Any]], args: dict[str, Any]) -> str:
    theirs = {row["shape"]: row["longest"] for row in rows if row["method"].startswith("alst")}
    cells = [
        [f"{row['shape']}, {SHAPES[row['shape']]['layers']} layers", row["method"], f"{least(row)}{row['longest']:,}",
         f"{row['longest'] / theirs[row['shape']]:.2f}" if theirs.get(row["shape"]) else "",
         ", ".join(f"{n:,}{'' if ok else ' fails'}" for n, ok in sorted(row["tries"]))]
        for row in rows
    ]  # fmt: skip
    return (
        common.table(["model", "method", "longest context, tokens", "of ALST's", "tried"], cells)
        + "\n\nMemory of a rank for a step, without weights, gradients and optimizer states: "
        + "; ".join(f"{name}: {s['mib']} MiB, hidden {s['hidden']}, FFN {s['ffn']}" for name, s in shapes_of(args))
        + f". {args['ranks']} ranks, replicated weights. Llama: {args['q_heads']} query and {args['kv_heads']} KV"
        f" heads, vocabulary {args['vocab']:,}; {args['dtype']}, batch 1, AdamW; tiles of logits of"
        f" {args['tile_mib']} MiB on both sides."
    )


def least(row: dict[str, Any]) -> str:
    """Return "at least " if no longer context has failed."""
    return "" if any(not ok for _, ok in row["tries"]) else "at least "


def shapes_of(args: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return the shapes, each with its limit."""
    return [(name, {**SHAPES[name], "mib": args["mib"] or SHAPES[name]["mib"]}) for name in args["shapes"]]


def draw(rows: list[dict[str, Any]], args: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    fig, axes = plt.subplots(1, len(shapes), figsize=(6.0 * len(shapes), 2.4), squeeze=False)
    for ax, shape in zip(axes[0], shapes, strict=True):
        mine = [row for row in rows if row["shape"] == shape]
        names, values = [LABELS[row["method"]] for row in mine], [row["longest"] for row in mine]
        bars = ax.barh(names, values, color=["#b5b5b5" if n.startswith("ALST") else "#2b6cb0" for n in names])
        ax.bar_label(bars, labels=[f"{least(row)}{row['longest']:,}" for row in mine], padding=4)
        ax.set_xlim(0, 1.5 * max(values))
        limits = dict(shapes_of(args))[shape]
        ax.set_title(f"{limits['layers']} layers, {limits['mib']} MiB per rank", fontsize=10)
        ax.xaxis.set_major_locator(MaxNLocator(4))
        ax.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        ax.invert_yaxis()
        ax.spines[["top", "right"]].set_visible(False)
    fig.supxlabel("longest context of a training step, tokens", fontsize=9)
    fig.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
