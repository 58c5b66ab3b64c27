"""The safetensors files of a model's folder, read a few rows of a tensor at a time."""

from __future__ import annotations

import functools
import json
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from longspan.core.errors import LongspanError

SAMPLE = 4 << 10
"""Bytes at the beginning and at the end of each tensor that its digest is made of."""

_LONGEST_HEADER = 100 << 20  # safetensors' own limit


@dataclass(frozen=True)
class Place:
    """Where a tensor lies.

    Attributes:
        file: that holds it.
        dtype: as the file calls it ("BF16").
        shape: of the tensor.
        start: byte of the file at which it begins.
        stop: byte after its last.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class WeightFiles:
    """All tensors of a model's files.

    Attributes:
        places: by the files' own keys.
    """

    places: dict[str, Place]

    @classmethod
    def find(cls, name: str) -> WeightFiles | None:
        """The files that `from_pretrained(name)` reads, of a folder or a model on the hub; their headers are read here.

        Returns:
            None where there are no safetensors files.

        Raises:
            LongspanError: for a file that is missing, cut off or no safetensors file.
        """
        from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

        single = _or_none(lambda: cached_file(name, SAFE_WEIGHTS_NAME))
        if single is not None:
            return cls(_read_header(Path(single)))
        index = _or_none(lambda: cached_file(name, SAFE_WEIGHTS_INDEX_NAME))
        if index is None:
            return None
        try:
            listed = sorted(set(json.loads(Path(index).read_text())["weight_map"].values()))
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise LongspanError(f"{index} cannot be read: {error}; fetch the model again") from error
        places: dict[str, Place] = {}
        for part in listed:
            found = _or_none(functools.partial(cached_file, name, part))
            if found is None:
                raise LongspanError(f"{name} lacks {part}, which its {SAFE_WEIGHTS_INDEX_NAME} names; fetch it again")
            places |= _read_header(Path(found))
        return cls(places)

    def digests(self) -> dict[str, int]:
        """By key, a checksum of dtype, shape, and the first and last `SAMPLE` bytes of each tensor.

        Raises:
            LongspanError: if a file cannot be read.
        """
        found = {}
        for file in dict.fromkeys(place.file for place in self.places.values()):
            try:
                with file.open("rb") as opened:
                    for key, place in self.places.items():
                        if place.file == file:
                            found[key] = _digest(opened, place)
            except OSError as error:
                raise LongspanError(f"{file} cannot be read: {error}") from error
        return found

    def read(self, key: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows `start` to `stop` of a tensor, or all of it, on the CPU and in its own dtype. No more is read.

        Raises:
            LongspanError: if its file cannot be read any more.
        """
        from safetensors import safe_open

        file = self.places[key].file
        try:
            with safe_open(file, framework="pt", device="cpu") as opened:
                found: Tensor = opened.get_tensor(key) if stop is None else opened.get_slice(key)[start:stop]
        except Exception as error:  # safetensors has kinds of its own
            raise LongspanError(f"{key} cannot be read from {file}: {error}") from error
        return found

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of all tensors, by key."""
        return {key: place.shape for key, place in self.places.items()}


def _or_none(find: Any) -> str | None:
    try:
        found: str | None = find()
    except OSError:
        return None
    return found


def _read_header(file: Path) -> dict[str, Place]:
    """A safetensors file begins with the length of its header, 8 bytes little-endian, and the header in JSON."""
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            if length > min(size, _LONGEST_HEADER):
                raise ValueError(f"its header would have {length:,} bytes")
            header = json.loads(opened.read(length))
        begin = 8 + length
        places = {
            key: Place(file, x["dtype"], tuple(x["shape"]), *(begin + offset for offset in x["data_offsets"]))
            for key, x in header.items()
            if key != "__metadata__"
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise LongspanError(f"{file} is no safetensors file that can be read: {error}; fetch it again") from error
    end = max((place.stop for place in places.values()), default=begin)
    if end != size:
        raise LongspanError(f"{file} has {size:,} bytes, its header says {end:,}; fetch it again")
    return places


def _digest(opened: Any, place: Place) -> int:
    found = zlib.crc32(f"{place.dtype} {place.shape}".encode())
    for start in (place.start, max(place.start, place.stop - SAMPLE)):
        opened.seek(start)
        found = zlib.crc32(opened.read(min(SAMPLE, place.stop - start)), found)
    return found
