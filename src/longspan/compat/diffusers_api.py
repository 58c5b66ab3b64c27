"""Names of diffusers, which is not imported: a model's class tells where it comes from."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
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


def is_processor_of_diffusers(processor: Any, names: Collection[str]) -> bool:
    """Return whether an attention processor is one of diffusers' classes. Versions: any. When gone: False."""
    kind = type(processor)
    return kind.__name__ in names and kind.__module__.partition(".")[0] == "diffusers"


def attention_backend(processor: Any) -> str:
    """Return the attention backend that a processor uses: its own, or the default of the process.

    Versions: 0.42. When gone: "native"; then an attention by another function raises when it runs.
    """
    backend = getattr(processor, "_attention_backend", None)
    registry = getattr(sys.modules.get("diffusers.models.attention_dispatch"), "_AttentionBackendRegistry", None)
    backend = backend or getattr(registry, "_active_backend", None) or "native"
    return str(getattr(backend, "value", backend))


def hooks_of(module: Any) -> list[str]:
    """Return the classes of diffusers' hooks on a module, such as caches, without those that move or cast weights.

    Versions: 0.42. When gone: empty, and diffusers' caches are no longer refused.
    """
    registry = getattr(module, "_diffusers_hook", None)
    kinds = [type(hook) for hook in getattr(registry, "hooks", {}).values()]
    of_weights = ("group_offloading", "layerwise_casting")
    return [kind.__name__ for kind in kinds if kind.__module__.rpartition(".")[2] not in of_weights]


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
