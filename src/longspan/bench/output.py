"""What `bench collectives`, `attention` and `step` leave: tables, JSON, a picture, and traces with their timelines."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from longspan.plan.views.units import seconds as time_text
from longspan.plan.views.units import size
from longspan.tracing.files import write, write_timeline

if TYPE_CHECKING:
    from rich.console import Console

    from longspan.bench.collectives import Collectives
    from longspan.bench.compare import Comparison, Entry
    from longspan.bench.config import BenchConfig

SCHEMA = "longspan.bench/1"
WIDTH = 140


def show(config: BenchConfig, found: Comparison | Collectives) -> None:
    """Print what was measured, and write what was asked for. Called on the first rank alone.

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
        from longspan.bench.drawing import draw

        write("picture", config.png, lambda path: draw(found, path), out)
    if config.trace is not None and not isinstance(found, Collectives):
        _write_traces(found, config.trace, out)


def _write_traces(found: Comparison, folder: Path, out: IO[str]) -> None:
    for entry in found.entries:
        if entry.measured is not None:
            title = f"{entry.row.name}: {found.shape}, {entry.context:,} tokens, {found.dtype}; {found.measured}"
            write_timeline(entry.measured.trace, folder / f"{entry.row.name}-{entry.context}", title, out)


# --- tables


def print_tables(found: Comparison | Collectives, file: IO[str] | None = None) -> None:
    """Print what was measured, to stdout if no `file` is given."""
    from rich.console import Console

    from longspan.bench.collectives import Collectives, table_of

    console = Console(file=file, highlight=False, markup=False)
    console.width = min(console.width, WIDTH) if console.is_terminal else WIDTH
    if isinstance(found, Collectives):
        console.print(f"longspan bench collectives  {found.measured}\n")
        console.print(table_of(found))
        console.print(
            "\nsent: bytes that each rank sends; fit: latency + sent / bandwidth over all sizes of a row's collective"
        )
        return
    console.print(f"longspan bench {found.what}  {found.shape}, {found.dtype}: {found.measured}\n")
    for context in dict.fromkeys(entry.context for entry in found.entries):
        _print_context(console, [entry for entry in found.entries if entry.context == context], context)
    _legend(console, found)


def _print_context(console: Console, entries: list[Entry], context: int) -> None:
    from rich import box
    from rich.table import Table

    predicted = any(entry.predicted for entry in entries)
    table = Table(
        box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 2, 0, 0), title=f"{context:,} tokens", title_justify="left"
    )
    names = ["method", "forward", "backward", "both", "spread", "in flight", "exposed"]
    names += ["transfer", "planned", "planned both"] if predicted else []
    names += ["sent", "formula", "other", "peak"]
    for name in names:
        left = name in ("method", "formula")
        table.add_column(name, justify="left" if left else "right", no_wrap=True)
    for entry in sorted(entries, key=_order):
        table.add_row(*_cells(entry, predicted))
    console.print(table)
    for entry in entries:
        if entry.reason is not None:
            console.print(f"{entry.row.name} is not measured: {entry.reason}")
        elif entry.sequences > 1:
            console.print(f"{entry.row.name} shards no sequence: {entry.sequences} sequences at once, one a rank")
    console.print()


def _order(entry: Entry) -> float:
    return float("inf") if entry.measured is None else entry.measured.total.median / entry.sequences


def _cells(entry: Entry, predicted: bool) -> list[str]:
    m = entry.measured
    if m is None:
        return [entry.row.name, *["-"] * (13 if predicted else 10)]
    said = [time_text(x) for x in (m.forward.median, m.backward.median, m.total.median)]
    said += [f"{(m.total.high - m.total.low) / m.total.median:.0%}", time_text(m.communication), time_text(m.exposed)]
    if predicted:
        p = entry.predicted
        said += [time_text(m.transfer)]
        said += ["-", "-"] if p is None else [time_text(p.communication), time_text(p.total)]
    method, other = sent_of(entry)
    return [entry.row.name, *said, size(method), agreement(entry), size(other), size(m.peak_bytes)]


def sent_of(entry: Entry) -> tuple[int, int]:
    """Bytes that the rank that sends most sent for the method, and beside it (weights, gradients, loss).

    By collective: what the formula of weights, gradients and loss has of one is taken off; where the method has no
    formula, the rest of every collective is the method's.
    """
    assert entry.measured is not None
    total = sum(entry.measured.sent.values())
    if entry.formula is None:
        method = sum(max(0, count - entry.around.get(op, 0)) for op, count in entry.measured.sent.items())
        return method, total - method
    method = 0
    for op, count in entry.measured.sent.items():
        if op in entry.formula:
            method += count - entry.around.get(op, 0)
    return method, total - method


def agreement(entry: Entry) -> str:
    """What the formula says beside the bytes that were sent."""
    if entry.formula is None:
        return "none"
    expected, (method, _) = sum(entry.formula.values()), sent_of(entry)
    if method == expected:
        return "= sent"
    return f"{size(expected)} ({method - expected:+,} B)"


def _legend(console: Console, found: Comparison) -> None:
    console.print(
        "Times are medians over rounds of the slowest rank's, spread: the quartiles' distance; the fastest per\n"
        "sequence stands first. in flight: a collective is under way, waiting for slower ranks included; exposed: and\n"
        "nothing computes (mean over ranks, one run under the profiler). sent: for the method, by the rank that sends\n"
        "most, beside the planner's formula; other: weights, gradients, loss. peak: bytes that the rank that holds\n"
        "most holds at once."
        + (
            " transfer: of each collective, from the last rank's\ncall to the last rank's end; planned: that, and "
            "both, by the planner from links that were measured on this mesh."
            if any(entry.predicted for entry in found.entries)
            else ""
        )
    )
    for context in dict.fromkeys(entry.context for entry in found.entries):
        ratio = tp_over_ulysses([entry for entry in found.entries if entry.context == context])
        if ratio is not None:
            console.print(
                f"{context:,} tokens: TP sends {ratio['bytes']:.2f} times Ulysses' bytes (formula "
                f"{ratio['formula']:.2f}) and communicates {ratio['seconds']:.2f} times as long"
            )


def tp_over_ulysses(entries: list[Entry]) -> dict[str, float] | None:
    """How many times tensor parallelism's communication is Ulysses', of one context; None where one is missing."""
    by_name = {entry.row.name: entry for entry in entries if entry.measured is not None}
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
    """The same for programs (schema `longspan.bench/1`, docs/bench.md)."""
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
        "rows": [_row(entry) for entry in found.entries],
        "hardware": found.hardware,
    }


def _row(entry: Entry) -> dict[str, Any]:
    mesh = entry.row.mesh
    head = {
        "method": entry.row.name,
        "mesh": {axis: getattr(mesh, axis) for axis in ("data", "ring", "ulysses", "tensor")},
        "context": entry.context,
    }
    m = entry.measured
    if m is None:
        return {**head, "reason": entry.reason}
    method, other = sent_of(entry)
    spreads = {
        name: {"median": each.median, "low": each.low, "high": each.high}
        for name, each in (("forward", m.forward), ("backward", m.backward), ("total", m.total))
    }
    predicted = entry.predicted
    return {
        **head,
        "sequences": entry.sequences,
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
        "formula_bytes": entry.formula,
        "around_bytes": entry.around,
        "peak_bytes": m.peak_bytes,
        "predicted": None if predicted is None else vars(predicted),
    }
