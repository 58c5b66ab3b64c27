"""The folder of a run on disk: names of checkpoints, how they are written and removed; a full disk, a disk that ranks
do not share, two runs in one folder.

A checkpoint is written as `making-...`. `complete.json`, the marker, is written last; then the folder is renamed to
`step-...`. So a folder without a marker, or with another name, is never read.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
import socket
import time
import uuid
import warnings
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from longspan.core.errors import DiskFull, LongspanError
from longspan.core.validation import as_path, check_count, checked_call

if TYPE_CHECKING:
    from longspan.checkpoint.ranks import Ranks

MARKER = "complete.json"
MAKING = "making-"
"""Prefix of a folder that is being written."""

STEP_NAME = re.compile(r"step-(\d{8,})")
_BLOCK = 16 << 20  # bytes that are read at once
LOCK = ".lock"
_PROBE = ".shared-"
SHARED_WAIT_S = 15.0
"""Seconds until a file of one machine must appear on the others; network file systems cache names for a while."""

_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)


@dataclass(frozen=True)
class FileRecord:
    """The size in bytes and the CRC-32 of what was written into a file."""

    size: int
    crc32: int

    @classmethod
    def of(cls, path: Path) -> FileRecord:
        """Return the record of a file on the disk."""
        size = crc = 0
        buffer = memoryview(bytearray(_BLOCK))
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                size += count
                crc = zlib.crc32(buffer[:count], crc)
        return cls(size, crc)


# --- names


@checked_call(folder=as_path, step=check_count)
def step_path(folder: Path, step: int) -> Path:
    """Return the path of a step's checkpoint."""
    return folder / f"step-{step:08d}"


@checked_call(folder=as_path)
def complete_steps(folder: Path) -> list[int]:
    """Return the steps whose checkpoints have a marker, ascending."""
    return sorted(_step(path) for path in _named(folder) if (path / MARKER).is_file())


def unmarked(folder: Path) -> list[Path]:
    """Return the folders with a checkpoint's name but no marker: it was deleted, or the folder is being removed."""
    return sorted(path for path in _named(folder) if not (path / MARKER).is_file())


def newest_folder(folder: Path) -> Path | None:
    """Return the checkpoint of the highest step, with a marker or without."""
    return max(_named(folder), key=_step, default=None)


def _named(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if STEP_NAME.fullmatch(path.name)] if folder.is_dir() else []


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


# --- writing and removing


def write_durably(path: Path, text: str) -> FileRecord:
    """Write a file and wait until the disk holds it."""
    data = text.encode()
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return FileRecord(len(data), zlib.crc32(data))


def put_in_place(making: Path, path: Path) -> None:
    """Rename a finished folder to its final name. Remove what had that name only afterwards."""
    before = None
    if path.is_symlink() or path.exists():
        before = path.with_name(f"{MAKING}old-{path.name}")
        remove(before)
        path.rename(before)
    making.rename(path)
    with contextlib.suppress(OSError):  # some file systems cannot sync a folder
        fd = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    if before is not None:
        remove_or_warn(before)


def remove(path: Path) -> None:
    """Remove a folder, the marker first, so that a killed removal leaves nothing complete; of a link, the link."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        (path / MARKER).unlink(missing_ok=True)
        shutil.rmtree(path)


def remove_or_warn(path: Path) -> None:
    """Remove an old folder; if that fails, warn and go on."""
    try:
        remove(path)
    except OSError as error:
        warnings.warn(f"{path} is no longer needed and cannot be removed: {error}; remove it by hand", stacklevel=3)


def prune(folder: Path, step: int, keep: int, best: int | None = None) -> None:
    """Remove the checkpoints of later steps, and all but `best` and the newest `keep` (0: all) of the others."""
    steps = complete_steps(folder)
    until = [s for s in steps if s <= step]
    for old in [s for s in steps if s > step] + [s for s in (until[:-keep] if keep else []) if s != best]:
        remove_or_warn(step_path(folder, old))


# --- a full disk


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
    """Raise on every rank unless all see what the first one writes into the folder, and may write there. Collective."""
    if ranks.size == 1:
        return

    def write_probe() -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        for stale in folder.glob(f"{_PROBE}*"):  # of a run that was killed here
            stale.unlink(missing_ok=True)
        path = folder / f"{_PROBE}{uuid.uuid4().hex}"
        path.touch()
        return path

    probe = folder / ranks.first(write_probe).name
    problem = "" if _appears(probe, time.monotonic() + wait_s) else "does not see what is written by"
    if not problem and not os.access(folder, os.W_OK):
        problem = "cannot write where it sees the files of"
    reports = ranks.gather((problem, socket.gethostname(), str(folder.absolute())))
    ranks.first(lambda: probe.unlink(missing_ok=True))
    problems = {rank: text for rank, (text, _, _) in enumerate(reports) if text}
    if problems:
        rank = min(problems)
        (_, host, path_there), (_, first_host, first_path) = reports[rank], reports[0]
        raise LongspanError(
            f"the ranks do not share a folder: rank {rank} on {host}, at {path_there}, {problems[rank]} rank 0 on "
            f"{first_host}, at {first_path} (wrong for {len(problems)} of {ranks.size} ranks: "
            f"{', '.join(map(str, problems))}); give an absolute --out on a disk that all machines share"
        )


def _appears(path: Path, end: float) -> bool:
    while not os.path.exists(path):  # False for any error of a network file system
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


# --- one run in a folder


class RunLock:
    """Lock a run's folder for this process, by a system lock on `OUT/.lock`, or raise naming the process that has it.

    The system releases the lock when the process ends, however it ends, so it is never stale. It works over machines on
    NFS (Linux, version 3 with lockd, version 4), CIFS, and Lustre and GPFS if mounted with locks. A file system without
    locks is warned of.
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
