"""The folder of a run on disk: names of checkpoints, how they are written, marked and removed; two runs in one folder.

A checkpoint is written as `making-...`. `complete.json`, the marker, is written last; then the folder is renamed. So a
folder without a marker, or with another name, is never read.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import warnings
import zlib
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from longspan.core.errors import LongspanError
from longspan.core.validation import as_path, check_count, checked_call

MARKER = "complete.json"
MAKING = "making-"
"""Prefix of a folder that is being written."""

STEP_NAME = re.compile(r"step-(\d{8,})")
_BLOCK = 16 << 20  # bytes that are read at once


@dataclass(frozen=True)
class FileRecord:
    """The size in bytes and the CRC-32 of a file."""

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


def prune(folder: Path, step: int, keep: int) -> None:
    """Remove the checkpoints of later steps, and all but the newest `keep` (0: all) of the others."""
    steps = complete_steps(folder)
    until = [s for s in steps if s <= step]
    for old in [s for s in steps if s > step] + (until[:-keep] if keep else []):
        remove_or_warn(step_path(folder, old))


# --- one run in a folder


class RunLock:
    """Lock a run's folder for this process, by a system lock on `OUT/.lock`, or raise: a context manager.

    The system releases the lock when the process ends, however it ends, so it is never stale.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = FileLock(folder / ".lock")
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise LongspanError(
                f"{folder} is in use by another process: two runs in one folder overwrite each other; end that one, or "
                "use another folder"
            ) from None

    def release(self) -> None:
        """Release the lock."""
        self._lock.release()

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
