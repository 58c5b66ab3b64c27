"""What a backward does with gradients: their average over the ranks without FSDP, `no_sync`, and an optimizer that
updates each weight in the backward.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from longspan.comm.mesh import SequenceSharding
from longspan.comm.weights import local_part
from longspan.compat.torch_api import when_backward_ends
from longspan.core.errors import LongspanError
from longspan.core.tile_sizes import GRADIENT_BUCKET, gradient_buckets
from longspan.hf.model.support import transformers_model
from longspan.hf.state import DiffusionState, state_of


@contextlib.contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Do not average gradients over the ranks in these backwards; the first backward after them does it for all.

    For gradient accumulation: run every micro-batch but the last in this context, on every rank. The gradients equal
    those of an average after each backward, up to the order of additions. Until then `p.grad` does not contain them,
    and under FSDP each rank holds the gradients of the whole model.

        for i, micro in enumerate(micro_batches):
            with longspan.no_sync(model) if i + 1 < len(micro_batches) else contextlib.nullcontext():
                model(**micro, num_items_in_batch=labels_of_all).loss.backward()

    Args:
        model: as `longspan.parallelize` returned it. On one rank this does nothing.

    Raises:
        LongspanError: if the model is not parallelized.
    """
    state = getattr(model, "longspan_state", None)
    inner: Any = model
    if not isinstance(state, DiffusionState):
        inner, state = transformers_model(model), state_of(model)
    sums = state.gradients

    def set_sync(sync: bool) -> None:
        if isinstance(inner, FSDPModule):
            inner.set_requires_gradient_sync(sync)
        elif sums is not None:
            sums.deferred = not sync

    set_sync(False)
    try:
        yield
    finally:
        set_sync(True)


class GradientAverage:
    """Average the gradients of each backward over data x sequence at its end, without FSDP.

    - Gradients from earlier backwards are set aside during a backward, so that they are not averaged twice.
    - Gradients of a backward in `no_sync` are pending, outside `p.grad`, until the next backward that averages.
    - If a parameter has a gradient on some ranks only, the others add zero.
    - Hooks on accumulated gradients (an optimizer in the backward) run before the average: use FSDP for those.
    """

    bucket_elements = GRADIENT_BUCKET

    def __init__(self, parameters: Iterable[nn.Parameter], sp: SequenceSharding) -> None:
        self.parameters = [p for p in parameters if p.requires_grad]
        self.known = {id(p) for p in self.parameters}
        self.group, self.ranks = sp.fsdp_group, sp.fsdp_size
        self.fresh: set[nn.Parameter] = set()
        self.earlier: dict[nn.Parameter, Tensor] = {}
        self.deferred = False
        self.pending: dict[nn.Parameter, Tensor] = {}
        for p in self.parameters:
            p.register_hook(functools.partial(self._before_accumulation, p))

    def check(self, model: nn.Module) -> None:
        """Raise if a parameter was added or unfrozen after `parallelize`."""
        for name, p in model.named_parameters():
            if p.requires_grad and id(p) not in self.known:
                raise LongspanError(
                    f"parameter {name} was added or unfrozen after parallelize, its gradient would not be averaged "
                    f"over the ranks; parallelize the model afterwards (PEFT first, then longspan.parallelize)"
                )

    def _before_accumulation(self, p: nn.Parameter, grad: Tensor) -> None:
        if not self.fresh:
            when_backward_ends(self._finish)
        if p not in self.fresh:
            self.fresh.add(p)
            self._set_aside(p)

    def forget_unfinished(self) -> None:
        """Restore the gradients that a backward set aside before it raised."""
        for p, grad in self.earlier.items():
            p.grad = grad
        self.earlier.clear()
        self.fresh.clear()

    def _set_aside(self, p: nn.Parameter) -> None:
        if p.grad is not None:
            self.earlier[p] = p.grad
            p.grad = None

    @torch.no_grad()
    def _finish(self) -> None:
        """Run at the end of a backward: the same collectives on every rank, whichever parameters have gradients."""
        if any(p.grad is None for p in self.fresh):
            self.forget_unfinished()
            raise LongspanError(
                "torch.autograd.grad returns this rank's part of the gradients only; call loss.backward(), which "
                "averages them over the ranks"
            )
        if self.deferred:
            self._defer()
            return
        self._add_pending()
        parameters = [p for p in self.parameters if p.requires_grad]
        touched = torch.tensor([p in self.fresh for p in parameters], dtype=torch.int32, device=parameters[0].device)
        dist.all_reduce(touched, group=self.group)
        summed = [p for p, ranks in zip(parameters, touched.tolist(), strict=True) if ranks]
        for p in summed:
            if p not in self.fresh:
                self._set_aside(p)
                p.grad = torch.zeros_like(p)
        kinds = [p.dtype for p in summed]
        for bucket in gradient_buckets([local_part(p).numel() for p in summed], kinds, self.bucket_elements):
            self._average_bucket([summed[i] for i in bucket])
        for p, grad in self.earlier.items():
            p.grad = grad if p.grad is None else grad.add_(p.grad)
        self.earlier.clear()
        self.fresh.clear()

    def _defer(self) -> None:
        """Make this backward's gradients pending, and restore `p.grad`."""
        for p in self.fresh:
            grad, p.grad = p.grad, None
            assert grad is not None
            self.pending[p] = self.pending[p].add_(grad) if p in self.pending else grad
        self.forget_unfinished()

    def _add_pending(self) -> None:
        """Add pending gradients to this backward's, also for parameters that it did not reach."""
        for p, grad in self.pending.items():
            if p not in self.fresh:
                self.fresh.add(p)
                self._set_aside(p)
            p.grad = grad if p.grad is None else grad.add_(p.grad)
        self.pending.clear()

    def _average_bucket(self, bucket: list[nn.Parameter]) -> None:
        """All-reduce a bucket in fp32 at least: bf16 would round at every rank."""
        dtype = torch.promote_types(bucket[0].dtype, torch.float32)
        grads = [local_part(p.grad) for p in bucket if p.grad is not None]
        if len(grads) == 1:
            self._average_large(grads[0], dtype)
            return
        flat = torch.cat([grad.reshape(-1).to(dtype) for grad in grads])
        self._average(flat)
        for grad, total in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(total.view_as(grad))

    def _average_large(self, grad: Tensor, dtype: torch.dtype) -> None:
        """All-reduce one gradient, which may be a vocabulary's, in place or in copied pieces."""
        if grad.dtype == dtype and grad.is_contiguous():
            self._average(grad.view(-1))
            return
        for rows in grad.split(max(1, self.bucket_elements // max(1, grad[:1].numel()))) if grad.dim() else [grad]:
            piece = rows.to(dtype, memory_format=torch.contiguous_format, copy=True)
            self._average(piece)
            rows.copy_(piece)

    def _average(self, x: Tensor) -> None:
        dist.all_reduce(x, group=self.group)
        x.div_(self.ranks)
