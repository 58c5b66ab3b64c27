"""Plan tensor parallelism: how each weight of a Hugging Face model is sharded over the `tensor` axis.

transformers' plan of the model (`base_model_tp_plan`) decides: the first matmuls of attention and MLP are sharded by
columns, the last by rows, embedding and head by the vocabulary, experts one by one.
"""

from __future__ import annotations

import itertools
import re
from typing import Literal, NoReturn

from torch import Tensor, nn
from transformers import PreTrainedModel

from longspan.comm.tensor import Parts, Rule
from longspan.compat.reading import attention_layers
from longspan.core.errors import LongspanError
from longspan.core.heads import HeadShard, split_groups
from longspan.core.tile_sizes import even_span
from longspan.hf.model.support import decoder_of, draws, heads_of

TensorStyle = Literal["tp", "megatron-sp"]
STYLES = ("tp", "megatron-sp")

_EXPERTS = "moe_tp_experts"
_INSIDE_EXPERTS = ("packed_colwise", "packed_rowwise", "colwise", "rowwise", "grouped_gemm")  # sharded with them
_GRADIENT = "replicated_with_grad_allreduce"

_ATTENTION = {**{f"layers.*.self_attn.{x}_proj": "colwise" for x in "qkv"}, "layers.*.self_attn.o_proj": "rowwise"}
_MLP = {"layers.*.mlp.gate_proj": "colwise", "layers.*.mlp.up_proj": "colwise", "layers.*.mlp.down_proj": "rowwise"}
_HUNYUAN = {**_ATTENTION, **{f"layers.*.self_attn.{x}_layernorm": _GRADIENT for x in ("query", "key")}}
_LATENT = {  # every rank computes the latent vectors of all heads
    **{f"layers.*.self_attn.{x}": _GRADIENT for x in ("q_a_proj", "kv_a_proj_with_mqa")},
    **{f"layers.*.self_attn.{x}_a_layernorm": _GRADIENT for x in ("q", "kv")},
    **{f"layers.*.self_attn.{x}": "colwise" for x in ("q_proj", "q_b_proj", "kv_b_proj")},
    "layers.*.self_attn.o_proj": "rowwise",
}
PLANS: dict[str, dict[str, str]] = {
    "gpt_oss": {**_ATTENTION, "layers.*.mlp.experts": _EXPERTS},
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "granitemoe": _ATTENTION,
    "hunyuan_v1_dense": {**_HUNYUAN, **_MLP},
    "hunyuan_v1_moe": _HUNYUAN,
}
"""By `model_type`, styles that transformers' plan of a family lacks."""

_WHOLE_OUTPUT = {"colwise_gather_output": "colwise", "rowwise_split_input": "rowwise"}
"""transformers gathers these outputs. longspan does not: each rank computes with its own heads and features."""

FUSED: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("olmo2", "olmo3", "olmoe"), ()),  # norms over all heads
    "phi3": ("qkv_proj", "gate_up_proj"),
    **dict.fromkeys(("glm", "glm4"), ("gate_up_proj",)),
}
"""By `model_type`, for families with these styles: fused projections, whose outputs are queries, keys and values, or
gate and up."""

_OF_KV = ("k_proj", "v_proj", "k_norm")
"""Weights of attention with entries per KV head; the others have entries per query head."""


