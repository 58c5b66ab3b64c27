"""Read a model's shape from its name or its `config.json`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from longspan.core.errors import LongspanError
from longspan.core.rope import RopeState, rope_state
from longspan.core.validation import existing_path, format_value, nearest, read_text
from longspan.plan.layers import Mlp, Parameter
from longspan.plan.models.blocks import norm
from longspan.plan.models.catalogue import CONFIGS, VISION_CONFIGS
from longspan.plan.models.families import LLAMA_LIKE, SPARSE_LLAMA_LIKE
from longspan.plan.models.family import EXPERT_COUNTS, FAMILIES, Config, Family, Part
from longspan.plan.models.shape import LayerShape, ModelShape

BUILT_IN = {**CONFIGS, **VISION_CONFIGS}


def read_model(name_or_path: str | os.PathLike[str]) -> ModelShape:
    """Return the shape of a built-in model, or of the `config.json` (or folder with one) at a path.

    Built-in names may be written as on the Hugging Face hub ("meta-llama/Llama-2-70b-hf"). They win over folders of the
    same name in the current directory: write "./llama-2-7b" for the folder.

    Raises:
        LongspanError: for an unknown name (with the nearest), a file that is missing or is not a JSON object, and
            whatever `shape_from_config` refuses.
    """
    if not isinstance(name_or_path, str | os.PathLike):
        raise LongspanError(
            f"model {format_value(name_or_path)} is neither a name nor a path; there are {', '.join(BUILT_IN)}"
        )
    name_or_path = os.fspath(name_or_path)
    if name_or_path.lower() in BUILT_IN:
        return shape_from_config(BUILT_IN[name_or_path.lower()], name_or_path.lower())
    path = existing_path("--model", name_or_path)
    if path is not None or name_or_path.endswith(".json") or name_or_path.startswith((".", "/", "~")):
        return shape_from_config(_read_json(path or Path(name_or_path)), name_or_path)
    name = _plain_name(name_or_path)
    if name in BUILT_IN:
        return shape_from_config(BUILT_IN[name], name)
    raise LongspanError(
        f"model {name_or_path} is not built in ({nearest(name, BUILT_IN)}); for another model give the path of its "
        f"config.json"
    )


def _plain_name(name: str) -> str:
    """Return a hub name without the owner, and without words for the format or the fine-tuning."""
    words = name.lower().rstrip("/").rsplit("/", 1)[-1].split("-")
    plain = "-".join(word for word in words if word not in ("hf", "meta", "chat", "instruct", "it", "pt"))
    return "mistral-7b" if plain == "mistral-7b-v0.1" else plain


def _read_json(path: Path) -> dict[str, Any]:
    if path.is_dir():
        if not (path / "config.json").exists():
            raise LongspanError(f"the folder {path} has no config.json; give a folder that has one, or the file itself")
        path = path / "config.json"
    if not path.exists():
        raise LongspanError(f"there is no file {path}; give the path of a config.json, or one of {', '.join(BUILT_IN)}")
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
    """Return the shape that transformers 5 builds from a config.

    Missing keys have the defaults of the config class, except for sizes that every model must state. An unknown model
    type is read as Llama (with experts if it counts any), unless its keys show layers of another kind; `assumption`
    then lists what was assumed, since biases or norms may be missing. `longspan.hf.planning` reads such a model from
    its modules.

    Args:
        config: the keys of a `config.json`.
        name: for the shape and for messages.

    Raises:
        LongspanError: for an unsupported model type, missing sizes, impossible values, and a tower for images or audio
            that the planner does not know.
    """
    text, vision, audio = (config.get(f"{part}_config") for part in ("text", "vision", "audio"))
    whole_type = config.get("model_type")
    if isinstance(text, Mapping):
        outer = {key: config[key] for key in _OUTER if key in config}
        config = {**outer, **text}
    model_type = str(config.get("model_type", "")).removesuffix("_text")
    family = FAMILIES.get(model_type)
    if vision or audio:
        if audio or family is None or family.tower is None:
            raise _unknown_tower(whole_type, name, "audio" if audio else "vision")
        if isinstance(text, Mapping):  # the whole model's key counts
            config = {**config, "tie_word_embeddings": outer.get("tie_word_embeddings", False)}
    assumption = None
    if family is None:
        sparse = any(config.get(key) for key in EXPERT_COUNTS)
        family = SPARSE_LLAMA_LIKE if sparse else LLAMA_LIKE
        _refuse_unless_llama_like(config, name, family)
        assumption = "; ".join(
            [f"model_type {config.get('model_type')!r} is not known; read as a Llama's", *_assumed(config, sparse)]
        )
    config = family.config(config)
    missing = family.missing(config)
    if missing:
        raise LongspanError(
            f"{name} has no {', '.join(missing)}; a config.json of model_type {model_type!r} must state "
            f"{'it' if len(missing) == 1 else 'them'}"
        )
    shape = _shape(Config(config, family.defaults, family.spellings, name), family, assumption)
    shape = replace(shape, model_type=model_type)
    return replace(shape, tower=family.tower(vision, name)) if vision and family.tower else shape


def _unknown_tower(model_type: Any, name: str, kind: str) -> LongspanError:
    known = ", ".join(sorted(key for key, family in FAMILIES.items() if family.tower is not None))
    return LongspanError(
        f"{name}: the {kind} tower of model_type {model_type!r} is not planned, only those of {known}; to plan its "
        f"language model alone, give a config.json that is its text_config"
    )


def is_family(config: Mapping[str, Any]) -> bool:
    """Return whether `shape_from_config` knows the config's model type, so that every weight is exact."""
    return str(config.get("model_type", "")).removesuffix("_text") in FAMILIES


