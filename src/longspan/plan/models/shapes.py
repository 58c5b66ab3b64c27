"""The shape of a causal language model: its layers and every weight, read from its `config.json`.

Names and shapes of weights are those of transformers 5, which keeps a layer's experts in one tensor. For the model
types in `FAMILIES` they are exact: tests compare them with transformers' own modules. Sizes are elements, not bytes.
Needs the standard library alone.
"""

from __future__ import annotations

import difflib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from longspan.core.checked import LARGEST_COUNT, check_number, existing_path, read_text, spell
from longspan.core.errors import LongspanError
from longspan.plan.models.catalogue import CONFIGS

_MOST_LAYERS = 1 << 14

Kind = Literal["full", "sliding", "chunked", "linear"]


@dataclass(frozen=True)
class Parameter:
    """One weight tensor."""

    name: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements of the tensor."""
        return math.prod(self.shape)


@dataclass(frozen=True, eq=False)
class LayerShape:
    """One decoder layer. Equal layers of a model are one object, so that what is computed for one serves all.

    Attributes:
        kind: what its queries see: all tokens before them, a sliding window, their chunk, or a recurrent state.
        q_heads: query heads, as the attention exchanges them. Of a linear layer: heads of the values.
        kv_heads: key and value heads. With multi-head latent attention (MLA) those of the expanded keys, `q_heads`. Of
            a linear layer: heads of the queries and keys.
        head_dim: elements of one query or key head (MLA: with and without position).
        v_head_dim: elements of one value head.
        window: tokens in the sliding window, or of a chunk; None for the other kinds.
        ffn: intermediate size of the dense MLP, 0 where the layer has experts only.
        gated: whether an MLP has three matrices (SwiGLU and its like) or two.
        experts: routed experts, 0 in a dense layer.
        experts_per_token: routed experts that compute one token.
        expert_ffn: intermediate size of one routed expert.
        shared_ffn: intermediate size of the experts that see every token, together.
        latent_dim: elements per token of MLA's compressed cache, 0 otherwise.
        state_elements: elements of a linear layer's recurrent state (value heads * Dk * Dv), 0 otherwise.
        sinks: whether each query head has a learnt attention sink.
        parameters: every weight, named relative to the layer, in the order of the module's own.
    """

    kind: Kind
    q_heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    window: int | None
    ffn: int
    gated: bool
    experts: int = 0
    experts_per_token: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    latent_dim: int = 0
    state_elements: int = 0
    sinks: bool = False
    parameters: tuple[Parameter, ...] = ()

    @cached_property
    def params(self) -> int:
        """Elements of all weights."""
        return sum(p.numel for p in self.parameters)

    @cached_property
    def active_params(self) -> int:
        """Elements of the weights that one token meets: of the routed experts, only those chosen for it."""
        return sum(self._active(p) for p in self.parameters)

    @cached_property
    def matmul_params_active(self) -> int:
        """Of `active_params`, what is multiplied with each token: matrices and convolutions, not norms, biases, sinks.

        A forward pass computes 2 FLOPs per token with each, besides the attention itself.
        """
        return sum(self._active(p) for p in self.parameters if len(p.shape) > 1 and not p.name.endswith("bias"))

    @cached_property
    def kv_elements_per_token(self) -> int:
        """Elements that the cache holds for one token; 0 in a linear layer, whose state does not grow."""
        if self.kind == "linear":
            return 0
        return self.latent_dim or self.kv_heads * (self.head_dim + self.v_head_dim)

    def _active(self, p: Parameter) -> int:
        # Routed experts are stacked along the first dimension.
        return p.numel // self.experts * self.experts_per_token if p.name.startswith("mlp.experts.") else p.numel


@dataclass(frozen=True, eq=False)
class ModelShape:
    """A causal language model.

    Attributes:
        name: as asked for.
        d_model: hidden size.
        vocab: rows of the embedding.
        tied: whether the head is the embedding.
        max_position: tokens the model is made for, None where the config does not say.
        layers: in order; repeated layers are the same object.
        root: weights outside the layers: embeddings, learnt positions, final norm, and the head unless tied.
        assumption: what had to be assumed to read the config, None where nothing was.
    """

    name: str
    d_model: int
    vocab: int
    tied: bool
    max_position: int | None
    layers: tuple[LayerShape, ...]
    root: tuple[Parameter, ...]
    assumption: str | None = None

    @cached_property
    def root_params(self) -> int:
        """Elements of the weights outside the layers."""
        return sum(p.numel for p in self.root)

    @cached_property
    def params(self) -> int:
        """Elements of all weights; a tied head counts once."""
        return self.root_params + sum(layer.params * count for layer, count in self.layer_kinds)

    @cached_property
    def active_params(self) -> int:
        """Elements of the weights that one token meets, embedding and head included."""
        return self.root_params + sum(layer.active_params * count for layer, count in self.layer_kinds)

    @cached_property
    def layer_kinds(self) -> list[tuple[LayerShape, int]]:
        """Distinct layers in order of first appearance, and how often each occurs."""
        counts: dict[LayerShape, int] = {}
        for layer in self.layers:
            counts[layer] = counts.get(layer, 0) + 1
        return list(counts.items())

    @cached_property
    def q_heads(self) -> int:
        """Largest number of query heads of a softmax attention layer; of any layer where there is no such."""
        return max(layer.q_heads for layer in self._with_softmax)

    @cached_property
    def kv_heads(self) -> int:
        """Largest number of key and value heads, of the same layers as `q_heads`."""
        return max(layer.kv_heads for layer in self._with_softmax)

    @property
    def _with_softmax(self) -> list[LayerShape]:
        distinct = [layer for layer, _ in self.layer_kinds]
        return [layer for layer in distinct if layer.kind != "linear"] or distinct


def read_model(name_or_path: str | os.PathLike[str]) -> ModelShape:
    """The shape of a built-in model, or of the model whose `config.json`, or folder with one, is at a path.

    Built-in names may be written as on the Hugging Face hub ("meta-llama/Llama-2-70b-hf"). A name in the catalogue goes
    before a folder of that name in the current directory: write "./llama-2-7b" for the folder.

    Raises:
        LongspanError: for an unknown name (the nearest are named), a file that is missing or is not a JSON object, and
            what `shape_from_config` refuses.
    """
    if not isinstance(name_or_path, str | os.PathLike):
        raise LongspanError(f"model {spell(name_or_path)} is no name and no path; there are {', '.join(CONFIGS)}")
    name_or_path = os.fspath(name_or_path)
    if name_or_path.lower() in CONFIGS:
        return shape_from_config(CONFIGS[name_or_path.lower()], name_or_path.lower())
    path = existing_path("--model", name_or_path)
    if path is not None or name_or_path.endswith(".json") or name_or_path.startswith((".", "/", "~")):
        return shape_from_config(_read_json(path or Path(name_or_path)), name_or_path)
    name = _plain_name(name_or_path)
    if name in CONFIGS:
        return shape_from_config(CONFIGS[name], name)
    close = difflib.get_close_matches(name, CONFIGS, n=3, cutoff=0.5)
    nearest = f"did you mean {' or '.join(close)}?" if close else f"there are {', '.join(CONFIGS)}."
    raise LongspanError(
        f"model {name_or_path} is not built in; {nearest} For another model give the path of its config.json"
    )


def _plain_name(name: str) -> str:
    """A hub name without what does not change the shape: the owner, and words for the format or the fine-tuning."""
    words = name.lower().rstrip("/").rsplit("/", 1)[-1].split("-")
    plain = "-".join(word for word in words if word not in ("hf", "meta", "chat", "instruct", "it", "pt"))
    return "mistral-7b" if plain == "mistral-7b-v0.1" else plain


def _read_json(path: Path) -> dict[str, Any]:
    if path.is_dir():
        if not (path / "config.json").exists():
            raise LongspanError(f"the folder {path} has no config.json; give a folder that has one, or the file itself")
        path = path / "config.json"
    if not path.exists():
        raise LongspanError(f"there is no file {path}; give the path of a config.json, or one of {', '.join(CONFIGS)}")
    text = read_text("--model", path)
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise LongspanError(f"{path} is not JSON ({error}); give the config.json of a Hugging Face model") from error
    if not isinstance(config, dict):
        raise LongspanError(
            f"{path} holds a JSON {type(config).__name__}, not an object; give the config.json of a Hugging Face model"
        )
    return config


def shape_from_config(config: Mapping[str, Any], name: str) -> ModelShape:
    """The shape that transformers 5 gives to a config: a `config.json` as a dictionary.

    Keys that are left out have the defaults of the config class, except for the sizes that every model must state. Of a
    multimodal model the text part is read. A config of another model type is read as a Llama's if it has all that a
    Llama's has and nothing that a Llama has not; `assumption` then says so, as biases or norms may be missing.

    Args:
        config: the keys of a `config.json`.
        name: for the shape and for messages.

    Raises:
        LongspanError: for a model type that is not supported, missing sizes (all are named), and impossible values.
    """
    text = config.get("text_config")
    if isinstance(text, Mapping):
        outer = {key: config[key] for key in ("model_type", "tie_word_embeddings") if key in config}
        config = {**outer, **text}
    model_type = str(config.get("model_type", "")).removesuffix("_text")
    family = FAMILIES.get(model_type)
    assumption = None
    if family is None:
        family = _LLAMA_LIKE
        _refuse_unless_llama_like(config, name, family)
        assumption = f"model_type {config.get('model_type')!r} is not known; read as a Llama's"
    missing = family.missing(config)
    if missing:
        raise LongspanError(
            f"{name} has no {', '.join(missing)}; a config.json of model_type {model_type!r} must state "
            f"{'it' if len(missing) == 1 else 'them'}"
        )
    return _shape(_Config(config, family, name), assumption)


def _refuse_unless_llama_like(config: Mapping[str, Any], name: str, family: _Family) -> None:
    foreign = sorted(key for key, value in config.items() if value and key.startswith(_FOREIGN))
    missing = [key for key in (*family.missing(config), "rms_norm_eps") if config.get(key) is None]
    activation = config.get("hidden_act")
    reasons = []
    if foreign:
        reasons.append(f"it has {', '.join(foreign)}")
    if missing:
        reasons.append(f"it has no {', '.join(missing)}")
    if activation not in ("silu", "swish"):
        reasons.append(f"its hidden_act is {activation!r}, not 'silu'")
    if config.get("sliding_window") and config.get("layer_types") is None and config.get("use_sliding_window", True):
        reasons.append(f"it has sliding_window={config['sliding_window']} but no layer_types to say where")
    if reasons:
        raise LongspanError(
            f"{name}: model_type {config.get('model_type')!r} is not supported, and it cannot be read as a Llama's: "
            f"{'; '.join(reasons)}. Supported are {', '.join(sorted(FAMILIES))}"
        )


# Keys of models that are more than, or other than, Llama's layers: state spaces and other recurrences, encoders,
# experts, latent attention, normed or shared heads, other modalities.
_FOREIGN = (
    "mamba", "ssm", "state_size", "d_state", "time_step", "conv_", "linear_", "attn_layer_", "recurrent", "rwkv",
    "is_encoder_decoder", "encoder_", "decoder_", "num_decoder", "cross_attention", "add_cross_attention",
    "num_experts", "num_local_experts", "n_routed_experts", "moe_", "kv_lora_rank", "q_lora_rank", "qk_", "use_qk",
    "use_bidirectional", "num_kv_shared_layers", "hidden_size_per_layer_input", "parallel_attn", "use_parallel",
    "vision_", "audio_", "H_cycles", "L_cycles",
)  # fmt: skip


# How a config is read.


@dataclass(frozen=True)
class _Slot:
    """What tells the layers of one model apart."""

    kind: Kind
    window: int | None
    sparse: bool


@dataclass(frozen=True)
class _Heads:
    q: int
    kv: int
    dim: int
    v_dim: int
    latent_dim: int = 0
    state_elements: int = 0


@dataclass(frozen=True)
class _Family:
    """How transformers builds one model type.

    Attributes:
        attention: weights of a layer's attention.
        mlp: weights of a layer's MLP or experts.
        defaults: of the config class, where they are not those of `_Config`.
        spellings: other names of a key, the usual one of this model type first.
        heads: the attention's sizes.
        order: the parts of a layer in the order of its parameters; what is not the attention or the MLP is a norm.
        types: layer types where the config lists none.
        listed: whether transformers reads `layer_types`.
        kinds: the kinds that it builds.
        sparse: whether a layer has experts.
        expert_ffn: the key of an expert's intermediate size.
        shared_ffn: intermediate size of the shared experts.
        gated: whether the MLP is.
        sinks: whether the attention has sinks.
        root: names of the embedding, the learnt positions if any, and the final norm.
        norm_bias: whether norms have a bias (LayerNorm) or not (RMSNorm).
    """

    attention: Callable[[_Config, _Slot], Iterator[Parameter]]
    mlp: Callable[[_Config, _Slot], Iterator[Parameter]]
    defaults: Mapping[str, Any]
    spellings: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    heads: Callable[[_Config, Kind], _Heads] = lambda c, kind: _grouped(c)
    order: tuple[str, ...] = ("attention", "mlp", "input_layernorm", "post_attention_layernorm")
    types: Callable[[_Config, int], str] = lambda c, layer: "full_attention"
    listed: bool = False
    kinds: tuple[Kind, ...] = ("full", "sliding")
    sparse: Callable[[_Config, int], bool] = lambda c, layer: False
    expert_ffn: str = "moe_intermediate_size"
    shared_ffn: Callable[[_Config], int] = lambda c: 0
    gated: bool = True
    sinks: bool = False
    root: tuple[str, str, str] = ("model.embed_tokens", "", "model.norm")
    norm_bias: bool = False

    def missing(self, config: Mapping[str, Any]) -> list[str]:
        """Sizes that the config must state and does not."""
        required = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
        spellings = [self.spellings.get(key, (key,)) for key in required if key not in self.defaults]
        return [names[0] for names in spellings if all(config.get(name) is None for name in names)]


@dataclass(frozen=True)
class _Config:
    """A config and the defaults of its class. What is read through it is checked."""

    values: Mapping[str, Any]
    family: _Family
    where: str

    def find(self, key: str) -> tuple[str, Any]:
        """The spelling under which the config has `key`, and the value; the default where it has not."""
        names = self.family.spellings.get(key, (key,))
        for name in names:
            if name in self.values:
                return name, self.values[name]
        return names[0], self.family.defaults.get(key)

    def optional(self, key: str, minimum: int = 1) -> int | None:
        """A whole number, or None for null."""
        name, value = self.find(key)
        if value is None:
            return None
        most = _MOST_LAYERS if key == "num_hidden_layers" else LARGEST_COUNT
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise LongspanError(f"{self.where}: {name}={spell(value)} must be a whole number of at least {minimum}")
        check_number(f"{self.where}: {name}", value, minimum, most)
        return value

    def count(self, key: str, minimum: int = 1) -> int:
        """A whole number."""
        value = self.optional(key, minimum)
        if value is None:
            raise LongspanError(
                f"{self.where}: {self.find(key)[0]} is null; it must be a whole number of at least {minimum}"
            )
        return value

    def flag(self, key: str) -> bool:
        """True or false; null is false."""
        name, value = self.find(key)
        if value is not None and not isinstance(value, bool):
            raise LongspanError(f"{self.where}: {name}={value!r} must be true or false")
        return bool(value)

    @cached_property
    def d(self) -> int:
        """The hidden size."""
        return self.count("hidden_size")

    @cached_property
    def ffn(self) -> int:
        """The intermediate size; GPT-2 may leave it out."""
        return self.optional("intermediate_size") or 4 * self.d

    @cached_property
    def experts(self) -> int:
        """Routed experts of a layer that has some."""
        return self.count("num_experts", minimum=0)

    @cached_property
    def expert_ffn(self) -> int:
        """Intermediate size of one routed expert."""
        return self.count(self.family.expert_ffn)

    def divides(self, key: str, by: str, whole: int, parts: int) -> None:
        """Raise unless `parts` divides `whole`."""
        if whole % parts:
            near = [str(n * parts) for n in (whole // parts, whole // parts + 1) if n]
            name = self.find(by)[0]
            default = "" if name in self.values else " (the default)"
            raise LongspanError(
                f"{self.where}: {self.find(key)[0]}={whole} does not divide by {name}={parts}{default}; "
                f"{' or '.join(near)} would"
            )


def _shape(c: _Config, assumption: str | None) -> ModelShape:
    vocab, tied = c.count("vocab_size"), c.flag("tie_word_embeddings")
    for key in ("is_encoder_decoder", "add_cross_attention", "use_bidirectional_attention"):
        if c.flag(key):
            raise LongspanError(f"{c.where}: {key}=true; only causal decoders are supported, set it to false")
    slots = _slots(c)
    distinct = {slot: _layer(c, slot) for slot in dict.fromkeys(slots)}
    embedding, positions, norm = c.family.root
    max_position = c.optional("max_position_embeddings")
    root = [Parameter(f"{embedding}.weight", (vocab, c.d))]
    if positions:
        root.append(Parameter(f"{positions}.weight", (c.count("max_position_embeddings"), c.d)))
    root.extend(_norm(norm, c.d, c.family.norm_bias))
    if not tied:
        root.append(Parameter("lm_head.weight", (vocab, c.d)))
    layers = tuple(distinct[slot] for slot in slots)
    return ModelShape(c.where, c.d, vocab, tied, max_position, layers, tuple(root), assumption)


def _layer(c: _Config, slot: _Slot) -> LayerShape:
    family = c.family
    heads = family.heads(c, slot.kind)
    experts = c.experts if slot.sparse else 0
    chosen = c.count("num_experts_per_tok") if slot.sparse else 0
    if chosen > experts:
        raise LongspanError(f"{c.where}: num_experts_per_tok={chosen} is more than the {experts} experts of a layer")
    parts = {"attention": family.attention, "mlp": family.mlp}
    weights = (parts[n](c, slot) if n in parts else _norm(n, c.d, family.norm_bias) for n in family.order)
    return LayerShape(
        kind=slot.kind,
        q_heads=heads.q,
        kv_heads=heads.kv,
        head_dim=heads.dim,
        v_head_dim=heads.v_dim,
        window=slot.window,
        ffn=0 if slot.sparse else c.ffn,
        gated=family.gated,
        experts=experts,
        experts_per_token=chosen,
        expert_ffn=c.expert_ffn if slot.sparse else 0,
        shared_ffn=family.shared_ffn(c) if slot.sparse else 0,
        latent_dim=heads.latent_dim,
        state_elements=heads.state_elements,
        sinks=family.sinks,
        parameters=tuple(chain.from_iterable(weights)),
    )


_KINDS: dict[str, Kind] = {
    "full_attention": "full",
    "attention": "full",
    "sliding_attention": "sliding",
    "chunked_attention": "chunked",
    "linear_attention": "linear",
}


def _slots(c: _Config) -> list[_Slot]:
    n = c.count("num_hidden_layers")
    types = [c.family.types(c, layer) for layer in range(n)]
    given = c.values.get("layer_types")
    if given is not None:
        _check_layer_types(c, given, types)
        types = given
    lengths = {kind: _window(c, kind) for kind in {_KINDS[layer_type] for layer_type in types}}
    kinds = [_KINDS[layer_type] for layer_type in types]
    return [_Slot(kind, lengths[kind], c.family.sparse(c, layer)) for layer, kind in enumerate(kinds)]


def _check_layer_types(c: _Config, given: Any, derived: list[str]) -> None:
    readable = [layer_type for layer_type, kind in _KINDS.items() if kind in c.family.kinds]
    if not isinstance(given, list) or len(given) != len(derived):
        got = f"{len(given)} entries" if isinstance(given, list) else repr(given)
        raise LongspanError(
            f"{c.where}: layer_types must have one entry for each of the {len(derived)} layers, it has {got}"
        )
    for layer, layer_type in enumerate(given):
        if layer_type not in readable:
            raise LongspanError(
                f"{c.where}: layer_types[{layer}] is {layer_type!r}; supported are {', '.join(readable)}"
            )
        if not c.family.listed and _KINDS[layer_type] != _KINDS[derived[layer]]:
            raise LongspanError(
                f"{c.where}: layer_types[{layer}] is {layer_type!r}, but transformers does not read layer_types for "
                f"this model_type and makes it {derived[layer]!r}; remove layer_types or change the model_type"
            )


def _window(c: _Config, kind: Kind) -> int | None:
    """Tokens in the window of a layer of a kind, None for the kinds without."""
    if kind not in ("sliding", "chunked"):
        return None
    tokens = _sliding_window(c) if kind == "sliding" else c.optional("attention_chunk_size")
    if tokens is None:
        key = "attention_chunk_size" if kind == "chunked" else "sliding_window"
        off = " (use_sliding_window is false)" if c.find(key)[1] is not None else ""
        raise LongspanError(
            f"{c.where}: layer_types has {kind}_attention but no {key} is in use{off}; give {key} in tokens"
        )
    return tokens


def _sliding_window(c: _Config) -> int | None:
    # Only the config classes that have the switch look at it.
    if "use_sliding_window" in c.family.defaults and not c.flag("use_sliding_window"):
        return None
    return c.optional("sliding_window")


def _sliding_everywhere(c: _Config, layer: int) -> str:
    return "full_attention" if _sliding_window(c) is None else "sliding_attention"


def _sliding_after(c: _Config, layer: int) -> str:
    sliding = _sliding_window(c) is not None and layer >= c.count("max_window_layers", minimum=0)
    return "sliding_attention" if sliding else "full_attention"


def _sliding_first(c: _Config, layer: int) -> str:
    return "full_attention" if layer % 2 else "sliding_attention"


def _full_at_intervals(interval: str, other: str, c: _Config, layer: int) -> str:
    return other if (layer + 1) % c.count(interval) else "full_attention"


def _lightning(c: _Config, layer: int) -> str:
    if c.values.get("attn_type_list") is not None and c.values.get("layer_types") is None:
        raise LongspanError(
            f"{c.where}: transformers reads layer_types, not attn_type_list; give layer_types, with "
            f"'linear_attention' for 0 and 'full_attention' for 1"
        )
    if c.optional("sliding_window") is not None:
        raise LongspanError(f"{c.where}: sliding_window is not supported for this model_type; set it to null")
    return "linear_attention" if layer % 2 else "full_attention"


def _always(c: _Config, layer: int) -> bool:
    return True


def _every_step(c: _Config, layer: int) -> bool:
    dense = c.find("mlp_only_layers")[1] or ()
    return layer not in dense and c.experts > 0 and (layer + 1) % c.count("decoder_sparse_step") == 0


def _after_dense(c: _Config, layer: int) -> bool:
    frequency = c.values.get("moe_layer_freq", 1)
    if frequency != 1:
        raise LongspanError(f"{c.where}: moe_layer_freq={frequency!r}; transformers builds 1 only, set it to 1")
    return layer >= c.count("first_k_dense_replace", minimum=0)


def _grouped(c: _Config) -> _Heads:
    q = c.count("num_attention_heads")
    kv = c.optional("num_key_value_heads") or q
    c.divides("num_attention_heads", "num_key_value_heads", q, kv)
    dim = c.optional("head_dim")
    if dim is None:
        c.divides("hidden_size", "num_attention_heads", c.d, q)
        dim = c.d // q
    return _Heads(q, kv, dim, dim)


def _all_of_hidden(c: _Config, kind: Kind) -> _Heads:
    q = c.count("num_attention_heads")
    c.divides("hidden_size", "num_attention_heads", c.d, q)
    return _Heads(q, q, c.d // q, c.d // q)


def _latent(c: _Config, kind: Kind) -> _Heads:
    q, rope = c.count("num_attention_heads"), c.count("qk_rope_head_dim")
    dim = c.count("qk_nope_head_dim") + rope
    return _Heads(q, q, dim, c.count("v_head_dim"), latent_dim=c.count("kv_lora_rank") + rope)


def _delta_or_grouped(c: _Config, kind: Kind) -> _Heads:
    if kind != "linear":
        return _grouped(c)
    k, v = c.count("linear_num_key_heads"), c.count("linear_num_value_heads")
    c.divides("linear_num_value_heads", "linear_num_key_heads", v, k)
    dim, v_dim = c.count("linear_key_head_dim"), c.count("linear_value_head_dim")
    return _Heads(v, k, dim, v_dim, state_elements=v * dim * v_dim)


def _lightning_or_grouped(c: _Config, kind: Kind) -> _Heads:
    heads = _grouped(c)
    if kind != "linear":
        return heads
    return _Heads(heads.q, heads.q, heads.dim, heads.dim, state_elements=heads.q * heads.dim**2)


# The weights, module by module.


def _linear(name: str, inputs: int, outputs: int, bias: bool = False) -> Iterator[Parameter]:
    yield Parameter(f"{name}.weight", (outputs, inputs))
    if bias:
        yield Parameter(f"{name}.bias", (outputs,))


def _norm(name: str, size: int, bias: bool = False) -> Iterator[Parameter]:
    yield Parameter(f"{name}.weight", (size,))
    if bias:
        yield Parameter(f"{name}.bias", (size,))


def _attention(
    c: _Config,
    slot: _Slot,
    *,
    qkv_bias: bool | None = None,
    out_bias: bool | None = None,
    qk_norm: Literal["no", "head", "all heads"] = "no",
    gate: bool = False,
) -> Iterator[Parameter]:
    """Separate projections. A bias of None is as `attention_bias` says; a gate comes with the queries' projection."""
    h = _grouped(c)
    qkv_bias = c.flag("attention_bias") if qkv_bias is None else qkv_bias
    out_bias = c.flag("attention_bias") if out_bias is None else out_bias
    if c.family.sinks:
        yield Parameter("self_attn.sinks", (h.q,))
    yield from _linear("self_attn.q_proj", c.d, h.q * h.dim * (2 if gate else 1), qkv_bias)
    yield from _linear("self_attn.k_proj", c.d, h.kv * h.dim, qkv_bias)
    yield from _linear("self_attn.v_proj", c.d, h.kv * h.dim, qkv_bias)
    yield from _linear("self_attn.o_proj", h.q * h.dim, c.d, out_bias)
    if qk_norm != "no":
        yield from _norm("self_attn.q_norm", h.dim if qk_norm == "head" else h.q * h.dim)
        yield from _norm("self_attn.k_norm", h.dim if qk_norm == "head" else h.kv * h.dim)


