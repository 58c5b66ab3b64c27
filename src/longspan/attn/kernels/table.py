"""The table of kernels that "auto" tries, in order: `table.toml`, which a benchmark can measure for a GPU."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from longspan.attn.kernels.base import KernelRequest
from longspan.attn.kernels.sdpa import SHORT_WINDOW
from longspan.attn.mask import Mask
from longspan.core.errors import LongspanError
from longspan.core.validation import Toml, format_value, read_toml

WHAT = ("mod", "window", "short_window", "documents", "causal", "full")
DTYPES = ("bfloat16", "float16", "float32", "float64")


def capability_of(device: torch.device) -> str:
    """Return the compute capability of a GPU, such as "9.0"; "" for another device."""
    if device.type != "cuda":
        return ""
    major, minor = torch.cuda.get_device_capability(device)
    return f"{major}.{minor}"


def what_of(request: KernelRequest) -> str:
    """Return the kind of an attention: the first of `WHAT` that fits."""
    mask, scores = request.mask, request.scores
    if mask.mask_mod is not None or scores.softcap is not None or scores.has_bias:
        return "mod"
    if mask.window is not None:
        return "window" if mask.window > SHORT_WINDOW else "short_window"
    several = mask.varies_by_row or mask.chunk_size is not None
    if several or mask.prefix is not None or mask.q_start > 0 or not request.same_length or type(mask) is not Mask:
        return "documents"
    return "causal" if mask.causal else "full"


@dataclass(frozen=True, slots=True)
class TableRow:
    """One row; None matches everything. What it is matched with is the same on all ranks with the same GPU."""

    summary: str  # the row as one line, formatted when it is read: a compiler that traces a choice cannot format
    kernels: tuple[str, ...]  # names in order
    device: str | None = None  # type of the device
    capability: tuple[str, ...] | None = None  # of GPUs, such as "9.0"
    what: tuple[str, ...] | None = None  # some of `WHAT`
    dtype: tuple[str, ...] | None = None  # some of `DTYPES`
    head_dim: int | None = None  # largest head_dim

    def matches(self, request: KernelRequest) -> bool:
        return (
            self.device in (None, request.device.type)
            and (self.capability is None or capability_of(request.device) in self.capability)
            and (self.what is None or what_of(request) in self.what)
            and (self.dtype is None or str(request.dtype).removeprefix("torch.") in self.dtype)
            and (self.head_dim is None or max(request.head_dims) <= self.head_dim)
        )


@dataclass(frozen=True, slots=True)
class KernelTable:
    """Rows in order, for `kernel=` instead of "auto"."""

    name: str  # the file and a digest of its rows, by which ranks compare their tables
    rows: tuple[TableRow, ...]  # the first that matches is used

    def row(self, request: KernelRequest) -> TableRow:
        """Return the first row that matches; longspan's last row matches everything."""
        return next(row for row in self.rows if row.matches(request))

    def rows_of(self, device: torch.device) -> str:
        """Format the rows for a type of device, of any compute capability."""
        return "; ".join(row.summary for row in self.rows if row.device in (None, device.type))


def read_rows(name: str, path: Path, known: Collection[str] | None) -> tuple[TableRow, ...]:
    """Read the rows of a file; `known` are the names of kernels."""
    toml = read_toml(name, path)
    rows = toml.values.get("row", [])
    if set(toml.values) - {"row"} or not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise toml.error("a kernel table is a list of [[row]], and nothing else")
    return tuple(_row(toml, number, row, known) for number, row in enumerate(rows, 1))


def _row(toml: Toml, number: int, values: dict[str, Any], known: Collection[str] | None) -> TableRow:
    single = "device", "head_dim"
    row = {key: tuple(x) if isinstance(x, list) and key not in single else (x,) for key, x in values.items()}
    checks: dict[str, tuple[Callable[[Any], bool], str]] = {
        "kernels": (lambda x: known is None or x in known, f"a list of names ({', '.join(known or ())})"),
        "device": (lambda x: isinstance(x, str), 'a type of device, such as "cuda"'),
        "capability": (
            lambda x: re.fullmatch(r"\d+\.\d+", str(x)) is not None,
            'a compute capability in quotes, such as "9.0", or a list of them',
        ),
        "what": (lambda x: x in WHAT, f"one of {', '.join(WHAT)}, or a list of them"),
        "dtype": (lambda x: x in DTYPES, f"one of {', '.join(DTYPES)}, or a list of them"),
        "head_dim": (lambda x: type(x) is int and x > 0, "at least 1"),
    }
    where = f"{toml.name} {toml.path}, row {number}"
    for key in ("kernels", *row):
        if key not in checks:
            raise LongspanError(f"{where} has {key}; a row may have {', '.join(checks)}")
        allows, must = checks[key]
        if not row.get(key) or not all(map(allows, row[key])):
            raise LongspanError(f"{where}: {key}={format_value(values.get(key))} must be {must}")
    source = f"row {number} of {'longspan' if known is None else toml.path.name}'s table"
    formatted = ", ".join(
        f"{key} {' or '.join(map(str, row[key]))}" for key in checks if key != "kernels" and key in row
    )
    summary = f"{source}: {formatted or 'everything'} -> {', '.join(row['kernels'])}"
    fields: dict[str, Any] = {key: x[0] if key in single else x for key, x in row.items()}
    return TableRow(summary, **fields)


DEFAULT = KernelTable("longspan's", read_rows("longspan's table", Path(__file__).with_name("table.toml"), None))
"""`table.toml`, read at import: a compiler that traces a choice must find it there."""