def plans_tower(model_type: str) -> bool:
    """Return whether the planner knows the vision tower of a model type."""
    family = FAMILIES.get(model_type)
    return family is not None and family.tower is not None


def shape_from_layers(
    config: Mapping[str, Any],
    name: str,
    *,
    d_model: int,
    layers: tuple[LayerShape, ...],
    root: tuple[Parameter, ...],
    tied: bool,
    rotary: bool,
) -> ModelShape:
    """Return the shape of a model whose layers and weights were read from its modules; the config gives positions and
    dropout. See `ModelShape` for the arguments; `rotary`: positions are rotary rather than learnt.
    """
    c = Config(config, {}, {}, name)
    end = c.optional("max_position_embeddings")
    state = _positions(c, end, rotary=rotary, head_dim=layers[0].mixer.head_dim)
    return ModelShape(name, d_model, root[0].shape[0], tied, end, layers, root, positions=state, refused=_refused(c))


def _refuse_unless_llama_like(config: Mapping[str, Any], name: str, family: Family) -> None:
    foreign = sorted(key for key, value in config.items() if value and key.startswith(_FOREIGN))
    missing = family.missing(config)
    reasons = []
    if foreign:
        reasons.append(f"it has {', '.join(foreign)}")
    if missing:
        reasons.append(f"it has no {', '.join(missing)}")
    if reasons:
        raise LongspanError(
            f"{name}: model_type {config.get('model_type')!r} is not supported, and it cannot be read as a Llama's: "
            f"{'; '.join(reasons)}. Supported are {', '.join(sorted(FAMILIES))}"
        )


def _assumed(config: Mapping[str, Any], sparse: bool) -> Iterator[str]:
    """Yield what differs from Llama in the config, and what is assumed about it."""
    activation = config.get("hidden_act") or config.get("hidden_activation")
    if activation not in (None, "silu", "swish"):
        yield f"its MLP, of hidden_act {activation!r}, is assumed to have three matrices"
    if config.get("sliding_window") and config.get("layer_types") is None and config.get("use_sliding_window", True):
        yield f"sliding_window={config['sliding_window']} is ignored, as the config has no layer_types"
    if sparse:
        yield "every layer is assumed to have experts"


_OUTER = ("model_type", "tie_word_embeddings")
"""Keys of a multimodal config that also apply to its text part."""

# Keys of models whose layers are not Llama's: state spaces and other recurrences, encoders, latent attention,
# embeddings in every layer, other modalities.
_FOREIGN = (
    "mamba", "ssm", "state_size", "d_state", "time_step", "conv_", "linear_", "attn_layer_", "recurrent", "rwkv",
    "is_encoder_decoder", "encoder_", "decoder_layers", "decoder_ffn", "decoder_attention", "num_decoder",
    "cross_attention", "add_cross_attention", "kv_lora_rank", "q_lora_rank", "hidden_size_per_layer_input",
    "vision_", "audio_", "H_cycles", "L_cycles",
)  # fmt: skip


