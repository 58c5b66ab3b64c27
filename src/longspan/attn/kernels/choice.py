"""Which kernel computes an attention, and why: decided from facts that are alike on every rank, and always said.

"auto" goes by a table (`table.toml`); what it does not take, and why, and the table's row are part of the answer.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor

from longspan.attn.kernels import cudnn as cudnn  # registers itself, as do the next two
from longspan.attn.kernels import flash as flash
from longspan.attn.kernels import flash_attn as flash_attn
from longspan.attn.kernels.base import ALIASES, REGISTRY, BlockKernel, Kernel, KernelRequest
from longspan.attn.kernels.custom import FunctionKernel
from longspan.attn.kernels.eager import EAGER
from longspan.attn.kernels.flex import FLEX, compiles
from longspan.attn.kernels.sdpa import SDPA
from longspan.attn.kernels.table import DEFAULT, Facts, KernelTable, read_table
from longspan.attn.kernels.tiled import TILED
from longspan.attn.score import Scores
from longspan.core.errors import LongspanError
from longspan.core.validation import as_path, checked_call, format_value

AnyKernel = str | Kernel | KernelTable | Callable[..., Tensor]
"""What a caller may ask for: a name, a kernel of one's own, a table (`kernel_table`), or a function
`f(q, k, v, *, causal, scale, ...)`."""

_log = logging.getLogger("longspan")


@dataclass(frozen=True)
class Choice:
    """A kernel and the reason for it.

    Attributes:
        name: "sdpa", "flash", "tiled", "flex", "cudnn", "flash_attn", "eager", or that of a kernel of one's own.
        reason: why this one.
    """

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


def choose_kernel(kernel: AnyKernel, need: KernelRequest) -> tuple[Kernel, Choice]:
    """The kernel that `kernel` stands for here, and why.

    Raises:
        LongspanError: for a kernel that is unknown, not installed, or cannot do this; with one that can.
    """
    if isinstance(kernel, str) and kernel not in ("auto", *REGISTRY, *ALIASES):
        raise LongspanError(
            f"kernel={kernel!r} is unknown; choose {', '.join(('auto', *REGISTRY))}, or pass a callable"
        )
    if isinstance(kernel, KernelTable) or (isinstance(kernel, str) and kernel == "auto"):
        found, choice = _auto(need, table_of(kernel))
    else:
        found, choice = _asked_for(as_kernel(kernel), need)
    if need.grad and returns_lse(found):
        refuse_learnt_biases(found.name, need.scores, need.device)
    return found, choice


def _asked_for(found: Kernel, need: KernelRequest) -> tuple[Kernel, Choice]:
    refusal = found.refuses(need)
    if refusal is not None:
        raise LongspanError(refusal)
    if need.ring > 1 and found is SDPA:
        why = f"in a ring blocks are added up by log-sum-exps; {TILED.describe(need)}"
        return TILED, Choice(TILED.name, why)
    if need.ring > 1 and found is not EAGER and not returns_lse(found):
        raise LongspanError(
            f"the kernel {found.name} gives no log-sum-exps, by which a ring of {need.ring} adds up blocks; use "
            f"kernel='auto', or ring=1 with more ulysses"
        )
    if need.lse and not returns_lse(found):
        raise LongspanError(
            f"the kernel {found.name} gives no log-sum-exp, which head_chunks, overlap_chunks and "
            f"checkpointing='selective' save for the backward; use kernel='auto' or 'tiled', a function that gives it "
            f"(longspan.kernel_with_lse), or head_chunks=1 and overlap_chunks=1 without checkpointing='selective'"
        )
    return found, Choice(found.name, found.describe(need))


def as_kernel(kernel: AnyKernel) -> Kernel:
    """The kernel of a name, or a function as one.

    Raises:
        LongspanError: for what is neither.
    """
    if isinstance(kernel, str):
        return REGISTRY[ALIASES.get(kernel, kernel)]
    if isinstance(kernel, Kernel):
        return kernel
    function: Any = kernel
    if not callable(function):
        known = ", ".join(("auto", *REGISTRY))
        raise LongspanError(f"kernel={format_value(kernel)} is neither a name ({known}) nor a callable")
    return FunctionKernel(function)


def returns_lse(kernel: Kernel) -> TypeGuard[BlockKernel]:
    """Whether a kernel computes block by block, with log-sum-exps (`BlockKernel`)."""
    return all(hasattr(kernel, name) for name in ("prepare", "forward", "backward", "accumulate"))


def _auto(need: KernelRequest, table: KernelTable) -> tuple[Kernel, Choice]:
    """The first kernel of the table's row that can compute this; "tiled" if none of them can."""
    row = table.row(Facts.of(need))
    passed_over: list[str] = []
    for name in (*row.kernels, TILED.name):
        found = as_kernel(name)
        why_not = _why_not(found, need)
        if why_not is None:
            return found, Choice(found.name, "; ".join([*passed_over, found.describe(need), f"by {row.said}"]))
        passed_over.append(why_not)
    raise AssertionError(f"{TILED.name} refuses {need}")


def _why_not(kernel: Kernel, need: KernelRequest) -> str | None:
    """Why "auto" passes a kernel over, in a few words; None if it does not."""
    if need.ring > 1 and kernel is not EAGER and not returns_lse(kernel):
        return f"{kernel.name} gives no log-sum-exps, by which a ring adds up blocks"
    if need.lse and not returns_lse(kernel):
        return f"{kernel.name} gives no log-sum-exp, which is saved for the backward"
    if kernel is FLEX and not compiles(need.device):
        return "flex cannot be compiled here: it needs a GPU and Triton"
    try:
        refusal = kernel.refuses(need)
    except LongspanError as error:  # a package that is not installed
        refusal = str(error)
    return None if refusal is None else refusal.split(";")[0].replace(f"kernel={kernel.name!r}", kernel.name)


def table_of(kernel: AnyKernel) -> KernelTable:
    """The table by which a kernel is chosen: the one that was given, or longspan's."""
    return kernel if isinstance(kernel, KernelTable) else DEFAULT


@checked_call()
def kernel_table(path: str | Path) -> KernelTable:
    """A table of one's own of which kernel is taken for what: what `kernel=` takes in the place of "auto".

    Its rows come before longspan's (`longspan/attn/kernels/table.toml`, which says how a row is written).
    `python -m benchmarks.gpu --write-table FILE` measures such rows on a GPU. The file must be the same on all ranks,
    which `longspan.parallelize` compares.

    Args:
        path: of a TOML file.

    Raises:
        LongspanError: for a file that is no such table, with the row and what it may be.
    """
    return read_table(as_path("path", path), (*REGISTRY, *ALIASES))


def refuse_learnt_biases(kernel: str, scores: Scores, device: torch.device) -> None:
    """Refuse a bias that is learnt, with a kernel that gives it no gradient: one that computes block by block.

    Raises:
        LongspanError: with the way out.
    """
    learnt = scores.alibi is not None and scores.alibi.requires_grad
    if scores.bias is not None and not learnt:
        at = torch.zeros(1, dtype=torch.int64, device=device)
        added = scores.bias_of(1, at, at, torch.float32)
        learnt = added is not None and added.requires_grad
    if learnt:
        raise LongspanError(
            f"kernel={kernel!r} gives no gradient to a bias that is learnt; use kernel='eager' (exact, but its memory "
            f"grows with the square of the tokens), or detach the bias"
        )


@functools.cache
def log_choice(choice: Choice) -> None:
    """Log a choice, the first time that it is made in this process."""
    _log.info("attention kernel %s", choice)
