"""The result of `longspan verify`: checks, JSON, and a hint where to look after a failure."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

from longspan.core.formatting import format_ranks
from longspan.verify.judge import GROUP_ORDER, SHARPNESS, Check, Criterion, wide_limit

if TYPE_CHECKING:
    from longspan.core.layout import Span

SCHEMA = 2


@dataclass(frozen=True)
class Equality:
    """A value that must be bitwise equal on every rank.

    Attributes:
        name: "loss", or "gradients" (without FSDP, where every rank holds all of them).
        differing: ranks that differ from rank 0.
        values: the value of each rank as text; empty if it has no short text.
    """

    name: str
    differing: tuple[int, ...]
    values: tuple[str, ...] = ()

    @classmethod
    def of(cls, name: str, per_rank: Sequence[Any], values: Sequence[str] = ()) -> Equality:
        """Compare the values of all ranks with rank 0's; NaN differs even from NaN."""
        return cls(name, tuple(r for r, value in enumerate(per_rank) if value != per_rank[0]), tuple(values))

    @property
    def passed(self) -> bool:
        return not self.differing


@dataclass(frozen=True)
class Report:
    """The result of a verification, the same on every rank.

    Attributes:
        setup: config, device and versions, as in the JSON.
        criterion: the limit of an error.
        checks: every compared tensor.
        equalities: values that must be equal on every rank.
        rank_tokens: replica and spans of tokens `[start, stop)` of each rank: one span, two with zigzag, none if the
            rank holds padding alone.
    """

    setup: Mapping[str, Any]
    criterion: Criterion
    checks: tuple[Check, ...]
    equalities: tuple[Equality, ...]
    rank_tokens: tuple[tuple[int, tuple[Span, ...]], ...]

    @property
    def passed(self) -> bool:
        """Whether every check and equality holds, with limits tight enough to detect faults."""
        held = all(check.passed for check in self.checks) and all(equal.passed for equal in self.equalities)
        return held and self.wide_limit is None

    def passed_on(self, rank: int) -> bool:
        return all(check.passed_on(rank) for check in self.checks) and all(
            rank not in equal.differing for equal in self.equalities
        )

    @property
    def wide_limit(self) -> float | None:
        """In fp32, the median limit if it is too wide to detect a fault of `SHARPNESS`; else None."""
        return wide_limit(self.checks) if self.setup["dtype"] == "fp32" and not self.lossy else None

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
    if report.wide_limit is not None:
        return (
            f"The unsharded fp32 run is itself so far from the wider one that a fault of {SHARPNESS:g} would not be "
            f"detected (limit {report.wide_limit:.1e}): its products are not computed in fp32. Look for "
            f"torch.set_float32_matmul_precision, torch.backends.*.fp32_precision or ONEDNN_DEFAULT_FPMATH_MODE."
        )
    failed = {check.name: check for check in report.checks if not check.passed}
    logits = failed.get("logits") or failed.get("logits, worst token")
    if logits is not None:
        ranks = [r for r in range(len(report.rank_tokens)) if not logits.passed_on(r)]
        return f"The forward pass is wrong: logits differ on {format_ranks(ranks)}."
    if "loss" in failed or any(e.name == "loss" and not e.passed for e in report.equalities):
        return "The logits agree and the loss does not: labels, or how the tokens of all ranks are counted."
    groups = sorted({check.group for check in failed.values()}, key=GROUP_ORDER.index)
    if groups and groups == sorted({c.group for c in report.checks} - {"loss", "logits"}, key=GROUP_ORDER.index):
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
        "ranks": [
            {
                "rank": rank,
                "replica": replica,
                "runs": [list(run) for run in runs],
                "passed": report.passed_on(rank),
            }
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
