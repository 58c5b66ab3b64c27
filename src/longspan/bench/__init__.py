"""`longspan bench`: measure the links between ranks and the speed of one rank, and write the planner's hardware file.

- `command`: the flags, and the command.
- `links`: latency and bandwidth of collectives. `hardware`: the speed of a rank, the file and the table.
- `timing`: timers for work that all ranks run together.

Importing this package does not import torch, as the command line builds its help from `BenchConfig`.
"""

from longspan.bench.command import BenchConfig, run, worker

__all__ = ["BenchConfig", "run", "worker"]
