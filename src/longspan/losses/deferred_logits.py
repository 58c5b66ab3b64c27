"""Deferred logits: a stand-in for the output of a language-model head, computed tile by tile by whoever needs it.

The logits of a long sequence are the largest tensor of a training step: tokens x vocabulary. A loss needs them for one
tile of tokens at a time. So in training the head returns `DeferredLogits`, which records what the model does to its
logits on their way to the loss (a scale, a softcap, a cast) and applies it to each tile. A tensor group shards the
vocabulary (`VocabShard`): its ranks reduce three numbers per token (Megatron-LM, arXiv:1909.08053, section 3).

Shape suffixes: T tokens (any leading dimensions), D hidden size, V vocabulary, or this rank's shard of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from longspan.comm.tensor import BareModule, TensorGroup, as_local
from longspan.compat.torch_api import not_compiled, register_tree
from longspan.core.errors import LongspanError
from longspan.core.tile_sizes import even_span

LOGITS_HINT = "training with labels does not compute them; call longspan.parallelize(..., logits=True)"


class LogitsNotComputed(LongspanError, AttributeError):
    """Logits were requested that were not computed. An `AttributeError`, so that `hasattr` still works."""


@dataclass(eq=False)
class DeferredLogits:
    """Stands for logits `[..., V]`."""

    head: Head  # computes them
    hidden: Tensor  # its input, `[..., D]`
    steps: tuple[Callable[[Tensor], Tensor], ...] = ()  # in order; elementwise, or a slice of the last dim

    def compute(self, hidden_TD: Tensor, parameters: dict[str, Tensor] | None = None) -> Tensor:
        """Return the logits of some tokens, `[T, V]`; differentiable. `parameters`, by the names of
        `head.bare.trained`, replace the head's own.
        """
        logits: Tensor = self.head.bare.compute(hidden_TD, parameters or {})
        for step in self.steps:
            logits = step(logits)
        return self.head.observe(logits)

    @property
    def is_matmul(self) -> bool:
        """Whether the logits are one matrix product, whose gradients need no autograd."""
        module = self.head.module
        return (
            type(module).forward is nn.Linear.forward
            and getattr(module, "bias", None) is None
            and not self.steps
            and not torch.is_autocast_enabled(self.device.type)
        )

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.hidden.shape[:-1], self._empty().shape[-1]))

    @property
    def widest(self) -> int:
        """Vocabulary entries of a token on the rank that has most of them."""
        return self.shape[-1] if self.head.vocab_shard is None else self.head.vocab_shard.widest

    @property
    def dtype(self) -> torch.dtype:
        return self._empty().dtype

    @property
    def device(self) -> torch.device:
        return self.hidden.device

    @property
    def requires_grad(self) -> bool:
        return torch.is_grad_enabled() and (self.hidden.requires_grad or bool(self.head.bare.trained_names()))

    def _empty(self) -> Tensor:
        """Return the logits of no tokens."""
        with torch.no_grad():
            return self.compute(self.hidden.detach().reshape(-1, self.hidden.shape[-1])[:0])

    # What models do to their logits. Anything else raises.

    def then(self, step: Callable[[Tensor], Tensor]) -> DeferredLogits:
        """Return the same logits with one more step."""
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
        """Slice the vocabulary of all tokens."""
        at = index if isinstance(index, tuple) and self.head.vocab_shard is None else (index,)
        whole = [at[0] is Ellipsis] if len(at) == 2 else [part == slice(None) for part in at[:-1]]
        if len(at) in (2, self.hidden.dim()) and all(whole) and isinstance(at[-1], slice):
            return self.then(lambda logits: logits[..., at[-1]])
        raise LogitsNotComputed(f"something reads logits[{index!r}], but {LOGITS_HINT}")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        known: dict[Any, Any] = {torch.tanh: cls.tanh, torch.mul: cls.__mul__, torch.div: cls.__truediv__}
        method = known.get(func)
        if method is None or kwargs or not isinstance(args[0], cls):
            raise LogitsNotComputed(f"something calls {getattr(func, '__name__', func)} on logits, but {LOGITS_HINT}")
        return method(*args)

    def __getattr__(self, name: str) -> Any:
        raise LogitsNotComputed(f"something reads logits.{name}, but {LOGITS_HINT}")


def _number(value: Any) -> Any:
    if isinstance(value, Tensor) and (value.requires_grad or value.dim()):
        raise LogitsNotComputed(
            f"something multiplies logits by a tensor of shape {tuple(value.shape)}, but {LOGITS_HINT}"
        )
    return value


# FSDP searches a module's output for tensors, to gather the weights again when the backward reaches it: in dataclasses
# from torch 2.13 on, before in registered types.
register_tree(
    DeferredLogits,
    lambda deferred: ([deferred.hidden], (deferred.head, deferred.steps)),
    lambda leaves, rest: DeferredLogits(rest[0], leaves[0], rest[1]),
)


class _Identity(torch.autograd.Function):
    """Return the same values in a tensor that autograd knows as no view: FSDP's hook on an output could be lost."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


