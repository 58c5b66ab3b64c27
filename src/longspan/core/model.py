"""The model of a command."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from longspan.core.errors import LongspanError
from longspan.core.parallel import KernelName
from longspan.core.validation import check_text


@dataclass(frozen=True)
class Model:
    """The model, and how it is loaded."""

    model: str = ""
    """Name or folder of a Hugging Face model, or a config.json."""
    dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """dtype of weights and computing. auto: the one in the model's config; of plan bf16, of verify fp32."""
    kernel: KernelName = "auto"
    """Local attention kernel."""

    def __str__(self) -> str:
        return self.model

    def check(self) -> None:
        """Raise if no model is given."""
        if not self.model:
            raise LongspanError("--model is missing; give the name or folder of a model")
        check_text("--model", self.model)
