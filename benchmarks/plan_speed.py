"""How fast the planner plans, and how fast commands start that need no torch.

    python benchmarks/plan_speed.py

One process, one core. Every legal mesh of 64 GPUs for several models and contexts is costed in full (memory, every
collective, time). Each command starts anew in each round; CPU time is next to the clock, as it depends less on other
load. `import torch` is what every start would cost with torch.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

import common

from longspan.plan import Job, cost, read_hardware, read_model
from longspan.plan.limits import refusal
from longspan.plan.search import meshes

MODELS = ("llama-2-70b", "llama-3.1-8b", "qwen3-235b-a22b", "gemma-3-27b", "deepseek-v3")
CONTEXTS = (8192, 131072, 1 << 20)


STARTS = {
    "`import longspan`": ["-c", "import longspan"],
    "`longspan --help`": ["-m", "longspan", "--help"],
    "`longspan train --help`": ["-m", "longspan", "train", "--help"],
    "`longspan plan`, the whole table": ["-m", "longspan", "plan", "--model", "llama-3.1-8b", "--grad-checkpointing"],
    "`python -c pass`": ["-c", "pass"],
    "`import torch`": ["-c", "import torch"],
}


def main(repeats: int = 11, name: str = "plan-speed") -> None:
    """Time the planner, and the start of commands."""
    env = common.environment(["longspan", "rich", "tyro", "torch"])
    rates, starts = [], {what: list[tuple[float, float]]() for what in STARTS}
    for _ in range(repeats):
        plans, seconds = cost_everything()
        rates.append(plans / seconds)
        for what, arguments in STARTS.items():
            starts[what].append(start_seconds(arguments))
    planned = [
        ["plans in a run", f"{plans:,}"],
        ["plans per second, median", f"{common.median(rates):,.0f}"],
        ["plans per second, least", f"{min(rates):,.0f}"],
    ]
    started = [
        [what, *(f"{common.median(column):.3f}" for column in zip(*times, strict=True))]
        for what, times in starts.items()
    ]
    tables = [
        common.table(["what", "measured"], planned),
        common.table(["from start to end", "seconds, median", "CPU seconds, median"], started),
    ]
    data = {"plans_per_second": rates, "start_and_cpu_seconds": starts}
    common.write_report(name, "The planner's speed, and the start of commands", env, "\n\n".join(tables), data)


def cost_everything() -> tuple[int, float]:
    hardware = read_hardware("h100")
    models = [read_model(name) for name in MODELS]
    count, start = 0, time.perf_counter()
    for model in models:
        for context in CONTEXTS:
            job = Job(context=context, batch=8)
            for mesh in meshes(64):
                if refusal(model, job, mesh) is None:
                    cost(model, job, mesh, hardware)
                    count += 1
    return count, time.perf_counter() - start


def start_seconds(arguments: list[str]) -> tuple[float, float]:
    """Return the seconds, and the CPU seconds, of a new Python with these arguments."""
    start, before = time.perf_counter(), os.times()
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
    seconds, after = time.perf_counter() - start, os.times()
    return seconds, sum(after[2:4]) - sum(before[2:4])


if __name__ == "__main__":
    common.command(main, __doc__)
