"""Every method on an emulated cluster: within a host and across hosts, next to the planner and other libraries.

    python -m benchmarks.methods_on_cluster            # all of it, in at most 15 minutes (as root, on Linux)
    python -m benchmarks.methods_on_cluster --quick    # a few small parts, to test that it runs

Each part is one command of `longspan bench` on hosts of `benchmarks.cluster`; the report lists the commands, which
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

import argparse
import contextlib
import importlib.util
import io
import json
import re
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import cluster, common

HOSTS, RANKS = 2, 2
BUDGET_S = 15 * 60

# 8 query heads a KV head and an FFN of 3.5 hidden sizes, as Llama-2-70B; 4 ranks need 4 KV heads.
SHAPE = ["--heads", "32", "--kv-heads", "4", "--head-dim", "16", "--ffn", "1792", "--vocab", "512", "--layers", "2"]
LONGSPAN = ["tp", "megatron-sp", "ulysses", "ulysses-overlap", "ring", "usp"]
PEERS = {"deepspeed": "deepspeed", "alst": "deepspeed", "yunchang": "yunchang"}


@dataclass(frozen=True)
class Part:
    """One `longspan bench` on one cluster.

    Attributes:
        name: in the report.
        mbit: rate of the link between 2 hosts; None: one host.
        flags: of `longspan bench`.
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
        return ["python", "-m", "longspan", "bench", *self.flags, "--json"]

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
    """Return a part's `--json`, or the reason why it has no rows."""
    hosts, ranks = part.hosts
    rate = None if part.mbit is None else f"{part.mbit:g}mbit"
    start, out = time.monotonic(), io.StringIO()
    with cluster.hosts(hosts, rate, ranks_per_host=ranks) as net, contextlib.redirect_stdout(out):
        code = cluster.run(net, cluster.words_of(part.words), seconds)
    took = round(time.monotonic() - start, 1)
    head = {"part": part.name, "command": part.command, "seconds": took, "limit": round(seconds, 1)}
    try:
        return {**head, **json.loads(out.getvalue())}
    except json.JSONDecodeError:
        why = "ended, as its share of the time was over" if code == cluster.TIMED_OUT else f"exit code {code}"
        return {**head, "reason": why, "rows": []}


# --- the report


def row_of(part: dict[str, Any], method: str, context: int) -> dict[str, Any] | None:
    found = (r for r in part["rows"] if r["method"] == method and r["context"] == context and "seconds" in r)
    return next(found, None)


def contexts_of(part: dict[str, Any]) -> list[int]:
    return list(dict.fromkeys(row["context"] for row in part["rows"]))


def off(predicted: float, measured: float) -> str:
    """Return the relative error of a prediction."""
    return f"{predicted / measured - 1:+.0%}" if measured else "-"


def table_of(part: dict[str, Any]) -> str:
    header = ["method", "tokens", "forward ms", "backward ms", "both ms", "quartiles", "in flight ms", "exposed ms",
              "transfer ms", "planned comm", "planned both", "sent MB", "formula", "peak MB"]  # fmt: skip
    cells = []
    for row in part["rows"]:
        if "seconds" not in row:
            cells.append([row["method"], str(row["context"]), f"not measured: {row['reason']}", *["-"] * 11])
            continue
        total, predicted, formula = row["seconds"]["total"], row["predicted"], row["formula_bytes"]
        per = 1e3 / row["sequences"]
        expected = None if formula is None else sum(formula.values())
        cells.append([
            row["method"], f"{row['context']:,}", *(f"{row['seconds'][k]['median'] * per:.1f}" for k in
            ("forward", "backward", "total")), f"{total['low'] * per:.1f} - {total['high'] * per:.1f}",
            f"{row['communication_seconds'] * per:.1f}", f"{row['exposed_seconds'] * per:.1f}",
            f"{row['transfer_seconds'] * per:.1f}",
            "-" if predicted is None else off(predicted["communication"], row["transfer_seconds"]),
            "-" if predicted is None else off(predicted["total"], total["median"]),
            f"{row['method_bytes'] / 1e6:.3f}", "-" if expected is None else
            "equal" if expected == row["method_bytes"] else f"{expected / 1e6:.3f}", f"{row['peak_bytes'] / 1e6:.1f}",
        ])  # fmt: skip
    return common.table(header, cells)


