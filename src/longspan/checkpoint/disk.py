"""The disk under a run: full, not shared by all ranks, or used by two runs."""

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
from typing import TYPE_CHECKING

from longspan.core.errors import DiskFull, LongspanError, format_os_error

if TYPE_CHECKING:
    from longspan.checkpoint.ranks import Ranks

LOCK = ".lock"
_PROBE = ".shared-"
SHARED_WAIT_S = 15.0
"""Seconds until a file of one machine must appear on the others; network file systems cache names for a while."""

_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)


def check_room(folder: Path, needed: int, what: str) -> None:
    """Raise `DiskFull` if the disk has less than `needed` bytes free."""
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise DiskFull(_does_not_fit(folder, needed, free, what))


def format_disk_full(folder: Path, needed: int, what: str, why: str) -> str:
    """Describe a write of `needed` bytes that failed with the message `why`. Call it once partial files are removed."""
    free = shutil.disk_usage(folder).free
    if needed > free:
        return _does_not_fit(folder, needed, free, what)
    return f"{why} (of {needed:,} bytes that are needed; {free:,} bytes are free: a quota or a limit of the system?)"


def _does_not_fit(folder: Path, needed: int, free: int, what: str) -> str:
    return (
        f"{what} does not fit: it needs {needed:,} bytes, the disk of {folder} has {free:,} bytes free, "
        f"{needed - free:,} bytes are missing"
    )


# --- one disk for all ranks


def check_shared(folder: Path, ranks: Ranks, wait_s: float = SHARED_WAIT_S) -> None:
    """Raise unless all ranks see the same folder and can write to it. Collective.

    The first rank writes a file with a random token. The others wait for it and write an answer next to it, which the
    first rank must see.

    Raises:
        LongspanError: on every rank, naming the ranks and their machines.
    """
    if ranks.size == 1:
        return

    def write_probe() -> str:
        folder.mkdir(parents=True, exist_ok=True)
        for stale in folder.glob(f"{_PROBE}*"):  # of a run that was killed here
            stale.unlink(missing_ok=True)
        token = uuid.uuid4().hex
        (folder / f"{_PROBE}{token}").write_text(token)
        return token

    token = ranks.first(write_probe)
    probe = folder / f"{_PROBE}{token}"
    answers = [folder / f"{probe.name}-{rank}" for rank in range(ranks.size)]
    mine = answers[ranks.rank]
    try:
        reports = ranks.gather((_answer(probe, mine, wait_s), socket.gethostname(), str(folder.absolute())))
        problems = ranks.first(lambda: _problems([problem for problem, _, _ in reports], answers, wait_s))
    finally:
        for path in (mine, *([probe] if ranks.rank == 0 else [])):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
    if problems:
        rank = min(problems)
        (_, host, path_there), (_, first_host, first_path) = reports[rank], reports[0]
        raise LongspanError(
            f"the ranks do not share a folder: rank {rank} on {host}, at {path_there}, {problems[rank]} rank 0 on "
            f"{first_host}, at {first_path} (wrong for {len(problems)} of {ranks.size} ranks: "
            f"{', '.join(map(str, problems))}); give an absolute --out on a disk that all machines share"
        )


def _answer(probe: Path, mine: Path, wait_s: float) -> str:
    """Write this rank's answer; return what is wrong, or ""."""
    if not _appears(probe, time.monotonic() + wait_s):
        return "does not see what is written by"
    try:
        mine.touch()
    except OSError as error:
        return f"cannot write ({format_os_error(error)}) where it sees the files of"
    return ""


def _problems(problems: list[str], answers: list[Path], wait_s: float) -> dict[int, str]:
    """Return what is wrong, by rank: a rank's own problem, or an answer that the first rank does not see."""
    end = time.monotonic() + wait_s
    unseen = "writes what is not seen by"
    every = [
        problem or ("" if _appears(path, end) else unseen) for problem, path in zip(problems, answers, strict=True)
    ]
    return {rank: problem for rank, problem in enumerate(every) if problem}


def _appears(path: Path, end: float) -> bool:
    while not os.path.exists(path):  # False for any error of a network file system
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


# --- one run in a folder


class RunLock:
    """Lock a run's folder for this process, by a system lock on `OUT/.lock`.

    The system releases the lock when the process ends, however it ends, so it is never stale. It works over machines on
    NFS (Linux, version 3 with lockd, version 4), CIFS, and Lustre and GPFS if mounted with locks. A file system without
    locks is warned of.

    Raises:
        LongspanError: if another process holds the lock, naming that process and its machine.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / LOCK
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            self._take()
            mine = {"pid": os.getpid(), "host": socket.gethostname()}
            os.ftruncate(self._fd, 0)
            with contextlib.suppress(OSError):  # a full disk: the lock holds, only its owner is not named
                os.pwrite(self._fd, json.dumps(mine).encode(), 0)
        except BaseException:
            os.close(self._fd)
            self._fd = -1
            raise

    def _take(self) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LongspanError(
                f"{self.path.parent} is in use by {_holder(self._fd)}: two runs in one folder overwrite each other; "
                "end that one, or give another --out"
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            warnings.warn(
                f"the file system of {self.path.parent} has no locks ({error.strerror}): a second run in it is not "
                "noticed",
                stacklevel=4,
            )

    def release(self) -> None:
        """Release the lock."""
        if self._fd >= 0:
            os.ftruncate(self._fd, 0)
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _holder(fd: int) -> str:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        holder = json.loads(os.pread(fd, 4096, 0))
        return f"process {holder['pid']} on {holder['host']}"
    return "another process"
