"""Qwen 2, 3, 3-MoE, and Next with gated linear attention (the delta rule)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from longspan.plan.layers import Linear, Mlp, Parameter
from longspan.plan.models.blocks import (
    attention,
    dense,
    every_step,
    experts,
    full_at_intervals,
    gated,
    gated_mlp,
    linear,
    norm,
    routed_experts,
    sliding_everywhere,
    sliding_window,
    softmax,
)
from longspan.plan.models.family import Config, Family, Part


def _sliding_after(c: Config, layer: int) -> str:
    sliding = sliding_window(c) is not None and layer >= c.count("max_window_layers", minimum=0)
    return "sliding_attention" if sliding else "full_attention"


def _delta(c: Config) -> Linear:
    k, v = c.count("linear_num_key_heads"), c.count("linear_num_value_heads")
    c.divides("linear_num_value_heads", "linear_num_key_heads", v, k)
    return Linear(v, k, c.count("linear_key_head_dim"), c.count("linear_value_head_dim"))


def _delta_weights(c: Config, mixer: Linear) -> Iterator[Parameter]:
    keys, values = mixer.kv_heads * mixer.head_dim, mixer.q_heads * mixer.v_head_dim
    yield Parameter("linear_attn.dt_bias", (mixer.q_heads,))
    yield Parameter("linear_attn.A_log", (mixer.q_heads,))
    yield Parameter("linear_attn.conv1d.weight", (2 * keys + values, 1, c.count("linear_conv_kernel_dim")))
    yield from linear("linear_attn.in_proj_qkvz", c.d, 2 * keys + 2 * values)
    yield from linear("linear_attn.in_proj_ba", c.d, 2 * mixer.q_heads)
    yield from norm("linear_attn.norm", mixer.v_head_dim)
    yield from linear("linear_attn.out_proj", values, c.d)


def _next_experts(c: Config, mlp: Mlp) -> Iterator[Parameter]:
    yield from routed_experts(c, mlp)
    if mlp.experts:
        yield from gated("mlp.shared_expert", c.d, mlp.shared_ffn)
        yield from linear("mlp.shared_expert_gate", c.d, 1)


_WINDOW_OFF = {"use_sliding_window": False, "sliding_window": 4096, "max_position_embeddings": 32768}

FAMILIES = {
    "qwen2": Family(
        softmax(partial(attention, qkv_bias=True, out_bias=False)),
        dense(gated_mlp),
        {"num_key_value_heads": 32, "max_window_layers": 28, **_WINDOW_OFF},
        types=_sliding_after,
        listed=True,
    ),
    "qwen3": Family(
        softmax(partial(attention, qk_norm="head")),
        dense(gated_mlp),
        {"num_key_value_heads": 32, "head_dim": 128, "max_window_layers": 28, **_WINDOW_OFF},
        types=_sliding_after,
        listed=True,
    ),
    "qwen3_moe": Family(
        softmax(partial(attention, qk_norm="head")),
        experts(partial(routed_experts, router_last=True), every_step),
        {
            "num_key_value_heads": 4,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "decoder_sparse_step": 1,
            **_WINDOW_OFF,
        },
        spellings={"num_experts": ("num_experts", "num_local_experts")},
        types=sliding_everywhere,
    ),
    "qwen3_next": Family(
        {
            **softmax(partial(attention, qk_norm="head", gate=True), window=False),
            "linear_attention": Part(_delta, _delta_weights),
        },
        experts(_next_experts, every_step, shared=lambda c: c.count("shared_expert_intermediate_size")),
        {
            "num_key_value_heads": 2,
            "head_dim": 256,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "decoder_sparse_step": 1,
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "full_attention_interval": 4,
            "partial_rotary_factor": 0.25,
            "max_position_embeddings": 32768,
        },
        types=partial(full_at_intervals, "full_attention_interval", "linear_attention"),
        listed=True,
    ),
}
