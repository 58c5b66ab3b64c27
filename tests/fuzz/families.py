"""Every causal and masked language model of the installed transformers, as a small model with random weights, and the
vision-language models of `tests/hf/pictures.py`.

The families are those of transformers' auto classes. A config starts as the family's default, and `shrunk` makes its
numbers small by their names, so that a new family of transformers needs no line here.
"""

from __future__ import annotations

import math
import re
from typing import Any

import torch

from tests.hf import pictures

VOCABULARY, HEADS, HEAD_DIM = 64, 4, 8
HIDDEN = HEADS * HEAD_DIM
PARAMETERS = 1_000_000
"""Parameters of the largest model that counts as small; the fuzzer skips families whose model is larger."""

# The first pattern that matches the whole name sets the size. Values that are 0, 1 or off by default stay so.
_SIZES: tuple[tuple[str, Any], ...] = (
    (r".*_(factor|ratio|coef|scale)|.*_pattern", None),
    (r".*(drop|pdrop|dropout)(_p|_prob|out)?|.*layerdrop|.*jitter.*", 0.0),
    (r"(decoder_|unpadded_)?vocab_size(_per_layer_input)?", VOCABULARY),
    (r"pad_token_id", 0),
    (r"bos_token_id|decoder_start_token_id", 1),
    (r".*_token_(id|index)|.*_(start|end)_token_id", 2),
    (r".*max_position_embeddings|n_positions|n_ctx|max_seq_len|model_max_length|max_\w*_positions|context_length", 128),
    (r".*(window|chunk)(_size|_length|_len)?|local_attention", 8),
    (
        r"num_kv_shared_layers|(num_hidden|n|num|encoder|decoder|num_encoder|num_decoder)_layers?|num_layers_per_stack",
        2,
    ),
    (r"first_k_dense_replace|num_dense_layers|moe_layer_start_index", 1),
    (r".*num_key_value_heads|num_kv_heads|num_query_groups", 2),
    (r"\w+_layer_period", 2),
    (r"\w+_layer_offset", 1),
    (r"(mamba_n|n_mamba)_heads", 2 * HEADS),
    (r"mamba_d_ssm|attention_hidden_size", 2 * HIDDEN),
    (r"attention_head_dim", 2 * HEAD_DIM),
    (r"(num|n|\w*decoder|\w*encoder)_(\w*_)?heads?", HEADS),
    (r"qk_head_dim", HEAD_DIM * 3 // 2),
    (r"qk_rope_head_dim|rotary_dim", HEAD_DIM // 2),
    (r"\w*_?head_(dim|size)|dim_head|\w*d_head|kv_channels|mamba_headdim", HEAD_DIM),
    (r"hidden_size_per_layer_input|.*_rank|d_rel", HEAD_DIM),
    (r"hidden_size|d_model|n_embd|dim|emb_dim|embedding_(dim|size)|word_embed_proj_dim", HIDDEN),
    (r".*(intermediate|ffn|ff|feed_forward|inner|hidden_dim).*(_size|_dim)?", 48),
    (r"(num_|n_|moe_num_)?(routed_|local_|zero_)?experts?(_num)?", 4),
    (r"num_experts_per_tok(en)?|moe_(k|topk)|\w*topk", 2),
    (r"n_groups?|topk_group|num_expert_group|o_groups|mamba_n_?groups", 1),
    (r".*shared_experts", 1),
)
_UNSET = ("head_dim", "num_key_value_heads", "num_experts_per_tok", "n_routed_experts", "n_shared_experts")
"""Sizes that a config may leave unset, although its model needs them."""

_AS_CHECKPOINTS: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "lfm2": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "qwen4_exp_text": {
        "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 4,
        "indexer_compress_ratio": 2,
    },
    "zamba": {"layers_block_type": ["linear_attention", "hybrid", "hybrid"], "num_hidden_layers": 3},
}  # fmt: skip
"""Values of families whose default config, or its first layers, lack a kind of layer that their checkpoints have."""


def families() -> list[str]:
    """Return `causal/MODEL_TYPE` and `masked/MODEL_TYPE` for each in transformers' lists, its own name per class, and
    `vision/NAME`.
    """
    from transformers.models.auto import modeling_auto as auto

    found: dict[Any, str] = {}
    for kind, names in (
        ("causal", auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
        ("masked", auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES),
    ):
        for model_type, name in names.items():
            cls = config_class(model_type)
            own = cls.model_type if names.get(cls.model_type) == name else model_type
            found.setdefault((kind, name, cls), f"{kind}/{own}")
    return [*found.values(), *(f"vision/{name}" for name in pictures.FAMILIES)]


def model_name(family: str) -> str:
    """Return the name of a family's class in transformers."""
    from transformers.models.auto import modeling_auto as auto

    kind, _, model_type = family.partition("/")
    causal, masked = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    return str((causal if kind == "causal" else masked)[model_type])


def config_class(model_type: str) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING[model_type]


def shrunk(cls: Any, changes: dict[str, Any]) -> Any:
    """Return a config of `cls` with small sizes, and with those of `changes` that it has."""
    try:
        default = cls()
    except Exception:  # a config with an inconsistent default may still accept small numbers
        default = None
    values = default.to_dict() if default is not None else {}
    sizes = {name: _size_of(name, value, values) for name, value in values.items()}
    sizes = {name: value for name, value in sizes.items() if value is not None}
    sizes |= _per_layer(values) | _AS_CHECKPOINTS.get(cls.model_type, {})
    for name in getattr(cls, "sub_configs", {}):
        sub = getattr(default, name, None)
        if hasattr(sub, "to_dict"):
            sizes[name] = shrunk(type(sub), changes).to_dict()
    if "kv_lora_rank" in values:  # no head shares keys and values
        changes = {name: value for name, value in changes.items() if name != "num_key_value_heads"}
    known = {*values, *getattr(cls, "attribute_map", {})}
    sizes |= {name: value for name, value in changes.items() if name in known}
    return cls(**sizes)


def _size_of(name: str, value: Any, values: dict[str, Any]) -> Any:
    if value is None and name in _UNSET:
        value = 2
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if name.endswith("_heads") and value == values.get("num_attention_heads"):
        return HEADS
    if name == "num_heads" and values.get("expand") == 2:  # of Mamba-2, which checks that they fit
        return 2 * HEADS
    if name == "head_dim" and value == values.get("qk_rope_head_dim"):
        return HEAD_DIM // 2
    for pattern, size in _SIZES:
        if re.fullmatch(pattern, name):
            off = size is None or (value in (0, 1, -1) and name != "pad_token_id")
            return None if off else type(value)(size)
    return 16 if isinstance(value, int) and value > 64 else None


def _per_layer(values: dict[str, Any]) -> dict[str, Any]:
    """Return the per-layer lists, cut to layers that contain each combination of entries once."""
    key = next((n for n in ("num_hidden_layers", "num_layers", "n_layer") if isinstance(values.get(n), int)), "")
    layers = values.get(key, 0)
    lists = {name: x for name, x in values.items() if isinstance(x, list | tuple) and len(x) == layers > 2}
    if not lists:
        return {}
    seen = dict[str, int]()
    for at in range(layers):
        seen.setdefault(repr([x[at] for x in lists.values()]), at)
    kept = [*seen.values()][:4] if len(seen) > 1 else [0, 1]
    cut = {name: [_size_of(name, x[at], values) or x[at] for at in kept] for name, x in lists.items()}
    return {key: len(kept)} | cut


def default_model(family: str) -> Any:
    """Return the model of the family's default config."""
    kind, _, model_type = family.partition("/")
    return _auto(kind).from_config(config_class(model_type)(), dtype=torch.float32)


def _auto(kind: str) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM if kind == "causal" else transformers.AutoModelForMaskedLM


def build(family: str, changes: dict[str, Any], seed: int) -> Any:
    """Return a model of `family` in fp32 with random weights that depend on `seed` alone."""
    kind, _, model_type = family.partition("/")
    if kind == "vision":
        heads = {name: value for name, value in changes.items() if name == "num_key_value_heads"}
        return pictures.build(model_type, seed, text_config={**pictures.FAMILIES[model_type]["text_config"], **heads})
    config = shrunk(config_class(model_type), changes)
    if kind == "causal" and getattr(config, "is_decoder", None) is False:
        config.is_decoder = True
    if getattr(config.get_text_config(), "attn_logit_softcapping", None):
        config._attn_implementation = "eager"  # with sdpa, transformers leaves out the softcap
    auto = _auto(kind)
    with torch.device("meta"):
        count = sum(p.numel() for p in auto.from_config(config, dtype=torch.float32).parameters())
    if count > PARAMETERS:
        raise ValueError(f"{family} has {count:,} parameters, its config was not made small")
    torch.manual_seed(seed)
    model = auto.from_config(config, dtype=torch.float32)
    draw(model, seed)
    return model


@torch.no_grad()
def draw(model: Any, seed: int) -> None:
    """Draw weights large enough that attention is not uniform, and biases and norms that differ."""
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        noise = torch.randn(p.shape, generator=generator)
        if p.dim() < 2:
            p += 0.1 * noise
        elif 0 < (std := float(p.std())) < 0.1:
            p *= min(0.15, 1 / math.sqrt(p.shape[-1])) / std
