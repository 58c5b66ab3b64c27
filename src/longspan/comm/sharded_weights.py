"""Show a module plain local tensors for weights that are sharded over a tensor group.

For FSDP, optimizers and checkpoints such a weight is a `DTensor`. While its module runs, it is this rank's shard, a
plain tensor, so that neither the module nor its caller (tiles, recomputation, a custom kernel) must handle `DTensor`.
Gradients go to the `DTensor`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from longspan.compat.torch_api import own_parameters

if TYPE_CHECKING:
    from longspan.comm.tensor import Parts, TensorGroup


@dataclass(frozen=True)
class Rule:
    """How one weight is sharded over a tensor group, and what its module sees.

    Attributes:
        dim: the sharded dimension; None: the weight is replicated.
        partial: whether each rank's gradient is a part, to be summed over the group.
        parts: the entries of the dimension that each rank computes with, if they are not its shard. They are fetched
            from the ranks that hold them in each call. With `dim=None`: rows of a replicated weight.
        first: for a replicated weight: whether only the first rank sees it and the others see zeros (a bias that is
            added to a partial sum).
    """

    dim: int | None = None
    partial: bool = False
    parts: Parts | None = None
    first: bool = False


class Shards:
    """The sharded weights of one module; `rules` are by parameter name."""

    def __init__(self, module: nn.Module, group: TensorGroup, rules: dict[str, Rule]) -> None:
        self.module, self.group, self.rules = module, group, rules
        self.held: list[dict[str, Any]] = []

    def local(self, name: str, p: Tensor) -> Tensor:
        """Return the plain tensor that the module sees for a weight. Differentiable."""
        if not isinstance(p, DTensor):
            return p
        rule = self.rules[name]
        x: Tensor = p.to_local(grad_placements=p.placements)
        if rule.partial and p.requires_grad and torch.is_grad_enabled():
            x = self.group.copy_in(x)
        if rule.parts is not None and rule.dim is None:
            x = rule.parts.of_whole(x, 0, self.group.rank)
        elif rule.parts is not None and rule.dim is not None:
            x = self.group.fetch(x, rule.dim, rule.parts)
        if rule.first and self.group.rank:
            x = x * 0
        return x

    def show(self) -> None:
        """Replace the module's `DTensor` weights by plain tensors."""
        own = own_parameters(self.module)
        self.held.append({name: own[name] for name in self.rules if isinstance(own[name], DTensor)})
        for name, p in self.held[-1].items():
            own[name] = self.local(name, p)

    def hide(self) -> None:
        """Undo `show`."""
        if not self.held:
            return
        held = self.held.pop()
        for name in [name for name, _ in self.module.named_buffers(recurse=False) if name in held]:
            delattr(self.module, name)  # PEFT's LoRA on experts takes a plain tensor for a buffer
        own_parameters(self.module).update(held)


def shards_of(module: nn.Module) -> Shards | None:
    """Return a module's `Shards`; None without a tensor group."""
    found = module.__dict__.get("longspan_shards")
    return found if isinstance(found, Shards) else None


@contextlib.contextmanager
def as_local(module: nn.Module) -> Iterator[None]:
    """Show the module plain tensors inside the context, as while it is called."""
    shards = shards_of(module)
    if shards is None:
        yield
        return
    shards.show()
    try:
        yield
    finally:
        shards.hide()


class BareModule(nn.Module):
    """A module without the hooks around its call, whose weights are plain tensors.

    Args:
        module: called with hidden states alone. Its present `forward` is called, also when it is replaced later.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self._plain_forward = module, module.forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if shards_of(self.module) is None:
            return self._plain_forward(*args, **kwargs)
        with as_local(self.module):
            return self._plain_forward(*args, **kwargs)

    def compute(self, hidden: Tensor, parameters: dict[str, Tensor]) -> Any:
        """Return the output with other tensors for some parameters, by the names of `trained`."""
        return torch.func.functional_call(self, parameters, (hidden,)) if parameters else self.forward(hidden)

    def trained(self) -> dict[str, Tensor]:
        """Return the parameters that need a gradient, by name, as they are now: gathered, under FSDP.

        Collective if a weight's parts are fetched over the tensor group (`Rule.parts`).
        """
        owners, trained = dict(self.named_modules()), dict[str, Tensor]()
        for name, p in self.named_parameters():
            path, _, own = name.rpartition(".")
            if p.requires_grad:
                shards = shards_of(owners[path])
                trained[name] = p if shards is None else shards.local(own, p)
        return trained

    def trained_names(self) -> list[str]:
        """Return the names of `trained`, without a collective."""
        return [name for name, p in self.named_parameters() if p.requires_grad]
