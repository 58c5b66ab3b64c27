"""A timeline of all ranks as a PNG. matplotlib is imported when it is drawn."""

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
"""Of every kind of span; Okabe and Ito's palette, which colour-blind readers can tell apart."""

_INK, _MUTED, _EXPOSED = "#1C1E21", "#5A6068", "#A33B00"
_ORDER = ("computing", "attention", "packing")


def check_matplotlib(flag: str) -> None:
    """Refuse to draw without matplotlib, before anything is measured.

    Raises:
        LongspanError: with the way out.
    """
    require(flag, "matplotlib")


def said_of(found: Figures) -> str:
    """Where a rank's step went, in a line."""
    parts = [
        f"computing {found.computing / found.step:.0%}",
        f"(attention {found.attention / found.step:.0%})",
        f"exposed communication {found.exposed / found.step:.0%}",
        f"rest {found.rest / found.step:.0%};",
        f"in flight {1e3 * found.communication:.1f} ms, hidden {1e3 * found.hidden:.1f} ms",
    ]
    return " ".join(parts)


def said_of_all(traces: Sequence[RankTrace]) -> str:
    """What the ranks differ in, in a line."""
    found = [figures(trace) for trace in traces]
    return (
        f"imbalance of computing {imbalance([f.computing for f in found]):.0%}, of attention "
        f"{imbalance([f.attention for f in found]):.0%} (slowest rank over the mean)"
    )


def lines_of(traces: Sequence[RankTrace]) -> list[str]:
    """Where the step went, a line for each rank and one for all."""
    return [*(f"rank {trace.rank}: {said_of(figures(trace))}" for trace in traces), said_of_all(traces)]


def draw_timeline(traces: Sequence[RankTrace], title: str, path: Path) -> None:
    """Write a PNG: of every rank what it computed, what was in flight below, and what of it nothing hid.

    Raises:
        LongspanError: if matplotlib is missing.
    """
    check_matplotlib("the timeline")
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(16, 1.6 + 1.25 * len(traces)), dpi=100, facecolor="white", layout="constrained")
    axes: Any = figure.subplots()
    kinds: dict[str, None] = {}
    for place, trace in enumerate(traces):
        _draw_rank(axes, place, trace, kinds)
    axes.set_yticks(range(len(traces)), [f"rank {trace.rank}" for trace in traces])
    axes.set_ylim(len(traces) - 0.35, -0.62)
    axes.set_xlim(0, max(trace.length for trace in traces) / 1e3)
    axes.set_xlabel("milliseconds since the step began", color=_MUTED)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    shown = [kind for kind in COLOURS if kind in kinds]
    handles = [Patch(color=COLOURS[kind], label=kind) for kind in shown]
    handles.append(Patch(color=_EXPOSED, label="exposed"))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=11)
    figure.suptitle(f"{title}\n{said_of_all(traces)}", fontsize=12, color=_INK, ha="left", x=0.01, parse_math=False)
    figure.savefig(path, format="png")


def _draw_rank(axes: Any, place: int, trace: RankTrace, kinds: dict[str, None]) -> None:
    for kind in _ORDER:  # what is drawn later lies on top
        spans = union((s.start, s.end) for s in trace.computing if s.kind == kind)
        if spans:
            kinds[kind] = None
            axes.broken_barh(_bars(spans), (place - 0.3, 0.28), color=COLOURS[kind], linewidth=0)
    for kind in COMMUNICATION:
        spans = union((s.start, s.end) for s in trace.communication if s.kind == kind)
        if spans:
            kinds[kind] = None
            axes.broken_barh(_bars(spans), (place, 0.2), color=COLOURS[kind], linewidth=0)
    exposed = without(((s.start, s.end) for s in trace.communication), ((s.start, s.end) for s in trace.computing))
    axes.broken_barh(_bars(exposed), (place + 0.22, 0.08), color=_EXPOSED, linewidth=0)
    axes.text(0, place - 0.34, said_of(figures(trace)), fontsize=9, color=_MUTED, va="bottom")


def _bars(spans: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    return [(start / 1e3, (end - start) / 1e3) for start, end in spans]
