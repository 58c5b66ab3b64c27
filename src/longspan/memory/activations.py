"""Recompute an MLP's activation function in the backward instead of saving its result.

For `down(act(gate(x)) * up(x))` autograd saves four tensors of the intermediate size: the outputs of both matmuls, the
activation function's result, and the input of the last matmul. The last two follow from the first two by elementwise
operations, so the backward recomputes them, by the same operations on the same numbers: bit for bit. Fused SwiGLU
kernels (Liger) and Megatron's selective recomputation do the same; this works for any MLP written in plain PyTorch,
because autograd knows which operation made a saved tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from longspan.compat.torch_api import ELEMENTWISE, not_compiled, saved_tensors_are_hooked, version_of
from longspan.core.errors import LongspanError

_VIEWS = {"ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0", "UnsqueezeBackward0", "SqueezeBackward1"}
_FEWEST = 1 << 10  # elements of a tensor worth recomputing


class RecomputedActivations:
    """Replaces the `forward` of an MLP by one that saves only the outputs of its matmuls.

    The module runs unchanged without gradients, and under other hooks on saved tensors: a checkpointed layer saves
    nothing of it anyway.

    Attributes:
        on: whether activations are recomputed.
    """

    def __init__(self, module: nn.Module) -> None:
        self.compute: Callable[..., Any] = module.forward
        self.on = True
        self._recomputing = not_compiled(self._recompute)  # a compiler breaks its graph here
        module.forward = self._forward  # on the instance, so that hooks around `__call__` still run

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self.on or not torch.is_grad_enabled():
            return self.compute(*args, **kwargs)
        return self._recomputing(*args, **kwargs)

    def _recompute(self, *args: Any, **kwargs: Any) -> Any:
        if saved_tensors_are_hooked():
            return self.compute(*args, **kwargs)
        with torch.autograd.graph.saved_tensors_hooks(_pack, _unpack):
            return self.compute(*args, **kwargs)


class SavedTensor:
    """A saved tensor and its version counter; hooks replace autograd's own check of it."""

    def __init__(self, x: Tensor) -> None:
        self.x, self.version = x, version_of(x)

    def get(self) -> Tensor:
        """Return the tensor.

        Raises:
            LongspanError: it was written to after it was saved.
        """
        if version_of(self.x) != self.version:
            raise LongspanError(
                f"a tensor of shape {tuple(self.x.shape)} that the backward needs was changed in place after it "
                f"was saved (version {version_of(self.x)}, saved at {self.version})"
            )
        return self.x


class _Recomputed:
    """Stands for a saved tensor: the autograd node that recomputes it, and its shape."""

    def __init__(self, node: Any, shape: torch.Size) -> None:
        self.node, self.shape = node, shape


def _pack(x: Tensor) -> SavedTensor | _Recomputed:
    node: Any = x.grad_fn
    if node is None or x.numel() < _FEWEST:
        return SavedTensor(x)
    while node is not None and (name := node.name()) in _VIEWS and x.is_contiguous():
        node = node.next_functions[0][0]
    if node is None or name not in ELEMENTWISE:
        return SavedTensor(x)
    if any(before is None for before, _ in node.next_functions):
        return SavedTensor(x)  # a product saves each factor only for the other's gradient
    return _Recomputed(node, x.shape)


def _unpack(packed: SavedTensor | _Recomputed) -> Tensor:
    if isinstance(packed, _Recomputed):
        with torch.no_grad():
            return ELEMENTWISE[packed.node.name()](packed.node).reshape(packed.shape)
    return packed.get()
