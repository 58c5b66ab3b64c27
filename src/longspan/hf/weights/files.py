"""Read a few rows at a time from the safetensors files of a model."""

from __future__ import annotations

import functools
import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from longspan.core.errors import LongspanError

SAMPLE = 4 << 10
"""Bytes at the start and at the end of each tensor that enter its digest."""

_LONGEST_HEADER = 100 << 20  # safetensors' own limit


@dataclass(frozen=True)
class TensorInFile:
    """One tensor: the file, the dtype's name in it ("BF16"), the shape, and the bytes from `start` to `stop`."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class WeightFiles:
    """All tensors of a model's files, by the files' own keys."""

    tensors: dict[str, TensorInFile]

    @classmethod
    def find(cls, name: str) -> WeightFiles | None:
        """Read the headers of the files that `from_pretrained(name)` reads; None if they are not safetensors."""
        from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

        single = _or_none(lambda: cached_file(name, SAFE_WEIGHTS_NAME))
        if single is not None:
            return cls(_read_header(Path(single)))
        index = _or_none(lambda: cached_file(name, SAFE_WEIGHTS_INDEX_NAME))
        if index is None:
            return None
        try:
            parts = sorted(set(json.loads(Path(index).read_text())["weight_map"].values()))
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise LongspanError(f"{index} cannot be read: {error}; fetch the model again") from error
        tensors: dict[str, TensorInFile] = {}
        for part in parts:
            file = _or_none(functools.partial(cached_file, name, part))
            if file is None:
                raise LongspanError(f"{name} lacks {part}, which its {SAFE_WEIGHTS_INDEX_NAME} names; fetch it again")
            tensors |= _read_header(Path(file))
        return cls(tensors)

    def digests(self) -> dict[str, int]:
        """Return a checksum of dtype, shape, and the first and last `SAMPLE` bytes of each tensor, by key."""
        digests = dict[str, int]()
        for file in dict.fromkeys(tensor.file for tensor in self.tensors.values()):
            try:
                with file.open("rb") as opened:
                    digests |= {k: _digest(opened, x) for k, x in self.tensors.items() if x.file == file}
            except OSError as error:
                raise LongspanError(f"{file} cannot be read: {error}") from error
        return digests

    def read(self, key: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Read rows `start` to `stop` of a tensor, or all, to the CPU in the file's dtype."""
        from safetensors import safe_open

        file = self.tensors[key].file
        try:
            with safe_open(file, framework="pt", device="cpu") as opened:
                rows: Tensor = opened.get_tensor(key) if stop is None else opened.get_slice(key)[start:stop]
        except Exception as error:  # safetensors has its own exceptions
            raise LongspanError(f"{key} cannot be read from {file}: {error}") from error
        return rows


def _or_none(find: Callable[[], str | None]) -> str | None:
    try:
        return find()
    except OSError:
        return None


def _read_header(file: Path) -> dict[str, TensorInFile]:
    """Read a safetensors file's first 8 bytes, the header's length (little-endian), and the header in JSON."""
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            if length > min(size, _LONGEST_HEADER):
                raise ValueError(f"its header would have {length:,} bytes")
            header = json.loads(opened.read(length))
        begin = 8 + length
        tensors = {
            key: TensorInFile(file, x["dtype"], tuple(x["shape"]), *(begin + offset for offset in x["data_offsets"]))
            for key, x in header.items()
            if key != "__metadata__"
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise LongspanError(f"{file} is no safetensors file that can be read: {error}; fetch it again") from error
    end = max((tensor.stop for tensor in tensors.values()), default=begin)
    if end != size:
        raise LongspanError(f"{file} has {size:,} bytes, its header says {end:,}; fetch it again")
    return tensors


def _digest(opened: Any, tensor: TensorInFile) -> int:
    digest = zlib.crc32(f"{tensor.dtype} {tensor.shape}".encode())
    for start in (tensor.start, max(tensor.start, tensor.stop - SAMPLE)):
        opened.seek(start)
        digest = zlib.crc32(opened.read(min(SAMPLE, tensor.stop - start)), digest)
    return digest
