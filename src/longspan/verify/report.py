"""What `longspan verify` prints: a table for people, JSON for programs, and where to look when it fails."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

from longspan.core.memory import FASTEST
from longspan.verify.compare import GROUP_ORDER, HALF_STEP, ROUNDINGS, SHARPNESS, Check, Criterion, unsharp

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from longspan.core.layout import Span

SCHEMA = 2
WIDTH = 100
_RANKS_SHOWN = 16


@dataclass(frozen=True)
class Equality:
    """Something that must be the same bit for bit on every rank.

    Attributes:
        name: "loss", or "gradients" (without FSDP, where every rank holds them whole).
        differing: the ranks that differ from rank 0.
        values: what each rank has, as text; empty for what has no short text.
    """

    name: str
    differing: tuple[int, ...]
    values: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether no rank differs."""
        return not self.differing


def equality(name: str, per_rank: Sequence[Any], values: Sequence[str] = ()) -> Equality:
    """Compare `per_rank` values with rank 0's; NaN differs from everything, itself included."""
    return Equality(name, tuple(r for r, value in enumerate(per_rank) if value != per_rank[0]), tuple(values))


@dataclass(frozen=True)
class Report:
    """What was found; the same on every rank.

    Attributes:
        setup: what was run, on what and by which versions, as in the JSON.
        criterion: when an error is a fault.
        checks: every tensor compared, on every rank.
        equalities: what must be equal on every rank.
        places: per rank its replica, and the runs of tokens [start, stop) that it holds: one, two with zigzag, none
            where it has padding alone.
    """

    setup: Mapping[str, Any]
    criterion: Criterion
    checks: tuple[Check, ...]
    equalities: tuple[Equality, ...]
    places: tuple[tuple[int, tuple[Span, ...]], ...]

    @property
    def passed(self) -> bool:
        """Whether every check and every equality holds, and the checks are sharp enough to say so."""
        held = all(check.passed for check in self.checks) and all(equal.passed for equal in self.equalities)
        return held and self.unsharp is None

    @property
    def unsharp(self) -> float | None:
        """In fp32, the typical limit where it is wider than the faults that must be seen; None where it is not."""
        return unsharp(self.checks) if self.setup["dtype"] == "fp32" and not self.lossy else None

    @property
    def lossy(self) -> bool:
        """Whether the exchange was compressed: then passing does not mean exact."""
        return bool(self.setup.get("wire_dtype", "exact") != "exact")

    @property
    def exit_code(self) -> int:
        """0 if it passed, 1 if not."""
        return 0 if self.passed else 1

    def groups(self) -> Iterator[tuple[str, list[Check]]]:
        """The checks of each line of the table, in its order; each token's check has a line of its own."""
        lines: dict[str, list[Check]] = {}
        for check in self.checks:
            lines.setdefault(check.name if check.group == "logits" else check.group, []).append(check)
        yield from sorted(lines.items(), key=lambda line: GROUP_ORDER.index(line[1][0].group))


# ---- For people.


def print_table(report: Report, file: IO[str] | None = None) -> None:
    """Print the report in at most 100 columns, to stdout if no `file` is given."""
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
            f"change. This run is not exact, and smaller faults are not seen: verify without --wire-dtype too."
        )
    elif report.passed:
        console.print(
            f"[bold green]PASS[/]  {_count(report)} agree up to {report.setup['dtype']} rounding.{_sharper(report)}"
        )
    else:
        failed = sum(not check.passed for check in report.checks) + sum(not e.passed for e in report.equalities)
        disagree = f"{failed} of {_count(report)} disagree. " if failed else ""
        console.print(f"[bold red]FAIL[/]  {disagree}{diagnosis(report)}", soft_wrap=False)


def _count(report: Report) -> str:
    return f"{len(report.checks) + len(report.equalities)} comparisons on {len(report.places)} ranks"


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
    if setup["memory"] != FASTEST.described():
        console.print(f"memory: {setup['memory']}")
    if found := setup.get("checkpoint"):
        console.print(
            f"checkpoint of step {found['step']}: {found['files']} files, {found['bytes']:,} bytes, are as they were "
            "written"
        )
    if ring:
        console.print(f"blocks of the ring {setup['layout']}, keys and values by {setup['ring_impl']}")
    if report.lossy:
        console.print(
            f"exchange {setup['wire_dtype']}: LOSSY, {ROUNDINGS} roundings a layer of half a step "
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
            _place(report, worst, rank),
            _verdict(all(check.passed for check in checks)),
        )
    for equal in report.equalities:
        where = f"differs on {_ranks(equal.differing)}" if equal.differing else "equal to the last bit"
        table.add_row(f"{equal.name} on all ranks", "", "", "", "", where, _verdict(equal.passed))
    return table


