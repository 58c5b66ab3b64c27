"""The output of `longspan bench`: tables, the hardware file, JSON, a picture, and traces with timelines."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from longspan.core.errors import require
from longspan.core.formatting import seconds as time_text
from longspan.core.formatting import size
from longspan.core.validation import write_file
from longspan.tracing.timeline import COLOURS, write_timeline

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from longspan.bench.command import BenchConfig

SCHEMA = "longspan.bench/1"
_LEFT = ("axis", "collective", "method", "formula")  # columns of text

Data = dict[str, Any]
"""The results of `bench`, or one of its rows, in the schema of the JSON; tables and pictures show these."""


def write_output(config: BenchConfig, found: Any) -> None:
    """Print what `worker` returned, and write the requested files; on the first rank."""
    if config.what == "link":
        from longspan.bench.hardware import as_toml

        print_hardware(found)  # before writing, so that a full disk does not lose the results
        config.out.parent.mkdir(parents=True, exist_ok=True)
        config.out.write_text(as_toml(found))
        print(f"\nwritten to {config.out}")
        return
    data, traces = as_json(found)
    print(json.dumps(data, indent=1)) if config.json else print_tables(data)
    out = sys.stderr if config.json else sys.stdout
    if config.png is not None:
        write_file("picture", config.png, lambda path: draw(data, path), out)
    for row, trace in zip(data["rows"], traces, strict=True):
        if config.trace is not None and trace is not None:
            title = f"{row['method']}: {data['shape']}, {row['context']:,} tokens, {data['dtype']}; {data['measured']}"
            write_timeline(trace, config.trace / f"{row['method']}-{row['context']}", title, out)


def as_json(found: Data) -> tuple[Data, list[Any]]:
    """Return the results in the schema of the JSON, and each row's trace apart, or None."""
    traces = [row.get("trace") for row in found["rows"]]
    rows = [{key: value for key, value in row.items() if key != "trace"} for row in found["rows"]]
    return {"schema": SCHEMA, **found, "rows": rows}, traces


# --- tables


def _console(file: IO[str] | None, width: int) -> Console:
    from rich.console import Console

    console = Console(file=file, highlight=False, markup=False)
    console.width = min(console.width, width) if console.is_terminal else width
    return console


def _table(*columns: str, title: str | None = None) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), title=title, title_justify="left")
    for name in columns:
        table.add_column(name, justify="left" if name in _LEFT else "right", no_wrap=True)
    return table


def _print_rows(console: Console, names: list[str], rows: list[list[str]], *, keys: int, title: str = "") -> None:
    """Print a table; on a narrow terminal as several, one below the other, each with the first `keys` columns."""
    widths = [max(map(len, column)) + 2 for column in zip(names, *rows, strict=True)]
    first, at = list(range(keys)), keys
    while at < len(names):
        shown, left = list(first), console.width - sum(widths[:keys])
        while at < len(names) and (len(shown) == keys or widths[at] <= left):
            shown.append(at)
            left -= widths[at]
            at += 1
        table = _table(*(names[i] for i in shown), title=title)
        for cells in rows:
            table.add_row(*(cells[i] for i in shown))
        console.print(table)
        if at < len(names):
            console.print()
        title = ""


def print_hardware(hardware: Data, file: IO[str] | None = None) -> None:
    """Print the speed of a rank and its links in at most 100 columns, by default to stdout."""
    console, dtype = _console(file, 100), hardware["dtype"]
    console.print(f"longspan bench link  {hardware['name']}: {hardware['measured']}\n")
    for label, value in {
        f"matmul, {dtype}": f"{hardware['flops'] / 1e12:.4g} TFLOP/s",
        f"causal attention, {dtype}, forward": f"{hardware['attention_forward_flops'] / 1e12:.4g} TFLOP/s",
        f"causal attention, {dtype}, forward + backward": f"{hardware['attention_flops'] / 1e12:.4g} TFLOP/s",
        "memory bandwidth": f"{hardware['memory_bandwidth'] / 1e9:.4g} GB/s",
        "memory": f"{hardware['memory_bytes'] / 2**30:.4g} GiB",
    }.items():
        console.print(f"{label:44} {value:>18}  per rank")
    if not hardware["links"]:
        console.print("\nNo axis of the mesh is above 1, so there is no link to measure, only compute and memory.")
        return
    table = _table("axis", "collective", "latency", "bandwidth", "residual", "hidden")
    for axis, fits in hardware["links"].items():
        for number, (op, fit) in enumerate(fits.items()):
            table.add_row(
                axis if number == 0 else "",
                op,
                f"{fit.latency * 1e6:.1f} us",
                f"{fit.bandwidth / 1e9:.4g} GB/s",
                f"{fit.residual:.0%}",
                "-" if fit.hidden is None else f"{fit.hidden:.0%}",
            )
    console.print("", table, "", sep="\n")
    console.print("time = latency + bytes sent per rank / bandwidth; residual = the fit's median relative error;")
    console.print("hidden = the share of the time that overlaps with computing of the same length")