class TensorRules:
    """How `TensorParallel` changes a model, on one rank of a tensor group; nothing is changed yet.

    `others`: ranks of the sequence group, for the mesh that an error suggests.
    """

    def __init__(self, model: PreTrainedModel, size: int, rank: int, style: TensorStyle, others: int = 1) -> None:
        self.model, self.size, self.rank, self.style, self.others = model, size, rank, style, others
        self.name = type(model).__name__
        self.modules = dict(model.named_modules())
        self.names = {module: name for name, module in self.modules.items()}
        self.attention = attention_layers(model)
        self.of_parameters = dict[str, Rule]()  # of every parameter, by name
        # Modules between collectives: "attention" or "mlp" (with shards of weights), "moe" (with my tokens).
        self.regions = dict[str, str]()
        self.experts = list[str]()  # modules of which each rank holds some experts
        # PEFT's outermost modules around single weights (of a router), whose forwards read the weights.
        wrapped = (path for path, module in self.modules.items() if hasattr(module, "parameter_name"))
        self.adapted = [path for path in wrapped if not path.endswith(".base_layer")]
        # Norms over the queries or keys of all heads, with the weight of each of my entries in the mean: 1 over the
        # number of ranks that hold it.
        self.norms = dict[str, list[float]]()
        self.heads: tuple[HeadShard, ...] = ()  # of each rank
        self.fused = list[str]()  # layers with a fused projection, which must know this rank's heads
        self._plan()

    def _plan(self) -> None:
        styles = self._styles()
        self._check_heads()
        for path, style in styles.items():
            if style == _EXPERTS:
                self._experts(path)
        inside = tuple(f"{path}." for path, kind in self.regions.items() if kind == "moe")
        for path, style in styles.items():
            if style in ("colwise", "rowwise") and not path.startswith(inside):
                self._linear(path, style)
        self._check_regions(styles)
        self._vocabulary()
        self._rest(styles, inside)

    def _styles(self) -> dict[str, str]:
        """Return the style of every module that the plan names."""
        config = self.model.config.get_text_config()
        own = getattr(config, "base_model_tp_plan", None) or {}
        # The embedding is sharded by the vocabulary in any case. Some plans name nothing else.
        own = {pattern: style for pattern, style in own.items() if not style.startswith("embedding")}
        plan = {**own, **PLANS.get(config.model_type, {})}
        if not plan:
            self._refuse(f"transformers has no tensor-parallel plan for {config.model_type} (base_model_tp_plan)")
        decoder, styles = self.names[decoder_of(self.model)], dict[str, str]()
        experts = tuple(f"{pattern}." for pattern, style in plan.items() if style == _EXPERTS)
        for pattern, style in plan.items():
            of_experts = pattern.startswith(experts) and style in _INSIDE_EXPERTS
            paths = re.compile(re.escape(f"{decoder}.{pattern}").replace(r"\*", r"[^.]+"))
            for path in self.modules:
                if of_experts or not paths.fullmatch(path):
                    continue
                known = _WHOLE_OUTPUT.get(style, style)
                if known not in ("colwise", "rowwise", _GRADIENT, _EXPERTS):
                    self._refuse(f"its plan has the style {style!r} for layer {path}, which is not supported")
                if known != style and config.model_type not in FUSED:
                    self._refuse(
                        f"its plan has the style {style!r} for layer {path}, whose outputs may be in any order"
                    )
                styles[path] = known
        return styles

    def _check_heads(self) -> None:
        self.q_heads, self.kv_heads = heads_of(self.model.config)
        self.model_type: str = self.model.config.get_text_config().model_type
        self.heads = split_groups(self.q_heads, self.kv_heads, self.size)
        if not all(shard.q_heads for shard in self.heads):
            self._refuse_size("query heads", self.q_heads, even=False)
        for path, layer in self.attention.items():
            own = getattr(layer, "num_key_value_heads", self.kv_heads), getattr(layer, "num_heads", self.q_heads)
            if own != (self.kv_heads, self.q_heads):
                self._refuse(f"layer {path} has {own[1]} query and {own[0]} KV heads, not as its config")

    def _of_heads(self, path: str, width: int, name: str = "") -> Parts:
        """Return the entries of each rank's query or KV heads."""
        kv = (name or path.rpartition(".")[2]) in _OF_KV
        count = self.kv_heads if kv else self.q_heads
        if width % count:
            self._refuse(f"{path} has {width} features, not a multiple of its {count} heads")
        each = width // count
        heads = [(h.kv_start, h.kv_stop) if kv else (h.q_start, h.q_stop) for h in self.heads]
        return Parts(width, tuple(((start * each, stop * each),) for start, stop in heads))

    def _of_features(self, path: str, width: int) -> Parts:
        """Return each rank's features between the matmuls of an MLP."""
        spans = [even_span(width, rank, self.size) for rank in range(self.size)]
        if not all(start < stop for start, stop in spans):
            self._refuse_size(f"features between the matmuls of {path}", width)
        return Parts(width, tuple((span,) for span in spans))

    def _outputs(self, path: str, width: int, attends: bool) -> Parts:
        """Return each rank's outputs of a column-wise projection."""
        own = path.rpartition(".")[2]
        if own not in FUSED.get(self.model_type, ()):
            return self._of_heads(path, width) if attends else self._of_features(path, width)
        if not attends:
            return _concatenated([self._of_features(path, width // 2)] * 2)
        each = width // (self.q_heads + 2 * self.kv_heads)
        if each * (self.q_heads + 2 * self.kv_heads) != width:
            self._refuse(f"{path} has {width} features, not as many as its queries, keys and values")
        self.fused.append(path.rpartition(".")[0])
        counts = {"q_proj": self.q_heads, "k_proj": self.kv_heads, "v_proj": self.kv_heads}
        return _concatenated([self._of_heads(path, each * count, name) for name, count in counts.items()])

    def _linear(self, path: str, style: str) -> None:
        module = self.modules[path]
        base = getattr(module, "base_layer", module)
        weight = getattr(base, "weight", None)
        if not isinstance(base, nn.Linear) or not isinstance(weight, Tensor) or not weight.is_floating_point():
            self._refuse(f"layer {path} is not a linear layer with floating-point weights ({type(base).__name__})")
        at = f"{path}.base_layer" if base is not module else path
        owner = path.rpartition(".")[0]
        attends = owner in self.attention
        if style == "colwise":
            rule = self._shard(self._outputs(path, base.out_features, attends), 0, path)
            self._rule(base, at, weight=rule, bias=rule)
            self._adapters(module, path, Rule(partial=True), rule, rule)
        else:
            width = base.in_features
            rule = self._shard(self._of_heads(path, width) if attends else self._of_features(path, width), 1, path)
            bias = Rule(partial=True, first=True)
            self._rule(base, at, weight=rule, bias=bias)
            self._adapters(module, path, rule, Rule(partial=True), bias)
        self.regions[owner] = "attention" if attends else "mlp"

    def _shard(self, parts: Parts, dim: int, path: str) -> Rule:
        """Return the rule of a weight of which each rank computes with its `parts` of `dim`."""
        if parts.even:
            return Rule(dim)
        if self.kv_heads < self.size and path.rpartition(".")[2] in _OF_KV:
            return Rule(partial=True, parts=parts)  # small, and needed by several ranks: replicate it
        return Rule(dim, parts=parts)

    def _rule(self, module: nn.Module, path: str, **rules: Rule) -> None:
        for name, _ in module.named_parameters(recurse=False):
            self.of_parameters[f"{path}.{name}"] = rules[name]

    def _adapters(self, module: nn.Module, path: str, a: Rule, b: Rule, bias: Rule) -> None:
        """Shard LoRA with its layer: B A x is linear in both, so shards of either give parts of the sum."""
        for name, p in module.named_parameters():
            kind, _, rest = name.partition(".")
            own = rest.rpartition(".")[2]
            if name in ("weight", "bias") or kind == "base_layer":
                continue
            if kind not in ("lora_A", "lora_B") or own not in ("weight", "bias") or p.dim() != (own == "weight") + 1:
                self._refuse(f"layer {path} has the adapter weight {name}; only LoRA's A and B can be sharded with it")
            rule = a if kind == "lora_A" else bias if own == "bias" else b
            self.of_parameters[f"{path}.{name}"] = rule

    def _check_regions(self, styles: dict[str, str]) -> None:
        """Raise unless every attention and MLP has a column-wise first and a row-wise last matmul."""
        for path in self.regions:
            if self.regions[path] == "moe":
                continue
            own = {style for name, style in styles.items() if name.rpartition(".")[0] == path}
            if not {"colwise", "rowwise"} <= own:
                self._refuse(f"the plan of layer {path} lacks a colwise or a rowwise matmul (it has {sorted(own)})")
        for path in self.attention:
            if path not in self.regions:
                self._refuse(f"its plan lacks the attention layer {path}")

    def _experts(self, path: str) -> None:
        module, owner = self.modules[path], path.rpartition(".")[0]
        if hasattr(module, "base_layer"):
            self._refuse(f"layer {path} has LoRA on experts, which are sharded with it by `experts` only")
        count = getattr(module, "num_experts", None)
        weights = dict(module.named_parameters(recurse=False))
        inner = [name for name, _ in module.named_parameters() if name not in weights]
        if not isinstance(count, int) or inner or any(len(p) != count for p in weights.values()):
            self._refuse(f"layer {path} ({type(module).__name__}) does not stack its experts in one tensor per weight")
        if not all(start < stop for start, stop in (even_span(count, r, self.size) for r in range(self.size))):
            self._refuse_size(f"experts in {path}", count)
        self._rule(module, path, **dict.fromkeys(weights, Rule(0)))
        self.regions[owner] = "moe"
        self.experts.append(path)

    def _vocabulary(self) -> None:
        embedding, head = self.model.get_input_embeddings(), self.model.get_output_embeddings()
        if self.model.loss_type != "ForCausalLM" or not isinstance(head, nn.Linear):
            self._refuse("only a causal LM with a linear head can be sharded by its vocabulary")
        if not isinstance(embedding, nn.Embedding):
            self._refuse(f"its embedding is a {type(embedding).__name__}")
        for module in (embedding, head):
            entries = len(module.weight)
            if even_span(entries, self.size - 1, self.size)[0] == entries:
                self._refuse_size(f"entries of the vocabulary in {self.names[module]}", entries)
            if next(module.children(), None) is not None:
                self._refuse(f"{self.names[module]} has adapters")
            self._rule(module, self.names[module], weight=Rule(0), bias=Rule(0))

    def _rest(self, styles: dict[str, str], moe: tuple[str, ...]) -> None:
        """Add the weights that no style names: replicated, except sinks and norms over all heads."""
        decoder = f"{self.names[decoder_of(self.model)]}."
        tied = {id(self.model.get_parameter(name)) for name in self.of_parameters}
        for name, p in self.model.named_parameters():
            owner, _, own = name.rpartition(".")
            if name in self.of_parameters or id(p) in tied:
                continue
            region = next((x for x in self.regions if name.startswith(f"{x}.")), None)
            if region is None or name.startswith(moe):
                of_tokens = self.style == "megatron-sp" and name.startswith(decoder)
                self.of_parameters[name] = Rule(partial=of_tokens or region is not None)
            elif own == "sinks" and owner == region and tuple(p.shape) == (self.q_heads,):
                self.of_parameters[name] = self._shard(self._of_heads(name, self.q_heads), 0, owner)
            elif any(style == _GRADIENT and name.startswith(f"{path}.") for path, style in styles.items()):
                self.of_parameters[name] = Rule(partial=True)
            elif self._normalizes_all_heads(owner, region):
                parts = self._of_heads(owner, p.numel())
                self.of_parameters[name] = self._shard(parts, 0, owner)
                self.norms[owner] = _weights(parts, self.rank)
            else:
                self._refuse(f"its plan lacks {name}")
        for module in self.model.modules():
            if draws(module):
                self._refuse(
                    f"layer {self.names[module]} draws random numbers (dropout), which would differ between the ranks "
                    "of a tensor group; set it to 0"
                )

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

    def _refuse(self, why: str) -> NoReturn:
        raise LongspanError(f"`tensor={self.size}` cannot shard {self.name}: {why}; use `{self._mesh(1)}`")

    def _refuse_size(self, what: str, count: int, even: bool = True) -> NoReturn:
        total = self.size * self.others
        fits = max(t for t in range(1, self.size) if total % t == 0 and self._fits(t, count if even else t))
        raise LongspanError(
            f"`tensor={self.size}` would leave a rank without any of the {count} {what} of {self.name}; try "
            f"`{self._mesh(fits)}`"
        )

    def _fits(self, t: int, count: int) -> bool:
        heads = split_groups(self.q_heads, self.kv_heads, t)
        return all(shard.q_heads for shard in heads) and even_span(count, t - 1, t)[0] < count

    def _mesh(self, tensor: int) -> str:
        return f"tensor={tensor}, ulysses={self.size * self.others // tensor}"


def _concatenated(every: list[Parts]) -> Parts:
    """Concatenate several outputs: each rank has its parts of each."""
    starts = list(itertools.accumulate((parts.length for parts in every), initial=0))
    spans = [
        tuple((start + a, start + b) for start, parts in zip(starts, every, strict=False) for a, b in parts.spans[rank])
        for rank in range(len(every[0].spans))
    ]
    return Parts(starts[-1], tuple(spans))


def _weights(parts: Parts, rank: int) -> list[float]:
    """Return for each entry of this rank: 1 over the number of ranks that hold it."""
    spans = [span for spans in parts.spans for span in spans]
    mine = [entry for start, stop in parts.spans[rank] for entry in range(start, stop)]
    return [1 / sum(start <= entry < stop for start, stop in spans) for entry in mine]
