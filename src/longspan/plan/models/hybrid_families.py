"""Families with linear attention: Qwen3-Next, Qwen3.5, OLMo-Hybrid, Kimi-Linear, MiniMax-Text-01."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from itertools import chain
from typing import Any

from longspan.core.errors import LongspanError
from longspan.plan.layers import Linear, Mlp, Parameter, Softmax
from longspan.plan.models.blocks import (
    attention,
    dense,
    every_step,
    experts,
    full_at_intervals,
    gated,
    gated_mlp,
    grouped,
    linear,
    norm,
    routed_experts,
    softmax,
)
from longspan.plan.models.families import after_dense, latent, latent_attention, shared_and_routed, shared_size
from longspan.plan.models.family import Config, Family, Part

# Gated DeltaNet: Qwen3-Next, Qwen3.5 and OLMo-Hybrid.


def _delta_rule(c: Config) -> Linear:
    k, v = c.count("linear_num_key_heads"), c.count("linear_num_value_heads")
    c.divides("linear_num_value_heads", "linear_num_key_heads", v, k)
    dim, v_dim = c.count("linear_key_head_dim"), c.count("linear_value_head_dim")
    channels, kernel = 2 * k * dim + v * v_dim, c.count("linear_conv_kernel_dim")
    return Linear(v, k, dim, v_dim, columns=dim, channels=channels, kernel=kernel)


def _delta_weights(c: Config, mixer: Linear) -> Iterator[Parameter]:
    values = mixer.q_heads * mixer.v_head_dim
    yield Parameter("linear_attn.dt_bias", (mixer.q_heads,))
    yield Parameter("linear_attn.A_log", (mixer.q_heads,))
    yield Parameter("linear_attn.conv1d.weight", (mixer.channels, 1, mixer.kernel))
    yield from linear("linear_attn.in_proj_qkvz", c.d, mixer.channels + values)
    yield from linear("linear_attn.in_proj_ba", c.d, 2 * mixer.q_heads)
    yield from norm("linear_attn.norm", mixer.v_head_dim)
    yield from linear("linear_attn.out_proj", values, c.d)


def _qwen_weights(c: Config, mixer: Linear) -> Iterator[Parameter]:
    heads, values = mixer.q_heads, mixer.q_heads * mixer.v_head_dim
    yield Parameter("linear_attn.dt_bias", (heads,))
    yield Parameter("linear_attn.A_log", (heads,))
    yield Parameter("linear_attn.conv1d.weight", (mixer.channels, 1, mixer.kernel))
    yield from norm("linear_attn.norm", mixer.v_head_dim)
    yield from linear("linear_attn.out_proj", values, c.d)
    for name, size in (("qkv", mixer.channels), ("z", values), ("b", heads), ("a", heads)):
        yield from linear(f"linear_attn.in_proj_{name}", c.d, size)


def _next_experts(c: Config, mlp: Mlp) -> Iterator[Parameter]:
    """Yield routed experts and a shared one with a gate; in a dense layer a dense MLP."""
    yield from routed_experts(c, mlp)
    if mlp.experts:
        yield from gated("mlp.shared_expert", c.d, mlp.shared_ffn)
        yield from linear("mlp.shared_expert_gate", c.d, 1)


def _olmo_delta(c: Config) -> Linear:
    k, v = (c.optional(f"linear_num_{x}_heads") or c.count("num_attention_heads") for x in ("key", "value"))
    c.divides("linear_num_value_heads", "linear_num_key_heads", v, k)
    dim = c.optional("linear_key_head_dim") or max(1, int(0.75 * c.d / k))
    v_dim, kernel = c.optional("linear_value_head_dim") or 2 * dim, c.count("linear_conv_kernel_dim")
    return Linear(v, k, dim, v_dim, columns=dim, channels=2 * k * dim + v * v_dim, kernel=kernel)


def _olmo_delta_weights(c: Config, mixer: Linear) -> Iterator[Parameter]:
    """Yield the norms too: a layer with softmax attention has others."""
    heads, keys, values = mixer.q_heads, mixer.kv_heads * mixer.head_dim, mixer.q_heads * mixer.v_head_dim
    yield from norm("input_layernorm", c.d)
    yield from norm("post_attention_layernorm", c.d)
    yield Parameter("linear_attn.A_log", (heads,))
    yield Parameter("linear_attn.dt_bias", (heads,))
    for name, size in (("q", keys), ("k", keys), ("v", values), ("a", heads), ("b", heads), ("g", values)):
        yield from linear(f"linear_attn.{name}_proj", c.d, size)
    yield from linear("linear_attn.o_proj", values, c.d)
    yield Parameter("linear_attn.conv1d.weight", (mixer.channels, 1, mixer.kernel))
    yield from norm("linear_attn.o_norm", mixer.v_head_dim)


def _olmo_attention(c: Config, mixer: Softmax) -> Iterator[Parameter]:
    return chain(
        attention(c, mixer, qk_norm="all heads"),
        norm("post_attention_layernorm", c.d),
        norm("post_feedforward_layernorm", c.d),
    )


def _olmo_types(c: Config, layer: int) -> str:
    """Softmax attention in every fourth layer, or in the last of fewer."""
    layers = c.count("num_hidden_layers")
    return "full_attention" if layer % 4 == 3 or (layers < 4 and layer == layers - 1) else "linear_attention"


# Kimi-Linear: the delta rule with a decay per key dim (KDA); latent attention in between, without positions.


def _kimi_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config with the values of its `linear_attn_config`, under the names of transformers."""
    inner = config.get("linear_attn_config") or {}
    found = {name: inner[key] for key, name in _KIMI.items() if key in inner}
    full = inner.get("full_attn_layers")  # numbered from 1
    if full is not None and config.get("layer_types") is None:
        layers = range(1, config.get("num_hidden_layers", 0) + 1)
        found["layer_types"] = ["full_attention" if layer in full else "linear_attention" for layer in layers]
    return {**config, **found}


