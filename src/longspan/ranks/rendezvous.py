"""Rendezvous: the ranks of a job connect to one store, before any process group exists.

If they cannot (no such job, a missing rank, a port in use), raise within a timeout, with the environment variables and
the fix. Later messages over the same store are text, never pickled.
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
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from longspan.core.errors import LongspanError
from longspan.core.formatting import format_ranks
from longspan.ranks.job import START_TIMEOUT_S, SUPERVISED, VARIABLES, JobVariables, bind_to_node_of, read_job

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

#: Default of --timeout in seconds: without and with GPUs.
CPU_TIMEOUT_S, GPU_TIMEOUT_S = 60, 300
#: Timeout in seconds of the whole job's collectives. The heartbeat finds lost ranks, so this can be long: while rank 0
#: exports a large model, the others wait for hours.
GROUP_TIMEOUT_S = 24 * 3600
#: Timeout in seconds of gloo's collectives in a job with GPUs, where one host may wait for another to write a model.
HOST_TIMEOUT_S = 2 * 3600
#: Key of the store under which a rank writes why the job ends, for the process that hosts the store.
END_REASON_KEY = "longspan/end-reason"

_log = logging.getLogger(__name__)


class Peers:
    """The ranks of a job after the rendezvous: text messages through the store, without a process group.

    A rank without a heartbeat for `timeout_s` seconds counts as lost. `job` is that of the environment, if any.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        timeout_s: float,
        store: Any = None,
        session: str = "",
        job: JobVariables | None = None,
    ) -> None:
        self.rank, self.world_size, self.timeout_s, self.job = rank, world_size, timeout_s, job
        self._store, self._session = store, session
        self._rounds = 0

    @property
    def alone(self) -> bool:
        return self._store is None

    def clone(self) -> Peers:
        """Return a copy with its own connection, for another thread: requests on one connection wait for each other."""
        return Peers(self.rank, self.world_size, self.timeout_s, self._store.clone(), self._session, self.job)

    def set(self, key: str, text: str) -> None:
        self._store.set(f"{self._session}/{key}", text)

    def get(self, key: str) -> str | None:
        """Return the text under a key, or None. Does not wait."""
        name = f"{self._session}/{key}"
        return self._store.get(name).decode() if self._store.check([name]) else None

    def get_all(self, keys: list[str]) -> list[str]:
        """Return the texts under keys that are all set."""
        return [text.decode() for text in self._store.multi_get([f"{self._session}/{key}" for key in keys])]

    def set_end_reason(self, text: str) -> None:
        """Store why the job ends, for the process that hosts the store."""
        self._store.set(END_REASON_KEY, text)

    def missing(self, key: str) -> list[int]:
        """Return the ranks that have not set `key/RANK`."""
        return [rank for rank in range(self.world_size) if not self._store.check([f"{self._session}/{key}/{rank}"])]

    def next_round(self) -> int:
        """Return a new number, the same on all ranks: they exchange messages in the same order."""
        self._rounds += 1
        return self._rounds

    def init_process_group(self, device_type: str, timeout_s: float = GROUP_TIMEOUT_S) -> None:
        """Initialise torch's default process group, unless there is one.

        With GPUs it has two backends, NCCL for CUDA tensors and gloo for CPU tensors: hosts then wait for each other
        without aborting an NCCL communicator. Bound to its device, NCCL connects at once, and the mesh's groups are
        split from it.
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
            if SUPERVISED in os.environ:  # torchrun has an option for it
                bind_to_node_of(torch.cuda.get_device_properties(device))
        dist.init_process_group(
            "gloo" if device is None else "cpu:gloo,cuda:nccl",
            store=dist.PrefixStore(f"{self._session}/groups", self._store),  # type: ignore[attr-defined]
            rank=self.rank,
            world_size=self.world_size,
            timeout=timedelta(seconds=timeout_s),
            device_id=device,
        )
        if device is not None:
            give_hosts_time(timedelta(seconds=max(timeout_s, HOST_TIMEOUT_S)))


def device_index(job: JobVariables, gpus: int) -> int:
    """Return the index of this rank's GPU: its local rank, or 0 if it sees only one (`srun --gpus-per-task 1`)."""
    if gpus == 1:
        return 0
    if job.local_rank >= gpus:
        option = "srun --ntasks-per-node" if job.started_by == "srun" else "torchrun --nproc-per-node"
        raise LongspanError(
            f"rank {job.rank} is number {job.local_rank + 1} on its machine, where it sees {gpus} GPUs; start at most "
            f"{gpus} ranks there ({option}), or let each rank see one other GPU"
        )
    return job.local_rank


def use_loopback() -> None:
    """Make gloo and NCCL listen on the loopback interface only, unless the user has named another."""
    for name in {name for _, name in socket.if_nameindex()} & {"lo", "lo0"}:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", name)


def wait_for_ranks(timeout_s: float | None = None, start_s: float | None = None) -> Peers:
    """Wait up to `start_s` seconds until every rank of the job has connected to its store.

    The job is that of the default process group, if there is one, else that of the environment.
    """
    import torch
    import torch.distributed as dist

    from longspan.compat.torch_api import default_store

    timeout_s = timeout_s or (GPU_TIMEOUT_S if torch.cuda.is_available() else CPU_TIMEOUT_S)
    start_s = start_s or START_TIMEOUT_S
    if dist.is_initialized():
        rank, world, job = dist.get_rank(), dist.get_world_size(), None
        store = default_store() if world > 1 else None
    else:
        job = read_job()
        rank, world = (job.rank, job.world_size) if job else (0, 1)
        store = _connect(job, start_s) if job and world > 1 else None
    if store is None:
        return Peers(rank, world, timeout_s, job=job)
    with store_errors():
        session = _gather(store, rank, world, start_s, job)
    return Peers(rank, world, timeout_s, store, session, job)


