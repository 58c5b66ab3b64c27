"""Logits that are not made: what a language-model head would be given, and what becomes of its output.

The logits of a long sequence are the largest tensor of a training step: tokens x vocabulary. A loss needs them one tile
of tokens at a time. So in training the head returns a stand-in, `DeferredLogits`; what a model does to its logits on
their way to the loss (a scale, a softcap, a cast) is written down, and done to each tile.

Shape suffixes: T tokens (any leading dimensions), D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from longspan.comm.sharded_weights import as_local, seeing_local, trained_parameters
from longspan.compat.torch_api import not_compiled, register_tree
from longspan.core.errors import LongspanError
from longspan.losses.vocab_parallel import Vocabulary

WAY_OUT = "they are not made in training with labels; get them by longspan.parallelize(..., logits=True)"


class LogitsNotMade(LongspanError, AttributeError, KeyError, IndexError):
    """Logits were requested that were not made. With these base classes `hasattr`, `get` and `iter` still work."""

    __str__ = LongspanError.__str__


@dataclass(eq=False)
class DeferredLogits:
    """Stands for logits: the head, its input, and what is done to its output.

    Attributes:
        head: the module.
        hidden: its input, `[..., D]`.
        steps: what is done to its output, element by element (the last dimension may be cut), in order.
    """

    head: Head
    hidden: Tensor
    steps: tuple[Callable[[Tensor], Tensor], ...] = ()

    def of(self, hidden: Tensor, parameters: dict[str, Tensor] | None = None) -> Tensor:
        """The logits of some tokens `[T, D]`: `[T, V]`, differentiable.

        Args:
            hidden: the head's input.
            parameters: what stands in for the head's own, by the names of `Head.trained`.
        """
        logits = self.head.compute(hidden) if parameters is None else self.head.compute_with(hidden, parameters)
        for step in self.steps:
            logits = step(logits)
        return self.head.observed(logits)

    @property
    def plain(self) -> nn.Linear | None:
        """The head where it is a matrix product and nothing else is done: gradients need no autograd."""
        module = self.head.module
        bare = (
            type(module).forward is nn.Linear.forward
            and not self.steps
            and not torch.is_autocast_enabled(self.device.type)
        )
        return module if bare and isinstance(module, nn.Linear) and module.bias is None else None

    @property
    def shape(self) -> torch.Size:
        """Of the logits."""
        with torch.no_grad():
            width = self.of(self.hidden.detach().reshape(-1, self.hidden.shape[-1])[:0]).shape[-1]
        return torch.Size((*self.hidden.shape[:-1], width))

    @property
    def widest(self) -> int:
        """Entries of a token's logits on the rank that has most of them."""
        return self.shape[-1] if self.head.vocabulary is None else self.head.vocabulary.widest

    @property
    def dtype(self) -> torch.dtype:
        """Of the logits."""
        with torch.no_grad():
            return self.of(self.hidden.detach().reshape(-1, self.hidden.shape[-1])[:0]).dtype

    @property
    def device(self) -> torch.device:
        """Of the logits."""
        return self.hidden.device

    @property
    def requires_grad(self) -> bool:
        """Whether gradients reach them."""
        return torch.is_grad_enabled() and (self.hidden.requires_grad or bool(self.head.trained()))

    # What models do to their logits. Anything else is refused.

    def then(self, step: Callable[[Tensor], Tensor]) -> DeferredLogits:
        """The same with one more step."""
        return DeferredLogits(self.head, self.hidden, (*self.steps, step))

    def __mul__(self, factor: float) -> DeferredLogits:
        number = _number(factor)
        return self.then(lambda logits: logits * number)

    __rmul__ = __mul__

    def __truediv__(self, divisor: float) -> DeferredLogits:
        number = _number(divisor)
        return self.then(lambda logits: logits / number)

    def contiguous(self) -> DeferredLogits:
        return self

    def float(self) -> DeferredLogits:
        return self.then(torch.Tensor.float)

    def to(self, *args: Any, **kwargs: Any) -> DeferredLogits:
        return self.then(lambda logits: logits.to(*args, **kwargs))

    def tanh(self) -> DeferredLogits:
        return self.then(torch.tanh)

    def __getitem__(self, index: Any) -> DeferredLogits:
        """A cut of the vocabulary; all tokens."""
        at = index if isinstance(index, tuple) and self.head.vocabulary is None else (index,)
        whole = [at[0] is Ellipsis] if len(at) == 2 else [part == slice(None) for part in at[:-1]]
        if len(at) in (2, self.hidden.dim()) and all(whole) and isinstance(at[-1], slice):
            return self.then(lambda logits: logits[..., at[-1]])
        raise LogitsNotMade(f"something looks at logits[{index!r}], and {WAY_OUT}")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        known: dict[Any, Any] = {torch.tanh: cls.tanh, torch.mul: cls.__mul__, torch.div: cls.__truediv__}
        method = known.get(func)
        if method is None or kwargs or not isinstance(args[0], cls):
            raise LogitsNotMade(f"something calls {getattr(func, '__name__', func)} on logits, and {WAY_OUT}")
        return method(*args)

    def __getattr__(self, name: str) -> Any:
        raise LogitsNotMade(f"something asks for logits.{name}, and {WAY_OUT}")


