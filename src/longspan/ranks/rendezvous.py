"""How the ranks of a job find one another, before any process group: torchrun's variables, the store, who is there.

Whatever can keep ranks from meeting (no such job, a rank that never comes, a port in use) is said here, with the
variables and the way out, within a time-out. What is exchanged later over the same store is text, never pickled.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import socket
import threading
import time
import uuid
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from longspan.core.errors import LongspanError
from longspan.core.rank_differences import format_ranks
from longspan.ranks.slurm import adopt_step

if TYPE_CHECKING:
    from collections.abc import Callable

#: torchrun's (and torch.distributed's) description of a job: all four, or this process is no rank of one.
VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
#: Default of --timeout in seconds: without and with GPUs.
CPU_TIMEOUT_S, GPU_TIMEOUT_S = 60, 300
#: Default of --start-timeout in seconds: on a busy machine importing torch and transformers alone can take minutes.
START_TIMEOUT_S = 600
#: Seconds until a collective of the whole job gives up. Not what finds a rank that is gone (the heartbeat does):
#: while a large model is exported, the other ranks wait for hours.
GROUP_TIMEOUT_S = 24 * 3600
#: Seconds until a wait of one host for another gives up where there are GPUs: one writes a model, say.
HOST_TIMEOUT_S = 2 * 3600
#: Under this key of the store a rank leaves why the job ends, for the process that holds the store.
LAST_WORD = "longspan/last-word"

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Job:
    """A job as torchrun's variables, or Slurm's, describe it to one of its ranks.

    `ranks_here` is 0 where they do not say.
    """

    rank: int
    world_size: int
    local_rank: int
    ranks_here: int
    address: str
    port: int

    @property
    def on_one_machine(self) -> bool:
        """Whether all ranks are known to run here."""
        return self.ranks_here == self.world_size

    @property
    def started_by(self) -> str:
        """What started the ranks."""
        return "srun" if "SLURM_STEP_ID" in os.environ and "TORCHELASTIC_RUN_ID" not in os.environ else "torchrun"

    def __str__(self) -> str:
        return f"RANK={self.rank}, WORLD_SIZE={self.world_size}, MASTER_ADDR={self.address} and MASTER_PORT={self.port}"


def read_job() -> Job | None:
    """The job that the environment describes, or None if it describes none.

    Of a step that `srun` has started, torchrun's variables are set first (`longspan.ranks.slurm`).

    Raises:
        LongspanError: if it describes one in part, or one that cannot be, naming the variable.
    """
    adopt_step()
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        return None
    missing = [name for name in VARIABLES if not os.environ.get(name)]
    if missing:
        there = ", ".join(f"{name}={os.environ[name]}" for name in VARIABLES if os.environ.get(name))
        raise LongspanError(
            f"the environment describes a job in part: it has {there or 'empty variables'}, but no "
            f"{', '.join(missing)}; {_way_out()}"
        )
    world_size = _integer("WORLD_SIZE", 1, None)
    return Job(
        rank=_integer("RANK", 0, world_size - 1),
        world_size=world_size,
        local_rank=_integer("LOCAL_RANK", 0, None, "0"),
        ranks_here=_integer("LOCAL_WORLD_SIZE", 0, None, "0"),
        address=os.environ["MASTER_ADDR"],
        port=_integer("MASTER_PORT", 1, 65535),
    )


def _integer(name: str, least: int, most: int | None, default: str | None = None) -> int:
    text = os.environ.get(name) or default or ""
    number = int(text) if text.strip().lstrip("+-").isdecimal() else None
    if number is None or number < least or (most is not None and number > most):
        limits = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise LongspanError(f"the environment has {name}={text}, which is no integer {limits}; {_way_out()}")
    return number


def _way_out() -> str:
    return (
        f"start the job by torchrun, which sets them all, or run `unset {' '.join(VARIABLES)}` if there is no such job"
    )


def default_timeout() -> int:
    """Seconds after which a rank that is not heard of counts as lost, where nothing else was asked for."""
    import torch

    return GPU_TIMEOUT_S if torch.cuda.is_available() else CPU_TIMEOUT_S


class Peers:
    """The ranks of a job that have met, and what they can tell one another without any process group.

    Attributes:
        rank: this rank.
        world_size: how many there are.
        timeout_s: seconds after which a rank that is not heard of counts as lost.
        job: the job in the environment; None alone, or where a process group was there before.
    """

    def __init__(
        self, rank: int, world_size: int, timeout_s: float, store: Any = None, session: str = "", job: Job | None = None
    ) -> None:
        self.rank, self.world_size, self.timeout_s, self.job = rank, world_size, timeout_s, job
        self._store, self._session = store, session
        self._rounds = 0

    @property
    def alone(self) -> bool:
        """Whether there is nobody else."""
        return self._store is None

    def another_connection(self) -> Peers:
        """The same, over a connection of its own: for another thread, which must not wait behind this one."""
        return Peers(self.rank, self.world_size, self.timeout_s, self._store.clone(), self._session, self.job)

    def say(self, key: str, text: str) -> None:
        """Tell all ranks."""
        self._store.set(f"{self._session}/{key}", text)

    def hear(self, key: str) -> str | None:
        """What was said, or None if nothing was yet. Does not wait."""
        name = f"{self._session}/{key}"
        return self._store.get(name).decode() if self._store.check([name]) else None

    def hear_all(self, keys: list[str]) -> list[str]:
        """What was said under each of the keys, all of which are known to be there."""
        return [text.decode() for text in self._store.multi_get([f"{self._session}/{key}" for key in keys])]

    def leave_word(self, text: str) -> None:
        """Tell whoever holds the store why the job ends."""
        self._store.set(LAST_WORD, text)

    def silent(self, key: str) -> list[int]:
        """The ranks that have not said `key/RANK`."""
        return [rank for rank in range(self.world_size) if not self._store.check([f"{self._session}/{key}/{rank}"])]

    def next_round(self) -> int:
        """A number that no exchange had before; alike on all ranks, which make the same exchanges."""
        self._rounds += 1
        return self._rounds

    def init_process_group(self, device_type: str, timeout_s: float = GROUP_TIMEOUT_S) -> None:
        """Make torch's default process group of these ranks, unless there is one.

        With GPUs it serves both devices, NCCL those on a GPU and gloo those on the host: what hosts say to one another,
        or wait for, then needs no GPU, and aborts no NCCL communicator. Bound to its device, NCCL connects at once, and
        the groups of a mesh are split from that.

        Args:
            device_type: "cpu" or "cuda".
            timeout_s: seconds until a collective gives up.

        Raises:
            LongspanError: if the machine has fewer GPUs than ranks.
        """
        import torch
        import torch.distributed as dist

        from longspan.compat.torch_api import give_hosts_time

        if self.alone or dist.is_initialized():
            return
        job = self.job
        assert job is not None
        if job.on_one_machine:
            use_loopback()
        device = None
        if device_type == "cuda":
            device = torch.device("cuda", device_index(job, torch.cuda.device_count()))
            torch.cuda.set_device(device)
        dist.init_process_group(
            "gloo" if device is None else "cpu:gloo,cuda:nccl",
            store=dist.PrefixStore(f"{self._session}/groups", self._store),  # type: ignore[attr-defined]
            rank=self.rank,
            world_size=self.world_size,
            timeout=timedelta(seconds=timeout_s),
            device_id=device,
        )
        if device is not None:  # what a host does for the others to wait for may take longer than a collective should
            give_hosts_time(timedelta(seconds=max(timeout_s, HOST_TIMEOUT_S)))


def device_index(job: Job, gpus: int) -> int:
    """Which of the GPUs that this process sees is its own: the one with its place among the ranks of the machine, or
    the only one, where the launcher has bound each rank to its own (`srun --gpus-per-task 1`).

    Raises:
        LongspanError: if there are several, but not so many.
    """
    if gpus == 1:
        return 0
    if job.local_rank >= gpus:
        raise LongspanError(
            f"rank {job.rank} is number {job.local_rank + 1} on its machine, where it sees {gpus} GPUs; start at most "
            f"{gpus} ranks there ({_per_machine(job)}), or show each rank one GPU of its own"
        )
    return job.local_rank


def _per_machine(job: Job) -> str:
    return "srun --ntasks-per-node" if job.started_by == "srun" else "torchrun --nproc-per-node"


def use_loopback() -> None:
    """Have gloo and NCCL listen on the loopback interface alone, unless the user has named another."""
    for name in {name for _, name in socket.if_nameindex()} & {"lo", "lo0"}:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", name)


def meet(timeout_s: float | None = None, start_s: float | None = None) -> Peers:
    """Wait until every rank of the job is there.

    The job is the default process group's, if there is one, else the environment's.

    Args:
        timeout_s: of the `Peers`: when a rank that has arrived counts as lost.
        start_s: how long to wait for ranks that start; by default `START_TIMEOUT_S`.

    Raises:
        LongspanError: within about `start_s` seconds, naming the ranks that did not come, or the variables that
            describe a job nobody runs.
    """
    import torch.distributed as dist

    from longspan.compat.torch_api import default_store

    timeout_s, start_s = timeout_s or default_timeout(), start_s or START_TIMEOUT_S
    if dist.is_initialized():
        rank, world, job = dist.get_rank(), dist.get_world_size(), None
        store = default_store() if world > 1 else None
    else:
        job = read_job()
        rank, world = (job.rank, job.world_size) if job else (0, 1)
        store = _connect(job, start_s) if job and world > 1 else None
    if store is None:
        return Peers(rank, world, timeout_s, job=job)
    try:
        session = _gather(store, rank, world, start_s, job)
    except RuntimeError as error:  # of the store's connection
        raise LongspanError(f"the job's store is gone, so the rank that holds it has ended: {error}") from error
    return Peers(rank, world, timeout_s, store, session, job)


def _connect(job: Job, timeout_s: float) -> Any:
    """The job's store. Under torchrun its agent holds it; else rank 0 does."""
    import torch.distributed as dist

    held_elsewhere = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    options: dict[str, Any] = {"is_master": False}
    if job.rank == 0 and not held_elsewhere:
        listening = _listen(job).detach()
        options = {"is_master": True, "wait_for_workers": False, "master_listen_fd": listening}
    else:
        _wait_until_listening(job, timeout_s)
    # What listens there may be anything; torch would wait for its answer without end.
    made: list[Any] = []

    def connect() -> None:
        with contextlib.suppress(RuntimeError, ValueError):
            limit = timedelta(seconds=timeout_s)
            made.append(dist.TCPStore(job.address, job.port, timeout=limit, **options))  # type: ignore[attr-defined]

    thread = threading.Thread(target=connect, name="longspan-connect", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if not made:
        raise _no_such_job(job, timeout_s, "what listens there is not the store of a job")
    return made[0]


def _listen(job: Job) -> socket.socket:
    """A socket on the interface of MASTER_ADDR alone; torch's own store would listen on all of them."""
    refused: OSError | None = None
    try:
        found = socket.getaddrinfo(job.address, job.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise LongspanError(f"MASTER_ADDR={job.address} is no address: {error}; {_way_out()}") from error
    here = job.on_one_machine or job.address in ("localhost", "::1") or job.address.startswith("127.")
    for family, _, _, _, address in found:
        if not here and ipaddress.ip_address(address[0]).is_loopback:
            continue  # many machines know their own name as 127.0.1.1, where no other one finds them
        try:
            return socket.create_server(address[:2], family=family, backlog=max(128, job.world_size))
        except OSError as error:
            refused = error
    try:  # this machine does not know the address by which the others find it, as in a container
        server = socket.create_server(("", job.port), backlog=max(128, job.world_size))
    except OSError:
        raise LongspanError(
            f"rank 0 cannot listen on MASTER_ADDR={job.address}, MASTER_PORT={job.port}: {refused}; give a port that "
            "is free there"
        ) from refused
    _log.warning("MASTER_ADDR=%s is no interface of this machine: the store listens on all of them", job.address)
    return server


def _wait_until_listening(job: Job, timeout_s: float) -> None:
    """Wait for the store's port; torch's own attempts would print a C++ trace for each."""
    deadline = time.monotonic() + timeout_s
    while True:
        left_s = deadline - time.monotonic()
        try:
            socket.create_connection((job.address, job.port), timeout=max(0.1, left_s)).close()
            return
        except OSError as error:
            if left_s <= 0:
                raise _no_such_job(job, timeout_s, f"nobody answers there: {error}") from error
        time.sleep(0.1)


def _no_such_job(job: Job, timeout_s: float, reason: str) -> LongspanError:
    return LongspanError(
        f"no connection to the job of {job} within {timeout_s:g} s, {reason}; if there is no such job, run `unset "
        f"{' '.join(VARIABLES)}`; if there is, see that rank 0 was started and that a firewall lets "
        f"{job.address}:{job.port} through, or wait longer with --start-timeout"
    )


def _gather(store: Any, rank: int, world: int, timeout_s: float, job: Job | None) -> str:
    """Wait for all ranks; returns the prefix under which these ranks, and no others, say what they say.

    A store may outlive a job that was restarted, so what is found there may be old: each rank greets with a word of its
    own, and rank 0 answers that very word.
    """
    greeting, session = uuid.uuid4().hex, f"longspan/{uuid.uuid4().hex}"
    deadline = time.monotonic() + timeout_s
    store.set(f"longspan/hello/{rank}", greeting)
    if rank == 0:
        absent = _welcome(store, world, session, deadline)
        if not absent:
            store.set(f"{session}/met", "yes")
            return session
        store.set(f"{session}/absent", "yes")
        time.sleep(0.5)  # others hear it before this rank ends, and with it the store
    else:
        answered = poll(lambda: store.check([f"longspan/welcome/{greeting}"]), deadline)
        absent = [0]
        if answered:
            session = str(store.get(f"longspan/welcome/{greeting}").decode())
            store.set(f"{session}/here/{rank}", "yes")
            poll(lambda: store.check([f"{session}/met"]) or store.check([f"{session}/absent"]), deadline)
            if store.check([f"{session}/met"]):
                return session
            absent = [other for other in range(1, world) if not store.check([f"{session}/here/{other}"])] or [0]
    job_said = f"; the job is {job}, and if there is no such job, run `unset {' '.join(VARIABLES)}`" if job else ""
    raise LongspanError(
        f"{format_ranks(absent)} of {world} did not arrive within {timeout_s:g} s{job_said}; if the ranks need longer "
        "to start, give a longer --start-timeout (init_mesh: timeout=)"
    )


def _welcome(store: Any, world: int, session: str, deadline: float) -> list[int]:
    """Rank 0 answers the others' greetings; returns the ranks that did not come before the deadline."""
    absent, answered = list(range(1, world)), dict.fromkeys(range(world), b"")

    def all_here() -> bool:
        for other in list(absent):
            key = f"longspan/hello/{other}"
            if store.check([key]) and (greeting := store.get(key)) != answered[other]:
                store.set(f"longspan/welcome/{greeting.decode()}", session)
                answered[other] = greeting
            if store.check([f"{session}/here/{other}"]):
                absent.remove(other)
        return not absent

    poll(all_here, deadline)
    twice = [other for other in range(1, world) if other not in absent and _changed(store, other, answered[other])]
    if twice:
        raise LongspanError(f"two processes have RANK={twice[0]}; every rank of a job needs a RANK of its own")
    return absent


def _changed(store: Any, rank: int, greeting: bytes) -> bool:
    found: bytes = store.get(f"longspan/hello/{rank}")
    return found != greeting


def poll(condition: Callable[[], bool], deadline: float) -> bool:
    """Whether the condition came true in time. Asks again and again: a store that waits prints a C++ warning."""
    pause_s = 0.002
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause_s)
        pause_s = min(0.1, pause_s * 1.5)
    return True
