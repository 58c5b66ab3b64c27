"""The result of `longspan verify`: checks, a hint where to look after a failure, JSON, and the table."""

from __future__ import annotations

import itertools
import json
import math
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

from longspan.core.formatting import format_ranks
from longspan.core.memory import FASTEST
from longspan.verify.judge import COARSE, GROUP_ORDER, HALF_STEP, OUTPUTS, ROUNDINGS, Check, Criterion, nan_as_inf

if TYPE_CHECKING:
    from longspan.core.layout import Span

SCHEMA = 3


@dataclass(frozen=True)
class Equality:
    """A value that must be bitwise equal on every rank: the loss, and without FSDP all gradients."""

    name: str
    differing: tuple[int, ...]  # from rank 0
    values: tuple[str, ...] = ()  # of each rank, as text; empty if it has no short text

    @classmethod
    def of(cls, name: str, per_rank: Sequence[Any], values: Sequence[str] = ()) -> Equality:
        """Compare the values of all ranks with rank 0's; NaN differs even from NaN."""
        return cls(name, tuple(r for r, value in enumerate(per_rank) if value != per_rank[0]), tuple(values))

    @property
    def passed(self) -> bool:
        return not self.differing


@dataclass(frozen=True)
class Report:
    """The result of a verification, the same on every rank."""

    setup: Mapping[str, Any]  # config, device and versions, as in the JSON
    criterion: Criterion
    checks: tuple[Check, ...]
    equalities: tuple[Equality, ...]
    rank_tokens: tuple[tuple[int, tuple[Span, ...]], ...]  # replica, and spans of tokens [start, stop), of each rank
    product_error: float = 0.0  # of one fp32 product on each rank, the largest (`judge.product_error`)

    @property
    def passed(self) -> bool:
        """Whether every check and equality holds, and fp32 products are computed in fp32."""
        held = all(check.passed for check in self.checks) and all(equal.passed for equal in self.equalities)
        return held and not self.coarse

    def passed_on(self, rank: int) -> bool:
        return all(check.passed_on(rank) for check in self.checks) and all(
            rank not in equal.differing for equal in self.equalities
        )

    @property
    def coarse(self) -> bool:
        """Whether a run in fp32 has coarser products, so that the noise of the unsharded run would hide faults."""
        return bool(self.setup["dtype"] == "fp32" and self.product_error > COARSE)

    @property
    def detects(self) -> float:
        """The smallest relative fault that is detected in whichever tensor it is: the widest limit."""
        return max(map(nan_as_inf, itertools.chain(*(check.limit for check in self.checks))))

    @property
    def lossy(self) -> bool:
        """Whether the all-to-all was compressed: passing then does not mean exact."""
        return bool(self.setup.get("wire_dtype", "exact") != "exact")

    @property
    def exit_code(self) -> int:
        return 0 if self.passed else 1

    def groups(self) -> Iterator[tuple[str, list[Check]]]:
        """Yield each row of the table with its checks, in order."""
        rows: dict[str, list[Check]] = {}
        for check in self.checks:
            rows.setdefault(check.name if check.group == "logits" else check.group, []).append(check)
        yield from sorted(rows.items(), key=lambda row: GROUP_ORDER.index(row[1][0].group))


def diagnosis(report: Report) -> str:
    """Return one sentence on where a failing run goes wrong first."""
    if report.coarse:
        return (
            f"Products of the fp32 run are not computed in fp32: one is off by {report.product_error:.1e}, at most "
            f"{COARSE:.1e} is rounding. Faults of this size would not be detected. Look for "
            f"torch.set_float32_matmul_precision, torch.backends.*.fp32_precision or ONEDNN_DEFAULT_FPMATH_MODE."
        )
    failed = {check.name: check for check in report.checks if not check.passed}
    logits = failed.get("logits") or failed.get("logits, worst token") or failed.get("output")
    if logits is not None:
        ranks = [r for r in range(len(report.rank_tokens)) if not logits.passed_on(r)]
        differs = "the output differs" if logits.name == "output" else "logits differ"
        return f"The forward pass is wrong: {differs} on {format_ranks(ranks)}."
    if "loss" in failed or any(e.name == "loss" and not e.passed for e in report.equalities):
        return "The logits agree and the loss does not: labels, or how the tokens of all ranks are counted."
    groups = sorted({check.group for check in failed.values()}, key=GROUP_ORDER.index)
    if groups and groups == sorted({c.group for c in report.checks} - {*OUTPUTS}, key=GROUP_ORDER.index):
        return (
            "Loss and logits agree, all gradients do not: labels, or how gradients are summed over the ranks."
            + smaller_faults_hint(report)
        )
    if groups:
        return f"Loss and logits agree: look at the backward pass of {', '.join(groups)}.{smaller_faults_hint(report)}"
    return "Every value agrees, but ranks hold different gradients: their weights would drift apart."


def smaller_faults_hint(report: Report) -> str:
    """Return a hint to verify in fp32, unless this run did."""
    return "" if report.setup["dtype"] == "fp32" else " Smaller faults show with --dtype fp32."


def print_json(report: Report, file: IO[str] | None = None) -> None:
    """Print the report as one JSON object (schema: docs/reference/json.md), by default to stdout."""
    print(json.dumps(as_dict(report), indent=1, allow_nan=False), file=file)


