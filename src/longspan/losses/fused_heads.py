"""The loss of a head by fused kernels: torch's `linear_cross_entropy` and Liger's.

`longspan.losses.cross_entropy` supports any head and any step after it. These support a head that is one matrix product
(with or without a bias) and nothing after it. They run only if requested (`Memory(head_loss=...)`):
`benchmarks/head_loss.py` compares them; on its CPU torch's is slower than our tiles, and sums a bf16 loss in bf16.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from longspan.core.errors import LongspanError

if TYPE_CHECKING:
    from longspan.losses.cross_entropy import LossTerms
    from longspan.losses.deferred_logits import DeferredLogits


SECOND_BACKWARD = (
    "a second backward through a loss without logits: the first one freed its gradients; call the model again, pass "
    "retain_graph=True to the first backward (needs head_loss='tiled'), or call longspan.parallelize(..., logits=True)"
)


class _Once(torch.autograd.Function):
    """Raise on a second backward: a fused kernel overwrites its saved tensors in the first."""

    @staticmethod
    def forward(ctx: Any, total: Tensor) -> Tensor:
        ctx.done = False
        return total.double()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        if ctx.done:
            raise LongspanError(SECOND_BACKWARD)
        ctx.done = True
        return grads[0]


def _torch_refuses(logits: DeferredLogits, terms: LossTerms) -> str | None:
    if not hasattr(F, "linear_cross_entropy"):
        return f"torch {torch.__version__} has no linear_cross_entropy; it needs torch 2.13"
    if terms.z_loss:
        return "it has no z-loss"
    if logits.hidden.dtype.itemsize < 4:
        return f"it sums the loss in {logits.hidden.dtype} instead of fp32"
    return None


def _torch_loss(
    hidden_TD: Tensor, weight_VD: Tensor, bias: Tensor | None, labels_T: Tensor, terms: LossTerms
) -> Tensor:
    """`torch.nn.functional.linear_cross_entropy` in chunks, from torch 2.13 on."""
    options: Any = torch.nn.LinearCrossEntropyOptions()
    total: Tensor = F.linear_cross_entropy(
        hidden_TD, weight_VD, labels_T, linear_bias=bias, reduction="sum", ignore_index=-100,
        label_smoothing=terms.label_smoothing, options=options,
    )  # fmt: skip
    return total


def _liger_refuses(logits: DeferredLogits, terms: LossTerms) -> str | None:
    if importlib.util.find_spec("liger_kernel") is None:
        return "it is not installed; pip install liger-kernel"
    return "its kernels need a GPU" if logits.device.type == "cpu" else None


def _liger_loss(
    hidden_TD: Tensor, weight_VD: Tensor, bias: Tensor | None, labels_T: Tensor, terms: LossTerms
) -> Tensor:
    """Liger's fused kernel (arXiv:2410.10989), on a GPU."""
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    loss = LigerFusedLinearCrossEntropyLoss(
        ignore_index=-100, lse_square_scale=terms.z_loss, label_smoothing=terms.label_smoothing, reduction="sum"
    )
    total: Tensor = loss(weight_VD, hidden_TD, labels_T, bias)
    return total


_HEAD_LOSSES: dict[str, tuple[Callable[..., str | None], Callable[..., Tensor]]] = {
    "torch": (_torch_refuses, _torch_loss),
    "liger": (_liger_refuses, _liger_loss),
}
"""By name: why a kernel cannot compute a loss (or None), and the differentiable sum of the tokens' losses, []."""


def head_loss(name: str, logits: DeferredLogits, labels_T: Tensor, terms: LossTerms) -> Tensor:
    """Return the sum of the tokens' losses by the named kernel, fp64 [].

    Raises:
        LongspanError: the kernel does not support the loss, the head or autocast; the message says why.
    """
    (refuses, compute), module = _HEAD_LOSSES[name], logits.head.module
    reason = refuses(logits, terms)
    linear = isinstance(module, torch.nn.Linear) and type(module).forward is torch.nn.Linear.forward
    if reason is None and (not linear or logits.steps):
        reason = "the head is more than one matrix product, or the model changes its logits (a softcap, a scale)"
    if reason is None and torch.is_autocast_enabled(logits.device.type):
        reason = "autocast is on, which it ignores"
    if reason is not None:
        raise LongspanError(f"head_loss={name!r} cannot compute this loss: {reason}; use head_loss='tiled'")
    assert isinstance(module, torch.nn.Linear)
    hidden_TD = logits.hidden.reshape(-1, logits.hidden.shape[-1])
    total: Tensor = _Once.apply(compute(hidden_TD, module.weight, module.bias, labels_T, terms))  # type: ignore[no-untyped-call]
    return total
