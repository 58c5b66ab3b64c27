"""Choose the kernel that "auto" runs on this device: the first of its row that computes here what fp32 computes.

Kernels with `self_check` come from a GPU's libraries or from other packages. Before its first use in a process, such a
kernel computes a few hundred tokens, forward and backward, next to the formula in fp32. If they differ, it warns once,
and the next kernel of the row is used.

All ranks must run the same kernel, although one may lack a package, or have a GPU that fails. So when an attention of a
kind is first prepared, each rank tells the others which kernels of the table it cannot run, and no rank runs these
(`_agree`). This is a collective. It hangs on no rank, because whether it happens follows from the table and from the
request, which are the same on every rank, and never from a rank's own checks. Later preparations read the result.
"""

from __future__ import annotations

import functools
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from longspan.attn.kernels.base import (
    BackwardInputs,
    BlockKernel,
    Blocks,
    Kernel,
    KernelRequest,
    refusal,
    without_autocast,
)
from longspan.attn.kernels.choice import (
    AnyKernel,
    Choice,
    as_kernel,
    choose_kernel,
    table_of,
)
from longspan.attn.kernels.table import KernelTable, what_of
from longspan.attn.kernels.tiled import TILED, TileScores, attend_materialized, attend_materialized_backward
from longspan.attn.mask import Mask
from longspan.attn.methods.ring import Ring
from longspan.attn.score import Scores
from longspan.comm.consistency import gather_numbers
from longspan.compat.torch_api import not_compiled
from longspan.compat.torch_attention import active_flash, restore_flash
from longspan.core.routes import ring_routes

if TYPE_CHECKING:
    from longspan.comm.mesh import SequenceSharding

_TOKENS = 320
_MASKS = (
    Mask(),
    Mask(causal=False),
    Mask(window=100, segments=(((0, 190), (190, _TOKENS)),) * 2),
)
"""A kernel computes those that it does not refuse."""

_ALLOWED = 8.0
"""Largest error of a row, in rounding errors of the dtype (or `_LEAST_EPS`: fp32 sums round too). "tiled" has 2."""

_LEAST_EPS = 1e-5


def choose_checked(
    kernel: AnyKernel, request: KernelRequest, sp: SequenceSharding, *, run: bool = True
) -> tuple[Kernel, Choice]:
    """Return `choose_kernel` among the kernels that work on every rank of the sequence group.

    Args:
        kernel: as for `longspan.attention`. One that is requested by name is not checked.
        request: the same on every rank.
        sp: the sharding, which keeps what the ranks agreed on.
        run: whether checks may run, and ranks communicate; otherwise only earlier results count.
    """
    table = table_of(kernel)
    if table is None or not _has_checks(table, request.device):
        return choose_kernel(kernel, request)
    traced = torch.compiler.is_compiling() and not request.lse and request.ring == 1
    if traced or not run:  # a compiler must not trace a check; it passes these kernels over
        return choose_kernel(table, replace(request, failed=sp.failed_kernels.get(_kind(table, request), frozenset())))
    return _choose_working(table, request, sp)


def _has_checks(table: KernelTable, device: torch.device) -> bool:
    """Whether the table has kernels to check for this type of device."""
    rows = (row for row in table.rows if row.device in (None, device.type))
    return any(getattr(as_kernel(name), "self_check", False) for row in rows for name in row.kernels)


def _kind(table: KernelTable, request: KernelRequest) -> Any:
    """Return what the choice depends on, apart from this rank's device and packages."""
    scores, options = request.scores.kind, request.options
    uses = request.grad, request.ring > 1, request.lse
    return table.name, what_of(request), options, scores, request.dtype, request.head_dims, uses


@not_compiled
def _choose_working(table: KernelTable, request: KernelRequest, sp: SequenceSharding) -> tuple[Kernel, Choice]:
    kind = _kind(table, request)
    if kind not in sp.failed_kernels:
        sp.failed_kernels[kind] = _agree(table, request, sp)
    return choose_kernel(table, replace(request, failed=sp.failed_kernels[kind]))


