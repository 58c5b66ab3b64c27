"""Collectives of a tensor-parallel layer; each operator's gradient is its adjoint (arXiv:1909.08053, figure 3).

The ranks of a tensor group hold the same tokens and shards of a layer's weights. A layer's input is replicated
(`copy_in`) or sharded by tokens (`gather_tokens`); its output is a partial sum (`sum_out`, `scatter_tokens`).

For FSDP, optimizers and checkpoints a sharded weight is a `DTensor`. While its module runs, it is this rank's shard, a
plain tensor (`Shards`), so that neither the module nor its caller (tiles, recomputation, a custom kernel) must handle
`DTensor`. Gradients go to the `DTensor`.

Shape suffixes: B rows, L tokens of this rank's sequence shard, T tokens of a tensor rank (L / size, rounded up).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from longspan.comm import collectives
from longspan.comm.mesh import find_group, group_name
from longspan.compat.torch_api import own_parameters
from longspan.core.layout import Span
from longspan.core.tile_sizes import even_span


@dataclass(frozen=True)
class Parts:
    """The entries of a weight's dimension that each rank of a group computes with."""

    length: int  # entries of the whole dimension
    spans: tuple[tuple[Span, ...], ...]  # each rank's entries, in its module's order

    @property
    def even(self) -> bool:
        """Whether each rank computes with its `DTensor` shard."""
        size = len(self.spans)
        return all(spans == (even_span(self.length, r, size),) for r, spans in enumerate(self.spans))

    def pieces(self, rank: int) -> list[tuple[int, int, int]]:
        """Split a rank's spans by the rank that holds them: `(holder, start, stop)`."""
        each = -(-self.length // len(self.spans))
        found = []
        for start, stop in self.spans[rank]:
            while start < stop:
                end = min(stop, (start // each + 1) * each)
                found.append((start // each, start, end))
                start = end
        return found

    def of_whole(self, x: Tensor, dim: int, rank: int) -> Tensor:
        """Return a rank's entries of a whole tensor."""
        return _joined([x.narrow(dim, start, stop - start) for start, stop in self.spans[rank]], dim)


@dataclass(frozen=True)
class TensorGroup:
    """The process group of the ranks that share a layer's weights, by its name; this rank's `rank` of `size`."""

    name: str
    size: int
    rank: int

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> TensorGroup:
        return cls(group_name(group), group.size(), group.rank())

    def copy_in(self, x: Tensor) -> Tensor:
        """Return a replicated input; the gradients of all ranks are summed."""
        return collectives.replicate(x, self.name)

    def sum_out(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' `x`; each part gets the gradient of the sum."""
        return collectives.all_reduce(x, self.name)

    def largest(self, x: Tensor) -> Tensor:
        """Return the elementwise maximum over ranks, without gradient."""
        out = x.detach().clone()
        dist.all_reduce(out, op=dist.ReduceOp.MAX, group=find_group(self.name))
        return out

    def smallest(self, x: Tensor) -> Tensor:
        """Return the elementwise minimum over ranks, without gradient."""
        return -self.largest(-x)

    def gather_tokens(self, x_BTD: Tensor) -> Tensor:
        """Return all ranks' tokens, `[B, size * T, ...]`; gradients are summed and scattered."""
        return collectives.all_gather(x_BTD.transpose(0, 1), self.name).transpose(0, 1).contiguous()

    def scatter_tokens(self, x_BLD: Tensor) -> Tensor:
        """Return the local tokens of the sum of all ranks' `x`, `[B, T, ...]`, padded as by `padded`."""
        x_LBD = self.padded(x_BLD).transpose(0, 1)
        return collectives.reduce_scatter(x_LBD, self.name).transpose(0, 1).contiguous()

    def tokens(self, length: int) -> int:
        """Return the tokens of a rank, if the group has `length` tokens."""
        return -(-length // self.size)

    def padded(self, x_BLD: Tensor) -> Tensor:
        """Pad with copies of the last token, without gradient, so that all ranks have the same number of tokens.

        Not with zeros: a layer that divides by its hidden states has an infinite derivative there, and 0 times infinity
        is NaN.
        """
        short = self.size * self.tokens(x_BLD.shape[1]) - x_BLD.shape[1]
        return torch.cat([x_BLD, x_BLD[:, -1:].detach().expand(-1, short, -1)], 1) if short else x_BLD

    def my_tokens(self, x_BLD: Tensor) -> Tensor:
        """Return the local tokens of a replicated tensor, `[B, T, ...]`, padded; gradients are gathered."""
        x_LBD = self.padded(x_BLD).transpose(0, 1)
        return collectives.local_part(x_LBD, self.name).transpose(0, 1).contiguous()

    def whole_tokens(self, x_BTD: Tensor, length: int) -> Tensor:
        """Gather all ranks' tokens, `[B, length, ...]`, for computation that is replicated: gradients are sliced."""
        return collectives.join(x_BTD.transpose(0, 1), self.name).transpose(0, 1)[:, :length].contiguous()

    def whole_last(self, x: Tensor, length: int) -> Tensor:
        """Gather a last dimension of `length` entries that is sharded as a `DTensor`.

        Every rank continues with the same tensor, so the local gradient is a slice of its gradient, not a sum.
        """
        short = -(-length // self.size) - x.shape[-1]  # missing entries on the last ranks
        part = F.pad(x, (0, short)) if short else x
        return collectives.join(part.movedim(-1, 0), self.name)[:length].movedim(0, -1)

    def fetch(self, x: Tensor, dim: int, parts: Parts) -> Tensor:
        """Return this rank's entries of a tensor that is sharded as a `DTensor`, by one all-to-all.

        The gradient of an entry that several ranks fetch is summed on the rank that holds it.
        """
        rows = x.movedim(dim, 0)
        first, _ = even_span(parts.length, self.rank, self.size)
        mine = [[(a, b) for holder, a, b in parts.pieces(r) if holder == self.rank] for r in range(self.size)]
        needed = parts.pieces(self.rank)
        send = [sum(b - a for a, b in of_rank) for of_rank in mine]
        receive = [sum(b - a for holder, a, b in needed if holder == r) for r in range(self.size)]
        pieces = [rows[a - first : b - first] for of_rank in mine for a, b in of_rank]
        received = collectives.all_to_all_rows(_joined(pieces or [rows[:0]], 0), send, receive, self.name)
        # They arrive in the order of their holders.
        arrival = sorted(range(len(needed)), key=lambda i: needed[i][0])
        split = received.split([needed[i][2] - needed[i][1] for i in arrival])
        in_order = dict(zip(arrival, split, strict=True))
        return _joined([in_order[i] for i in range(len(needed))], 0).movedim(0, dim)


def _joined(pieces: list[Tensor], dim: int) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


# ---------------------------------------------------------------------------------------------------------------------
# The weights of a module.


@dataclass(frozen=True)
class Rule:
    """How one weight is sharded over a tensor group, and what its module sees."""

    dim: int | None = None  # the sharded dimension; None: the weight is replicated
    partial: bool = False  # whether each rank's gradient is a part, to be summed over the group
    # The entries of the dimension that each rank computes with, if they are not its shard. They are fetched from the
    # ranks that hold them in each call. With `dim=None`: rows of a replicated weight.
    parts: Parts | None = None
    # For a replicated weight: whether only the first rank sees it and the others see zeros (a bias that is added to a
    # partial sum).
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
            delattr(self.module, name)  # PEFT's LoRA on a router takes a plain tensor for a buffer
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
