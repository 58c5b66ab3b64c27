"""Make misuse of a parallelized model raise where it happens.

Examples: a wrapper that averages gradients, a cast of its weights, a saver that would write each rank's shards as if
they were weights. This changes the instances, not their classes.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from longspan.compat.torch_api import before_casting, forbid_ddp
from longspan.core.errors import LongspanError

NO_DDP = (
    "DistributedDataParallel around a parallelized model would divide its gradients by the number of ranks, and they "
    "are summed already; call the model that longspan.parallelize returned (with accelerate, prepare the loader, "
    "optimizer and scheduler, not the model)"
)
_SAVE = (
    "on every rank call longspan.checkpoint.export(folder, model) for a Hugging Face folder, "
    "or longspan.checkpoint.save for a checkpoint to resume from"
)
_ACCELERATE = ("save_model", "save_state")
"""Methods of `accelerate.Accelerator` that write what a model's `state_dict` returns."""


def refuse_wrappers_and_casts(model: nn.Module, inner: nn.Module) -> None:
    """Make DistributedDataParallel around the model, copies of it and other dtypes raise at once.

    Args:
        model: the user's, possibly a wrapper.
        inner: the transformers model in it.
    """
    for each in {id(model): model, id(inner): inner}.values():
        forbid_ddp(each, _NoDDP())
    before_casting(inner, lambda fn: _refuse_cast(inner, fn))

    def deepcopy(memo: Any) -> NoReturn:
        raise LongspanError(
            "copy.deepcopy of a parallelized model would share its process groups and shards; copy the model before "
            "longspan.parallelize, or keep a state dict (torch.distributed.checkpoint.state_dict.get_model_state_dict)"
        )

    inner.__deepcopy__ = deepcopy  # type: ignore[assignment]


class _NoDDP:
    """An iterable that raises."""

    def __iter__(self) -> Iterator[str]:
        raise LongspanError(NO_DDP)


def _refuse_cast(model: nn.Module, fn: Callable[[Tensor], Tensor]) -> None:
    for before in {p.dtype for p in model.parameters() if p.is_floating_point()}:
        after = before
        with contextlib.suppress(Exception):  # `fn` may be anything, and raises its own error
            after = fn(torch.empty(0, dtype=before)).dtype
        if after != before:
            raise LongspanError(
                f"a parallelized model keeps its dtype: {before} would become {after}, and its optimizer and its sums "
                f"of gradients with it; cast the model before longspan.parallelize, or compute in {after} by mp_policy "
                f"(with FSDP) or torch.autocast (without)"
            )


def refuse_saving_shards(model: nn.Module, inner: nn.Module) -> None:
    """Make `save_pretrained`, `push_to_hub` and accelerate's `save_model` raise for a model of sharded weights.

    `state_dict` stays: torch's Distributed Checkpoint and `accelerator.get_state_dict` (which returns DTensors) call
    it.
    """
    for each in {id(model): model, id(inner): inner}.values():
        for name in ("save_pretrained", "push_to_hub"):
            if hasattr(each, name):
                setattr(each, name, _CannotSave(name))
        each.register_state_dict_pre_hook(_refuse_accelerate)


class _CannotSave:
    """Replaces a method of a model; can be pickled and copied with it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        raise LongspanError(f"{self.name} cannot save shards, and the weights of this model are sharded; {_SAVE}")


def _refuse_accelerate(*_: Any) -> None:
    """Raise if accelerate asks for the state dict; only the call stack shows who does."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_name in _ACCELERATE and frame.f_globals.get("__name__", "").startswith("accelerate."):
            raise LongspanError(
                f"accelerate's {frame.f_code.co_name} cannot save shards, and the weights of this model are sharded; "
                f"{_SAVE}"
            )