def _phi3_attention(c: _Config, slot: _Slot) -> Iterator[Parameter]:
    h = _grouped(c)
    yield from _linear("self_attn.o_proj", h.q * h.dim, c.d)
    yield from _linear("self_attn.qkv_proj", c.d, (h.q + 2 * h.kv) * h.dim)


def _deepseek_attention(c: _Config, slot: _Slot) -> Iterator[Parameter]:
    h = _latent(c, slot.kind)
    bias, q_rank, kv_rank = c.flag("attention_bias"), c.optional("q_lora_rank"), c.count("kv_lora_rank")
    if q_rank is None:
        yield from _linear("self_attn.q_proj", c.d, h.q * h.dim)
    else:
        yield from _linear("self_attn.q_a_proj", c.d, q_rank, bias)
        yield from _norm("self_attn.q_a_layernorm", q_rank)
        yield from _linear("self_attn.q_b_proj", q_rank, h.q * h.dim)
    yield from _linear("self_attn.kv_a_proj_with_mqa", c.d, h.latent_dim, bias)
    yield from _norm("self_attn.kv_a_layernorm", kv_rank)
    yield from _linear("self_attn.kv_b_proj", kv_rank, h.q * (c.count("qk_nope_head_dim") + h.v_dim))
    yield from _linear("self_attn.o_proj", h.q * h.v_dim, c.d, bias)


