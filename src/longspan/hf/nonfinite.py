"""Find NaN and infinity: on which rank, in which layer and in which tensor they appear first.

Nothing here runs in a healthy step. If a loss or a gradient is not finite, the same forward and backward run a second
time under hooks that look at every module's tensors on every rank. A NaN spreads: through collectives to the other
ranks, through gradient sums to all weights. So each rank numbers the tensors in the order in which the model computes
them, which is the same on all ranks; the lowest number is the origin.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from longspan.comm.agree import gather_objects
from longspan.comm.mesh import SequenceSharding
from longspan.comm.weights import local_part
from longspan.core.errors import LongspanError
from longspan.core.formatting import format_ranks
from longspan.hf.state import state_of
from longspan.hf.weights.fsdp import reshard
from longspan.losses.deferred_logits import Head


@dataclass(frozen=True)
class NonFinite:
    """The first tensor that is not finite.

    Attributes:
        ranks: of the job, those on which it is not finite.
        kind: "weight", "input", "activation", "loss" or "gradient".
        tensor: its description, with the module or parameter.
        values: how many of its values are not finite, and of how many, on the first of `ranks`.
    """

    ranks: tuple[int, ...]
    kind: str
    tensor: str
    values: tuple[int, int]

    def __str__(self) -> str:
        bad, of = self.values
        return f"{self.tensor} on {format_ranks(self.ranks)} ({bad:,} of {of:,} values are NaN or infinite)"


_First = tuple[int, NonFinite] | None
"""The first on this rank, without `ranks`, after its number among the tensors of a run."""


def find_nonfinite(model: nn.Module, batch: Mapping[str, Any], *, backward: bool = True) -> NonFinite | None:
    """Run a parallelized model once on a batch, and return where the first NaN or infinity appears. Collective.

    For a loss or a gradient norm that is not finite: call it with the same batch, on every rank, before the optimizer's
    step; seed the generators as before the forward if the model has dropout. It looks at the weights, then at the
    inputs and outputs of every module, the loss, the gradients of every module's outputs, and of every parameter before
    they are summed over the ranks. Accumulated gradients and the weights do not change.

    Args:
        model: as `longspan.parallelize` returned it.
        batch: the model's arguments, a whole batch.
        backward: run the backward too; it needs labels.

    Returns:
        The same on every rank; None if everything is finite (a NaN that does not occur again was a hardware fault).

    Raises:
        LongspanError: for a model that is not parallelized, or a batch that it refuses.
    """

    def run() -> Any:
        loss = getattr(model(**batch), "loss", None)
        if backward and loss is not None:
            loss.backward()
        return loss

    return watch(model, state_of(model).sp, run)


def watch(model: nn.Module, sp: SequenceSharding, run: Callable[[], Tensor | None]) -> NonFinite | None:
    """As `find_nonfinite`, for any forwards and backwards: `run` executes them, and returns the loss. Collective."""
    bad = first_nonfinite_weight(model, sp)
    if bad is not None:
        return bad
    reshard(model)
    before = [(p, p.grad) for p in model.parameters()]
    for p, _ in before:
        p.grad = None
    watcher = _Watcher(model)
    try:
        with watcher:
            try:
                loss = run()
            except LongspanError:  # of every rank: recurrent layers refuse to pass a state with NaN
                bad = _first_of_all(watcher.first, sp)
                if bad is None:
                    raise
                return bad
            if loss is not None:
                watcher.look("loss", "the loss", loss)
        for name, p in model.named_parameters():
            if p.grad is not None:
                watcher.look("gradient", f"the gradient of parameter {name}", p.grad)
    finally:
        reshard(model)
        for p, grad in before:
            p.grad = grad
    return _first_of_all(watcher.first, sp)


def first_nonfinite_weight(model: nn.Module, sp: SequenceSharding) -> NonFinite | None:
    """Return the first parameter or buffer of any rank that is not finite, or None. Collective.

    Each rank looks at its own weights, under FSDP its shards. One pass over the weights, and one wait for the device.
    """
    weights = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    names = [name for name, x in weights.items() if not x.is_meta and x.is_floating_point()]
    local = [local_part(weights[name]) for name in names]
    # A sum is not finite if any of its terms is not. It may also overflow, so count.
    sums = torch.stack([_countable(x).sum(dtype=torch.float64).to(sp.device) for x in local] or [torch.zeros(())])
    first = None
    for i in (~sums.isfinite()).nonzero().flatten().tolist():
        count = _count(local[i])
        if count:
            first = i, NonFinite((), "weight", f"weight {names[i]}", (count, local[i].numel()))
            break
    return _first_of_all(first, sp)


class _Watcher:
    """Hooks on every module that look at its inputs and outputs, in forward and backward."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.order = 0
        self.first: _First = None
        self.handles: list[Any] = []
        self.head: Head | None = state_of(model).head

    def __enter__(self) -> None:
        for name, module in self.model.named_modules():
            at = name or type(module).__name__
            if self.head is not None and module is self.head.module:  # no module returns the logits of tiles
                self.head.observer = functools.partial(self.look, "activation", f"the output of {at}")
            before, after = functools.partial(self._before, at), functools.partial(self._after, at)
            self.handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            self.handles.append(module.register_forward_hook(after))

    def __exit__(self, *_: object) -> None:
        for handle in self.handles:
            handle.remove()
        if self.head is not None:
            self.head.observer = None

    def look(self, kind: str, tensor: str, x: Tensor) -> None:
        """Note a tensor if it is the first that is not finite."""
        self.order += 1
        if self.first is None:
            local = local_part(x)
            count = _count(local)
            if count:
                self.first = self.order, NonFinite((), kind, tensor, (count, local.numel()))

    def _before(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        for x in _tensors((args, kwargs)):
            self.look("input", f"what goes into {name}", x)
        for key, p in module.named_parameters(recurse=False):
            # FSDP has gathered it: its gradient is this rank's part, before any sum.
            self._on_gradient(p, f"the gradient of parameter {name}.{key}")

    def _after(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        for x in _tensors(output):
            self.look("activation", f"the output of {name}", x)
            self._on_gradient(x, f"the gradient of the output of {name}")

    def _on_gradient(self, x: Tensor, tensor: str) -> None:
        if x.requires_grad and torch.is_grad_enabled():
            self.handles.append(x.register_hook(lambda grad: self.look("gradient", tensor, grad)))


def _first_of_all(mine: _First, sp: SequenceSharding) -> NonFinite | None:
    group = sp.world_group
    ranks = [0] if group is None else dist.get_process_group_ranks(group)
    every = [(*x, rank) for x, rank in zip(gather_objects(mine, group), ranks, strict=True) if x is not None]
    if not every:
        return None
    first: NonFinite
    order, first, _ = min(every, key=lambda x: x[0])
    where = tuple(rank for number, x, rank in every if (number, x.tensor) == (order, first.tensor))
    return dataclasses.replace(first, ranks=where)


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the floating-point tensors in a module's arguments or output."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, Mapping | list | tuple):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(each)


def _countable(x: Tensor) -> Tensor:
    return x.float() if x.element_size() == 1 else x  # torch neither sums nor tests 8-bit floats


def _count(x: Tensor) -> int:
    return int((~_countable(x).isfinite()).sum())
