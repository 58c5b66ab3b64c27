"""Start one process per rank on this machine, or join the job that torchrun or srun has started.

Alone, the ranks are processes that `longspan.ranks.supervisor` starts and ends. Under torchrun or srun, which start the
ranks of several machines, the job runs in this very process. Either way a job runs inside `joined`: the ranks have met,
and a heartbeat names the one that is lost.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from longspan.core.errors import LongspanError
from longspan.ranks.heartbeat import Heartbeat, ending_with_the_agent
from longspan.ranks.rendezvous import VARIABLES, read_job, wait_for_ranks
from longspan.ranks.slurm import adopt_step
from longspan.ranks.supervisor import (
    GRACE_S,
    LOST_CODE,
    SUPERVISED,
    RankFailed,
    Stopped,
    be_quiet,
    supervise,
    threads_per_rank,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

__all__ = ["GRACE_S", "RankFailed", "StopRequest", "Stopped", "joined", "launch", "threads_per_rank"]

#: Seconds that a rank which ends with an error leaves the machine's first rank to say it, under torchrun.
FIRST_RANK_WAIT_S = 30
#: The same for what a heartbeat found, which the first rank may be unable to say.
LOST_WAIT_S = 3


class StopRequest:
    """Catches SIGTERM and SIGINT, so that a job can end at a moment of its own choosing.

    A second signal, later than `repeat_s` after the first, is no longer caught: it acts as it would have without
    this. (Ctrl-C reaches a rank twice at once, from the terminal and from the launcher.) A job that has not left this
    context `grace_s` seconds after the first signal is ended as it is, and `late` says what it has not done, and what
    comes of it. The job's first rank says at once that it stops, and when (`stops`).
    """

    def __init__(
        self,
        stops: str = "stopping",
        repeat_s: float = 2.0,
        grace_s: float = GRACE_S,
        late: tuple[str, str] = (
            "not saved",
            "what was done since the last checkpoint is lost (--grace gives it longer)",
        ),
    ) -> None:
        self.signum: int | None = None
        self._stops, self._repeat_s, self._grace_s, self._late = stops, repeat_s, grace_s, late
        self._timer: threading.Timer | None = None
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
        if self._timer is not None:
            self._timer.cancel()

    def _on_signal(self, signum: int, _: FrameType | None) -> None:
        if self.signum is None:
            self.signum, self._since = signum, time.monotonic()
            self._timer = threading.Timer(self._grace_s, self._give_up, (signum,))
            self._timer.daemon = True
            self._timer.start()
            if is_first_rank():
                # Not by sys.stderr, which a signal may have interrupted in the middle of a write.
                os.write(2, f"longspan: {self._stops}; a second signal ends it at once\n".encode())
        elif time.monotonic() - self._since > self._repeat_s:
            signal.signal(signum, signal.SIG_DFL)
            signal.raise_signal(signum)

    def _give_up(self, signum: int) -> None:
        if SUPERVISED not in os.environ:  # else the launcher says it
            _write_error(
                f"{self._late[0]} within {self._grace_s:g} s of {signal.Signals(signum).name}; {self._late[1]}"
            )
        os._exit(128 + signum)


def under_torchrun() -> bool:
    """Whether this process is already a rank of a job: its environment says where the ranks meet, or it is srun's."""
    adopt_step()
    return all(name in os.environ for name in VARIABLES)


def started_elsewhere() -> bool:
    """Whether torchrun or a scheduler has started this rank, so that no launcher here has checked anything first."""
    return under_torchrun() and SUPERVISED not in os.environ


def is_first_rank() -> bool:
    """Whether this process should print what the job found: rank 0, or the only process."""
    return not under_torchrun() or os.environ["RANK"] == "0"


def is_first_rank_here() -> bool:
    """Whether this process should say on this machine why the job ends: its first rank, or the only process."""
    return not under_torchrun() or os.environ.get("LOCAL_RANK", os.environ["RANK"]) == "0"


def _write_error(text: str) -> None:
    _say(f"error: {text}")


def _say(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"longspan: {text}\n")
        sys.stderr.flush()


def let_first_rank_speak() -> None:
    """Called by every rank that is about to end with an error: the others wait for the machine's first rank.

    torchrun ends all ranks as soon as one has failed, so a rank that ended at once could end the one that was about to
    say why. The first rank returns at once, says it and fails; torchrun then ends the others in their wait. If they are
    still there after `FIRST_RANK_WAIT_S` seconds, the error was not that of all ranks, and they should say it.
    """
    if not is_first_rank_here() and "LOCAL_RANK" in os.environ:  # else nobody is ended by an agent
        time.sleep(FIRST_RANK_WAIT_S)


