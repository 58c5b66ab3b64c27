"""torch's tensor files, with a checksum of every file taken while it is written, and an index that is no pickle.

torch's Distributed Checkpoint keeps what it knows of its files in `.metadata`, a pickle, and unpickling can run any
command. So the same is kept in `index.json`, and only that is read: names, shapes, which file, from where to where.
(`.metadata` stays beside it for torch's own tools.) The tensors themselves, and the plain numbers of the optimizer, are
read by `torch.load` with `weights_only=True`, which builds tensors and plain values and calls nothing else.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
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
from longspan.compat.torch_checkpoint import Place, keep_places, write_through
from longspan.core.errors import LongspanError

INDEX = "index.json"


class _SumStream(io.IOBase):
    """Passes on what is written, and sums it up."""

    def __init__(self, raw: Any) -> None:
        self.raw, self.size, self.crc32 = raw, 0, 0

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self.raw.write(view)
        self.size += len(view)
        self.crc32 = zlib.crc32(view, self.crc32)
        return len(view)

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        if not self.raw.closed:
            self.raw.flush()

    def fileno(self) -> int:
        return int(self.raw.fileno())


class SummedFiles(FileSystem):
    """torch's file system, which keeps a record of every file it writes, and the first error of the disk.

    (torch says "unexpected pos" where the disk was full: its writer finds out that bytes are missing, and not why.)
    """

    def __init__(self) -> None:
        self.records: dict[str, FileRecord] = {}
        self.error: OSError | None = None

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        """A stream to write a new file."""
        try:
            with super().create_stream(path, mode) as raw:
                stream = _SumStream(_Noting(raw, self))
                yield stream
                raw.close()
            self.records[Path(path).name] = FileRecord(stream.size, stream.crc32)
        except OSError as error:
            self.note(error)
            raise

    def note(self, error: OSError) -> None:
        """Remember the first error."""
        self.error = self.error or error

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Rename a file that was written."""
        super().rename(path, new_path)
        self.records[Path(new_path).name] = self.records.pop(Path(path).name)


class _Noting:
    """A file whose errors are noted: torch's writer in C++ does not hand them on."""

    def __init__(self, raw: Any, files: SummedFiles) -> None:
        self._raw, self._files = raw, files

    def write(self, data: Any) -> None:
        try:
            self._raw.write(data)
        except OSError as error:
            self._files.note(error)
            raise

    def flush(self) -> None:
        try:
            self._raw.flush()
        except OSError as error:
            self._files.note(error)
            raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._raw, name)


class SummingWriter(FileSystemWriter):
    """torch's writer over `SummedFiles`."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.files = SummedFiles()
        write_through(self, self.files)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """As torch's, and `metadata` says where everything is."""
        super().finish(metadata, results)
        keep_places(metadata, results)


# --- the index


def format_index(metadata: Metadata) -> str:
    """torch's metadata as JSON: for every tensor its dtype, shape and pieces, for every other value where it is."""
    places: dict[MetadataIndex, Place] = metadata.storage_data
    tensors: dict[str, Any] = {}
    values: dict[str, Any] = {}
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            pieces = [
                [list(c.offsets), list(c.sizes), *_format_place(places[MetadataIndex(name, c.offsets)])]
                for c in entry.chunks
            ]
            dtype = str(entry.properties.dtype).removeprefix("torch.")
            tensors[name] = {"dtype": dtype, "shape": list(entry.size), "pieces": pieces}
        else:
            values[name] = _format_place(places[MetadataIndex(name)])
    return json.dumps({"tensors": tensors, "values": values}, indent=None, separators=(",", ":")) + "\n"


def _format_place(info: Place) -> list[Any]:
    return [info.relative_path, info.offset, info.length]


def read_index(text: str, sizes: dict[str, int]) -> Metadata:
    """torch's metadata from JSON, checked: only the known files, each piece inside its file and its tensor.

    Args:
        text: of the index.
        sizes: of the files that the marker names, in bytes.

    Raises:
        LongspanError: for anything else.
    """
    try:
        return _parse_index(json.loads(text), sizes)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise LongspanError(f"{INDEX} is damaged: {type(error).__name__}: {error}") from error


def _parse_index(index: dict[str, Any], sizes: dict[str, int]) -> Metadata:
    entries: dict[str, Any] = {}
    places: dict[MetadataIndex, Place] = {}

    def place(file: Any, offset: Any, length: Any) -> Place:
        start, count = _counts([offset, length])
        if file not in sizes or start + count > sizes[file]:
            raise ValueError(f"{count} bytes from {start} on are not in a file {file!r}")
        return Place(file, start, count)

    for name, tensor in index["tensors"].items():
        dtype, shape = getattr(torch, str(tensor["dtype"]), None), _counts(tensor["shape"])
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{name} has no dtype {tensor['dtype']!r}")
        chunks = []
        for offsets, lengths, *where in tensor["pieces"]:
            begin, count = _counts(offsets), _counts(lengths)
            inside = all(b + c <= n for b, c, n in zip(begin, count, shape, strict=True))
            if not inside:
                raise ValueError(f"a piece of {name} is not inside it")
            chunks.append(ChunkStorageMetadata(torch.Size(begin), torch.Size(count)))
            places[MetadataIndex(name, begin)] = place(*where)
        entries[name] = TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), chunks)
    for name, where in index["values"].items():
        entries[name] = BytesStorageMetadata()
        places[MetadataIndex(name)] = place(*where)
    return Metadata(entries, storage_data=places, storage_meta=StorageMeta())


def _counts(values: Any) -> list[int]:
    if not isinstance(values, list) or any(type(value) is not int or value < 0 for value in values):
        raise ValueError(f"{values!r} are no sizes")
    return cast(list[int], values)


class IndexReader(FileSystemReader):
    """torch's reader over the index, which never opens `.metadata`."""

    def __init__(self, path: Path, metadata: Metadata) -> None:
        super().__init__(path)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What the index says."""
        assert self._metadata.storage_meta is not None
        self._metadata.storage_meta.load_id = self.load_id
        return self._metadata


class PlainPlanner(DefaultLoadPlanner):
    """torch's planner, which reads what is no tensor with `weights_only=True` as well."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Take one plain value."""
        plain = torch.load(value, weights_only=True)
        super().load_bytes(read_item, _saved(plain))


def _saved(value: Any) -> io.BytesIO:
    """What was read safely, as torch's planner wants to read it once more."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return buffer
