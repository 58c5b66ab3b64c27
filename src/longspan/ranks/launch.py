"""Start one process per rank on this machine, or join the job that torchrun or srun has started.

`launch(entry, *args, nproc=N)` runs a function, such as `longspan.train.command.train`, on every rank; `entry` puts its
work into `joined()`, which makes the process group and watches the ranks. `run` does both for the other commands, with
inputs that are opened before the ranks start. Whatever happens, all ranks end:

- A rank that ends before it has reported a result has failed, whatever its exit code. The others are then killed:
  without it they cannot even save.
- SIGTERM, SIGINT and SIGHUP are sent on as SIGTERM. The ranks have `grace_s` seconds to save and end; then they are
  killed. A second signal kills them at once.
- If this process is killed, so are the ranks.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from multiprocessing import connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longspan.core.errors import LongspanError
from longspan.core.validation import check_processes
from longspan.ranks.job import CPU_TIMEOUT_S, FOLDER, GPU_TIMEOUT_S, join_process_group, read_job, use_loopback
from longspan.ranks.watch import Watch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import FrameType

#: Default seconds for the ranks to save and end after a signal.
GRACE_S = 25.0
#: Seconds after the first signal before another counts as the second: Ctrl-C reaches a rank twice, and some senders
#: repeat themselves.
REPEAT_S = 1.0
#: Seconds that a rank which lost a peer waits, so that the launcher sees first why the peer ended.
_LOST_PEER_S = 5.0
#: How processes start: in a new Python, as a fork could not use a GPU. Tests fork.
START_METHOD = "spawn"


class Stopped(SystemExit):
    """A signal ended the job early, after it saved its state.

    Uncaught, it ends the process with 128 + the signal (143 for SIGTERM), so that a scheduler does not count the job as
    finished. `signum` is the signal; `not_saved` says why nothing was saved, or is empty.
    """

    def __init__(self, signum: int, not_saved: str = "") -> None:
        super().__init__(128 + signum)
        self.signum, self.not_saved = signum, not_saved


class RankFailed(RuntimeError):
    """A rank died or hangs. The message names it and the cause; `details` is its traceback, if it sent one."""

    def __init__(self, message: str, details: str = "") -> None:
        super().__init__(message)
        self.details = details


class StopRequest:
    """Catches `signals` (and SIGHUP), so that a job can end at a convenient point: a context manager around the job.

    `signum` is the first signal. A second one, more than `REPEAT_S` seconds later, acts as it would without this; with
    `ends=False` it only sets `again`. `stops` is printed on the first rank.
    """

    def __init__(
        self, stops: str = "stopping", *, ends: bool = True, signals: Sequence[int] = (signal.SIGTERM, signal.SIGINT)
    ) -> None:
        self.signals = signals
        self.signum: int | None = None
        self.again = False
        self._stops, self._ends, self._since = stops, ends, 0.0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        with contextlib.suppress(ValueError):  # only the main thread can catch signals
            for signum in self.signals:
                self._previous[signum] = signal.signal(signum, self._on_signal)
            if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # nohup ignores it
                self._previous[signal.SIGHUP] = signal.signal(signal.SIGHUP, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)

    def _on_signal(self, signum: int, _: FrameType | None) -> None:
        if self.signum is None:
            self.signum, self._since = signum, time.monotonic()
            if self._stops and is_first_rank():
                # Not by sys.stderr: the signal may have interrupted one of its writes.
                os.write(2, f"longspan: {self._stops}; a second signal ends it at once\n".encode())
        elif time.monotonic() - self._since > REPEAT_S:
            self.again = True
            if self._ends:
                signal.signal(signum, signal.SIG_DFL)
                signal.raise_signal(signum)


# --- who started this process


def is_started_rank() -> bool:
    """Return whether this process is a rank of a job: of torchrun, `srun` or `launch`."""
    return read_job() is not None


def is_first_rank() -> bool:
    """Return whether this process prints the job's results: rank 0, or the only process."""
    return os.environ.get("RANK", "0") == "0"


