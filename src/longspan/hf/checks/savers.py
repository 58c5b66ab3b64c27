"""Refuse Hugging Face's savers on a model whose weights are sharded, and name the function to call instead.

They would write each rank's shards as if they were weights, fail half-way with an error about storages, and leave a
folder that looks like a model.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NoReturn

from longspan.core.errors import LongspanError

if TYPE_CHECKING:
    from torch import nn

_FIX = (
    "on every rank call longspan.checkpoint.export(folder, model) for a Hugging Face folder, "
    "or longspan.checkpoint.save for a checkpoint to resume from"
)
_ACCELERATE = ("save_model", "save_state")
"""Methods of `accelerate.Accelerator` that write what a model's `state_dict` returns."""


def refuse_savers(*models: nn.Module) -> None:
    """Make `save_pretrained`, `push_to_hub` and accelerate's `save_model` raise for these sharded models.

    This changes the instances, not their classes. `state_dict` stays: torch's Distributed Checkpoint and
    `accelerator.get_state_dict` (which returns DTensors) call it.
    """
    for model in {id(model): model for model in models}.values():
        for name in ("save_pretrained", "push_to_hub"):
            if hasattr(model, name):
                setattr(model, name, _Refusal(name))
        model.register_state_dict_pre_hook(_refuse_accelerate)


class _Refusal:
    """Replaces a method of a model; can be pickled and copied with it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        raise LongspanError(f"{self.name} cannot save shards, and the weights of this model are sharded; {_FIX}")


def _refuse_accelerate(*_: Any) -> None:
    """Raise if accelerate asks for the state dict; only the call stack shows who does."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_name in _ACCELERATE and frame.f_globals.get("__name__", "").startswith("accelerate."):
            raise LongspanError(
                f"accelerate's {frame.f_code.co_name} cannot save shards, and the weights of this model are sharded; "
                f"{_FIX}"
            )
