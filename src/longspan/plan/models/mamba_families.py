"""Families with Mamba-2 or short convolutions: Nemotron-H, Bamba, Granite 4, LFM2."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from longspan.core.errors import LongspanError
from longspan.plan.layers import Linear, Mlp, Parameter, ShortConv, Softmax
from longspan.plan.models.blocks import (
    NO_MIXER,
    attention,
    dense,
    experts,
    gated,
    linear,
    norm,
    routed_experts,
    softmax,
)
from longspan.plan.models.family import Config, Family, Part

# Nemotron-H: a layer is Mamba-2, attention without positions, an MLP or experts alone.


def _nemotron_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config with `layer_types`, from whichever of its three names, and their number."""
    pattern = config.get("hybrid_override_pattern") or ""
    types = config.get("layers_block_type") or config.get("layer_types") or [_LETTERS.get(x, x) for x in pattern]
    return {**config, "layer_types": types, "num_hidden_layers": len(types)} if isinstance(types, list) else config


_LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}


def _mamba2(c: Config, head_dim: int | None = None) -> Linear:
    """Return Mamba-2; `head_dim` by default as the config states it."""
    heads, state, groups = (c.count(key) for key in ("mamba_num_heads", "ssm_state_size", "n_groups"))
    dim = head_dim or c.count("mamba_head_dim")
    c.divides("mamba_num_heads", "n_groups", heads, groups)
    channels = heads * dim + 2 * groups * state
    kernel, chunk = c.count("conv_kernel"), c.count("chunk_size")
    return Linear(heads, groups, state, dim, columns=1, chunk=chunk, channels=channels, kernel=kernel)


def _mamba2_weights(c: Config, mixer: Linear, name: str = "mixer") -> Iterator[Parameter]:
    heads, width = mixer.q_heads, mixer.q_heads * mixer.v_head_dim
    for each in ("dt_bias", "A_log", "D"):
        yield Parameter(f"{name}.{each}", (heads,))
    yield Parameter(f"{name}.conv1d.weight", (mixer.channels, 1, mixer.kernel))
    if c.flag("use_conv_bias"):
        yield Parameter(f"{name}.conv1d.bias", (mixer.channels,))
    yield from linear(f"{name}.in_proj", c.d, width + mixer.channels + heads, c.flag("use_bias"))
    yield from norm(f"{name}.norm", width)
    yield from linear(f"{name}.out_proj", width, c.d, c.flag("use_bias"))


def _nemotron_attention(c: Config, mixer: Softmax) -> Iterator[Parameter]:
    for p in attention(c, mixer, qkv_bias=False, out_bias=False):
        yield replace(p, name=p.name.replace("self_attn.", "mixer."))


def _nemotron_mlp(c: Config, layer: int) -> Mlp:
    kind = c.values["layer_types"][layer]
    if kind == "mlp":
        return Mlp(c.ffn, gated=False)
    if kind != "moe":
        return Mlp(0, gated=False)
    shared = c.count("moe_shared_expert_intermediate_size")
    return Mlp(c.count("moe_intermediate_size"), False, c.experts, c.count("num_experts_per_tok"), shared)


def _nemotron_mlp_weights(c: Config, mlp: Mlp) -> Iterator[Parameter]:
    """Yield an MLP of two matrices, or experts of such; named `mlp` instead of `mixer`."""
    bias, latent = c.flag("mlp_bias"), c.optional("moe_latent_size")
    name, ffn = ("mlp.shared_experts", mlp.shared_ffn) if mlp.experts else ("mlp", mlp.ffn)
    if mlp.experts:
        yield Parameter("mlp.gate.weight", (mlp.experts, c.d))
        yield Parameter("mlp.experts.up_proj", (mlp.experts, mlp.ffn, latent or c.d))
        yield Parameter("mlp.experts.down_proj", (mlp.experts, latent or c.d, mlp.ffn))
        if latent:
            yield from linear("mlp.fc1_latent_proj", c.d, latent, bias)
            yield from linear("mlp.fc2_latent_proj", latent, c.d, bias)
    if ffn:
        yield from linear(f"{name}.up_proj", c.d, ffn, bias)
        yield from linear(f"{name}.down_proj", ffn, c.d, bias)


# Bamba and Granite: Mamba-2 and an MLP in every layer.


