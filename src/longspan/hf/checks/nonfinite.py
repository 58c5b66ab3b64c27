"""NaN and infinity: on which rank, in which layer and in which tensor they appeared first.

Nothing here runs while all is well. When a loss or a gradient is found not finite, the same forward and backward are
run once more under hooks that look at every module's tensors on every rank. What is not finite spreads: through an
exchange to the other ranks, through the sums of gradients to all weights. So the ranks count what they look at, in the
order in which the model works, which is the same everywhere, and the lowest count is where it began.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from longspan.comm.arguments import check_module
from longspan.comm.digests import local_part
from longspan.comm.objects import gather_objects
from longspan.core.rank_differences import format_ranks
from longspan.core.validation import check_flag, checked_call
from longspan.hf.batch import check_batch
from longspan.hf.state import state_of
from longspan.hf.weights.fsdp import reshard

if TYPE_CHECKING:
    from longspan.comm.mesh import SequenceSharding
    from longspan.losses.deferred_logits import Head


@dataclass(frozen=True)
class NonFinite:
    """Where the first tensor that is not finite was found.

    Attributes:
        ranks: in the job, those that found it there; the others found it later, or not at all.
        kind: "weight", "input", "activation", "loss" or "gradient".
        tensor: what it is, with the module or parameter.
        values: how many of its values are not finite, and of how many, on the first of `ranks`.
    """

    ranks: tuple[int, ...]
    kind: str
    tensor: str
    values: tuple[int, int]

    def __str__(self) -> str:
        bad, of = self.values
        return f"{self.tensor} on {format_ranks(self.ranks)} ({bad:,} of {of:,} values are NaN or infinite)"


@dataclass(frozen=True)
class _Found:
    """What one rank found: `order` counts what was looked at before."""

    order: int
    kind: str
    tensor: str
    values: tuple[int, int]


@checked_call(model=check_module, batch=check_batch, backward=check_flag)
def find_nonfinite(model: nn.Module, batch: Mapping[str, Any], *, backward: bool = True) -> NonFinite | None:
    """Run a parallelized model once on a batch, and say where the first NaN or infinity appears. Collective.

    For a loss or a gradient norm that is not finite: call it with the batch that gave it, on every rank, before the
    optimizer's step; seed the generators as before the forward if the model has dropout. It looks at the weights, then
    at the inputs and outputs of every module, the loss, the gradients of every module's outputs, and of every parameter
    before they are summed over the ranks. Gradients that had accumulated are kept; the weights are not touched.

    Args:
        model: from `longspan.parallelize`.
        batch: what the model is called with: whole, or cut by `shard_batch`.
        backward: run the backward too; it needs labels.

    Returns:
        The same on every rank; None where everything is finite (if it was not before, that was a fault of a machine).

    Raises:
        LongspanError: for a model that is not parallelized, or a batch that it refuses.
    """

    def run() -> Any:
        loss = getattr(model(**batch), "loss", None)
        if backward and loss is not None:
            loss.backward()
        return loss

    return watch(model, sharding_of(model), run)


def watch(model: nn.Module, sp: SequenceSharding, run: Callable[[], Tensor | None]) -> NonFinite | None:
    """As `find_nonfinite`, of any forwards and backwards: `run` does them, and returns the loss. Collective."""
    bad = first_not_finite(model, sp)
    if bad is not None:
        return bad
    updates = state_of(model).in_backward
    reshard(model)
    before = [(p, p.grad) for p in model.parameters()]
    for p, _ in before:
        p.grad = None
    watcher = _Watcher(model)
    try:
        with watcher, contextlib.nullcontext() if updates is None else updates.paused():
            loss = run()
            if loss is not None:
                watcher.look("loss", "the loss", loss)
        for name, p in model.named_parameters():
            if p.grad is not None:
                watcher.look("gradient", f"the gradient of parameter {name}", p.grad)
    finally:
        reshard(model)
        for p, grad in before:
            p.grad = grad
    return _first_of_all(watcher.found, sp)


def first_not_finite(model: nn.Module, sp: SequenceSharding) -> NonFinite | None:
    """The first parameter or buffer with a NaN or an infinity, on whichever rank; None where there is none. Collective.

    Each rank looks at what it holds, under FSDP its shards. One pass over the weights, and one wait for the device.
    """
    weights = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    names = [name for name, x in weights.items() if not x.is_meta and x.is_floating_point()]
    local = [local_part(weights[name]) for name in names]
    # A sum is not finite if any of its terms is not. (It may overflow although all are: then they are counted.)
    sums = torch.stack([_sum(x).to(sp.device) for x in local]) if local else torch.zeros(0)
    found = None
    for i in (~sums.isfinite()).nonzero().flatten().tolist():
        count = _count(local[i])
        if count:
            found = _Found(i, "weight", f"weight {names[i]}", (count, local[i].numel()))
            break
    return _first_of_all(found, sp)


def sharding_of(model: nn.Module) -> SequenceSharding:
    """The sharding that a model was parallelized with.

    Raises:
        LongspanError: if it was not.
    """
    return state_of(model).sp


class _Watcher:
    """Hooks on every module that look at what goes in and comes out, forward and backward; the first finding stays."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.order = 0
        self.found: _Found | None = None
        self.handles: list[Any] = []
        self.head: Head | None = state_of(model).head

    def __enter__(self) -> None:
        for name, module in self.model.named_modules():
            at = name or type(module).__name__
            if self.head is not None and module is self.head.module:  # logits by tiles are what no module returns
                self.head.observer = functools.partial(self.look, "activation", f"the output of {at}")
            self.handles.append(module.register_forward_pre_hook(self._before(at), with_kwargs=True))
            self.handles.append(module.register_forward_hook(self._after(at), with_kwargs=True))

    def __exit__(self, *_: object) -> None:
        for handle in self.handles:
            handle.remove()
        if self.head is not None:
            self.head.observer = None

    def look(self, kind: str, tensor: str, x: Tensor) -> None:
        """Note a tensor if it is the first that is not finite."""
        self.order += 1
        if self.found is None:
            local = local_part(x)
            count = _count(local)
            if count:
                self.found = _Found(self.order, kind, tensor, (count, local.numel()))

    def _before(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            for x in _tensors((args, kwargs)):
                self.look("input", f"what goes into {name}", x)
            for key, p in module.named_parameters(recurse=False):
                # FSDP has gathered it: what arrives here is this rank's part of the gradient, before any sum.
                self._on_gradient(p, f"the gradient of parameter {name}.{key}")

        return hook

    def _after(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            for x in _tensors(output):
                self.look("activation", f"the output of {name}", x)
                self._on_gradient(x, f"the gradient of the output of {name}")

        return hook

    def _on_gradient(self, x: Tensor, tensor: str) -> None:
        if x.requires_grad and torch.is_grad_enabled():
            self.handles.append(x.register_hook(lambda grad: self.look("gradient", tensor, grad)))


def _first_of_all(mine: _Found | None, sp: SequenceSharding) -> NonFinite | None:
    group = sp.mesh_group
    if group is None:
        found, ranks = [mine], [0]
    else:
        found, ranks = gather_objects(mine, group), dist.get_process_group_ranks(group)
    each = [(x, rank) for x, rank in zip(found, ranks, strict=True) if x is not None]
    if not each:
        return None
    first = min((x for x, _ in each), key=lambda x: x.order)
    where = tuple(rank for x, rank in each if (x.order, x.tensor) == (first.order, first.tensor))
    return NonFinite(where, first.kind, first.tensor, first.values)


def _tensors(value: Any) -> Iterator[Tensor]:
    """Floating-point tensors in what a module takes or gives."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)


def _sum(x: Tensor) -> Tensor:
    return (x.float() if x.element_size() == 1 else x).sum(dtype=torch.float64)  # 8 bits have no sum of their own


def _count(x: Tensor) -> int:
    """How many values are NaN or infinite."""
    return int((~(x.float() if x.element_size() == 1 else x).isfinite()).sum())
