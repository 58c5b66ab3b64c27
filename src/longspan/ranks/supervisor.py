"""Starts the ranks of a job on this machine, and sees that they end: all of them, in time, whatever happens.

- The job's store listens on the loopback interface, in this process; gloo and NCCL are told to use that interface too.
- A rank that ends before it has said that it is done has failed, whatever its exit code; the others are then killed:
  without it they could not even save.
- SIGTERM, SIGINT or SIGHUP: the ranks are told, and have `grace_s` seconds to save and end; then they are killed. A
  second signal kills them at once.
- If this process is killed itself, the ranks end: the kernel kills them (Linux), or they see its pipe close.

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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import connection, resource_tracker
from typing import TYPE_CHECKING, Any

from longspan.core.errors import LongspanError
from longspan.ranks.rendezvous import END_REASON_KEY, use_loopback

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.context import SpawnProcess
    from types import FrameType

#: Default seconds that the ranks get to save and end after the job was told to stop.
GRACE_S = 25.0
#: Seconds between the first signal and one that counts as a second: some senders repeat themselves.
REPEAT_S = 1.0
#: Seconds to wait for another cause, after a rank has said that it lost a peer.
_SETTLE_S = 5.0
#: Seconds that ranks which are done have to take down what they hold.
_LEAVE_S = 30.0
#: In the environment of ranks that were started here.
SUPERVISED = "LONGSPAN_SUPERVISED"
#: Exit code of a rank that its heartbeat has ended.
LOST_CODE = 75


class Stopped(SystemExit):
    """The job ended early because it was told to by a signal, after it saved what it had.

    Left alone it ends the process with 128 + the signal (143 for SIGTERM), so that a scheduler does not take the job
    for finished. `signum` is the signal; `why_not` says why nothing was saved, if that is so.
    """

    def __init__(self, signum: int, why_not: str = "") -> None:
        super().__init__(128 + signum)
        self.signum, self.why_not = signum, why_not


class RankFailed(RuntimeError):
    """A rank died. The message names it and says how; `details` holds its traceback, where it left one."""

    def __init__(self, message: str, details: str = "") -> None:
        super().__init__(message)
        self.details = details


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
    """Run `entry(*args)` on `nproc` ranks and return what rank 0 returned; see `longspan.ranks.launch.launch`."""
    with _listening_store() as (store, port), _Signals() as signals:
        ranks = _Ranks(entry, args, nproc, port)
        try:
            ranks.start()
            _wait(ranks, signals, grace_s)
        finally:
            ranks.kill()
        return _conclude(ranks, signals, store, grace_s)


# --- the launcher's side


@contextlib.contextmanager
def _listening_store() -> Iterator[tuple[Any, int]]:
    import torch.distributed as dist

    make_store: Any = dist.TCPStore  # type: ignore[attr-defined]
    server = socket.create_server(("127.0.0.1", 0), backlog=1024)
    port = server.getsockname()[1]
    # torch's own socket would listen on all interfaces.
    store = make_store("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=server.detach())
    yield store, port


class _Signals:
    """The signal that told the job to stop, if one did, and whether another came."""

    def __init__(self) -> None:
        self.signum: int | None = None
        self.again = False
        self._since = 0.0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> _Signals:
        with contextlib.suppress(ValueError):  # not in the main thread: signals are not ours to catch
            for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                if signal.getsignal(signum) is not signal.SIG_IGN:  # as nohup wants it
                    self._previous[signum] = signal.signal(signum, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)

    def _on_signal(self, signum: int, _: FrameType | None) -> None:
        if self.signum is None:
            self.signum, self._since = signum, time.monotonic()
        elif time.monotonic() - self._since > REPEAT_S:
            self.again = True


class _Ranks:
    """The processes, and how each of them ended."""

    def __init__(self, entry: Callable[..., Any], args: tuple[Any, ...], nproc: int, port: int) -> None:
        self.nproc, self.ends = nproc, dict[int, _End]()
        self._task = (entry, args, nproc, port)
        self.processes: list[SpawnProcess] = []
        self.killed: set[int] = set()
        self._pipes: dict[int, Connection] = {}

    def start(self) -> None:
        context = multiprocessing.get_context("spawn")
        resource_tracker.ensure_running()  # it is started by the first process otherwise, and unblocks signals
        # Ctrl-C reaches the ranks as well: it waits until they ignore it, so that this process alone decides.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            for rank in range(self.nproc):
                pipe, theirs = context.Pipe(duplex=False)
                process = context.Process(target=_rank_main, args=(rank, theirs, *self._task), name=f"rank {rank}")
                process.start()
                theirs.close()
                self.processes.append(process)
                self._pipes[rank] = pipe
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    @property
    def living(self) -> list[int]:
        return [rank for rank, process in enumerate(self.processes) if process.exitcode is None]

    def collect(self, wait_s: float) -> None:
        """Wait until a rank says or does something, at most so long, and note how it ended."""
        sentinels = [self.processes[rank].sentinel for rank in self.living]
        connection.wait([*self._pipes.values(), *sentinels], timeout=wait_s)
        for rank, process in enumerate(self.processes):
            ended = process.exitcode is not None  # asked first: whatever it has said is then in the pipe
            if rank in self._pipes and self._pipes[rank].poll():
                with contextlib.suppress(EOFError, OSError, pickle.UnpicklingError):
                    self.ends[rank] = pickle.loads(self._pipes[rank].recv_bytes())
                self._pipes.pop(rank).close()
            if ended and rank not in self.ends:
                self.ends[rank] = _End("died", code=process.exitcode or 0)

    def failures(self) -> dict[int, _End]:
        return {r: end for r, end in self.ends.items() if end.kind not in ("done", "stopped") and r not in self.killed}

    def tell(self, signum: int) -> None:
        for rank in self.living:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.processes[rank].pid or 0, signum)

    def kill(self) -> None:
        """End every rank that still runs, also one that is stopped."""
        still = self.living
        self.killed.update(rank for rank in still if rank not in self.ends)
        for rank in still:
            self.processes[rank].kill()
        for process in self.processes:
            process.join(timeout=5)
        if still and sys.stdout.isatty():
            sys.stdout.write("\x1b[?25h")  # a live display had hidden the cursor


def _wait(ranks: _Ranks, signals: _Signals, grace_s: float) -> None:
    """Until every rank has ended, or one has failed, or the ranks had their time to stop."""
    told_at = failed_at = done_at = None
    while ranks.living:
        ranks.collect(0.2)
        now = time.monotonic()
        if signals.signum is not None and told_at is None:
            ranks.tell(signal.SIGTERM)
            told_at = now
        if any(end.kind == "stopped" for end in ranks.ends.values()) and told_at is None:
            told_at = now  # a signal reached a rank itself, and with it all
        if told_at is not None:
            if signals.again or now - told_at > grace_s:
                return
            continue  # a rank that dies now was told to; the others may still save
        if failures := ranks.failures():
            failed_at = failed_at or now
            # A rank whose peer vanishes fails as well: wait for the one that failed first.
            if not all(end.lost_peer for end in failures.values()) or now - failed_at > _SETTLE_S:
                return
        if len(ranks.ends) == ranks.nproc:
            done_at = done_at or now
            if now - done_at > _LEAVE_S:
                return
    ranks.collect(0)


def _conclude(ranks: _Ranks, signals: _Signals, store: Any, grace_s: float) -> Any:
    """What the ranks' ends come to."""
    failures = ranks.failures()
    stopped = [end.code for end in ranks.ends.values() if end.kind == "stopped"]
    if signals.signum is not None or (stopped and not failures):
        signum = signals.signum or stopped[0]
        if len(ranks.ends) == ranks.nproc and all(end.kind == "done" for end in ranks.ends.values()):
            return ranks.ends[0].result  # the signal came when all was done
        raise Stopped(signum, _why_not(ranks, signals, grace_s))
    if failures:
        raise _diagnose(failures, ranks, store)
    return ranks.ends[0].result


