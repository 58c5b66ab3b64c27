"""Families with softmax attention alone, and those next to a vision tower; unknown types are read as Llama."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from longspan.core.errors import LongspanError
from longspan.plan.layers import Mlp, Parameter, Softmax
from longspan.plan.models.blocks import (
    all_of_hidden,
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
    sliding_everywhere,
    sliding_first,
    sliding_window,
    softmax,
)
from longspan.plan.models.family import Config, Family
from longspan.plan.models.tower import qwen2_5_tower, qwen2_tower, qwen3_tower


def _llama_mlp(c: Config, mlp: Mlp) -> Iterator[Parameter]:
    yield from gated("mlp", c.d, mlp.ffn, c.flag("mlp_bias"))


def _phi3_attention(c: Config, mixer: Softmax) -> Iterator[Parameter]:
    q, kv, dim = mixer.q_heads, mixer.kv_heads, mixer.head_dim
    yield from linear("self_attn.o_proj", q * dim, c.d)
    yield from linear("self_attn.qkv_proj", c.d, (q + 2 * kv) * dim)


def _phi3_mlp(c: Config, mlp: Mlp) -> Iterator[Parameter]:
    yield from linear("mlp.gate_up_proj", c.d, 2 * mlp.ffn)
    yield from linear("mlp.down_proj", mlp.ffn, c.d)


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


def _sliding_after(c: Config, layer: int) -> str:
    sliding = sliding_window(c) is not None and layer >= c.count("max_window_layers", minimum=0)
    return "sliding_attention" if sliding else "full_attention"


_WINDOW_OFF = {"use_sliding_window": False, "sliding_window": 4096, "max_position_embeddings": 32768}


def _transposed(name: str, inputs: int, outputs: int) -> Iterator[Parameter]:
    # transformers' Conv1D keeps its matrix as [inputs, outputs].
    yield Parameter(f"{name}.weight", (inputs, outputs))
    yield Parameter(f"{name}.bias", (outputs,))


def _gpt2_attention(c: Config, mixer: Softmax) -> Iterator[Parameter]:
    yield from _transposed("attn.c_attn", c.d, 3 * c.d)
    yield from _transposed("attn.c_proj", c.d, c.d)


def _gpt2_mlp(c: Config, mlp: Mlp) -> Iterator[Parameter]:
    yield from _transposed("mlp.c_fc", c.d, mlp.ffn)
    yield from _transposed("mlp.c_proj", mlp.ffn, c.d)


def _neox_attention(c: Config, mixer: Softmax) -> Iterator[Parameter]:
    yield from linear("attention.query_key_value", c.d, 3 * c.d, c.flag("attention_bias"))
    yield from linear("attention.dense", c.d, c.d, c.flag("attention_bias"))


def _neox_mlp(c: Config, mlp: Mlp) -> Iterator[Parameter]:
    yield from linear("mlp.dense_h_to_4h", c.d, mlp.ffn, bias=True)
    yield from linear("mlp.dense_4h_to_h", mlp.ffn, c.d, bias=True)


def _with_sinks(c: Config) -> Softmax:
    return replace(grouped(c), sinks=True)


def _gpt_oss_experts(c: Config, mlp: Mlp) -> Iterator[Parameter]:
    yield from linear("mlp.router", c.d, mlp.experts, bias=True)
    yield Parameter("mlp.experts.gate_up_proj", (mlp.experts, c.d, 2 * mlp.ffn))
    yield Parameter("mlp.experts.gate_up_proj_bias", (mlp.experts, 2 * mlp.ffn))
    yield Parameter("mlp.experts.down_proj", (mlp.experts, mlp.ffn, c.d))
    yield Parameter("mlp.experts.down_proj_bias", (mlp.experts, c.d))


def latent(c: Config) -> Softmax:
    """Return multi-head latent attention."""
    q, rope = c.count("num_attention_heads"), c.count("qk_rope_head_dim")
    dim = c.count("qk_nope_head_dim") + rope
    return Softmax(q, q, dim, c.count("v_head_dim"), latent_dim=c.count("kv_lora_rank") + rope, rope_dim=rope)


def latent_attention(c: Config, mixer: Softmax) -> Iterator[Parameter]:
    """Yield the projections of multi-head latent attention."""
    q, bias = mixer.q_heads, c.flag("attention_bias")
    q_rank, kv_rank = c.optional("q_lora_rank"), c.count("kv_lora_rank")
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


def shared_size(c: Config) -> int:
    """Return the intermediate size of the shared experts together."""
    return c.count("moe_intermediate_size") * c.count("n_shared_experts")


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
        types=sliding_everywhere,
    ),
    "gpt2": Family(
        softmax(_gpt2_attention, all_of_hidden),
        dense(_gpt2_mlp, gated=False),
        {
            "tie_word_embeddings": True,
            "max_position_embeddings": 1024,
            "intermediate_size": None,
            "attn_pdrop": 0.1,
        },
        spellings={
            "hidden_size": ("n_embd", "hidden_size"),
            "num_hidden_layers": ("n_layer", "num_hidden_layers"),
            "num_attention_heads": ("n_head", "num_attention_heads"),
            "intermediate_size": ("n_inner",),
            "max_position_embeddings": ("n_positions", "max_position_embeddings"),
        },
        order=("ln_1", "attention", "ln_2", "mlp"),
        root=("transformer.wte", "transformer.wpe", "transformer.ln_f"),
        norm_bias=True,
    ),
    "gpt_neox": Family(
        softmax(_neox_attention, all_of_hidden),
        dense(_neox_mlp, gated=False),
        {"attention_bias": True, "max_position_embeddings": 2048, "rotary_pct": 0.25},
        order=("input_layernorm", "post_attention_layernorm", "attention", "mlp"),
        root=("gpt_neox.embed_in", "", "gpt_neox.final_layer_norm"),
        norm_bias=True,
    ),
    "gpt_oss": Family(
        softmax(attention, _with_sinks),
        experts(_gpt_oss_experts, ffn="intermediate_size"),
        {
            "num_key_value_heads": 8,
            "head_dim": 64,
            "sliding_window": 128,
            "num_experts": 128,
            "num_experts_per_tok": 4,
            "attention_bias": True,
            "max_position_embeddings": 131072,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        },
        types=sliding_first,
        listed=True,
    ),
    "deepseek_v3": Family(
        softmax(latent_attention, latent),
        experts(shared_and_routed, after_dense, shared=shared_size),
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
    ),
}


# Vision-language models: the language model of a Qwen next to a vision tower.
_ROOT = ("model.language_model.embed_tokens", "", "model.language_model.norm")
_QWEN2_VL = replace(
    FAMILIES["qwen2"],
    root=_ROOT,
    defaults={**FAMILIES["qwen2"].defaults, "num_key_value_heads": 8, "max_window_layers": 80},
)
_NO_WINDOW = {"use_sliding_window": False, "max_position_embeddings": 128000}

FAMILIES |= {
    "qwen2_vl": replace(_QWEN2_VL, tower=qwen2_tower),
    "qwen2_5_vl": replace(_QWEN2_VL, tower=qwen2_5_tower),
    "qwen3_vl": replace(
        FAMILIES["qwen3"],
        root=_ROOT,
        tower=qwen3_tower,
        defaults={"num_key_value_heads": 32, "head_dim": 128, **_NO_WINDOW},
        types=lambda c, layer: "full_attention",
        listed=False,
    ),
    "qwen3_vl_moe": replace(
        FAMILIES["qwen3_moe"],
        root=_ROOT,
        tower=qwen3_tower,
        defaults={
            "num_key_value_heads": 16,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "decoder_sparse_step": 1,
            **_NO_WINDOW,
        },
        types=lambda c, layer: "full_attention",
    ),
}