def _qwen3_next_attention(c: _Config, slot: _Slot) -> Iterator[Parameter]:
    if slot.kind != "linear":
        yield from _attention(c, slot, qk_norm="head", gate=True)
        return
    h = _delta_or_grouped(c, slot.kind)
    keys, values = h.kv * h.dim, h.q * h.v_dim
    yield Parameter("linear_attn.dt_bias", (h.q,))
    yield Parameter("linear_attn.A_log", (h.q,))
    yield Parameter("linear_attn.conv1d.weight", (2 * keys + values, 1, c.count("linear_conv_kernel_dim")))
    yield from _linear("linear_attn.in_proj_qkvz", c.d, 2 * keys + 2 * values)
    yield from _linear("linear_attn.in_proj_ba", c.d, 2 * h.q)
    yield from _norm("linear_attn.norm", h.v_dim)
    yield from _linear("linear_attn.out_proj", values, c.d)


def _minimax_attention(c: _Config, slot: _Slot) -> Iterator[Parameter]:
    if slot.kind != "linear":
        yield from _attention(c, slot, qkv_bias=False, out_bias=False)
        return
    h = _grouped(c)
    yield from _norm("self_attn.norm", h.q * h.dim)
    yield from _linear("self_attn.qkv_proj", c.d, 3 * h.q * h.dim)
    yield from _linear("self_attn.out_proj", h.q * h.dim, c.d)
    yield from _linear("self_attn.output_gate", c.d, h.q * h.dim)


