"""The fastest kernel of each case on this GPU, as rows of longspan's kernel table (`--write-table FILE`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import longspan
from benchmarks.gpu.kernels import BF16, FP32, NAMES, attend, both_ways, own_flash
from benchmarks.gpu.setup import FAILED, MEASURED, SKIPPED, STOPPED, WRONG, Row, Setup, brief
from longspan.attn.kernels.table import WHAT, capability_of
from longspan.core.errors import LongspanError
from tests.oracle import Case, errors
from tests.tolerance import MARGIN

LIMIT_S = 420
TRIED = (*NAMES[1:], "flex")


def masks(n: int) -> dict[str, dict[str, Any]]:
    """Return an attention of `n` tokens for each kind of mask that a row can name."""
    return {
        "causal": {},
        "window": {"window": max(n // 4, 300)},
        "documents": {"cu_seqlens": torch.linspace(0, n, 17).round().to(torch.int64)},
        "short_window": {"window": min(n // 2, 128)},
        "full": {"causal": False},
        "mod": {"softcap": 30.0},
    }


def table(setup: Setup) -> Iterator[Row]:
    """Time of forward and backward of every kernel, for every kind of mask; a wrong kernel is left out."""
    n = setup.size(16384, 512)
    for what, how in masks(n).items():
        for dtype in (FP32,) if setup.quick else (BF16, torch.float16, FP32):
            for dim in (16,) if setup.quick else (64, 128, 256):
                yield from _measured(setup, n, what, how, dtype, dim)


def _measured(setup: Setup, n: int, what: str, how: dict[str, Any], dtype: torch.dtype, dim: int) -> Iterator[Row]:
    dtype_name = str(dtype).removeprefix("torch.")
    name, times = f"{what}, {dtype_name}, head_dim {dim}", {}
    for kernel in TRIED:
        if not setup.time_left(8.0 if setup.on_gpu else 1.0):
            yield Row(name, "", f"{STOPPED}: the time was up")
            return
        own_flash()
        try:
            worst = max(errors(_small(what, dtype, dim), attend(_small(what, dtype, dim), kernel, setup)).values())
            if not worst <= MARGIN:
                yield Row(f"{kernel}, {name}", f"{worst:.3g} of {MARGIN:g} at most", WRONG)
                continue
            times[kernel] = setup.seconds(both_ways(setup, n, dtype, dim, kernel=kernel, **how)[1], budget_s=0.2)
        except LongspanError:  # the kernel refuses this case
            continue
        except Exception as error:
            yield Row(f"{kernel}, {name}", brief(error), FAILED)
    if not times:
        yield Row(name, "", f"{SKIPPED}: no kernel accepts it")
        return
    order = sorted(times, key=lambda kernel: times[kernel])
    figure = ", ".join(f"{kernel} {times[kernel] * 1e3:.3g} ms" for kernel in order)
    keys = {"what": what, "dtype": dtype_name, "head_dim": dim, "kernels": order}
    device = torch.device(setup.device)
    where = {"device": device.type} | ({"capability": capability_of(device)} if setup.on_gpu else {})
    yield Row(name, figure, MEASURED, where | keys)


def _small(what: str, dtype: torch.dtype, dim: int) -> Case:
    base = Case(600, 1, 8, 2, dim, dim, dtype=dtype)
    more: dict[str, dict[str, Any]] = {
        "window": {"window": 300},
        "short_window": {"window": 50},
        "documents": {"documents": tuple(i * 7 // 600 for i in range(600))},
        "full": {"causal": False},
        "mod": {"softcap": 20.0},
    }
    return dataclasses.replace(base, **more.get(what, {}))


def write(path: Path, rows: list[Row], title: str) -> int:
    """Write a file for `longspan.kernel_table`, and return the number of its rows.

    Rows are sorted by kind, small heads first, as the first match applies.
    """
    found = [row for row in rows if row.data is not None]
    found.sort(key=lambda row: (WHAT.index(row.data["what"]), row.data["dtype"], row.data["head_dim"]))
    lines = [
        f"# {title}",
        "# Forward and backward; `kernel=longspan.kernel_table(...)` tries these rows before longspan's.",
    ]
    for row in found:
        lines += ["", f"[[row]]  # {row.figure}"]
        lines += [f"{key} = {_toml(value)}" for key, value in row.data.items()]
    path.write_text("\n".join(lines) + "\n")
    if found:
        longspan.kernel_table(path)  # raises if it cannot read it
    return len(found)


def _toml(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    return str(value) if isinstance(value, int) else f'"{value}"'
