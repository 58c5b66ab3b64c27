"""A pool of gloo ranks that stay alive, so that a distributed test costs milliseconds instead of a process start.

A task is a module-level function. It runs on every rank with `torch.distributed` initialised, and its results come
back as a list in rank order:

    def _sum_of_ranks() -> float:
        x = torch.tensor(float(dist.get_rank()))
        dist.all_reduce(x)
        return x.item()

    def test_sum(pool4):
        assert pool4.run(_sum_of_ranks) == [6.0] * 4

`@on_ranks(4)` runs a whole test on every rank.

Ranks are forked from a server that has imported what they need (`PRELOAD`), so imports are paid once, not per rank. A
start of four ranks then takes 0.1 s.

Every task starts with a new default process group (groups and meshes of the previous task are gone), seed 0 and
`THREADS` threads. If a rank raises, `run` raises `RankError`; if a task exceeds its limit, `RankHang` with the stack of
every rank that has not answered. The pool is usable afterwards. If living ranks only lost a connection to each other,
as happens with the network of some sandboxes, the task runs a second time on new ranks, with a warning.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import inspect
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

START_LIMIT_S = 240.0
"""Seconds in which all ranks must import torch and rendezvous; 8 ranks may share 2 cores."""

GRACE_S = 2.0
"""Seconds that the other ranks may continue after one has failed; they most likely wait for it in a collective."""

MAX_THREADS = 64
"""Ranks with more threads are replaced before the next task. gloo starts three for every group, one of which polls, so
groups that are never freed would slow all tests."""

THREADS = os.environ.get("OMP_NUM_THREADS", "1")
"""Compute threads of each rank; with more than one, the ranks compete for the cores."""

LOST = ("Connection reset by peer", "Connection closed by peer")
"""What gloo's errors say of a connection that the other side or the system has closed."""

DUMP_SIGNAL = signal.SIGUSR2

START = os.environ.get("POOL_START", "forkserver")
"""How ranks start. "fork" needs no server, but this process must have no threads that hold locks."""

_FAMILIES = (
    "albert bert distilbert gemma2 gemma3 gpt2 gpt_neox gpt_oss llama llama4 mistral mixtral modernbert "
    "olmo2 olmo3 phi3 qwen2 qwen3 qwen3_moe"
)
PRELOAD = (
    "torch",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.distributed.tensor.debug",
    "torch.profiler",
    "datasets",
    "rich.progress",
    "transformers",
    "transformers.models.auto.modeling_auto",
    "transformers.optimization",
    "transformers.trainer_pt_utils",
    *(f"transformers.models.{name}.modeling_{name}" for name in _FAMILIES.split()),
    "longspan.hf.parallelize",
    "longspan.train.command",
    "trl",
    "longspan.verify.job",
    "peft",
    "torch.utils.tensorboard",
    "pytest",
    "tests.models",
    "tests.frozen",
)
"""Modules that the server imports. It ignores names that do not exist."""


@dataclass(frozen=True)
class Failure:
    """Why one rank failed: `kind` is the exception's qualified name, or "exit" if its process ended."""

    rank: int
    kind: str
    message: str
    traceback: str

    @property
    def is_lost_connection(self) -> bool:
        is_of_torch = self.kind == "RuntimeError" or self.kind.startswith("torch.distributed.")
        return is_of_torch and any(text in self.message for text in LOST)


class RankError(AssertionError):
    """At least one rank raised or ended. `failures` maps each failed rank to its `Failure`, ended processes first."""

    def __init__(self, world_size: int, failures: dict[int, Failure], stacks: dict[int, str]) -> None:
        self.failures = dict(sorted(failures.items(), key=lambda item: (item[1].kind != "exit", item[0])))
        self.stacks = stacks
        parts = [f"{len(failures)} of {world_size} ranks failed: {', '.join(map(str, self.failures))}"]
        parts += [f"--- rank {f.rank}: {f.kind}: {f.message}\n{f.traceback}" for f in self.failures.values()]
        parts += [f"--- rank {rank}, still running {GRACE_S:g} s later\n{text}" for rank, text in stacks.items()]
        # Last, because a log may show no more than its end.
        said = [f"rank {f.rank}: {f.kind}: {next(iter(f.message.splitlines()), '')}" for f in self.failures.values()]
        self.summary = "\n".join([*said, *(f"rank {rank}: still running {GRACE_S:g} s later" for rank in stacks)])
        parts += ["--- summary", self.summary]
        super().__init__("\n".join(parts))