def _gpt2_attention(c: _Config, slot: _Slot) -> Iterator[Parameter]:
    # transformers' Conv1D keeps its matrix as [inputs, outputs].
    yield from _linear_transposed("attn.c_attn", c.d, 3 * c.d)
    yield from _linear_transposed("attn.c_proj", c.d, c.d)


def _neox_attention(c: _Config, slot: _Slot) -> Iterator[Parameter]:
    yield from _linear("attention.query_key_value", c.d, 3 * c.d, c.flag("attention_bias"))
    yield from _linear("attention.dense", c.d, c.d, c.flag("attention_bias"))


def _linear_transposed(name: str, inputs: int, outputs: int) -> Iterator[Parameter]:
    yield Parameter(f"{name}.weight", (inputs, outputs))
    yield Parameter(f"{name}.bias", (outputs,))


def _gated(name: str, d: int, ffn: int, bias: bool = False) -> Iterator[Parameter]:
    yield from _linear(f"{name}.gate_proj", d, ffn, bias)
    yield from _linear(f"{name}.up_proj", d, ffn, bias)
    yield from _linear(f"{name}.down_proj", ffn, d, bias)


def _mlp(c: _Config, slot: _Slot) -> Iterator[Parameter]:
    yield from _gated("mlp", c.d, c.ffn)


