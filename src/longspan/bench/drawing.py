"""Draw the results of `bench` as a PNG."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from longspan.bench.collectives import Collectives
from longspan.core.formatting import size as size_text
from longspan.tracing.drawing import COLOURS, check_matplotlib

if TYPE_CHECKING:
    from longspan.bench.compare import Comparison

_INK, _MUTED = "#1C1E21", "#5A6068"
_LINES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#5C5C5C", "#B8A800", "#000000")


def draw(found: Comparison | Collectives, path: Path) -> None:
    """Write a PNG: for methods, total and exposed time per sequence; for collectives, time against size.

    Raises:
        LongspanError: if matplotlib is missing.
    """
    check_matplotlib("--png")
    from matplotlib.figure import Figure

    if isinstance(found, Collectives):
        _collectives(Figure(figsize=(14, 6), dpi=100, facecolor="white", layout="constrained"), found, path)
    else:
        _methods(Figure, found, path)


def _methods(figure_of: Any, found: Comparison, path: Path) -> None:
    from matplotlib.patches import Patch

    contexts = list(dict.fromkeys(result.context for result in found.results))
    names = list(dict.fromkeys(result.candidate.name for result in found.results))
    figure = figure_of(figsize=(5 + 4.5 * len(contexts), 2.2 + 0.5 * len(names)), dpi=100, facecolor="white",
                       layout="constrained")  # fmt: skip
    every: Any = figure.subplots(1, len(contexts), squeeze=False)[0]
    for axes, context in zip(every, contexts, strict=True):
        for y, name in enumerate(names):
            result = next(e for e in found.results if e.candidate.name == name and e.context == context)
            m = result.measured
            if m is None:
                axes.text(0, y, " not measured", va="center", color=_MUTED)
                continue
            share = min(1.0, m.exposed / max(f.step for f in m.figures))
            total = m.total.median / result.sequences * 1e3
            axes.barh(y, total, color="#B9BEC6")
            axes.barh(y, total * share, color="#A33B00")
            ends = [[total - m.total.low / result.sequences * 1e3], [m.total.high / result.sequences * 1e3 - total]]
            axes.errorbar(total, y, xerr=ends, color=_INK, capsize=3)
            if result.predicted is not None:
                axes.plot(result.predicted.total / result.sequences * 1e3, y, "D", color=COLOURS["attention"])
        axes.set_yticks(range(len(names)), names if axes is every[0] else [""] * len(names))
        axes.invert_yaxis()
        axes.set_xlim(left=0)
        axes.set_title(f"{context:,} tokens", color=_INK)
        axes.set_xlabel("ms per sequence" + ("; blue: predicted" if any(e.predicted for e in found.results) else ""))
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    kinds = {"computing and rest": "#B9BEC6", "exposed communication": "#A33B00"}
    bars = [Patch(color=colour, label=name) for name, colour in kinds.items()]
    figure.legend(handles=bars, frameon=False, fontsize=9, loc="outside lower center", ncols=2)
    figure.suptitle(f"{found.shape}, {found.dtype}\n{found.measured}", fontsize=11, color=_INK, parse_math=False)
    figure.savefig(path, format="png")


def _collectives(figure: Any, found: Collectives, path: Path) -> None:
    from matplotlib.ticker import FuncFormatter, NullFormatter

    axes_of = list(dict.fromkeys(t.axis for t in found.timed))
    for axes, axis in zip(figure.subplots(1, len(axes_of), squeeze=False)[0], axes_of, strict=True):
        ops = list(dict.fromkeys(t.op for t in found.timed if t.axis == axis))
        for op, colour in zip(ops, _LINES, strict=False):
            of_op = [t for t in found.timed if t.axis == axis and t.op == op]
            sizes = [t.size for t in of_op]
            axes.plot(sizes, [t.seconds.median * 1e3 for t in of_op], "o", color=colour, label=op)
            axes.plot(sizes, [t.fitted * 1e3 for t in of_op], "-", color=colour, alpha=0.6)
        axes.set(xscale="log", yscale="log", xlabel="bytes of the whole tensor", ylabel="ms (line: fit)", title=axis)
        sizes = sorted({t.size for t in found.timed if t.axis == axis})
        axes.set_xticks(sizes, [size_text(nbytes) for nbytes in sizes], rotation=45)
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda ms, _: f"{ms:g}"))
        axes.yaxis.set_minor_formatter(FuncFormatter(lambda ms, _: f"{ms:g}"))
        axes.legend(frameon=False)
    figure.suptitle(found.measured, fontsize=11, color=_INK, parse_math=False)
    figure.savefig(path, format="png")
