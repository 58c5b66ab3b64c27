"""Start one process per rank on this machine, or join the job that torchrun has started.

Alone, the ranks are workers of torch's own elastic agent (what `torchrun --standalone` runs), so a rank that dies
ends the others. Under torchrun, which starts the ranks of several machines, the job runs in this very process.
"""

from __future__ import annotations

import contextlib
import json
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from longspan.errors import LongspanError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

#: Seconds that the ranks get to save and end after the launcher was told to stop; after that they are killed.
STOP_GRACE_S = 600
#: Seconds that a rank which lost the connection to a peer waits before it ends.
LOST_PEER_WAIT_S = 5
#: Seconds that a rank which ends with an error leaves the machine's first rank to say it, under torchrun.
FIRST_RANK_WAIT_S = 30

_TORCHRUN_ENV = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Stopped(SystemExit):
    """The job ended early because it was told to by a signal, after it saved what it had.

    Left alone it ends the process with 128 + the signal (143 for SIGTERM), so that a scheduler does not take the job
    for finished. `signum` is the signal.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(128 + signum)
        self.signum = signum


class RankFailed(RuntimeError):
    """A rank died. The message names it and says how; `details` holds its traceback, where it left one."""

    def __init__(self, message: str, details: str = "") -> None:
        super().__init__(message)
        self.details = details


class StopRequest:
    """Catches SIGTERM and SIGINT, so that a job can end at a moment of its own choosing.

    A second signal, later than `repeat_s` after the first, is no longer caught: it acts as it would have without
    this. (Ctrl-C reaches a rank twice at once, from the terminal and from the launcher.)
    """

    def __init__(self, repeat_s: float = 2.0) -> None:
        self.signum: int | None = None
        self._repeat_s = repeat_s
        self._since = 0.0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        with contextlib.suppress(ValueError):  # not in the main thread: signals are not ours to catch
            for signum in (signal.SIGTERM, signal.SIGINT):
                self._previous[signum] = signal.signal(signum, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)
        self._previous.clear()

    def _on_signal(self, signum: int, _: FrameType | None) -> None:
        if self.signum is None:
            self.signum, self._since = signum, time.monotonic()
        elif time.monotonic() - self._since > self._repeat_s:
            signal.signal(signum, signal.SIG_DFL)
            signal.raise_signal(signum)


def under_torchrun() -> bool:
    """Whether this process is already a rank of a job: torchrun's rendezvous is in its environment."""
    return all(name in os.environ for name in _TORCHRUN_ENV)


def is_first_rank() -> bool:
    """Whether this process should print what the job found: rank 0, or the only process."""
    return not under_torchrun() or os.environ["RANK"] == "0"


def is_first_rank_here() -> bool:
    """Whether this process should say on this machine why the job ends: its first rank, or the only process."""
    return not under_torchrun() or os.environ.get("LOCAL_RANK", os.environ["RANK"]) == "0"


def let_first_rank_speak() -> None:
    """Called by every rank that is about to end with an error: the others wait for the machine's first rank.

    torchrun ends all ranks as soon as one has failed, so a rank that ended at once could end the one that was about to
    say why. The first rank returns at once, says it and fails; torchrun then ends the others in their wait. If they are
    still there after `FIRST_RANK_WAIT_S` seconds, the error was not that of all ranks, and they should say it.
    """
    if not is_first_rank_here():
        time.sleep(FIRST_RANK_WAIT_S)