def print_tables(data: Data, file: IO[str] | None = None) -> None:
    """Print the results, by default to stdout."""
    console = _console(file, 140)
    if data["what"] == "collectives":
        _print_collectives(console, data)
        return
    console.print(f"longspan bench {data['what']}  {data['shape']}, {data['dtype']}: {data['measured']}\n")
    for context, rows in by_context(data):
        _print_context(console, rows, context)
    _print_legend(console, data)


def by_context(data: Data) -> Iterator[tuple[int, list[Data]]]:
    """Yield each context with its rows."""
    for context in dict.fromkeys(row["context"] for row in data["rows"]):
        yield context, [row for row in data["rows"] if row["context"] == context]


def _print_collectives(console: Console, found: Data) -> None:
    console.print(f"longspan bench collectives  {found['measured']}\n")
    names = ["axis", "ranks", "collective", "size", "sent", "by formula", "median", "quartiles", "fit", "off", "GB/s"]
    rows = []
    for row in found["rows"]:
        median, low, high = (row["seconds"][name] for name in ("median", "low", "high"))
        rows.append([
            row["axis"], str(row["ranks"]), row["op"], size(row["size"]), size(row["sent"]),
            "= sent" if row["sent"] == row["formula"] else size(row["formula"]),
            time_text(median), f"{time_text(low)} - {time_text(high)}", time_text(row["fitted"]),
            f"{row['fitted'] / median - 1:+.0%}", f"{row['sent'] / median / 1e9:.3g}",
        ])  # fmt: skip
    _print_rows(console, names, rows, keys=4)
    console.print(
        "\nsent: bytes that each rank sends; fit: latency + sent / bandwidth over all sizes of a row's collective"
    )


def _print_context(console: Console, rows: list[Data], context: int) -> None:
    predicted = any(row.get("predicted") for row in rows)
    names = ["method", "forward", "backward", "both", "spread", "in flight", "exposed"]
    names += ["transfer", "planned", "planned both"] if predicted else []
    names += ["sent", "formula", "other", "peak"]
    cells = [_cells(row, predicted) for row in sorted(rows, key=_order)]
    _print_rows(console, names, cells, keys=1, title=f"{context:,} tokens")
    for row in rows:
        name = row["method"]
        if "reason" in row:
            console.print(f"{name} is not measured: {row['reason']}")
        elif row["sequences"] > 1:
            console.print(f"{name} shards no sequence: {row['sequences']} sequences at once, one a rank")
    console.print()


def _order(row: Data) -> float:
    return float("inf") if "reason" in row else row["seconds"]["total"]["median"] / row["sequences"]


def _cells(row: Data, predicted: bool) -> list[str]:
    if "reason" in row:
        return [row["method"], *["-"] * (13 if predicted else 10)]
    total, planned = row["seconds"]["total"], row["predicted"]
    cells = [time_text(row["seconds"][name]["median"]) for name in ("forward", "backward", "total")]
    cells += [f"{(total['high'] - total['low']) / total['median']:.0%}"]
    cells += [time_text(row[f"{name}_seconds"]) for name in ("communication", "exposed")]
    if predicted:
        cells += [time_text(row["transfer_seconds"])]
        cells += ["-", "-"] if planned is None else [time_text(planned[name]) for name in ("communication", "total")]
    sent, formula = row["method_bytes"], row["formula_bytes"]
    expected = "none" if formula is None else _against(sent, sum(formula.values()))
    return [row["method"], *cells, size(sent), expected, size(row["other_bytes"]), size(row["peak_bytes"])]


def _against(sent: int, expected: int) -> str:
    return "= sent" if sent == expected else f"{size(expected)} ({sent - expected:+,} B)"


