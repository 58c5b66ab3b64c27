"""`longspan bench`: measure your machines, and compare methods on them.

- `config`, `job`: the flags, and the command.
- `timing`, `measure`, `bytes_sent`: timers, traces, memory and counted bytes, used by the scripts in benchmarks/ too.
- `link`: `links` and `compute` measure, `fit` fits latency and bandwidth, `hardware_file` writes the planner's file.
- `collectives`: every collective at every size.
- `attention`, `step`: `methods` lists the candidates, `workloads`, `step` and `peers` make their workloads, `compare`
  measures them next to formulas and, with `predict`, predictions; `output` and `drawing` print and draw.

Importing this package does not import torch, as the command line builds its help from `BenchConfig`.
"""

from longspan.bench.config import BenchConfig
from longspan.bench.job import run, worker

__all__ = ["BenchConfig", "run", "worker"]
