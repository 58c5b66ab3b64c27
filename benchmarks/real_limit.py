"""The longest context of a training step within a memory limit per rank.

    python -m benchmarks.real_limit [--quick]

Every try starts new ranks. After model and optimizer are made, each rank enters a control group (cgroup) that allows
the limit and the bytes of its gradients, the same for all methods (without cgroups: RLIMIT_DATA). It then takes one
training step of a Llama; the kernel kills a rank that needs more. Lengths grow by half until one fails, followed by a
bisection.

Methods: longspan with memory="longest"; the same with fewer checkpoints (`checkpointing="grouped"`); and ALST at its
longest settings (tiled loss, tiled MLP, gradient checkpointing). There is a shallow and a deep model: memory of
checkpoints grows with layers, that of one layer does not.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import resource
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks import common
from benchmarks import hf_step_vs_alst as steps

METHODS = ("alst longest", "longspan longest", "longspan few")
LABELS = {  # in the picture
    "alst longest": "ALST, longest settings",
    "longspan longest": 'longspan, memory="longest"',
    "longspan few": 'longest, checkpointing="grouped"',
}
SHAPES = {  # 80 layers are those of a 70B
    "shallow": steps.Shape(layers=4, hidden=256, ffn=512, vocab=2048),
    "deep": steps.Shape(layers=80, hidden=64, ffn=128, q_heads=4, vocab=2048),
}
MIB_OF = {"shallow": 96, "deep": 48}
# Length of the first try, over ALST's longest: a long step takes minutes.
FIRST = {"longspan few": 1.5}
GROUPS = (  # version 1 and 2: the hierarchy, the file that sets the limit
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
    (Path("/sys/fs/cgroup"), "memory.max"),
)


def main(
    mib: int | None = None,
    methods: tuple[str, ...] = METHODS,
    shapes: tuple[str, ...] = tuple(SHAPES),
    start: int = 2048,
    within: float = 0.08,
    patience: float = 400.0,
    ranks: int = 2,
    tile_mib: int = 4,
    quick: bool = False,
    png: Path | None = None,
    name: str = "real-limit",
) -> None:
    """Search the limits.

    Args:
        mib: memory of a rank for a step, without weights, gradients and optimizer states; by default 96 for the
            shallow model and 48 for the deep one.
        methods: of `METHODS`.
        shapes: of `SHAPES`.
        start: tokens of the first try.
        within: how closely the limit is found.
        patience: seconds of a try after which no longer one is made.
        ranks: sequence-parallel ranks (Ulysses).
        tile_mib: logits per tile, of both sides.
        quick: the shallow model and 32 MiB, for a first look.
        png: draw the limits.
        name: of the report.
    """
    if quick:
        shapes, mib, name = ("shallow",), 32, name + "-quick"
    env = common.environment(["longspan", "torch", "transformers", "deepspeed"])
    limits = {name: mib or MIB_OF[name] for name in shapes}
    rows: list[dict[str, Any]] = []
    for kind in shapes:
        shape, theirs = dataclasses.replace(SHAPES[kind], tile_mib=tile_mib), 0
        for method in methods:
            first = rounded(max(start, FIRST.get(method, 1.0) * theirs), 128 * ranks)
            search = Search(ranks, shape, method, limits[kind])
            search.run(first, within, patience)
            most = max((n for n, ok in search.tries if ok), default=0)
            theirs = most if method.startswith("alst") else theirs
            rows.append({"shape": kind, "method": method, "tries": search.tries, "longest": most})
            text = render(rows, limits, ranks, tile_mib)
            common.write_report(name, "A real limit", env, text, rows)
    if png:
        draw(rows, limits, png)


@dataclass
class Search:
    """The search for one method's longest context; `tries` are lengths, and whether they completed."""

    ranks: int
    shape: steps.Shape
    method: str
    mib: int
    tries: list[tuple[int, bool]] = field(default_factory=list)

    def run(self, start: int, within: float, patience: float) -> None:
        unit = 128 * self.ranks
        good, bad = 0, start
        while True:
            begun = time.perf_counter()
            if not self._completes(bad):
                break
            if time.perf_counter() - begun > patience:
                return  # the longest is at least this
            good, bad = bad, rounded(bad * 1.5, unit)
        while bad - good > max(unit, within * bad):
            middle = rounded((good + bad) / 2, unit)
            if middle in (good, bad):
                break
            good, bad = (middle, bad) if self._completes(middle) else (good, middle)

    def _completes(self, tokens: int) -> bool:
        try:
            arguments = self.shape, tokens, self.method, self.mib
            ok = math.isfinite(common.run_ranks(one_step, self.ranks, *arguments, env=steps.MALLOC))
        except Exception as error:
            if not any(limit in str(error) for limit in ("SIGKILL", "allocate memory", "MemoryError")):
                raise  # not the limit
            ok = False
        finally:
            for root, _ in GROUPS:
                for group in root.glob("longspan-limit-*"):
                    with contextlib.suppress(OSError):  # a rank that is just being killed
                        group.rmdir()
        self.tries.append((tokens, ok))
        print(f"{self.method}: {tokens:,} tokens {'completes' if ok else 'fails'}", flush=True)
        return ok