class Head:
    """A language-model head whose next output may be deferred. Replaces the module's `forward`.

    The module is what `get_output_embeddings` returns: any that is called with hidden states alone.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.bare = BareModule(module)
        # Defer the output of the next call: set by a stage of the forward, `DeferLogits` (hf/forward/logits.py), in
        # training with labels, unless logits=True was asked for.
        self.defer_next = False
        self.observer: Callable[[Tensor], None] | None = None  # called with each tile of logits
        self.vocab_shard: VocabShard | None = None  # mine, if a tensor group shards the vocabulary
        self.gather: Callable[[], None] | None = None  # set by `parallelize` for weights that FSDP shards
        # Set on the instance, so that hooks around `__call__`, FSDP's too, still run. A compiler breaks its graph here.
        module.forward = not_compiled(self._forward)

    @property
    def weight(self) -> Tensor:
        """The matrix of a linear head, as the module sees it."""
        with as_local(self.module):
            return self.module.weight.detach()  # type: ignore[operator]

    def regather(self) -> None:
        """Gather the weights before a backward recomputes logits: another forward may have freed them meanwhile."""
        if self.gather is not None and any(isinstance(p, DTensor) for p in self.module.parameters()):
            self.gather()

    def observe(self, logits: Tensor) -> Tensor:
        """Show logits to the observer, and return them."""
        if self.observer is not None and len(logits):
            self.observer(logits.detach())
        return logits

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        defer, self.defer_next = self.defer_next, False
        if defer and len(args) == 1 and not kwargs:
            (hidden,) = args
            if torch.is_grad_enabled() and not hidden.requires_grad and self.bare.trained_names():
                hidden = hidden.detach().requires_grad_()  # of a frozen model, so that FSDP sums the head's gradients
            return DeferredLogits(self, _Identity.apply(hidden))  # type: ignore[no-untyped-call]
        return self.bare.forward(*args, **kwargs)


@dataclass(frozen=True)
class VocabShard:
    """This rank's shard of the vocabulary."""

    group: TensorGroup
    start: int  # my first id
    width: int  # number of my ids
    size: int  # ids of the whole vocabulary

    @classmethod
    def of(cls, group: TensorGroup, size: int) -> VocabShard:
        """Return this rank's shard of `size` ids, cut as `DTensor` cuts them."""
        start, stop = even_span(size, group.rank, group.size)
        return cls(group, start, stop - start, size)

    @property
    def widest(self) -> int:
        """The largest `width` of all ranks: all ranks cut their tokens into the same tiles."""
        return -(-self.size // self.group.size)

    def find(self, labels_T: Tensor) -> tuple[Tensor, Tensor]:
        """Return which labels are in my shard, `[T]`, and their indices in it, `[T, 1]`; 0 for the others."""
        mine_T = (labels_T >= self.start) & (labels_T < self.start + self.width)
        return mine_T, torch.where(mine_T, labels_T - self.start, 0)[:, None]

    def of_label(self, x_TV: Tensor, labels_T: Tensor) -> Tensor:
        """Return the label's entry, `[T]`; 0 if another rank holds it."""
        mine_T, index = self.find(labels_T)
        return torch.where(mine_T, x_TV.gather(-1, index)[:, 0], 0)

    def log_softmax(self, logits_TV: Tensor, dtype: torch.dtype) -> Tensor:
        """Return my shard of the log-softmax over the whole vocabulary; differentiable, collective."""
        x = logits_TV.to(dtype)
        highest = self.group.largest(x.amax(-1, keepdim=True))
        total = self.group.sum_out((x - highest).exp().sum(-1, keepdim=True))
        # Every rank subtracts it from its own shard, so its gradient is the sum over the ranks.
        return x - self.group.copy_in(total.log() + highest)

    def is_top1(self, logits_TV: Tensor, labels_T: Tensor) -> Tensor:
        """Return whether the label has the largest logit; the first of equals. Collective."""
        best, index = logits_TV.detach().max(-1)
        is_best = best == self.group.largest(best)
        first = self.group.smallest(torch.where(is_best, index + self.start, self.size))
        return first == labels_T