def check_nproc(needed: int, nproc: int | None, mesh: str) -> None:
    """Refuse a number of processes that is not the number of ranks of the mesh, before any of them starts.

    Args:
        needed: ranks of the mesh.
        nproc: processes asked for on this machine, or None for as many as the mesh needs.
        mesh: how the mesh was spelled, for the message.

    Raises:
        LongspanError: with both numbers; or for variables that describe no possible job.
    """
    job = read_job()
    if job is not None:
        world, here = job.world_size, job.ranks_here
        if world != needed:
            raise LongspanError(
                f"{job.started_by} started {world} processes, but {mesh} needs {needed}; start {needed}, or choose "
                f"degrees whose product is {world}"
            )
        if nproc is not None and here and nproc != here:
            raise LongspanError(
                f"--nproc {nproc} does not match the {here} processes that {job.started_by} started on this machine; "
                f"leave --nproc out under {job.started_by}"
            )
    elif nproc is not None and nproc != needed:
        raise LongspanError(
            f"--nproc {nproc} does not match the mesh: {mesh} needs {needed} processes; leave --nproc out, or choose "
            f"degrees whose product is {nproc} (for several machines start longspan under torchrun)"
        )


def launch(entry: Callable[..., Any], *args: Any, nproc: int, grace_s: float = GRACE_S) -> Any:
    """Run `entry(*args)` on `nproc` ranks and return what rank 0 returned.

    One rank runs in this process, with no process group. Several are started here (`longspan.ranks.supervisor`), unless
    torchrun has started this process as one of them already. `entry` finds the job in torchrun's environment variables
    (`longspan.init_mesh` reads them). A script that calls this needs the usual `if __name__ == "__main__":`, and
    `entry` and `args` must be picklable.

    Args:
        entry: what every rank runs.
        args: its arguments.
        nproc: ranks of the job.
        grace_s: seconds that the ranks get to end after this process was told to stop.

    Raises:
        LongspanError: raised by a rank (the earliest one's), for a wrong number of processes under torchrun, or for
            variables that describe no possible job.
        RankFailed: a rank died of anything else, ended early, or was found lost by its heartbeat; the others have been
            ended.
        Stopped: the job was told to stop by a signal; `why_not` says what kept it from saving, if anything did.
    """
    if read_job() is not None:
        from torch.distributed.elastic.multiprocessing.errors import record

        check_nproc(nproc, None, f"a mesh of {nproc}")
        if nproc > 1 and is_first_rank():
            _say(f"waiting for {nproc} ranks")
        return record(_noticing_an_early_end)(entry, *args)
    if nproc == 1:
        return entry(*args)
    _say(f"starting {nproc} ranks")
    return supervise(entry, args, nproc, grace_s)


def _noticing_an_early_end(entry: Callable[..., Any], *args: Any) -> Any:
    """`sys.exit(0)` inside a job is no success: torchrun would think this rank is done, and the others would wait."""
    try:
        return entry(*args)
    except Stopped:
        raise
    except SystemExit as end:
        rank = os.environ["RANK"]
        raise RankFailed(f"rank {rank} called sys.exit({end.code!r}) before the job was done") from end


@contextlib.contextmanager
def joined(timeout_s: float | None = None, start_s: float | None = None) -> Iterator[Heartbeat]:
    """Around all that a rank of a job does: it has met the others, and from then on its heart beats.

    A rank that is stopped, hung or cut off is named within `timeout_s` (by default 60, with GPUs 300), and every rank
    ends; `longspan.ranks.heartbeat` has the rules. Alone, nothing beats.

    Raises:
        LongspanError: if a rank does not come within `start_s` (by default 600 seconds), or there is no such job.
    """
    if started_elsewhere() and not is_first_rank():
        be_quiet()
    with ending_with_the_agent():
        peers = wait_for_ranks(timeout_s, start_s)
        with Heartbeat(peers, _end_of_a_lost_job) as heartbeat:
            yield heartbeat


def _end_of_a_lost_job(message: str, told: bool) -> None:
    """End this rank, whose main thread may wait without end, from a thread. `told`: the launcher knows the message."""
    if SUPERVISED in os.environ:
        if not told:
            _write_error(message)
        os._exit(LOST_CODE)
    if not is_first_rank_here():
        time.sleep(LOST_WAIT_S)  # it may be the one that is lost
    _write_error(message)
    os._exit(1)


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """What libraries write to stdout (gloo greets there, from C++) goes to stderr: stdout is for what was asked for."""
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(stdout, 1)
        os.close(stdout)