def rounded(tokens: float, unit: int) -> int:
    return max(unit, round(tokens / unit) * unit)


def one_step(shape: steps.Shape, tokens: int, name: str, mib: int) -> float:
    from longspan.core import tile_sizes

    # The default sizes are for real models; here both sides compute logits in tiles of the same bytes.
    tile_sizes.HEAD_TILE = (tile_sizes.HEAD_TILE[0], (shape.tile_mib << 18, 64))
    method = steps.Method(name, shape, tokens, "fp32")
    for p in method.model.parameters():
        p.grad = torch.zeros_like(p)
    method.optimizer.step()  # its states now exist
    method.optimizer.zero_grad(set_to_none=True)  # a step makes them again
    limit(mib * steps.MIB + sum(p.nbytes for p in method.model.parameters()))
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


def render(rows: list[dict[str, Any]], limits: dict[str, int], ranks: int, tile_mib: int) -> str:
    theirs = {row["shape"]: row["longest"] for row in rows if row["method"].startswith("alst")}
    cells = [
        [f"{row['shape']}, {SHAPES[row['shape']].layers} layers", row["method"], f"{least(row)}{row['longest']:,}",
         f"{row['longest'] / theirs[row['shape']]:.2f}" if theirs.get(row["shape"]) else "",
         ", ".join(f"{n:,}{'' if ok else ' fails'}" for n, ok in sorted(row["tries"]))]
        for row in rows
    ]  # fmt: skip
    of_shapes = "; ".join(f"{name}: {mib} MiB, {SHAPES[name]}" for name, mib in limits.items())
    return (
        common.table(["model", "method", "longest context, tokens", "of ALST's", "tried"], cells)
        + f"\n\nMemory of a rank for a step, without weights, gradients and optimizer states: {of_shapes}. {ranks}"
        f" ranks, replicated weights; fp32, batch 1, AdamW; tiles of logits of {tile_mib} MiB on both sides."
    )


def least(row: dict[str, Any]) -> str:
    """Return "at least " if no longer context has failed."""
    return "" if any(not ok for _, ok in row["tries"]) else "at least "


def draw(rows: list[dict[str, Any]], limits: dict[str, int], path: Path) -> None:
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
        ax.set_title(f"{SHAPES[shape].layers} layers, {limits[shape]} MiB per rank", fontsize=10)
        ax.xaxis.set_major_locator(MaxNLocator(4))
        ax.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        ax.invert_yaxis()
        ax.spines[["top", "right"]].set_visible(False)
    fig.supxlabel("longest context of a training step, tokens", fontsize=9)
    fig.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path, dpi=130)


if __name__ == "__main__":
    common.command(main, __doc__)
