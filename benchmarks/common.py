"""Shared by the scripts in this folder: ranks on this machine and reports. Timers are `longspan.bench.meters`'s."""

from __future__ import annotations

import datetime
import gc
import json
import os
import platform
import socket
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from longspan.bench.meters import alternate as alternate

REPORTS = Path(__file__).resolve().parent / "reports"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
Timer = Callable[[], object]
Series = dict[str, list[float]]  # seconds of each candidate, by round


# --- ranks ----------------------------------------------------------------------------------------


def run_ranks(body: Callable[..., Any], world: int, *args: Any, env: dict[str, str] | None = None) -> Any:
    """Run `body(*args)` on `world` new processes joined by gloo, one thread each; return rank 0's value.

    `body` must be a top-level function that returns JSON. A rank that raises ends the run. The processes get `env`.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # silence the profiler
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        before = dict(os.environ)
        os.environ.update(env or {})
        try:
            mp.spawn(_rank_main, (world, _free_port(), str(answer), body, args), nprocs=world, join=True)
        finally:
            os.environ.clear()
            os.environ.update(before)
        return json.loads(answer.read_text())


def _rank_main(rank: int, world: int, port: int, answer: str, body: Callable[..., Any], args: Sequence[Any]) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
    )  # fmt: skip
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world, timeout=datetime.timedelta(minutes=30))
    value = body(*args)
    if rank == 0:
        Path(answer).write_text(json.dumps(value))
    dist.barrier()
    gc.collect()  # a model in a cycle would hold gloo's threads until the interpreter's end, which may abort them
    dist.destroy_process_group()


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


# --- timing ---------------------------------------------------------------------------------------


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def paired_ratio(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the median over rounds of a/b: both ran within seconds, so a slow minute of the machine cancels."""
    return median([x / y for x, y in zip(a, b, strict=True)])


def relative_error(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return max |a - b| / max |b|, the largest over ranks."""
    a, b = a.detach().double(), b.detach().double()
    worst = ((a - b).abs().max() / b.abs().max().clamp_min(1e-300)).reshape(1)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return float(worst)


# --- reports --------------------------------------------------------------------------------------


def environment(packages: Sequence[str]) -> dict[str, Any]:
    """Return hardware, versions and the command, for the head of a report."""
    from importlib.metadata import PackageNotFoundError, version

    def installed(name: str) -> str:
        try:
            return version(name)
        except PackageNotFoundError:
            return "not installed"

    cpu = platform.processor() or "unknown"
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.split(":", 1)[1].strip()
            break
    return {
        "date": datetime.date.today().isoformat(),
        "command": " ".join(["python", os.path.relpath(sys.argv[0]), *sys.argv[1:]]),
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory_gib, 1),
        "load_average_at_start": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "versions": {name: installed(name) for name in packages},
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
    """Write `<date>-<name>.md` and `.json`, by default to `reports`, and print their path."""
    folder = folder or REPORTS
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / f"{env['date']}-{name}"
    versions = ", ".join(f"{k} {v}" for k, v in env["versions"].items())
    lines = [
        f"# {title}",
        "",
        f"- date: {env['date']}",
        f"- command: `{env['command']}`",
        f"- machine: {env['cpu']}, {env['cores']} cores, {env['memory_gib']} GiB; load average at the start"
        f" {env['load_average_at_start']}",
        f"- versions: Python {env['python']}, {versions}",
        f"- ranks: {env['ranks']}",
        "",
        body,
        "",
    ]
    stem.with_suffix(".md").write_text("\n".join(lines))
    stem.with_suffix(".json").write_text(
        json.dumps({"environment": env, "results": data}, indent=1, default=str) + "\n"
    )
    print(f"\nwritten: {os.path.relpath(stem)}.md and .json")
