"""Plan which rows and columns of attention's weights belong to which heads.

transformers' tensor-parallel plan of the model (`base_model_tp_plan`) decides: the first matmuls of attention are split
by rows of the weight ("colwise"), the last by columns ("rowwise"). Parts are ranks of a tensor axis
(`longspan.hf.weights.tensor_rules`), or slices of heads that run one after another (`longspan.memory.head_slices`).
"""

from __future__ import annotations

import itertools
import re
from typing import Any, NoReturn

from torch import Tensor, nn
from transformers import PreTrainedModel

from longspan.comm.tensor import Parts, Rule
from longspan.compat.friends_api import float8_layers
from longspan.compat.reading import EXPERTS, GRADIENT, attention_layers, tensor_plan_of
from longspan.core.errors import LongspanError
from longspan.core.heads import split_groups
from longspan.hf.model.support import draws, heads_of, innermost_decoder
from longspan.hf.weights.quantized import layers_in_4_bits

_INSIDE_EXPERTS = ("packed_colwise", "packed_rowwise", "colwise", "rowwise", "grouped_gemm")  # sharded with them

_WHOLE_OUTPUT = {"colwise_gather_output": "colwise", "rowwise_split_input": "rowwise"}
"""transformers gathers these outputs. longspan does not: each part is computed with its own heads and features."""

FUSED: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("olmo2", "olmo3", "olmoe"), ()),  # norms over all heads
    "phi3": ("qkv_proj", "gate_up_proj"),
    **dict.fromkeys(("glm", "glm4"), ("gate_up_proj",)),
}
"""By `model_type`, for families with these styles: fused projections, whose outputs are queries, keys and values, or
gate and up."""

_OF_KV = ("k_proj", "v_proj", "k_norm")
"""Weights of attention with entries per KV head; the others have entries per query head."""


