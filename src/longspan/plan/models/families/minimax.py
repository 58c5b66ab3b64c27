"""MiniMax-Text-01: lightning (linear) attention, softmax in between, experts in every layer."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from longspan.core.errors import LongspanError
from longspan.plan.layers import Linear, Parameter
from longspan.plan.models.blocks import attention, experts, grouped, linear, norm, routed_experts, softmax
from longspan.plan.models.families.llama import LOCAL_EXPERTS
from longspan.plan.models.family import Config, Family, Part


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
    heads = grouped(c)
    return Linear(heads.q_heads, heads.q_heads, heads.head_dim, heads.head_dim)


def _lightning_weights(c: Config, mixer: Linear) -> Iterator[Parameter]:
    values = mixer.q_heads * mixer.head_dim
    yield from norm("self_attn.norm", values)
    yield from linear("self_attn.qkv_proj", c.d, 3 * values)
    yield from linear("self_attn.out_proj", values, c.d)
    yield from linear("self_attn.output_gate", c.d, values)


FAMILIES = {
    "minimax": Family(
        {
            **softmax(partial(attention, qkv_bias=False, out_bias=False), window=False),
            "linear_attention": Part(_lightning, _lightning_weights),
        },
        experts(routed_experts, ffn="intermediate_size"),
        {"num_key_value_heads": 8, "max_position_embeddings": 131072, "num_experts": 8, "num_experts_per_tok": 2},
        spellings=LOCAL_EXPERTS,
        types=_types,
        listed=True,
        order=("attention", "input_layernorm", "post_attention_layernorm", "mlp"),
    )
}
