"""The result of `longspan verify`: checks, a hint where to look after a failure, JSON, and the table."""

from __future__ import annotations

import itertools
import json
import math
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from longspan.core.formatting import format_ranks
from longspan.verify.judge import COARSE, OUTPUTS, Check, Criterion, nan_as_inf

SCHEMA = 4


@dataclass(frozen=True)
class Equality:
    """A value that must be bitwise equal on every rank: the loss, and without FSDP all gradients."""

    name: str
    differing: tuple[int, ...]  # from rank 0

    @classmethod
    def of(cls, name: str, per_rank: Sequence[Any]) -> Equality:
        """Compare the values of all ranks with rank 0's; NaN differs even from NaN."""
        return cls(name, tuple(rank for rank, value in enumerate(per_rank) if value != per_rank[0]))

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
    product_error: float = 0.0  # of one fp32 product on each rank, the largest (`judge.product_error`)

    @property
    def passed(self) -> bool:
        """Whether every check and equality holds, and fp32 products are computed in fp32."""
        held = all(check.passed for check in self.checks) and all(equal.passed for equal in self.equalities)
        return held and not self.coarse

    @property
    def ranks(self) -> range:
        return range(len(self.checks[0].sharded))

    @property
    def coarse(self) -> bool:
        """Whether a run in fp32 has coarser products, so that the noise of the unsharded run would hide faults."""
        return bool(self.setup["dtype"] == "fp32" and self.product_error > COARSE)

    @property
    def detects(self) -> float:
        """The smallest relative fault that is detected in whichever tensor it is: the widest limit."""
        return max(map(nan_as_inf, itertools.chain(*(check.limit for check in self.checks))))

    @property
    def exit_code(self) -> int:
        return 0 if self.passed else 1

    def groups(self) -> dict[str, list[Check]]:
        """Return the checks of each row of the table, in the order of the model."""
        rows: dict[str, list[Check]] = {}
        for check in self.checks:
            rows.setdefault(check.name if check.group == "logits" else check.group, []).append(check)
        return rows


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
        ranks = [rank for rank in report.ranks if not logits.passed_on(rank)]
        differs = "the output differs" if logits.name == "output" else "logits differ"
        return f"The forward pass is wrong: {differs} on {format_ranks(ranks)}."
    if "loss" in failed or any(e.name == "loss" and not e.passed for e in report.equalities):
        return "The logits agree and the loss does not: labels, or how the tokens of all ranks are counted."
    groups = list(dict.fromkeys(check.group for check in failed.values()))
    if not groups:
        return "Every value agrees, but ranks hold different gradients: their weights would drift apart."
    where = f": look at the backward pass of {', '.join(groups)}."
    if {*groups} == {check.group for check in report.checks} - {*OUTPUTS}:
        where = ", all gradients do not: labels, or how gradients are summed over the ranks."
    return f"Loss and logits agree{where}{_smaller_faults(report)}"


def _smaller_faults(report: Report) -> str:
    return "" if report.setup["dtype"] == "fp32" else " Smaller faults show with --dtype fp32."


def print_json(report: Report) -> None:
    """Print the report as one JSON object (schema: docs/reference/json.md); values that are not finite are null."""

    def finite(values: Iterable[float]) -> list[float | None]:
        return [value if math.isfinite(value) else None for value in values]

    found = {
        "schema": SCHEMA,
        "passed": report.passed,
        "diagnosis": None if report.passed else diagnosis(report),
        "setup": dict(report.setup),
        "criterion": vars(report.criterion),
        "detects": finite([report.detects])[0],
        "product_error": report.product_error,
        "equal": [{**vars(equal), "passed": equal.passed} for equal in report.equalities],
        "checks": [
            {
                **{key: getattr(check, key) for key in ("name", "group", "layer", "passed")},
                **{key: finite(getattr(check, key)) for key in ("sharded", "unsharded", "limit")},
            }
            for check in report.checks
        ],
    }
    print(json.dumps(found, indent=1, allow_nan=False))


def print_table(report: Report) -> None:
    """Print the report as a table with lines before and after it."""

    def write(text: str) -> None:
        print(textwrap.fill(text, 80, break_on_hyphens=False))

    criterion, wide, dtype = report.criterion, report.setup["reference"], report.setup["dtype"]
    rounding = " (no wider run shows the rounding)" if wide == dtype else f" + {criterion.factor:g} x unsharded {dtype}"
    write("longspan verify: " + ", ".join(_described(name, value) for name, value in report.setup.items() if value))
    write(f"error = |run - {wide}| / |{wide}|;  limit = {criterion.floor:.1e}{rounding}")
    print("", *(line.rstrip() for line in _rows(report)), "", sep="\n")
    compared = f"{len(report.checks) + len(report.equalities)} comparisons on {len(report.ranks)} ranks"
    failed = sum(not check.passed for check in report.checks) + sum(not equal.passed for equal in report.equalities)
    if report.passed:
        write(
            f"PASS  {compared} agree up to {dtype} rounding. A fault above {_figure(report.detects)} in any of them "
            f"would be detected.{_smaller_faults(report)}"
        )
    else:
        write(f"FAIL  {f'{failed} of {compared} disagree. ' if failed else ''}{diagnosis(report)}")


def _described(name: str, value: Any) -> str:
    """Return a setting as text: "ulysses 2", "fsdp", or how many pictures of each kind there are."""
    if isinstance(value, dict):
        return ", ".join(f"{count} {kind}{'s' * (count > 1)}" for kind, count in value.items())
    return name if value is True else f"{name} {value}"


def _rows(report: Report) -> Iterator[str]:
    """Yield the header, and a line for each kind of tensor: the figures of the one closest to its limit."""
    row = "{:22} {:>7} {:>9} {:>7} {:>4}  {:4}  {}".format
    yield row("compared", "sharded", "unsharded", "limit", "rank", "", "worst")
    for kind, checks in report.groups().items():
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
    if check.name == "logits, worst token":
        row, position = divmod(check.worst_row[rank], report.setup["tokens"])
        return f"row {row} token {position}"
    if check.name in OUTPUTS:
        return ""
    leaf = [part for part in check.name.removesuffix(".weight").split(".") if not part.isdigit()][-2:]
    short = ".".join(leaf) if leaf[-1] == "bias" else leaf[-1]
    return short if check.layer is None else f"layer {check.layer} {short}"


def _figure(value: float) -> str:
    return "0" if value == 0 else f"{value:.1e}"
