"""The disk under a run: full ones, ones that not all ranks share, and two runs in one folder."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import socket
import time
import uuid
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longspan.core.errors import LongspanError
from longspan.core.system import format_os_error

if TYPE_CHECKING:
    from longspan.checkpoint.ranks import Ranks

LOCK = ".lock"
_PROBE = ".shared-"
#: Seconds until what one machine writes has to be seen by the others; network file systems keep names for a while.
SHARED_WAIT_S = 15.0

_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)


class DiskFull(LongspanError):
    """There is no room for what was to be written; what was whole before still is."""


def check_room(folder: Path, needed: int, what: str) -> None:
    """Refuse to begin what does not fit.

    Raises:
        DiskFull: with the bytes.
    """
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise DiskFull(f"{what} does not fit: {_room(folder, needed, free)}")


def format_disk_full(folder: Path, needed: int, what: str, why: str) -> str:
    """What to say when `why` ended the writing of `needed` bytes; to be asked when the partial files are gone."""
    free = shutil.disk_usage(folder).free
    if needed > free:
        return f"{what} does not fit: {_room(folder, needed, free)}"
    return f"{why} (of {_bytes(needed)} that are needed; {_bytes(free)} are free: a quota or a limit of the system?)"


def _room(folder: Path, needed: int, free: int) -> str:
    return (
        f"it needs {_bytes(needed)}, the disk of {folder} has {_bytes(free)} free, {_bytes(needed - free)} are missing"
    )


def _bytes(count: int) -> str:
    return f"{count:,} bytes"


# --- one disk for all ranks


def check_shared(folder: Path, ranks: Ranks, wait_s: float = SHARED_WAIT_S) -> None:
    """Refuse a folder that is not one and the same for all ranks, or that one of them cannot write to. Collective.

    The first rank writes a file with a random token, the others look for it and answer beside it.

    Raises:
        LongspanError: on every rank, naming the ranks and their machines.
    """
    if ranks.size == 1:
        return

    def ask() -> str:
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob(f"{_PROBE}*"):  # by a run that was killed while it asked
            left.unlink(missing_ok=True)
        token = uuid.uuid4().hex
        (folder / f"{_PROBE}{token}").write_text(token)
        return token

    token = ranks.first(ask)
    probe = folder / f"{_PROBE}{token}"
    mine = _answer_to(probe, ranks.rank)
    try:
        said = ranks.gather((_answer(probe, mine, token, wait_s), socket.gethostname(), str(folder.absolute())))
        wrong = ranks.first(lambda: _unheard(probe, [problem for problem, _, _ in said], token, wait_s))
    finally:
        for path in (mine, *([probe] if ranks.rank == 0 else [])):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
    if wrong:
        rank = min(wrong)
        (_, host, there), (_, first_host, first_there) = said[rank], said[0]
        raise LongspanError(
            f"the ranks do not share a folder: rank {rank} on {host}, where it is {there}, {wrong[rank]} rank 0 on "
            f"{first_host}, where it is {first_there} (wrong for {len(wrong)} of {ranks.size} ranks: "
            f"{', '.join(map(str, wrong))}); give an --out on a disk that all machines share, by its whole path"
        )


def _answer_to(probe: Path, rank: int) -> Path:
    return probe.with_name(f"{probe.name}-{rank}")


def _answer(probe: Path, mine: Path, token: str, wait_s: float) -> str:
    """Empty, or what is wrong on this rank."""
    if not _appears(probe, token, time.monotonic() + wait_s):
        return "does not see what is written by"
    try:
        mine.write_text(token)
    except OSError as error:
        return f"cannot write ({format_os_error(error)}) beside"
    return ""


def _unheard(probe: Path, problems: list[str], token: str, wait_s: float) -> dict[int, str]:
    """What is wrong, by rank: what they say themselves, or that the first rank does not see their answer."""
    end = time.monotonic() + wait_s
    for rank, problem in enumerate(problems):
        if not problem and not _appears(_answer_to(probe, rank), token, end):
            problems[rank] = "writes what is not seen by"
    return {rank: problem for rank, problem in enumerate(problems) if problem}


def _appears(path: Path, token: str, end: float) -> bool:
    while True:
        with contextlib.suppress(OSError):
            if path.read_text() == token:
                return True
        if time.monotonic() > end:
            return False
        time.sleep(0.1)


# --- one run in a folder


class RunLock:
    """Holds a run's folder for one process, and refuses it to others, by a lock of the system on `OUT/.lock`.

    The system gives it back when the process ends, however it ends, so a lock is never stale. It holds over machines
    on NFS (Linux, version 3 with lockd, version 4), CIFS, and Lustre and GPFS where they are mounted with locks. Where
    a file system has none, runs on one machine are told apart by the process that the file names, and a warning says
    that others are not.

    Raises:
        LongspanError: if another process has it, naming that process and its machine.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / LOCK
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            self._take()
            mine = {"pid": os.getpid(), "host": socket.gethostname(), "started": _started(os.getpid())}
            os.ftruncate(self._fd, 0)
            with contextlib.suppress(OSError):  # a full disk: the lock holds all the same, only its owner is not named
                os.pwrite(self._fd, json.dumps(mine).encode(), 0)
        except BaseException:
            os.close(self._fd)
            self._fd = -1
            raise

    def _take(self) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._refuse(_holder(self._fd))
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            holder = _holder(self._fd)
            here = holder.get("host") == socket.gethostname()
            if here and _started(holder.get("pid", 0)) == holder.get("started") is not None:
                self._refuse(holder)
            warnings.warn(
                f"the file system of {self.path.parent} has no locks ({error.strerror}): a second run in it would not "
                "be noticed, unless it is on this machine",
                stacklevel=4,
            )

    def _refuse(self, holder: dict[str, Any]) -> None:
        who = f"process {holder['pid']} on {holder['host']}" if {"pid", "host"} <= holder.keys() else "another process"
        raise LongspanError(
            f"{self.path.parent} is in use by {who}: two runs in one folder would spoil each other; end that one, or "
            "give another --out"
        )

    def release(self) -> None:
        """Give it back."""
        if self._fd >= 0:
            os.ftruncate(self._fd, 0)
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _holder(fd: int) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(os.pread(fd, 4096, 0))
        return found if isinstance(found, dict) else {}
    return {}


def _started(pid: int) -> str | None:
    """When a process of this machine began, in ticks since boot, which tells it from a later one of the same number."""
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return None
