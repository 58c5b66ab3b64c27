"""Render a timeline of all ranks as one self-contained HTML page with an SVG; hovering shows names and times."""

from __future__ import annotations

import html
from collections.abc import Sequence

from longspan.tracing.drawing import COLOURS, imbalance_summary, rank_summary
from longspan.tracing.spans import COMMUNICATION, RankTrace, Span, figures, union, without

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
    rows = "".join(_rank(row, trace, longest) for row, trace in enumerate(traces))
    height = _ROW * len(traces) + 24
    used = {s.kind for trace in traces for s in (*trace.computing, *trace.communication)}
    keys = "".join(f'<span class="key" style="background:{c}"></span>{k}' for k, c in COLOURS.items() if k in used)
    keys += '<span class="key" style="background:#a33b00"></span>exposed'
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


def _rank(row: int, trace: RankTrace, longest: float) -> str:
    top = row * _ROW
    parts = [
        f'<text class="rank" x="0" y="{top + 44}">rank {trace.rank}</text>',
        f'<text x="{_LEFT}" y="{top + 16}">{html.escape(rank_summary(figures(trace)))}</text>',
    ]
    for kind in ("computing", "attention", "packing"):
        for start, end in union((s.start, s.end) for s in trace.computing if s.kind == kind):
            parts.append(_bar(Span(kind, kind, start, end), top + 22, 24, longest))
    for kind in COMMUNICATION:
        parts += [_bar(s, top + 50, 18, longest) for s in trace.communication if s.kind == kind]
    exposed = without(((s.start, s.end) for s in trace.communication), ((s.start, s.end) for s in trace.computing))
    parts += [_bar(Span("exposed", "exposed", *ends), top + 70, 7, longest) for ends in exposed]
    return "".join(parts)


def _bar(span: Span, top: float, height: float, longest: float) -> str:
    left = _x(span.start, longest)
    width = max(0.2, _x(span.end, longest) - left)
    name = span.name if span.name == span.kind else f"{span.kind}: {span.name}"
    tip = f"{name}, {(span.end - span.start) / 1e3:.3f} ms from {span.start / 1e3:.3f} ms"
    colour = COLOURS.get(span.kind, "#A33B00")
    return (
        f'<rect x="{left:.2f}" y="{top}" width="{width:.2f}" height="{height}" fill="{colour}">'
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