def is_first_local_rank() -> bool:
    """Return whether this process prints on this machine why the job ends: its first rank, or the only process."""
    return os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0")) == "0"


def check_started(needed: int, mesh: str) -> None:
    """Raise if torchrun or srun started another number of ranks than the mesh has."""
    job = read_job()
    if job is not None and job.world_size != needed:
        raise LongspanError(
            f"torchrun or srun started {job.world_size} processes, but {mesh} needs {needed}; start {needed}, or "
            f"choose degrees whose product is {job.world_size}",
            code="LS102",
        )


# --- start the ranks, and wait for their end


def run(config: Any, open_inputs: Callable[[Any], Any], work: Callable[[Callable[[], Any], Watch], Any]) -> Any:
    """Run a command: return rank 0's result of `work(opened, watch)`, which runs on every rank.

    Inputs are opened before any rank starts, and sent to the ranks; under torchrun every rank opens them. `opened()`
    returns them, and `work` compares them over the ranks (`longspan.comm.agree`). Raise as `launch`.
    """
    config.check()
    ranks, mesh = config.parallel.ranks, str(config.parallel)
    check_started(ranks, mesh)
    opened = None
    if not is_started_rank():
        check_processes(ranks, mesh)
        opened = open_inputs(config)
    return launch(run_rank, config, open_inputs, work, opened, nproc=ranks)


def run_rank(config: Any, open_inputs: Any, work: Any, opened: Any = None) -> Any:
    """Do a rank's part of `run`; `opened` are the inputs that the launcher has opened. Collective."""
    with joined(config.timeouts.timeout, config.timeouts.start_timeout) as watch:
        return work(lambda: open_inputs(config) if opened is None else opened, watch)


_NO_LEAKS = "ignore:resource_tracker:UserWarning"


def launch(entry: Callable[..., Any], *args: Any, nproc: int, grace_s: float = GRACE_S) -> Any:
    """Run `entry(*args)` on `nproc` ranks and return rank 0's result.

    One rank runs in this process, without a process group. Several are started here, unless torchrun or srun has
    already started this process as one of them. A script that calls this needs `if __name__ == "__main__":`, and
    `entry` and `args` must be picklable. After a signal the ranks have `grace_s` seconds to end.

    Raises:
        LongspanError: raised by a rank (the first one's), for a wrong number of processes under torchrun, or for
            variables that describe no possible job.
        RankFailed: a rank died of anything else, ended early, or lost its heartbeat; the others have been ended.
        Stopped: a signal ended the job; `not_saved` says why its state could not be saved, if so.
    """
    if is_started_rank():
        check_started(nproc, f"a mesh of {nproc}")
        if nproc > 1 and is_first_rank():
            _print(f"waiting for {nproc} ranks")
        try:
            return entry(*args)
        except Stopped:
            raise
        except SystemExit as end:  # torchrun would count `sys.exit(0)` as success while the other ranks wait
            raise _failure(end) from end
    if nproc == 1:
        return entry(*args)
    _print(f"starting {nproc} ranks")
    return start(entry, args, nproc, grace_s)


def start(entry: Callable[..., Any], args: tuple[Any, ...], nproc: int, grace_s: float = GRACE_S) -> Any:
    """Run `entry(*args)` on `nproc` new processes and return rank 0's result; as `launch`, without torchrun."""
    if _NO_LEAKS not in sys.warnoptions:  # a killed rank leaves tqdm's semaphores, which Python's tracker removes
        sys.warnoptions.append(_NO_LEAKS)
    context: Any = multiprocessing.get_context(START_METHOD)
    job = pickle.dumps((entry, args))  # a rank imports what it needs when the output of imports is hidden
    ranks: list[Any] = []
    with tempfile.TemporaryDirectory(prefix="longspan-") as folder, StopRequest("", ends=False) as stop:
        try:
            with _ignoring_interrupts():
                for rank in range(nproc):
                    ranks.append(context.Process(target=_rank, args=(rank, nproc, folder, os.getpid(), job)))
                    ranks[-1].start()
            ends, late = _wait(ranks, folder, stop, grace_s)
        finally:
            for rank in ranks:
                rank.kill()  # even a stopped one
                rank.join()
    if len(ends) < nproc or any(isinstance(end, BaseException) for end in ends.values()):
        raise _conclude(ends, stop.signum, late)
    return ends[0]


