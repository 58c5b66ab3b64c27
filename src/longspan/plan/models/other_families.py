"""Families with latent attention: DeepSeek-V3."""

from __future__ import annotations

from collections.abc import Iterator

from longspan.core.errors import LongspanError
from longspan.plan.layers import Mlp, Parameter, Softmax
from longspan.plan.models.blocks import experts, gated, linear, norm, routed_experts, softmax
from longspan.plan.models.family import Config, Family


def latent(c: Config) -> Softmax:
    """Return multi-head latent attention."""
    q, rope = c.count("num_attention_heads"), c.count("qk_rope_head_dim")
    dim = c.count("qk_nope_head_dim") + rope
    return Softmax(q, q, dim, c.count("v_head_dim"), latent_dim=c.count("kv_lora_rank") + rope, rope_dim=rope)


def latent_attention(c: Config, mixer: Softmax) -> Iterator[Parameter]:
    """Yield the projections of multi-head latent attention."""
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


def shared_and_routed(c: Config, mlp: Mlp) -> Iterator[Parameter]:
    """Yield routed experts, their router and the shared experts; in a dense layer a dense MLP."""
    yield from routed_experts(c, mlp, router_last=True)
    if mlp.experts:
        yield from gated("mlp.shared_experts", c.d, mlp.shared_ffn)


def after_dense(c: Config, layer: int) -> bool:
    """Whether a layer comes after the `first_k_dense_replace` dense ones."""
    frequency = c.values.get("moe_layer_freq", 1)
    if frequency != 1:
        raise LongspanError(f"{c.where}: moe_layer_freq={frequency!r}; transformers builds 1 only, set it to 1")
    return layer >= c.count("first_k_dense_replace", minimum=0)


FAMILIES = {
    "deepseek_v3": Family(
        softmax(latent_attention, latent),
        experts(
            shared_and_routed,
            after_dense,
            shared=lambda c: c.count("moe_intermediate_size") * c.count("n_shared_experts"),
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
}
