"""torch's Distributed Checkpoint: what longspan uses of it that has no public name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.storage import WriteResult

from longspan.compat.gone import gone


@dataclass(frozen=True)
class Place:
    """Where one piece lies, as torch's reader asks for it: stands in for torch's `_StorageInfo`.

    Versions: all. Public way: none; torch's own class is private, and only its attributes are looked at.
    When gone: an AttributeError of torch's reader, which `load` makes a LongspanError.
    """

    relative_path: str
    offset: int
    length: int
    transform_descriptors: None = None


def flat_names(state: dict[str, Any]) -> dict[str, Any]:
    """What a nested state holds, by the names under which torch saves it: keys and indices joined by dots.

    Versions: all. Public way: none. When gone: LongspanError.
    """
    try:
        from torch.distributed.checkpoint._nested_dict import flatten_state_dict
    except ImportError as error:
        raise gone(
            "torch", "torch.distributed.checkpoint._nested_dict", "knowing the names of what is saved"
        ) from error
    return dict(flatten_state_dict(state)[0])


def keep_places(metadata: Metadata, written: list[list[WriteResult]]) -> None:
    """Note in `metadata` where each piece was written, which is then what torch's `save` returns.

    Args:
        metadata: as the writer was given it to finish with.
        written: by rank.

    Versions: torch 2.11, whose own writer notes it in a copy; from 2.12 on this is what is noted already. Public way:
    this one. When gone: an AttributeError.
    """
    metadata.storage_data = {piece.index: piece.storage_data for rank in written for piece in rank}


def write_through(writer: FileSystemWriter, files: FileSystem) -> None:
    """Have torch's writer write by `files`.

    Versions: all. Public way: none. When gone: LongspanError.
    """
    if not isinstance(getattr(writer, "fs", None), FileSystem):
        raise gone("torch", "FileSystemWriter.fs", "checksums of what is written")
    writer.fs = files
