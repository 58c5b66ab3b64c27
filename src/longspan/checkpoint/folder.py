"""What a checkpoint is on disk: a folder whose marker, written last, names every file with its size and checksum."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import warnings
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longspan.core.errors import LongspanError
from longspan.core.validation import as_path, check_count, checked_call

MARKER = "complete.json"
FORMAT = 2
"""Of the marker. 1 had sizes alone, and torch's pickled metadata beside it."""
MAKING = "making-"
"""What a folder is called until it is whole."""

_NAME = re.compile(r"step-(\d{8,})")
_CHUNK = 16 << 20


@dataclass(frozen=True)
class FileRecord:
    """What a file held when it was written: `size` in bytes, and the CRC-32 of its content."""

    size: int
    crc32: int

    @classmethod
    def of(cls, path: Path) -> FileRecord:
        """Read a file whole.

        Raises:
            OSError: if it cannot be read.
        """
        size = crc = 0
        buffer = memoryview(bytearray(_CHUNK))
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                size += count
                crc = zlib.crc32(buffer[:count], crc)
        return cls(size, crc)


@dataclass(frozen=True)
class Checkpoint:
    """One complete checkpoint on disk.

    Attributes:
        path: its folder.
        step: optimizer steps done.
        state: what the trainer put beside the tensors.
        files: every file in it but the marker, by name.
        verified: whether the content of all files has been compared with their checksums.
    """

    path: Path
    step: int
    state: dict[str, Any]
    files: dict[str, FileRecord]
    verified: bool = False

    @classmethod
    @checked_call(path=as_path)
    def at(cls, path: Path) -> Checkpoint:
        """The checkpoint in a folder, with all its files there and of the right size; their content is not read.

        Raises:
            LongspanError: naming the file that is missing or damaged, and the newest checkpoint beside it that is
                whole (their content is read to find out).
        """
        try:
            return cls.read(path)
        except LongspanError as error:
            raise LongspanError(f"{error}; {way_out(path)}") from None

    @classmethod
    def read(cls, path: Path) -> Checkpoint:
        """As `at`, without looking for another one.

        Raises:
            LongspanError: naming the file that is missing or damaged.
        """
        if not path.is_dir():
            raise LongspanError(f"checkpoint {path} does not exist")
        marker = path / MARKER
        if marker.exists() and not marker.is_file():  # reading a pipe could block forever
            raise LongspanError(f"checkpoint file {marker} is damaged: it is no regular file")
        try:
            found = _parse(path, marker.read_bytes())
        except FileNotFoundError:
            raise LongspanError(f"checkpoint {path} is not complete: it has no {MARKER}") from None
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            if isinstance(error, LongspanError):
                raise
            said = f"{type(error).__name__}: {error}"
            raise LongspanError(f"checkpoint file {path / MARKER} is damaged: {said}") from error
        if problem := found.wrong_size():
            raise LongspanError(problem)
        return found

    def wrong_size(self) -> str | None:
        """The first file that is missing or has another size, in words; None if there is none."""
        for name, record in self.files.items():
            file = self.path / name
            try:
                size = file.stat().st_size if file.is_file() else None
            except OSError as error:
                return f"checkpoint file {file} cannot be read: {error.strerror}"
            if size is None:
                return f"checkpoint file {file} is missing"
            if size != record.size:
                return f"checkpoint file {file} has {size} bytes instead of {record.size}"
        return None

    def wrong_content(self, names: list[str]) -> str | None:
        """The first of these files whose content is not what was written, in words; None if there is none."""
        for name in names:
            try:
                found = FileRecord.of(self.path / name)
            except OSError as error:
                return f"checkpoint file {self.path / name} cannot be read: {error.strerror or error}"
            if found != self.files[name]:
                return (
                    f"checkpoint file {self.path / name} is damaged: its {found.size} bytes have the CRC-32 "
                    f"{found.crc32:08x}, {self.files[name].crc32:08x} was written"
                )
        return None


def format_marker(step: int, state: dict[str, Any], files: dict[str, FileRecord]) -> str:
    """The marker's text. `state` holds plain JSON values.

    The text of a marker is a function of what it says, so that any other byte in it is noticed.
    """
    body = {
        "format": FORMAT,
        "step": step,
        "state": state,
        "files": {name: [record.size, f"{record.crc32:08x}"] for name, record in sorted(files.items())},
    }
    return json.dumps({**body, "crc32": _sum_of(body)}, indent=1) + "\n"


def _sum_of(body: dict[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(body, sort_keys=True).encode()):08x}"


