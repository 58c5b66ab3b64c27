"""Every method on an emulated cluster: within a host and across hosts, next to the planner and other libraries.

    python -m benchmarks.methods_on_cluster            # all of it, in at most 15 minutes (as root, on Linux)
    python -m benchmarks.methods_on_cluster --quick    # a few small parts, to test that it runs

Each part is one command of `benchmarks.methods` on hosts of `benchmarks.cluster`; the report lists the commands, which
repeat a part. There are 4 ranks: on one host ("within"), or on 2 hosts x 2 ranks with a limited link ("across").

| part | measures |
|---|---|
| step | TP, Megatron SP, Ulysses, Ring, USP with 8 query heads per KV head: bytes, TP : Ulysses, across : within |
| short | sequences for which latency decides: from which length on Ulysses is faster than TP |
| placement | USP with the all-to-all inside a host, and swapped |
| prefetch | FSDP with and without |
| peers | attention of 16/4 heads at 200 and 100 Mbit/s and within: longspan, DeepSpeed, ALST, yunchang |
| covered | attention that takes longer than its all-to-all, in small chunks: what stays exposed |
| default | attention with all heads at once, in 4 chunks, and in as many as `SequenceSharding` chooses |

A part that exceeds its share of the time is ended, and the report says so.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import cluster, common
from benchmarks.methods import by_context, tables, tp_over_ulysses

HOSTS, RANKS = 2, 2
BUDGET_S = 15 * 60

# 8 query heads a KV head and an FFN of 3.5 hidden sizes, as Llama-2-70B; 4 ranks need 4 KV heads.
SHAPE = ["--heads", "32", "--kv-heads", "4", "--head-dim", "16", "--ffn", "1792", "--vocab", "512", "--layers", "2"]
LONGSPAN = ["tp", "megatron-sp", "ulysses", "ulysses-overlap", "ring", "usp"]
PEERS = {"deepspeed": "deepspeed", "alst": "deepspeed", "yunchang": "yunchang"}


@dataclass(frozen=True)
class Part:
    """One `benchmarks.methods` on one cluster.

    Attributes:
        name: in the report.
        mbit: rate of the link between 2 hosts; None: one host.
        flags: of `benchmarks.methods`.
        share: of the time, at most.
    """

    name: str
    mbit: float | None
    flags: tuple[str, ...]
    share: float

    @property
    def hosts(self) -> tuple[int, int]:
        """Number of hosts, and ranks per host."""
        return (1, HOSTS * RANKS) if self.mbit is None else (HOSTS, RANKS)

    @property
    def words(self) -> list[str]:
        """Command of a rank."""
        return ["python", "-m", "benchmarks.methods", *self.flags]

    @property
    def command(self) -> str:
        """Command that repeats the part."""
        hosts, ranks = self.hosts
        on = f"--hosts {hosts} --ranks-per-host {ranks} --mbit {self.mbit or 0:g}"
        return f"python -m benchmarks.cluster {on} -- {' '.join(self.words)}"


def parts(quick: bool) -> list[Part]:
    """Return the parts in the order of importance."""
    peers = [name for name, package in PEERS.items() if importlib.util.find_spec(package)]
    rounds = ["--rounds", "2" if quick else "7"]
    step = ["step", "--dtype", "fp32", *SHAPE, *rounds]
    # Every step across hosts gathers weights over the link: seconds each.
    slow = ["step", "--dtype", "fp32", *SHAPE, "--rounds", "2" if quick else "3"]
    long = ["--contexts", *(["256"] if quick else ["512", "2048"])]
    attention = ["attention", "--dtype", "fp32", "--heads", "16", "--kv-heads", "4", "--head-dim", "64", *rounds,
                 "--predict"]  # fmt: skip
    core = ["--contexts", "256" if quick else "2048", "--methods", "ulysses", "ulysses-overlap", "usp",
            "ring", *peers]  # fmt: skip
    fsdp = ["--predict", "--methods", "fsdp", "fsdp-no-prefetch", "ulysses", "ulysses-no-prefetch", "--contexts"]
    short = ["8", "32", "128"]
    covered = ["attention", "--dtype", "fp32", "--heads", "64", "--kv-heads", "4", "--head-dim", "32", "--predict",
               "--rounds", "2" if quick else "3", "--overlap-chunks", "16", "--contexts",
               "256" if quick else "8192"]  # fmt: skip
    every = [
        Part("step across, 200 Mbit/s", 200, (*slow, *long, "--methods", *LONGSPAN, "--predict"), 0.30),
        Part("peers across, 200 Mbit/s", 200, (*attention, *core), 0.12),
        Part("peers across, 100 Mbit/s", 100, (*attention, *core), 0.14),
        Part("peers within", None, (*attention, *core), 0.06),
        Part("step within", None, (*step, *long, "--methods", *LONGSPAN, "--predict"), 0.16),
        Part("short across, 200 Mbit/s", 200, (*slow, "--predict", "--contexts", *short, "--methods", "tp",
                                                 "ulysses"), 0.06),
        Part("placement, 200 Mbit/s", 200, (*attention, "--contexts", "256" if quick else "2048", "--methods", "usp",
                                            "usp-swapped"), 0.06),
        Part("prefetch, 200 Mbit/s", 200, (*step, *fsdp, "256" if quick else "1024"), 0.10),
        Part("covered, 200 Mbit/s", 200, (*covered, "--methods", "ulysses", "ulysses-overlap"), 0.10),
        Part("default, 200 Mbit/s", 200, (*attention[:-1], "--contexts", *(["256"] if quick else ["128", "2048"]),
                                          "--methods", "ulysses", "ulysses-overlap", "ulysses-default"), 0.06),
    ]  # fmt: skip
    return every[:2] + every[5:6] + every[8:] if quick else every


def run_part(part: Part, seconds: float) -> dict[str, Any]:
    """Return a part's results, or the reason why it has no rows."""
    hosts, ranks = part.hosts
    rate = None if part.mbit is None else f"{part.mbit:g}mbit"
    start = time.monotonic()
    with cluster.hosts(hosts, rate, ranks_per_host=ranks) as net, tempfile.TemporaryDirectory() as folder:
        results = Path(folder, "results.json")
        code = cluster.run(net, cluster.words_of([*part.words, "--json", str(results)]), seconds)
        took = round(time.monotonic() - start, 1)
        head = {"part": part.name, "command": part.command, "seconds": took, "limit": round(seconds, 1)}
        if results.exists():
            return {**head, **json.loads(results.read_text())}
        why = "ended, as its share of the time was over" if code == cluster.TIMED_OUT else f"exit code {code}"
        return {**head, "reason": why, "rows": []}


