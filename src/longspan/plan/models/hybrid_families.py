"""Families with recurrent layers: Qwen3-Next, Kimi-Linear, Nemotron-H, MiniMax-Text-01."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from longspan.core.errors import LongspanError
from longspan.plan.layers import Linear, Mlp, Parameter, Softmax
from longspan.plan.models.blocks import (
    NO_MIXER,
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
from longspan.plan.models.other_families import after_dense, latent, latent_attention, shared_and_routed

# Qwen3-Next: gated linear attention (the delta rule).


def delta_rule(c: Config) -> Linear:
    """Return gated DeltaNet."""
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


def next_experts(c: Config, mlp: Mlp) -> Iterator[Parameter]:
    """Yield routed experts and a shared one with a gate; in a dense layer a dense MLP."""
    yield from routed_experts(c, mlp)
    if mlp.experts:
        yield from gated("mlp.shared_expert", c.d, mlp.shared_ffn)
        yield from linear("mlp.shared_expert_gate", c.d, 1)


# Kimi-Linear: the delta rule with a decay per key dim (KDA); latent attention in between, without positions.


def _kimi_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config with the values of its `linear_attn_config`, under the names of transformers."""
    inner = config.get("linear_attn_config") or {}
    found = {name: inner[key] for key, name in _KIMI.items() if key in inner}
    full = inner.get("full_attn_layers")  # numbered from 1
    if full is not None and config.get("layer_types") is None:
        layers = range(1, config.get("num_hidden_layers", 0) + 1)
        found["layer_types"] = ["full_attention" if layer in full else "linear_attention" for layer in layers]
    return {**config, **found}


_KIMI = {
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}


def _kimi_types(c: Config, layer: int) -> str:
    return "full_attention" if layer and layer % 4 == 0 else "linear_attention"


def _kimi_sparse(c: Config, layer: int) -> bool:
    listed = c.values.get("mlp_layer_types")
    return after_dense(c, layer) if listed is None else listed[layer] == "sparse"


def _kimi_delta(c: Config) -> Linear:
    heads, dim = c.count("linear_num_heads"), c.count("linear_head_dim")
    kernel = c.count("linear_conv_kernel_dim")
    return Linear(heads, heads, dim, dim, columns=dim, channels=3 * heads * dim, kernel=kernel)


def _kimi_delta_weights(c: Config, mixer: Linear) -> Iterator[Parameter]:
    heads, dim, width = mixer.q_heads, mixer.head_dim, mixer.q_heads * mixer.head_dim
    for name in ("q_proj", "k_proj", "v_proj"):
        yield from linear(f"self_attn.{name}", c.d, width)
    yield Parameter("self_attn.conv1d.weight", (mixer.channels, 1, mixer.kernel))
    yield Parameter("self_attn.forget_gate.dt_bias", (width,))
    yield Parameter("self_attn.forget_gate.A_log", (1, 1, heads, 1))
    for name in ("forget_gate.f", "g"):
        yield from linear(f"self_attn.{name}_a_proj", c.d, dim)
        yield from linear(f"self_attn.{name}_b_proj", dim, width)
    yield from linear("self_attn.b_proj", c.d, heads)
    yield from norm("self_attn.o_norm", dim)
    yield from linear("self_attn.o_proj", width, c.d)


# Nemotron-H: a layer is Mamba-2, attention without positions, an MLP or experts alone.


def _nemotron_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config with `layer_types`, from whichever of its three names, and their number."""
    pattern = config.get("hybrid_override_pattern") or ""
    types = config.get("layers_block_type") or config.get("layer_types") or [_LETTERS.get(x, x) for x in pattern]
    return {**config, "layer_types": types, "num_hidden_layers": len(types)} if isinstance(types, list) else config


_LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}


def mamba2(c: Config, head_dim: int | None = None) -> Linear:
    """Return Mamba-2; `head_dim` by default as the config states it."""
    heads, state, groups = (c.count(key) for key in ("mamba_num_heads", "ssm_state_size", "n_groups"))
    dim = head_dim or c.count("mamba_head_dim")
    c.divides("mamba_num_heads", "n_groups", heads, groups)
    channels = heads * dim + 2 * groups * state
    kernel, chunk = c.count("conv_kernel"), c.count("chunk_size")
    return Linear(heads, groups, state, dim, columns=1, chunk=chunk, channels=channels, kernel=kernel)


def mamba2_weights(c: Config, mixer: Linear, name: str = "mixer") -> Iterator[Parameter]:
    """Yield the weights of Mamba-2."""
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


def _lightning(c: Config) -> Linear:
    heads, dim = grouped(c).q_heads, grouped(c).head_dim
    return Linear(heads, heads, dim, dim, columns=1, chunk=c.count("block_size"), backward_op="all_gather")


def _lightning_weights(c: Config, mixer: Linear) -> Iterator[Parameter]:
    values = mixer.q_heads * mixer.head_dim
    yield from norm("self_attn.norm", values)
    yield from linear("self_attn.qkv_proj", c.d, 3 * values)
    yield from linear("self_attn.out_proj", values, c.d)
    yield from linear("self_attn.output_gate", c.d, values)


FAMILIES = {
    "qwen3_next": Family(
        {
            **softmax(partial(attention, qk_norm="head", gate=True), window=False),
            "linear_attention": Part(delta_rule, _delta_weights),
        },
        experts(next_experts, every_step, shared=lambda c: c.count("shared_expert_intermediate_size")),
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
    "kimi_linear": Family(
        {
            **softmax(latent_attention, latent, window=False),
            "linear_attention": Part(_kimi_delta, _kimi_delta_weights),
        },
        experts(
            shared_and_routed,
            _kimi_sparse,
            shared=lambda c: c.count("moe_intermediate_size") * c.count("n_shared_experts"),
        ),
        {
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
            "num_key_value_heads": 32,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "n_shared_experts": 1,
            "moe_intermediate_size": 1024,
            "first_k_dense_replace": 1,
            "max_position_embeddings": 1048576,
            "linear_head_dim": 128,
            "linear_num_heads": 32,
            "linear_conv_kernel_dim": 4,
        },
        spellings={
            "num_experts": ("num_experts", "num_local_experts"),
            "num_experts_per_tok": ("num_experts_per_token", "num_experts_per_tok"),
            "n_shared_experts": ("num_shared_experts", "n_shared_experts"),
            "max_position_embeddings": ("model_max_length", "max_position_embeddings"),
        },
        types=_kimi_types,
        listed=True,
        rotary=False,
        config=_kimi_config,
    ),
    "nemotron_h": Family(
        {
            **softmax(_nemotron_attention, window=False),
            "linear_attention": Part(mamba2, mamba2_weights),
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
        spellings={"num_experts": ("n_routed_experts", "num_local_experts")},
        listed=True,
        order=("attention", "mlp", "norm"),
        root=("model.embeddings", "", "model.norm_f"),
        rotary=False,
        config=_nemotron_config,
    ),
}
