"""Draw a timeline of all ranks as a PNG, and describe it in lines of text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from longspan.core.errors import require
from longspan.tracing.spans import COMMUNICATION, Figures, RankTrace, figures, imbalance, union, without

COLOURS = {
    "computing": "#B9BEC6", "packing": "#5C5C5C", "attention": "#0072B2",
    "exchange": "#D55E00", "ring": "#CC79A7", "gather": "#009E73", "reduce-scatter": "#E69F00",
    "all-reduce": "#56B4E9", "other collective": "#B8A800",
}  # fmt: skip
"""Colour of every kind of span, from Okabe and Ito's palette for colour-blind readers."""

_INK, _MUTED, _EXPOSED = "#1C1E21", "#5A6068", "#A33B00"
_ORDER = ("computing", "attention", "packing")


def check_matplotlib(flag: str) -> None:
    """Raise if matplotlib is missing; `flag` names the option that needs it.

    Raises:
        LongspanError: with the command that installs it.
    """
    require(flag, "matplotlib")


def rank_summary(found: Figures) -> str:
    """Return one line on where a rank's step went."""
    parts = [
        f"computing {found.computing / found.step:.0%}",
        f"(attention {found.attention / found.step:.0%})",
        f"exposed communication {found.exposed / found.step:.0%}",
        f"rest {found.rest / found.step:.0%};",
        f"in flight {1e3 * found.communication:.1f} ms, hidden {1e3 * found.hidden:.1f} ms",
    ]
    return " ".join(parts)


def imbalance_summary(traces: Sequence[RankTrace]) -> str:
    """Return one line on how ranks differ."""
    found = [figures(trace) for trace in traces]
    return (
        f"imbalance of computing {imbalance([f.computing for f in found]):.0%}, of attention "
        f"{imbalance([f.attention for f in found]):.0%} (slowest rank over the mean)"
    )


def summary_lines(traces: Sequence[RankTrace]) -> list[str]:
    """Return one line for each rank and one for all."""
    return [*(f"rank {trace.rank}: {rank_summary(figures(trace))}" for trace in traces), imbalance_summary(traces)]


def draw_timeline(traces: Sequence[RankTrace], title: str, path: Path) -> None:
    """Write a PNG: for every rank its computing, below it communication in flight, and below that its exposed part.

    Raises:
        LongspanError: if matplotlib is missing.
    """
    check_matplotlib("the timeline")
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(16, 1.6 + 1.25 * len(traces)), dpi=100, facecolor="white", layout="constrained")
    axes: Any = figure.subplots()
    kinds: dict[str, None] = {}
    for y, trace in enumerate(traces):
        _draw_rank(axes, y, trace, kinds)
    axes.set_yticks(range(len(traces)), [f"rank {trace.rank}" for trace in traces])
    axes.set_ylim(len(traces) - 0.35, -0.62)
    axes.set_xlim(0, max(trace.length for trace in traces) / 1e3)
    axes.set_xlabel("milliseconds since the step began", color=_MUTED)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    handles = [Patch(color=colour, label=kind) for kind, colour in COLOURS.items() if kind in kinds]
    handles.append(Patch(color=_EXPOSED, label="exposed"))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=11)
    figure.suptitle(
        f"{title}\n{imbalance_summary(traces)}", fontsize=12, color=_INK, ha="left", x=0.01, parse_math=False
    )
    figure.savefig(path, format="png")


def _draw_rank(axes: Any, y: int, trace: RankTrace, kinds: dict[str, None]) -> None:
    for kind in _ORDER:  # later kinds are drawn on top
        spans = union((s.start, s.end) for s in trace.computing if s.kind == kind)
        if spans:
            kinds[kind] = None
            axes.broken_barh(_bars(spans), (y - 0.3, 0.28), color=COLOURS[kind], linewidth=0)
    for kind in COMMUNICATION:
        spans = union((s.start, s.end) for s in trace.communication if s.kind == kind)
        if spans:
            kinds[kind] = None
            axes.broken_barh(_bars(spans), (y, 0.2), color=COLOURS[kind], linewidth=0)
    exposed = without(((s.start, s.end) for s in trace.communication), ((s.start, s.end) for s in trace.computing))
    axes.broken_barh(_bars(exposed), (y + 0.22, 0.08), color=_EXPOSED, linewidth=0)
    axes.text(0, y - 0.34, rank_summary(figures(trace)), fontsize=9, color=_MUTED, va="bottom")


def _bars(spans: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    return [(start / 1e3, (end - start) / 1e3) for start, end in spans]