def _parse(path: Path, written: bytes) -> Checkpoint:
    marker = json.loads(written)
    if marker.keys() == {"step", "state", "files"}:
        raise LongspanError(
            f"checkpoint {path} was made by an earlier version: it has no checksums, and its metadata is a pickle, "
            "which can run code when it is read; finish the run with the version that made it, or start another one "
            "from its weights: --model OUT/hf --out ANOTHER"
        )
    if marker["crc32"] != _sum_of({name: value for name, value in marker.items() if name != "crc32"}):
        raise ValueError("its text does not match its checksum")
    if marker["format"] != FORMAT:
        raise LongspanError(
            f"checkpoint {path} has the format {marker['format']}, this version reads {FORMAT}; use the version of "
            "longspan that made it"
        )
    files = {name: FileRecord(int(size), int(crc, 16)) for name, (size, crc) in marker["files"].items()}
    step = int(marker["step"])
    if format_marker(step, marker["state"], files).encode() != written:
        raise ValueError("its text does not match its checksum")
    if any(Path(name).name != name for name in files):
        raise ValueError("it names files outside its folder")
    named = _NAME.fullmatch(path.name)
    if named and int(named[1]) != step:
        raise ValueError(f"it is that of step {step}")
    return Checkpoint(path, step, marker["state"], files)


def way_out(path: Path) -> str:
    """What to do where `path` cannot be used: the newest checkpoint beside it that is whole."""
    for step in reversed(complete_steps(path.parent)):
        other = step_path(path.parent, step)
        if other == path:
            continue
        with contextlib.suppress(LongspanError):
            found = Checkpoint.read(other)
            if found.wrong_content(list(found.files)) is None:
                return f"resume from the newest that is whole: --resume {other}"
    return "there is no other one beside it that is whole; start again with another --out"


@checked_call(folder=as_path, step=check_count)
def step_path(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step is."""
    return folder / f"step-{step:08d}"


def is_step(path: Path) -> bool:
    """Whether a path has a complete checkpoint's name."""
    return _NAME.fullmatch(path.name) is not None


@checked_call(folder=as_path)
def complete_steps(folder: Path) -> list[int]:
    """The steps that have a complete checkpoint in a folder, ascending."""
    if not folder.is_dir():
        return []
    matches = [_NAME.fullmatch(path.name) for path in folder.iterdir() if (path / MARKER).is_file()]
    return sorted(int(match[1]) for match in matches if match)


def unmarked(folder: Path) -> list[Path]:
    """Folders that have a checkpoint's name and no marker: somebody removed it, or was removing the whole."""
    if not folder.is_dir():
        return []
    return sorted(p for p in folder.iterdir() if _NAME.fullmatch(p.name) and not (p / MARKER).is_file())


@checked_call(folder=as_path)
def latest(folder: Path) -> Checkpoint | None:
    """The newest complete checkpoint, or None where there is none. Content is not read; see `choose` and `verify`.

    Raises:
        LongspanError: if its files are not as they were written; an older one is never taken silently.
    """
    steps = complete_steps(folder)
    return Checkpoint.at(step_path(folder, steps[-1])) if steps else None


# --- writing and removing


def write_durably(path: Path, text: str) -> FileRecord:
    """Write a file and wait until it is on the disk."""
    data = text.encode()
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return FileRecord(len(data), zlib.crc32(data))


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk, where the system can do that."""
    with contextlib.suppress(OSError):
        fd = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def put_in_place(making: Path, path: Path) -> None:
    """Rename a whole folder to its name; what was there before goes only afterwards."""
    before = None
    if path.is_symlink() or path.exists():
        before = path.with_name(f"{MAKING}old-{path.name}")
        remove(before)
        path.rename(before)
    making.rename(path)
    sync_folder(path.parent)
    if before is not None:
        remove_or_warn(before)


def remove(path: Path) -> None:
    """Remove a folder, its marker first: what is left of it is not complete. Of a link, only the link.

    Raises:
        OSError: if it cannot be removed.
    """
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        (path / MARKER).unlink(missing_ok=True)
        shutil.rmtree(path)


def remove_or_warn(path: Path) -> None:
    """Remove what is no longer needed; where that fails, the run goes on."""
    try:
        remove(path)
    except OSError as error:
        warnings.warn(f"{path} is no longer needed and cannot be removed: {error}; remove it by hand", stacklevel=3)


def prune(folder: Path, step: int, keep: int) -> None:
    """Keep the newest `keep` checkpoints until `step` (0: all), and none of later steps.

    The one of `step` itself, which has been read back, always stays.
    """
    steps = complete_steps(folder)
    until = [s for s in steps if s <= step]
    for old in [s for s in steps if s > step] + (until[:-keep] if keep else []):
        remove_or_warn(step_path(folder, old))
