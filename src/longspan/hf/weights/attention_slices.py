"""Cut the attention layers of a model into slices of heads, for `longspan.memory.head_slices`."""

from __future__ import annotations

import copy
import functools
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from longspan.hf.weights.attention_rules import AttentionRules
from longspan.hf.weights.quantized import layers_in_4_bits, values_of
from longspan.memory.head_slices import HeadCut


class AttentionSlices(AttentionRules):
    """The rules of attention's weights in `count` slices of heads. `asked`: `Memory.head_slices`, for errors.

    Raises:
        LongspanError: for attention that cannot be sliced.
    """

    def __init__(self, model: PreTrainedModel, count: int, asked: int) -> None:
        super().__init__(model, count, f"head_slices={asked}", "head_slices=1")
        if getattr(model.config.get_text_config(), "num_kv_shared_layers", 0):
            self.refuse("its layers share keys and values")
        for path in self.norms:
            self.refuse(f"{path} normalizes all heads together")

    def cuts(self) -> dict[str, HeadCut]:
        """Return the cut of each attention layer, by its name."""
        packed = layers_in_4_bits(self.model)
        return {path: self._cut(path, layer, packed) for path, layer in self.attention.items()}

    def _cut(self, path: str, layer: Any, packed: dict[str, Any]) -> HeadCut:
        within = len(path) + 1
        rules = {name[within:]: rule for name, rule in self.of_parameters.items() if name.startswith(f"{path}.")}
        (last,) = (
            name[within:] for name, style in self.styles.items() if style == "rowwise" and name.startswith(f"{path}.")
        )
        unpack = {
            f"{name[within:]}.weight": functools.partial(_unpacked, module)
            for name, module in packed.items()
            if name.startswith(f"{path}.")
        }
        heads = None
        if path in self.fused:
            layer.config = copy.copy(layer.config)  # its numbers of heads change from slice to slice
            heads = tuple((shard.q_heads, shard.kv_heads) for shard in self.heads)
        return HeadCut(self.size, rules, last, unpack, heads)


def _unpacked(layer: Any) -> Tensor:
    return values_of(layer, layer.compute_dtype or layer.quant_state.dtype)
