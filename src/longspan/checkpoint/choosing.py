"""Which checkpoint to go on from: verified by all ranks together, and decided for all of them alike."""

from __future__ import annotations

import dataclasses
import socket
from pathlib import Path
from typing import Any

from longspan.checkpoint.folder import MARKER, Checkpoint, FileRecord, complete_steps, is_step, step_path, unmarked
from longspan.checkpoint.ranks import Ranks, check_ranks
from longspan.comm.errors import error_text
from longspan.core.errors import LongspanError
from longspan.core.validation import as_path, checked_call


def _as_resume(name: str, resume: Any) -> str:
    return resume if resume == "auto" else str(as_path(name, resume))


@checked_call(folder=as_path, ranks=check_ranks, resume=_as_resume)
def choose(
    folder: Path | str, ranks: Ranks | None = None, resume: str = "auto", *, content: bool = True
) -> tuple[Checkpoint | None, list[str]]:
    """The checkpoint to go on from, with its content verified, the same on every rank. Collective.

    Args:
        folder: of a run's checkpoints.
        ranks: the ranks that take part; by default all of the job.
        resume: "auto" for the newest that is whole, or the path of one.
        content: False looks at markers and sizes alone, for a first look before the ranks are there.

    Returns:
        The checkpoint (None where "auto" finds no checkpoint at all), and what is wrong with newer ones that were
        passed over.

    Raises:
        LongspanError: on every rank, if the one that was asked for is damaged (with the newest that is whole), if none
            is whole, or if not all ranks see the same.
    """
    folder, ranks = Path(folder), ranks or Ranks()
    if resume != "auto":
        wanted = Path(resume)
        problem, found = _try(wanted, ranks, content)
        if found is None:
            raise LongspanError(f"{problem}; {_way_out(wanted, ranks)}")
        return found, []
    problems: list[str] = ranks.first(lambda: [f"{path} has no {MARKER}" for path in unmarked(folder)])
    for path in _candidates(folder, ranks):
        problem, found = _try(path, ranks, content)
        if found is not None:
            return found, problems
        problems.append(problem)
    if problems:
        raise LongspanError(
            f"{folder} holds no checkpoint that is whole: {'; '.join(problems)}; start again with another --out"
        )
    return None, []


@checked_call(where=as_path, ranks=check_ranks)
def newest(
    where: Path | str, ranks: Ranks | None = None, flag: str = "--resume", *, content: bool = True
) -> Checkpoint:
    """The checkpoint that a path means, with its content verified, the same on every rank. Collective.

    Unlike `choose`, it passes over none: of a run, it is the newest there is, whole or not.

    Args:
        where: a run's folder, its folder of checkpoints, or one checkpoint.
        ranks: the ranks that take part; by default all of the job.
        flag: what named the path, for messages.
        content: False looks at markers and sizes alone.

    Raises:
        LongspanError: on every rank, if there is none, or it is damaged (naming the file, and the newest that is
            whole).
    """
    ranks = ranks or Ranks()
    path = Path(ranks.first(lambda: str(_newest_path(Path(where), flag))))
    found, _ = choose(path.parent, ranks, str(path), content=content)
    assert found is not None
    return found


def _newest_path(where: Path, flag: str) -> Path:
    where = where.absolute()  # "." has neither a name nor a parent
    if is_step(where) or (where / MARKER).is_file():
        return where
    if not where.exists():
        raise LongspanError(f"{flag} {where} does not exist; give a run's folder (OUT), or one checkpoint of it")
    folder = where / "checkpoints" if (where / "checkpoints").is_dir() else where
    every = [step_path(folder, step) for step in complete_steps(folder)] + unmarked(folder)
    found = max(every, key=lambda path: int(path.name.rpartition("-")[2]), default=None)
    if found is None:
        raise LongspanError(
            f"{flag} {where} holds no checkpoint; give a run's folder (OUT), or one checkpoint of it "
            "(OUT/checkpoints/step-...)"
        )
    return found


@checked_call(path=as_path, ranks=check_ranks)
def verify(path: Path | str, ranks: Ranks | None = None) -> Checkpoint:
    """The checkpoint at `path`, with the content of all its files compared with their checksums. Collective.

    Every rank reads a share of the files, and looks whether all of them are there.

    Raises:
        LongspanError: on every rank, naming the first file that is not as it was written.
    """
    problem, found = _try(Path(path), ranks or Ranks())
    if found is None:
        raise LongspanError(problem)
    return found


def _way_out(wanted: Path, ranks: Ranks) -> str:
    for path in _candidates(wanted.parent, ranks):
        if path != wanted and _try(path, ranks)[1] is not None:
            return f"resume from the newest that is whole: --resume {path}"
    return "there is no other one beside it that is whole; start again with another --out"


def _candidates(folder: Path, ranks: Ranks) -> list[Path]:
    """Complete ones, newest first, as the first rank sees them."""
    steps = ranks.first(lambda: complete_steps(folder))
    return [step_path(folder, step) for step in reversed(steps)]


def _try(path: Path, ranks: Ranks, content: bool = True) -> tuple[str, Checkpoint | None]:
    """What is wrong with it, or the checkpoint; the same on every rank."""
    problem, marker, found = "", None, None
    try:
        found = Checkpoint.read(path)
        marker = FileRecord.of(path / MARKER)
        problem = found.wrong_content(share(found.files, ranks.rank, ranks.size) if content else []) or ""
    except Exception as error:  # the other ranks must be told
        problem = error_text(error)
    said = ranks.gather((problem, marker, socket.gethostname()))
    markers = {marker for _, marker, _ in said if marker is not None}
    if found is not None and marker is not None and len(markers) == 1 and not any(problem for problem, _, _ in said):
        return "", dataclasses.replace(found, verified=content)
    if len(markers) > 1:
        return f"the ranks see different checkpoints at {path}; give a folder that all machines share", None
    rank, problem, host = next((rank, text, host) for rank, (text, _, host) in enumerate(said) if text)
    some = len(markers) > 0 and any(marker is None for _, marker, _ in said)  # some ranks see it, others do not
    return f"rank {rank} on {host}: {problem}" if some else problem, None


def share(files: dict[str, FileRecord], rank: int, size: int) -> list[str]:
    """The files that one of `size` ranks reads: all ranks about as many bytes, largest first."""
    mine: list[str] = []
    loads = [0] * size
    for name in sorted(files, key=lambda name: (-files[name].size, name)):
        reader = loads.index(min(loads))
        loads[reader] += files[name].size
        if reader == rank:
            mine.append(name)
    return mine
