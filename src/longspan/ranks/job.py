"""The job that this process is a rank of: what the environment says of it, and its process group.

`longspan.ranks.launch` starts ranks on one machine: they meet in a file of a private folder (`FOLDER`), so no port is
opened for them. torchrun describes its ranks by `VARIABLES`. In a step of `srun` each task is a rank, and the batch
script names the first host:

    export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1) MASTER_PORT=29500
    srun --ntasks-per-node 8 --gpus-per-node 8 longspan train ...
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

from longspan.core.errors import LongspanError
from longspan.core.formatting import format_ranks
from longspan.core.validation import LONGEST_WAIT_S, check_number

#: torchrun's description of a job: all four, or this process is no rank of one.
VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
#: In the environment of ranks that longspan started: the folder where they meet and report how they ended.
FOLDER = "LONGSPAN_RANKS"
#: Default of --start-timeout in seconds: on a busy machine, importing torch and transformers can take minutes.
START_TIMEOUT_S = 600
#: Default of --timeout in seconds: without and with GPUs.
CPU_TIMEOUT_S, GPU_TIMEOUT_S = 60, 300
#: Timeout in seconds of the collectives of a watched job: while rank 0 exports a model, the others wait for hours.
GROUP_TIMEOUT_S = 24 * 3600
#: Timeout in seconds of gloo's collectives in a job with GPUs, where one host may wait for another to write a model.
HOST_TIMEOUT_S = 2 * 3600


class JobRank(NamedTuple):
    """The place of a rank in its job; `local_world_size` is 0 if unknown."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int


@dataclass(frozen=True)
class Timeouts:
    """How long ranks wait."""

    timeout: int | None = None
    """Seconds after which a rank that stopped, hangs or is cut off ends the job and is named. By default 60, with GPUs
    300. Loading, a save or an export may take longer."""
    start_timeout: int = START_TIMEOUT_S
    """Seconds within which all ranks must have started."""

    def __post_init__(self) -> None:
        if self.timeout is not None:
            check_number("timeout", self.timeout, 1, LONGEST_WAIT_S, whole=True)
        check_number("start_timeout", self.start_timeout, 1, LONGEST_WAIT_S, whole=True)


def read_job() -> JobRank | None:
    """Return this process's place in the job that the environment describes; None if it describes none."""
    _adopt_slurm_step()
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        return None
    needed = VARIABLES[:2] if FOLDER in os.environ else VARIABLES
    given = {name: os.environ.get(name, "") for name in (*needed, "LOCAL_RANK", "LOCAL_WORLD_SIZE")}
    with contextlib.suppress(ValueError):
        rank, world_size, port = int(given["RANK"]), int(given["WORLD_SIZE"]), int(given.get("MASTER_PORT", "1"))
        job = JobRank(rank, world_size, int(given["LOCAL_RANK"] or 0), int(given["LOCAL_WORLD_SIZE"] or 0))
        if 0 <= rank < world_size and 0 < port < 65536 and min(job) >= 0 and all(given[name] for name in needed):
            return job
    described = ", ".join(f"{name}={text}" for name, text in given.items())
    raise LongspanError(
        f"the environment describes no possible job: {described}; RANK must be from 0 to WORLD_SIZE - 1, MASTER_PORT "
        "from 1 to 65535; start the job by torchrun, which sets them all, or run "
        f"`unset {' '.join(VARIABLES)}` if there is no such job"
    )


def _adopt_slurm_step() -> None:
    """Set torchrun's variables from those of a step of `srun`, in the environment, where other libraries look too.

    Slurm describes the same in a batch script, which is no rank; only a step has SLURM_STEP_ID.
    """
    env = os.environ
    tasks = env.get("SLURM_STEP_NUM_TASKS") or env.get("SLURM_NTASKS", "1")
    is_task = tasks != "1" and "SLURM_STEP_ID" in env and "SLURM_PROCID" in env
    if "RANK" in env or "WORLD_SIZE" in env or not is_task:
        return
    if not (env.get("MASTER_ADDR") and env.get("MASTER_PORT")):
        raise LongspanError(
            f"srun started {tasks} tasks, but the environment has no MASTER_ADDR and MASTER_PORT; in the batch script, "
            'run `export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1) MASTER_PORT=29500` '
            "before srun, or start the ranks by torchrun"
        )
    env.update(RANK=env["SLURM_PROCID"], WORLD_SIZE=tasks, LOCAL_RANK=env.get("SLURM_LOCALID", "0"))


# --- the process group