def _llama_mlp(c: _Config, slot: _Slot) -> Iterator[Parameter]:
    yield from _gated("mlp", c.d, c.ffn, c.flag("mlp_bias"))


def _phi3_mlp(c: _Config, slot: _Slot) -> Iterator[Parameter]:
    yield from _linear("mlp.gate_up_proj", c.d, 2 * c.ffn)
    yield from _linear("mlp.down_proj", c.ffn, c.d)


def _gpt2_mlp(c: _Config, slot: _Slot) -> Iterator[Parameter]:
    yield from _linear_transposed("mlp.c_fc", c.d, c.ffn)
    yield from _linear_transposed("mlp.c_proj", c.ffn, c.d)


def _neox_mlp(c: _Config, slot: _Slot) -> Iterator[Parameter]:
    yield from _linear("mlp.dense_h_to_4h", c.d, c.ffn, bias=True)
    yield from _linear("mlp.dense_4h_to_h", c.ffn, c.d, bias=True)


def _experts(c: _Config, slot: _Slot, router_last: bool = False) -> Iterator[Parameter]:
    if not slot.sparse:
        yield from _gated("mlp", c.d, c.ffn)
        return
    router = Parameter("mlp.gate.weight", (c.experts, c.d))
    if not router_last:
        yield router
    yield Parameter("mlp.experts.gate_up_proj", (c.experts, 2 * c.expert_ffn, c.d))
    yield Parameter("mlp.experts.down_proj", (c.experts, c.d, c.expert_ffn))
    if router_last:
        yield router


