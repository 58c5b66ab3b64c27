"""The job of `longspan bench`: check the config, start the ranks, measure, print and write."""

from __future__ import annotations

import contextlib
import datetime
import socket
from typing import TYPE_CHECKING, Any

from longspan.bench.config import BenchConfig
from longspan.core.errors import LongspanError, require
from longspan.ranks import launch
from longspan.ranks.job import read_job

if TYPE_CHECKING:
    import torch

    from longspan.ranks.heartbeat import Heartbeat


def run(config: BenchConfig) -> int:
    """Measure on ranks started here or by torchrun; the first rank prints and writes the results.

    Returns:
        The exit code 0.
    """
    ranks = _count_ranks(config)
    mesh = f"--nproc {ranks}" if config.compares else config.parallel.flags
    launch.open_first(config, lambda _: check_ranks(config, ranks), ranks, mesh)
    # With --json, stdout has the results alone: libraries print there too.
    with launch.stdout_to_stderr() if config.json else contextlib.nullcontext():
        found = launch.launch(_bench_rank, config, ranks, nproc=ranks)
    if launch.is_first_rank():
        from longspan.bench.output import write_output

        write_output(config, found)
    return 0


def _count_ranks(config: BenchConfig) -> int:
    """Return the ranks of the job: of the mesh, or for a comparison of torchrun's job or `--nproc`."""
    if not config.compares:
        return config.parallel.ranks
    job = read_job()
    return job.world_size if job is not None else config.nproc or 2


def check_ranks(config: BenchConfig, ranks: int) -> None:
    """Raise if the config cannot be measured on this number of ranks, or on the first rank if its results cannot be
    written.
    """
    if config.what == "link":
        if launch.is_first_rank():
            config.check_out()
        return
    if ranks < 2:
        raise LongspanError(f"bench {config.what} compares what {ranks} rank sends with nothing; give 2 ranks or more")
    if config.compares:
        from longspan.bench.methods import read_config, select

        config.check_contexts(ranks)
        select(config.methods, config.what, ranks)
        read_config(config)
    if config.png is not None:
        require("--png", "matplotlib")


def _bench_rank(config: BenchConfig, ranks: int) -> Any:
    with launch.joined(config.timeout, config.start_timeout) as heartbeat:
        found = worker(config, ranks, heartbeat)
    return found if launch.is_first_rank() else None  # all ranks have the same, and traces are large


def worker(config: BenchConfig, ranks: int, heartbeat: Heartbeat | None = None) -> Any:
    """Measure on this rank; every rank of the job calls it.

    Returns:
        The same on every rank: `MeasuredHardware` for `link`, "measured" and "rows" for `collectives`, else a
        `Comparison`.
    """
    import torch

    from longspan.ranks import agreement

    config.check()
    # What the first rank alone uses may differ.
    settings = agreement.settings(config, leave_out=("out", "name", "json", "png", "trace"))
    agreement.open_together(
        heartbeat or launch.unwatched(config), lambda: check_ranks(config, ranks), lambda _: settings
    )
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
    measured = _describe_run(device, ranks)
    if config.what == "link":
        from longspan.bench.hardware import measure_hardware

        return measure_hardware(config, device, config.name, measured)
    if config.what == "collectives":
        from longspan.bench.links import measure_collectives

        return {"measured": measured, "rows": measure_collectives(config, device)}
    from longspan.bench.compare import compare

    return compare(config, ranks, device, measured)


def _describe_run(device: torch.device, ranks: int) -> str:
    import torch
    import torch.distributed as dist

    backend = dist.get_backend() if dist.is_initialized() else "no collectives"
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    count = f"{ranks} rank{'s' if ranks > 1 else ''}"
    return f"{datetime.date.today()} on {socket.gethostname()}, {kind}, torch {torch.__version__}, {backend}, {count}"
