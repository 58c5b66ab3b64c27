"""The output of `longspan bench`: tables, the hardware file, JSON, a picture, and traces with timelines."""

from __future__ import annotations

import dataclasses
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

    from longspan.bench.compare import Comparison, Result
    from longspan.bench.config import BenchConfig
    from longspan.bench.hardware import MeasuredHardware

SCHEMA = "longspan.bench/1"
_LEFT = ("axis", "collective", "method", "formula")  # columns of text

Collectives = dict[str, Any]
""""measured" (date, machine and versions) and "rows" (of `longspan.bench.links.measure_collectives`)."""


def write_output(config: BenchConfig, found: Any) -> None:
    """Print what `longspan.bench.job.worker` returned, and write the files that `config` asks for, on the first rank.

    Raises:
        LongspanError: if a file cannot be written.
    """
    if config.what == "link":
        from longspan.bench.hardware import as_toml

        print_hardware(found)  # before writing, so that a full disk does not lose the results
        config.out.parent.mkdir(parents=True, exist_ok=True)
        config.out.write_text(as_toml(found))
        print(f"\nwritten to {config.out}")
        return
    if config.json:
        print(json.dumps(as_json(found), indent=1))
    else:
        print_tables(found)
    out = sys.stderr if config.json else sys.stdout
    if config.png is not None:
        write("picture", config.png, lambda path: draw(found, path), out)
    if config.trace is not None:
        for result in found.results:
            if result.measured is not None:
                name = result.candidate.name
                title = f"{name}: {found.shape}, {result.context:,} tokens, {found.dtype}; {found.measured}"
                write_timeline(result.measured.trace, config.trace / f"{name}-{result.context}", title, out)


# --- tables


def _console(file: IO[str] | None, width: int) -> Console:
    from rich.console import Console

    console = Console(file=file, highlight=False, markup=False)
    console.width = min(console.width, width) if console.is_terminal else width
    return console


def _table(*columns: str, title: str | None = None) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 2, 0, 0), title=title, title_justify="left")
    for name in columns:
        table.add_column(name, justify="left" if name in _LEFT else "right", no_wrap=True)
    return table


def print_hardware(hardware: MeasuredHardware, file: IO[str] | None = None) -> None:
    """Print the speed of a rank and its links in at most 100 columns, by default to stdout."""
    console, compute, dtype = _console(file, 100), hardware.compute, hardware.dtype
    console.print(f"longspan bench link  {hardware.name}: {hardware.measured}\n")
    for label, value in {
        f"matmul, {dtype}": f"{compute.flops / 1e12:.4g} TFLOP/s",
        f"causal attention, {dtype}, forward": f"{compute.attention_forward_flops / 1e12:.4g} TFLOP/s",
        f"causal attention, {dtype}, forward + backward": f"{compute.attention_flops / 1e12:.4g} TFLOP/s",
        "memory bandwidth": f"{compute.memory_bandwidth / 1e9:.4g} GB/s",
        "memory": f"{compute.memory_bytes / 2**30:.4g} GiB",
    }.items():
        console.print(f"{label:44} {value:>18}  per rank")
    if not hardware.links:
        console.print("\nNo axis of the mesh is above 1, so there is no link to measure, only compute and memory.")
        return
    table = _table("axis", "ranks", "collective", "latency", "bandwidth", "residual", "hidden")
    for axis, fits in hardware.links.items():
        for number, (op, fit) in enumerate(fits.items()):
            table.add_row(
                *((axis, str(hardware.degrees[axis])) if number == 0 else ("", "")),
                op,
                f"{fit.latency * 1e6:.1f} us",
                f"{fit.bandwidth / 1e9:.4g} GB/s",
                f"{fit.residual:.0%}",
                "-" if fit.hidden is None else f"{fit.hidden:.0%}",
            )
    console.print("", table, "", sep="\n")
    console.print("time = latency + bytes sent per rank / bandwidth; residual = the fit's median relative error;")
    console.print("hidden = the share of the time that overlaps with computing of the same length")


def print_tables(found: Comparison | Collectives, file: IO[str] | None = None) -> None:
    """Print the results, by default to stdout."""
    console = _console(file, 140)
    if isinstance(found, dict):
        _print_collectives(console, found)
        return
    console.print(f"longspan bench {found.what}  {found.shape}, {found.dtype}: {found.measured}\n")
    for context in found.contexts:
        _print_context(console, [result for result in found.results if result.context == context], context)
    _print_legend(console, found)


def _print_collectives(console: Console, found: Collectives) -> None:
    console.print(f"longspan bench collectives  {found['measured']}\n")
    table = _table(
        "axis", "ranks", "collective", "size", "sent", "by formula", "median", "quartiles", "fit", "off", "GB/s"
    )
    for row in found["rows"]:
        median, low, high = (row["seconds"][name] for name in ("median", "low", "high"))
        table.add_row(
            row["axis"], str(row["ranks"]), row["op"], size(row["size"]), size(row["sent"]),
            "= sent" if row["sent"] == row["formula"] else size(row["formula"]),
            time_text(median), f"{time_text(low)} - {time_text(high)}", time_text(row["fitted"]),
            f"{row['fitted'] / median - 1:+.0%}", f"{row['sent'] / median / 1e9:.3g}",
        )  # fmt: skip
    console.print(table)
    console.print(
        "\nsent: bytes that each rank sends; fit: latency + sent / bandwidth over all sizes of a row's collective"
    )