def _why_not(ranks: _Ranks, signals: _Signals, grace_s: float) -> str:
    """Why a job that was told to stop did not end as it should, if it did not."""
    causes = [
        (r, end) for r, end in ranks.failures().items() if end.kind in ("refused", "raised") and not end.lost_peer
    ]
    if causes:
        rank, end = causes[0]
        return f"rank {rank} could not save: {end.text}"
    if ranks.killed and signals.again:
        return "a second signal ended the ranks at once, and what was done since the last checkpoint is lost"
    if ranks.killed:
        return (
            f"{len(ranks.killed)} of {ranks.nproc} ranks did not end within {grace_s:g} s and were killed; what was "
            "done since the last checkpoint is lost (--grace gives them longer)"
        )
    return ""


def _diagnose(failures: dict[int, _End], ranks: _Ranks, store: Any) -> BaseException:
    """Which rank failed first and of what."""
    nproc, ended = ranks.nproc, "the other ranks were ended"
    if store.check([END_REASON_KEY]):
        return RankFailed(f"{store.get(END_REASON_KEY).decode()}; {ended}")
    for rank, end in failures.items():  # in the order in which they came
        if end.kind == "refused" and not end.lost_peer:
            return LongspanError(end.text)
        if end.kind == "died" and end.code != LOST_CODE:
            return RankFailed(_spell_death(rank, nproc, end.code, ended))
        if end.kind == "exited":
            return RankFailed(f"rank {rank} of {nproc} called sys.exit({end.text}) before the job was done; {ended}")
        if end.kind != "died" and not end.lost_peer:
            return RankFailed(f"rank {rank} of {nproc} died (exit code 1): {end.text}; {ended}", end.traceback)
    if any(end.kind == "died" for end in failures.values()):  # they ended themselves, having lost the store
        return RankFailed(
            f"the ranks lost contact with this process (the launcher, process {os.getpid()}), which holds the job's "
            f"store and did not answer for --timeout seconds: it was stopped, or starved of processor time; all ranks "
            "have ended"
        )
    rank, end = next(iter(failures.items()))
    return RankFailed(
        f"rank {rank} of {nproc} lost a peer: {end.text}; every rank is still there or says the same, so look at the "
        f"network; {ended}",
        end.traceback,
    )