class RankHang(AssertionError):
    """A task exceeded its limit. `stacks` maps each rank that did not answer to the stacks of its threads."""

    def __init__(self, world_size: int, limit_s: float, stacks: dict[int, str]) -> None:
        self.stacks = stacks
        names = ", ".join(map(str, stacks))
        parts = [f"{len(stacks)} of {world_size} ranks did not answer within {limit_s:g} s: {names}"]
        parts += [f"--- rank {rank}\n{text}" for rank, text in stacks.items()]
        super().__init__("\n".join(parts))


@dataclass
class _Worker:
    """The parent's end of one rank."""

    rank: int
    process: BaseProcess
    conn: Connection
    dump: Path

    def stacks(self) -> str:
        """Return the stacks of all threads of the rank, which may be blocked in a collective."""
        before = self.dump.stat().st_size
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid or 0, DUMP_SIGNAL)
        size = before
        deadline = time.monotonic() + 3.0
        while time.monotonic() < deadline:
            time.sleep(0.1)
            last, size = size, self.dump.stat().st_size
            if size > before and size == last:
                break
        text = self.dump.read_bytes()[before:].decode(errors="replace")
        return text or "(no stack: the process did not react to the signal)"


def fork_server() -> Any:
    """Return the multiprocessing context whose processes are forked from the server of the pools."""
    multiprocessing.set_forkserver_preload(list(PRELOAD))
    return multiprocessing.get_context(START)


def run_forked(fn: Callable[..., Any], *args: Any, timeout: float = 240.0) -> Any:
    """Run `fn(*args)` in a new process without a process group, forked from the server of the pools.

    Raises:
        RankError: it raised, or the process ended.
        RankHang: it did not return in time.
    """
    context = fork_server()
    conn, child_conn = context.Pipe()
    process = context.Process(target=_answer, args=(child_conn, 0, fn, *args))
    process.start()
    child_conn.close()
    try:
        if not conn.poll(timeout):
            raise RankHang(1, timeout, {0: "(unknown)"})
        answer = pickle.loads(conn.recv_bytes())
    except EOFError:
        process.join(timeout=GRACE_S)
        answer = Failure(0, "exit", f"the process ended with exit code {process.exitcode}", "")
    finally:
        process.kill()
        process.join()
        conn.close()
    if isinstance(answer, Failure):
        raise RankError(1, {0: answer}, {})
    return answer[0]


