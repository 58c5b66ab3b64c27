"""The job that this process is a rank of, as torchrun's or Slurm's environment variables describe it, and its flags.

    srun --ntasks-per-node 8 --gpus-per-node 8 longspan train ...

In a step of `srun`, each task is a rank: `SLURM_PROCID` of `SLURM_STEP_NUM_TASKS`. The rendezvous is on the step's
first host, which runs rank 0, unless `MASTER_ADDR` and `MASTER_PORT` name another place. A batch script outside of
`srun` is no step, so a command in it starts its own ranks. (https://slurm.schedmd.com/srun.html, "OUTPUT ENVIRONMENT
VARIABLES".)
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longspan.core.errors import LongspanError
from longspan.core.validation import LONGEST_WAIT_S, check_counts, check_number

#: torchrun's (and torch.distributed's) description of a job: all four, or this process is no rank of one.
VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
#: In the environment of ranks that longspan's launcher started.
SUPERVISED = "LONGSPAN_SUPERVISED"
#: Default of --start-timeout in seconds: on a busy machine, importing torch and transformers can take minutes.
START_TIMEOUT_S = 600
#: Ports for the steps of Slurm: above the well-known ones, below those that systems assign.
_PORTS = range(15000, 30000)
_FIX = f"start the job by torchrun, which sets them all, or run `unset {' '.join(VARIABLES)}` if there is no such job"
_SLURM_FIX = (
    "set MASTER_ADDR (the host of rank 0) and MASTER_PORT, start the ranks by torchrun, or run `unset SLURM_STEP_ID` "
    "if this is no rank of a job"
)


@dataclass(frozen=True)
class JobVariables:
    """A job, as its variables describe it to one rank; `local_world_size` is 0 if unknown."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    address: str
    port: int

    @property
    def on_one_machine(self) -> bool:
        return self.local_world_size == self.world_size

    @property
    def started_by(self) -> str:
        return "srun" if "SLURM_STEP_ID" in os.environ and "TORCHELASTIC_RUN_ID" not in os.environ else "torchrun"

    def __str__(self) -> str:
        return f"RANK={self.rank}, WORLD_SIZE={self.world_size}, MASTER_ADDR={self.address} and MASTER_PORT={self.port}"


def read_job() -> JobVariables | None:
    """Return the job that the environment describes, or None. In a step of `srun`, set torchrun's variables first."""
    adopt_step()
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        return None
    missing = [name for name in VARIABLES if not os.environ.get(name)]
    if missing:
        given = ", ".join(f"{name}={os.environ[name]}" for name in VARIABLES if os.environ.get(name))
        raise LongspanError(
            f"the environment describes a job in part: it has {given or 'empty variables'}, but no "
            f"{', '.join(missing)}; {_FIX}"
        )
    world_size = _integer("WORLD_SIZE", 1)
    return JobVariables(
        rank=_integer("RANK", 0, world_size - 1),
        world_size=world_size,
        local_rank=_integer("LOCAL_RANK", 0) if os.environ.get("LOCAL_RANK") else 0,
        local_world_size=_integer("LOCAL_WORLD_SIZE", 0) if os.environ.get("LOCAL_WORLD_SIZE") else 0,
        address=os.environ["MASTER_ADDR"],
        port=_integer("MASTER_PORT", 1, 65535),
    )


def adopt_step() -> None:
    """Set torchrun's variables from Slurm's, in the environment, where other libraries look too."""
    environment = os.environ
    if "RANK" in environment or "WORLD_SIZE" in environment or "SLURM_PROCID" not in environment:
        return
    if "SLURM_STEP_ID" not in environment:  # a batch script, where SLURM_PROCID is 0 whatever --ntasks says
        return
    tasks = _integer("SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environment else "SLURM_NTASKS", 1)
    if tasks == 1:
        return
    local_tasks = _local_tasks(tasks)
    environment.update(  # after all checks, as the arguments are evaluated first
        RANK=str(_integer("SLURM_PROCID", 0, tasks - 1)),
        WORLD_SIZE=str(tasks),
        LOCAL_RANK=str(_integer("SLURM_LOCALID", 0, tasks - 1)),
        LOCAL_WORLD_SIZE=str(local_tasks),
        MASTER_ADDR=environment.get("MASTER_ADDR") or ("127.0.0.1" if local_tasks == tasks else _first_host()),
        MASTER_PORT=environment.get("MASTER_PORT") or str(_port()),
    )


def first_host(nodes: str) -> str:
    """Return the first host of a Slurm node list: "gpu003" of "gpu[003-007,12],login1"."""
    first = re.match(r"(?:[^,\[\]]|\[[^\[\]]*\])+(?=,|$)", nodes.strip())
    host = re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first.group()) if first else ""
    if not re.fullmatch(r"[\w.-]+", host):
        raise LongspanError(f"the node list {nodes!r} of Slurm names no first host; {_SLURM_FIX}")
    return host


