"""Choose the kernel of an attention, from facts that are the same on every rank, and report why.

"auto" follows a table (`table.toml`). The reason names the table's row, and the kernels it passed over.
"""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor

from longspan.attn.kernels import flash as flash  # registers itself, as does the next one
from longspan.attn.kernels import flash_attn as flash_attn
from longspan.attn.kernels.base import (
    BY_REGIONS,
    BY_SCORES,
    REGISTRY,
    BlockKernel,
    Kernel,
    KernelRequest,
    refusal,
    register,
)
from longspan.attn.kernels.custom import FunctionKernel
from longspan.attn.kernels.flex import FLEX, compiles
from longspan.attn.kernels.sdpa import SDPA
from longspan.attn.kernels.table import DEFAULT, KernelTable, read_rows
from longspan.attn.kernels.tiled import TILED
from longspan.attn.score import Scores
from longspan.core.errors import LongspanError
from longspan.core.validation import as_path, checked_call, format_value, nearest

AnyKernel = str | Kernel | KernelTable | Callable[..., Tensor]
"""A name, a custom kernel, a table (`kernel_table`), or a function `f(q, k, v, *, causal, scale, ...)`."""

_log = logging.getLogger("longspan")


class EagerKernel(Kernel):
    """The formula with materialized scores, on any mesh, with gradients of learnt biases: `methods/reference.py`."""

    name = "eager"
    computes = BY_REGIONS | BY_SCORES

    def refuses(self, request: KernelRequest) -> str | None:
        return None

    def describe(self, request: KernelRequest) -> str:
        return "the formula with its scores materialized; its memory grows with the square of the tokens"


EAGER = register(EagerKernel())


@dataclass(frozen=True)
class Choice:
    """The name of a kernel ("sdpa", "flash", "tiled", ..., or a custom kernel's) and the reason for it."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


def choose_kernel(kernel: AnyKernel, request: KernelRequest) -> tuple[Kernel, Choice]:
    """Return the kernel that computes this request, and why.

    Raises:
        LongspanError: for a kernel that is unknown, not installed, or cannot compute this; the message names one that
            can.
    """
    if isinstance(kernel, str) and kernel not in ("auto", *REGISTRY):
        raise LongspanError(
            f"kernel={kernel!r} is unknown; {nearest(kernel, ('auto', *REGISTRY))} (or pass a callable)"
        )
    table = table_of(kernel)
    if table is None:
        chosen, choice = _check_requested(as_kernel(kernel), request)
    else:
        chosen, choice = _choose_by_table(request, table)
    if request.grad and returns_lse(chosen):
        refuse_learnt_biases(chosen.name, request.scores, request.device)
    return chosen, choice


def _check_requested(kernel: Kernel, request: KernelRequest) -> tuple[Kernel, Choice]:
    missing_lse = _missing_lse(kernel, request)
    tiled_instead = kernel is SDPA and request.ring > 1
    if missing_lse is not None and not tiled_instead:
        changes = ["ring=1 with more ulysses"] if request.ring > 1 and kernel is not EAGER else []
        if request.lse:
            changes.append("head_chunks=1 and overlap_chunks=1 without checkpointing='selective'")
        other = " and ".join(changes)
        raise LongspanError(
            f"the kernel {missing_lse}; use kernel='auto' or 'tiled', a function that returns it "
            f"(longspan.kernel_with_lse), or {other}"
        )
    refused = refusal(kernel, request)
    if refused is not None:
        raise LongspanError(refused)
    if tiled_instead:
        return TILED, Choice(TILED.name, f"{missing_lse}; {TILED.describe(request)}")
    return kernel, Choice(kernel.name, kernel.describe(request))


def _missing_lse(kernel: Kernel, request: KernelRequest) -> str | None:
    """Return what needs the log-sum-exp that a kernel does not return; None if nothing does."""
    if returns_lse(kernel):
        return None
    if request.ring > 1 and kernel is not EAGER:
        return f"{kernel.name} returns no log-sum-exp, which a ring of {request.ring} needs to merge blocks"
    if request.lse:
        options = "head_chunks, overlap_chunks and checkpointing='selective'"
        return f"{kernel.name} returns no log-sum-exp, which {options} save for the backward"
    return None


def as_kernel(kernel: AnyKernel) -> Kernel:
    """Return the kernel with this name, or wrap a function as a kernel.

    Raises:
        LongspanError: for anything else.
    """
    if isinstance(kernel, str):
        return REGISTRY[kernel]
    if isinstance(kernel, Kernel):
        return kernel
    function: Any = kernel
    if not callable(function):
        known = ", ".join(("auto", *REGISTRY))
        raise LongspanError(f"kernel={format_value(kernel)} is neither a name ({known}) nor a callable")
    return FunctionKernel(function)


def returns_lse(kernel: Kernel) -> TypeGuard[BlockKernel]:
    """Whether a kernel is a `BlockKernel`, which computes block by block."""
    return all(hasattr(kernel, name) for name in ("prepare", "accumulate"))


def _choose_by_table(request: KernelRequest, table: KernelTable) -> tuple[Kernel, Choice]:
    """Return the first kernel of the table's row that can compute this; "tiled" if none of them can."""
    row = table.row(request)
    passed_over: list[str] = []
    for name in (*row.kernels, TILED.name):
        kernel = as_kernel(name)
        why_not = _why_not(kernel, request)
        if why_not is None:
            return kernel, Choice(kernel.name, "; ".join([*passed_over, kernel.describe(request), f"by {row.summary}"]))
        passed_over.append(why_not)
    raise LongspanError(f"no kernel computes this attention: {'; '.join(passed_over)}")


