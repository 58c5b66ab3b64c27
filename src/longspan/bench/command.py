"""`longspan bench`: its flags; check them, start the ranks, measure, print and write."""

from __future__ import annotations

import datetime
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from longspan.core.errors import LongspanError
from longspan.core.parallel import Axes
from longspan.core.validation import LARGEST_COUNT, check_number, check_output
from longspan.ranks import launch
from longspan.ranks.facts import settings
from longspan.ranks.job import Timeouts

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from longspan.ranks.watch import Watch

ELEMENT_BYTES = 4
"""Collectives are measured in fp32, as gradients are summed in it; other transfers do not depend on the dtype."""


@dataclass(frozen=True)
class BenchConfig:
    """Measure your machines, and write a hardware file for the planner.

    Measured are the latency and bandwidth of the collectives on each axis of a mesh, and the matmul, attention and
    memory speed of one rank while all are busy. The command starts its ranks; under torchrun (several machines) it
    joins them.
    """

    sizes: tuple[int, ...] = (64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20)
    """Bytes of a collective's whole tensor (64k, 1M): the input of a sum or all-to-all, the result of a gather. Rounded
    up to a multiple of the ranks."""
    rounds: int = 10
    """Measurements of everything; the median counts."""
    dtype: Literal["bf16", "fp32"] = "bf16"
    """dtype of matmul and attention. Collectives are measured in fp32."""
    out: Path = Path("runs/link.toml")
    """The file to write, with its name as that of the hardware. With several machines, the first one writes it."""
    parallel: Axes = field(default_factory=Axes)
    timeouts: Timeouts = field(default_factory=Timeouts)

    def check(self) -> None:
        """Raise on invalid values, the same on every rank."""
        check_number("--rounds", self.rounds, 1, LARGEST_COUNT)
        for size in self.sizes:
            check_number("--sizes", size, 1, LARGEST_COUNT)
        ranks = self.parallel.ranks
        grain = ELEMENT_BYTES * ranks
        different = len({-(-size // grain) for size in self.sizes})
        if ranks > 1 and different < 3:
            given = " ".join(map(str, self.sizes))
            raise LongspanError(
                f"--sizes {given} gives {different} different sizes, rounded up to a multiple of {grain} bytes for "
                f"{ranks} ranks; to fit a latency and a bandwidth takes 3, such as --sizes 64k 1M 16M"
            )


def run(config: BenchConfig) -> int:
    """Measure on ranks started here or by torchrun; the first rank prints and writes the results.

    Returns:
        The exit code 0.
    """
    from longspan.bench.hardware import as_toml, print_hardware

    found = launch.run(config, _check_out, _measure)
    if launch.is_first_rank():
        print_hardware(found)  # before writing, so that a full disk does not lose the results
        config.out.parent.mkdir(parents=True, exist_ok=True)
        config.out.write_text(as_toml(found))
        print(f"\nwritten to {config.out}")
    return 0


def worker(config: BenchConfig) -> dict[str, Any]:
    """Return the hardware file's content, the same on every rank; every rank of the job calls it."""
    config.check()
    found: dict[str, Any] = launch.run_rank(config, _check_out, _measure)
    return found


def _check_out(config: BenchConfig) -> BenchConfig:
    """Raise if the first rank, which writes it, cannot write the file."""
    if launch.is_first_rank():
        check_output("--out", config.out, example="link.toml")
    return config


def _measure(opened: Callable[[], BenchConfig], watch: Watch) -> dict[str, Any]:
    import torch

    from longspan.bench.hardware import measure_hardware
    from longspan.comm.agree import open_together

    # The first rank alone uses `out`.
    config = open_together(opened, lambda config: settings(config, leave_out=("out",)))
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
    return measure_hardware(config, device, config.out.stem, describe_run(device, config.parallel.ranks))


def describe_run(device: torch.device, ranks: int) -> str:
    """Return the date, machine, versions and ranks."""
    import torch
    import torch.distributed as dist

    backend = dist.get_backend() if dist.is_initialized() else "no collectives"
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    count = f"{ranks} rank{'s' if ranks > 1 else ''}"
    return f"{datetime.date.today()} on {socket.gethostname()}, {kind}, torch {torch.__version__}, {backend}, {count}"