# --- the report


Row = dict[str, Any]
Found = dict[str, dict[str, Any]]


def rows_of(part: dict[str, Any]) -> Iterator[tuple[int, dict[str, Row]]]:
    """Yield each context, and its measured rows by method."""
    for context, rows in by_context(part):
        yield context, {row["method"]: row for row in rows if "seconds" in row}


def total(row: Row) -> float:
    return float(row["seconds"]["total"]["median"])


def ms(row: Row, key: str) -> str:
    return f"{1e3 * row[key]:.0f} ms"


def swapped(wrong: Row, right: Row) -> str:
    return (
        f"USP 2x2 with the all-to-all across and the ring inside takes {total(wrong) / total(right):.2f} times as long "
        "as with the all-to-all inside and the ring across."
    )


def overlapped(on: Row, without: Row) -> str:
    ratio = common.paired_ratio(on["rounds"], without["rounds"])
    left = on["exposed_seconds"] / max(without["exposed_seconds"], 1e-9)
    return (
        f"{on['method']} takes {ratio:.2f} of Ulysses' time with all heads at once; exposed are "
        f"{ms(on, 'exposed_seconds')} of {ms(on, 'communication_seconds')} in flight, {left:.2f} of its."
    )


def not_prefetched(without: Row, on: Row) -> str:
    return (
        f"{on['method']} without prefetch takes {total(without) / total(on):.2f} times as long, "
        f"{ms(without, 'exposed_seconds')} exposed instead of {ms(on, 'exposed_seconds')}."
    )


COMPARED: tuple[tuple[str, str, Callable[[Row, Row], str]], ...] = (
    ("tp", "ulysses", tp_over_ulysses),
    ("usp-2x2-swapped", "usp-2x2", swapped),
    ("ulysses-overlap", "ulysses", overlapped),
    ("ulysses-default", "ulysses", overlapped),
    ("fsdp-no-prefetch", "fsdp", not_prefetched),
    ("ulysses-no-prefetch", "ulysses", not_prefetched),
)
"""Two methods of a part that measured both, and what their rows say."""


def findings(found: Found) -> list[str]:
    """Return a line for each comparison."""
    lines = []
    for name, part in found.items():
        for context, rows in rows_of(part):
            for one, other, say in COMPARED:
                if one in rows and other in rows:
                    lines.append(f"- {name}, {context:,} tokens: {say(rows[one], rows[other])}")
            if name.startswith("peers"):
                lines += [f"- {name}, {context:,} tokens: {line}" for line in peers(part, rows)]
        lines += [f"- {name}: {line}" for line in predictions(part)]
    across, within = found.get("step across, 200 Mbit/s"), found.get("step within")
    for context, far in rows_of(across) if across and within else ():
        near = dict(rows_of(within))[context]  # type: ignore[arg-type]
        for method in far.keys() & near.keys():
            slower = total(far[method]) / total(near[method])
            longer = far[method]["communication_seconds"] / max(near[method]["communication_seconds"], 1e-9)
            lines.append(
                f"- {method}, {context:,} tokens: across takes {slower:.2f} times as long as within, its communication "
                f"{longer:.2f} times."
            )
    return lines


