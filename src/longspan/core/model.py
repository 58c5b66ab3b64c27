"""The model of a command."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from longspan.core.errors import LongspanError
from longspan.core.parallel import KernelName
from longspan.core.validation import check_text, format_value


@dataclass(frozen=True)
class NamedModel:
    """The model, and its dtype."""

    model: str = ""
    """Name or folder of a Hugging Face model, or a config.json."""
    dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """dtype of weights and computing. auto: the one in the model's config; of plan bf16, of verify fp32."""

    def check(self) -> None:
        """Raise if no model is given."""
        if not self.model:
            raise LongspanError("--model is missing; give the name or folder of a model")
        check_text("--model", self.model)


@dataclass(frozen=True)
class Model(NamedModel):
    """The model, and how it is loaded and run."""

    kernel: KernelName = "auto"
    """Local attention kernel."""


MOST_LAYERS = 4096
"""transformers makes every layer, 1 ms each; more are a mistake."""


def check_layers(where: str, config: Mapping[str, Any]) -> None:
    """Raise for a config.json of more than `MOST_LAYERS` layers, before transformers makes a list of them."""
    for part in (config, *(value for value in config.values() if isinstance(value, dict))):
        for key in ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "depth"):
            if isinstance(part.get(key), int | float) and part[key] > MOST_LAYERS:
                layers = format_value(part[key])
                raise LongspanError(f"{where}: {key}={layers} is more than {MOST_LAYERS:,}; correct the config")