def join_process_group(device_type: str, start_s: float | None = None, timeout_s: float = GROUP_TIMEOUT_S) -> Any:
    """Wait for the other ranks and make torch's default process group; return its store. Collective.

    Return None if there is a group already, or only one rank. With GPUs the group has two backends, NCCL for CUDA
    tensors and gloo for CPU tensors: hosts then wait for each other without aborting an NCCL communicator. Bound to its
    device, NCCL connects at once, and the mesh's groups are split from it.
    """
    import torch
    import torch.distributed as dist

    from longspan.compat.torch_api import give_hosts_time

    job = None if dist.is_initialized() else read_job()
    if job is None or job.world_size == 1:
        return None
    if job.local_world_size == job.world_size:
        use_loopback()
    store = _meet(job, start_s or START_TIMEOUT_S)
    device = None
    if device_type == "cuda":
        device = torch.device("cuda", device_index(job, torch.cuda.device_count()))
        torch.cuda.set_device(device)
        if FOLDER in os.environ:  # torchrun has an option for it
            bind_to_node_of(torch.cuda.get_device_properties(device))
    dist.init_process_group(
        "gloo" if device is None else "cpu:gloo,cuda:nccl",
        store=store,
        rank=job.rank,
        world_size=job.world_size,
        timeout=timedelta(seconds=timeout_s),
        device_id=device,
    )
    if device is not None:
        give_hosts_time(timedelta(seconds=max(timeout_s, HOST_TIMEOUT_S)))
    return store


def _meet(job: JobRank, start_s: float) -> Any:
    """Return the job's store once every rank has connected to it."""
    import torch.distributed as dist

    made: list[Any] = []
    why = ["there is no answer"]

    def connect() -> None:
        try:
            if FOLDER in os.environ:
                path = Path(os.environ[FOLDER], "store")
                made.append(dist.FileStore(str(path), job.world_size))  # type: ignore[attr-defined]
            else:
                made.append(next(dist.rendezvous("env://", timeout=timedelta(seconds=start_s)))[0])  # type: ignore[attr-defined]
        except (RuntimeError, ValueError) as error:
            why[0] = str(error).splitlines()[0]

    # Any server may listen on that port, and torch would wait for its answer forever.
    thread = threading.Thread(target=connect, name="longspan-connect", daemon=True)
    thread.start()
    thread.join(start_s + 5)
    who = f"the {job.world_size} ranks"
    if made:
        store, keys = made[0], [f"arrived/{rank}" for rank in range(job.world_size)]
        store.set(keys[job.rank], "yes")
        try:
            store.wait(keys, timedelta(seconds=start_s))
            return store
        except RuntimeError as error:
            why[0] = str(error).splitlines()[0]
            absent = [rank for rank, key in enumerate(keys) if not store.check([key])]
            who = f"{format_ranks(absent)} of {job.world_size}"
    where = ", ".join(f"{name}={os.environ[name]}" for name in VARIABLES if name in os.environ)
    raise LongspanError(
        f"{who} did not arrive within {start_s:g} s: {why[0]}; the job is {where}. If there is no such job, run `unset "
        f"{' '.join(VARIABLES)}`; if ranks need longer to start, give a longer --start-timeout (init_mesh: timeout=)",
        code="LS103",
    )


def device_index(job: JobRank, gpus: int) -> int:
    """Return the index of this rank's GPU: its local rank, or 0 if it sees only one (`srun --gpus-per-task 1`)."""
    if gpus == 1:
        return 0
    if job.local_rank >= gpus:
        raise LongspanError(
            f"rank {job.rank} is number {job.local_rank + 1} on its machine, where it sees {gpus} GPUs; start at most "
            f"{gpus} ranks there (torchrun --nproc-per-node, srun --ntasks-per-node), or let each see another GPU"
        )
    return job.local_rank


def use_loopback() -> None:
    """Make gloo and NCCL listen on the loopback interface only, unless the user has named another."""
    for name in {name for _, name in socket.if_nameindex()} & {"lo", "lo0"}:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", name)


def bind_to_node_of(gpu: Any, system: Path = Path("/sys")) -> set[int]:
    """Restrict this thread, and those that it starts, to the CPUs of a GPU's NUMA node; return them.

    Linux pins memory on the node of the thread, and a copy from another node crosses the link between the sockets.
    Change nothing if the node is unknown, or the user has chosen other CPUs. `gpu` are torch's properties of it.
    """
    try:
        address = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
        node = int((system / "bus/pci/devices" / address / "numa_node").read_text())
        listed = (system / f"devices/system/node/node{node}/cpulist").read_text()
        ends = [part.partition("-") for part in listed.strip().split(",")]
        allowed = os.sched_getaffinity(0)
        cpus = allowed & {cpu for first, _, last in ends for cpu in range(int(first), int(last or first) + 1)}
        if not cpus or cpus == allowed:
            return set()
        os.sched_setaffinity(0, cpus)
    except (AttributeError, OSError, ValueError):  # not Linux, or no such file: an unknown node is -1
        return set()
    return cpus