def _spell_death(rank: int, nproc: int, code: int, ended: str) -> str:
    if code < 0:
        hint = "; often the kernel does this when memory runs out" if code == -signal.SIGKILL else ""
        return f"rank {rank} of {nproc} was killed by {signal.Signals(-code).name}{hint}; {ended}"
    early = " before the job was done" if code == 0 else ""
    return f"rank {rank} of {nproc} exited with code {code} and left no error{early}; {ended}"


# --- a rank's side


def threads_per_rank(nproc: int) -> int:
    """Compute threads for each of `nproc` ranks on this machine: the cores it may use, divided; at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // nproc)


def _rank_main(
    rank: int, pipe: Connection, entry: Callable[..., Any], args: tuple[Any, ...], nproc: int, port: int
) -> None:
    """What each process runs."""
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
        TORCHELASTIC_USE_AGENT_STORE="True",  # rank 0 need not hold the store
        **{SUPERVISED: "1"},
    )
    use_loopback()
    if rank:
        be_quiet()
    end = _run(entry, args, nproc)
    try:
        said = pickle.dumps(end)
    except Exception as error:  # a result that cannot be sent
        said = pickle.dumps(_End("raised", f"{type(error).__name__}: {error}", traceback.format_exc()))
    with contextlib.suppress(OSError):
        pipe.send_bytes(said)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    if end.kind != "done":
        os._exit(1)  # taking the process group down may abort, or hang


def be_quiet() -> None:
    """On all ranks but the first of a job: what libraries warn of is alike on all, and said once. Errors are said.

    Before they are imported: transformers and torch's C++ code read their variables then. Torch sets up its loggers
    when it is imported.
    """
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    import torch  # noqa: F401

    warnings.simplefilter("ignore")
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
            text += " (whatever read the output of this job has ended)"
        return _End("raised", text, traceback.format_exc(), lost_peer(error))


def _end_with_parent() -> None:
    """End this process when the launcher is gone, however it went, and even if this process is stopped."""
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
    """Whether an error, or what it was raised from, is gloo's, NCCL's or the store's: another rank is gone.

    A pipe or a connection of Python's own that breaks (the reader of the output, a download) is not that.
    """
    kinds = ("DistBackendError", "DistNetworkError", "DistStoreError", "gloo/transport")
    while error is not None:
        said = f"{type(error).__name__}: {error}"
        if not isinstance(error, OSError) and any(kind in said for kind in kinds):
            return True
        error = error.__cause__ or error.__context__
    return False
