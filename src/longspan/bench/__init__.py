"""`longspan bench`: measure your machines, and compare methods on them.

- `command`: the flags, and the command. `output`: tables, JSON and pictures.
- `meters`: timers, counted bytes and what is measured of a workload, which the scripts in benchmarks/ use too.
- `links`: latency and bandwidth of collectives (`bench link`, `bench collectives`); `hardware`: the planner's file.
- `attention`, `step`: `methods` lists the candidates, `workloads` and `peers` make their workloads, `compare` measures
  them next to formulas and predictions.

Importing this package does not import torch, as the command line builds its help from `BenchConfig`.
"""

from longspan.bench.command import BenchConfig, run, worker

__all__ = ["BenchConfig", "run", "worker"]