def _expanded(c: Config) -> Linear:
    """Return Mamba-2 whose heads together have `mamba_expand` times the hidden size."""
    heads, width = c.count("mamba_num_heads"), c.count("mamba_expand") * c.d
    auto = c.find("mamba_head_dim")[1] in (None, "auto")
    dim = width // heads if auto else c.count("mamba_head_dim")
    if heads * dim != width:
        raise LongspanError(
            f"{c.where}: mamba_n_heads={heads} heads of {dim} must have mamba_expand x hidden_size = {width} together"
        )
    return _mamba2(c, dim)


_MAMBA = Part(_expanded, partial(_mamba2_weights, name="mamba"))
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

# LFM2: short convolutions in place of most attention.


def _conv(c: Config) -> ShortConv:
    return ShortConv(0, 0, 0, 0, channels=c.d, kernel=c.count("conv_L_cache"))


def _conv_weights(c: Config, mixer: ShortConv) -> Iterator[Parameter]:
    bias = c.flag("conv_bias")
    yield Parameter("conv.conv.weight", (c.d, 1, mixer.kernel))
    if bias:
        yield Parameter("conv.conv.bias", (c.d,))
    yield from linear("conv.in_proj", c.d, 3 * c.d, bias)
    yield from linear("conv.out_proj", c.d, c.d, bias)


def _lfm2_attention(c: Config, mixer: Softmax) -> Iterator[Parameter]:
    for p in attention(c, mixer, qkv_bias=False, out_bias=False, qk_norm="head"):
        yield replace(p, name=p.name.replace("o_proj", "out_proj").replace("_norm", "_layernorm"))


def _lfm2_types(c: Config, layer: int) -> str:
    full = c.find("full_attn_idxs")[1]
    return "full_attention" if full is None or layer in full else "conv"


def _lfm2_mlp(c: Config, layer: int) -> Mlp:
    """Return an MLP of two thirds of the size in the config, rounded up, as LFM2 adjusts it."""
    ffn, scale = c.ffn, c.find("block_ffn_dim_multiplier")[1]
    if c.flag("block_auto_adjust_ff_dim"):
        ffn = int(2 * ffn / 3)
        if scale is not None:
            multiple = c.count("block_multiple_of")
            ffn = multiple * -(-int(scale * ffn) // multiple)
    return Mlp(ffn)


def _lfm2_mlp_weights(c: Config, mlp: Mlp) -> Iterator[Parameter]:
    if mlp.experts:
        yield from routed_experts(c, mlp)
        return
    for name, inputs, outputs in (("w1", c.d, mlp.ffn), ("w3", c.d, mlp.ffn), ("w2", mlp.ffn, c.d)):
        yield from linear(f"mlp.{name}", inputs, outputs)


_LFM2 = Family(
    {**softmax(_lfm2_attention, window=False), "conv": Part(_conv, _conv_weights)},
    Part(_lfm2_mlp, _lfm2_mlp_weights),
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
    types=_lfm2_types,
    listed=True,
    order=("attention", "mlp", "operator_norm", "ffn_norm"),
    root=("model.embed_tokens", "", "model.embedding_norm"),
)

FAMILIES = {
    "nemotron_h": Family(
        {
            **softmax(_nemotron_attention, window=False),
            "linear_attention": Part(_mamba2, _mamba2_weights),
            "mlp": NO_MIXER,
            "moe": NO_MIXER,
        },
        Part(_nemotron_mlp, _nemotron_mlp_weights),
        {
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": 21504,
            "ssm_state_size": 128,
            "mamba_num_heads": 128,
            "mamba_head_dim": 64,
            "n_groups": 8,
            "conv_kernel": 4,
            "use_conv_bias": True,
            "chunk_size": 128,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 7688,
            "moe_shared_expert_intermediate_size": 7688,
            "max_position_embeddings": 4096,
        },
        listed=True,
        order=("attention", "mlp", "norm"),
        root=("model.embeddings", "", "model.norm_f"),
        rotary=False,
        config=_nemotron_config,
    ),
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
        spellings=_SPELLINGS,
        types=lambda c, layer: "linear_attention",
        listed=True,
        order=("input_layernorm", "post_attention_layernorm", "mlp", "attention"),
    ),
    "lfm2": _LFM2,
    "lfm2_moe": replace(
        _LFM2,
        mlp=experts(_lfm2_mlp_weights, lambda c, layer: layer >= c.count("num_dense_layers", minimum=0)),
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
