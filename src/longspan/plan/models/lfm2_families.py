"""Families with short convolutions in place of most attention: LFM2, dense and with experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from longspan.plan.layers import Mlp, Parameter, ShortConv, Softmax
from longspan.plan.models.blocks import attention, experts, linear, routed_experts, softmax
from longspan.plan.models.family import Config, Family, Part


def _conv(c: Config) -> ShortConv:
    return ShortConv(0, 0, 0, 0, channels=c.d, kernel=c.count("conv_L_cache"))


def _conv_weights(c: Config, mixer: ShortConv) -> Iterator[Parameter]:
    bias = c.flag("conv_bias")
    yield Parameter("conv.conv.weight", (c.d, 1, mixer.kernel))
    if bias:
        yield Parameter("conv.conv.bias", (c.d,))
    yield from linear("conv.in_proj", c.d, 3 * c.d, bias)
    yield from linear("conv.out_proj", c.d, c.d, bias)


def _attention(c: Config, mixer: Softmax) -> Iterator[Parameter]:
    for p in attention(c, mixer, qkv_bias=False, out_bias=False, qk_norm="head"):
        yield replace(p, name=p.name.replace("o_proj", "out_proj").replace("_norm", "_layernorm"))


def _types(c: Config, layer: int) -> str:
    full = c.find("full_attn_idxs")[1]
    return "full_attention" if full is None or layer in full else "conv"


def _mlp(c: Config, layer: int) -> Mlp:
    """Return an MLP of two thirds of the size in the config, rounded up, as LFM2 adjusts it."""
    ffn, scale = c.ffn, c.find("block_ffn_dim_multiplier")[1]
    if c.flag("block_auto_adjust_ff_dim"):
        ffn = int(2 * ffn / 3)
        if scale is not None:
            multiple = c.count("block_multiple_of")
            ffn = multiple * -(-int(scale * ffn) // multiple)
    return Mlp(ffn)


def _mlp_weights(c: Config, mlp: Mlp) -> Iterator[Parameter]:
    if mlp.experts:
        yield from routed_experts(c, mlp)
        return
    for name, inputs, outputs in (("w1", c.d, mlp.ffn), ("w3", c.d, mlp.ffn), ("w2", mlp.ffn, c.d)):
        yield from linear(f"mlp.{name}", inputs, outputs)


_LFM2 = Family(
    {**softmax(_attention, window=False), "conv": Part(_conv, _conv_weights)},
    Part(_mlp, _mlp_weights),
    {
        "num_key_value_heads": 8,
        "conv_L_cache": 3,
        "block_multiple_of": 256,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": True,
        "tie_word_embeddings": True,
        "max_position_embeddings": 128000,
    },
    spellings={
        "intermediate_size": ("block_ff_dim", "intermediate_size"),
        "tie_word_embeddings": ("tie_embedding", "tie_word_embeddings"),
    },
    types=_types,
    listed=True,
    order=("attention", "mlp", "operator_norm", "ffn_norm"),
    root=("model.embed_tokens", "", "model.embedding_norm"),
)
FAMILIES = {
    "lfm2": _LFM2,
    "lfm2_moe": replace(
        _LFM2,
        mlp=experts(_mlp_weights, lambda c, layer: layer >= c.count("num_dense_layers", minimum=0)),
        defaults={
            "num_key_value_heads": 8,
            "conv_L_cache": 3,
            "num_dense_layers": 2,
            "num_experts": 32,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1792,
            "intermediate_size": 7168,
            "tie_word_embeddings": True,
            "max_position_embeddings": 128000,
        },
        spellings={"tie_word_embeddings": ("tie_embedding", "tie_word_embeddings")},
    ),
}
