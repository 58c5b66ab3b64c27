"""Merge the events of all ranks into one Chrome trace, and write it with a timeline: HTML, PNG and lines of text."""

from __future__ import annotations

import gzip
import html
import importlib.util
import json
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from longspan.core.errors import require
from longspan.core.validation import write_file
from longspan.tracing.spans import (
    COMMUNICATION,
    STEP,
    Figures,
    RankTrace,
    Span,
    ends_of,
    figures,
    imbalance,
    read_trace,
    union,
    without,
)

if TYPE_CHECKING:
    import torch.distributed as dist


def merge(of_ranks: Sequence[tuple[str, Sequence[dict[str, Any]]]]) -> list[dict[str, Any]]:
    """Return the events of all ranks in one list, with the rank as `pid`.

    Clocks of hosts differ: a host's events are shifted so that its first rank's step starts with rank 0's, as all ranks
    start behind one barrier.

    Args:
        of_ranks: host name and events of every rank, in order.
    """
    merged: list[dict[str, Any]] = []
    begins: dict[str, float] = {}
    for rank, (host, events) in enumerate(of_ranks):
        step = next((float(e["ts"]) for e in events if e["name"] == STEP), None)
        if step is not None:
            begins.setdefault(host, step)
        shift = next(iter(begins.values()), 0.0) - begins.get(host, 0.0) if begins else 0.0
        merged += [
            {"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": f"rank {rank} on {host}"}},
            {"ph": "M", "name": "process_sort_index", "pid": rank, "tid": 0, "args": {"sort_index": rank}},
        ]
        merged += [{**event, "pid": rank, "ts": float(event["ts"]) + shift} for event in events]
    return merged


def gather_trace(events: Sequence[dict[str, Any]], group: dist.ProcessGroup | None = None) -> list[dict[str, Any]]:
    """Return the merged trace of a group's ranks, by default of the job, on every rank. Collective."""
    import torch.distributed as dist

    from longspan.comm.objects import gather_objects

    if not dist.is_initialized():
        return merge([(socket.gethostname(), events)])
    mine = gzip.compress(json.dumps((socket.gethostname(), list(events))).encode(), 1)
    return merge([json.loads(gzip.decompress(one)) for one in gather_objects(mine, group or dist.group.WORLD)])


def write_timeline(events: Sequence[dict[str, Any]], stem: Path, title: str, out: IO[str] | None = None) -> None:
    """Write STEM.trace.json, STEM.html and, with matplotlib, STEM.png of a merged trace."""
    traces = read_trace(events)
    text = json.dumps({"schemaVersion": 1, "displayTimeUnit": "ms", "traceEvents": list(events)})
    page = render(traces, title)
    write_file("trace", Path(f"{stem}.trace.json"), lambda path: path.write_text(text), out)
    write_file("timeline", Path(f"{stem}.html"), lambda path: path.write_text(page, encoding="utf-8"), out)
    if importlib.util.find_spec("matplotlib") is None:
        print("no PNG of it: pip install matplotlib", file=out or sys.stdout)
        return
    write_file("timeline", Path(f"{stem}.png"), lambda path: draw_timeline(traces, title, path), out)


COLOURS = {
    "computing": "#B9BEC6", "packing": "#5C5C5C", "attention": "#0072B2",
    "exchange": "#D55E00", "ring": "#CC79A7", "gather": "#009E73", "reduce-scatter": "#E69F00",
    "all-reduce": "#56B4E9", "other collective": "#B8A800", "exposed": "#A33B00",
}  # fmt: skip
"""Colour of every kind of span, from Okabe and Ito's palette for colour-blind readers."""

_INK, _MUTED = "#1C1E21", "#5A6068"
_ORDER = ("computing", "attention", "packing")  # later kinds are drawn on top


def rank_summary(found: Figures) -> str:
    """Return one line on where a rank's step went."""
    return (
        f"computing {found.computing / found.step:.0%} (attention {found.attention / found.step:.0%}) "
        f"exposed communication {found.exposed / found.step:.0%} rest {found.rest / found.step:.0%}; "
        f"in flight {1e3 * found.communication:.1f} ms, hidden {1e3 * found.hidden:.1f} ms"
    )


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


def _lanes(trace: RankTrace) -> tuple[list[Span], list[Span], list[Span]]:
    """Return what to draw of a rank: computing, communication in flight, its exposed part."""
    by_kind = {kind: union(ends_of(s for s in trace.computing if s.kind == kind)) for kind in _ORDER}
    exposed = without(ends_of(trace.communication), ends_of(trace.computing))
    return (
        [Span(kind, kind, *ends) for kind in _ORDER for ends in by_kind[kind]],
        sorted(trace.communication, key=lambda s: COMMUNICATION.index(s.kind)),
        [Span("exposed", "exposed", *ends) for ends in exposed],
    )


# --- PNG


