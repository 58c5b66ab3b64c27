"""The table that `longspan verify` prints."""

from __future__ import annotations

from typing import IO, TYPE_CHECKING

from longspan.core.formatting import format_ranks
from longspan.core.memory import FASTEST
from longspan.verify.judge import HALF_STEP, ROUNDINGS, Check
from longspan.verify.report import Report, diagnosis, smaller_faults_hint

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

WIDTH = 100
_RANKS_SHOWN = 16


def print_table(report: Report, file: IO[str] | None = None) -> None:
    """Print the report in at most 100 columns, by default to stdout."""
    from rich.console import Console

    console = Console(file=file, highlight=False)
    console.width = min(console.width, WIDTH) if console.is_terminal else WIDTH
    _print_title(report, console)
    console.print()
    console.print(_group_table(report))
    console.print()
    console.print(_rank_table(report))
    console.print()
    if report.passed and report.lossy:
        console.print(
            f"[bold yellow]LOSSY[/]  {_count(report)} are within what rounding to {report.setup['wire_dtype']} may "
            f"change. This run is not exact and does not show smaller faults: verify without --wire-dtype too."
        )
    elif report.passed:
        console.print(
            f"[bold green]PASS[/]  {_count(report)} agree up to {report.setup['dtype']} rounding."
            f"{smaller_faults_hint(report)}"
        )
    else:
        failed = sum(not check.passed for check in report.checks) + sum(not e.passed for e in report.equalities)
        disagree = f"{failed} of {_count(report)} disagree. " if failed else ""
        console.print(f"[bold red]FAIL[/]  {disagree}{diagnosis(report)}", soft_wrap=False)


def _count(report: Report) -> str:
    return f"{len(report.checks) + len(report.equalities)} comparisons on {len(report.rank_tokens)} ranks"


def _print_title(report: Report, console: Console) -> None:
    setup, criterion = report.setup, report.criterion
    text = "random tokens" if setup["data"] is None else setup["data"]
    ring = f"ring {setup['ring']} x " if setup["ring"] > 1 else ""
    tensor = f" x tensor {setup['tensor']} ({setup['tensor_style']})" if setup.get("tensor", 1) > 1 else ""
    console.print(f"[bold]longspan verify[/]  {setup['model']} ({setup['weights']} weights) on {setup['device']}")
    console.print(
        f"{setup['batch'] * setup['data_degree']} x {setup['tokens']} tokens ({text}), data {setup['data_degree']} x "
        f"{ring}ulysses {setup['ulysses']}{tensor}, {setup['dtype']}, fsdp {'on' if setup['fsdp'] else 'off'}, "
        f"kernel {setup['kernel']}"
    )
    if setup["memory"] != FASTEST.describe():
        console.print(f"memory: {setup['memory']}")
    if checkpoint := setup.get("checkpoint"):
        console.print(
            f"checkpoint of step {checkpoint['step']}: {checkpoint['files']} files, {checkpoint['bytes']:,} bytes, are "
            "as they were written"
        )
    if ring:
        console.print(f"ring layout {setup['layout']}, keys and values by {setup['ring_impl']}")
    if report.lossy:
        console.print(
            f"all-to-all in {setup['wire_dtype']}: LOSSY, {ROUNDINGS} roundings a layer of half a step "
            f"({HALF_STEP[setup['wire_dtype']]:.1e}); the limit has their root sum of squares"
        )
    wide, dtype = setup["reference"], setup["dtype"]
    rounding = " (no wider run shows the rounding)" if wide == dtype else f" + {criterion.factor:g} x unsharded {dtype}"
    console.print(f"error = |run - {wide}| / |{wide}|;  limit = {criterion.floor:.1e}{rounding}")


def _group_table(report: Report) -> Table:
    table = _new_table(compared=23, sharded=-7, unsharded=-9, limit=-7, rank=-4, worst=0, verdict=4)
    for line, checks in report.groups():
        worst = max(checks, key=lambda check: check.severity(check.worst_rank))
        rank = worst.worst_rank
        table.add_row(
            line if len(checks) == 1 else f"{line} ({len(checks)})",
            _figure(worst.sharded[rank]),
            _figure(worst.unsharded[rank]),
            _figure(worst.limit[rank]),
            str(rank),
            _location(report, worst, rank),
            _verdict(all(check.passed for check in checks)),
        )
    for equal in report.equalities:
        where = f"differs on {format_ranks(equal.differing)}" if equal.differing else "equal to the last bit"
        table.add_row(f"{equal.name} on all ranks", "", "", "", "", where, _verdict(equal.passed))
    return table


def _location(report: Report, check: Check, rank: int) -> str:
    if check.name == "logits":
        return f"max abs {_figure(check.max_abs[rank])}"
    if check.name == "logits, worst token":
        row, position = divmod(check.worst_row[rank], report.setup["tokens"])
        return f"sequence {row} position {position}"
    if check.name == "loss":
        return ""
    leaf = [part for part in check.name.removesuffix(".weight").split(".") if not part.isdigit()][-2:]
    short = ".".join(leaf) if leaf[-1] == "bias" else leaf[-1]
    return short if check.layer is None else f"layer {check.layer} {short}"


def _rank_table(report: Report) -> Table:
    replicas = {"data": -4} if report.setup["data_degree"] > 1 else {}
    held = [", ".join(f"{start}-{stop - 1}" for start, stop in runs) or "none" for _, runs in report.rank_tokens]
    tokens = min(max(11, *map(len, held)), 26)
    table = _new_table(
        rank=-4, **replicas, tokens=tokens, loss=-7, logits=-7, max_abs=-7, gradients=-9, worst=0, verdict=4
    )
    checks = {check.name: check for check in report.checks}
    gradients = [check for check in report.checks if check.group not in ("loss", "logits")]
    ranks = range(len(report.rank_tokens))
    failed = [rank for rank in ranks if not report.passed_on(rank)]
    shown = sorted([*failed, *(rank for rank in ranks if rank not in failed)][:_RANKS_SHOWN])
    for rank in shown:
        replica, _ = report.rank_tokens[rank]
        worst = max(gradients, key=lambda check: check.severity(rank))
        table.add_row(
            str(rank),
            *([str(replica)] if replicas else []),
            held[rank],
            _figure(checks["loss"].sharded[rank]),
            _figure(checks["logits"].sharded[rank]),
            _figure(checks["logits"].max_abs[rank]),
            _figure(worst.sharded[rank]),
            _location(report, worst, rank),
            _verdict(rank not in failed),
        )
    if hidden := len(report.rank_tokens) - len(shown):
        more = sum(rank not in shown for rank in failed)
        cells = ["..."] + [""] * len(replicas) + [f"{hidden} more"] + [""] * 4
        table.add_row(*cells, f"{more} of them fail" if more else "", _verdict(not more))
    return table


def _new_table(**widths: int) -> Table:
    """Return a table with these columns and widths: negative for right-justified numbers, 0 for the remaining width."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, width=WIDTH, padding=(0, 1, 0, 0))
    for name, width in widths.items():
        table.add_column(
            "" if name == "verdict" else name.replace("_", " "),
            justify="right" if width < 0 else "left",
            width=abs(width) or None,
            ratio=None if width else 1,
            overflow="fold",
        )
    return table


def _figure(value: float) -> str:
    return "0" if value == 0 else f"{value:.1e}"


def _verdict(passed: bool) -> str:
    return "[green]ok[/]" if passed else "[bold red]FAIL[/]"
