"""Start the ranks of a job on this machine, and make sure that all of them end, in time, whatever happens.

- The job's store listens on the loopback interface, in this process; gloo and NCCL use that interface too.
- A rank that ends before it has reported a result has failed, whatever its exit code. The others are then killed:
  without it they cannot even save.
- SIGTERM, SIGINT and SIGHUP are sent on as SIGTERM. The ranks have `grace_s` seconds to save and end; then they are
  killed. A second signal kills them at once.
- If this process is killed, so are the ranks: by the kernel (Linux), or because they see its pipe close.

Nothing is written to disk. The parts are the standard library's `multiprocessing` and torch's `TCPStore`.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import connection, resource_tracker
from typing import TYPE_CHECKING, Any, Self

from longspan.core.errors import LongspanError
from longspan.ranks.job import SUPERVISED
from longspan.ranks.rendezvous import END_REASON_KEY, use_loopback

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.context import SpawnProcess
    from types import FrameType

#: Default seconds for the ranks to save and end after a signal.
GRACE_S = 25.0
#: Seconds after the first signal before another counts as the second: some senders repeat themselves.
REPEAT_S = 1.0
#: Seconds to wait for another cause after a rank reported that it lost a peer.
_SETTLE_S = 5.0
#: Seconds for ranks to exit after all reported a result.
_EXIT_S = 30.0
#: Starts the processes of the ranks, with a Python of their own: a fork could not use a GPU. Tests replace it.
process_context: Any = multiprocessing.get_context("spawn")
#: Exit code of a rank that its heartbeat has ended.
LOST_CODE = 75


class Stopped(SystemExit):
    """A signal ended the job early, after it saved its state.

    Uncaught, it ends the process with 128 + the signal (143 for SIGTERM), so that a scheduler does not count the job as
    finished. `signum` is the signal; `not_saved` says why nothing was saved, or is empty.
    """

    def __init__(self, signum: int, not_saved: str = "") -> None:
        super().__init__(128 + signum)
        self.signum, self.not_saved = signum, not_saved


class RankFailed(RuntimeError):
    """A rank died. The message names it and the cause; `details` is its traceback, if it sent one."""

    def __init__(self, message: str, details: str = "") -> None:
        super().__init__(message)
        self.details = details


class Signals:
    """Catches the signals that stop a job: a context manager.

    With `keep_ignored`, signals that the process ignores (nohup) stay ignored. `signum` is the first signal, `again`
    whether a second one came, more than `repeat_s` after the first.
    """

    def __init__(self, signums: tuple[int, ...], repeat_s: float, *, keep_ignored: bool = True) -> None:
        self.signum: int | None = None
        self.again = False
        self._keep_ignored = keep_ignored
        self._signums, self._repeat_s, self._since = signums, repeat_s, 0.0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        with contextlib.suppress(ValueError):  # only the main thread can catch signals
            for signum in self._signums:
                if not self._keep_ignored or signal.getsignal(signum) is not signal.SIG_IGN:
                    self._previous[signum] = signal.signal(signum, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)

    def _on_signal(self, signum: int, _: FrameType | None) -> None:
        if self.signum is None:
            self.signum, self._since = signum, time.monotonic()
            self.on_first(signum)
        elif time.monotonic() - self._since > self._repeat_s:
            self.again = True
            self.on_second(signum)

    def on_first(self, signum: int) -> None:
        """Handle the first signal."""

    def on_second(self, signum: int) -> None:
        """Handle a later signal."""


@dataclass(frozen=True)
class _End:
    """How a rank ended: `kind` is "done", "refused", "raised", "stopped", "exited" (Python's) or "died"."""

    kind: str
    text: str = ""
    traceback: str = ""
    lost_peer: bool = False
    code: int = 0
    result: Any = None


def supervise(entry: Callable[..., Any], args: tuple[Any, ...], nproc: int, grace_s: float) -> Any:
    """Run `entry(*args)` on `nproc` ranks and return rank 0's result; see `longspan.ranks.launch.launch`."""
    import torch.distributed as dist

    server = socket.create_server(("127.0.0.1", 0), backlog=1024)  # torch's own socket listens on all interfaces
    port = server.getsockname()[1]
    make_store: Any = dist.TCPStore  # type: ignore[attr-defined]
    store = make_store("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=server.detach())
    with Signals((signal.SIGTERM, signal.SIGINT, signal.SIGHUP), REPEAT_S) as signals:
        ranks = _Ranks(nproc)
        try:
            ranks.start(entry, args, port)
            _wait(ranks, signals, grace_s)
        finally:
            ranks.kill()
        return _conclude(ranks, signals, store, grace_s)


# --- in the launcher


class _Ranks:
    """The processes, and how each of them ended."""

    def __init__(self, nproc: int) -> None:
        self.nproc, self.ends = nproc, dict[int, _End]()
        self.processes: list[SpawnProcess] = []
        self.killed: set[int] = set()
        self._pipes: dict[int, Connection] = {}

    def start(self, entry: Callable[..., Any], args: tuple[Any, ...], port: int) -> None:
        resource_tracker.ensure_running()  # otherwise the first process starts it, and it unblocks signals
        # Ctrl-C reaches the ranks as well. Block it until they ignore it, so that this process alone decides.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            for rank in range(self.nproc):
                self._pipes[rank], of_rank = process_context.Pipe(duplex=False)
                process = process_context.Process(
                    target=_rank_main, args=(rank, of_rank, entry, args, self.nproc, port), name=f"rank {rank}"
                )
                process.start()
                of_rank.close()
                self.processes.append(process)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    @property
    def running(self) -> list[int]:
        return [rank for rank, process in enumerate(self.processes) if process.exitcode is None]

    def collect(self, wait_s: float) -> None:
        """Wait up to `wait_s` until a rank reports or ends, and record how it ended."""
        sentinels = [self.processes[rank].sentinel for rank in self.running]
        connection.wait([*self._pipes.values(), *sentinels], timeout=wait_s)
        for rank, process in enumerate(self.processes):
            ended = process.exitcode is not None  # read before the pipe, which then has all that the rank sent
            if rank in self._pipes and self._pipes[rank].poll():
                with contextlib.suppress(EOFError, OSError, pickle.UnpicklingError):
                    self.ends[rank] = pickle.loads(self._pipes[rank].recv_bytes())
                self._pipes.pop(rank).close()
            if ended and rank not in self.ends:
                self.ends[rank] = _End("died", code=process.exitcode or 0)

    def failures(self) -> dict[int, _End]:
        return {r: end for r, end in self.ends.items() if end.kind not in ("done", "stopped") and r not in self.killed}

    def send_signal(self, signum: int) -> None:
        for rank in self.running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.processes[rank].pid or 0, signum)

    def kill(self) -> None:
        """End every running rank, even a stopped one."""
        running = self.running
        self.killed.update(rank for rank in running if rank not in self.ends)
        for rank in running:
            self.processes[rank].kill()
        for process in self.processes:
            process.join(timeout=5)
        if running and sys.stdout.isatty():
            sys.stdout.write("\x1b[?25h")  # a live display had hidden the cursor


def _wait(ranks: _Ranks, signals: Signals, grace_s: float) -> None:
    """Wait until every rank has ended, one has failed, or the grace period after a signal is over."""
    stopping_since = failed_at = done_at = None
    while ranks.running:
        ranks.collect(0.2)
        now = time.monotonic()
        if stopping_since is None:
            if signals.signum is not None:
                ranks.send_signal(signal.SIGTERM)
                stopping_since = now
            elif any(end.kind == "stopped" for end in ranks.ends.values()):  # a signal reached the ranks themselves
                stopping_since = now
        if stopping_since is not None:
            if signals.again or now - stopping_since > grace_s:
                return
            continue  # a rank may die of the signal while the others save
        if failures := ranks.failures():
            failed_at = failed_at or now
            # A rank whose peer vanishes fails as well: wait for the one that failed first.
            if not all(end.lost_peer for end in failures.values()) or now - failed_at > _SETTLE_S:
                return
        if len(ranks.ends) == ranks.nproc:
            done_at = done_at or now
            if now - done_at > _EXIT_S:
                return
    ranks.collect(0)


def _conclude(ranks: _Ranks, signals: Signals, store: Any, grace_s: float) -> Any:
    """Return rank 0's result, or raise what ended the job."""
    failures = ranks.failures()
    stopped = [end.code for end in ranks.ends.values() if end.kind == "stopped"]
    if signals.signum is not None or (stopped and not failures):
        if len(ranks.ends) == ranks.nproc and all(end.kind == "done" for end in ranks.ends.values()):
            return ranks.ends[0].result  # the signal came after the job was done
        raise Stopped(signals.signum or stopped[0], _not_saved(ranks, signals, grace_s))
    if failures:
        raise _diagnose(failures, ranks.nproc, store)
    return ranks.ends[0].result


def _not_saved(ranks: _Ranks, signals: Signals, grace_s: float) -> str:
    """Return why a stopped job could not save; empty if it did."""
    for rank, end in ranks.failures().items():
        if end.kind in ("refused", "raised") and not end.lost_peer:
            return f"rank {rank} could not save: {end.text}"
    if ranks.killed and signals.again:
        return "a second signal ended the ranks at once; progress since the last checkpoint is lost"
    if ranks.killed:
        return (
            f"{len(ranks.killed)} of {ranks.nproc} ranks did not end within {grace_s:g} s and were killed; progress "
            "since the last checkpoint is lost (--grace gives them longer)"
        )
    return ""


def _diagnose(failures: dict[int, _End], nproc: int, store: Any) -> BaseException:
    """Return an error that names the rank that failed first, and why."""
    ended = "the other ranks were ended"
    if store.check([END_REASON_KEY]):
        return RankFailed(f"{store.get(END_REASON_KEY).decode()}; {ended}")
    for rank, end in failures.items():  # in the order of their reports
        if end.kind == "refused" and not end.lost_peer:
            return LongspanError(end.text)
        if end.kind == "died" and end.code != LOST_CODE:
            return RankFailed(f"rank {rank} of {nproc} {_describe_death(end.code)}; {ended}")
        if end.kind == "exited":
            return RankFailed(f"rank {rank} of {nproc} called sys.exit({end.text}) before the job was done; {ended}")
        if end.kind != "died" and not end.lost_peer:
            return RankFailed(f"rank {rank} of {nproc} died (exit code 1): {end.text}; {ended}", end.traceback)
    if any(end.kind == "died" for end in failures.values()):  # with `LOST_CODE`, without the store
        return RankFailed(
            f"the ranks lost contact with this process (the launcher, process {os.getpid()}), which hosts the job's "
            f"store and did not answer for --timeout seconds: it was stopped, or had too little processor time; all "
            "ranks have ended"
        )
    rank, end = next(iter(failures.items()))
    return RankFailed(
        f"rank {rank} of {nproc} lost a peer: {end.text}; no rank reports another cause, so check the network; {ended}",
        end.traceback,
    )


def _describe_death(code: int) -> str:
    if code < 0:
        hint = "; often the kernel does this when memory runs out" if code == -signal.SIGKILL else ""
        return f"was killed by {signal.Signals(-code).name}{hint}"
    return f"exited with code {code} and left no error{' before the job was done' if code == 0 else ''}"


# --- in a rank


def threads_per_rank(nproc: int) -> int:
    """Return the compute threads for each of `nproc` ranks: the cores of this process divided by them, at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // nproc)


def _rank_main(
    rank: int, pipe: Connection, entry: Callable[..., Any], args: tuple[Any, ...], nproc: int, port: int
) -> None:
    _end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher decides what an interrupt ends
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(nproc),
        LOCAL_WORLD_SIZE=str(nproc),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",  # the launcher hosts the store
        **{SUPERVISED: "1"},
    )
    use_loopback()
    use_expandable_segments()
    silence_imports()
    if rank:
        silence_libraries()
    end = _run(entry, args, nproc)
    try:
        report = pickle.dumps(end)
    except Exception as error:  # a result that cannot be pickled
        end = _End("raised", f"{type(error).__name__}: {error}", traceback.format_exc())
        report = pickle.dumps(end)
    with contextlib.suppress(OSError):
        pipe.send_bytes(report)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    if end.kind != "done":
        os._exit(1)  # destroying the process group may abort, or hang


def use_expandable_segments() -> None:
    """Let torch's allocator grow its segments, unless the user has configured it: different lengths fragment them."""
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")  # torch reads one of them
    if not any(name in os.environ for name in names):
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def silence_imports() -> None:
    """Hide what packages log while they are imported, except errors: transformers and accelerate import all they find.

    Packages without a handler of their own log to `logging.lastResort`. torch has one, and warns of what torchao
    registers; so has DeepSpeed.
    """
    for where in (logging.lastResort, logging.getLogger("torch.utils._pytree"), logging.getLogger("DeepSpeed")):
        if where is not None:
            where.addFilter(_outside_imports)


def _outside_imports(record: logging.LogRecord) -> bool:
    frame = sys._getframe()
    while record.levelno < logging.ERROR and frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return False
    return True


def silence_libraries() -> None:
    """Hide the libraries' warnings on this rank, as the first one shows the same. Call it before they are imported."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    import torch  # noqa: F401

    warnings.simplefilter("ignore")
    if logging.lastResort is not None:
        logging.lastResort.setLevel(logging.ERROR)
    for name in ("torch", "transformers", "datasets", "accelerate", "DeepSpeed"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _run(entry: Callable[..., Any], args: tuple[Any, ...], nproc: int) -> _End:
    import torch
    import torch.distributed as dist

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(threads_per_rank(nproc))
    try:
        result = entry(*args)
        if dist.is_initialized():
            dist.destroy_process_group()
        return _End("done", result=result)
    except Stopped as stop:
        return _End("stopped", code=stop.signum)
    except LongspanError as error:
        return _End("refused", str(error), traceback.format_exc(), lost_peer(error))
    except SystemExit as end:
        return _End("exited", repr(end.code))
    except BaseException as error:
        text = f"{type(error).__name__}: {error}"
        if isinstance(error, BrokenPipeError):
            text += " (the process that reads this job's output has ended)"
        return _End("raised", text, traceback.format_exc(), lost_peer(error))


def _end_with_parent() -> None:
    """End this process, even if it is stopped, when the launcher is gone for whatever reason."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if not parent.is_alive():
        os._exit(1)

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, name="longspan-launcher", daemon=True).start()


def lost_peer(error: BaseException | None) -> bool:
    """Return whether an error or one of its causes is gloo's, NCCL's or the store's, so that another rank is gone.

    A broken pipe or connection of Python (the reader of the output, a download) does not count.
    """
    kinds = ("DistBackendError", "DistNetworkError", "DistStoreError", "gloo/transport")
    while error is not None:
        text = f"{type(error).__name__}: {error}"
        if not isinstance(error, OSError) and any(kind in text for kind in kinds):
            return True
        error = error.__cause__ or error.__context__
    return False