def as_dict(report: Report) -> dict[str, Any]:
    """Return the report in the schema of docs/reference/json.md; values that are not finite become None."""
    return {
        "schema": SCHEMA,
        "passed": report.passed,
        "diagnosis": None if report.passed else diagnosis(report),
        "setup": dict(report.setup),
        "criterion": {"factor": report.criterion.factor, "floor": report.criterion.floor},
        "detects": report.detects if math.isfinite(report.detects) else None,
        "product_error": report.product_error,
        "ranks": [
            {"rank": rank, "replica": replica, "runs": [list(x) for x in runs], "passed": report.passed_on(rank)}
            for rank, (replica, runs) in enumerate(report.rank_tokens)
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
                **{
                    key: [value if math.isfinite(value) else None for value in getattr(check, key)]
                    for key in ("sharded", "unsharded", "limit", "max_abs")
                },
            }
            for check in report.checks
        ],
    }


def print_table(report: Report, file: IO[str] | None = None) -> None:
    """Print the report as a table with lines before and after it, by default to stdout."""

    def write(text: str = "") -> None:
        print(textwrap.fill(text, 80, break_on_hyphens=False), file=file)

    _print_title(report, write)
    write()
    for line in _rows(report):
        print(line.rstrip(), file=file)
    write()
    if report.passed and report.lossy:
        write(
            f"LOSSY  {_count(report)} are within what rounding to {report.setup['wire_dtype']} may change. This run is "
            "not exact and does not show smaller faults: verify without --wire-dtype too."
        )
    elif report.passed:
        write(
            f"PASS  {_count(report)} agree up to {report.setup['dtype']} rounding. A fault above "
            f"{_figure(report.detects)} in any of them would be detected.{smaller_faults_hint(report)}"
        )
    else:
        failed = sum(not check.passed for check in report.checks) + sum(not e.passed for e in report.equalities)
        disagree = f"{failed} of {_count(report)} disagree. " if failed else ""
        write(f"FAIL  {disagree}{diagnosis(report)}")


def _count(report: Report) -> str:
    return f"{len(report.checks) + len(report.equalities)} comparisons on {len(report.rank_tokens)} ranks"


def _print_title(report: Report, write: Callable[[str], None]) -> None:
    setup, criterion = report.setup, report.criterion
    text = "random tokens" if setup["text"] is None else setup["text"]
    for kind, count in setup.get("pictures", {}).items():
        text += f", {count} {kind}{'s' * (count > 1)}"
    ring = f"ring {setup['ring']} x " if setup["ring"] > 1 else ""
    tensor = f" x tensor {setup['tensor']} ({setup['tensor_style']})" if setup.get("tensor", 1) > 1 else ""
    if setup.get("experts", 1) != 1:
        tensor += f", experts {setup['experts']}"
    write(f"longspan verify  {setup['model']} ({setup['weights']} weights) on {setup['device']}")
    write(
        f"{setup['batch'] * setup['data']} x {setup['tokens']} tokens ({text}), data {setup['data']} x "
        f"{ring}ulysses {setup['ulysses']}{tensor}, {setup['dtype']}, fsdp {'on' if setup['fsdp'] else 'off'}, "
        f"kernel {setup['kernel']}"
    )
    if setup["memory"] != FASTEST.describe():
        write(f"memory: {setup['memory']}")
    if ring:
        write(f"ring layout {setup['layout']}, keys and values by {setup['ring_impl']}")
    if report.lossy:
        write(
            f"all-to-all in {setup['wire_dtype']}: LOSSY, {ROUNDINGS} roundings a layer of half a step "
            f"({HALF_STEP[setup['wire_dtype']]:.1e}); the limit has their root sum of squares"
        )
    wide, dtype = setup["reference"], setup["dtype"]
    rounding = " (no wider run shows the rounding)" if wide == dtype else f" + {criterion.factor:g} x unsharded {dtype}"
    write(f"error = |run - {wide}| / |{wide}|;  limit = {criterion.floor:.1e}{rounding}")


def _rows(report: Report) -> Iterator[str]:
    """Yield the header, and a line for each kind of tensor: the figures of the one closest to its limit."""
    row = "{:22} {:>7} {:>9} {:>7} {:>4}  {:4}  {}".format
    yield row("compared", "sharded", "unsharded", "limit", "rank", "", "worst")
    for kind, checks in report.groups():
        worst = max(checks, key=lambda check: check.severity(check.worst_rank))
        rank = worst.worst_rank
        figures = (_figure(of_ranks[rank]) for of_ranks in (worst.sharded, worst.unsharded, worst.limit))
        verdict = "ok" if all(check.passed for check in checks) else "FAIL"
        name = kind if len(checks) == 1 else f"{kind} ({len(checks)})"
        yield row(name, *figures, rank, verdict, _location(report, worst, rank))
    for equal in report.equalities:
        where = f"differs on {format_ranks(equal.differing)}" if equal.differing else "equal to the last bit"
        yield f"{equal.name + ' on all ranks':22} {where:30}  {'FAIL' if equal.differing else 'ok'}"


def _location(report: Report, check: Check, rank: int) -> str:
    if check.name in ("logits", "output"):
        return f"max abs {_figure(check.max_abs[rank])}"
    if check.name == "logits, worst token":
        row, position = divmod(check.worst_row[rank], report.setup["tokens"])
        return f"row {row} token {position}"
    if check.name == "loss":
        return ""
    leaf = [part for part in check.name.removesuffix(".weight").split(".") if not part.isdigit()][-2:]
    short = ".".join(leaf) if leaf[-1] == "bias" else leaf[-1]
    return short if check.layer is None else f"layer {check.layer} {short}"


def _figure(value: float) -> str:
    return "0" if value == 0 else f"{value:.1e}"