def _gpt_oss_experts(c: _Config, slot: _Slot) -> Iterator[Parameter]:
    yield from _linear("mlp.router", c.d, c.experts, bias=True)
    yield Parameter("mlp.experts.gate_up_proj", (c.experts, c.d, 2 * c.expert_ffn))
    yield Parameter("mlp.experts.gate_up_proj_bias", (c.experts, 2 * c.expert_ffn))
    yield Parameter("mlp.experts.down_proj", (c.experts, c.expert_ffn, c.d))
    yield Parameter("mlp.experts.down_proj_bias", (c.experts, c.d))


def _deepseek_experts(c: _Config, slot: _Slot) -> Iterator[Parameter]:
    yield from _experts(c, slot, router_last=True)
    if slot.sparse:
        yield from _gated("mlp.shared_experts", c.d, _deepseek_shared(c))


def _deepseek_shared(c: _Config) -> int:
    return c.expert_ffn * c.count("n_shared_experts")


def _qwen3_next_experts(c: _Config, slot: _Slot) -> Iterator[Parameter]:
    yield from _experts(c, slot)
    if slot.sparse:
        yield from _gated("mlp.shared_expert", c.d, c.count("shared_expert_intermediate_size"))
        yield from _linear("mlp.shared_expert_gate", c.d, 1)


