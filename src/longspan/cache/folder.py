"""A cache on disk: one file of keys and values per rank, and an index that is written last.

    folder/index.json             the model's facts; the tokens and heads, size and checksum of each file
    folder/part-0.safetensors     rank 0's keys and values, layer by layer, and the states of recurrent layers

Everything is written into `folder.partial`, which is renamed when every file is on the disk: a crash leaves a folder
with another name, or without an index.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from longspan.core.errors import LongspanError
from longspan.core.layout import Span

INDEX = "index.json"
_FORMAT = 1


@dataclass(frozen=True)
class CacheFile:
    """One rank's file."""

    file: str  # its name
    bytes: int  # its size
    sha256: str  # of its content
    runs: tuple[Span, ...]  # token runs of its ring rank, ascending, in layers without a window
    heads: dict[str, Span]  # for each layer the KV heads [start, stop) in the file


def partial(folder: Path) -> Path:
    """Return the folder that is renamed to `folder` once it is complete."""
    return folder.with_name(f"{folder.name}.partial")


def write_file(folder: Path, rank: int, tensors: Mapping[str, Tensor]) -> tuple[str, int, str]:
    """Write one rank's file into `partial(folder)`; return its name, size and checksum."""
    path = partial(folder) / f"part-{rank}.safetensors"
    try:
        save_file({name: x.contiguous() for name, x in tensors.items()}, path)
    except SafetensorError as error:  # safetensors raises its own type for disk errors too
        raise LongspanError(f"{path} cannot be written ({error}); make room there, or save to another disk") from error
    with path.open("rb") as file:
        os.fsync(file.fileno())
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return path.name, path.stat().st_size, digest


def publish(folder: Path, index: Mapping[str, Any], files: list[CacheFile]) -> None:
    """Write the index of the complete files, and rename the folder."""
    with (partial(folder) / INDEX).open("w") as out:
        json.dump({"format": _FORMAT, **index, "parts": [asdict(file) for file in files]}, out, indent=1)
        out.flush()
        os.fsync(out.fileno())
    old = folder.with_name(f"{folder.name}.old")
    if folder.exists():
        folder.rename(old)
    partial(folder).rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def check_target(folder: Path) -> None:
    """Raise LongspanError if a folder contains anything but a cache."""
    if folder.exists() and not (folder / INDEX).is_file() and (not folder.is_dir() or any(folder.iterdir())):
        raise LongspanError(f"{folder} exists and is not a cache; use a new or empty folder")


def read_index(folder: Path) -> tuple[dict[str, Any], list[CacheFile]]:
    """Return the index of a complete cache, and its files.

    Raises:
        LongspanError: the index is missing or damaged, or has another format.
    """
    path = folder / INDEX
    if not path.is_file():
        raise LongspanError(f"{folder} is not a complete cache: it has no {INDEX}, which is written last")
    try:
        index = json.loads(path.read_text())
        format = index["format"]
        files = [CacheFile(**file) for file in index.pop("parts")] if format == _FORMAT else []
        spans = [span for file in files for span in (*file.runs, *file.heads.values())]
        if not all(isinstance(x, int) for start, stop in spans for x in (start, stop)):
            raise TypeError("a run of tokens or heads is no pair of integers")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise LongspanError(f"{path} is damaged ({error!r}); save the cache again") from error
    if format != _FORMAT:
        raise LongspanError(f"{path} has the format {format}, this version of longspan reads {_FORMAT}")
    return index, files


def check_file(folder: Path, file: CacheFile) -> None:
    """Compare one file with the index, to its last byte.

    Raises:
        LongspanError: its size or its checksum differs.
    """
    path = folder / file.file
    size = path.stat().st_size if path.is_file() else None
    if size != file.bytes:
        actual = "is missing" if size is None else f"has {size} bytes"
        raise LongspanError(f"{path} {actual}, the index says {file.bytes} bytes; save the cache again")
    with path.open("rb") as opened:
        if hashlib.file_digest(opened, "sha256").hexdigest() != file.sha256:
            raise LongspanError(f"{path} is damaged: its checksum is not that of the index; save the cache again")


def read_layer(
    folder: Path, files: list[CacheFile], layer: str, names: list[str], start: int, runs: tuple[Span, ...], heads: Span
) -> list[Tensor]:
    """Read this rank's tokens and heads of a layer from files that any mesh wrote.

    Args:
        folder: of the cache.
        files: of the cache.
        layer: its name.
        names: of the layer's tensors.
        start: the first token in the layer.
        runs: token runs of this rank, ascending.
        heads: this rank's KV heads [start, stop).

    Returns:
        For each name `[B, heads, tokens, width]`.
    """
    targets = [(max(a, start), b) for a, b in runs if b > start]
    total, outs = sum(b - a for a, b in targets), dict[str, Tensor]()
    for file in files:
        low, high = (f(x, y) for f, x, y in zip((max, min), file.heads[layer], heads, strict=True))
        moves = _overlaps([(max(a, start), b) for a, b in file.runs if b > start], targets)
        if low >= high and outs:
            continue
        try:
            with safe_open(folder / file.file, "pt") as opened:
                for name in names:
                    stored = opened.get_slice(f"{layer}.{name}")
                    shape, first = stored.get_shape(), file.heads[layer][0]
                    if name not in outs:
                        kind = opened.get_tensor(f"{layer}.{name}").dtype
                        outs[name] = torch.empty(shape[0], heads[1] - heads[0], total, shape[3], dtype=kind)
                    for source, target, count in moves if low < high else ():
                        outs[name][:, low - heads[0] : high - heads[0], target : target + count] = stored[
                            :, low - first : high - first, source : source + count
                        ]
        except SafetensorError as error:
            raise LongspanError(f"{folder / file.file} cannot be read ({error}); save the cache again") from error
    return [outs[name] for name in names]


def read_tensors(folder: Path, file: CacheFile, prefix: str) -> dict[str, Tensor]:
    """Return the tensors of a file whose names start with `prefix`, by the rest of their names."""
    try:
        with safe_open(folder / file.file, "pt") as opened:
            names = [name for name in opened.keys() if name.startswith(prefix)]  # noqa: SIM118 (no dict)
            return {name.removeprefix(prefix): opened.get_tensor(name) for name in names}
    except SafetensorError as error:
        raise LongspanError(f"{folder / file.file} cannot be read ({error}); save the cache again") from error


def _overlaps(sources: list[Span], targets: list[Span]) -> list[tuple[int, int, int]]:
    """Return (index among the source tokens, index among the target tokens, count) of every run in both."""
    moves, at_source = [], 0
    for a, b in sources:
        at_target = 0
        for c, d in targets:
            low, high = max(a, c), min(b, d)
            if low < high:
                moves.append((at_source + low - a, at_target + low - c, high - low))
            at_target += d - c
        at_source += b - a
    return moves