def findings(found: dict[str, dict[str, Any]]) -> list[str]:
    """Return a line for each comparison, with its goal."""
    across, within = found.get("step across, 200 Mbit/s"), found.get("step within")
    lines = []
    for part in (across, within):
        for context in contexts_of(part) if part else []:
            tp, ulysses = row_of(part, "tp", context), row_of(part, "ulysses", context)
            if tp and ulysses:
                sent = tp["method_bytes"] / ulysses["method_bytes"]
                planned = sum(tp["formula_bytes"].values()) / sum(ulysses["formula_bytes"].values())
                lines.append(
                    f"- {part['part']}, {context:,} tokens: TP sends {sent:.2f} times Ulysses' bytes (formula "
                    f"{planned:.2f}; 8 GPUs and Llama-2-70B: 14.22) and communicates "
                    f"{tp['communication_seconds'] / ulysses['communication_seconds']:.2f} times as long."
                )
    if across and within:
        for context in contexts_of(across):
            for method in dict.fromkeys(row["method"] for row in across["rows"]):
                far, near = row_of(across, method, context), row_of(within, method, context)
                if far and near:
                    slower = far["seconds"]["total"]["median"] / near["seconds"]["total"]["median"]
                    longer = far["communication_seconds"] / max(near["communication_seconds"], 1e-9)
                    lines.append(
                        f"- {method}, {context:,} tokens: across takes {slower:.2f} times as long as within, its "
                        f"communication {longer:.2f} times."
                    )
    lines += crossover(found.get("short across, 200 Mbit/s")) + placement(found.get("placement, 200 Mbit/s"))
    for part in found.values():
        lines += overlap(part)
    lines += prefetch(found.get("prefetch, 200 Mbit/s")) + predictions(list(found.values()))
    for name, goals in (("200", (0.6, 0.75)), ("100", (0.5, 0.75))):
        lines += peers(found.get(f"peers across, {name} Mbit/s"), *goals)
    return lines + peers(found.get("peers within"), 1.0, 1.0)


def crossover(part: dict[str, Any] | None) -> list[str]:
    if not part:
        return []
    ratios = {}
    for context in contexts_of(part):
        tp, ulysses = row_of(part, "tp", context), row_of(part, "ulysses", context)
        if tp and ulysses:
            ratios[context] = tp["communication_seconds"] / max(ulysses["communication_seconds"], 1e-9)
    if not ratios:
        return []
    text = ", ".join(f"{context} tokens {ratio:.2f}" for context, ratio in ratios.items())
    return [
        "- Short sequences, TP's communication over Ulysses' (with its gathers of weights): "
        f"{text}; above 1 Ulysses wins."
    ]


def placement(part: dict[str, Any] | None) -> list[str]:
    lines = []
    for context in contexts_of(part) if part else []:
        right, wrong = row_of(part, "usp-2x2", context), row_of(part, "usp-2x2-swapped", context)
        if right and wrong:
            ratio = wrong["seconds"]["total"]["median"] / right["seconds"]["total"]["median"]
            lines.append(
                f"- USP 2x2, {context:,} tokens: the all-to-all across and the ring inside take {ratio:.2f} times as "
                "long as the all-to-all inside and the ring across."
            )
    return lines


def overlap(part: dict[str, Any]) -> list[str]:
    """Compare Ulysses whose all-to-all overlaps with the attention with Ulysses without overlap."""
    lines = []
    named = {"ulysses-overlap": "with overlap", "ulysses-default": "by default"}
    for context, method in ((context, method) for context in contexts_of(part) for method in named):
        on, without = row_of(part, method, context), row_of(part, "ulysses", context)
        if on and without:
            ratio = common.paired_ratio(on["rounds"], without["rounds"])
            lines.append(
                f"- {part['part']}, {context:,} tokens: Ulysses {named[method]} takes "
                f"{ratio:.2f} of its time without; exposed are "
                f"{1e3 * on['exposed_seconds']:.0f} ms of {1e3 * on['communication_seconds']:.0f} in flight, "
                f"{1e3 * without['exposed_seconds']:.0f} with all heads at once."
            )
            if part["part"].startswith("covered"):
                left = on["exposed_seconds"] / max(without["exposed_seconds"], 1e-9)
                met = "met" if left <= 0.1 else f"missed by {left - 0.1:.2f}"
                lines.append(f"- {part['part']}: {left:.2f} of what is exposed without overlap; goal 0.1, {met}.")
    return lines


def prefetch(part: dict[str, Any] | None) -> list[str]:
    lines = []
    for context in contexts_of(part) if part else []:
        for method in ("fsdp", "ulysses"):
            on, without = row_of(part, method, context), row_of(part, f"{method}-no-prefetch", context)
            if on and without:
                lines.append(
                    f"- {method}, {context:,} tokens: without prefetch a step takes "
                    f"{without['seconds']['total']['median'] / on['seconds']['total']['median']:.2f} times as long, "
                    f"{1e3 * without['exposed_seconds']:.0f} ms exposed instead of {1e3 * on['exposed_seconds']:.0f}."
                )
    return lines


