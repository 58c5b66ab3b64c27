"""A PNG of memory and time against the context, one line per mesh. Only drawing imports matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longspan.core.errors import LongspanError, not_installed

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIZE = (1600, 800)
"""Pixels."""

Line = dict[str, Any]
"""One of the `lines` of `longspan.plan.views.page.grid`: a mesh along all contexts."""

# Okabe and Ito's palette (yellow darkened for white paper), which colour-blind readers can tell apart.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#5C5C5C", "#B8A800", "#000000")
_MARKERS = "osD^vphd<"
_INK, _MUTED, _GRID, _LIMIT = "#1C1E21", "#5A6068", "#E3E3DF", "#A33B00"

_STEP = {"train": "training step", "prefill": "prefill", "decode": "decoded token"}
_TIMES = [
    (1e-5, "10 us"), (1e-4, "100 us"), (1e-3, "1 ms"), (1e-2, "10 ms"), (0.1, "0.1 s"), (1, "1 s"), (10, "10 s"),
    (60, "1 min"), (600, "10 min"), (3600, "1 h"), (36000, "10 h"), (432e3, "5 days"), (432e4, "50 days"),
]  # fmt: skip


def draw(grid: dict[str, Any], path: Path) -> None:
    """Write a PNG: against the context, memory per GPU, the time of a step, and how much slower than the fastest mesh.

    The `lines` of `longspan.plan.views.page.grid` are drawn.

    Raises:
        LongspanError: if matplotlib is missing, or no mesh of so many GPUs can hold the job.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    except ImportError:
        raise not_installed("drawing", "matplotlib") from None
    job, gpu, lines = grid["job"], grid["hardware"], grid["lines"]
    if not lines:
        raise LongspanError(
            f"nothing to draw: no mesh of {job['gpus']} GPUs can hold a context of {job['context']} tokens"
        )
    # Not pyplot's figure: no global state, no window, any thread.
    layout = ConstrainedLayoutEngine(w_pad=0.14, h_pad=0.1, wspace=0.03)
    figure = Figure(figsize=(SIZE[0] / 100, SIZE[1] / 100), dpi=100, facecolor="white", layout=layout)
    axes: dict[str, Any] = figure.subplot_mosaic([["memory", "seconds"], ["memory", "slower"]], height_ratios=[2, 1])
    _memory(axes["memory"], lines, gpu)
    _seconds(axes["seconds"], lines, _STEP[job["mode"]])
    _slower(axes["slower"], lines)
    for each in axes.values():
        _frame(each, grid["contexts"], job["context"])
    figure.suptitle(
        f"{grid['model']}: {job['mode']} on {job['gpus']} x {gpu['name']}, batch {job['batch']}, {job['dtype']}",
        fontsize=16, color=_INK, fontweight="bold", parse_math=False,
    )  # fmt: skip
    handles, labels = axes["memory"].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(5, len(labels)), frameon=False, fontsize=11)
    figure.text(0.991, 0.012, "dotted: does not fit", ha="right", color=_MUTED, fontsize=11)
    figure.savefig(path, format="png")


def _memory(axes: Axes, lines: Sequence[Line], gpu: dict[str, Any]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    for place, line in enumerate(lines):
        _line(axes, place, len(lines), line, [size / 1e9 for size in line["memory"]])
    capacity = gpu["memory_bytes"] / 1e9
    least = min(size for line in lines for size in line["memory"]) / 1e9
    axes.set_title("Memory per GPU, GB (1e9 bytes)", loc="left", fontsize=12.5, color=_INK)
    axes.set_yscale("log")
    # Values far above the capacity would compress everything else.
    axes.set_ylim(0.7 * min(least, capacity), 6 * max(least, capacity))
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.axhline(capacity, color=_LIMIT, linewidth=1.6, zorder=1)
    axes.annotate(
        f"{gpu['name']}: {capacity:g} GB", (0.012, capacity), xycoords=("axes fraction", "data"),
        xytext=(0, 4), textcoords="offset points", color=_LIMIT, fontsize=11,
    )  # fmt: skip


def _seconds(axes: Axes, lines: Sequence[Line], step: str) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    for place, line in enumerate(lines):
        _line(axes, place, len(lines), line, line["step"])
    axes.set_title(f"Time of one {step}", loc="left", fontsize=12.5, color=_INK)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(FixedLocator([seconds for seconds, _ in _TIMES]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: dict(_TIMES).get(value, f"{value:g} s")))
    axes.yaxis.set_minor_locator(NullLocator())


def _slower(axes: Axes, lines: Sequence[Line]) -> None:
    """Draw the time relative to the fastest mesh: on six decades of time, meshes look alike."""
    fastest: dict[int, float] = {}
    for line in lines:
        for context, seconds in zip(line["contexts"], line["step"], strict=True):
            fastest[context] = min(seconds, fastest.get(context, seconds))
    most = 0.0
    for place, line in enumerate(lines):
        percent = [100 * (s / fastest[n] - 1) for n, s in zip(line["contexts"], line["step"], strict=True)]
        most = max([most, *percent])
        _line(axes, place, len(lines), line, percent)
    axes.set_title("Slower than the fastest of these meshes, %", loc="left", fontsize=12.5, color=_INK)
    top = max(1.0, min(most, 100.0))
    axes.set_ylim(-0.06 * top, 1.08 * top)


def _line(axes: Axes, place: int, meshes: int, line: Line, y: Sequence[float]) -> None:
    """Draw one mesh, solid as far as it fits, then dotted. Meshes may coincide: each line is thinner than the last."""
    x, fitting = line["contexts"], line["fitting"]
    beyond = slice(max(0, fitting - 1), None)
    look: dict[str, Any] = {
        "color": _COLOURS[place % len(_COLOURS)],
        "linewidth": 1.4 + 0.55 * (meshes - 1 - place),
        "marker": _MARKERS[place % len(_MARKERS)],
        "markersize": 5 + 0.4 * (meshes - 1 - place),
        "solid_capstyle": "butt",
    }
    axes.plot(x[beyond], y[beyond], zorder=2, **{**look, "linestyle": ":", "linewidth": 1.4, "markersize": 3.5})
    axes.plot(x[:fitting], y[:fitting], zorder=3, label=line["mesh"], **look)


def _frame(axes: Axes, contexts: Sequence[int], own: int) -> None:
    from matplotlib.ticker import FuncFormatter, NullLocator

    axes.set_xscale("log", base=2)
    axes.set_xlabel("context, tokens", color=_MUTED, fontsize=11)
    axes.set_xticks([context for context in contexts if context.bit_count() == 1][::2])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda tokens, _: _short(int(tokens))))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.axvline(own, color=_MUTED, linewidth=1, linestyle="--", zorder=1)
    axes.annotate(
        "the job", (own, 1), xycoords=("data", "axes fraction"), xytext=(-5, -11),
        textcoords="offset points", color=_MUTED, fontsize=10, ha="right",
    )  # fmt: skip
    axes.grid(color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_MUTED, labelsize=11, which="both", length=0)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(_GRID)


def _short(tokens: int) -> str:
    """Format 131072 as "128k"."""
    for size, letter in ((1 << 30, "G"), (1 << 20, "M"), (1 << 10, "k")):
        if tokens >= size and tokens % size == 0:
            return f"{tokens // size}{letter}"
    return f"{tokens:,}"
