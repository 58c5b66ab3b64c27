"""Detect damaged checkpoints. Nothing of a checkpoint is loaded before it has passed.

| damage | detected by | in |
|---|---|---|
| a save that was killed, a removed marker | no marker | `Checkpoint.read` |
| a changed marker | its own CRC-32, and its text written again | `_parse` |
| a file that is missing or has another size | `stat` of every file | `Checkpoint.wrong_size` |
| changed bytes in a file | the CRC-32 of every file in the marker | `Checkpoint.wrong_content` |
| ranks that see different folders | the marker's CRC-32, compared over the ranks | `_check` |

A checkpoint is whole if its marker, `complete.json`, fits all files: rank 0 renames the marker into place when every
rank has written its files and their checksums are gathered (`Saver`, saving.py).

All ranks together find a checkpoint to resume from. `read_verified` returns the one at a path, and raises if it is
damaged, so a run that was given this path ends. `newest_undamaged` tries a run's checkpoints from the highest step
down; it returns the first that is undamaged, and what is wrong with newer ones. The newer ones stay on the disk until
the resumed run saves: a save of the same step replaces one, and with `keep` a save removes complete ones of later
steps.
"""

from __future__ import annotations

import dataclasses
import json
import socket
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from longspan.checkpoint.folder import MARKER, FileRecord, newest_first, step_of, write_durably
from longspan.checkpoint.ranks import Ranks
from longspan.comm.agree import error_text
from longspan.core.errors import LongspanError
from longspan.core.validation import as_path

FORMAT = 4  # of the marker


@dataclass(frozen=True)
class Checkpoint:
    """One complete checkpoint on disk."""

    path: Path
    step: int  # optimizer steps done
    state: dict[str, Any]  # the plain values that were saved with the tensors
    files: dict[str, FileRecord | None]  # every file but the marker; None: JSON that is written after it
    values: dict[str, Any] = field(default_factory=dict)  # of the optimizer: what is no tensor, by name
    verified: bool = False  # whether the content of all files was compared with their checksums

    @classmethod
    def read(cls, path: Path) -> Checkpoint:
        """Read the marker, and check that every file has the right size; file content is not read."""
        if not path.is_dir():
            raise LongspanError(f"checkpoint {path} does not exist")
        marker = path / MARKER
        if marker.exists() and not marker.is_file():  # reading a pipe could block forever
            raise LongspanError(f"checkpoint file {marker} is damaged: it is no regular file")
        try:
            checkpoint = _parse(path, marker.read_bytes())
        except FileNotFoundError:
            raise LongspanError(
                f"checkpoint {path} is not complete: it has no {MARKER}, which longspan writes last, and a Trainer "
                "with save_only_model=True does not write; resume from an older one"
            ) from None
        except LongspanError:
            raise
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise LongspanError(f"checkpoint file {marker} is damaged: {type(error).__name__}: {error}") from error
        if problem := checkpoint.wrong_size():
            raise LongspanError(problem)
        return checkpoint

    def wrong_size(self) -> str | None:
        """Return which file is missing or has another size; None if all are right."""
        for name, record in self.files.items():
            file = self.path / name
            try:
                size = file.stat().st_size if file.is_file() else None
                if record is None and size is not None:
                    json.loads(file.read_bytes())
            except (OSError, ValueError) as error:
                return f"checkpoint file {file} cannot be read: {error}"
            if size is None:
                return f"checkpoint file {file} is missing"
            if record is not None and size != record.size:
                return f"checkpoint file {file} has {size} bytes instead of {record.size}"
        return None

    def wrong_content(self, part: int, parts: int) -> str | None:
        """Return which file does not hold what was written, of every `parts`-th one by size; None if all do."""
        records = {name: record for name, record in self.files.items() if record is not None}
        for name in sorted(records, key=lambda name: (-records[name].size, name))[part::parts]:
            try:
                found = FileRecord.of(self.path / name)
            except OSError as error:
                return f"checkpoint file {self.path / name} cannot be read: {error.strerror or error}"
            if found != records[name]:
                return (
                    f"checkpoint file {self.path / name} is damaged: its {found.size} bytes have the CRC-32 "
                    f"{found.crc32:08x}, {records[name].crc32:08x} was written"
                )
        return None

    def marker(self) -> str:
        """Return the text of its marker. Equal content has equal text."""
        records = sorted(self.files.items())
        body = {
            "format": FORMAT,
            "step": self.step,
            "state": self.state,
            "values": self.values,
            "files": {name: None if of is None else [of.size, f"{of.crc32:08x}"] for name, of in records},
        }
        return json.dumps({**body, "crc32": _crc32_of(body)}, indent=1) + "\n"

    def write_marker(self) -> None:
        """Write the marker, durably."""
        write_durably(self.path / MARKER, self.marker())