def predictions(of: list[dict[str, Any]]) -> list[str]:
    """Compare the planner's errors with its goals."""
    lines = []
    for part in of:
        rows = [row for row in part["rows"] if row.get("predicted")]
        for what, goal, measured, predicted in (
            ("communication", 0.15, lambda r: r["transfer_seconds"], lambda r: r["predicted"]["communication"]),
            ("step", 0.20, lambda r: r["seconds"]["total"]["median"], lambda r: r["predicted"]["total"]),
        ):
            errors = [abs(predicted(row) / measured(row) - 1) for row in rows if measured(row)]
            if errors:
                met = sum(error <= goal for error in errors)
                lines.append(
                    f"- {part['part']}: the planner's {what} is off by {statistics.median(errors):.0%} (median), "
                    f"{max(errors):.0%} (worst); within the goal of {goal:.0%} in {met} of {len(errors)}."
                )
    return lines


def peers(part: dict[str, Any] | None, usp_goal: float, ulysses_goal: float) -> list[str]:
    """Compare longspan's time with the better peer's, by the median over rounds of the ratio within a round."""
    lines = []
    for context in contexts_of(part) if part else []:
        rows = {row["method"]: row for row in part["rows"] if row["context"] == context and "seconds" in row}
        others = {name: row for name, row in rows.items() if name.split("-")[0] in PEERS}
        if not others:
            lines.append(f"- {part['part']}: no peer is installed, so nothing is compared.")
            continue
        best = min(others, key=lambda name: others[name]["seconds"]["total"]["median"])
        ulysses_only = {
            name: row for name, row in others.items() if not name.startswith("yunchang") or name.endswith("x1")
        }
        plain_best = min(ulysses_only, key=lambda name: ulysses_only[name]["seconds"]["total"]["median"])
        for name, goal in (("usp-2x2", usp_goal), ("ulysses-overlap", ulysses_goal), ("ulysses", 1.0)):
            if name in rows:
                ratio, plain_ratio = (
                    common.paired_ratio(rows[name]["rounds"], rows[other]["rounds"]) for other in (best, plain_best)
                )
                met = "met" if ratio <= goal else f"missed by {ratio - goal:.2f}"
                lines.append(
                    f"- {part['part']}, {context:,} tokens: {name} takes {ratio:.2f} of the better peer's time "
                    f"({best}); goal {goal:g}, {met}; of the better peer's plain Ulysses ({plain_best}) "
                    f"{plain_ratio:.2f}.{link_alone(rows[name], others[best], part)}"
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


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.methods_on_cluster",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="a few small parts, to see that it runs")
    parser.add_argument("--only", nargs="+", default=[""], help="parts whose names begin with one of these")
    parser.add_argument("--minutes", type=float, default=BUDGET_S / 60, help="for all parts, at most")
    parser.add_argument("--name", default="methods-on-cluster", help="name of the report")
    parser.add_argument("--reports", type=Path, help="its folder, by default benchmarks/reports")
    args = parser.parse_args()
    env = common.environment(["longspan", "torch", "transformers", "deepspeed", "yunchang"])
    env["ranks"] = f"gloo, {HOSTS} hosts x {RANKS} ranks in network namespaces"
    if args.quick:
        args.name += "-quick"
    todo = [part for part in parts(args.quick) if part.name.startswith(tuple(args.only))]
    if not todo:
        parser.error(f"--only {' '.join(args.only)}: there are {', '.join(part.name for part in parts(args.quick))}")
    found: dict[str, dict[str, Any]] = {}
    deadline = time.monotonic() + 60 * args.minutes
    for place, part in enumerate(todo):
        left = deadline - time.monotonic() - 5
        # A part may use what earlier ones have left, but not what later ones need.
        later = sum(each.share for each in todo[place + 1 :]) / sum(each.share for each in todo)
        seconds = max(1.0, left - later * 60 * args.minutes * 0.9)
        print(f"{part.name}: at most {seconds:.0f} s", file=sys.stderr, flush=True)
        found[part.name] = run_part(part, seconds)
    text = report(found)
    print(text)
    common.write_report(args.name, "Every method on an emulated cluster", env, text, found, args.reports)


def report(found: dict[str, dict[str, Any]]) -> str:
    """Return the findings, then every part's table and command."""
    blocks = ["\n".join(["## Findings", "", *findings(found)])]
    for name, part in found.items():
        why = f"Not measured: {part['reason']}.\n\n" if "reason" in part else ""
        shape = f"{part['shape']}, {part['dtype']}; {part['measured']}.\n\n" if "shape" in part else ""
        body = why or f"{shape}{table_of(part)}\n"
        blocks.append(f"## {name}\n\n`{part['command']}` ({part['seconds']:g} s)\n\n{body}")
    blocks.append(
        "Times are medians over rounds of the slowest rank's, per sequence. Transfer is the time of each collective "
        "from the last rank's call to the last rank's end. Planned is the planner's error of that, and of the total "
        "time, with links that the same job measured on each mesh. `ulysses-overlap` uses 4 chunks of heads unless the "
        "command has another number; other methods send all heads at once."
    )
    return "\n\n".join(blocks)


if __name__ == "__main__":
    cluster.exit_on_missing(main)
