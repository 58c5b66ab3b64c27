"""Llama and models with its layers: Mistral, Mixtral, Phi-3, OLMo-2, Gemma 2 and 3; unknown types are read as Llama."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from longspan.plan.layers import Mlp, Parameter, Softmax
from longspan.plan.models.blocks import (
    attention,
    dense,
    experts,
    full_at_intervals,
    gated,
    gated_mlp,
    linear,
    routed_experts,
    sliding_everywhere,
    sliding_first,
    softmax,
)
from longspan.plan.models.family import Config, Family


def _llama_mlp(c: Config, mlp: Mlp) -> Iterator[Parameter]:
    yield from gated("mlp", c.d, mlp.ffn, c.flag("mlp_bias"))


def _phi3_attention(c: Config, mixer: Softmax) -> Iterator[Parameter]:
    q, kv, dim = mixer.q_heads, mixer.kv_heads, mixer.head_dim
    yield from linear("self_attn.o_proj", q * dim, c.d)
    yield from linear("self_attn.qkv_proj", c.d, (q + 2 * kv) * dim)


def _phi3_mlp(c: Config, mlp: Mlp) -> Iterator[Parameter]:
    yield from linear("mlp.gate_up_proj", c.d, 2 * mlp.ffn)
    yield from linear("mlp.down_proj", mlp.ffn, c.d)


LOCAL_EXPERTS = {"num_experts": ("num_local_experts", "num_experts")}

EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")

LLAMA_LIKE = Family(
    softmax(attention, chunk=True),
    dense(_llama_mlp),
    {"use_sliding_window": True},
    {"sliding_window": ("sliding_window", "local_attention")},
    listed=True,
)

SPARSE_LLAMA_LIKE = replace(
    LLAMA_LIKE,
    mlp=experts(routed_experts),
    spellings={
        **LLAMA_LIKE.spellings,
        "num_experts": EXPERT_COUNTS,
        "num_experts_per_tok": ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts"),
        "moe_intermediate_size": ("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size"),
    },
)

_FOUR_NORMS = (
    "attention",
    "mlp",
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)

FAMILIES = {
    "llama": Family(softmax(attention), dense(_llama_mlp), {"max_position_embeddings": 2048}),
    "mistral": Family(
        softmax(partial(attention, qkv_bias=False, out_bias=False)),
        dense(gated_mlp),
        {"num_key_value_heads": 8, "sliding_window": 4096, "max_position_embeddings": 131072},
        types=sliding_everywhere,
    ),
    "mixtral": Family(
        softmax(partial(attention, qkv_bias=False, out_bias=False)),
        experts(routed_experts, ffn="intermediate_size"),
        {"num_key_value_heads": 8, "max_position_embeddings": 131072, "num_experts": 8, "num_experts_per_tok": 2},
        spellings=LOCAL_EXPERTS,
        types=sliding_everywhere,
    ),
    "phi3": Family(
        softmax(_phi3_attention),
        dense(_phi3_mlp),
        {"max_position_embeddings": 4096, "original_max_position_embeddings": 4096},
        types=sliding_everywhere,
    ),
    "olmo2": Family(
        softmax(partial(attention, qk_norm="all heads")),
        dense(gated_mlp),
        {"max_position_embeddings": 2048},
        order=("attention", "mlp", "post_attention_layernorm", "post_feedforward_layernorm"),
    ),
    "gemma2": Family(
        softmax(attention),
        dense(gated_mlp),
        {
            "num_key_value_heads": 4,
            "head_dim": 256,
            "sliding_window": 4096,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": True,
        },
        types=sliding_first,
        listed=True,
        order=_FOUR_NORMS,
    ),
    "gemma3": Family(
        softmax(partial(attention, qk_norm="head")),
        dense(gated_mlp),
        {
            # The published configs of 4B to 27B leave some of these sizes out.
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "vocab_size": 262208,
            "sliding_window": 4096,
            "sliding_window_pattern": 6,
            "max_position_embeddings": 131072,
            "tie_word_embeddings": True,
        },
        types=partial(full_at_intervals, "sliding_window_pattern", "sliding_attention"),
        listed=True,
        order=_FOUR_NORMS,
    ),
}