def predictions(part: dict[str, Any]) -> list[str]:
    """Compare the planner's errors with its goals."""
    lines = []
    rows = [row for row in part["rows"] if row.get("predicted")]
    for what, goal, measured, predicted in (
        ("communication", 0.15, lambda r: r["transfer_seconds"], lambda r: r["predicted"]["communication"]),
        ("step", 0.20, total, lambda r: r["predicted"]["total"]),
    ):
        errors = [abs(predicted(row) / measured(row) - 1) for row in rows if measured(row)]
        if errors:
            lines.append(
                f"the planner's {what} is off by {common.median(errors):.0%} (median), {max(errors):.0%} (worst); "
                f"within the goal of {goal:.0%} in {sum(error <= goal for error in errors)} of {len(errors)}."
            )
    return lines


GOALS = {"usp-2x2": 0.6, "ulysses-overlap": 0.75, "ulysses": 1.0}
"""Of the better peer's time, at 200 Mbit/s."""


def peers(part: dict[str, Any], rows: dict[str, Row]) -> list[str]:
    """Compare longspan's time with the better peer's, by the median over rounds of the ratio within a round."""
    others = {name: row for name, row in rows.items() if name.split("-")[0] in PEERS}
    if not others:
        return ["no peer is installed, so nothing is compared."]
    best = min(others, key=lambda name: total(others[name]))
    lines = []
    for name in GOALS.keys() & rows.keys():
        ratio = common.paired_ratio(rows[name]["rounds"], rows[best]["rounds"])
        lines.append(
            f"{name} takes {ratio:.2f} of the better peer's time ({best}; goal {GOALS[name]:g} at 200 Mbit/s)."
            f"{link_alone(rows[name], others[best], part)}"
        )
    return lines


def link_alone(row: dict[str, Any], other: dict[str, Any], part: dict[str, Any]) -> str:
    """Return the link's time for a row's bytes, a lower bound of any schedule; "" within one host."""
    mbit = re.search(r"--mbit (\d+)", part["command"])
    if mbit is None or mbit[1] == "0" or row["formula_bytes"] is None:
        return ""
    ulysses, sent = row["mesh"]["ulysses"], row["formula_bytes"]
    crossing = 0.0
    if ulysses > RANKS:  # the same to each other rank
        crossing += RANKS * sent.get("all_to_all", 0) * (ulysses - RANKS) / (ulysses - 1)
    crossing += min(RANKS, ulysses) * sent.get("p2p", 0)  # ring neighbours on another host
    seconds = crossing * 8 / (float(mbit[1]) * 1e6)
    ratio = seconds / other["seconds"]["total"]["median"]
    return f" The link alone needs {1e3 * seconds:.0f} ms for its bytes, {ratio:.2f} of that peer's time."


def main(
    quick: bool = False, only: tuple[str, ...] = ("",), minutes: float = BUDGET_S / 60,
    name: str = "methods-on-cluster", reports: Path | None = None,
) -> None:  # fmt: skip
    """Measure all parts.

    Args:
        quick: a few small parts, to see that it runs.
        only: parts whose names begin with one of these.
        minutes: for all parts, at most.
        name: of the report.
        reports: its folder, by default benchmarks/reports.
    """
    env = common.environment(["longspan", "torch", "transformers", "deepspeed", "yunchang"])
    env["ranks"] = f"gloo, {HOSTS} hosts x {RANKS} ranks in network namespaces"
    name += "-quick" if quick else ""
    todo = [part for part in parts(quick) if part.name.startswith(only)]
    if not todo:
        raise SystemExit(f"--only {' '.join(only)}: there are {', '.join(part.name for part in parts(quick))}")
    found: dict[str, dict[str, Any]] = {}
    deadline = time.monotonic() + 60 * minutes
    for place, part in enumerate(todo):
        left = deadline - time.monotonic() - 5
        # A part may use what earlier ones have left, but not what later ones need.
        later = sum(each.share for each in todo[place + 1 :]) / sum(each.share for each in todo)
        seconds = max(1.0, left - later * 60 * minutes * 0.9)
        print(f"{part.name}: at most {seconds:.0f} s", file=sys.stderr, flush=True)
        found[part.name] = run_part(part, seconds)
    common.write_report(name, "Every method on an emulated cluster", env, report(found), found, reports)


def report(found: dict[str, dict[str, Any]]) -> str:
    """Return the findings, then every part's table and command."""
    blocks = ["\n".join(["## Findings", "", *findings(found)])]
    for name, part in found.items():
        why = f"Not measured: {part['reason']}.\n\n" if "reason" in part else ""
        body = why or f"{tables(part)}\n"
        blocks.append(f"## {name}\n\n`{part['command']}` ({part['seconds']:g} s)\n\n{body}")
    blocks.append("`ulysses-overlap` uses 4 chunks of heads unless the command has another number.")
    return "\n\n".join(blocks)


if __name__ == "__main__":
    cluster.exit_on_missing(lambda: common.command(main, __doc__))
