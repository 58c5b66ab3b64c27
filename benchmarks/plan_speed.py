"""How fast the planner plans, and how fast `longspan plan` starts.

    python benchmarks/plan_speed.py

One process, one core. Every legal mesh of 64 GPUs for several models and contexts is costed in full (memory, every
collective, time); the command line is started anew for each round.
"""

from __future__ import annotations

import subprocess
import sys
import time

import common

from longspan.plan import Job, cost, read_hardware, read_model
from longspan.plan.limits import refusal
from longspan.plan.search import meshes

MODELS = ("llama-2-70b", "llama-3.1-8b", "qwen3-235b-a22b", "gemma-3-27b", "deepseek-v3")
CONTEXTS = (8192, 131072, 1 << 20)


def main(repeats: int = 11, name: str = "plan-speed") -> None:
    """Time the planner and its command."""
    env = common.environment(["longspan", "rich", "tyro"])
    rates, starts = [], []
    for _ in range(repeats):
        plans, seconds = cost_everything()
        rates.append(plans / seconds)
        starts.append(start_seconds())
    rows = [
        ["plans in a run", f"{plans:,}"],
        ["plans per second, median", f"{common.median(rates):,.0f}"],
        ["plans per second, least", f"{min(rates):,.0f}"],
        ["`longspan plan` from start to the printed table, median", f"{common.median(starts):.3f} s"],
        ["the same, most", f"{max(starts):.3f} s"],
    ]
    data = {"plans_per_second": rates, "start_seconds": starts}
    common.write_report(name, "The planner's speed", env, common.table(["what", "measured"], rows), data)


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


def start_seconds() -> float:
    command = [sys.executable, "-m", "longspan", "plan", "--model", "llama-3.1-8b", "--grad-checkpointing"]
    start = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - start


if __name__ == "__main__":
    common.command(main, __doc__)