_KIMI = {
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}


def _kimi_types(c: Config, layer: int) -> str:
    return "full_attention" if layer and layer % 4 == 0 else "linear_attention"


def _kimi_sparse(c: Config, layer: int) -> bool:
    listed = c.values.get("mlp_layer_types")
    return after_dense(c, layer) if listed is None else listed[layer] == "sparse"


def _kimi_delta(c: Config) -> Linear:
    heads, dim = c.count("linear_num_heads"), c.count("linear_head_dim")
    kernel = c.count("linear_conv_kernel_dim")
    return Linear(heads, heads, dim, dim, columns=dim, channels=3 * heads * dim, kernel=kernel)


def _kimi_delta_weights(c: Config, mixer: Linear) -> Iterator[Parameter]:
    heads, dim, width = mixer.q_heads, mixer.head_dim, mixer.q_heads * mixer.head_dim
    for name in ("q_proj", "k_proj", "v_proj"):
        yield from linear(f"self_attn.{name}", c.d, width)
    yield Parameter("self_attn.conv1d.weight", (mixer.channels, 1, mixer.kernel))
    yield Parameter("self_attn.forget_gate.dt_bias", (width,))
    yield Parameter("self_attn.forget_gate.A_log", (1, 1, heads, 1))
    for name in ("forget_gate.f", "g"):
        yield from linear(f"self_attn.{name}_a_proj", c.d, dim)
        yield from linear(f"self_attn.{name}_b_proj", dim, width)
    yield from linear("self_attn.b_proj", c.d, heads)
    yield from norm("self_attn.o_norm", dim)
    yield from linear("self_attn.o_proj", width, c.d)


# MiniMax: lightning (linear) attention, softmax in between, experts in every layer.


def _types(c: Config, layer: int) -> str:
    if c.values.get("attn_type_list") is not None and c.values.get("layer_types") is None:
        raise LongspanError(
            f"{c.where}: transformers reads layer_types, not attn_type_list; give layer_types, with "
            f"'linear_attention' for 0 and 'full_attention' for 1"
        )
    if c.optional("sliding_window") is not None:
        raise LongspanError(f"{c.where}: sliding_window is not supported for this model_type; set it to null")
    return "linear_attention" if layer % 2 else "full_attention"


