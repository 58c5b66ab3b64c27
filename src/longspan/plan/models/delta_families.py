"""Families with gated DeltaNet: Qwen3.5, dense and with experts, and OLMo-Hybrid."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import chain

from longspan.plan.layers import Linear, Parameter, Softmax
from longspan.plan.models.blocks import (
    attention,
    dense,
    experts,
    full_at_intervals,
    gated_mlp,
    linear,
    norm,
    softmax,
)
from longspan.plan.models.family import Config, Family, Part
from longspan.plan.models.hybrid_families import delta_rule, next_experts


def _qwen_weights(c: Config, mixer: Linear) -> Iterator[Parameter]:
    heads, values = mixer.q_heads, mixer.q_heads * mixer.v_head_dim
    yield Parameter("linear_attn.dt_bias", (heads,))
    yield Parameter("linear_attn.A_log", (heads,))
    yield Parameter("linear_attn.conv1d.weight", (mixer.channels, 1, mixer.kernel))
    yield from norm("linear_attn.norm", mixer.v_head_dim)
    yield from linear("linear_attn.out_proj", values, c.d)
    for name, size in (("qkv", mixer.channels), ("z", values), ("b", heads), ("a", heads)):
        yield from linear(f"linear_attn.in_proj_{name}", c.d, size)


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


_QWEN_MIXERS = {
    **softmax(partial(attention, qk_norm="head", gate=True), window=False),
    "linear_attention": Part(delta_rule, _qwen_weights),
}
_QWEN_SIZES = {
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
_QWEN_TYPES = partial(full_at_intervals, "full_attention_interval", "linear_attention")

FAMILIES = {
    "qwen3_5": Family(
        _QWEN_MIXERS, dense(gated_mlp), {**_QWEN_SIZES, "num_key_value_heads": 4}, types=_QWEN_TYPES, listed=True
    ),
    "qwen3_5_moe": Family(
        _QWEN_MIXERS,
        experts(next_experts, shared=lambda c: c.count("shared_expert_intermediate_size")),
        {
            **_QWEN_SIZES,
            "num_key_value_heads": 2,
            "intermediate_size": 512,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
        },
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
}
