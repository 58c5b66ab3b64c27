"""Make a small copy of a config: the same class and kinds of layers, few and narrow."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

VOCABULARY, HEADS, HEAD_DIM = 64, 4, 8
HIDDEN = HEADS * HEAD_DIM

# The first pattern that matches the whole name sets the size. Values that are 0, 1 or off by default stay so.
_SIZES: tuple[tuple[str, Any], ...] = (
    (r".*_(factor|ratio|coef|scale)|.*_pattern|n_window(_infer)?", None),
    (r".*(drop|pdrop|dropout)(_p|_prob|_rate|_path_rate|out)?|.*layerdrop|.*jitter.*", 0.0),
    (r"(decoder_|unpadded_)?vocab_size(_per_layer_input)?", VOCABULARY),
    (r"pad_token_id", 0),
    (r"bos_token_id|decoder_start_token_id", 1),
    (r".*_token_(id|index)|.*_(start|end)_token_id|image_patch_id", 2),
    (r".*max_position_embeddings|n_positions|n_ctx|max_seq_len|model_max_length|max_\w*_positions|context_length", 128),
    (r".*(window|chunk)(_size|_length|_len)?|local_attention", 8),
    (
        r"num_kv_shared_layers|(num_hidden|n|num|encoder|decoder|num_encoder|num_decoder|conf_num_hidden)_layers?|num_layers_per_stack",
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
    (r"patch_sizes?|spatial_patch_size", 4),
    (r"image_size|max_image_size|resolution", 16),
    (
        r"mm_tokens_per_image|num_(image_tokens|patches|position_embeddings)|num_query_tokens|\w*n_latents|posemb_\w+_size",
        16,
    ),
    (r"base_channels", HIDDEN),
    (r"index_block_size", 128),  # one block: its indexer compares blocks with positions
    (r"index_kpool", 2),
    (r"num_mel_bins|feature_size", 16),
    (r"conv_output_size", 2 * HIDDEN),
    (
        r"hidden_size|d_model|n_embd|dim|emb\w*_dim|embedding_(dim|size)|word_embed_proj_dim"
        r"|\w+_hidden_size|adapter_(in|out|input)_(dim|size)|(\w+_)?(in|out)put_(dim|size)|projection_dim|d_out"
        r"|hidden_dim",
        HIDDEN,
    ),
    (r".*(intermediate|ffn|ff|feed_forward|inner|hidden_dim).*(_size|_dim)?", 48),
    (r"(num_|n_|moe_num_)?(routed_|local_|zero_)?experts?(_num)?", 4),
    (r"num_experts_per_tok(en)?|moe_(k|topk)|\w*topk", 2),
    (r"n_groups?|topk_group|num_expert_group|o_groups|mamba_n_?groups", 1),
    (r".*shared_experts", 1),
)
_UNSET = ("head_dim", "num_key_value_heads", "num_experts_per_tok", "n_routed_experts", "n_shared_experts")
"""Sizes that a config may leave unset, although its model needs them."""


def shrunk(given: Any, changes: dict[str, Any], as_checkpoints: Mapping[str, Any] = {}) -> Any:
    """Return a config with small sizes, and with those of `changes` that it has.

    `given` is a config, or a class of configs: then every optional part is there. `as_checkpoints` has values that
    default configs of a `model_type` lack.
    """
    cls: Any = given if isinstance(given, type) else type(given)
    try:
        default = cls() if given is cls else given
    except Exception:  # a config with an inconsistent default may still accept small numbers
        default = None
    values = default.to_dict() if default is not None else {}
    sizes = {name: _size_of(name, value, values) for name, value in values.items()}
    sizes = {name: value for name, value in sizes.items() if value is not None}
    sizes |= _per_layer(values) | as_checkpoints.get(cls.model_type, {})
    sizes |= _placeholders(values)
    for name, kind in getattr(cls, "sub_configs", {}).items():
        sub: Any = getattr(default, name, None)
        if hasattr(sub, "to_dict"):
            sub = type(sub) if given is cls else sub
        elif given is not cls or not hasattr(kind, "from_dict") or kind is cls or "Auto" in kind.__name__:
            continue
        else:
            sub = kind
        sizes[name] = shrunk(sub, changes, as_checkpoints).to_dict()
    if "per_layer_config" in values and "qk_nope_head_dim" in values:  # one size for all layers
        sizes |= {"per_layer_config": {}, "head_dim": HEAD_DIM * 3 // 2}
    if "mrope_section" in (getattr(cls, "ignore_keys_at_rope_validation", None) or ()) and "rope_parameters" in values:
        sizes["rope_parameters"] = _with_axes(sizes.get("rope_parameters") or values["rope_parameters"] or {})
    if "kv_lora_rank" in values:  # no head shares keys and values
        changes = {name: value for name, value in changes.items() if name != "num_key_value_heads"}
    known = {*values, *getattr(cls, "attribute_map", {})}
    sizes |= {name: value for name, value in changes.items() if name in known}
    if given is not cls:
        sizes = {**{name: x for name, x in default.to_diff_dict().items() if name != "transformers_version"}, **sizes}
    return cls(**sizes)


def _placeholders(values: dict[str, Any]) -> dict[str, int]:
    """Return other ids for each special token of a config with several parts, the last ones of the vocabulary."""
    if values.get("vocabulary_map") or not any(
        isinstance(value, dict) and name.endswith("_config") for name, value in values.items()
    ):
        return {}
    names = [name for name in values if re.fullmatch(r"\w+_token_(id|index)|image_patch_id", name)]
    names = [name for name in names if not re.match("(pad|bos|eos|decoder_start|unk|sep|cls|mask)_", name)]
    return {name: VOCABULARY - 1 - i for i, name in enumerate(names)}


def _size_of(name: str, value: Any, values: dict[str, Any]) -> Any:
    if value is None and name in _UNSET:
        value = 2
    if name == "rope_parameters" and isinstance(value, dict):
        return _rope(value)
    if name == "model_args" and str(values.get("architecture")).startswith("mobilenetv5"):
        return {"channel_multiplier": 0.03, "msfa_output_resolution": 4}
    if name == "image_grid_pinpoints" and value:
        return [[16, 32], [32, 16], [32, 32]]
    if isinstance(value, list | tuple) and value and all(type(x) is int for x in value):
        if re.search("index|layer", name):  # numbers of layers
            return sorted({max(x, -2) if x < 2 else i % 2 for i, x in enumerate(value)})
        small = [_size_of(name, x, values) for x in value]
        return None if None in small or "multiplier" in name else small
    if isinstance(value, bool) or not isinstance(value, int | float):
        return {16: 4} if name == "projector_patch_to_query_dict" else None
    if name == "hidden_size" and "architecture" in values:  # of timm, which knows it
        return None
    if (times := _multiple(name, value, values)) > 1:
        return times * HIDDEN
    if name.endswith("_heads") and value == values.get("num_attention_heads"):
        return HEADS
    if name == "intermediate_size" and values.get("hidden_size") == 4 * value:
        return HIDDEN // 4
    if name == "window_size" and "downsample_rate" in values:
        return None
    if name == "num_heads" and values.get("expand") == 2:  # of Mamba-2, which checks that they fit
        return 2 * HEADS
    if name == "qk_rope_head_dim" and "mrope_section" in (values.get("rope_parameters") or ()):
        return HEAD_DIM  # `_rope` shares its half out over the axes
    if name == "head_dim" and value == values.get("qk_rope_head_dim"):
        return HEAD_DIM // 2
    for pattern, size in _SIZES:
        if re.fullmatch(pattern, name):
            off = size is None or (value in (0, 1, -1) and name != "pad_token_id")
            return None if off else type(value)(size)
    return 16 if isinstance(value, int) and value > 64 else None


def _multiple(name: str, value: float, values: dict[str, Any]) -> int:
    """Return how many patches of a vision tower a size joins, or how wide its MLP is, in units of its hidden size."""
    vision = values.get("vision_config")
    hidden = vision.get("hidden_size") if isinstance(vision, dict) else values.get("base_channels")
    if hidden is None and {"patch_size", "num_mel_bins"} & values.keys() and name == "intermediate_size":
        hidden = values.get("hidden_size")
    fits = isinstance(hidden, int) and isinstance(value, int) and re.search("hidden_size|intermediate_size", name)
    return int(value // hidden) if fits and hidden and value % hidden == 0 and value <= 16 * hidden else 1


def _rope(table: dict[str, Any]) -> dict[str, Any] | None:
    """Return RoPE's parameters with the axes of a small head; None if they need no change."""
    small: dict[str, Any] = {name: _rope(x) or x if isinstance(x, dict) else x for name, x in table.items()}
    if "mrope_section" in small:
        axes = len(small["mrope_section"])
        small |= {"mrope_section": [1] * (axes - 1) + [HEAD_DIM // 2 - axes + 1], "partial_rotary_factor": 1.0}
    return small if small != table else None


def _with_axes(table: dict[str, Any]) -> dict[str, Any]:
    """Return RoPE's parameters with three axes, which a default config may lack."""
    if "mrope_section" in table or any(isinstance(x, dict) for x in table.values()):
        return table
    return {"rope_type": "default", "rope_theta": 10000.0, **table, "mrope_section": [1, 1, HEAD_DIM // 2 - 2],
            "partial_rotary_factor": 1.0}  # fmt: skip


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
