"""`longspan bench link`: how fast are the links between your ranks, and the ranks themselves?

Latency and bandwidth of every collective that longspan uses are measured on each axis of the mesh, with all ranks busy
at once, then the speed of one rank's matmul, attention and memory. The planner reads what is written as hardware.

`config` is what can be asked for, `timing` times all ranks at once, `links` and `compute` measure, `fit` turns times
into latency and bandwidth, `report` writes the file and the table. Importing this package does not import torch: the
command line builds its help from `BenchConfig`.
"""

from longspan.bench.config import BenchConfig
from longspan.bench.job import run, worker

__all__ = ["BenchConfig", "run", "worker"]
