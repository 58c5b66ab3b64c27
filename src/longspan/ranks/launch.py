"""Start one process per rank on this machine, or join the job that torchrun or srun has started.

Without torchrun or srun, `longspan.ranks.supervisor` starts and ends the ranks. Under them, which start the ranks of
several machines, the job runs in this process. Either way it runs inside `joined`: the rendezvous is done, and a
heartbeat names a rank that is lost.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from longspan.core.errors import LongspanError, is_full
from longspan.core.validation import check_processes
from longspan.ranks.heartbeat import Heartbeat, ending_with_the_agent
from longspan.ranks.job import SUPERVISED, VARIABLES, adopt_step, read_job
from longspan.ranks.rendezvous import wait_for_ranks
from longspan.ranks.supervisor import (
    GRACE_S,
    LOST_CODE,
    RankFailed,
    Signals,
    Stopped,
    silence_imports,
    silence_libraries,
    supervise,
    threads_per_rank,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from longspan.ranks.job import RankFlags

__all__ = ["GRACE_S", "RankFailed", "StopRequest", "Stopped", "joined", "launch", "threads_per_rank"]

#: Seconds that a rank with an error waits for the machine's first rank to print it, under torchrun.
FIRST_RANK_WAIT_S = 30
#: The same for a heartbeat's verdict, which the first rank may be unable to print.
LOST_WAIT_S = 3


class StopRequest(Signals):
    """Catches SIGTERM and SIGINT, so that a job can end at a convenient point: a context manager around the job.

    A second signal, later than `repeat_s` after the first, acts as it would without this. (Ctrl-C reaches a rank twice
    at once, from the terminal and from the launcher.) A job that is still inside `grace_s` seconds after the first
    signal is ended; `late` is what it has not done, and the consequence.
    """

    def __init__(
        self,
        stops: str = "stopping",
        repeat_s: float = 2.0,
        grace_s: float = GRACE_S,
        late: tuple[str, str] = ("not saved", "progress since the last checkpoint is lost (--grace gives it longer)"),
    ) -> None:
        # The launcher's ranks ignore Ctrl-C until they get here, and so does a shell's background job.
        super().__init__((signal.SIGTERM, signal.SIGINT), repeat_s, keep_ignored=False)
        self._stops, self._grace_s, self._late = stops, grace_s, late
        self._timer: threading.Timer | None = None

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        if self._timer is not None:
            self._timer.cancel()

    def on_first(self, signum: int) -> None:
        """Start the timer, and print `stops` on the first rank."""
        self._timer = threading.Timer(self._grace_s, self._end_late, (signum,))
        self._timer.daemon = True
        self._timer.start()
        if is_first_rank():
            # Not by sys.stderr: the signal may have interrupted one of its writes.
            os.write(2, f"longspan: {self._stops}; a second signal ends it at once\n".encode())

    def on_second(self, signum: int) -> None:
        """Act as without this context."""
        signal.signal(signum, signal.SIG_DFL)
        signal.raise_signal(signum)

    def _end_late(self, signum: int) -> None:
        if SUPERVISED not in os.environ:  # otherwise the launcher prints it
            what, consequence = self._late
            _print(f"error: {what} within {self._grace_s:g} s of {signal.Signals(signum).name}; {consequence}")
        os._exit(128 + signum)


def under_torchrun() -> bool:
    """Return whether the environment describes a job: this process is a rank, of torchrun, `srun` or the launcher."""
    adopt_step()
    return all(name in os.environ for name in VARIABLES)


def started_elsewhere() -> bool:
    """Return whether torchrun or a scheduler started this rank, so that no launcher has checked anything before."""
    return under_torchrun() and SUPERVISED not in os.environ


def is_first_rank() -> bool:
    """Return whether this process prints the job's results: rank 0, or the only process."""
    return not under_torchrun() or os.environ["RANK"] == "0"


def is_first_local_rank() -> bool:
    """Return whether this process prints on this machine why the job ends: its first rank, or the only process."""
    return not under_torchrun() or os.environ.get("LOCAL_RANK", os.environ["RANK"]) == "0"


def _print(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"longspan: {text}\n")
        sys.stderr.flush()


def let_first_rank_report() -> None:
    """Wait, before this rank ends with an error, so that the machine's first rank can print it.

    torchrun ends all ranks as soon as one has failed, so a rank that ended at once could end the one that is about to
    print the cause. An error that was not that of all ranks is printed after the wait.
    """
    if not is_first_local_rank() and "LOCAL_RANK" in os.environ:  # no agent without LOCAL_RANK
        time.sleep(FIRST_RANK_WAIT_S)


def exit_code(run: Callable[[], int], where: Callable[[str], str] = lambda message: "") -> int:
    """Run a command; print why it fails on the machine's first rank, and return its exit code.

    0: done. 1: `run` says so, or a rank died. 2: bad input. 143, 130: ended early by SIGTERM or Ctrl-C. `where` returns
    what to add to the message of an error.
    """
    code, why = 0, ""
    silence_imports()
    try:
        code = run()
        sys.stdout.flush()
    except BrokenPipeError:
        return _end_broken_pipe()
    except OSError as error:
        if not is_full(error):
            raise
        _end_broken_pipe()
        code, why = 2, f"longspan: error: the disk is full: {error}; make room, and run it again\n"
    except LongspanError as error:
        code, why = 2, f"longspan: error: {error}{where(str(error))}\n"
    except RankFailed as error:
        code, why = 1, f"{error.details}longspan: error: {error}\n"
    except Stopped as stop:  # without waiting: a stopped torchrun agent would wait for the ranks
        if is_first_local_rank():
            print(f"longspan: stopped by {signal.Signals(stop.signum).name}", file=sys.stderr)
        return 128 + stop.signum
    except SystemExit as end:  # by tyro after --help or wrong flags; a text is a message and means code 1
        if isinstance(end.__context__, BrokenPipeError):  # raised by rich
            return _end_broken_pipe()
        code, why = (1, f"{end.code}\n") if isinstance(end.code, str) else (end.code or 0, "")
    except KeyboardInterrupt:
        return 130
    if code:
        let_first_rank_report()
    sys.stderr.write(why)
    return code