def _lightning(c: Config) -> Linear:
    heads, dim = grouped(c).q_heads, grouped(c).head_dim
    return Linear(heads, heads, dim, dim, columns=1, chunk=c.count("block_size"), backward_op="all_gather")


def _lightning_weights(c: Config, mixer: Linear) -> Iterator[Parameter]:
    values = mixer.q_heads * mixer.head_dim
    yield from norm("self_attn.norm", values)
    yield from linear("self_attn.qkv_proj", c.d, 3 * values)
    yield from linear("self_attn.out_proj", values, c.d)
    yield from linear("self_attn.output_gate", c.d, values)


_GATED_SOFTMAX = softmax(partial(attention, qk_norm="head", gate=True), window=False)
_QWEN_MIXERS = {**_GATED_SOFTMAX, "linear_attention": Part(_delta_rule, _qwen_weights)}
_QWEN_SIZES = {
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "full_attention_interval": 4,
    "partial_rotary_factor": 0.25,
    "max_position_embeddings": 32768,
}
_QWEN_EXPERTS = {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}
_QWEN_TYPES = partial(full_at_intervals, "full_attention_interval", "linear_attention")


def _shared_expert(c: Config) -> int:
    return c.count("shared_expert_intermediate_size")


FAMILIES = {
    "qwen3_next": Family(
        {**_GATED_SOFTMAX, "linear_attention": Part(_delta_rule, _delta_weights)},
        experts(_next_experts, every_step, shared=_shared_expert),
        {**_QWEN_SIZES, **_QWEN_EXPERTS, "num_experts": 512, "num_experts_per_tok": 10, "decoder_sparse_step": 1},
        types=_QWEN_TYPES,
        listed=True,
    ),
    "qwen3_5": Family(
        _QWEN_MIXERS, dense(gated_mlp), {**_QWEN_SIZES, "num_key_value_heads": 4}, types=_QWEN_TYPES, listed=True
    ),
    "qwen3_5_moe": Family(
        _QWEN_MIXERS,
        experts(_next_experts, shared=_shared_expert),
        {**_QWEN_SIZES, **_QWEN_EXPERTS, "intermediate_size": 512, "num_experts": 256, "num_experts_per_tok": 8},
        types=_QWEN_TYPES,
        listed=True,
    ),
    "olmo_hybrid": Family(
        {
            **softmax(_olmo_attention, window=False),
            "linear_attention": Part(_olmo_delta, _olmo_delta_weights),
        },
        dense(gated_mlp),
        {"linear_conv_kernel_dim": 4, "max_position_embeddings": 65536},
        types=_olmo_types,
        listed=True,
        order=("attention", "mlp"),
    ),
    "minimax": Family(
        {
            **softmax(partial(attention, qkv_bias=False, out_bias=False), window=False),
            "linear_attention": Part(_lightning, _lightning_weights),
        },
        experts(routed_experts, ffn="intermediate_size"),
        {
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "block_size": 256,
        },
        types=_types,
        listed=True,
        order=("attention", "input_layernorm", "post_attention_layernorm", "mlp"),
    ),
    "kimi_linear": Family(
        {
            **softmax(latent_attention, latent, window=False),
            "linear_attention": Part(_kimi_delta, _kimi_delta_weights),
        },
        experts(shared_and_routed, _kimi_sparse, shared=shared_size),
        {
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
            "num_key_value_heads": 32,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "n_shared_experts": 1,
            "moe_intermediate_size": 1024,
            "first_k_dense_replace": 1,
            "max_position_embeddings": 1048576,
            "linear_head_dim": 128,
            "linear_num_heads": 32,
            "linear_conv_kernel_dim": 4,
        },
        spellings={
            "num_experts_per_tok": ("num_experts_per_token", "num_experts_per_tok"),
            "n_shared_experts": ("num_shared_experts", "n_shared_experts"),
            "max_position_embeddings": ("model_max_length", "max_position_embeddings"),
        },
        types=_kimi_types,
        listed=True,
        rotary=False,
        config=_kimi_config,
    ),
}