@contextlib.contextmanager
def _ignoring_interrupts() -> Iterator[None]:
    """Ignore SIGINT while processes start, which inherit this: in a terminal, Ctrl-C reaches the ranks, too."""
    main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN) if main else None
    try:
        yield
    finally:
        if main:
            signal.signal(signal.SIGINT, before)


def _wait(ranks: list[Any], folder: str, stop: StopRequest, grace_s: float) -> tuple[dict[int, Any], str]:
    """Return the result or error of each rank that ended, in that order, and why others must be killed, if so."""
    ends: dict[int, Any] = {}
    signalled = 0.0
    while len(ends) < len(ranks):
        connection.wait([r.sentinel for i, r in enumerate(ranks) if i not in ends], timeout=0.2)
        ended = {i: r.exitcode for i, r in enumerate(ranks) if i not in ends and r.exitcode is not None}
        ends |= {rank: _end_of(rank, len(ranks), folder, code) for rank, code in ended.items()}
        if stop.signum is None:
            if any(isinstance(end, Exception) for end in ends.values()):
                return ends, ""
            continue
        if not signalled:
            signalled = time.monotonic()
            for rank in ranks:
                rank.terminate()
        if stop.again:
            return ends, "a second signal ended the ranks at once; progress since the last checkpoint is lost"
        if time.monotonic() - signalled > grace_s:
            return ends, (
                f"{len(ranks) - len(ends)} of {len(ranks)} ranks did not end within {grace_s:g} s and were killed; "
                "progress since the last checkpoint is lost (--grace gives them longer)"
            )
    return ends, ""


def _end_of(rank: int, nproc: int, folder: str, code: int) -> Any:
    """Return the result or error that a rank has reported, or an error by its exit code."""
    with contextlib.suppress(OSError):
        return pickle.loads(Path(folder, f"end-{rank}").read_bytes())
    if code < 0:
        hint = "; often the kernel does this when memory runs out" if code == -signal.SIGKILL else ""
        return RankFailed(f"rank {rank} of {nproc} was killed by {signal.Signals(-code).name}{hint}")
    when = "" if code else " before the job was done"
    return RankFailed(f"rank {rank} of {nproc} exited with code {code} and left no error{when}")


def _conclude(ends: dict[int, Any], signum: int | None, late: str) -> BaseException:
    """Return the error that ended the job: a signal, or that of the first rank that failed."""
    failed = {rank: end for rank, end in ends.items() if isinstance(end, Exception)}
    stopped = [end.signum for end in ends.values() if isinstance(end, Stopped)]
    if signum is not None or not failed:
        raised = [(rank, end) for rank, end in failed.items() if not isinstance(end, RankFailed) or end.details]
        unsaved = next((f"rank {rank} could not save: {end}" for rank, end in raised), "")
        return Stopped(signum or stopped[0], late or unsaved)
    error: Exception = next(iter(failed.values()))
    if isinstance(error, RankFailed):
        return RankFailed(f"{error}; the other ranks were ended", error.details)
    return error


# --- in a rank


def _rank(rank: int, nproc: int, folder: str, launcher: int, job: bytes) -> None:
    end_with_parent(launcher)
    for signum in (signal.SIGTERM, signal.SIGHUP):  # a fork inherits the launcher's handlers
        signal.signal(signum, signal.SIG_DFL)
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": nproc, "LOCAL_WORLD_SIZE": nproc, FOLDER: folder}
    os.environ.update({name: str(value) for name, value in place.items()})
    use_loopback()
    silence_imports()
    if rank:
        silence_libraries()
    import torch
    import torch.distributed as dist

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(threads_per_rank(nproc))
    code = 1
    try:
        entry, args = pickle.loads(job)
        result = entry(*args)
        if dist.is_initialized():
            dist.destroy_process_group()
        _report(None if rank else result)
        return
    except BaseException as error:
        if lost_peer(error):
            time.sleep(_LOST_PEER_S)
        _report(_failure(error))
        code = 0 if isinstance(error, Stopped) else 1
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)  # destroying the process group may abort, or hang