def _place(report: Report, check: Check, rank: int) -> str:
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
    held = [", ".join(f"{start}-{stop - 1}" for start, stop in runs) or "none" for _, runs in report.places]
    tokens = min(max(11, *map(len, held)), 26)
    table = _new_table(
        rank=-4, **replicas, tokens=tokens, loss=-7, logits=-7, max_abs=-7, gradients=-9, worst=0, verdict=4
    )
    checks = {check.name: check for check in report.checks}
    gradients = [check for check in report.checks if check.group not in ("loss", "logits")]
    ranks = range(len(report.places))
    failed = [rank for rank in ranks if not _rank_passed(report, rank)]
    shown = sorted([*failed, *(rank for rank in ranks if rank not in failed)][:_RANKS_SHOWN])
    for rank in shown:
        replica, _ = report.places[rank]
        worst = max(gradients, key=lambda check: check.severity(rank))
        table.add_row(
            str(rank),
            *([str(replica)] if replicas else []),
            held[rank],
            _figure(checks["loss"].sharded[rank]),
            _figure(checks["logits"].sharded[rank]),
            _figure(checks["logits"].max_abs[rank]),
            _figure(worst.sharded[rank]),
            _place(report, worst, rank),
            _verdict(rank not in failed),
        )
    if hidden := len(report.places) - len(shown):
        more = sum(rank not in shown for rank in failed)
        cells = ["..."] + [""] * len(replicas) + [f"{hidden} more"] + [""] * 4
        table.add_row(*cells, f"{more} of them fail" if more else "", _verdict(not more))
    return table


def _rank_passed(report: Report, rank: int) -> bool:
    return all(c.passed_on(rank) for c in report.checks) and all(rank not in e.differing for e in report.equalities)


def _new_table(**widths: int) -> Table:
    """A table with these columns: the width of each, negative for figures (flush right), 0 for what is left."""
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


def diagnosis(report: Report) -> str:
    """One sentence on where a failing run goes wrong first, from what fails and what does not."""
    if report.unsharp is not None:
        return (
            f"The unsharded fp32 run is itself so far from the wider one that a fault of {SHARPNESS:g} would not be "
            f"seen (limit {report.unsharp:.1e}): its products are not computed in fp32. Look for "
            f"torch.set_float32_matmul_precision, torch.backends.*.fp32_precision or ONEDNN_DEFAULT_FPMATH_MODE."
        )
    failed = {check.name: check for check in report.checks if not check.passed}
    logits = failed.get("logits") or failed.get("logits, worst token")
    if logits is not None:
        ranks = [r for r in range(len(report.places)) if not logits.passed_on(r)]
        return f"The forward pass is wrong: logits differ on {_ranks(ranks)}."
    if "loss" in failed or any(e.name == "loss" and not e.passed for e in report.equalities):
        return "The logits agree and the loss does not: labels, or how the tokens of all ranks are counted."
    groups = sorted({check.group for check in failed.values()}, key=GROUP_ORDER.index)
    if groups and groups == sorted({c.group for c in report.checks} - {"loss", "logits"}, key=GROUP_ORDER.index):
        return (
            "Loss and logits agree, all gradients do not: labels, or how gradients are summed over the ranks."
            + _sharper(report)
        )
    if groups:
        return f"Loss and logits agree: look at the backward pass of {', '.join(groups)}.{_sharper(report)}"
    return "Every value agrees, but ranks hold different gradients: their weights would drift apart."


def _sharper(report: Report) -> str:
    return "" if report.setup["dtype"] == "fp32" else " Smaller faults show with --dtype fp32."


def _ranks(ranks: Sequence[int]) -> str:
    """`[0, 1, 2, 5]` as `ranks 0-2, 5`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    named = [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(named)}"


# ---- For programs.


def print_json(report: Report, file: IO[str] | None = None) -> None:
    """Print the report as one JSON object (schema: docs/verify.md), to stdout if no `file` is given."""
    print(json.dumps(as_dict(report), indent=1, allow_nan=False), file=file)


def as_dict(report: Report) -> dict[str, Any]:
    """The report in the schema of docs/verify.md; a value that is not finite becomes None."""
    return {
        "schema": SCHEMA,
        "passed": report.passed,
        "diagnosis": None if report.passed else diagnosis(report),
        "setup": dict(report.setup),
        "criterion": {"factor": report.criterion.factor, "floor": report.criterion.floor},
        "ranks": [
            {
                "rank": rank,
                "replica": replica,
                "runs": [list(run) for run in runs],
                "passed": _rank_passed(report, rank),
            }
            for rank, (replica, runs) in enumerate(report.places)
        ],
        "equal": [
            {"name": e.name, "passed": e.passed, "differing_ranks": list(e.differing), "values": list(e.values)}
            for e in report.equalities
        ],
        "checks": [
            {
                "name": check.name,
                "group": check.group,
                "layer": check.layer,
                "passed": check.passed,
                "sharded": _finite(check.sharded),
                "unsharded": _finite(check.unsharded),
                "limit": _finite(check.limit),
                "max_abs": _finite(check.max_abs),
            }
            for check in report.checks
        ],
    }


def _finite(values: Sequence[float]) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values]