def _agree(table: KernelTable, request: KernelRequest, sp: SequenceSharding) -> frozenset[str]:
    """Return the kernels that some rank cannot run, or would not choose. Collective.

    Each rank gathers from all others which kernels stand before its choice, or not in its row (GPUs may differ), and
    then chooses without all of these, until nothing changes.
    """
    failed, active = frozenset[str](), active_flash()
    names = sorted({TILED.name, *(name for row in table.rows for name in row.kernels)})
    order = (*table.row(request).kernels, TILED.name)
    while True:
        chosen = _first_that_works(table, replace(request, failed=failed))
        able = order[order.index(chosen) :]
        mine = [int(name in failed or name not in able) for name in names]
        rows = [mine] if sp.group is None else gather_numbers(mine, sp.group, sp.device)
        failed = frozenset(name for name, unable in zip(names, zip(*rows, strict=True), strict=True) if any(unable))
        if all(row == rows[0] for row in rows):
            restore_flash(active)  # a kernel activates its implementation when it prepares
            return failed


def _first_that_works(table: KernelTable, request: KernelRequest) -> str:
    while True:
        chosen, choice = choose_kernel(table, request)
        checked: Any = chosen  # hashable by identity
        if not getattr(chosen, "self_check", False) or _passes(
            checked, request.device, request.dtype, request.head_dims
        ):
            return choice.name
        request = replace(request, failed=request.failed | {choice.name})


# ---------------------------------------------------------------------------------------------------------------------
# The check.


@functools.cache
def _passes(kernel: Any, device: torch.device, dtype: torch.dtype, head_dims: tuple[int, int]) -> bool:
    """Return whether a kernel computes on this device what fp32 does; warn if not. Once per process; the host waits."""
    try:
        errors = []
        for mask in _MASKS:
            request = KernelRequest(mask, Scores(), device, grad=True, dtype=dtype, head_dims=head_dims, lse=True)
            if refusal(kernel, request) is None:
                errors.append(float(_error(kernel, request)))
        if all(error <= _ALLOWED for error in errors):  # NaN is not
            return True
        problem = f"it differs from fp32 by {max(errors):.3g} rounding errors of a row ({_ALLOWED:g} are allowed)"
    except Exception as error:  # whatever a library raises here, it would raise in training
        problem = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    warnings.warn(
        f"attention kernel {kernel.name!r} fails its check on {device} for {str(dtype).removeprefix('torch.')} with "
        f"head_dim {head_dims[0]}: {problem}; the next kernel of the table is used",
        stacklevel=2,
    )
    return False


def _error(kernel: BlockKernel, request: KernelRequest) -> Tensor:
    """Return the largest error of output, log-sum-exp and gradients of any row, in rounding errors of the dtype."""
    mask, device, dtype, (D, V) = request.mask, request.device, request.dtype, request.head_dims
    B, H, K, span = 2, 4, 2, (0, _TOKENS)
    blocks = Blocks(
        mask, Scores().kind, B, H, 0, (_TOKENS, _TOKENS), (span,), (span,), (0,), device, 0, dtype, (D, V)
    )  # fmt: skip
    draw = torch.Generator().manual_seed(0)
    q, k, v, grad = (
        torch.randn(B, _TOKENS, heads, dim, generator=draw, device="cpu").to(device, dtype).transpose(1, 2)
        for heads, dim in ((H, D), (K, D), (K, V), (H, V))
    )
    ring = Ring(None, ring_routes([[0]]), kernel, tuple(kernel.prepare(blocks)))
    with torch.no_grad(), without_autocast(device):
        out, lse = ring.forward(q, k, v, Scores())
        found = out, lse[..., None], *ring.backward(q, k, v, (out, lse, grad), Scores())[:3]
        i = torch.arange(_TOKENS, device=device)
        bias = torch.zeros((), device=device).masked_fill(~mask.dense(B, 1, i, i), -torch.inf)
        how = TileScores("masked", bias, Scores().scale_of(D), None)
        true_out, true_lse = attend_materialized(q, k, v, how)
        inputs = BackwardInputs(q, true_out, grad, true_lse)
        truth = true_out, true_lse[..., None], *attend_materialized_backward(inputs, k, v, how)
        worst: Tensor = torch.stack([_of_rows(a, b) for a, b in zip(found, truth, strict=True)]).max()
    return worst / max(torch.finfo(dtype).eps, _LEAST_EPS)


def _of_rows(found: Tensor, truth: Tensor) -> Tensor:
    """Return the largest error of a row, in units of its norm and the mean norm."""
    size, error = (torch.linalg.vector_norm(x, dim=-1) for x in (truth, found.to(truth.dtype) - truth))
    largest: Tensor = (error / (size + size.mean())).max()
    return largest
