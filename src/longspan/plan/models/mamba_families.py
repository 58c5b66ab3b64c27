"""Families with Mamba-2 and an MLP in every layer: Bamba, Granite 4."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from longspan.core.errors import LongspanError
from longspan.plan.layers import Linear, Mlp, Parameter
from longspan.plan.models.blocks import attention, dense, experts, gated, linear, softmax
from longspan.plan.models.family import Config, Family, Part
from longspan.plan.models.hybrid_families import mamba2, mamba2_weights


def _expanded(c: Config) -> Linear:
    """Return Mamba-2 whose heads together have `mamba_expand` times the hidden size."""
    heads, width = c.count("mamba_num_heads"), c.count("mamba_expand") * c.d
    auto = c.find("mamba_head_dim")[1] in (None, "auto")
    dim = width // heads if auto else c.count("mamba_head_dim")
    if heads * dim != width:
        raise LongspanError(
            f"{c.where}: mamba_n_heads={heads} heads of {dim} must have mamba_expand x hidden_size = {width} together"
        )
    return mamba2(c, dim)


_MAMBA = Part(_expanded, partial(mamba2_weights, name="mamba"))
_SPELLINGS = {
    "mamba_num_heads": ("mamba_n_heads",),
    "mamba_head_dim": ("mamba_d_head",),
    "ssm_state_size": ("mamba_d_state",),
    "n_groups": ("mamba_n_groups",),
    "conv_kernel": ("mamba_d_conv",),
    "chunk_size": ("mamba_chunk_size",),
    "use_conv_bias": ("mamba_conv_bias",),
    "use_bias": ("mamba_proj_bias",),
}
_SIZES = {
    "mamba_num_heads": 128,
    "mamba_expand": 2,
    "ssm_state_size": 256,
    "n_groups": 1,
    "conv_kernel": 4,
    "chunk_size": 256,
    "use_conv_bias": True,
}


def _bamba_types(c: Config, layer: int) -> str:
    return "full_attention" if layer in (c.find("attn_layer_indices")[1] or ()) else "linear_attention"


def _granite_mlp(c: Config, layer: int) -> Mlp:
    return _GRANITE_EXPERTS.build(c, layer) if c.experts else Mlp(c.count("shared_intermediate_size"))


def _granite_mlp_weights(c: Config, mlp: Mlp) -> Iterator[Parameter]:
    """Yield experts beside an MLP for all tokens, or that MLP alone."""
    if mlp.experts:
        yield from linear("mlp.router", c.d, mlp.experts)
        yield Parameter("mlp.experts.gate_up_proj", (mlp.experts, 2 * mlp.ffn, c.d))
        yield Parameter("mlp.experts.down_proj", (mlp.experts, c.d, mlp.ffn))
    shared = mlp.shared_ffn if mlp.experts else mlp.ffn
    yield from linear("mlp.shared_mlp.input_linear", c.d, 2 * shared)
    yield from linear("mlp.shared_mlp.output_linear", shared, c.d)


_GRANITE_EXPERTS = experts(
    _granite_mlp_weights, ffn="intermediate_size", shared=lambda c: c.count("shared_intermediate_size")
)

FAMILIES = {
    "bamba": Family(
        {**softmax(attention, window=False), "linear_attention": _MAMBA},
        dense(lambda c, mlp: gated("mlp", c.d, mlp.ffn, c.flag("mlp_bias"))),
        {
            **_SIZES,
            "num_key_value_heads": 8,
            "max_position_embeddings": 262144,
            "partial_rotary_factor": 0.5,
        },
        spellings=_SPELLINGS,
        types=_bamba_types,
        order=("mlp", "input_layernorm", "pre_ff_layernorm", "attention"),
        root=("model.embed_tokens", "", "model.final_layernorm"),
    ),
    "granitemoehybrid": Family(
        {**softmax(attention, window=False), "linear_attention": _MAMBA, "mamba": _MAMBA},
        Part(_granite_mlp, _granite_mlp_weights),
        {
            **_SIZES,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 1024,
            "intermediate_size": 11008,
            "max_position_embeddings": 2048,
        },
        spellings={**_SPELLINGS, "num_experts": ("num_local_experts",)},
        types=lambda c, layer: "linear_attention",
        listed=True,
        order=("input_layernorm", "post_attention_layernorm", "mlp", "attention"),
    ),
}