def _shape(c: Config, family: Family, assumption: str | None) -> ModelShape:
    vocab, tied = c.count("vocab_size"), c.flag("tie_word_embeddings")
    for key in ("is_encoder_decoder", "add_cross_attention", "use_bidirectional_attention"):
        if c.flag(key):
            raise LongspanError(f"{c.where}: {key}=true; only causal decoders are supported, set it to false")
    slots = [(mixer, family.mlp.build(c, i)) for i, mixer in enumerate(_mixers(c, family))]
    distinct = {slot: _layer(c, family, *slot) for slot in dict.fromkeys(slots)}
    embedding, positions, last = family.root
    max_position = c.optional("max_position_embeddings")
    root = [Parameter(f"{embedding}.weight", (vocab, c.d))]
    if positions:
        root.append(Parameter(f"{positions}.weight", (c.count("max_position_embeddings"), c.d)))
    root.extend(norm(last, c.d, family.norm_bias))
    if not tied:
        root.append(Parameter("lm_head.weight", (vocab, c.d)))
    layers = tuple(distinct[slot] for slot in slots)
    head_dim = next((layer.mixer.head_dim for layer in layers if layer.mixer.shards_heads), 0)
    state = _positions(c, max_position, rotary=family.rotary and not positions, head_dim=head_dim)
    return ModelShape(
        c.where, c.d, vocab, tied, max_position, layers, tuple(root), assumption, state, refused=_refused(c)
    )


def _positions(c: Config, max_position: int | None, *, rotary: bool, head_dim: int) -> RopeState:
    """Return what the config and the defaults of its class say about positions."""
    stated = any(isinstance(c.values.get(key), Mapping) for key in ("rope_parameters", "rope_scaling"))
    defaults = {key: value for key, value in c.defaults.items() if not (stated and key == "rope_parameters")}
    values = {**defaults, **{key: value for key, value in c.values.items() if value is not None}}
    dims = values.get("qk_rope_head_dim", head_dim)
    part = values.get("partial_rotary_factor", values.get("rotary_pct", 1.0))
    known = isinstance(dims, int) and isinstance(part, int | float)
    return rope_state(values, max_position, rotary, int(dims * part) if known else None)


def _refused(c: Config) -> tuple[str, ...]:
    """Return the reasons why `longspan train` refuses the config."""
    reasons = []
    for key in ("attention_dropout", "attn_pdrop"):
        p = c.values.get(key, c.defaults.get(key))
        if isinstance(p, int | float) and p > 0:
            reasons.append(
                f"attention dropout ({key}={p:g}) is not trained in this version: set {key} to 0 in config.json"
            )
    return tuple(reasons)


def _layer(c: Config, family: Family, of: Part, mlp: Mlp) -> LayerShape:
    mixer = of.build(c)
    parts = {"attention": lambda: of.weights(c, mixer), "mlp": lambda: family.mlp.weights(c, mlp)}
    weights = (parts[part]() if part in parts else norm(part, c.d, family.norm_bias) for part in family.order)
    return LayerShape(mixer, mlp, tuple(chain.from_iterable(weights)))


def _mixers(c: Config, family: Family) -> list[Part]:
    """Return the mixer of each layer, from the config's `layer_types` or the family."""
    types = [family.types(c, layer) for layer in range(c.count("num_hidden_layers"))]
    given = c.values.get("layer_types")
    if given is not None:
        _check_layer_types(c, family, given, types)
        types = given
    return [family.mixers[layer_type] for layer_type in types]


def _check_layer_types(c: Config, family: Family, given: Any, derived: list[str]) -> None:
    if not isinstance(given, list) or len(given) != len(derived):
        got = f"{len(given)} entries" if isinstance(given, list) else repr(given)
        raise LongspanError(
            f"{c.where}: layer_types must have one entry for each of the {len(derived)} layers, it has {got}"
        )
    for layer, layer_type in enumerate(given):
        if not isinstance(layer_type, str) or layer_type not in family.mixers:
            raise LongspanError(
                f"{c.where}: layer_types[{layer}] is {layer_type!r}; supported are {', '.join(family.mixers)}"
            )
        if not family.listed and family.mixers[layer_type] is not family.mixers[derived[layer]]:
            raise LongspanError(
                f"{c.where}: layer_types[{layer}] is {layer_type!r}, but transformers does not read layer_types for "
                f"this model_type and makes it {derived[layer]!r}; remove layer_types or change the model_type"
            )
