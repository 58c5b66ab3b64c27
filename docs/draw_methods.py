"""Draw docs/pictures: who holds which tokens and heads before, between and after each method.

    python docs/draw_methods.py [--out docs/pictures]

Token positions come from `longspan.core.layout`, masks from `longspan.Mask`, and memory from the planner, so that a
picture changes when the code does. In the pictures of methods, a colour is a rank.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import FancyArrowPatch, Patch, Rectangle

import longspan
from longspan.core.layout import Layout, choose_layout
from longspan.core.memory import LONGEST, Memory
from longspan.mixers.fragments import fragment_table
from longspan.plan import Job, Mesh, plan_mesh, read_hardware, read_model

RANKS = 4
TOKENS = 8  # token runs that a picture shows
HEADS = 4
COLOURS = ["#0072B2", "#E69F00", "#009E73", "#CC79A7"]  # Okabe and Ito: distinct for colour-blind readers
EVERY = "#B8B8B8"  # on every rank
NOTHING = "#F2F2F2"
Axes = Any


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "pictures")
    args = parser.parse_args()
    args.out.mkdir(exist_ok=True)
    plt.rcParams.update({"font.size": 9, "font.family": "DejaVu Sans", "axes.titlesize": 10})
    for draw in (ulysses, ring, usp, state_passing, tensor_axis, memory, masks):
        figure = draw()
        figure.savefig(args.out / f"{draw.__name__.replace('_', '-')}.png", dpi=120, metadata={"Software": None})
        plt.close(figure)


def ulysses() -> Any:
    layout = choose_layout("contiguous", 1, RANKS)
    figure, axes = panels(3, "all-to-all", "all-to-all")
    tokens_and_heads(axes[0], owners(layout), "before: my tokens, all heads")
    tokens_and_heads(axes[1], [[head] * TOKENS for head in range(HEADS)], "attention: all tokens, my heads")
    tokens_and_heads(axes[2], owners(layout), "after: my tokens, all heads")
    return finish(figure)


def ring() -> Any:
    layout = choose_layout("zigzag", RANKS, 1)
    figure, axes = panels(3, "send K, V", "")
    tokens_and_heads(axes[0], owners(layout), "before and after: zigzag layout")
    steps = [[(rank - step) % RANKS for step in range(RANKS)] for rank in range(RANKS)]
    grid(
        axes[1],
        steps,
        "whose K, V a rank has at each step",
        "step",
        "rank",
        [[f"KV {owner}" for owner in row] for row in steps],
    )
    queries = owners(layout)[0]
    pairs = [[queries[q] if k <= q else None for k in range(TOKENS)] for q in range(TOKENS)]
    grid(axes[2], pairs, "causal pairs: who computes them", "key tokens", "query tokens")
    return finish(figure)


def usp() -> Any:
    layout = choose_layout("zigzag", 2, 2)
    figure, axes = panels(4, "all-to-all", "ring", "all-to-all")
    tokens_and_heads(axes[0], owners(layout), "before: my tokens, all heads")
    blocks = [layout_rank // 2 for layout_rank in owners(layout)[0]]
    between = [[2 * block + (head >= HEADS // 2) for block in blocks] for head in range(HEADS)]
    tokens_and_heads(axes[1], between, "my block's tokens, my heads")
    steps = [[2 * ((rank // 2 - step) % 2) + rank % 2 for step in range(2)] for rank in range(RANKS)]
    grid(
        axes[2],
        steps,
        "whose K, V at each ring step",
        "step",
        "rank",
        [[f"KV {owner}" for owner in row] for row in steps],
    )
    tokens_and_heads(axes[3], owners(layout), "after: my tokens, all heads")
    return finish(figure)


def state_passing() -> Any:
    layout = choose_layout("contiguous", 1, RANKS)
    runs = fragment_table(layout, 0, TOKENS, 1, None).runs
    figure, axes = panels(3, "all-gather", "add the state")
    tokens_and_heads(axes[0], owners(layout), "local: my tokens, from state 0")
    earlier = [[owner if run < rank else None for run, (owner, _) in enumerate(runs)] for rank in range(RANKS)]
    labels = [["" if owner is None else "M, S" for owner in row] for row in earlier]
    grid(axes[1], earlier, "the state that enters: combine in order", "summary of rank", "rank", labels)
    tokens_and_heads(axes[2], owners(layout), "output: my tokens, all heads")
    return finish(figure)


def tensor_axis() -> Any:
    figure, axes = plt.subplots(2, 3, figsize=(11, 4.8), gridspec_kw={"wspace": 0.6, "hspace": 0.6})
    figure.subplots_adjust(left=0.05, right=0.98, bottom=0.16, top=0.93)
    everywhere: list[list[int | None]] = [[-1] * TOKENS for _ in range(HEADS)]
    by_tokens = owners(choose_layout("contiguous", 1, RANKS))
    by_heads = [[head] * TOKENS for head in range(HEADS)]
    for row, style, residual, before, after in (
        (axes[0], "tp", everywhere, "", "all-reduce"),
        (axes[1], "megatron-sp", by_tokens, "all-gather", "reduce-scatter"),
    ):
        tokens_and_heads(row[0], residual, f"{style}: residual stream", "hidden")
        tokens_and_heads(row[1], by_heads, "attention, MLP: my part", "heads")
        tokens_and_heads(row[2], residual, "residual stream", "hidden")
        arrow(figure, row[0], row[1], before or "no message")
        arrow(figure, row[1], row[2], after)
    return finish(figure, [Patch(color=EVERY, label="every rank")])


def memory() -> Any:
    """Draw what one layer saves for its backward, and the planned memory of a step."""
    parts = ["layer input", "q, k, v", "attention output", "norms", "MLP activations"]
    saved = {
        "none": [1, 1, 1, 1, 1],
        "save_attention": [1, 1, 1, 0, 0],
        "selective": [1, 0, 1, 0, 0],
        "full": [1, 0, 0, 0, 0],
    }
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.4), gridspec_kw={"wspace": 0.5, "width_ratios": [1, 1.2]})
    for y, row in enumerate(saved.values()):
        for x, on in enumerate(row):
            left.add_patch(Rectangle((x, y), 0.94, 0.88, facecolor=COLOURS[0] if on else NOTHING, linewidth=0))
            left.text(x + 0.47, y + 0.44, "save" if on else "recompute", ha="center", va="center", fontsize=7.5,
                      color="white" if on else "#777777")  # fmt: skip
    left.set(xlim=(0, len(parts)), ylim=(len(saved), 0), title="what a layer saves, by checkpointing=")
    left.set_xticks([x + 0.47 for x in range(len(parts))], parts, rotation=20, ha="right")
    left.set_yticks([y + 0.44 for y in range(len(saved))], [f'"{name}"' for name in saved])
    left.tick_params(length=0)
    left.spines[:].set_visible(False)
    planned_bars(right)
    figure.subplots_adjust(left=0.11, right=0.98, bottom=0.22, top=0.88)
    return figure


def planned_bars(ax: Axes) -> None:
    model, hardware, mesh = read_model("llama-3.1-8b"), read_hardware("h100"), Mesh(ulysses=8)
    levels = {
        "fastest": Memory(),
        "tiled_mlp, tiled_norms": Memory(tiled_mlp=0, tiled_norms=True),
        'checkpointing="full"': Memory(checkpointing="full"),
        "longest": LONGEST,
        'longest, offload="host"': Memory(**{**vars(LONGEST), "offload": "host"}),
    }
    items = {
        "weights, gradients, optimizer": ("weights", "gradients", "optimizer"),
        "saved for backward": ("activations_hidden", "activations_attention", "activations_mlp"),
    }
    for y, memory in enumerate(levels.values()):
        plan = plan_mesh(model, Job(context=1 << 17, memory=memory), mesh, hardware)
        at = 0.0
        rest = dict(plan.memory_bytes)
        for name, keys in items.items():
            size = sum(rest.pop(key, 0) for key in keys)
            ax.barh(
                y, size / 1e9, left=at / 1e9, color=COLOURS[list(items).index(name)], label=name if y == 0 else None
            )
            at += size
        ax.barh(y, sum(rest.values()) / 1e9, left=at / 1e9, color=EVERY, label="the rest" if y == 0 else None)
    ax.axvline(hardware.memory_bytes / 1e9, color="#D55E00", linewidth=1.2)
    ax.set_yticks(range(len(levels)), list(levels))
    ax.invert_yaxis()
    ax.set(xlabel="planned GB per GPU", title="Llama-3.1-8B, 131,072 tokens, 8 x H100 (red line: 80 GB)")
    ax.legend(fontsize=7.5, loc="lower right", bbox_to_anchor=(0.75, 0), edgecolor="none", framealpha=1)
    ax.spines[["top", "right"]].set_visible(False)


def masks() -> Any:
    """Draw the pairs of each mask, one colour for each region."""
    import torch

    from longspan.attn.segments import document_segments

    n = 16
    shown = {
        "causal": longspan.Mask(),
        "window=4": longspan.Mask(window=4),
        "chunk_size=4": longspan.Mask(chunk_size=4),
        "documents": longspan.Mask(segments=document_segments(torch.tensor([[0] * 5 + [1] * 8 + [2] * 3]))),
        "prefix=5": longspan.Mask(prefix=5),
    }
    figure, axes = plt.subplots(1, len(shown), figsize=(11, 2.7))
    for ax, (name, mask) in zip(axes, shown.items(), strict=True):
        pairs: list[list[int | None]] = [[None] * n for _ in range(n)]
        for number, region in enumerate(mask.regions(0, n, n)):
            for q in range(region.q0, region.q1):
                for k in range(region.k0, region.k1):
                    low, high = region.lo, region.hi
                    if (low is None or q - k >= low) and (high is None or q - k <= high):
                        pairs[q][k] = number % RANKS
        grid(ax, pairs, name, "", "")
        ax.set(xticks=[], yticks=[])
    figure.supxlabel("key tokens", fontsize=9)
    axes[0].set_ylabel("query tokens")
    figure.subplots_adjust(left=0.04, right=0.99, bottom=0.1, top=0.88)
    return figure


# ---- Drawing.


def owners(layout: Layout) -> list[list[int | None]]:
    """Return for each head which rank holds each run of tokens."""
    run = 4  # tokens of a run, so that every layout divides them
    row: list[int | None] = [None] * TOKENS
    for rank in range(layout.size):
        for start, stop in layout.spans(TOKENS * run, rank):
            row[start // run : stop // run] = [rank] * (stop // run - start // run)
    return [row] * HEADS


def panels(count: int, *messages: str) -> tuple[Any, Sequence[Axes]]:
    figure, axes = plt.subplots(1, count, figsize=(11, 3.0), gridspec_kw={"wspace": 0.5})
    figure.subplots_adjust(left=0.05, right=0.98, bottom=0.27, top=0.86)
    for left, right, message in zip(axes, axes[1:], messages, strict=False):
        if message:
            arrow(figure, left, right, message)
    return figure, axes


def arrow(figure: Any, left: Axes, right: Axes, message: str) -> None:
    figure.canvas.draw()
    a, b = left.get_position(), right.get_position()
    y = (a.y0 + a.y1) / 2
    x0, x1 = a.x1 + 0.008, b.x0 - 0.035
    figure.add_artist(FancyArrowPatch((x0, y), (x1, y), arrowstyle="-|>", mutation_scale=12, color="#444444"))
    figure.text((x0 + x1) / 2, y + 0.03, message, ha="center", fontsize=8)


def tokens_and_heads(ax: Axes, rows: Sequence[Sequence[int | None]], title: str, vertical: str = "heads") -> None:
    grid(ax, rows, title, "tokens", vertical)


def grid(ax: Axes, rows: Sequence[Sequence[int | None]], title: str, across: str, down: str,
         labels: Sequence[Sequence[str]] | None = None) -> None:  # fmt: skip
    """Draw cells in the colour of their rank: None is empty, -1 is every rank."""
    for y, row in enumerate(rows):
        for x, rank in enumerate(row):
            colour = NOTHING if rank is None else EVERY if rank < 0 else COLOURS[rank]
            ax.add_patch(Rectangle((x, y), 0.94, 0.94, facecolor=colour, linewidth=0, snap=False))
            if labels is not None:
                ax.text(x + 0.47, y + 0.47, labels[y][x], ha="center", va="center", color="white", fontsize=8)
    ax.set(xlim=(0, len(rows[0])), ylim=(len(rows), 0), title=title, xlabel=across, ylabel=down)
    if labels is None:
        ax.set(xticks=[], yticks=[])
    else:
        ax.set_xticks([x + 0.47 for x in range(len(rows[0]))], range(len(rows[0])))
        ax.set_yticks([y + 0.47 for y in range(len(rows))], range(len(rows)))
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)


def finish(figure: Any, more: Sequence[Patch] = ()) -> Any:
    ranks = [Patch(color=COLOURS[rank], label=f"rank {rank}") for rank in range(RANKS)]
    figure.legend(handles=[*ranks, *more], loc="lower center", ncol=RANKS + len(more), frameon=False, fontsize=8.5)
    return figure


if __name__ == "__main__":
    main()
