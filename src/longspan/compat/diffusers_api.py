"""Names of diffusers, which is not imported: a model's class tells where it comes from."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def is_model_of_diffusers(model: Any) -> bool:
    """Return whether a model's class is one of diffusers. Versions: 0.42. When gone: False."""
    return any(
        c.__name__ == "ModelMixin" and c.__module__.partition(".")[0] == "diffusers" for c in type(model).__mro__
    )


def is_parallel(model: Any) -> bool:
    """Return whether diffusers itself parallelizes a model. Versions: 0.42. When gone: False."""
    return getattr(model, "_parallel_config", None) is not None


def version_of_diffusers() -> str:
    """Return the version of diffusers that made a model. Versions: any. When gone: an AttributeError."""
    return str(sys.modules["diffusers"].__version__)


def split_plan(model: Any) -> dict[str, Any]:
    """Return where diffusers' context parallelism splits and joins a model's tokens; empty without such a plan.

    Versions: 0.42. When gone: empty, and the model is refused.
    """
    plan: dict[str, Any] | None = getattr(model, "_cp_plan", None)
    return plan or {}


def checkpoint_function(model: Any) -> Callable[..., Any] | None:
    """Return the function that checkpoints a block, `f(block, *args)`; None if checkpointing was never enabled.

    Versions: 0.42. When gone: None; then a recomputed block raises if another forward of another size ran since.
    """
    function: Callable[..., Any] | None = getattr(model, "_gradient_checkpointing_func", None)
    return function


def set_checkpoint_function(model: Any, function: Callable[..., Any]) -> None:
    """Replace what `checkpoint_function` returns. Versions: 0.42. When gone: see there."""
    model._gradient_checkpointing_func = function


def transformer_output(sample: Any) -> Any:
    """Return Latte's output, with `sample`. Versions: 0.42. When gone: an ImportError in the first forward."""
    from diffusers.models.modeling_outputs import Transformer2DModelOutput

    return Transformer2DModelOutput(sample=sample)