def _crc32_of(body: dict[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(body, sort_keys=True).encode()):08x}"


def _parse(path: Path, text: bytes) -> Checkpoint:
    marker = json.loads(text)
    if marker["crc32"] != _crc32_of({name: value for name, value in marker.items() if name != "crc32"}):
        raise ValueError("its text does not match its checksum")
    if marker["format"] != FORMAT:
        raise LongspanError(
            f"checkpoint {path} has the format {marker['format']}, this version reads {FORMAT}; use the version of "
            "longspan that made it"
        )
    files = {name: of and FileRecord(int(of[0]), int(of[1], 16)) for name, of in marker["files"].items()}
    checkpoint = Checkpoint(path, int(marker["step"]), marker["state"], files, marker["values"])
    if checkpoint.marker().encode() != text:
        raise ValueError("its text does not match its checksum")
    if any(Path(name).is_absolute() or ".." in Path(name).parts for name in files):
        raise ValueError("it names files outside its folder")
    if step_of(path) not in (None, checkpoint.step):
        raise ValueError(f"it is that of step {checkpoint.step}")
    return checkpoint


# --- which checkpoint to resume from


def read_verified(path: Path | str, *, content: bool = True) -> Checkpoint:
    """Return the checkpoint at `path` if it is undamaged. Collective: each rank reads a part of the files.

    Args:
        path: one checkpoint.
        content: False checks only the marker and sizes, in no time.

    Raises:
        LongspanError: on every rank, naming the first damaged file.
    """
    checkpoint, problem = _check(as_path("path", path), content)
    if checkpoint is None:
        raise LongspanError(problem)
    return checkpoint


def newest_undamaged(folder: Path | str, *, content: bool = True) -> tuple[Checkpoint | None, list[str]]:
    """Return the newest undamaged checkpoint of a run, also of a Trainer's; the same on every rank. Collective.

    Args:
        folder: holds the run's checkpoints.
        content: as in `read_verified`.

    Returns:
        The checkpoint (None if there is none, or only incomplete saves), and what is wrong with newer ones.

    Raises:
        LongspanError: on every rank, if all complete checkpoints are damaged.
    """
    run = as_path("folder", folder)
    found = Ranks().first(lambda: {path.name: (path / MARKER).exists() for path in newest_first(run)})
    problems = list[str]()
    for name in found:
        checkpoint, problem = _check(run / name, content)
        if checkpoint is not None:
            return checkpoint, problems
        problems.append(problem)
    if any(found.values()):
        raise LongspanError(
            f"{folder} holds no undamaged checkpoint: {'; '.join(problems)}; start anew, in another folder"
        )
    return None, problems


def checkpoint_to_resume(run: Path) -> str | None:
    """Return the path of `newest_undamaged`; print which it is, and what is wrong with newer ones. Collective.

    `longspan train` and trainers ask it, unless `resume_from_checkpoint` is a path.
    """
    found, lines = newest_undamaged(run)
    if found is not None:
        lines.append(f"resuming from {found.path}")
    elif lines:
        lines.append("nothing was saved yet: starting anew")
    for line in lines if Ranks().rank == 0 else ():
        print(f"longspan: {line}", flush=True)
    return None if found is None else str(found.path)


def _check(path: Path, content: bool) -> tuple[Checkpoint | None, str]:
    """Return the checkpoint, or None and what is wrong with it; the same on every rank. Collective."""
    problem, marker, checkpoint, ranks = "", None, None, Ranks()
    try:
        checkpoint = Checkpoint.read(path)
        marker = FileRecord.of(path / MARKER)
        if content:
            problem = checkpoint.wrong_content(ranks.rank, ranks.size) or ""
    except Exception as error:  # of any kind: all ranks must return the same
        problem = error_text(error)
    reports = ranks.gather((problem, marker, socket.gethostname()))
    markers = {marker for _, marker, _ in reports}
    if len(markers - {None}) > 1:
        return None, f"the ranks see different checkpoints at {path}; give a folder that all machines share"
    failed = [(rank, problem, host) for rank, (problem, _, host) in enumerate(reports) if problem]
    if failed:
        rank, problem, host = failed[0]
        return None, f"rank {rank} on {host}: {problem}" if len(markers) > 1 else problem  # some ranks see a marker
    assert checkpoint is not None
    return dataclasses.replace(checkpoint, verified=content), ""
