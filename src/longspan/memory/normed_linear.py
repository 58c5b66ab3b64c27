"""Linear layers that do not save the output of a norm, but recompute it from the norm's input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from longspan.compat.torch_api import not_compiled
from longspan.memory.activations import SavedTensor
from longspan.memory.tiles import InputSource


class NormedLinear:
    """Replaces the `forward` of a linear layer whose input may be the output of a tiled norm.

    Attributes:
        on: whether the input is recomputed; else the module runs unchanged.
    """

    def __init__(self, module: nn.Linear) -> None:
        self.compute: Callable[..., Any] = module.forward
        self.on = True
        self._normed = not_compiled(self._without_input)  # a compiler breaks its graph here
        module.forward = self._forward  # type: ignore[method-assign]

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._normed(*args, **kwargs) if self.on else self.compute(*args, **kwargs)

    def _without_input(self, *args: Any, **kwargs: Any) -> Any:
        source = None if kwargs or len(args) != 1 else _source_of(args[0])
        if source is None:
            return self.compute(*args, **kwargs)
        # The hook outlives this call: do not let it hold the tensor.
        normed = args[0].untyped_storage().data_ptr(), args[0].numel()

        def pack(x: Tensor) -> Any:
            return (source, x.shape) if (x.untyped_storage().data_ptr(), x.numel()) == normed else SavedTensor(x)

        with torch.autograd.graph.saved_tensors_hooks(pack, _unpack):
            return self.compute(*args)


def _source_of(x: Any) -> InputSource | None:
    if not (isinstance(x, Tensor) and torch.is_grad_enabled()) or torch.is_autocast_enabled(x.device.type):
        return None  # autocast saves a copy of its own
    return InputSource.of(x)


def _unpack(packed: Any) -> Tensor:
    if isinstance(packed, SavedTensor):
        return packed.get()
    source, shape = packed
    return source.full_output().view(shape)  # type: ignore[no-any-return]
