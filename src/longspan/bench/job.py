"""The job of `longspan bench`: check the config, start the ranks, measure, print and write."""

from __future__ import annotations

import contextlib
import datetime
import socket
from typing import TYPE_CHECKING, Any

from longspan.bench.config import BenchConfig
from longspan.core.errors import LongspanError, require
from longspan.core.validation import check_processes
from longspan.ranks import launch
from longspan.ranks.job import read_job

if TYPE_CHECKING:
    import torch

    from longspan.bench.hardware_file import MeasuredHardware
    from longspan.ranks.heartbeat import Heartbeat


def run(config: BenchConfig) -> int:
    """Measure on ranks started here or by torchrun; the first rank prints and writes the results.

    Returns:
        The exit code 0.

    Raises:
        LongspanError: on bad input.
        longspan.ranks.launch.RankFailed: if a rank dies.
    """
    config.check()
    ranks = _count_ranks(config)
    if not launch.under_torchrun():
        check_processes(ranks, f"--nproc {ranks}" if config.compares else config.parallel.flags)
        if config.what == "link":
            config.check_out()  # under torchrun, `worker` does this on the first rank
    check_ranks(config, ranks)
    # With --json, stdout has the results alone: libraries print there too.
    with launch.stdout_to_stderr() if config.json else contextlib.nullcontext():
        found = launch.launch(_bench_rank, config, ranks, nproc=ranks)
    if launch.is_first_rank():
        if config.what == "link":
            _write_hardware(config, found)
        else:
            from longspan.bench.output import write_output

            write_output(config, found)
    return 0


def _write_hardware(config: BenchConfig, hardware: MeasuredHardware) -> None:
    from longspan.bench.hardware_file import as_toml, print_table

    print_table(hardware)  # before writing, so that a full disk does not lose the results
    config.out.parent.mkdir(parents=True, exist_ok=True)
    config.out.write_text(as_toml(hardware))
    print(f"\nwritten to {config.out}")


def _count_ranks(config: BenchConfig) -> int:
    """Return the ranks of the job: of the mesh, or for a comparison of torchrun's job or `--nproc`."""
    if not config.compares:
        launch.check_nproc(config.parallel.ranks, config.nproc, config.parallel.flags)
        return config.parallel.ranks
    job = read_job()
    if job is not None:
        launch.check_nproc(job.world_size, config.nproc, "bench")
        return job.world_size
    return config.nproc or 2


def check_ranks(config: BenchConfig, ranks: int) -> None:
    """Raise if the config cannot be measured on this number of ranks.

    Raises:
        LongspanError: with the numbers and a fix.
    """
    if config.what == "link":
        return
    if ranks < 2:
        raise LongspanError(f"bench {config.what} compares what {ranks} rank sends with nothing; give 2 ranks or more")
    if config.compares:
        from longspan.bench.methods import read_config, select

        config.check_ranks(ranks)
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
        The same on every rank: `MeasuredHardware` for `link`, `Collectives` for `collectives`, else a `Comparison`.

    Raises:
        LongspanError: on every rank, for bad input.
    """
    import torch

    from longspan.ranks import agreement
    from longspan.ranks.rendezvous import wait_for_ranks

    config.check()
    check_ranks(config, ranks)
    peers = wait_for_ranks(config.timeout, config.start_timeout) if heartbeat is None else heartbeat.peers
    settings = agreement.settings(config, leave_out=("out", "name", "json", "png", "trace"))  # used by the first rank
    agreement.agree(peers, {**settings, **agreement.versions()}, alive=heartbeat is not None)
    peers.init_process_group("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
    measured = _describe_run(device, ranks)
    if config.what == "link":
        from longspan.bench.hardware_file import measure_hardware
        from longspan.checkpoint import Ranks

        Ranks().first(config.check_out)  # the first rank writes the file; raise on all
        return measure_hardware(config, device, config.name, measured)
    if config.what == "collectives":
        from longspan.bench.collectives import measure_collectives

        return measure_collectives(config, device, measured)
    from longspan.bench.compare import compare

    return compare(config, ranks, device, measured)


def _describe_run(device: torch.device, ranks: int) -> str:
    import torch
    import torch.distributed as dist

    backend = dist.get_backend() if dist.is_initialized() else "no collectives"
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    count = f"{ranks} rank{'s' if ranks > 1 else ''}"
    return f"{datetime.date.today()} on {socket.gethostname()}, {kind}, torch {torch.__version__}, {backend}, {count}"
