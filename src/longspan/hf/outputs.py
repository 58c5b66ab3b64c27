"""Outputs of a model whose logits were not made: who asks for them is told why, and how to get them."""

from __future__ import annotations

import functools
import sys
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.utils import ModelOutput

from longspan.memory.logits import WAY_OUT, DeferredLogits, Head, LogitsNotMade

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from longspan.comm.mesh import SequenceSharding
    from longspan.core.layout import Layout


def head_of(model: PreTrainedModel) -> Head | None:
    """The model's head, ready to be deferred; None where it has none."""
    module = model.get_output_embeddings()
    return None if module is None else Head(module)


def without_deferred(output: Any) -> Any:
    """A model's output without logits that were not made."""
    if isinstance(output, ModelOutput):
        if not isinstance(output.get("logits"), DeferredLogits):
            return output
        entries = {name: value for name, value in output.items() if name != "logits"}
        kind: Any = type(output)
        return _telling(kind)(**entries)
    if isinstance(output, tuple):
        return tuple(value for value in output if not isinstance(value, DeferredLogits))
    return output


@functools.cache
def _telling(kind: Any) -> Any:
    """The class of such an output: `logits` is None, and says why."""

    def read(_: Any) -> None:
        asking = sys._getframe(1).f_globals.get("__name__", "")
        if asking.partition(".")[0] not in ("torch", "transformers"):  # FSDP looks at all that an output has
            warnings.warn(f"logits is None: {WAY_OUT}", stacklevel=2)

    def item(self: Any, key: Any) -> Any:
        if key == "logits":
            raise LogitsNotMade(f"this output has no logits: {WAY_OUT}")
        try:
            return kind.__getitem__(self, key)
        except IndexError as error:
            raise LogitsNotMade(f"this output has no entry {key}, as it has no logits: {WAY_OUT}") from error

    logits = property(read, lambda self, value: None)
    return type(kind.__name__, (kind,), {"logits": logits, "__getitem__": item, "__module__": kind.__module__})


class Gathered(torch.autograd.Function):
    """All tokens' numbers on every rank; the gradient of mine is what this rank's own loss says of them."""

    @staticmethod
    def forward(ctx: Any, x_BL: Tensor, sp: SequenceSharding, layout: Layout, length: int) -> Tensor:
        placed = sp.with_layout(layout)
        ctx.placed = placed
        return placed.gather(x_BL, dim=1, length=length)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.placed.shard(grads[0].contiguous(), dim=1), None, None, None
