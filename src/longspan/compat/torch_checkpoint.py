"""Private names of torch's Distributed Checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.storage import WriteResult

from longspan.compat.versions import missing


@dataclass(frozen=True)
class Location:
    """File and offset of one piece, for torch's reader, which only reads the attributes of its own `_StorageInfo`.

    When gone: an AttributeError of torch's reader, from which `load` makes a LongspanError.
    """

    relative_path: str
    offset: int
    length: int
    transform_descriptors: None = None


def flat_names(state: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a nested state by the names that torch saves them under: keys and indices joined by dots.

    When gone: LongspanError.
    """
    try:
        from torch.distributed.checkpoint._nested_dict import flatten_state_dict
    except ImportError as error:
        raise missing("torch", "torch.distributed.checkpoint._nested_dict", "the names of saved tensors") from error
    return dict(flatten_state_dict(state)[0])


def note_locations(metadata: Metadata, written: list[list[WriteResult]]) -> None:
    """Store in `metadata`, which torch's `save` then returns, where each piece was written.

    Public way: this one; torch 2.11's writer stores it in a copy of the metadata, newer ones do the same as this. When
    gone: an AttributeError.

    Args:
        metadata: as torch gives it to the writer's `finish`.
        written: results by rank.
    """
    metadata.storage_data = {piece.index: piece.storage_data for rank in written for piece in rank}


def write_through(writer: FileSystemWriter, files: FileSystem) -> None:
    """Let torch's writer write by `files`. When gone: LongspanError."""
    if not isinstance(getattr(writer, "fs", None), FileSystem):
        raise missing("torch", "FileSystemWriter.fs", "checksums of written files")
    writer.fs = files
