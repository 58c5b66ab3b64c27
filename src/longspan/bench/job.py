"""The job as a whole: check the input once, start the ranks, measure, write and print."""

from __future__ import annotations

import contextlib
import datetime
import socket
from typing import TYPE_CHECKING, Any

from longspan.bench.config import BenchConfig
from longspan.core.errors import LongspanError
from longspan.core.validation import check_processes
from longspan.ranks import launch
from longspan.ranks.rendezvous import read_job
from longspan.tracing.drawing import check_matplotlib

if TYPE_CHECKING:
    import torch

    from longspan.bench.report import Measurement
    from longspan.ranks.heartbeat import Heartbeat


def run(config: BenchConfig) -> int:
    """Measure on ranks that are started here or by torchrun; the first one writes what is asked for and prints it.

    Returns:
        The exit code 0.

    Raises:
        LongspanError: on bad input.
        longspan.ranks.launch.RankFailed: if a rank dies.
    """
    config.check()
    if config.what != "link":
        return _run_shown(config)
    from longspan.bench.report import as_toml, print_table

    launch.check_nproc(config.ranks, config.nproc, config.mesh)
    if not launch.under_torchrun():
        check_processes(config.ranks, config.mesh)
    if not launch.under_torchrun():  # there `worker` asks the first rank
        config.check_out()
    measurement: Measurement = launch.launch(_bench_rank, config, nproc=config.ranks)
    if launch.is_first_rank():
        print_table(measurement)  # first, so that a disk that is full by now does not take the figures with it
        config.out.parent.mkdir(parents=True, exist_ok=True)
        config.out.write_text(as_toml(measurement))
        print(f"\nwritten to {config.out}")
    return 0


def _run_shown(config: BenchConfig) -> int:
    """`collectives`, `attention` and `step`: measure, print, draw."""
    from longspan.bench.output import show

    ranks = _ranks(config)
    if not launch.under_torchrun():
        check_processes(ranks, f"--nproc {ranks}" if config.compares else config.mesh)
    check_compared(config, ranks)
    # stdout is for what was asked for; libraries greet there.
    with launch.stdout_to_stderr() if config.json else contextlib.nullcontext():
        found = launch.launch(_shown_rank, config, ranks, nproc=ranks)
    if launch.is_first_rank():
        show(config, found)
    return 0


def _ranks(config: BenchConfig) -> int:
    """Ranks of the job."""
    if not config.compares:
        launch.check_nproc(config.ranks, config.nproc, config.mesh)
        return config.ranks
    job = read_job()
    if job is not None:
        launch.check_nproc(job.world_size, config.nproc, "bench")
        return job.world_size
    return config.nproc or 2


def check_compared(config: BenchConfig, ranks: int) -> None:
    """Refuse what `collectives`, `attention` and `step` cannot measure on so many ranks, before any of them starts.

    Raises:
        LongspanError: with the numbers and the way out.
    """
    if ranks < 2:
        raise LongspanError(f"bench {config.what} compares what {ranks} rank sends with nothing; give 2 ranks or more")
    if config.compares:
        from longspan.bench.methods import chosen
        from longspan.bench.shapes import read_config

        config.check_ranks(ranks)
        chosen(config.methods, config.what, ranks)
        read_config(config)
    if config.png is not None:
        check_matplotlib("--png")


def _shown_rank(config: BenchConfig, ranks: int) -> Any:
    with launch.joined(config.timeout, config.start_timeout) as heart:
        found = shown_worker(config, ranks, heart)
    return found if launch.is_first_rank() else None  # the others' is the same, and traces are large


def shown_worker(config: BenchConfig, ranks: int, heart: Heartbeat | None = None) -> Any:
    """Measure `collectives`, `attention` or `step` on this rank; every rank of the job calls it.

    Raises:
        LongspanError: on bad input, on every rank alike.
    """
    import torch

    from longspan.ranks import agreement
    from longspan.ranks.rendezvous import meet

    config.check()
    check_compared(config, ranks)
    peers = meet(config.timeout, config.start_timeout) if heart is None else heart.peers
    settings = agreement.settings(config, leave_out=("json", "png", "trace"))  # only the first rank writes
    agreement.agree(peers, {**settings, **agreement.versions()}, alive=heart is not None)
    peers.init_process_group("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
    said = _when_and_where(config, device, ranks)
    if config.compares:
        from longspan.bench.compare import compare

        return compare(config, ranks, device, said)
    from longspan.bench.collectives import measure_collectives

    return measure_collectives(config, device, said)


def _bench_rank(config: BenchConfig) -> Measurement:
    with launch.joined(config.timeout, config.start_timeout) as heart:
        return worker(config, heart)


def worker(config: BenchConfig, heart: Heartbeat | None = None) -> Measurement:
    """Measure on this rank; every rank of the job calls it and returns the same.

    Raises:
        LongspanError: on bad input, on every rank alike.
    """
    import torch

    from longspan.bench.compute import measure_compute, ranks_on_node
    from longspan.bench.links import measure_links
    from longspan.bench.report import Measurement
    from longspan.comm.mesh import init_mesh
    from longspan.ranks import agreement
    from longspan.ranks.rendezvous import meet

    config.check()
    peers = meet(config.timeout, config.start_timeout) if heart is None else heart.peers
    settings = agreement.settings(config, leave_out=("out", "name"))  # only the first rank writes
    agreement.agree(peers, {**settings, **agreement.versions()}, alive=heart is not None)
    peers.init_process_group("cuda" if torch.cuda.is_available() else "cpu")
    mesh = init_mesh(config.data_degree, config.ring, config.ulysses, config.tensor)
    device = torch.device(mesh.device_type)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    _check_out_together(config)
    links = measure_links(config, mesh, device)
    degrees = {**config.degrees, "fsdp": config.ranks // config.tensor}
    return Measurement(
        name=config.name,
        dtype=config.dtype,
        measured=_when_and_where(config, device),
        ranks_per_node=ranks_on_node(),
        compute=measure_compute(config, device),
        degrees={axis: degrees[axis] for axis in links},
        links=links,
        on_gpu=device.type == "cuda",
    )


def _check_out_together(config: BenchConfig) -> None:
    """The first rank writes the file, so it alone can tell whether that will do; all hear of it."""
    from longspan.checkpoint import Ranks

    Ranks().first(config.check_out)


def _when_and_where(config: BenchConfig, device: torch.device, count: int | None = None) -> str:
    import torch
    import torch.distributed as dist

    backend = dist.get_backend() if dist.is_initialized() else "no collectives"
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    count = count or config.ranks
    ranks = f"{count} rank{'s' if count > 1 else ''}"
    return f"{datetime.date.today()} on {socket.gethostname()}, {kind}, torch {torch.__version__}, {backend}, {ranks}"
