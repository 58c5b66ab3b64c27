"""The output of `bench collectives`, `attention` and `step`: tables, JSON, a picture, and traces with timelines."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from longspan.core.errors import require
from longspan.core.formatting import seconds as time_text
from longspan.core.formatting import size
from longspan.tracing.files import write, write_timeline
from longspan.tracing.timeline import COLOURS

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from longspan.bench.collectives import Collectives
    from longspan.bench.compare import Comparison, Result
    from longspan.bench.config import BenchConfig

SCHEMA = "longspan.bench/1"
WIDTH = 140


def write_output(config: BenchConfig, found: Comparison | Collectives) -> None:
    """Print the results and write the files that `config` asks for. Call it on the first rank alone.

    Raises:
        LongspanError: if a file cannot be written.
    """
    from longspan.bench.collectives import Collectives

    if config.json:
        print(json.dumps(as_json(found), indent=1))
    else:
        print_tables(found)
    out = sys.stderr if config.json else sys.stdout
    if config.png is not None:
        write("picture", config.png, lambda path: draw(found, path), out)
    if config.trace is not None and not isinstance(found, Collectives):
        _write_traces(found, config.trace, out)


def _write_traces(found: Comparison, folder: Path, out: IO[str]) -> None:
    for result in found.results:
        if result.measured is not None:
            name = result.candidate.name
            title = f"{name}: {found.shape}, {result.context:,} tokens, {found.dtype}; {found.measured}"
            write_timeline(result.measured.trace, folder / f"{name}-{result.context}", title, out)


# --- tables


def print_tables(found: Comparison | Collectives, file: IO[str] | None = None) -> None:
    """Print the results, by default to stdout."""
    from rich.console import Console

    from longspan.bench.collectives import Collectives

    console = Console(file=file, highlight=False, markup=False)
    console.width = min(console.width, WIDTH) if console.is_terminal else WIDTH
    if isinstance(found, Collectives):
        console.print(f"longspan bench collectives  {found.measured}\n")
        console.print(_collectives_table(found))
        console.print(
            "\nsent: bytes that each rank sends; fit: latency + sent / bandwidth over all sizes of a row's collective"
        )
        return
    console.print(f"longspan bench {found.what}  {found.shape}, {found.dtype}: {found.measured}\n")
    for context in dict.fromkeys(result.context for result in found.results):
        _print_context(console, [result for result in found.results if result.context == context], context)
    _legend(console, found)


def _collectives_table(found: Collectives) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 2, 0, 0))
    for name in ("axis", "ranks", "collective", "size", "sent", "formula", "median", "quartiles", "fit", "off", "GB/s"):
        table.add_column(name, justify="left" if name in ("axis", "collective") else "right")
    for t in found.timed:
        formula = "= sent" if t.sent == t.formula else size(t.formula)
        table.add_row(
            t.axis, str(t.ranks), t.op, size(t.size), size(t.sent), formula,
            time_text(t.seconds.median), f"{time_text(t.seconds.low)} - {time_text(t.seconds.high)}",
            time_text(t.fitted), f"{t.fitted / t.seconds.median - 1:+.0%}", f"{t.sent / t.seconds.median / 1e9:.3g}",
        )  # fmt: skip
    return table


def _print_context(console: Console, results: list[Result], context: int) -> None:
    from rich import box
    from rich.table import Table

    predicted = any(result.predicted for result in results)
    table = Table(
        box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 2, 0, 0), title=f"{context:,} tokens", title_justify="left"
    )
    names = ["method", "forward", "backward", "both", "spread", "in flight", "exposed"]
    names += ["transfer", "planned", "planned both"] if predicted else []
    names += ["sent", "formula", "other", "peak"]
    for name in names:
        left = name in ("method", "formula")
        table.add_column(name, justify="left" if left else "right", no_wrap=True)
    for result in sorted(results, key=_order):
        table.add_row(*_cells(result, predicted))
    console.print(table)
    for result in results:
        name = result.candidate.name
        if result.reason is not None:
            console.print(f"{name} is not measured: {result.reason}")
        elif result.sequences > 1:
            console.print(f"{name} shards no sequence: {result.sequences} sequences at once, one a rank")
    console.print()


def _order(result: Result) -> float:
    return float("inf") if result.measured is None else result.measured.total.median / result.sequences


def _cells(result: Result, predicted: bool) -> list[str]:
    m = result.measured
    if m is None:
        return [result.candidate.name, *["-"] * (13 if predicted else 10)]
    cells = [time_text(x) for x in (m.forward.median, m.backward.median, m.total.median)]
    cells += [f"{(m.total.high - m.total.low) / m.total.median:.0%}", time_text(m.communication), time_text(m.exposed)]
    if predicted:
        p = result.predicted
        cells += [time_text(m.transfer)]
        cells += ["-", "-"] if p is None else [time_text(p.communication), time_text(p.total)]
    method, other = sent_of(result)
    return [result.candidate.name, *cells, size(method), formula_text(result), size(other), size(m.peak_bytes)]


def sent_of(result: Result) -> tuple[int, int]:
    """Return the bytes sent for the method, and for everything else (weights, gradients, loss), on the rank with most.

    The planned bytes of everything else are subtracted by collective. Without a formula of the method, what remains is
    the method's.
    """
    assert result.measured is not None
    total = sum(result.measured.sent.values())
    if result.formula is None:
        method = sum(max(0, count - result.other_formula.get(op, 0)) for op, count in result.measured.sent.items())
        return method, total - method
    method = 0
    for op, count in result.measured.sent.items():
        if op in result.formula:
            method += count - result.other_formula.get(op, 0)
    return method, total - method


def formula_text(result: Result) -> str:
    """Return the planned bytes of the method, or "= sent" if they equal the counted ones."""
    if result.formula is None:
        return "none"
    expected, (method, _) = sum(result.formula.values()), sent_of(result)
    if method == expected:
        return "= sent"
    return f"{size(expected)} ({method - expected:+,} B)"


def _legend(console: Console, found: Comparison) -> None:
    console.print(
        "Times are medians over rounds, of the slowest rank; spread: distance of the quartiles. Fastest per sequence\n"
        "first. in flight: a collective runs, including the wait for slower ranks; exposed: and nothing computes\n"
        "(mean over ranks, one run under the profiler). sent: bytes of the method on the rank that sends most;\n"
        "formula: the planner's; other: weights, gradients, loss. peak: bytes held on the rank with the highest peak."
        + (
            "\ntransfer: of each collective, from the last rank's call to the last rank's end; planned, planned both:\n"
            "the planner's transfer and total, from links measured on this mesh."
            if any(result.predicted for result in found.results)
            else ""
        )
    )
    for context in dict.fromkeys(result.context for result in found.results):
        ratio = tp_over_ulysses([result for result in found.results if result.context == context])
        if ratio is not None:
            console.print(
                f"{context:,} tokens: TP sends {ratio['bytes']:.2f} times Ulysses' bytes (formula "
                f"{ratio['formula']:.2f}) and communicates {ratio['seconds']:.2f} times as long"
            )


def tp_over_ulysses(results: list[Result]) -> dict[str, float] | None:
    """Return tensor parallelism's communication over Ulysses' at one context; None if one was not measured."""
    by_name = {result.candidate.name: result for result in results if result.measured is not None}
    tp, ulysses = by_name.get("tp"), by_name.get("ulysses")
    if tp is None or ulysses is None or not sent_of(ulysses)[0]:
        return None
    assert tp.measured and ulysses.measured and tp.formula and ulysses.formula
    return {
        "bytes": sent_of(tp)[0] / sent_of(ulysses)[0],
        "formula": sum(tp.formula.values()) / sum(ulysses.formula.values()),
        "seconds": tp.measured.communication / max(ulysses.measured.communication, 1e-12),
    }


# --- JSON


def as_json(found: Comparison | Collectives) -> dict[str, Any]:
    """Return the results for JSON (schema `longspan.bench/1`, docs/reference/json.md)."""
    from longspan.bench.collectives import Collectives

    if isinstance(found, Collectives):
        return {"schema": SCHEMA, "what": "collectives", **found.as_json()}
    return {
        "schema": SCHEMA,
        "what": found.what,
        "measured": found.measured,
        "ranks": found.ranks,
        "shape": found.shape,
        "dtype": found.dtype,
        "rows": [_row(result) for result in found.results],
        "hardware": found.hardware,
    }


def _row(result: Result) -> dict[str, Any]:
    mesh = result.candidate.mesh
    head = {
        "method": result.candidate.name,
        "mesh": {axis: getattr(mesh, axis) for axis in ("data", "ring", "ulysses", "tensor")},
        "context": result.context,
    }
    m = result.measured
    if m is None:
        return {**head, "reason": result.reason}
    method, other = sent_of(result)
    spreads = {
        name: {"median": each.median, "low": each.low, "high": each.high}
        for name, each in (("forward", m.forward), ("backward", m.backward), ("total", m.total))
    }
    predicted = result.predicted
    return {
        **head,
        "sequences": result.sequences,
        "seconds": spreads,
        "rounds": list(m.rounds),
        "communication_seconds": m.communication,
        "exposed_seconds": m.exposed,
        "transfer_seconds": m.transfer,
        "imbalance": m.imbalance,
        "figures": [vars(figures) for figures in m.figures],
        "sent_bytes": m.sent,
        "method_bytes": method,
        "other_bytes": other,
        "formula_bytes": result.formula,
        "around_bytes": result.other_formula,
        "peak_bytes": m.peak_bytes,
        "predicted": None if predicted is None else vars(predicted),
    }


# --- picture

_INK, _MUTED = "#1C1E21", "#5A6068"
_LINES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#5C5C5C", "#B8A800", "#000000")


def draw(found: Comparison | Collectives, path: Path) -> None:
    """Write a PNG: for methods, total and exposed time per sequence; for collectives, time against size.

    Raises:
        LongspanError: if matplotlib is missing.
    """
    require("--png", "matplotlib")
    from matplotlib.figure import Figure

    from longspan.bench.collectives import Collectives

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
        axes.set_xticks(sizes, [size(nbytes) for nbytes in sizes], rotation=45)
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda ms, _: f"{ms:g}"))
        axes.yaxis.set_minor_formatter(FuncFormatter(lambda ms, _: f"{ms:g}"))
        axes.legend(frameon=False)
    figure.suptitle(found.measured, fontsize=11, color=_INK, parse_math=False)
    figure.savefig(path, format="png")
