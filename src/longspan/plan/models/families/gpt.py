"""GPT-2, GPT-NeoX, gpt-oss."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from longspan.plan.layers import Mlp, Parameter, Softmax
from longspan.plan.models.blocks import (
    all_of_hidden,
    attention,
    dense,
    experts,
    grouped,
    linear,
    sliding_first,
    softmax,
)
from longspan.plan.models.families.llama import LOCAL_EXPERTS
from longspan.plan.models.family import Config, Family


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


FAMILIES = {
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
        spellings=LOCAL_EXPERTS,
        types=sliding_first,
        listed=True,
    ),
}