def _why_not(kernel: Kernel, request: KernelRequest) -> str | None:
    """Return in a few words why "auto" passes a kernel over; None if it does not."""
    missing_lse = _missing_lse(kernel, request)
    if missing_lse is not None:
        return missing_lse
    if kernel is FLEX and not compiles(request.device):
        return "flex cannot be compiled: it needs a GPU and Triton"
    try:
        refused = refusal(kernel, request)
    except LongspanError as error:  # a package that is not installed
        refused = str(error)
    if refused is not None:
        return refused.split(";")[0].replace(f"kernel={kernel.name!r}", kernel.name)
    if kernel.name in request.failed:
        return f"{kernel.name} does not work on every rank"
    if getattr(kernel, "self_check", False) and torch.compiler.is_compiling():
        return f"{kernel.name} cannot be checked by a compiler"
    return None


def table_of(kernel: AnyKernel) -> KernelTable | None:
    """Return the table that chooses the kernel: the given one, or longspan's for "auto"; None for any other kernel."""
    if isinstance(kernel, str) and kernel == "auto":
        return DEFAULT
    return kernel if isinstance(kernel, KernelTable) else None


@checked_call()
def kernel_table(path: str | Path) -> KernelTable:
    """Read a custom table of kernels, to pass as `kernel=` instead of "auto".

    Its rows take precedence over longspan's (`longspan/attn/kernels/table.toml`, which documents the format).
    `python -m benchmarks.gpu --write-table FILE` measures rows on a GPU. The file must be the same on all ranks;
    `longspan.parallelize` compares it.

    Args:
        path: of a TOML file.

    Raises:
        LongspanError: for a file that is no such table; the message names the row and the allowed values.
    """
    path = as_path("path", path)
    rows = read_rows("the kernel table", path, tuple(REGISTRY))
    digest = hashlib.sha256(repr(rows).encode()).hexdigest()
    return KernelTable(f"table {path.name} {digest[:12]}", rows + DEFAULT.rows)


def refuse_learnt_biases(kernel: str, scores: Scores, device: torch.device) -> None:
    """Raise for a learnt bias: a kernel that computes block by block has no gradient for it."""
    learnt = scores.alibi is not None and scores.alibi.requires_grad
    if scores.bias is not None and not learnt:
        at = torch.zeros(1, dtype=torch.int64, device=device)
        bias = scores.bias_of(1, at, at, torch.float32)
        learnt = bias is not None and bias.requires_grad
    if learnt:
        raise LongspanError(
            f"kernel={kernel!r} computes no gradient of a learnt bias; use kernel='eager' (exact, but its memory grows "
            f"with the square of the tokens), or detach the bias"
        )


@functools.cache
def log_choice(choice: Choice) -> None:
    """Log a choice once per process."""
    _log.info("attention kernel %s", choice)