class RankPool:
    """`world_size` processes that stay alive from task to task; they start with the first task.

    Args:
        world_size: number of ranks.
        timeout: default limit of a task, in seconds.
        warm: modules that every rank imports when it starts.
    """

    def __init__(self, world_size: int, timeout: float = 60.0, warm: Sequence[str] = ("torch",)) -> None:
        self.world_size = world_size
        self.timeout = timeout
        self.warm = tuple(warm)
        self._workers: list[_Worker] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._store: Any = None
        self._tasks = 0

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks; empty while the pool is not running."""
        return [worker.process.pid or 0 for worker in self._workers]

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float | None = None) -> list[Any]:
        """Run `fn(*args)` on every rank and return the results in rank order.

        Args:
            fn: a function that the ranks can import, so one at the top of a module.
            args: picklable; each rank gets a copy. Tensors are sent by value.
            timeout: limit in seconds; default: the pool's.

        Raises:
            RankError: a rank raised or ended.
            RankHang: no rank failed, and some did not answer in time.
            TypeError: `fn` or `args` cannot be pickled.
        """
        if self._has_too_many_threads():
            self._run(_nothing, (), self.timeout)  # the ranks may not have freed the last task's groups yet
            if self._has_too_many_threads():
                self.close()
        limit_s = self.timeout if timeout is None else timeout
        try:
            return self._run(fn, args, limit_s)
        except RankError as error:
            if not all(failure.is_lost_connection for failure in error.failures.values()):
                raise
            self.close()
            warnings.warn(
                f"living ranks lost a connection, so a task runs a second time: {error.summary}", stacklevel=2
            )
        return self._run(fn, args, limit_s)

    def _has_too_many_threads(self) -> bool:
        return any(_threads(pid) > MAX_THREADS for pid in self.pids)

    def _run(self, fn: Callable[..., Any], args: tuple[Any, ...], limit_s: float) -> list[Any]:
        self._tasks += 1
        try:
            task = pickle.dumps((self._tasks, fn, args))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise TypeError(f"a task is a function at the top of a module with picklable arguments: {error}") from None
        try:
            if not self._workers:
                self._start()
            for worker in self._workers:
                # `_collect` notices a rank that ended since the last task.
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    worker.conn.send_bytes(task)
            results = self._collect(limit_s)
        except RankError as error:
            if error.stacks or any(failure.kind == "exit" for failure in error.failures.values()):
                self.close()
            self._free_groups()
            raise
        except BaseException:  # a hang, or an interrupt that leaves tasks running
            self.close()
            raise
        self._free_groups()
        return results

    def _free_groups(self) -> None:
        """Let the ranks free their groups, now that all have answered: a thread of each polls, also in idle ranks."""
        for worker in self._workers:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                worker.conn.send_bytes(b"")

    def close(self) -> None:
        """Kill the ranks. The next task starts new ones."""
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
            worker.conn.close()
        self._workers = []
        self._store = None
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _start(self) -> None:
        from torch.distributed import TCPStore

        # The store is in this process, so it outlives a rank; the system picks a free port.
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._folder = tempfile.TemporaryDirectory(prefix="longspan-pool-")
        context = fork_server()
        for rank in range(self.world_size):
            conn, child_conn = context.Pipe()
            dump = Path(self._folder.name, f"rank{rank}.stacks")
            dump.touch()
            process = context.Process(
                target=_serve,
                args=(rank, self.world_size, self._store.port, child_conn, str(dump), self.warm),
                name=f"rank{rank}/{self.world_size}",
                daemon=True,
            )
            process.start()
            child_conn.close()  # the rank has the only copy, so the pipe ends when the rank does
            self._workers.append(_Worker(rank, process, conn, dump))
        try:
            self._collect(START_LIMIT_S)
        except RankError:  # a rank could not import a module
            self.close()
            raise

    def _collect(self, limit_s: float) -> list[Any]:
        """Return one answer per rank; wait `limit_s`, or `GRACE_S` after a failure."""
        deadline = time.monotonic() + limit_s
        results: dict[int, Any] = {}
        failures: dict[int, Failure] = {}
        waiting = {worker.conn: worker for worker in self._workers}
        while waiting and (left_s := deadline - time.monotonic()) > 0:
            for conn in wait(list(waiting), timeout=left_s):
                worker = waiting.pop(conn)  # type: ignore[index]
                try:
                    answer = pickle.loads(worker.conn.recv_bytes())
                except (EOFError, ConnectionResetError):
                    answer = _death(worker)
                if isinstance(answer, Failure):
                    if not failures:
                        deadline = min(deadline, time.monotonic() + GRACE_S)
                    failures[worker.rank] = answer
                else:
                    results[worker.rank] = answer[0]
        stacks = {worker.rank: worker.stacks() for worker in waiting.values()}
        if failures:
            raise RankError(self.world_size, failures, stacks)
        if stacks:
            raise RankHang(self.world_size, limit_s, stacks)
        return [results[rank] for rank in range(self.world_size)]


def on_ranks(size: int, timeout: float | None = None) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a test whose body runs on every rank of the session's pool, with the test's parameters."""

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        def test(get_pool: Callable[[int], RankPool], **parameters: Any) -> None:
            get_pool(size).run(_run_body, body.__module__, body.__name__, parameters, timeout=timeout)

        test.__name__, test.__module__, test.__doc__ = body.__name__, body.__module__, body.__doc__
        names = ("get_pool", *inspect.signature(body).parameters)
        parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
        vars(test).update(body=body, __signature__=inspect.Signature(parameters))
        return test

    return decorate