def draw_timeline(traces: Sequence[RankTrace], title: str, path: Path) -> None:
    """Write a PNG: for every rank its computing, below it communication in flight, and below that its exposed part."""
    require("the timeline", "matplotlib")
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(16, 1.6 + 1.25 * len(traces)), dpi=100, facecolor="white", layout="constrained")
    axes: Any = figure.subplots()
    used = {"exposed"}
    for y, trace in enumerate(traces):
        for lane, (top, height) in zip(_lanes(trace), ((-0.3, 0.28), (0, 0.2), (0.22, 0.08)), strict=True):
            for kind in dict.fromkeys(s.kind for s in lane):
                used.add(kind)
                bars = [(s.start / 1e3, (s.end - s.start) / 1e3) for s in lane if s.kind == kind]
                axes.broken_barh(bars, (y + top, height), color=COLOURS[kind], linewidth=0)
        axes.text(0, y - 0.34, rank_summary(figures(trace)), fontsize=9, color=_MUTED, va="bottom")
    axes.set_yticks(range(len(traces)), [f"rank {trace.rank}" for trace in traces])
    axes.set_ylim(len(traces) - 0.35, -0.62)
    axes.set_xlim(0, max(trace.length for trace in traces) / 1e3)
    axes.set_xlabel("milliseconds since the step began", color=_MUTED)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    handles = [Patch(color=colour, label=kind) for kind, colour in COLOURS.items() if kind in used]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=11)
    figure.suptitle(
        f"{title}\n{imbalance_summary(traces)}", fontsize=12, color=_INK, ha="left", x=0.01, parse_math=False
    )
    figure.savefig(path, format="png")


# --- HTML, with an SVG; hovering shows names and times

_WIDTH, _ROW, _LEFT = 1400, 92, 70
_STYLE = """body{font:14px/1.4 system-ui,sans-serif;margin:24px;color:#1c1e21;background:#fff}
h1{font-size:16px;margin:0 0 4px}p{margin:2px 0;color:#5a6068}svg{display:block;max-width:100%;height:auto}
text{font:11px system-ui,sans-serif;fill:#5a6068}.rank{font-size:13px;fill:#1c1e21}
span.key{display:inline-block;width:11px;height:11px;margin:0 4px 0 14px;vertical-align:-1px}
table{border-collapse:collapse;margin-top:14px}td,th{padding:2px 14px 2px 0;text-align:right;
font-variant-numeric:tabular-nums}
th{font-weight:500;color:#5a6068}td:first-child,th:first-child{text-align:left}"""


def render(traces: Sequence[RankTrace], title: str) -> str:
    """Return the page."""
    longest = max(trace.length for trace in traces)
    rows = "".join(_rank_row(row, trace, longest) for row, trace in enumerate(traces))
    height = _ROW * len(traces) + 24
    used = {s.kind for trace in traces for s in (*trace.computing, *trace.communication)} | {"exposed"}
    keys = "".join(f'<span class="key" style="background:{c}"></span>{k}' for k, c in COLOURS.items() if k in used)
    axis = "".join(
        f'<text x="{_x(longest * i / 10, longest):.1f}" y="{height - 6}" text-anchor="middle">'
        f"{longest * i / 10 / 1e3:.4g} ms</text>"
        for i in range(11)
    )
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{_STYLE}</style><h1>{html.escape(title)}</h1>"
        f"<p>{html.escape(imbalance_summary(traces))}</p><p>{keys}</p>"
        f'<svg viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}">{rows}{axis}</svg>'
        f"{_table(traces)}</html>\n"
    )


def _x(at: float, longest: float) -> float:
    return _LEFT + at / longest * (_WIDTH - _LEFT - 20)


def _rank_row(row: int, trace: RankTrace, longest: float) -> str:
    top = row * _ROW
    parts = [
        f'<text class="rank" x="0" y="{top + 44}">rank {trace.rank}</text>',
        f'<text x="{_LEFT}" y="{top + 16}">{html.escape(rank_summary(figures(trace)))}</text>',
    ]
    for lane, (below, height) in zip(_lanes(trace), ((22, 24), (50, 18), (70, 7)), strict=True):
        parts += [_bar(s, top + below, height, longest) for s in lane]
    return "".join(parts)


def _bar(span: Span, top: float, height: float, longest: float) -> str:
    left = _x(span.start, longest)
    width = max(0.2, _x(span.end, longest) - left)
    name = span.name if span.name == span.kind else f"{span.kind}: {span.name}"
    tip = f"{name}, {(span.end - span.start) / 1e3:.3f} ms from {span.start / 1e3:.3f} ms"
    return (
        f'<rect x="{left:.2f}" y="{top}" width="{width:.2f}" height="{height}" fill="{COLOURS[span.kind]}">'
        f"<title>{html.escape(tip)}</title></rect>"
    )


def _table(traces: Sequence[RankTrace]) -> str:
    found = [(trace, figures(trace)) for trace in traces]
    kinds = [kind for kind in COMMUNICATION if any(kind in f.kinds for _, f in found)]
    names = ["rank", "step", "computing", "attention", "in flight", "exposed", "hidden", "rest", *kinds]
    head = "".join(f"<th>{name}</th>" for name in names)
    rows = ""
    for trace, f in found:
        values = [f.step, f.computing, f.attention, f.communication, f.exposed, f.hidden, f.rest]
        values += [f.kinds.get(kind, 0.0) for kind in kinds]
        rows += f"<tr><td>{trace.rank}</td>" + "".join(f"<td>{1e3 * v:.2f} ms</td>" for v in values) + "</tr>"
    return f"<table><tr>{head}</tr>{rows}</table>"