def _print_legend(console: Console, data: Data) -> None:
    console.print(
        "Times are medians over rounds, of the slowest rank; spread: distance of the quartiles. Fastest per sequence "
        "first. in flight: a collective runs, including the wait for slower ranks; exposed: and nothing computes "
        "(mean over ranks, one run under the profiler). sent: bytes of the method on the rank that sends most; "
        "formula: the planner's; other: weights, gradients, loss. peak: bytes held on the rank with the highest peak."
        + (
            "\ntransfer: of each collective, from the last rank's call to the last rank's end; planned, planned both: "
            "the planner's transfer and total, from links measured on this mesh."
            if any(row.get("predicted") for row in data["rows"])
            else ""
        )
    )
    for context, rows in by_context(data):
        by_name = {row["method"]: row for row in rows if "seconds" in row}
        tp, ulysses = by_name.get("tp"), by_name.get("ulysses")
        if tp and ulysses and ulysses["method_bytes"]:
            console.print(f"{context:,} tokens: {tp_over_ulysses(tp, ulysses)}")


def tp_over_ulysses(tp: Data, ulysses: Data) -> str:
    """Return tensor parallelism's communication over Ulysses' at one context."""
    sent = tp["method_bytes"] / ulysses["method_bytes"]
    planned = sum(tp["formula_bytes"].values()) / sum(ulysses["formula_bytes"].values())
    seconds = tp["communication_seconds"] / max(ulysses["communication_seconds"], 1e-12)
    return (
        f"TP sends {sent:.2f} times Ulysses' bytes (formula {planned:.2f}) and communicates {seconds:.2f} times as long"
    )


# --- picture

_INK, _MUTED = "#1C1E21", "#5A6068"
_LINES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#5C5C5C", "#B8A800", "#000000")


def draw(data: Data, path: Path) -> None:
    """Write a PNG: for methods, total and exposed time per sequence; for collectives, time against size."""
    require("--png", "matplotlib")
    from matplotlib.figure import Figure

    columns, rows, title = 2, 8, data["measured"]
    if data["what"] != "collectives":
        columns, rows = len(list(by_context(data))), len({row["method"] for row in data["rows"]})
        title = f"{data['shape']}, {data['dtype']}\n{title}"
    figure = Figure((5 + 4.5 * columns, 2.2 + 0.5 * rows), 100, facecolor="white", layout="constrained")
    (_draw_collectives if data["what"] == "collectives" else _draw_methods)(figure, data)
    figure.suptitle(title, fontsize=11, color=_INK, parse_math=False)
    figure.savefig(path, format="png")


def _draw_methods(figure: Any, data: Data) -> None:
    from matplotlib.patches import Patch

    names, contexts = list(dict.fromkeys(row["method"] for row in data["rows"])), list(by_context(data))
    every: Any = figure.subplots(1, len(contexts), squeeze=False)[0]
    for axes, (context, rows) in zip(every, contexts, strict=True):
        for row in rows:
            y = names.index(row["method"])
            if "reason" in row:
                axes.text(0, y, " not measured", va="center", color=_MUTED)
                continue
            share = min(1.0, row["exposed_seconds"] / max(figures["step"] for figures in row["figures"]))
            low, total, high = (row["seconds"]["total"][x] / row["sequences"] * 1e3 for x in ("low", "median", "high"))
            axes.barh(y, total, color="#B9BEC6")
            axes.barh(y, total * share, color="#A33B00")
            axes.errorbar(total, y, xerr=[[total - low], [high - total]], color=_INK, capsize=3)
            if row["predicted"] is not None:
                axes.plot(row["predicted"]["total"] / row["sequences"] * 1e3, y, "D", color=COLOURS["attention"])
        axes.set_yticks(range(len(names)), names if axes is every[0] else [""] * len(names))
        axes.invert_yaxis()
        axes.set_xlim(left=0)
        axes.set_title(f"{context:,} tokens", color=_INK)
        planned = any(row.get("predicted") for row in data["rows"])
        axes.set_xlabel("ms per sequence" + ("; blue: predicted" if planned else ""))
        axes.spines[["top", "right"]].set_visible(False)
    kinds = {"computing and rest": "#B9BEC6", "exposed communication": "#A33B00"}
    bars = [Patch(color=colour, label=name) for name, colour in kinds.items()]
    figure.legend(handles=bars, frameon=False, fontsize=9, loc="outside lower center", ncols=2)


def _draw_collectives(figure: Any, found: Data) -> None:
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
