"""Read a transformers model: its layers, its vision tower and its positions, which families name differently.

`parallelize` shards the layers that are found here, and the planner plans them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers.integrations.heterogeneity import AmbiguousGlobalPerLayerAttributeError

from longspan.compat.transformers_api import calls_registry, mixer_functions
from longspan.core.errors import LongspanError
from longspan.core.rope import ModelPositions, positions_in
from longspan.core.validation import format_value

EXPERTS = "moe_tp_experts"
GRADIENT = "replicated_with_grad_allreduce"

_OF_ATTENTION = {**{f"layers.*.self_attn.{x}_proj": "colwise" for x in "qkv"}, "layers.*.self_attn.o_proj": "rowwise"}
_OF_MLP = {"layers.*.mlp.gate_proj": "colwise", "layers.*.mlp.up_proj": "colwise", "layers.*.mlp.down_proj": "rowwise"}
_OF_HUNYUAN = {**_OF_ATTENTION, **{f"layers.*.self_attn.{x}_layernorm": GRADIENT for x in ("query", "key")}}
_OF_LATENT = {  # every part computes the latent vectors of all heads
    **{f"layers.*.self_attn.{x}": GRADIENT for x in ("q_a_proj", "kv_a_proj_with_mqa")},
    **{f"layers.*.self_attn.{x}_a_layernorm": GRADIENT for x in ("q", "kv")},
    **{f"layers.*.self_attn.{x}": "colwise" for x in ("q_proj", "q_b_proj", "kv_b_proj")},
    "layers.*.self_attn.o_proj": "rowwise",
}
_PLANS: dict[str, dict[str, str]] = {
    "gpt_oss": {**_OF_ATTENTION, "layers.*.mlp.experts": EXPERTS},
    "deepseek_v2": _OF_LATENT,
    "deepseek_v3": _OF_LATENT,
    "granitemoe": _OF_ATTENTION,
    "hunyuan_v1_dense": {**_OF_HUNYUAN, **_OF_MLP},
    "hunyuan_v1_moe": _OF_HUNYUAN,
}
"""By `model_type`, styles that transformers' plan of a family lacks."""

INDEXED = frozenset(
    {"deepseek_v32", "glm_moe_dsa", "glm5_next_text", "axk2", "hy_v4", "hy_v4_vl_text", "mistral_large4_text"}
    | {"dots3_note_text"}
)
"""Families with latent attention to the tokens that an indexer chooses, which gets its keys from the cache
(`update_indexer`); a layer computes its keys and values by `expand_kv`.
"""


def is_indexed(layer: Any) -> bool:
    """Return whether an attention layer of these families attends to chosen tokens: its own choice, or that of a layer
    before it.
    """
    indexes = getattr(layer, "indexer", None) is not None or getattr(layer, "skip_topk", False)
    return bool(indexes) and getattr(layer.config, "model_type", None) in INDEXED


ENCODER_OUTPUTS = "mm_encoder_outputs"
"""The argument of some forwards that accepts embeddings which the tower has computed before."""


_ENCODES = ("get_image_features", "get_video_features", "get_audio_features")


def text_part(core: Any) -> Any:
    """Return the language model within the core of a multimodal model; None if it has no such child."""
    return getattr(core, "language_model", getattr(core, "text_model", None))


def vision_core(model: nn.Module) -> Any:
    """Return the module of a multimodal model that holds encoders and language model; None for other models."""
    for core in (getattr(model, "model", None), model):
        if text_part(core) is not None and any(hasattr(core, name) for name in _ENCODES):
            return core
    return None


def return_rows(core: Any, outputs: Mapping[str, Any]) -> None:
    """Let the encoder functions of these modalities return outputs that were computed before, until `encode_again`."""
    for modality, output in outputs.items():
        setattr(core, f"get_{modality}_features", lambda *args, output=output, **kwargs: output)


def encode_again(core: Any) -> None:
    """Undo `return_rows`."""
    for name in _ENCODES:
        vars(core).pop(name, None)


class _RowsFound(Exception):
    """The embeddings that a forward is about to insert."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows


def rows_of_forward(core: Any, modality: str, given: Mapping[str, Tensor]) -> Tensor:
    """Return the embeddings `[pictures, rows, width]` that the core's forward inserts: an encoder's, and those that it
    adds to them.
    """

    def found(*args: Any, **kwargs: Any) -> None:
        raise _RowsFound(kwargs[f"{modality}_features"])

    core.get_placeholder_mask = found
    first = next(x for x in given.values() if x.is_floating_point())
    try:
        core.forward(inputs_embeds=first.new_zeros(1, 1, core.config.get_text_config().hidden_size), **given)
    except _RowsFound as stop:
        return stop.rows
    finally:
        del core.get_placeholder_mask
    raise LongspanError(f"{type(core).__name__} inserts no embeddings of its {modality}s")


def insert_rows(core: Any, placeholders_BL: Tensor, rows: Tensor) -> RemovableHandle:
    """Let the language model read these rows at placeholders, until the handle is removed."""

    def insert(text: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        x_BLD = kwargs["inputs_embeds"]
        where = placeholders_BL[..., None].to(x_BLD.device)
        return args, {**kwargs, "inputs_embeds": x_BLD.masked_scatter(where, rows.to(x_BLD.dtype))}

    handle: RemovableHandle = text_part(core).register_forward_pre_hook(insert, with_kwargs=True)
    return handle


def tower_modules(model: nn.Module) -> set[nn.Module]:
    """Return the modules that encode pixels: the core without its language model; empty for other models."""
    core = vision_core(model)
    if core is None:
        return set()
    return {m for child in core.children() if child is not text_part(core) for m in child.modules()}


def text_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the modules that tokens pass through, by name: all but those of a vision tower."""
    return list(model.named_modules(memo=tower_modules(model)))


