"""Sum the gradients of a module that runs tile by tile inside an autograd Function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def autocast_state(device: torch.device) -> dict[str, Any]:
    """Return the autocast arguments in force: a backward runs outside the autocast of its forward."""
    kind = device.type
    return {"device_type": kind, "dtype": torch.get_autocast_dtype(kind), "enabled": torch.is_autocast_enabled(kind)}


class TileGradients:
    """Gradients of all tokens' hidden states `[T, ...]`, and of the trained parameters, summed over tiles.

    `needs_grad` is of `hidden`, then of each parameter; `dtype` of the hidden states' gradient; `wide` sums in fp32 at
    least.
    """

    def __init__(
        self,
        hidden: Tensor,
        parameters: dict[str, Tensor],
        needs_grad: Sequence[bool],
        *,
        dtype: torch.dtype | None = None,
        wide: bool = True,
    ) -> None:
        hidden_needs_grad, *parameters_need_grad = needs_grad
        self.of_hidden: Tensor | None = None  # the gradient of `hidden`, contiguous; None if it needs none
        if hidden_needs_grad:
            self.of_hidden = torch.empty_like(hidden, dtype=dtype, memory_format=torch.contiguous_format)
        pairs = zip(parameters.items(), parameters_need_grad, strict=True)
        # Compute a tile with these instead of the parameters, hooks on which would take its gradient for the whole one.
        self.stand_ins = {name: p.detach().requires_grad_() for (name, p), needs in pairs if needs}
        self.sums: dict[str, Tensor] = {}
        self._names, self._wide = list(parameters), wide

    @property
    def needed(self) -> bool:
        return self.of_hidden is not None or bool(self.stand_ins)

    def leaf(self, tile: Tensor) -> Tensor:
        """Return the input of a tile, as a leaf of the tile's own graph."""
        return tile.detach().requires_grad_(self.of_hidden is not None)

    def add(self, span: slice, x: Tensor, outs: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        """Add the gradients of the tile `span`, whose `outs` were computed from the leaf `x` and the stand-ins."""
        inputs = [*([] if self.of_hidden is None else [x]), *self.stand_ins.values()]
        found = list(torch.autograd.grad(outs, inputs, grads, allow_unused=True))
        if self.of_hidden is not None:
            into, grad_x = self.of_hidden[span], found.pop(0)
            _ = into.zero_() if grad_x is None else into.copy_(grad_x.reshape(into.shape))
        for name, grad in zip(self.stand_ins, found, strict=True):
            if grad is not None:
                self._add_to_sum(name, grad)

    def _add_to_sum(self, name: str, grad: Tensor) -> None:
        if name in self.sums:
            self.sums[name] += grad
            return
        dtype = torch.promote_types(grad.dtype, torch.float32) if self._wide else grad.dtype
        # The sum is changed in place, but the first gradient may be expanded, or be another parameter's as well:
        # autograd returns one tensor for both inputs of an addition.
        address = grad.untyped_storage().data_ptr()
        shared = any(other.untyped_storage().data_ptr() == address for other in self.sums.values())
        private = grad.dtype == dtype and grad.is_contiguous() and not shared
        self.sums[name] = grad if private else grad.to(dtype, copy=True)

    def of_parameters(self) -> list[Tensor | None]:
        """Return the sum of each parameter's gradients; None if it needs none."""
        for name in self.stand_ins.keys() - self.sums.keys():  # unused by every tile
            self.sums[name] = torch.zeros_like(self.stand_ins[name].detach())
        return [self.sums.get(name) for name in self._names]