def _number(value: Any) -> Any:
    if isinstance(value, Tensor) and (value.requires_grad or value.dim()):
        raise LogitsNotMade(f"something multiplies logits by a tensor of shape {tuple(value.shape)}, and {WAY_OUT}")
    return value


# FSDP looks for tensors in what a module returns, to gather its weights again when a backward comes to it: from torch
# 2.13 on in dataclasses, before in what is registered.
register_tree(
    DeferredLogits,
    lambda deferred: ([deferred.hidden], (deferred.head, deferred.steps)),
    lambda leaves, rest: DeferredLogits(rest[0], leaves[0], rest[1]),
)


class Bare(nn.Module):
    """A module without the hooks around its call."""

    def __init__(self, module: nn.Module, forward: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.module, self.plain_forward = module, forward

    def forward(self, hidden: Tensor) -> Tensor:
        return self.plain_forward(hidden)


class _Identity(torch.autograd.Function):
    """The same values, not a view of them: FSDP puts a hook on what a module returns, which a view could lose."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


class Head:
    """A language-model head whose next output may be deferred.

    Args:
        module: what `get_output_embeddings` gives: any module, called with hidden states alone.

    Attributes:
        defer_next: whether to return `DeferredLogits` at the next call.
        observer: is shown each tile of logits that is made, if there is one.
        loss: what computes the loss: "tiled", or a name of `longspan.losses.fused_heads`.
        gather: gathers its weights, where they are sharded.
        vocabulary: this rank's part, where a tensor group shares it: the head gives the logits of that part.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.compute: Callable[..., Tensor] = seeing_local(module, module.forward)
        self.bare = Bare(module, self.compute)
        self.defer_next = False
        self.observer: Callable[[Tensor], None] | None = None
        self.loss = "tiled"
        self.vocabulary: Vocabulary | None = None
        self.gather: Callable[[], None] | None = None
        # The instance's: hooks around the call, FSDP's among them, stay. A compiler breaks its graph here.
        module.forward = not_compiled(self._forward)

    def trained(self) -> dict[str, Tensor]:
        """Parameters that gradients are asked for, by name, as they are now: gathered, under FSDP."""
        return trained_parameters(self.bare)

    @property
    def weight(self) -> Tensor:
        """The matrix of a head that is a linear layer, as the module sees it."""
        with as_local(self.module):
            return self.module.weight.detach()  # type: ignore[operator]

    def regather(self) -> None:
        """Before a backward computes with it again: another forward may have given its weights back meanwhile."""
        if self.gather is not None and any(isinstance(p, DTensor) for p in self.module.parameters()):
            self.gather()

    def observed(self, logits: Tensor) -> Tensor:
        """The same, shown to the observer."""
        if self.observer is not None and len(logits):
            self.observer(logits.detach())
        return logits

    def compute_with(self, hidden: Tensor, parameters: dict[str, Tensor]) -> Tensor:
        """`compute` with other tensors for some parameters."""
        logits: Tensor = torch.func.functional_call(self.bare, parameters, (hidden,))
        return logits

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        defer, self.defer_next = self.defer_next, False
        if defer and len(args) == 1 and not kwargs:
            return DeferredLogits(self, _Identity.apply(args[0]))  # type: ignore[no-untyped-call]
        return self.compute(*args, **kwargs)