_GEMMA_ORDER = (
    "attention",
    "mlp",
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
_LOCAL_EXPERTS = {"num_experts": ("num_local_experts", "num_experts")}
_WINDOW_OFF = {"use_sliding_window": False, "sliding_window": 4096, "max_position_embeddings": 32768}
_LLAMA_LIKE = _Family(
    _attention, _llama_mlp, {"use_sliding_window": True}, listed=True, kinds=("full", "sliding", "chunked")
)

# By model_type. Defaults are those of the config classes in transformers 5; a size with a default need not be stated.
FAMILIES: dict[str, _Family] = {
    "llama": _Family(_attention, _llama_mlp, {"max_position_embeddings": 2048}),
    "mistral": _Family(
        partial(_attention, qkv_bias=False, out_bias=False), _mlp,
        {"num_key_value_heads": 8, "sliding_window": 4096, "max_position_embeddings": 131072},
        types=_sliding_everywhere,
    ),
    "mixtral": _Family(
        partial(_attention, qkv_bias=False, out_bias=False), _experts,
        {"num_key_value_heads": 8, "max_position_embeddings": 131072, "num_experts": 8, "num_experts_per_tok": 2},
        spellings=_LOCAL_EXPERTS, types=_sliding_everywhere,
        sparse=_always, expert_ffn="intermediate_size",
    ),
    "qwen2": _Family(
        partial(_attention, qkv_bias=True, out_bias=False), _mlp,
        {"num_key_value_heads": 32, "max_window_layers": 28, **_WINDOW_OFF},
        types=_sliding_after, listed=True,
    ),
    "qwen3": _Family(
        partial(_attention, qk_norm="head"), _mlp,
        {"num_key_value_heads": 32, "head_dim": 128, "max_window_layers": 28, **_WINDOW_OFF},
        types=_sliding_after, listed=True,
    ),
    "qwen3_moe": _Family(
        partial(_attention, qk_norm="head"), partial(_experts, router_last=True),
        {
            "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
            "decoder_sparse_step": 1, **_WINDOW_OFF,
        },
        spellings={"num_experts": ("num_experts", "num_local_experts")}, types=_sliding_everywhere,
        sparse=_every_step,
    ),
    "qwen3_next": _Family(
        _qwen3_next_attention, _qwen3_next_experts,
        {
            "num_key_value_heads": 2, "head_dim": 256, "num_experts": 512, "num_experts_per_tok": 10,
            "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "decoder_sparse_step": 1,
            "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
            "linear_num_key_heads": 16, "linear_num_value_heads": 32, "full_attention_interval": 4,
            "max_position_embeddings": 32768,
        },
        heads=_delta_or_grouped,
        types=partial(_full_at_intervals, "full_attention_interval", "linear_attention"), listed=True,
        kinds=("full", "linear"),
        sparse=_every_step, shared_ffn=lambda c: c.count("shared_expert_intermediate_size"),
    ),
    "minimax": _Family(
        _minimax_attention, _experts,
        {"num_key_value_heads": 8, "max_position_embeddings": 131072, "num_experts": 8, "num_experts_per_tok": 2},
        spellings=_LOCAL_EXPERTS, heads=_lightning_or_grouped,
        order=("attention", "input_layernorm", "post_attention_layernorm", "mlp"),
        types=_lightning, listed=True, kinds=("full", "linear"),
        sparse=_always, expert_ffn="intermediate_size",
    ),
    "phi3": _Family(_phi3_attention, _phi3_mlp, {"max_position_embeddings": 4096}, types=_sliding_everywhere),
    "olmo2": _Family(
        partial(_attention, qk_norm="all heads"), _mlp, {"max_position_embeddings": 2048},
        order=("attention", "mlp", "post_attention_layernorm", "post_feedforward_layernorm"),
    ),
    "gemma2": _Family(
        _attention, _mlp,
        {
            "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096, "max_position_embeddings": 8192,
            "tie_word_embeddings": True,
        },
        order=_GEMMA_ORDER, types=_sliding_first, listed=True,
    ),
    "gemma3": _Family(
        partial(_attention, qk_norm="head"), _mlp,
        {
            # The published configs of 4B to 27B leave some of these sizes out.
            "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262208,
            "sliding_window": 4096, "sliding_window_pattern": 6, "max_position_embeddings": 131072,
            "tie_word_embeddings": True,
        },
        order=_GEMMA_ORDER,
        types=partial(_full_at_intervals, "sliding_window_pattern", "sliding_attention"), listed=True,
    ),
    "gpt_oss": _Family(
        _attention, _gpt_oss_experts,
        {
            "num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128, "num_experts": 128,
            "num_experts_per_tok": 4, "attention_bias": True, "max_position_embeddings": 131072,
        },
        spellings=_LOCAL_EXPERTS, types=_sliding_first, listed=True,
        sparse=_always, expert_ffn="intermediate_size", sinks=True,
    ),
    "deepseek_v3": _Family(
        _deepseek_attention, _deepseek_experts,
        {
            "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
            "v_head_dim": 128, "num_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1,
            "moe_intermediate_size": 2048, "first_k_dense_replace": 3, "max_position_embeddings": 4096,
        },
        spellings={"num_experts": ("n_routed_experts", "num_local_experts")}, heads=_latent,
        sparse=_after_dense, shared_ffn=_deepseek_shared,
    ),
    "gpt2": _Family(
        _gpt2_attention, _gpt2_mlp,
        {"tie_word_embeddings": True, "max_position_embeddings": 1024, "intermediate_size": None},
        spellings={
            "hidden_size": ("n_embd", "hidden_size"),
            "num_hidden_layers": ("n_layer", "num_hidden_layers"),
            "num_attention_heads": ("n_head", "num_attention_heads"),
            "intermediate_size": ("n_inner",),
            "max_position_embeddings": ("n_positions", "max_position_embeddings"),
        },
        heads=_all_of_hidden, order=("ln_1", "attention", "ln_2", "mlp"), norm_bias=True, gated=False,
        root=("transformer.wte", "transformer.wpe", "transformer.ln_f"),
    ),
    "gpt_neox": _Family(
        _neox_attention, _neox_mlp, {"attention_bias": True, "max_position_embeddings": 2048},
        heads=_all_of_hidden, norm_bias=True, gated=False,
        order=("input_layernorm", "post_attention_layernorm", "attention", "mlp"),
        root=("gpt_neox.embed_in", "", "gpt_neox.final_layer_norm"),
    ),
}  # fmt: skip
