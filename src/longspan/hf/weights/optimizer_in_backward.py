"""Update each weight in the backward as soon as its gradient is summed, and free the gradient.

FSDP2 calls the `register_post_accumulate_grad_hook` hooks of a sharded parameter once its gradient is reduce-scattered,
layer by layer, on the stream of that reduce-scatter. So a rank holds gradients of one FSDP group at a time. The result
is bit-equal to `optimizer.step()` after the backward, as AdamW and similar optimizers treat each weight alone.
"""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from longspan.comm.arguments import check_optimizer
from longspan.comm.digests import local_part
from longspan.core.errors import LongspanError
from longspan.core.validation import checked_call
from longspan.hf.state import ParallelState, state_of

if TYPE_CHECKING:
    from collections.abc import Iterator


@checked_call(optimizer=check_optimizer)
def optimizer_in_backward(model: nn.Module, optimizer: torch.optim.Optimizer) -> InBackward:
    """Make each backward update the weights by `optimizer` and free the gradients.

    State, `state_dict` and schedulers work as before, so a run can resume with or without this. `optimizer.step()`
    has no gradients and does nothing.

        updates = longspan.optimizer_in_backward(model, optimizer)
        for batch in loader:
            model(**batch).loss.backward()     # the weights are updated in here
            scheduler.step()
            norm = updates.grad_norm()         # of the freed gradients

    One backward is one step. Accumulation (`no_sync`), clipping by global norm and gradient scalers need all gradients
    at once, and are not supported.

    Args:
        model: as `longspan.parallelize` returned it, with FSDP or on one rank.
        optimizer: of all its trained weights. Its step must treat each weight alone (Adam, SGD and similar; none that
            compares weights, or calls a closure).

    Returns:
        A handle with `grad_norm`, `paused` and `remove`.

    Raises:
        LongspanError: if the model is not parallelized, or with `fsdp=False` on several ranks, where gradients are
            summed after the backward; and if the optimizer's weights are not the model's trained ones.
    """
    state = state_of(model)
    if state.gradients is not None:
        raise LongspanError(
            "with fsdp=False gradients are summed over the ranks after the backward, so no weight can be updated in "
            "it; use longspan.parallelize(..., fsdp=True), or call optimizer.step() after the backward"
        )
    if state.in_backward is not None:
        raise LongspanError("this model has an optimizer in its backward already; remove() that first")
    _check_weights(model, optimizer)
    state.in_backward = InBackward(state, optimizer)
    return state.in_backward


def _check_weights(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    trained = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    left = [name for key, name in trained.items() if key not in held]
    if left:
        raise LongspanError(
            f"{type(optimizer).__name__} does not hold {len(left)} of the model's trained parameters, {left[0]} first; "
            f"in the backward all are updated: make it from model.parameters() after longspan.parallelize, or freeze "
            f"the others"
        )
    if len(held) > len(trained):
        raise LongspanError(
            f"{type(optimizer).__name__} holds {len(held) - len(trained)} parameters that are not trained ones of this "
            f"model; give them to another optimizer"
        )


class InBackward:
    """The hooks of `optimizer_in_backward`."""

    def __init__(self, state: ParallelState, optimizer: torch.optim.Optimizer) -> None:
        self.state, self.optimizer = state, optimizer
        self.active = True
        self.norms: list[Tensor] = []
        # By index: `load_state_dict` replaces the group dicts.
        self.group_index = {id(p): i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
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
        # A weight replicated over the tensor group counts once.
        copies = self.state.sp.tensor_size if isinstance(p, DTensor) and p.placements[-1].is_replicate() else 1
        self.norms.append(torch.linalg.vector_norm(grad, dtype=wide) / math.sqrt(copies))
        groups = self.optimizer.param_groups
        every = [group["params"] for group in groups]
        try:
            # The step then updates this weight only.
            for i, group in enumerate(groups):
                group["params"] = [p] if i == self.group_index[id(p)] else []
            self.optimizer.step()
        finally:
            for group, params in zip(groups, every, strict=True):
                group["params"] = params
        p.grad = None

    def grad_norm(self) -> float:
        """Return the global L2 norm of all gradients since the last call. Collective."""
        norms, self.norms = self.norms, []
        group = self.state.sp.mesh_group
        square = torch.zeros((), dtype=torch.float64, device=self.state.sp.device)
        if norms:
            square = torch.stack([x.to(square.device) for x in norms]).double().square().sum()
        if group is not None:
            dist.all_reduce(square, group=group)
        return math.sqrt(value) if (value := square.item()) >= 0 else math.nan

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Let backwards leave gradients and update nothing."""
        before, self.active = self.active, False
        try:
            yield
        finally:
            self.active = before

    def remove(self) -> None:
        """Stop updating: backwards leave gradients for `optimizer.step()` again."""
        for handle in self.handles:
            handle.remove()
        self.state.in_backward = None