def _run_body(module: str, name: str, parameters: dict[str, Any]) -> None:
    getattr(importlib.import_module(module), name).body(**parameters)


def _threads(pid: int) -> int:
    """Return the threads of a process; 0 if the system does not show them."""
    try:
        return len(os.listdir(f"/proc/{pid}/task"))
    except OSError:
        return 0


def _death(worker: _Worker) -> Failure:
    worker.process.join(timeout=GRACE_S)
    code = worker.process.exitcode
    message = f"the process ended with exit code {code}"
    if code is not None and code < 0:
        message += f" ({signal.Signals(-code).name})"
    return Failure(worker.rank, "exit", message, worker.dump.read_text(errors="replace"))


def _serve(rank: int, world_size: int, port: int, conn: Connection, dump: str, warm: tuple[str, ...]) -> None:
    """Run one task after the other until the parent ends."""
    os.environ["OMP_NUM_THREADS"] = THREADS
    for interface in {name for _, name in socket.if_nameindex()} & {"lo", "lo0"}:
        os.environ["GLOO_SOCKET_IFNAME"] = interface  # a machine's own name need not resolve to an address
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles interrupts
    threading.Thread(target=_die_with_parent, daemon=True).start()
    with open(dump, "a") as file:
        faulthandler.enable(file)
        faulthandler.register(DUMP_SIGNAL, file, all_threads=True)
        _answer(conn, rank, _warm_up, warm)
        with contextlib.suppress(EOFError):
            import torch.distributed as dist

            store = dist.TCPStore("127.0.0.1", port, is_master=False)
            while True:
                _answer(conn, rank, _run, conn.recv_bytes(), store, rank, world_size)
                assert conn.recv_bytes() == b""  # all ranks have answered
                if dist.is_initialized():
                    dist.destroy_process_group()
                _forget_meshes()
                gc.collect()
                gc.freeze()  # a task leaves modules and caches, which later collections can skip


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _warm_up(warm: tuple[str, ...]) -> None:
    import torch

    torch.set_num_threads(int(THREADS))
    for name in warm:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # later collections can skip what was imported


def _answer(conn: Connection, rank: int, fn: Callable[..., Any], *args: Any) -> None:
    """Send a pickled one-tuple of the result, or a pickled `Failure`.

    Plain pickle bytes copy a tensor's values; multiprocessing's own pickler would share its memory by file descriptor.
    """
    try:
        answer = pickle.dumps((fn(*args),))
    except BaseException as error:  # SystemExit and pytest's outcomes, too
        kind = f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins.")
        answer = pickle.dumps(Failure(rank, kind, str(error), traceback.format_exc()))
    conn.send_bytes(answer)


def _nothing() -> None:
    """A task that does nothing."""


def _forget_meshes() -> None:
    """Clear torch's DTensor caches, which hold the meshes of a task and so its groups, with three threads each."""
    for name in ("_redistribute", "_collective_utils"):
        module = sys.modules.get(f"torch.distributed.tensor.{name}")
        for value in list(vars(module).values()) if module is not None else []:
            for cached in (value, getattr(value, "build_from_mesh", None)):
                if hasattr(cached, "cache_clear"):
                    cached.cache_clear()
        if hasattr(module, "clear_redistribute_planner_cache"):
            module.clear_redistribute_planner_cache()
    clear = getattr(sys.modules.get("torch.distributed.tensor.debug"), "_clear_sharding_prop_cache", None)
    if clear is not None:
        clear()


def _run(task: bytes, store: Any, rank: int, world_size: int) -> Any:
    """Run one task in a new process group.

    Those of the previous task are gone, as a failed task may have left the ranks out of step. The store's client is
    reused, because with a new one gloo sometimes waits 5 s for a connection.
    """
    import torch
    import torch.distributed as dist

    number, fn, args = pickle.loads(task)
    store = dist.PrefixStore(f"task{number}", store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    torch.default_generator.manual_seed(0)  # `torch.manual_seed` formats the stack for each kind of device
    return fn(*args)
