"""The loss of a head by others' kernels: torch's `linear_cross_entropy` and Liger's, behind the seam of our own tiles.

`longspan.losses.cross_entropy` computes any head with anything done to its output. Where a head is one matrix product
(with a bias or without) and nothing is done to its logits, these compute the same. They are taken by name alone
(`Memory(head_loss=...)`): `benchmarks/head_loss.py` measures them, and on the CPU that it ran on torch's takes longer
than our tiles, and adds up a bf16 loss in bf16.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from longspan.core.errors import LongspanError

if TYPE_CHECKING:
    from longspan.losses.cross_entropy import Terms
    from longspan.losses.deferred_logits import DeferredLogits


SECOND_BACKWARD = (
    "a second backward through a loss without logits is refused: the first one released its gradients; call the model "
    "again, keep the graph in the first backward (retain_graph=True, which needs head_loss='tiled'), or call "
    "longspan.parallelize(..., logits=True)"
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


class HeadLoss(Protocol):
    """Computes a head's loss without its logits."""

    def refuses(self, logits: DeferredLogits, terms: Terms) -> str | None:
        """Why it cannot compute this, None if it can."""

    def __call__(
        self, hidden_TD: Tensor, weight_VD: Tensor, bias: Tensor | None, labels_T: Tensor, terms: Terms
    ) -> Tensor:
        """The sum of the tokens' losses, [], differentiable; -100 is the label of a token without one."""


class TorchHeadLoss:
    """`torch.nn.functional.linear_cross_entropy` by chunks, from torch 2.13 on."""

    def refuses(self, logits: DeferredLogits, terms: Terms) -> str | None:
        """z-loss, and half precision."""
        if not hasattr(F, "linear_cross_entropy"):
            return f"torch {torch.__version__} has no linear_cross_entropy, which came with 2.13"
        if terms.z_loss:
            return "it has no z-loss"
        if logits.hidden.dtype.itemsize < 4:
            return f"it adds up the loss in {logits.hidden.dtype}, which has {_bits(logits.hidden.dtype)} bits"
        return None

    def __call__(
        self, hidden_TD: Tensor, weight_VD: Tensor, bias: Tensor | None, labels_T: Tensor, terms: Terms
    ) -> Tensor:
        """See `HeadLoss`."""
        options: Any = torch.nn.LinearCrossEntropyOptions()
        total: Tensor = F.linear_cross_entropy(
            hidden_TD, weight_VD, labels_T, linear_bias=bias, reduction="sum", ignore_index=-100,
            label_smoothing=terms.label_smoothing, options=options,
        )  # fmt: skip
        return total


class LigerHeadLoss:
    """Liger's fused kernel (arXiv:2410.10989), on a GPU."""

    def refuses(self, logits: DeferredLogits, terms: Terms) -> str | None:
        """Where it is not installed, and on a CPU."""
        if importlib.util.find_spec("liger_kernel") is None:
            return "it is not installed; pip install liger-kernel"
        return "its kernels need a GPU" if logits.device.type == "cpu" else None

    def __call__(
        self, hidden_TD: Tensor, weight_VD: Tensor, bias: Tensor | None, labels_T: Tensor, terms: Terms
    ) -> Tensor:
        """See `HeadLoss`."""
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        loss = LigerFusedLinearCrossEntropyLoss(
            ignore_index=-100, lse_square_scale=terms.z_loss, label_smoothing=terms.label_smoothing, reduction="sum"
        )
        total: Tensor = loss(weight_VD, hidden_TD, labels_T, bias)
        return total


HEAD_LOSSES: dict[str, HeadLoss] = {"torch": TorchHeadLoss(), "liger": LigerHeadLoss()}


def head_loss(name: str, logits: DeferredLogits, labels_T: Tensor, terms: Terms) -> Tensor:
    """The sum of the tokens' losses by the named one, fp64 [].

    Raises:
        LongspanError: where it does not fit, with the reason.
    """
    chosen, module = HEAD_LOSSES[name], logits.head.module
    why = chosen.refuses(logits, terms)
    bare = isinstance(module, torch.nn.Linear) and type(module).forward is torch.nn.Linear.forward
    if why is None and (not bare or logits.steps):
        why = "the head is more than one matrix product, or something is done to its logits (a softcap, a scale)"
    if why is None and torch.is_autocast_enabled(logits.device.type):
        why = "autocast is on, which it does not follow"
    if why is not None:
        raise LongspanError(f"head_loss={name!r} cannot compute the loss of this model: {why}; use head_loss='tiled'")
    assert isinstance(module, torch.nn.Linear)
    hidden_TD = logits.hidden.reshape(-1, logits.hidden.shape[-1])
    found: Tensor = _Once.apply(chosen(hidden_TD, module.weight, module.bias, labels_T, terms))  # type: ignore[no-untyped-call]
    return found


def _bits(dtype: torch.dtype) -> int:
    return round(1 - torch.tensor(torch.finfo(dtype).eps).log2().item())
