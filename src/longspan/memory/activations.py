"""What an MLP saves between its matrix products, computed again in the backward instead of kept.

Of `down(act(gate(x)) * up(x))` autograd saves four tensors of the intermediate size: what both products gave, the
activation function's result, and what goes into the last product. The last two follow from the first two by elementwise
work alone, so the backward makes them again, by the same operations on the same numbers: bit for bit what they were. It
is what fused SwiGLU kernels do (Liger), and Megatron's selective recomputation of the activation function, for any MLP
that is written in plain PyTorch: autograd itself says what made a tensor that it saves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from longspan.compat.torch_api import ELEMENTWISE, not_compiled, saved_tensors_are_hooked, version_of
from longspan.core.errors import LongspanError

_VIEWS = {"ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0", "UnsqueezeBackward0", "SqueezeBackward1"}
_FEWEST = 1 << 10  # elements of a tensor that is worth it


class RecomputedActivations:
    """An MLP that keeps what its matrices gave, in the place of its `forward`.

    The module runs as it is without gradients, and where hooks on saved tensors are in force already (a layer under
    gradient checkpointing saves nothing anyway).

    Args:
        module: the MLP.

    Attributes:
        on: whether it does.
    """

    def __init__(self, module: nn.Module) -> None:
        self.compute: Callable[..., Any] = module.forward
        self.on = True
        self._recomputing = not_compiled(self._recompute)  # a compiler breaks its graph here
        module.forward = self._forward  # the instance's: hooks around the call stay

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self.on or not torch.is_grad_enabled():
            return self.compute(*args, **kwargs)
        return self._recomputing(*args, **kwargs)

    def _recompute(self, *args: Any, **kwargs: Any) -> Any:
        if saved_tensors_are_hooked():
            return self.compute(*args, **kwargs)
        with torch.autograd.graph.saved_tensors_hooks(_pack, _unpack):
            return self.compute(*args, **kwargs)


class Kept:
    """A saved tensor as it is, and how often it had been written to."""

    def __init__(self, x: Tensor) -> None:
        self.x, self.version = x, version_of(x)

    def get(self) -> Tensor:
        """The tensor.

        Raises:
            LongspanError: it has been written to since: autograd's own check, which hooks replace.
        """
        if version_of(self.x) != self.version:
            raise LongspanError(
                f"a tensor of shape {tuple(self.x.shape)} that the backward needs was changed in place after it "
                f"was saved (version {version_of(self.x)}, saved at {self.version})"
            )
        return self.x


class _Again:
    """A saved tensor that is made again: by what, and its shape."""

    def __init__(self, node: Any, shape: torch.Size) -> None:
        self.node, self.shape = node, shape


def _pack(x: Tensor) -> Kept | _Again:
    node: Any = x.grad_fn
    while node is not None and node.name() in _VIEWS and x.is_contiguous():
        node = node.next_functions[0][0]
    if node is None or x.numel() < _FEWEST or node.name() not in ELEMENTWISE:
        return Kept(x)
    if any(before is None for before, _ in node.next_functions):
        return Kept(x)  # a product saves each factor for the other's gradient alone
    return _Again(node, x.shape)


def _unpack(packed: Kept | _Again) -> Tensor:
    if isinstance(packed, _Again):
        with torch.no_grad():
            return ELEMENTWISE[packed.node.name()](packed.node).reshape(packed.shape)
    return packed.get()
