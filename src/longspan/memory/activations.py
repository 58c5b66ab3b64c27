"""MLPs and linear layers that recompute what autograd would save: activation functions, and the outputs of norms."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from longspan.compat.torch_api import ELEMENTWISE, not_compiled, saved_tensors_are_hooked, version_of
from longspan.core.errors import LongspanError
from longspan.memory.tiles import InputSource, Uncomputed

_VIEWS = {"ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0", "UnsqueezeBackward0", "SqueezeBackward1"}
_FEWEST = 1 << 13  # elements of an MLP's input: recomputing less costs the host more than the memory is worth


class RecomputedActivations:
    """Replaces the `forward` of an MLP by one that saves only the outputs of its matmuls, if it is `on`.

    The module runs unchanged without gradients, and under other hooks on saved tensors: a checkpointed layer saves
    nothing of it anyway.
    """

    def __init__(self, module: nn.Module) -> None:
        self.compute: Callable[..., Any] = module.forward
        self.on = True
        self._recomputing = not_compiled(self._recompute)  # a compiler breaks its graph here
        module.forward = self._forward  # on the instance, so that hooks around `__call__` still run

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self.on or not torch.is_grad_enabled() or (args and args[0].numel() < _FEWEST):
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
        """Return the tensor; raise if it was written to after it was saved."""
        if version_of(self.x) != self.version:
            raise LongspanError(
                f"a tensor of shape {tuple(self.x.shape)} that the backward needs was changed in place after it "
                f"was saved (version {version_of(self.x)}, saved at {self.version})"
            )
        return self.x


def _pack(x: Tensor) -> Callable[[], Tensor]:
    node: Any = x.grad_fn
    if node is None:
        return SavedTensor(x).get
    while node is not None and (name := node.name()) in _VIEWS and x.is_contiguous():
        node = node.next_functions[0][0]
    if node is None or name not in ELEMENTWISE:
        return SavedTensor(x).get
    if any(before is None for before, _ in node.next_functions):
        return SavedTensor(x).get  # a product saves each factor only for the other's gradient
    return functools.partial(_recompute, node, x.shape)


def _recompute(node: Any, shape: torch.Size) -> Tensor:
    with torch.no_grad():
        return ELEMENTWISE[node.name()](node).reshape(shape)


def _unpack(get: Callable[[], Tensor]) -> Tensor:
    return get()


class NormedLinear:
    """Replaces the `forward` of a linear layer whose input may be a tiled norm's output: if `on`, it is recomputed."""

    def __init__(self, module: nn.Linear) -> None:
        self.compute: Callable[..., Any] = module.forward
        self.on = True
        self._normed = not_compiled(self._without_input)  # a compiler breaks its graph here
        module.forward = self._forward  # type: ignore[method-assign]

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._normed(*args, **kwargs) if self.on else self.compute(*args, **kwargs)

    def _without_input(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and type(args[0]) is Uncomputed:  # a norm's output, read outside slices of heads
            args = (args[0].whole(),)
        source = None if kwargs or len(args) != 1 else _source_of(args[0])
        if source is None:
            return self.compute(*args, **kwargs)
        # The hook outlives this call: do not let it hold the tensor.
        normed = args[0].untyped_storage().data_ptr(), args[0].numel()

        def pack(x: Tensor) -> Callable[[], Tensor]:
            if (x.untyped_storage().data_ptr(), x.numel()) != normed:
                return SavedTensor(x).get
            shape = x.shape
            return lambda: source.full_output().view(shape)

        with torch.autograd.graph.saved_tensors_hooks(pack, _unpack):
            return self.compute(*args)


def _source_of(x: Any) -> InputSource | None:
    if not (isinstance(x, Tensor) and torch.is_grad_enabled()) or torch.is_autocast_enabled(x.device.type):
        return None  # autocast saves a copy of its own
    return InputSource.of(x)
