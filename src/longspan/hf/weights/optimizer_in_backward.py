"""The optimizer's step of each weight in the backward, as its gradient arrives, and the gradient freed at once.

FSDP2 calls the hooks that `register_post_accumulate_grad_hook` has set on a sharded parameter when its gradient has
been summed over the ranks, one layer after the other, on the stream on which it was summed. So no rank ever holds the
gradients of more than the group of weights that is being summed. The numbers are those of `optimizer.step()` after the
backward, to the bit: an optimizer such as AdamW looks at each weight by itself.
"""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from longspan.comm.arguments import check_optimizer
from longspan.comm.digests import local_part
from longspan.core.errors import LongspanError
from longspan.core.validation import checked_call
from longspan.hf.support import transformers_model

if TYPE_CHECKING:
    from collections.abc import Iterator


@checked_call(optimizer=check_optimizer)
def optimizer_in_backward(model: nn.Module, optimizer: torch.optim.Optimizer) -> InBackward:
    """From now on, each backward updates the weights by `optimizer`, and leaves no gradients behind.

    The optimizer stays what it is: its state, its `state_dict`, a scheduler of its rate and what saves it know nothing
    of this, and a run may go on with or without. `optimizer.step()` finds no gradients and does nothing.

        updates = longspan.optimizer_in_backward(model, optimizer)
        for batch in loader:
            model(**batch).loss.backward()     # the weights are updated in here
            scheduler.step()
            norm = updates.grad_norm()         # of the gradients that are gone

    One backward is one step: there is no accumulation (`no_sync` is refused), no clipping by the norm of all gradients,
    and no gradient scaler, which all need gradients that are there together.

    Args:
        model: as `longspan.parallelize` returned it, with FSDP or on one rank.
        optimizer: of all its trained weights, whose step treats each of them by itself (Adam's, SGD's and their kin;
            none that compares weights, or calls a closure).

    Returns:
        What knows the gradients' norm, can pause, and can be removed.

    Raises:
        LongspanError: for a model that is not parallelized, or with `fsdp=False` on several ranks, where a gradient is
            summed when the backward has ended; and where the optimizer's weights are not the model's trained ones.
    """
    inner: Any = transformers_model(model)
    hooks = getattr(inner, "longspan_hooks", None)
    if hooks is None:
        raise LongspanError(f"{type(inner).__name__} was not parallelized: call longspan.parallelize first")
    if hooks.gradients is not None:
        raise LongspanError(
            "with fsdp=False gradients are summed over the ranks when the backward has ended, so no weight can be "
            "updated in it; use longspan.parallelize(..., fsdp=True), or call optimizer.step() after the backward"
        )
    if hooks.in_backward is not None:
        raise LongspanError("this model has an optimizer in its backward already; remove() that first")
    _check_weights(model, optimizer)
    hooks.in_backward = InBackward(hooks, optimizer)
    made: InBackward = hooks.in_backward
    return made


def _check_weights(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    trained = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    left = [name for key, name in trained.items() if key not in held]
    if left:
        raise LongspanError(
            f"{type(optimizer).__name__} does not hold {len(left)} of the model's trained parameters, {left[0]} first; "
            f"in the backward all are updated: make it from model.parameters() after longspan.parallelize, or freeze "
            f"what is not to be trained"
        )
    if len(held) > len(trained):
        raise LongspanError(
            f"{type(optimizer).__name__} holds {len(held) - len(trained)} parameters that are not trained ones of this "
            f"model; give them to another optimizer"
        )


class InBackward:
    """Hooks that update weights in the backward; `optimizer_in_backward` makes it."""

    def __init__(self, hooks: Any, optimizer: torch.optim.Optimizer) -> None:
        self.hooks, self.optimizer = hooks, optimizer
        self.active = True
        self.norms: list[Tensor] = []
        # By place: `load_state_dict` puts other groups in the place of these.
        self.places = {id(p): i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
        self.handles = [
            p.register_post_accumulate_grad_hook(self._update)
            for group in optimizer.param_groups
            for p in group["params"]
            if p.requires_grad
        ]

    def _update(self, p: Tensor) -> None:
        if not self.active or p.grad is None:
            return
        grad = local_part(p.grad)
        wide = torch.promote_types(grad.dtype, torch.float32)
        # What every rank of a tensor group holds counts once.
        alike = self.hooks.sp.tensor_size if isinstance(p, DTensor) and p.placements[-1].is_replicate() else 1
        self.norms.append(torch.linalg.vector_norm(grad, dtype=wide) / math.sqrt(alike))
        groups = self.optimizer.param_groups
        whole = [group["params"] for group in groups]
        try:
            # The step of one weight costs the host what one weight costs, not a look at all of them.
            for i, group in enumerate(groups):
                group["params"] = [p] if i == self.places[id(p)] else []
            self.optimizer.step()
        finally:
            for group, params in zip(groups, whole, strict=True):
                group["params"] = params
        p.grad = None

    def grad_norm(self) -> float:
        """The global L2 norm of the gradients since this was last called, or since a backward raised. Collective."""
        norms, self.norms = self.norms, []
        group = self.hooks.sp.mesh_group
        square = torch.zeros((), dtype=torch.float64, device=self.hooks.sp.device)
        if norms:
            square = torch.stack([x.to(square.device) for x in norms]).double().square().sum()
        if group is not None:
            dist.all_reduce(square, group=group)
        return math.sqrt(value) if (value := square.item()) >= 0 else math.nan

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Within this, backwards leave gradients and update nothing."""
        before, self.active = self.active, False
        try:
            yield
        finally:
            self.active = before

    def remove(self) -> None:
        """Backwards leave gradients again, for `optimizer.step()`."""
        for handle in self.handles:
            handle.remove()
        self.hooks.in_backward = None