def _print_context(console: Console, results: list[Result], context: int) -> None:
    predicted = any(result.predicted for result in results)
    names = ["method", "forward", "backward", "both", "spread", "in flight", "exposed"]
    names += ["transfer", "planned", "planned both"] if predicted else []
    table = _table(*names, "sent", "formula", "other", "peak", title=f"{context:,} tokens")
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
    method, other = result.sent
    return [result.candidate.name, *cells, size(method), formula_text(result), size(other), size(m.peak_bytes)]


def formula_text(result: Result) -> str:
    """Return the planned bytes of the method, or "= sent" if they equal the counted ones."""
    if result.formula is None:
        return "none"
    expected, (method, _) = sum(result.formula.values()), result.sent
    if method == expected:
        return "= sent"
    return f"{size(expected)} ({method - expected:+,} B)"


def _print_legend(console: Console, found: Comparison) -> None:
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
    for context in found.contexts:
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
    if tp is None or ulysses is None or not ulysses.sent[0]:
        return None
    assert tp.measured and ulysses.measured and tp.formula and ulysses.formula
    return {
        "bytes": tp.sent[0] / ulysses.sent[0],
        "formula": sum(tp.formula.values()) / sum(ulysses.formula.values()),
        "seconds": tp.measured.communication / max(ulysses.measured.communication, 1e-12),
    }


# --- JSON


def as_json(found: Comparison | Collectives) -> dict[str, Any]:
    """Return the results for JSON (schema `longspan.bench/1`, docs/reference/json.md)."""
    if isinstance(found, dict):
        return {"schema": SCHEMA, "what": "collectives", **found}
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
    mesh, m, predicted = result.candidate.mesh, result.measured, result.predicted
    head = {
        "method": result.candidate.name,
        "mesh": {axis: getattr(mesh, axis) for axis in ("data", "ring", "ulysses", "tensor")},
        "context": result.context,
    }
    if m is None:
        return {**head, "reason": result.reason}
    method, other = result.sent
    return {
        **head,
        "sequences": result.sequences,
        "seconds": {name: dataclasses.asdict(getattr(m, name)) for name in ("forward", "backward", "total")},
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

    columns, rows = 2, 8
    if not isinstance(found, dict):
        columns, rows = len(found.contexts), len({result.candidate.name for result in found.results})
    figure = Figure((5 + 4.5 * columns, 2.2 + 0.5 * rows), 100, facecolor="white", layout="constrained")
    if isinstance(found, dict):
        _draw_collectives(figure, found)
        title = found["measured"]
    else:
        _draw_methods(figure, found)
        title = f"{found.shape}, {found.dtype}\n{found.measured}"
    figure.suptitle(title, fontsize=11, color=_INK, parse_math=False)
    figure.savefig(path, format="png")


def _draw_methods(figure: Any, found: Comparison) -> None:
    from matplotlib.patches import Patch

    names = list(dict.fromkeys(result.candidate.name for result in found.results))
    every: Any = figure.subplots(1, len(found.contexts), squeeze=False)[0]
    for axes, context in zip(every, found.contexts, strict=True):
        for result in (result for result in found.results if result.context == context):
            y, m = names.index(result.candidate.name), result.measured
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
        axes.spines[["top", "right"]].set_visible(False)
    kinds = {"computing and rest": "#B9BEC6", "exposed communication": "#A33B00"}
    bars = [Patch(color=colour, label=name) for name, colour in kinds.items()]
    figure.legend(handles=bars, frameon=False, fontsize=9, loc="outside lower center", ncols=2)


def _draw_collectives(figure: Any, found: Collectives) -> None:
    axes_of = list(dict.fromkeys(row["axis"] for row in found["rows"]))
    for axes, axis in zip(figure.subplots(1, len(axes_of), squeeze=False)[0], axes_of, strict=True):
        mine = [row for row in found["rows"] if row["axis"] == axis]
        for op, colour in zip(dict.fromkeys(row["op"] for row in mine), _LINES, strict=False):
            sizes, medians, fitted = zip(
                *(
                    (row["size"], row["seconds"]["median"] * 1e3, row["fitted"] * 1e3)
                    for row in mine
                    if row["op"] == op
                ),
                strict=True,
            )
            axes.plot(sizes, medians, "o", color=colour, label=op)
            axes.plot(sizes, fitted, "-", color=colour, alpha=0.6)
        axes.set(xscale="log", yscale="log", xlabel="bytes of the whole tensor", ylabel="ms (line: fit)", title=axis)
        axes.legend(frameon=False)