def attention_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the attention modules by name: the innermost "...Attention", with a `layer_idx` if any has it.

    Those of a vision tower are left out, which is not sharded by tokens. A recurrent layer, or a layer around it, may
    have such a name, too (Kimi's delta attention).
    """
    mixers = mixer_layers(model)
    named = {name: module for name, module in text_modules(model) if "Attention" in type(module).__name__}
    for name, module in [*named.items()]:
        around = any(other.startswith(f"{name}." * (name != "")) for other in mixers)
        if name in mixers or (around and not calls_registry(module)):
            del named[name]
    named = {name: module for name, module in named.items() if hasattr(module, "layer_idx")} or named
    return {n: m for n, m in named.items() if not any(other.startswith(n + ".") for other in named)}


def mixer_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the recurrent layers and short convolutions by name, of the kinds that can be sharded."""
    return {name: module for name, module in model.named_modules() if mixer_functions(module)}


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Return the elements of every module list whose elements all contain an attention layer or recurrent layer.

    In a list of one class, others may be an MLP (Nemotron-H). Of nested lists (ALBERT's
    groups of layers) return the inner elements.
    """
    lists = [m for _, m in text_modules(model) if isinstance(m, nn.ModuleList) and len(m) > 0]
    layers = [layer for blocks in lists if _are_layers(blocks) for layer in blocks]
    every = set(layers)
    return [layer for layer in layers if not any(m in every and m is not layer for m in layer.modules())]


def _are_layers(blocks: nn.ModuleList) -> bool:
    mixes = [bool(attention_layers(block) or mixer_layers(block)) for block in blocks]
    return all(mixes) or (any(mixes) and len({type(block) for block in blocks}) == 1)


def positions_of(config: Any) -> ModelPositions:
    """Return the positions and the RoPE of a Hugging Face config."""
    text = config.get_text_config()
    limit: object = getattr(text, "max_position_embeddings", None)
    if limit is not None and (not isinstance(limit, int) or limit < 1):
        raise LongspanError(
            f"max_position_embeddings {format_value(limit)} of the model's config must be an integer above 0"
        )
    rotary = isinstance(getattr(text, "rope_parameters", None), dict)
    found = positions_in(text.to_dict(), limit, rotary)
    return dataclasses.replace(found, dims=_rotary_dims(text, found.table)) if rotary else found


def stated(text: Any, name: str) -> Any:
    """Return a value of a text config; None if it has none, or one for each layer."""
    try:
        return getattr(text, name, None)
    except AmbiguousGlobalPerLayerAttributeError:
        return None


def config_of_layer(text: Any, index: int) -> Any:
    """Return the config with the sizes of a layer: the text config itself, unless the sizes of its layers differ."""
    each = getattr(text, "per_layer_config", None)
    return each[index] if each else text


def head_dim_of(text: Any) -> int | None:
    """Return the dim of a head by a text config, the largest if its layers differ; None if the config does not say."""
    try:
        dim: int | None = getattr(text, "head_dim", None)
    except AmbiguousGlobalPerLayerAttributeError:
        dim = max(text.per_layer_config[i].head_dim for i in range(text.num_hidden_layers))
    return dim


def tensor_plan_of(text: Any) -> dict[str, str]:
    """Return the tensor-parallel plan of a decoder by its text config: styles by pattern of a module's path.

    Embeddings are left out: they are sharded by the vocabulary in any case, and some plans name nothing else.
    """
    own = getattr(text, "base_model_tp_plan", None) or {}
    own = {pattern: style for pattern, style in own.items() if not style.startswith("embedding")}
    return {**own, **_PLANS.get(text.model_type, {})}


def _rotary_dims(text: Any, table: Mapping[str, Any]) -> int | None:
    """Return how many dimensions of a head RoPE rotates; None if the config does not say, or its layers differ."""
    try:
        dims = getattr(text, "head_dim", None)
    except AmbiguousGlobalPerLayerAttributeError:
        return None
    if dims is None and getattr(text, "num_attention_heads", None):
        dims = text.hidden_size // text.num_attention_heads
    part = table.get("partial_rotary_factor") or 1.0
    return int(dims * part) if isinstance(dims, int) and isinstance(part, int | float) else None
