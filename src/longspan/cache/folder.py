"""A cache on a disk: a file of keys and values per rank, and an index that is written last.

    folder/index.json             what it is a cache of, which file holds which tokens and heads, sizes and checksums
    folder/part-0.safetensors     layer by layer, what rank 0 holds

All is written into `folder.partial`, which takes the folder's name when every file is on the disk: a crash leaves a
folder that has another name, or no index.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from longspan.core.errors import LongspanError
from longspan.core.layout import Span
from longspan.core.system import format_os_error

INDEX = "index.json"
_FORMAT = 1


@contextlib.contextmanager
def in_words() -> Iterator[None]:
    """Raise an OSError from the body (a full disk, say) as a LongspanError."""
    try:
        yield
    except OSError as error:
        raise LongspanError(format_os_error(error)) from error


@dataclass(frozen=True)
class Part:
    """One rank's file.

    Attributes:
        file: its name.
        bytes: its size.
        sha256: of its content.
        runs: tokens that its ring rank holds, ascending, of layers that hold all.
        heads: for each layer the KV heads [start, stop) in it.
    """

    file: str
    bytes: int
    sha256: str
    runs: tuple[Span, ...]
    heads: dict[str, Span]


def partial(folder: Path) -> Path:
    """Where files are written until all are."""
    return folder.with_name(f"{folder.name}.partial")


def write_part(folder: Path, rank: int, tensors: Mapping[str, Tensor]) -> tuple[str, int, str]:
    """One rank's file into `partial(folder)`; its name, size and checksum."""
    path = partial(folder) / f"part-{rank}.safetensors"
    try:
        save_file({name: x.contiguous() for name, x in tensors.items()}, path)
    except SafetensorError as error:  # safetensors' own type, also for errors of the disk
        raise LongspanError(f"{path} cannot be written ({error}); make room there, or save to another disk") from error
    with path.open("rb") as file:
        os.fsync(file.fileno())
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return path.name, path.stat().st_size, digest


def finish(folder: Path, index: Mapping[str, Any], parts: list[Part]) -> None:
    """Write the index behind all parts, and give the folder its name."""
    path = partial(folder) / INDEX
    with path.open("w") as file:
        json.dump({"format": _FORMAT, **index, "parts": [asdict(part) for part in parts]}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    old = folder.with_name(f"{folder.name}.old")
    if folder.exists():
        folder.rename(old)
    partial(folder).rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def check_target(folder: Path) -> None:
    """Refuse a folder that holds something else than a cache.

    Raises:
        LongspanError: naming what is there.
    """
    if folder.exists() and not (folder / INDEX).is_file() and (not folder.is_dir() or any(folder.iterdir())):
        raise LongspanError(f"{folder} is there and is no cache; give a folder that does not exist, or is empty")


def read_index(folder: Path) -> tuple[dict[str, Any], list[Part]]:
    """The index of a whole cache, every file compared with it.

    Raises:
        LongspanError: for a folder without an index, and files that are missing or damaged, by name.
    """
    path = folder / INDEX
    if not path.is_file():
        raise LongspanError(f"{folder} holds no whole cache: there is no {INDEX}, which is written last")
    try:
        index = json.loads(path.read_text())
        parts = [
            Part(
                part["file"], part["bytes"], part["sha256"], tuple((a, b) for a, b in part["runs"]),
                {layer: (a, b) for layer, (a, b) in part["heads"].items()},
            )
            for part in index.pop("parts")
        ]  # fmt: skip
        found = index["format"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise LongspanError(f"{path} is damaged ({error!r}); save the cache again") from error
    if found != _FORMAT:
        raise LongspanError(f"{path} has the format {found}, this version of longspan reads {_FORMAT}")
    return index, parts


def check_file(folder: Path, part: Part) -> None:
    """Compare one file with the index, to its last byte.

    Raises:
        LongspanError: with both sizes, or that its content is another.
    """
    path = folder / part.file
    size = path.stat().st_size if path.is_file() else None
    if size != part.bytes:
        found = "is missing" if size is None else f"has {size} bytes"
        raise LongspanError(f"{path} {found}, the index says {part.bytes} bytes; save the cache again")
    with path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != part.sha256:
            raise LongspanError(f"{path} is damaged: its checksum is not that of the index; save the cache again")


def gather_parts(
    folder: Path, parts: list[Part], layer: str, names: list[str], start: int, runs: tuple[Span, ...], heads: Span
) -> list[Tensor]:
    """What a rank holds of a layer, read from the files of any mesh.

    Args:
        folder: of the cache.
        parts: its files.
        layer: of which.
        names: of the layer's tensors.
        start: the first token that the layer holds.
        runs: tokens that this rank shall hold, ascending.
        heads: its KV heads [start, stop).

    Returns:
        For each name `[B, heads, tokens, width]`.
    """
    wanted = [(max(a, start), b) for a, b in runs if b > start]
    total, outs = sum(b - a for a, b in wanted), dict[str, Tensor]()
    for part in parts:
        low, high = (f(x, y) for f, x, y in zip((max, min), part.heads[layer], heads, strict=True))
        moves = _overlaps([(max(a, start), b) for a, b in part.runs if b > start], wanted)
        if low >= high and outs:
            continue
        try:
            with safe_open(folder / part.file, "pt") as file:
                for name in names:
                    held = file.get_slice(f"{layer}.{name}")
                    shape, first = held.get_shape(), part.heads[layer][0]
                    if name not in outs:
                        kind = file.get_tensor(f"{layer}.{name}").dtype
                        outs[name] = torch.empty(shape[0], heads[1] - heads[0], total, shape[3], dtype=kind)
                    for source, target, count in moves if low < high else ():
                        outs[name][:, low - heads[0] : high - heads[0], target : target + count] = held[
                            :, low - first : high - first, source : source + count
                        ]
        except SafetensorError as error:
            raise LongspanError(f"{folder / part.file} cannot be read ({error}); save the cache again") from error
    return [outs[name] for name in names]


def _overlaps(held: list[Span], wanted: list[Span]) -> list[tuple[int, int, int]]:
    """(place among the held, place among the wanted, count) of every run that both have."""
    moves, at_held = [], 0
    for a, b in held:
        at_wanted = 0
        for c, d in wanted:
            low, high = max(a, c), min(b, d)
            if low < high:
                moves.append((at_held + low - a, at_wanted + low - c, high - low))
            at_wanted += d - c
        at_held += b - a
    return moves