def _failure(error: BaseException) -> BaseException:
    """Return the error that a rank which raised this reports to the launcher: one that can be pickled."""
    rank = f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}"
    if isinstance(error, Stopped):
        return error
    if isinstance(error, SystemExit):
        return RankFailed(f"{rank} called sys.exit({error.code!r}) before the job was done")
    if isinstance(error, LongspanError):
        return LongspanError(str(error))
    if lost_peer(error):
        return RankFailed(f"{rank} lost a peer: {error}; no rank reports another cause, so check the network")
    hint = " (the process that reads this job's output has ended)" if isinstance(error, BrokenPipeError) else ""
    text = f"{rank} died (exit code 1): {type(error).__name__}: {error}{hint}"
    return RankFailed(text, traceback.format_exc())


def _report(end: Any) -> None:
    """Leave this rank's result or error to the launcher."""
    path = Path(os.environ[FOLDER], f"end-{os.environ['RANK']}")
    path.with_suffix(".part").write_bytes(pickle.dumps(end))
    path.with_suffix(".part").rename(path)


@contextlib.contextmanager
def joined(timeout_s: float | None = None, start_s: float | None = None) -> Iterator[Watch]:
    """Make the job's process group, and watch its ranks while this context lasts: put it around a rank's whole job.

    `join_process_group` waits until all ranks have met in a file of the launcher's folder, or at torchrun's address,
    and calls `init_process_group`. One rank alone has no group.
    """
    import torch
    import torch.distributed as dist

    if not is_first_rank():
        silence_libraries()
    if "TORCHELASTIC_RUN_ID" in os.environ:  # a killed agent of torchrun ends nobody
        end_with_parent(os.getppid())
    gpus = torch.cuda.is_available()
    with stdout_to_stderr():
        store = join_process_group("cuda" if gpus else "cpu", start_s)
    if store is None:
        yield Watch()
        return
    timeout_s = timeout_s or (GPU_TIMEOUT_S if gpus else CPU_TIMEOUT_S)
    with Watch(store, dist.get_rank(), dist.get_world_size(), timeout_s, _end_lost_job) as watch:
        yield watch
    dist.destroy_process_group()


def _end_lost_job(verdict: str) -> None:
    """End this process from a thread, as its main thread may wait forever."""
    if FOLDER in os.environ:
        _report(RankFailed(verdict))
        os._exit(1)
    if not is_first_local_rank():
        time.sleep(3)  # the first rank may be the lost one
    _print(f"error: {verdict}")
    os._exit(1)


def end_with_parent(parent: int) -> None:
    """End this process when its parent is gone for whatever reason."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: even if this process is stopped

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, name="longspan-parent", daemon=True).start()


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


def threads_per_rank(nproc: int) -> int:
    """Return the compute threads for each of `nproc` ranks: the cores of this process divided by them, at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // nproc)


# --- what is printed


def _print(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"longspan: {text}\n")
        sys.stderr.flush()


@contextlib.contextmanager
def stdout_to_stderr(*, discard: bool = False) -> Iterator[None]:
    """Send what libraries write to stdout (gloo does, from C++) to stderr, or discard it: stdout is for results."""
    sys.stdout.flush()
    stdout, other = os.dup(1), os.open(os.devnull, os.O_WRONLY) if discard else os.dup(2)
    os.dup2(other, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(stdout, 1)
        os.close(stdout)
        os.close(other)


def silence_imports() -> None:
    """Hide warnings of packages that transformers and accelerate import wherever they find them."""
    for name in ("torch.utils._pytree", "torchao", "bitsandbytes", "DeepSpeed"):
        logging.getLogger(name).setLevel(logging.ERROR)


def silence_libraries() -> None:
    """Hide warnings on this rank, as the first one shows the same. Call it before libraries are imported."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