def threads_per_rank(nproc: int) -> int:
    """Compute threads for each of `nproc` ranks on this machine: the cores it may use, divided; at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // nproc)


def check_nproc(needed: int, nproc: int | None, mesh: str) -> None:
    """Refuse a number of processes that is not the number of ranks of the mesh, before any of them starts.

    Args:
        needed: ranks of the mesh.
        nproc: processes asked for on this machine, or None for as many as the mesh needs.
        mesh: how the mesh was spelled, for the message.

    Raises:
        LongspanError: with both numbers.
    """
    if under_torchrun():
        world, here = int(os.environ["WORLD_SIZE"]), int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
        if world != needed:
            raise LongspanError(
                f"torchrun started {world} processes, but {mesh} needs {needed}; start {needed}, or choose degrees "
                f"whose product is {world}"
            )
        if nproc is not None and here and nproc != here:
            raise LongspanError(
                f"--nproc {nproc} does not match the {here} processes that torchrun started on this machine; "
                "leave --nproc out under torchrun"
            )
    elif nproc is not None and nproc != needed:
        raise LongspanError(
            f"--nproc {nproc} does not match the mesh: {mesh} needs {needed} processes; leave --nproc out, or choose "
            f"degrees whose product is {nproc} (for several machines start longspan under torchrun)"
        )


def launch(entry: Callable[..., Any], *args: Any, nproc: int) -> Any:
    """Run `entry(*args)` on `nproc` ranks and return what rank 0 returned.

    One rank runs in this process, with no process group. Several are started here by torch's elastic agent, without
    restarts, unless torchrun has started this process as one of them already. `entry` finds the job in torchrun's
    environment variables (`longspan.init_mesh` reads them). A script that calls this needs the usual
    `if __name__ == "__main__":`, and `entry` and `args` must be picklable.

    Raises:
        LongspanError: raised by a rank (the earliest one's), or for a wrong number of processes under torchrun.
        RankFailed: a rank died of anything else; the others have been ended (those that did not end by themselves
            are killed after 30 seconds, a limit of the elastic agent).
        Stopped: the job was told to stop by a signal and has saved.
    """
    if under_torchrun():
        from torch.distributed.elastic.multiprocessing.errors import record

        check_nproc(nproc, None, f"a mesh of {nproc}")
        return record(entry)(*args)
    if nproc == 1:
        return entry(*args)
    return _launch_agent(entry, args, nproc)


def _launch_agent(entry: Callable[..., Any], args: tuple[Any, ...], nproc: int) -> Any:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    grace: dict[str, Any] = {}
    if "shutdown_timeout" in LaunchConfig.__dataclass_fields__:  # a newer torch than the oldest that will do
        grace["shutdown_timeout"] = STOP_GRACE_S
    with tempfile.TemporaryDirectory(prefix="longspan-") as log_dir, _borrowed_process():
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=nproc,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",  # any free port
            local_addr="localhost",
            max_restarts=0,  # a checkpoint is the way back, and the user's decision
            monitor_interval=0.1,
            logs_specs=DefaultLogsSpecs(log_dir=log_dir),
            signals_to_handle="SIGTERM,SIGINT,SIGHUP",
            **grace,
        )
        try:
            return elastic_launch(config, _run_rank)(entry, args, nproc)[0]
        except ChildFailedError as error:
            raise _diagnose(error, Path(log_dir), nproc) from None
        except SignalException as stop:
            raise Stopped(stop.sigval) from None


@contextlib.contextmanager
def _borrowed_process() -> Iterator[None]:
    """Give back what the elastic agent takes of this process: signal handlers, a variable, its log, its children."""
    handlers = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    children = set(multiprocessing.active_children())
    # The agent logs every death with its own traceback; what happened is said once, by `RankFailed`.
    logs = [logging.getLogger(f"torch.{name}") for name in ("distributed.elastic", "multiprocessing.spawn")]
    propagate, handler = [log.propagate for log in logs], logging.NullHandler()
    for log in logs:
        log.addHandler(handler)
        log.propagate = "LOGLEVEL" in os.environ
    try:
        yield
    finally:
        for child in set(multiprocessing.active_children()) - children:
            child.kill()
        for log, before in zip(logs, propagate, strict=True):
            log.propagate = before
            log.removeHandler(handler)
        os.environ.pop("TORCHELASTIC_SIGNALS_TO_HANDLE", None)
        with contextlib.suppress(ValueError):  # not in the main thread: they were not taken
            for signum, previous in handlers.items():
                signal.signal(signum, previous)


def _run_rank(entry: Callable[..., Any], args: tuple[Any, ...], nproc: int) -> Any:
    """What each worker process runs."""
    import torch
    import torch.distributed as dist
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(threads_per_rank(nproc))
    try:
        result = entry(*args)  # `Stopped` ends the process: a stopping agent no longer collects return values
    except Exception as error:
        get_error_handler().record_exception(error)
        _die(error)
    if dist.is_initialized():
        dist.destroy_process_group()
    return result


def _die(error: Exception) -> NoReturn:
    """End this rank, after `error` was recorded, without taking its process group down: that may abort, or hang."""
    if _lost_peer(f"{type(error).__name__}: {error}"):
        # The agent reports the first death it sees, so let it see the peer's; it then ends this rank.
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, signal.SIG_DFL)
        time.sleep(LOST_PEER_WAIT_S)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


@dataclass(frozen=True)
class _Record:
    """What a rank that raised left behind."""

    rank: int
    time_ns: int
    text: str
    traceback: str


def _records(log_dir: Path) -> list[_Record]:
    """The error files of the ranks, earliest first."""
    found = []
    for path in log_dir.glob("**/error.json"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # cut short: as if it had left none
            message = json.loads(path.read_text())["message"]
            text, traceback = message["message"], message["extraInfo"]["py_callstack"]
            found.append(_Record(int(path.parent.name), path.stat().st_mtime_ns, text, traceback))
    return sorted(found, key=lambda record: record.time_ns)


def _diagnose(error: ChildFailedError, log_dir: Path, nproc: int) -> BaseException:
    """Which rank died first and of what, from the agent's report and the error files of all ranks."""
    rank, failure = error.get_first_failure()
    records = _records(log_dir)
    # A rank whose peer vanishes raises as well; what came first is an error of another kind, or a silent death.
    causes = [record for record in records if not _lost_peer(record.text)]
    ended = "the other ranks were ended"
    if causes:
        first = causes[0]
        kind, _, said = first.text.partition(": ")
        if kind == LongspanError.__name__:
            return LongspanError(said)
        return RankFailed(f"rank {first.rank} of {nproc} died (exit code 1): {first.text}; {ended}", first.traceback)
    if rank in {record.rank for record in records}:
        silent = sorted(set(range(nproc)) - {record.rank for record in records})
        return RankFailed(
            f"rank {records[0].rank} of {nproc} lost a peer: {records[0].text}; without an error of their own ended "
            f"the ranks {silent}; {ended}",
            records[0].traceback,
        )
    if failure.exitcode in (128 + signal.SIGTERM, 128 + signal.SIGINT):
        return Stopped(failure.exitcode - 128)
    if failure.exitcode < 0:
        hint = "; often the kernel does this when memory runs out" if failure.exitcode == -signal.SIGKILL else ""
        return RankFailed(f"rank {rank} of {nproc} was killed by {failure.signal_name()}{hint}; {ended}")
    return RankFailed(f"rank {rank} of {nproc} exited with code {failure.exitcode} and left no error; {ended}")


def _lost_peer(text: str) -> bool:
    """Whether an error says that another rank is gone, in the words of gloo, of NCCL or of the store."""
    signs = ("gloo/transport", "by peer", "Broken pipe", "DistBackendError", "DistNetworkError", "DistStoreError")
    return any(sign in text for sign in signs)