@contextlib.contextmanager
def store_errors() -> Iterator[None]:
    """Raise an error of the store's connection as a LongspanError."""
    try:
        yield
    except RuntimeError as error:
        raise LongspanError(f"the job's store is gone, so the rank that hosts it has ended: {error}") from error


def _connect(job: JobVariables, timeout_s: float) -> Any:
    """Connect to the job's store. Under torchrun its agent hosts it, else rank 0."""
    import torch.distributed as dist

    agent_hosts_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    options: dict[str, Any] = {"is_master": False}
    if job.rank == 0 and not agent_hosts_store:
        options = {"is_master": True, "wait_for_workers": False, "master_listen_fd": _listen(job).detach()}
    else:
        _wait_until_listening(job, timeout_s)
    # Any server may listen on that port, and torch would wait for its answer forever.
    stores: list[Any] = []

    def connect() -> None:
        with contextlib.suppress(RuntimeError, ValueError):
            limit = timedelta(seconds=timeout_s)
            stores.append(dist.TCPStore(job.address, job.port, timeout=limit, **options))  # type: ignore[attr-defined]

    thread = threading.Thread(target=connect, name="longspan-connect", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if not stores:
        raise _no_such_job(job, timeout_s, "what listens there is not the store of a job")
    return stores[0]


def _listen(job: JobVariables) -> socket.socket:
    """Return a socket on the interface of MASTER_ADDR only; torch's store would listen on all interfaces."""
    refused: OSError | None = None
    try:
        addresses = socket.getaddrinfo(job.address, job.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise LongspanError(
            f"MASTER_ADDR={job.address} is no address: {error}; set it to the host of rank 0"
        ) from error
    local = job.on_one_machine or job.address in ("localhost", "::1") or job.address.startswith("127.")
    for family, _, _, _, address in addresses:
        if not local and ipaddress.ip_address(address[0]).is_loopback:
            continue  # many machines resolve their own name to 127.0.1.1, which others cannot reach
        try:
            return socket.create_server(address[:2], family=family, backlog=max(128, job.world_size))
        except OSError as error:
            refused = error
    try:  # in a container, MASTER_ADDR may be no address of this machine
        server = socket.create_server(("", job.port), backlog=max(128, job.world_size))
    except OSError:
        raise LongspanError(
            f"rank 0 cannot listen on MASTER_ADDR={job.address}, MASTER_PORT={job.port}: {refused}; give a port that "
            "is free there"
        ) from refused
    _log.warning("MASTER_ADDR=%s is no interface of this machine: the store listens on all of them", job.address)
    return server


def _wait_until_listening(job: JobVariables, timeout_s: float) -> None:
    """Wait for the store's port; each attempt of torch would print a C++ trace."""
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


def _no_such_job(job: JobVariables, timeout_s: float, reason: str) -> LongspanError:
    return LongspanError(
        f"no connection to the job of {job} within {timeout_s:g} s, {reason}; if there is no such job, run `unset "
        f"{' '.join(VARIABLES)}`; if there is, check that rank 0 was started and that no firewall blocks "
        f"{job.address}:{job.port}, or wait longer with --start-timeout",
        code="LS103",
    )


def _gather(store: Any, rank: int, world: int, timeout_s: float, job: JobVariables | None) -> str:
    """Wait for all ranks, and return the key prefix of this job.

    A store may outlive a restarted job and contain its keys. So each rank writes a random greeting, and rank 0 answers
    each greeting with the prefix.
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
        time.sleep(0.5)  # let the others read it before this rank, and with it the store, ends
    else:
        answered = poll(lambda: store.check([f"longspan/welcome/{greeting}"]), deadline)
        absent = [0]
        if answered:
            session = str(store.get(f"longspan/welcome/{greeting}").decode())
            store.set(f"{session}/arrived/{rank}", "yes")
            poll(lambda: store.check([f"{session}/met"]) or store.check([f"{session}/absent"]), deadline)
            if store.check([f"{session}/met"]):
                return session
            absent = [other for other in range(1, world) if not store.check([f"{session}/arrived/{other}"])] or [0]
    hint = f"; the job is {job}, and if there is no such job, run `unset {' '.join(VARIABLES)}`" if job else ""
    raise LongspanError(
        f"{format_ranks(absent)} of {world} did not arrive within {timeout_s:g} s{hint}; if the ranks need longer "
        "to start, give a longer --start-timeout (init_mesh: timeout=)",
        code="LS103",
    )


def _welcome(store: Any, world: int, session: str, deadline: float) -> list[int]:
    """On rank 0: answer the greetings, and return the ranks that are missing at the deadline."""
    absent, answered = list(range(1, world)), dict.fromkeys(range(world), b"")

    def all_arrived() -> bool:
        for other in list(absent):
            key = f"longspan/hello/{other}"
            if store.check([key]) and (greeting := store.get(key)) != answered[other]:
                store.set(f"longspan/welcome/{greeting.decode()}", session)
                answered[other] = greeting
            if store.check([f"{session}/arrived/{other}"]):
                absent.remove(other)
        return not absent

    poll(all_arrived, deadline)
    for other in set(range(1, world)) - set(absent):
        if store.get(f"longspan/hello/{other}") != answered[other]:
            raise LongspanError(f"two processes have RANK={other}; give every rank of a job a different RANK")
    return absent


def poll(condition: Callable[[], bool], deadline: float) -> bool:
    """Return whether the condition became true before the deadline. Polls: a store's own wait prints C++ warnings."""
    pause_s = 0.002
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause_s)
        pause_s = min(0.1, pause_s * 1.5)
    return True
