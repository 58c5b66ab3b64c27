"""A job step that `srun` has started, described by the variables that torchrun would set.

    srun --ntasks-per-node 8 --gpus-per-node 8 longspan train ...

Each task is a rank. Slurm says which (`SLURM_PROCID`, `SLURM_LOCALID`), of how many, and on which hosts; where the
ranks meet is the step's first host, on which rank 0 runs, unless `MASTER_ADDR` and `MASTER_PORT` say otherwise. In a
batch script itself, outside of `srun`, there is no step: what is started there starts its own ranks.
(https://slurm.schedmd.com/srun.html, "OUTPUT ENVIRONMENT VARIABLES".)
"""

from __future__ import annotations

import os
import re

from longspan.core.errors import LongspanError

#: Ports in which a step looks for its own: above the well-known ones, below those that systems hand out.
_PORTS = range(15000, 30000)


def adopt_step() -> None:
    """Set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT from Slurm's variables.

    In the environment, as torchrun does, because other libraries of the process look there too. Nothing is done where
    RANK or WORLD_SIZE is set already, outside of a step, or in a step of one task.

    Raises:
        LongspanError: if Slurm's variables describe no possible step, naming the variable.
    """
    environment = os.environ
    if "RANK" in environment or "WORLD_SIZE" in environment or "SLURM_PROCID" not in environment:
        return
    if "SLURM_STEP_ID" not in environment:  # a batch script: SLURM_PROCID is 0 there, whatever --ntasks says
        return
    tasks = _number("SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environment else "SLURM_NTASKS", 1)
    if tasks == 1:
        return
    rank = _number("SLURM_PROCID", 0, tasks - 1)
    local_rank, here = _number("SLURM_LOCALID", 0, tasks - 1), _tasks_here(tasks)
    found = {
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(here),
        "MASTER_ADDR": environment.get("MASTER_ADDR") or ("127.0.0.1" if here == tasks else _first_host()),
        "MASTER_PORT": environment.get("MASTER_PORT") or str(_port()),
        "RANK": str(rank),
        "WORLD_SIZE": str(tasks),
    }
    environment.update(found)


def first_host(nodes: str) -> str:
    """The first host of a node list as Slurm writes it: "gpu[003-007,12],login1" is gpu003.

    Raises:
        LongspanError: if it is none.
    """
    first = re.match(r"(?:[^,\[\]]|\[[^\[\]]*\])+(?=,|$)", nodes.strip())
    host = re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first.group()) if first else ""
    if not re.fullmatch(r"[\w.-]+", host):
        raise LongspanError(f"the node list {nodes!r} of Slurm names no first host; {_WAY_OUT}")
    return host


_WAY_OUT = (
    "give MASTER_ADDR (the host of rank 0) and MASTER_PORT, start the ranks by torchrun, or run `unset SLURM_STEP_ID` "
    "if this is no rank of a job"
)


def _first_host() -> str:
    nodes = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST")
    if not nodes:
        raise LongspanError(
            f"the environment describes a step of Slurm, but neither SLURM_STEP_NODELIST nor SLURM_JOB_NODELIST says "
            f"on which hosts; {_WAY_OUT}"
        )
    return first_host(nodes)


def _tasks_here(tasks: int) -> int:
    """Tasks of the step on this host; 0 where Slurm does not say."""
    text = os.environ.get("SLURM_STEP_TASKS_PER_NODE") or os.environ.get("SLURM_TASKS_PER_NODE") or ""
    each: list[int] = []  # "8(x2),4" is 8, 8, 4
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if found is None:
            return 0
        each += [int(found[1])] * int(found[2] or 1)
    node = _number("SLURM_NODEID", 0) if "SLURM_NODEID" in os.environ else 0 if len(each) == 1 else len(each)
    return each[node] if node < len(each) and sum(each) == tasks else 0


def _port() -> int:
    """The same for all ranks of a step, and another for other steps that may run beside it."""
    job = _number("SLURM_JOB_ID", 0) if "SLURM_JOB_ID" in os.environ else 0
    return _PORTS[(job * 31 + _number("SLURM_STEP_ID", 0)) % len(_PORTS)]


def _number(name: str, least: int, most: int | None = None) -> int:
    text = os.environ.get(name, "")
    number = int(text) if text.strip().isdecimal() else None
    if number is None or number < least or (most is not None and number > most):
        limits = f"of at least {least}" if most is None else f"from {least} to {most}"
        there = f"{name}={text}, which is no integer {limits}" if text else f"no {name}"
        raise LongspanError(f"the environment describes a step of Slurm, but has {there}; {_WAY_OUT}")
    return number
