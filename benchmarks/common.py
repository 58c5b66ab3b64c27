"""Shared by the scripts in this folder: ranks, counted bytes, reports.

The flags of a script are the arguments of its `main`. It runs from the repository's root: `python -m benchmarks.NAME`.
"""

from __future__ import annotations

import datetime
import gc
import json
import os
import platform
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import tyro
from torch.profiler import ProfilerActivity, profile

from benchmarks.timing import alternate as alternate
from longspan.bench.timing import DTYPES as DTYPES
from longspan.comm.agree import gather_objects
from longspan.ranks import launch
from longspan.ranks.job import join_process_group
from longspan.tracing.record import exported_events
from tests.counting import Sent

REPORTS = Path(__file__).resolve().parent / "reports"
SHARED = ": other programs shared the machine, so times are longer than on an idle one"


def command(main: Callable[..., Any], doc: str | None) -> None:
    """Run a script's `main` with the arguments of the command line; `doc` is the script's docstring."""
    tyro.cli(main, description=doc)


# --- ranks ----------------------------------------------------------------------------------------


def run_ranks(body: Callable[..., Any], world: int, *args: Any, env: dict[str, str] | None = None) -> Any:
    """Run `body(*args)` on `world` new processes joined by gloo, one thread each; return rank 0's value.

    `body` is a top-level function. A rank that raises or dies ends the run. The processes get `env`. Under torchrun,
    run it on this rank of the job instead, and return this rank's value.
    """
    if "RANK" in os.environ:
        return _rank(body, args)
    quiet = {"KINETO_LOG_LEVEL": "99"}  # of the profiler
    with mock.patch.dict(os.environ, {"OMP_NUM_THREADS": "1", **quiet, **(env or {})}):
        return launch.start(_rank, (body, args), world)


def _rank(body: Callable[..., Any], args: Sequence[Any]) -> Any:
    torch.set_num_threads(1)
    if join_process_group("cuda" if torch.cuda.is_available() else "cpu") is None:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    value = body(*args)
    dist.barrier()
    gc.collect()  # a model in a cycle would hold gloo's threads until the interpreter's end, which may abort them
    return value


def device() -> torch.device:
    """Return this rank's device."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def most_sent(log: Sequence[Sent]) -> dict[str, int]:
    """Return the bytes, by collective, of the rank that sends most. Collective."""
    sent: Counter[str] = Counter()
    for each in log:
        sent[each.op] += each.bytes
    return max(gather_objects(dict(sent), dist.group.WORLD), key=lambda of_rank: sum(of_rank.values()))


def memory_rise(run: Callable[[], object]) -> int:
    """Return the peak bytes that `run` allocates on the CPU beyond those allocated before."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler would print a line at each start and stop
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    return peak(exported_events(profiler))


def peak(events: list[dict[str, Any]]) -> int:
    """Return the peak from allocations and frees by address; the profiler's total misses frees by gloo's threads."""
    held: dict[int, int] = {}
    now = most = 0
    for event in sorted((e for e in events if e.get("name") == "[memory]"), key=lambda e: e["ts"]):
        address, size = event["args"]["Addr"], event["args"]["Bytes"]
        now -= held.pop(address, 0)  # a reused address was freed before
        if size > 0:
            held[address] = size
            now += size
            most = max(most, now)
    return most


def relative_error(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return max |a - b| / max |b|, the largest over ranks."""
    a, b = a.detach().double(), b.detach().double()
    worst = ((a - b).abs().max() / b.abs().max().clamp_min(1e-300)).reshape(1)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return float(worst)


def paired_ratio(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the median over rounds of a/b: both ran within seconds, so a slow minute of the machine cancels."""
    return median(x / y for x, y in zip(a, b, strict=True))


# --- reports --------------------------------------------------------------------------------------


def environment(packages: Sequence[str]) -> dict[str, Any]:
    """Return hardware, versions and the command, for the head of a report."""
    from importlib.metadata import PackageNotFoundError, version

    def installed(package: str) -> str:
        try:
            return version(package)
        except PackageNotFoundError:
            return "not installed"

    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=REPORTS, capture_output=True, text=True, check=False
    )
    script = Path(sys.argv[0])
    name = script.parent.name if script.stem == "__main__" else script.stem
    return {
        "date": datetime.date.today().isoformat(),
        "commit": commit.stdout.strip() or "unknown",
        "command": " ".join(["python -m", f"benchmarks.{name}", *sys.argv[1:]]),
        "cpu": models[0].split(":", 1)[1].strip() if models else platform.processor() or "unknown",
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory_gib, 1),
        "load_average_at_start": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "versions": {package: installed(package) for package in packages},
        "ranks": "processes on this machine, gloo over loopback, 1 thread each",
    }


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table with aligned columns."""
    cells = [list(header), *[list(row) for row in rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        return "| " + " | ".join(text.rjust(w) for text, w in zip(row, widths, strict=True)) + " |"

    return "\n".join([line(cells[0]), "|" + "|".join("-" * (w + 1) + ":" for w in widths) + "|", *map(line, cells[1:])])


def write_report(name: str, title: str, env: dict[str, Any], body: str, data: Any, folder: Path | None = None) -> None:
    """Print a report, and write it to `<date>-<name>.md` and `.json`, by default in `reports`."""
    folder = folder or REPORTS
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / f"{env['date']}-{name}"
    versions = ", ".join(f"{k} {v}" for k, v in env["versions"].items())
    head = [
        f"# {title}",
        "",
        f"- date: {env['date']}",
        f"- command: `{env['command']}`, commit {env['commit']}",
        f"- machine: {env['cpu']}, {env['cores']} cores, {env['memory_gib']} GiB; load average at the start"
        f" {env['load_average_at_start']}" + (SHARED if env["load_average_at_start"] > env["cores"] + 1 else ""),
        f"- versions: Python {env['python']}, {versions}",
        f"- ranks: {env['ranks']}",
    ]
    stem.with_suffix(".md").write_text("\n".join([*head, "", body, ""]))
    stem.with_suffix(".json").write_text(
        json.dumps({"environment": env, "results": data}, indent=1, default=str) + "\n"
    )
    print(f"{body}\n\nwritten: {os.path.relpath(stem)}.md and .json", flush=True)
