"""A checkpoint on disk: `checkpoint-N/`, in it `longspan/` with the shards, and `complete.json`, written last.

A folder without this marker is never read. A step that is saved again first becomes `old-checkpoint-N`, which counts
until the new one is complete.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import warnings
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from longspan.checkpoint.ranks import Ranks
from longspan.core.errors import LongspanError
from longspan.core.validation import check_count

MARKER = "complete.json"
SHARDS = "longspan"
_NAME = re.compile(r"(old-)?checkpoint-(\d+)")
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


def step_path(folder: Path, step: int) -> Path:
    """Return the path of a step's checkpoint."""
    check_count("step", step)
    return folder / f"checkpoint-{step}"


def step_of(path: Path) -> int | None:
    """Return the step in a checkpoint's name; None for another name."""
    match = _NAME.fullmatch(path.name)
    return None if match is None else int(match[2])


def newest_first(folder: Path) -> list[Path]:
    """Return the checkpoints in a run's folder, complete or not, the newest first."""
    paths = [path for path in folder.glob("*checkpoint-*") if step_of(path) is not None]
    return sorted(paths, key=lambda path: (step_of(path), not path.name.startswith("old-")), reverse=True)


def write_durably(path: Path, text: str) -> None:
    """Write a file at once and wait until the disk holds it."""
    part = _part(path)
    with part.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
    with contextlib.suppress(OSError):  # some file systems cannot sync a folder
        fd = os.open(path.parent, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def begin(path: Path) -> None:
    """Make room for a checkpoint: set a complete one aside, and remove what a save that was killed has left."""
    if (path / MARKER).is_file():
        remove(_older(path))
        path.rename(_older(path))
    remove(path / SHARDS)
    _part(path / MARKER).unlink(missing_ok=True)


def remove_unneeded(path: Path, keep: int | None) -> None:
    """Remove what the complete checkpoint `path` replaces; unless `keep` is None, also others.

    They are those of later steps, and all but the newest `keep` (0: all).
    """
    unneeded = [_older(path)]
    if keep is not None:
        paths = newest_first(path.parent)
        complete = [other for other in paths if (other / MARKER).is_file() and other != _older(path)]
        at = complete.index(path)
        unneeded += complete[:at] + (complete[at + keep :] if keep else [])
    for other in unneeded:
        try:
            remove(other)
        except OSError as error:
            text = f"{other} is no longer needed and cannot be removed: {error}; remove it by hand"
            warnings.warn(text, stacklevel=2)


def _older(path: Path) -> Path:
    return path.with_name(f"old-{path.name}")


def _part(path: Path) -> Path:
    return path.with_name(f"{path.name}.part")


def remove(path: Path) -> None:
    """Remove a folder, the marker first, so that a killed removal leaves nothing complete; of a link, the link."""
    if path.is_symlink():
        path.unlink()
    elif path.exists():
        (path / MARKER).unlink(missing_ok=True)
        shutil.rmtree(path)


@contextlib.contextmanager
def locked(run: Path) -> Iterator[None]:
    """Lock a run's folder, on the first rank; raise on every rank if another process has it. Collective.

    The system releases the lock of a process that ends, however it ends, so it is never stale.
    """
    lock = FileLock(run / ".lock")

    def acquire() -> None:
        run.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise LongspanError(
                f"{run} is in use by another process: two runs in one folder overwrite each other; end that one, or "
                "use another folder"
            ) from None

    Ranks().first(acquire)
    try:
        yield
    finally:
        lock.release()