def _end_broken_pipe() -> int:
    """Return the exit code after the reader of stdout has closed it (`longspan plan ... | head -1`); print nothing."""
    with contextlib.suppress(OSError, ValueError):  # drop what is still in the buffer
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 128 + signal.SIGPIPE


def check_nproc(needed: int, nproc: int | None, mesh: str) -> None:
    """Raise if the number of processes on this machine (None: as many as needed) is not that of the mesh."""
    job = read_job()
    if job is not None:
        world, local = job.world_size, job.local_world_size
        if world != needed:
            raise LongspanError(
                f"{job.started_by} started {world} processes, but {mesh} needs {needed}; start {needed}, or choose "
                f"degrees whose product is {world}",
                code="LS102",
            )
        if nproc is not None and local and nproc != local:
            raise LongspanError(
                f"--nproc {nproc} does not match the {local} processes that {job.started_by} started on this machine; "
                f"leave --nproc out under {job.started_by}"
            )
    elif nproc is not None and nproc != needed:
        raise LongspanError(
            f"--nproc {nproc} does not match the mesh: {mesh} needs {needed} processes; leave --nproc out, or choose "
            f"degrees whose product is {nproc} (for several machines start longspan under torchrun)",
            code="LS102",
        )


def open_first(
    config: Any, open_inputs: Callable[[Any], Any], ranks: int = 0, mesh: str = "", *, dry_run: bool = False
) -> Any:
    """Check a command's config, then return `open_inputs(config)`, before any rank starts.

    Under torchrun return None: the ranks have started, and open the inputs together (`agreement.open_together`). With
    `dry_run` no rank will be started here, so there may be any number of them. `ranks` and `mesh` (flags, for messages)
    are by default those of `config.parallel`.
    """
    config.check()
    ranks, mesh = ranks or config.parallel.ranks, mesh or config.parallel.flags
    check_nproc(ranks, config.nproc, mesh)
    if under_torchrun():
        return None
    if not dry_run:
        check_processes(ranks, mesh)
    return open_inputs(config)


def launch(entry: Callable[..., Any], *args: Any, nproc: int, grace_s: float = GRACE_S) -> Any:
    """Run `entry(*args)` on `nproc` ranks and return rank 0's result.

    One rank runs in this process, without a process group. Several are started by `longspan.ranks.supervisor`, unless
    torchrun has already started this process as one of them. A script that calls this needs `if __name__ ==
    "__main__":`, and `entry` and `args` must be picklable. After a signal the ranks have `grace_s` seconds to end.

    Raises:
        LongspanError: raised by a rank (the first one's), for a wrong number of processes under torchrun, or for
            variables that describe no possible job.
        RankFailed: a rank died of anything else, ended early, or lost its heartbeat; the others have been ended.
        Stopped: a signal ended the job; `not_saved` says why its state could not be saved, if so.
    """
    if read_job() is not None:
        from torch.distributed.elastic.multiprocessing.errors import record

        check_nproc(nproc, None, f"a mesh of {nproc}")
        if nproc > 1 and is_first_rank():
            _print(f"waiting for {nproc} ranks")
        return record(_run_in_this_process)(entry, *args)
    if nproc == 1:
        return entry(*args)
    _print(f"starting {nproc} ranks")
    return supervise(entry, args, nproc, grace_s)


def _run_in_this_process(entry: Callable[..., Any], *args: Any) -> Any:
    """Run `entry`; `sys.exit(0)` in it is an error, as torchrun would count this rank as done and the others wait."""
    try:
        return entry(*args)
    except Stopped:
        raise
    except SystemExit as end:
        rank = os.environ["RANK"]
        raise RankFailed(f"rank {rank} called sys.exit({end.code!r}) before the job was done") from end


def unwatched(flags: RankFlags) -> Heartbeat:
    """Wait for the other ranks, and return a heartbeat that does not beat, for ranks that something else watches."""
    return Heartbeat(wait_for_ranks(flags.timeout, flags.start_timeout), lambda *_: None)


@contextlib.contextmanager
def joined(timeout_s: float | None = None, start_s: float | None = None) -> Iterator[Heartbeat]:
    """Wait for the other ranks, and run a heartbeat while this context lasts: put it around a rank's whole job."""
    if started_elsewhere() and not is_first_rank():
        silence_libraries()
    with ending_with_the_agent():
        peers = wait_for_ranks(timeout_s, start_s)
        with Heartbeat(peers, _end_lost_job) as heartbeat:
            yield heartbeat


def _end_lost_job(message: str, stored: bool) -> None:
    """End this process from a thread, as its main thread may wait forever; `stored`: the launcher has the message."""
    if SUPERVISED in os.environ:
        if not stored:
            _print(f"error: {message}")
        os._exit(LOST_CODE)
    if not is_first_local_rank():
        time.sleep(LOST_WAIT_S)  # the first rank may be the lost one
    _print(f"error: {message}")
    os._exit(1)


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