class AttentionRules:
    """The rules of attention's weights in `size` parts.

    Args:
        model: nothing in it is changed.
        size: number of parts.
        option, without: for errors: the option that asks for the parts, and what to use instead.

    Attributes:
        of_parameters: the rule of every weight, by name.
        regions: the kind of each planned module, by name: here "attention".
        norms: the entries of each part, for norms over the queries or keys of all heads.
        heads: the heads of each part.
        fused: layers with a fused projection, which must know the heads of a part.
        styles: the style of every module that the plan names.
    """

    def __init__(self, model: PreTrainedModel, size: int, option: str, without: str) -> None:
        self.model, self.size, self.option, self.without = model, size, option, without
        self.name = type(model).__name__
        self.modules = dict(model.named_modules())
        self.names = {module: name for name, module in self.modules.items()}
        self.attention, self.decoder = attention_layers(model), innermost_decoder(model)
        self.of_parameters, self.regions = dict[str, Rule](), dict[str, str]()
        self.norms, self.fused = dict[str, Parts](), list[str]()
        self.styles = self._styles()
        self._check_heads()
        self._plan()

    def _plan(self) -> None:
        for path, style in self.styles.items():
            if style in ("colwise", "rowwise"):
                self.linear(path, style)
        self.check_regions()
        for path, layer in self.attention.items():
            for name, p in layer.named_parameters(prefix=path):
                if name not in self.of_parameters:
                    self.rest_of_region(name, p, path)
            self.check_draws(layer)

    def _planned(self, path: str) -> bool:
        """Return whether these rules are about a module."""
        return path.rpartition(".")[0] in self.attention

    def _styles(self) -> dict[str, str]:
        """Return the style of every module that the plan names."""
        config = self.model.config.get_text_config()
        plan = tensor_plan_of(config)
        if not plan:
            self.refuse(f"transformers has no tensor-parallel plan for {config.model_type} (base_model_tp_plan)")
        decoder, styles = self.names[self.decoder], dict[str, str]()
        experts = tuple(f"{pattern}." for pattern, style in plan.items() if style == EXPERTS)
        for pattern, style in plan.items():
            of_experts = pattern.startswith(experts) and style in _INSIDE_EXPERTS
            paths = re.compile(re.escape(f"{decoder}.{pattern}").replace(r"\*", r"[^.]+"))
            for path in self.modules:
                if of_experts or not paths.fullmatch(path) or not self._planned(path):
                    continue
                known = _WHOLE_OUTPUT.get(style, style)
                if known not in ("colwise", "rowwise", GRADIENT, EXPERTS):
                    self.refuse(f"its plan has the style {style!r} for layer {path}, which is not supported")
                if known != style and config.model_type not in FUSED:
                    self.refuse(f"its plan has the style {style!r} for layer {path}, whose outputs may be in any order")
                styles[path] = known
        return styles

    def _check_heads(self) -> None:
        self.q_heads, self.kv_heads = heads_of(self.model.config)
        self.model_type: str = self.model.config.get_text_config().model_type
        self.heads = split_groups(self.q_heads, self.kv_heads, self.size)
        if not all(shard.q_heads for shard in self.heads):
            self.refuse_size("query heads", self.q_heads, even=False)
        for path, layer in self.attention.items():
            own = getattr(layer, "num_key_value_heads", self.kv_heads), getattr(layer, "num_heads", self.q_heads)
            if own != (self.kv_heads, self.q_heads):
                self.refuse(f"layer {path} has {own[1]} query and {own[0]} KV heads, not as its config")

    def is_of_kv(self, path: str) -> bool:
        """Return whether a module has entries per KV head."""
        return path.rpartition(".")[2] in _OF_KV

    def _of_heads(self, path: str, width: int, name: str = "") -> Parts:
        """Return the entries of each part's query or KV heads."""
        kv = self.is_of_kv(name or path)
        count = self.kv_heads if kv else self.q_heads
        if width % count:
            self.refuse(f"{path} has {width} features, not a multiple of its {count} heads")
        each = width // count
        heads = [(h.kv_start, h.kv_stop) if kv else (h.q_start, h.q_stop) for h in self.heads]
        return Parts(width, tuple(((start * each, stop * each),) for start, stop in heads))

    def _outputs(self, path: str, width: int) -> Parts:
        """Return each part's outputs of a column-wise projection."""
        if path.rpartition(".")[2] not in FUSED.get(self.model_type, ()):
            return self._of_heads(path, width)
        each = width // (self.q_heads + 2 * self.kv_heads)
        if each * (self.q_heads + 2 * self.kv_heads) != width:
            self.refuse(f"{path} has {width} features, not as many as its queries, keys and values")
        self.fused.append(path.rpartition(".")[0])
        counts = {"q_proj": self.q_heads, "k_proj": self.kv_heads, "v_proj": self.kv_heads}
        return concatenated([self._of_heads(path, each * count, name) for name, count in counts.items()])

    def _inputs(self, path: str, width: int) -> Parts:
        """Return each part's inputs of a row-wise projection."""
        return self._of_heads(path, width)

    def linear(self, path: str, style: str) -> None:
        module, owner = self.modules[path], path.rpartition(".")[0]
        base: Any = getattr(module, "base_layer", module)
        self._check_linear(path, base)
        at = f"{path}.base_layer" if base is not module else path
        if style == "colwise":
            rule = self._shard(self._outputs(path, base.out_features), 0, path)
            self.add_rule(base, at, weight=rule, bias=rule)
            self._adapters(module, path, Rule(partial=True), rule, rule)
        else:
            rule = self._shard(self._inputs(path, base.in_features), 1, path)
            bias = Rule(partial=True, first=True)
            self.add_rule(base, at, weight=rule, bias=bias)
            self._adapters(module, path, rule, Rule(partial=True), bias)
        self.regions[owner] = "attention" if owner in self.attention else "mlp"

    def _check_linear(self, path: str, base: nn.Module) -> None:
        if type(base) is not nn.Linear and base not in layers_in_4_bits(self.model).values():
            scales = ", whose scale of a token spans all heads" if float8_layers(base) else ""
            self.refuse(f"layer {path} is not a linear layer ({type(base).__name__}{scales})")

    def _shard(self, parts: Parts, dim: int, path: str) -> Rule:
        """Return the rule of a weight whose `dim` is computed in these parts."""
        return Rule(dim, parts=parts)

    def add_rule(self, module: nn.Module, path: str, **rules: Rule) -> None:
        for name, _ in module.named_parameters(recurse=False):
            self.of_parameters[f"{path}.{name}"] = rules[name]

    def _adapters(self, module: nn.Module, path: str, a: Rule, b: Rule, bias: Rule) -> None:
        """Split LoRA with its layer: B A x is linear in both, so shards of either give parts of the sum."""
        for name, p in module.named_parameters():
            kind, _, rest = name.partition(".")
            own = rest.rpartition(".")[2]
            if name in ("weight", "bias") or kind == "base_layer":
                continue
            if kind not in ("lora_A", "lora_B") or own not in ("weight", "bias") or p.dim() != (own == "weight") + 1:
                self.refuse(f"layer {path} has the adapter weight {name}; only LoRA's A and B can be sharded with it")
            rule = a if kind == "lora_A" else bias if own == "bias" else b
            self.of_parameters[f"{path}.{name}"] = rule

    def check_regions(self) -> None:
        """Raise unless every attention and MLP has a column-wise first and a row-wise last matmul."""
        for path in self.regions:
            if self.regions[path] == "moe":
                continue
            own = {style for name, style in self.styles.items() if name.rpartition(".")[0] == path}
            if not {"colwise", "rowwise"} <= own:
                self.refuse(f"the plan of layer {path} lacks a colwise or a rowwise matmul (it has {sorted(own)})")
        for path in self.attention:
            if path not in self.regions:
                self.refuse(f"its plan lacks the attention layer {path}")

    def rest_of_region(self, name: str, p: Tensor, region: str) -> None:
        """Add a weight between the matmuls: sinks, norms of a head or over all heads."""
        owner, _, own = name.rpartition(".")
        if own == "sinks" and owner == region and tuple(p.shape) == (self.q_heads,):
            self.of_parameters[name] = self._shard(self._of_heads(name, self.q_heads), 0, owner)
        elif any(style == GRADIENT and name.startswith(f"{path}.") for path, style in self.styles.items()):
            self.of_parameters[name] = Rule(partial=True)
        elif self._normalizes_all_heads(owner, region):
            self.norms[owner] = parts = self._of_heads(owner, p.numel())
            self.of_parameters[name] = self._shard(parts, 0, owner)
        else:
            self.refuse(f"its plan lacks {name}")

    def _normalizes_all_heads(self, path: str, region: str) -> bool:
        """Return whether a module is an RMS norm over the queries or the keys of all heads at once."""
        owner, _, own = path.rpartition(".")
        norm, projection = self.modules[path], self.modules.get(f"{owner}.{own[0]}_proj")
        return (
            owner == region
            and own in ("q_norm", "k_norm")
            and isinstance(getattr(norm, "variance_epsilon", None), float)
            and [tuple(p.shape) for p in norm.parameters()] == [(getattr(projection, "out_features", None),)]
        )

    def check_draws(self, within: nn.Module) -> None:
        for module in within.modules():
            if draws(module):
                self.refuse(
                    f"layer {self.names[module]} draws random numbers (dropout), which would differ between its parts; "
                    "set it to 0"
                )

    def refuse(self, why: str) -> NoReturn:
        raise LongspanError(f"`{self.option}` cannot split {self.name}: {why}; use `{self.without}`")

    def refuse_size(self, what: str, count: int, even: bool = True) -> NoReturn:
        self.refuse(f"it has only {count} {what}")


def concatenated(every: list[Parts]) -> Parts:
    """Concatenate several outputs: each part has its entries of each."""
    starts = list(itertools.accumulate((parts.length for parts in every), initial=0))
    spans = [
        tuple((start + a, start + b) for start, parts in zip(starts, every, strict=False) for a, b in parts.spans[rank])
        for rank in range(len(every[0].spans))
    ]
    return Parts(starts[-1], tuple(spans))
