"""Where a model comes from: its class, its config, and its weights (a folder, the hub, an adapter, or a seed)."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from longspan.core.errors import LongspanError
from longspan.hf.pretrained import check_weights, first_line, kind_of


@dataclass(frozen=True)
class Origin:
    """How to make a model.

    Attributes:
        auto: the `AutoModel...` class that chooses the model's class.
        config: the Hugging Face config; not changed.
        dtype: of the weights.
        name: the folder, or the model on the hub, with the weights; None: random weights.
        seed: of random weights.
        label: names the model in messages.
        strict: whether to raise on missing weights, and to warn of unused ones.
        options: of `auto.from_config` and `auto.from_pretrained`.
        adapter: the folder of a PEFT adapter, or None.
    """

    auto: Any
    config: Any
    dtype: torch.dtype
    name: str | None = None
    seed: int = 0
    label: str = "the config"
    strict: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)
    adapter: str | None = None

    def build(self) -> Any:
        """Make the full model on the CPU, or raise if transformers cannot, or weights are missing. Seeds torch."""
        torch.manual_seed(self.seed)
        options = {"config": copy.deepcopy(self.config), "dtype": self.dtype, **self.options}
        with self._transformers_errors():
            if self.name is None:
                return self.auto.from_config(**options)
            model, info = self.auto.from_pretrained(self.name, output_loading_info=True, **options)
            self.check(info)
        return self.adapted(model)

    def on_meta(self) -> Any:
        """Make the model on the meta device, without the adapter."""
        with self._transformers_errors(), torch.device("meta"):
            return self.auto.from_config(copy.deepcopy(self.config), dtype=self.dtype, **self.options)

    def adapted(self, model: Any) -> Any:
        """Add the adapter, by PEFT; its weights train like all others."""
        if self.adapter is None:
            return model
        try:
            import peft
        except ImportError as error:
            raise LongspanError(f"{self.adapter} is a PEFT adapter; install peft: pip install peft") from error
        trained = {p: p.requires_grad for p in model.parameters()}
        try:
            if peft.PeftConfig.from_pretrained(self.adapter).is_prompt_learning:
                raise LongspanError("prompt learning puts tokens before the text, which is not supported")
            # In the model's dtype, not in fp32: FSDP shards a layer's weights in one dtype.
            wrapped = peft.PeftModel.from_pretrained(model, self.adapter, autocast_adapter_dtype=False)
            saved = peft.utils.load_peft_weights(self.adapter, device="cpu").keys()
        except Exception as error:  # PEFT raises any kind
            raise LongspanError(
                f"the adapter {self.adapter} cannot be put on its base model {self.name}: {first_line(error)}"
            ) from error
        differ = sorted(saved ^ peft.get_peft_model_state_dict(wrapped).keys())
        if differ:
            raise LongspanError(
                f"the adapter {self.adapter} does not fit its base model {self.name}: only one of the two has "
                f"{differ[0]}; check base_model_name_or_path in adapter_config.json"
            )
        for p in wrapped.parameters():  # PEFT has frozen them
            if trained.get(p, True):
                p.requires_grad_(True)
        return wrapped.get_base_model()

    def check(self, info: dict[str, Any]) -> None:
        """Check the loading info of `from_pretrained`, if this origin is strict."""
        if self.strict:
            check_weights(self.label, info)

    @contextlib.contextmanager
    def _transformers_errors(self) -> Iterator[None]:
        try:
            yield
        except LongspanError:
            raise
        except Exception as error:
            kinds = {"AutoModelForMaskedLM": "masked LM", "AutoModelForCausalLM": "causal LM"}
            why = first_line(error)
            if (kind := kind_of(self.config)) is not None:
                why = f"it is {kind} ({self.config.model_type})"
            raise LongspanError(
                f"{self.label} cannot be made into a {kinds.get(self.auto.__name__, 'classifier')}: {why}"
            ) from error
