"""Families with latent or linear attention: DeepSeek-V3, Qwen3-Next, MiniMax-Text-01."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from longspan.core.errors import LongspanError
from longspan.plan.layers import Lightning, Linear, Mlp, Parameter, Softmax
from longspan.plan.models.blocks import (
    attention,
    every_step,
    experts,
    full_at_intervals,
    gated,
    grouped,
    linear,
    norm,
    routed_experts,
    softmax,
)
from longspan.plan.models.families import LOCAL_EXPERTS
from longspan.plan.models.family import Config, Family, Part

# DeepSeek-V3: multi-head latent attention, routed and shared experts.


def _latent(c: Config) -> Softmax:
    q, rope = c.count("num_attention_heads"), c.count("qk_rope_head_dim")
    dim = c.count("qk_nope_head_dim") + rope
    return Softmax(q, q, dim, c.count("v_head_dim"), latent_dim=c.count("kv_lora_rank") + rope, rope_dim=rope)


def _attention(c: Config, mixer: Softmax) -> Iterator[Parameter]:
    q, bias, q_rank, kv_rank = (
        mixer.q_heads,
        c.flag("attention_bias"),
        c.optional("q_lora_rank"),
        c.count("kv_lora_rank"),
    )
    if q_rank is None:
        yield from linear("self_attn.q_proj", c.d, q * mixer.head_dim)
    else:
        yield from linear("self_attn.q_a_proj", c.d, q_rank, bias)
        yield from norm("self_attn.q_a_layernorm", q_rank)
        yield from linear("self_attn.q_b_proj", q_rank, q * mixer.head_dim)
    yield from linear("self_attn.kv_a_proj_with_mqa", c.d, mixer.latent_dim, bias)
    yield from norm("self_attn.kv_a_layernorm", kv_rank)
    yield from linear("self_attn.kv_b_proj", kv_rank, q * (c.count("qk_nope_head_dim") + mixer.v_head_dim))
    yield from linear("self_attn.o_proj", q * mixer.v_head_dim, c.d, bias)


def _experts(c: Config, mlp: Mlp) -> Iterator[Parameter]:
    yield from routed_experts(c, mlp, router_last=True)
    if mlp.experts:
        yield from gated("mlp.shared_experts", c.d, mlp.shared_ffn)


def _after_dense(c: Config, layer: int) -> bool:
    frequency = c.values.get("moe_layer_freq", 1)
    if frequency != 1:
        raise LongspanError(f"{c.where}: moe_layer_freq={frequency!r}; transformers builds 1 only, set it to 1")
    return layer >= c.count("first_k_dense_replace", minimum=0)


# Qwen3-Next: gated linear attention (the delta rule).


def _delta(c: Config) -> Linear:
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


def _next_experts(c: Config, mlp: Mlp) -> Iterator[Parameter]:
    yield from routed_experts(c, mlp)
    if mlp.experts:
        yield from gated("mlp.shared_expert", c.d, mlp.shared_ffn)
        yield from linear("mlp.shared_expert_gate", c.d, 1)


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


def _lightning(c: Config) -> Lightning:
    heads, dim = grouped(c).q_heads, grouped(c).head_dim
    return Lightning(heads, heads, dim, dim, columns=1, chunk=c.count("block_size"))


def _lightning_weights(c: Config, mixer: Linear) -> Iterator[Parameter]:
    values = mixer.q_heads * mixer.head_dim
    yield from norm("self_attn.norm", values)
    yield from linear("self_attn.qkv_proj", c.d, 3 * values)
    yield from linear("self_attn.out_proj", values, c.d)
    yield from linear("self_attn.output_gate", c.d, values)


FAMILIES = {
    "deepseek_v3": Family(
        softmax(_attention, _latent),
        experts(
            _experts, _after_dense, shared=lambda c: c.count("moe_intermediate_size") * c.count("n_shared_experts")
        ),
        {
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "n_shared_experts": 1,
            "moe_intermediate_size": 2048,
            "first_k_dense_replace": 3,
            "max_position_embeddings": 4096,
        },
        spellings={"num_experts": ("n_routed_experts", "num_local_experts")},
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
        spellings=LOCAL_EXPERTS,
        types=_types,
        listed=True,
        order=("attention", "input_layernorm", "post_attention_layernorm", "mlp"),
    ),
}
