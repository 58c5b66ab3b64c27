"""Write torch's tensor files with checksums, and read them without unpickling.

torch's Distributed Checkpoint writes its index as `.metadata`, a pickle, and unpickling can run any command. longspan
writes the same as `index.json` and reads only that: names, shapes, files and offsets. (`.metadata` stays for torch's
own tools.) Tensors and plain values are read by `torch.load` with `weights_only=True`, which calls no other code.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import warnings
import zlib
from collections.abc import Generator
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.storage import WriteResult

from longspan.checkpoint.folder import FileRecord
from longspan.compat.torch_api import NO_GROUP_WARNING
from longspan.compat.torch_checkpoint import Location, note_locations, write_through
from longspan.core.errors import LongspanError

INDEX = "index.json"


class _RecordedFile(io.IOBase):
    """Write to a file, and record size, checksum and errors: torch's C++ writer does not pass an OSError on."""

    def __init__(self, raw: Any, files: RecordedFiles) -> None:
        self._raw, self._files = raw, files
        self.size = self.crc32 = 0

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        with self._files.recording_errors():
            self._raw.write(view)
        self.size += len(view)
        self.crc32 = zlib.crc32(view, self.crc32)
        return len(view)

    def flush(self) -> None:
        if not self._raw.closed:
            with self._files.recording_errors():
                self._raw.flush()

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.size

    def fileno(self) -> int:
        return int(self._raw.fileno())


class RecordedFiles(FileSystem):
    """torch's file system, with a record of every file it writes.

    `error` is the first of the disk: torch reports a full disk as "unexpected pos", without the reason.
    """

    def __init__(self) -> None:
        self.records: dict[str, FileRecord] = {}
        self.error: OSError | None = None

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        """Open a new file to write."""
        with self.recording_errors():
            with super().create_stream(path, mode) as raw:
                stream = _RecordedFile(raw, self)
                yield stream
                raw.close()
            self.records[Path(path).name] = FileRecord(stream.size, stream.crc32)

    @contextlib.contextmanager
    def recording_errors(self) -> Generator[None, None, None]:
        try:
            yield
        except OSError as error:
            self.error = self.error or error
            raise

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.records[Path(new_path).name] = self.records.pop(Path(path).name)


class RecordingWriter(FileSystemWriter):
    """torch's writer over `RecordedFiles`."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.files = RecordedFiles()
        write_through(self, self.files)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        note_locations(metadata, results)


# --- the index


def format_index(metadata: Metadata) -> str:
    """Return torch's metadata as JSON: dtype, shape and pieces of every tensor, location of every other value."""
    locations: dict[MetadataIndex, Location] = metadata.storage_data

    def location(index: MetadataIndex) -> list[Any]:
        where = locations[index]
        return [where.relative_path, where.offset, where.length]

    tensors: dict[str, Any] = {}
    values: dict[str, Any] = {}
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            tensors[name] = {
                "dtype": str(entry.properties.dtype).removeprefix("torch."),
                "shape": list(entry.size),
                "pieces": [
                    [list(c.offsets), list(c.sizes), *location(MetadataIndex(name, c.offsets))] for c in entry.chunks
                ],
            }
        else:
            values[name] = location(MetadataIndex(name))
    return json.dumps({"tensors": tensors, "values": values}, separators=(",", ":")) + "\n"


def read_index(text: str, sizes: dict[str, int]) -> Metadata:
    """Return torch's metadata from JSON.

    Raise unless every piece is inside its tensor, and inside one of the files that the marker names (`sizes`, in
    bytes).
    """
    try:
        return _parse_index(json.loads(text), sizes)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise LongspanError(f"{INDEX} is damaged: {type(error).__name__}: {error}") from error


def _parse_index(index: dict[str, Any], sizes: dict[str, int]) -> Metadata:
    entries: dict[str, Any] = {}
    locations: dict[MetadataIndex, Location] = {}

    def location(file: Any, offset: Any, length: Any) -> Location:
        start, count = _sizes([offset, length])
        if file not in sizes or start + count > sizes[file]:
            raise ValueError(f"{count} bytes from {start} on are not in a file {file!r}")
        return Location(file, start, count)

    for name, tensor in index["tensors"].items():
        dtype, shape = getattr(torch, str(tensor["dtype"]), None), _sizes(tensor["shape"])
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{name} has no dtype {tensor['dtype']!r}")
        pieces = []
        for offsets, lengths, *where in tensor["pieces"]:
            begin, count = _sizes(offsets), _sizes(lengths)
            if any(b + c > n for b, c, n in zip(begin, count, shape, strict=True)):
                raise ValueError(f"a piece of {name} is not inside it")
            pieces.append(ChunkStorageMetadata(torch.Size(begin), torch.Size(count)))
            locations[MetadataIndex(name, begin)] = location(*where)
        entries[name] = TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), pieces)
    for name, where in index["values"].items():
        entries[name] = BytesStorageMetadata()
        locations[MetadataIndex(name)] = location(*where)
    return Metadata(entries, storage_data=locations, storage_meta=StorageMeta())


def _sizes(values: Any) -> list[int]:
    if not isinstance(values, list) or any(type(value) is not int or value < 0 for value in values):
        raise ValueError(f"{values!r} are no sizes")
    return cast(list[int], values)


class IndexReader(FileSystemReader):
    """torch's reader over `index.json`; it never opens `.metadata`."""

    def __init__(self, path: Path, metadata: Metadata) -> None:
        super().__init__(path)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        assert self._metadata.storage_meta is not None
        self._metadata.storage_meta.load_id = self.load_id
        return self._metadata


class WeightsOnlyPlanner(DefaultLoadPlanner):
    """torch's planner, but values that are not tensors are read with `weights_only=True` as well."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        plain = torch.load(value, weights_only=True)
        again = io.BytesIO()  # torch's planner unpickles what it is given
        torch.save(plain, again)
        again.seek(0)
        super().load_bytes(read_item, again)


# --- errors and warnings of torch


def cause(error: BaseException) -> str:
    """Return one line: the error of the first rank that failed, of torch's CheckpointException; or the error itself."""
    failures = getattr(error, "failures", None)
    if failures:
        rank = min(failures)
        return f"rank {rank}: {cause(failures[rank][0])}"
    return f"{type(error).__name__}: {(str(error).strip() or '?').splitlines()[0]}"


@contextlib.contextmanager
def without_group_warning() -> Generator[None, None, None]:
    """Ignore torch's warning that there is no process group: one device needs none."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=NO_GROUP_WARNING)
        yield