def _first_host() -> str:
    nodes = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST")
    if not nodes:
        raise LongspanError(
            "the environment describes a step of Slurm, but neither SLURM_STEP_NODELIST nor SLURM_JOB_NODELIST names "
            f"its hosts; {_SLURM_FIX}"
        )
    return first_host(nodes)


def _local_tasks(tasks: int) -> int:
    """Return the step's tasks on this host; 0 if Slurm does not say."""
    text = os.environ.get("SLURM_STEP_TASKS_PER_NODE") or os.environ.get("SLURM_TASKS_PER_NODE") or ""
    counts: list[int] = []  # of "8(x2),4": 8, 8, 4
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            return 0
        counts += [int(match[1])] * int(match[2] or 1)
    if sum(counts) != tasks or ("SLURM_NODEID" not in os.environ and len(counts) > 1):
        return 0
    node = _integer("SLURM_NODEID", 0) if len(counts) > 1 else 0
    return counts[node] if node < len(counts) else 0


def _port() -> int:
    """Return a port that all ranks of the step compute, and that concurrent steps do not share."""
    job = _integer("SLURM_JOB_ID", 0) if "SLURM_JOB_ID" in os.environ else 0
    return _PORTS[(job * 31 + _integer("SLURM_STEP_ID", 0)) % len(_PORTS)]


def _integer(name: str, least: int, most: int | None = None) -> int:
    text = os.environ.get(name, "")
    number = int(text) if text.strip().lstrip("+-").isdecimal() else None
    if number is None or number < least or (most is not None and number > most):
        limits = f"of at least {least}" if most is None else f"from {least} to {most}"
        wrong = f"{name}={text}, which is no integer {limits}" if text else f"no {name}"
        raise LongspanError(f"the environment has {wrong}; {_SLURM_FIX if name.startswith('SLURM') else _FIX}")
    return number


@dataclass(frozen=True, kw_only=True)
class RankFlags:
    """The ranks on this machine, and timeouts."""

    nproc: int | None = None
    """Ranks on this machine. By default as many as the mesh needs."""
    timeout: int | None = None
    """Seconds after which a rank that stopped, hangs or is cut off ends the job and is named. By default 60, with GPUs
    300. Loading, a save or an export may take longer."""
    start_timeout: int = START_TIMEOUT_S
    """Seconds within which all ranks must have started."""

    def check_ranks(self) -> None:
        """Raise on a value out of range."""
        check_counts(self, 1, "nproc")
        if self.timeout is not None:
            check_number("--timeout", self.timeout, 1, LONGEST_WAIT_S)
        check_number("--start-timeout", self.start_timeout, 1, LONGEST_WAIT_S)


def bind_to_node_of(gpu: Any, system: Path = Path("/sys")) -> set[int]:
    """Restrict this thread, and those that it starts, to the CPUs of a GPU's NUMA node; return them.

    A copy between a GPU and memory of another node crosses the link between the sockets, and Linux places memory that
    is pinned on the node of the thread. Change nothing and return an empty set if the node is unknown, there is only
    one, or this process may not use its CPUs (as under `numactl`). `gpu` are torch's properties of the device.
    """
    try:
        address = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
        node = int((system / "bus/pci/devices" / address / "numa_node").read_text())
        listed = (system / f"devices/system/node/node{node}/cpulist").read_text()
        allowed = os.sched_getaffinity(0)
        cpus = allowed & {cpu for part in listed.strip().split(",") for cpu in _range(part)}
        if not cpus or cpus == allowed:
            return set()
        os.sched_setaffinity(0, cpus)
    except (AttributeError, OSError, ValueError):  # not Linux, or no such file: an unknown node is -1
        return set()
    return cpus


def _range(part: str) -> range:
    first, _, last = part.partition("-")
    return range(int(first), int(last or first) + 1)
