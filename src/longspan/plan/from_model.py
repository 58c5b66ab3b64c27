"""The shape of a model, read from transformers' modules: on the meta device from a config, or of a model that is there.

PEFT's adapters and frozen weights are read, too. Sizes come from modules and weights; the config is asked for what no
module states, such as the window of each layer. A new family needs a line only where its sizes have other names. A new
kind of token mixing is a `TokenMixing` of `plan/layers/`, returned by `_mixing`; a new rule for which keys are visible
is an `AttendedKeys`, returned by `_attended_keys`.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

from longspan.compat.friends_api import float8_layers, float8_of
from longspan.compat.reading import (
    INDEXED,
    attention_layers,
    config_of_layer,
    decoder_layers,
    is_indexed,
    mixer_layers,
    positions_of,
    stated,
    tensor_plan_of,
    text_part,
    tower_modules,
    vision_core,
)
from longspan.compat.transformers_api import mixer_functions
from longspan.core.errors import LongspanError, require
from longspan.core.model import check_layers
from longspan.plan.layers import (
    CAUSAL,
    AttendedKeys,
    Bidirectional,
    ChosenBlocks,
    Chunk,
    Compressed,
    Indexed,
    Linear,
    Mlp,
    Parallel,
    Parameter,
    ShortConv,
    Softmax,
    TokenMixing,
    Window,
)
from longspan.plan.names import find_config
from longspan.plan.shape import ALL_TRAINED, LayerShape, ModelShape, Tuning
from longspan.plan.tower import Tower

# ---------------------------------------------------------------------------------------------------------------------
# A model on the meta device, from a name, a file or a config.


def read_model(name_or_path: str | os.PathLike[str], tuning: Tuning | None = None) -> ModelShape:
    """Return the shape of a built-in model, or of the `config.json` (or folder with one) at a path.

    `tuning`: which weights are trained; None: all.

    Raises:
        LongspanError: for an unknown name, a file that cannot be read, or whatever `shape_from_config` refuses.
    """
    name, config = find_config(name_or_path)
    return shape_from_config(config, name, tuning or ALL_TRAINED)


def shape_from_config(config: Mapping[str, Any], name: str, tuning: Tuning = ALL_TRAINED) -> ModelShape:
    """Return the shape of the model that transformers builds from the keys of a `config.json`.

    `name` is for the shape and for messages.

    Raises:
        LongspanError: if transformers does not know the model type, or cannot build the model.
    """
    return _shape_from_json(json.dumps(config, default=str), name, tuning)


@functools.lru_cache(maxsize=256)
def _shape_from_json(text: str, name: str, tuning: Tuning) -> ModelShape:
    config = json.loads(text)
    known, model_type = transformers.CONFIG_MAPPING, config.get("model_type")
    if not isinstance(model_type, str) or model_type not in known:
        raise LongspanError(
            f"{name}: transformers {transformers.__version__} does not know model_type {model_type!r}, and the planner "
            f"reads only models that transformers builds; correct model_type, or install a version that has it"
        )
    check_layers(name, config)
    try:
        made = known[model_type].from_dict(config)
    except Exception as error:  # of any kind
        raise LongspanError(f"{name}: transformers cannot read this config: {_in_one_line(error)}") from error
    return shape_of(made, name, tuning)


def shape_of(config: Any, name: str | None = None, tuning: Tuning = ALL_TRAINED) -> ModelShape:
    """Return the shape of the language model, or vision-language model, of a Hugging Face config.

    Raises:
        LongspanError: if transformers cannot build it.
    """
    name = name or type(config).__name__.removesuffix("Config")
    _check_sizes(config.get_text_config(), name)
    several = hasattr(config, "vision_config") or hasattr(config, "audio_config")
    seeing = several and type(config) in transformers.MODEL_FOR_MULTIMODAL_LM_MAPPING
    auto = transformers.AutoModelForMultimodalLM if seeing else transformers.AutoModelForCausalLM
    try:
        with torch.device("meta"):
            model = auto.from_config(config)
    except Exception as error:  # of any kind
        raise LongspanError(
            f"{name}: transformers cannot build a causal language model of this config: {_in_one_line(error)}"
        ) from error
    return replace(shape_of_model(adapted(model, tuning), name, packs=tuning.quantize), tuning=tuning)


def _check_sizes(config: Any, name: str) -> None:
    """Raise for what transformers builds a model from that cannot run."""
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False):
        raise LongspanError(f"{name} attends to an encoder; only decoders of one sequence are supported")
    for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "intermediate_size"):
        value = stated(config, key)
        if isinstance(value, int) and value < 1 and not (key == "intermediate_size" and value == 0):
            raise LongspanError(f"{name}: {key} must be at least 1, got {value}")
    heads, kv, latent = (stated(config, key) for key in ("num_attention_heads", "num_key_value_heads", "kv_lora_rank"))
    if isinstance(heads, int) and isinstance(kv, int) and kv and heads % kv and not latent:
        raise LongspanError(f"{name}: num_attention_heads={heads} does not divide by num_key_value_heads={kv}")


def _in_one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def weights_named(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Return the names of the weights that `freeze` means. Raise for a pattern that means none."""
    names = [name for name, _ in model.named_parameters()]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise LongspanError(
                f"freeze: {pattern} is the name of no weight; they are named like {names[0]} and {names[-1]}, and * "
                "stands for any characters"
            )
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]


def adapted(model: PreTrainedModel, tuning: Tuning) -> PreTrainedModel:
    """Freeze weights or add PEFT's LoRA, in place, as `longspan train` does with these flags; return the model.

    Raises:
        LongspanError: if PEFT is not installed or refuses, a pattern is the name of no weight, or no weight is trained.
    """
    frozen = set(weights_named(model, tuning.freeze))
    for name, p in model.named_parameters():
        p.requires_grad_(name not in frozen)
    if tuning.lora is not None:
        require("--tuning lora", "peft")
        import peft

        targets: Any = list(tuning.targets) or "all-linear"
        try:
            peft.get_peft_model(model, peft.LoraConfig(r=tuning.lora, target_modules=targets, use_dora=tuning.dora))
        except Exception as error:  # of any kind
            raise LongspanError(f"--tuning {tuning} cannot be put on the model: {_in_one_line(error)}") from error
    if not any(p.requires_grad for p in model.parameters()):
        raise LongspanError(f"--tuning {tuning} leaves no weight to train; give other names")
    return model


# ---------------------------------------------------------------------------------------------------------------------
# A model that is there.


def shape_of_model(model: PreTrainedModel, name: str | None = None, *, packs: bool = False) -> ModelShape:
    """Return the shape of a transformers model, which may be on the meta device and have PEFT's adapters.

    `packs`: frozen linear layers will be stored in 4 bits.

    Raises:
        LongspanError: if no layers are found, or sizes are named in an unknown way.
    """
    name = name or type(model).__name__
    try:
        return _shape(model, name, packs)
    except (AttributeError, IndexError, TypeError) as error:
        raise LongspanError(f"the planner cannot read the sizes of {name}: {error}") from error


def _shape(model: PreTrainedModel, name: str, packs: bool) -> ModelShape:
    config = model.config.get_text_config()
    blocks = decoder_layers(model)
    if not blocks:
        raise LongspanError(f"{name} has no list of layers with attention, so it cannot be planned")
    tied, tower = _tied(model), _tower(model)
    root = tuple(_root(model, blocks, tied))
    backward = tower is not None or any(p.trained for p in root[: -1 if tied else -2])
    kinds: dict[Any, LayerShape] = {}
    layers = []
    for index, block in enumerate(blocks):
        parameters = tuple(_parameters(block, packs))
        mixing = _mixing(block, config, index)
        mlp, parameters = _mlp(block, config, parameters, name)
        backward = backward or any(p.trained for p in parameters)
        layer = (mixing, mlp, parameters, backward)
        layers.append(kinds.setdefault(layer, LayerShape(*layer)))
    repeats = -(-getattr(config, "num_hidden_layers", len(layers)) // len(layers))  # ALBERT runs one layer many times
    positions = positions_of(model.config)
    return ModelShape(
        name,
        config.hidden_size,
        root[0].shape[0],
        tied,
        positions.limit,
        tuple(layers * max(1, repeats)),
        root,
        positions,
        refused=tuple(_refused(config)),
        tower=tower,
    )


def _refused(config: Any) -> Iterator[str]:
    """Yield the reasons why `longspan train` refuses the config."""
    for key in ("attention_dropout", "attn_pdrop"):
        p = getattr(config, key, None)
        if isinstance(p, int | float) and p > 0:
            yield f"attention dropout ({key}={p:g}) is not trained in this version: set {key} to 0 in config.json"


def _parameters(module: nn.Module, packs: bool = False) -> Iterator[Parameter]:
    """Yield the weights of a module, named as without adapters; LoRA's are named by the weight that they adapt."""
    owners = dict(module.named_modules())
    for name, p in module.named_parameters():
        path, _, own = name.rpartition(".")
        owner: Any = owners[path]
        is_linear = isinstance(owner, nn.Linear) and own == "weight"
        packed = is_linear and ".lora_" not in name and (packs or type(p).__name__ == "Params4bit")
        shape = (owner.out_features, owner.in_features) if packed else tuple(p.shape)
        trained = p.requires_grad and ".indexer." not in name  # it chooses tokens, without a gradient
        shares, in_float8 = (False, False) if not is_linear else float8_of(owner)
        yield Parameter(_plain_name(name, owners), shape, trained, packed, shares, in_float8)


def _plain_name(name: str, owners: Mapping[str, nn.Module]) -> str:
    """Return "q_proj.lora_A.weight" for "q_proj.lora_A.default.weight", and "q_proj.weight" for its base layer's."""
    path, lora, rest = name.partition(".lora_")
    plain = path.replace(".base_layer", "")
    if not lora:
        return plain
    weight = getattr(owners[path], "parameter_name", "weight")  # PEFT wraps experts once for each of their weights
    return f"{plain}{f'.{weight}' * (weight != 'weight')}.lora_{rest.partition('.')[0]}.weight"


# ---------------------------------------------------------------------------------------------------------------------
# What mixes tokens.


def _mixing(block: nn.Module, config: Any, index: int) -> TokenMixing:
    attention = next(iter(attention_layers(block).values()), None)
    recurrent = next(iter(mixer_layers(block).values()), None)
    if attention is None:  # or an MLP alone
        return TokenMixing() if recurrent is None else _recurrence(recurrent)
    if is_indexed(attention):
        return _indexed(attention)
    if getattr(attention, "compressor", None) is not None:
        return _compressed(attention)
    if getattr(attention, "indexer", None) is not None:
        return _blocks(attention, config)
    of_layer = config_of_layer(config, index)
    softmax = replace(_attention(attention, of_layer, index), sliceable=_sliceable(attention, config))
    if config.model_type in INDEXED:  # its layers without an indexer cache keys and values
        softmax = replace(softmax, latent_dim=0, rope_dim=0)
    # Convolutions inside attention are none of its own.
    if recurrent is None or recurrent in set(attention.modules()):
        return softmax
    return Parallel(**vars(softmax), beside=_recurrence(recurrent))


def _recurrence(module: Any) -> Linear:
    """Return a recurrent layer or a short convolution."""
    functions = mixer_functions(module).keys()
    convolution = next((m for m in module.modules() if isinstance(m, nn.Conv1d)), None)
    conv: dict[str, Any] = (
        {} if convolution is None else {"channels": convolution.groups, "kernel": convolution.kernel_size[0]}
    )
    if hasattr(module, "num_v_heads"):  # Gated DeltaNet
        k, v = module.head_k_dim, module.head_v_dim
        return Linear(module.num_v_heads, module.num_k_heads, k, v, columns=k, decays="head", **conv)
    if hasattr(module, "ssm_state_size"):  # Mamba-2; Mamba, whose channels each have a decay for each state
        state, chunk = module.ssm_state_size, getattr(module, "chunk_size", 64)
        if not hasattr(module, "num_heads"):
            return Linear(module.intermediate_size, 1, state, 1, columns=1, **conv)
        return Linear(module.num_heads, module.n_groups, state, module.head_dim, columns=1, chunk=chunk, **conv)
    heads = _first(module, "num_heads", "num_attention_heads")
    if heads and hasattr(module, "head_dim"):
        dim = module.head_dim
        if "chunk_kimi_delta_attention" in functions:  # KDA
            return Linear(heads, heads, dim, dim, columns=dim, decays="key", **conv)
        chunk = getattr(module, "block_size", 64)  # lightning attention
        return Linear(heads, heads, dim, dim, columns=1, chunk=chunk, decays="head", **conv)
    if functions <= {"causal_conv1d_fn"} and conv:  # LFM2
        return ShortConv(0, 0, 0, 0, **conv)
    # A registered function's layer: as if each channel had a number as its state, and a decay.
    width = max((m.out_features for m in module.modules() if isinstance(m, nn.Linear)), default=1)
    return Linear(width, width, 1, 1, columns=1, **conv)


def _indexed(attention: Any) -> Indexed:
    rank, indexer = attention.kv_lora_rank, getattr(attention, "indexer", None)
    width, dim = rank + attention.qk_rope_head_dim, attention.qk_nope_head_dim + attention.qk_rope_head_dim
    index = (0, 0) if indexer is None else (indexer.n_heads, indexer.head_dim)
    pool = getattr(attention.config, "index_kpool", 1)
    if pool > 1 and indexer is not None:
        index = (*index, indexer.head_dim + 1, pool)
    top_k = attention.config.index_topk + pool - 1
    return Indexed(attention.num_heads, 1, dim, attention.v_head_dim, width, rank, top_k, *index)


def _compressed(attention: Any) -> Compressed:
    """Return DeepSeek-V4's attention."""
    compressor, heads, dim = attention.compressor, attention.num_heads, attention.head_dim
    indexer = getattr(compressor, "indexer", None)
    index: dict[str, int] = {}
    if indexer is not None:
        index = {"top_k": indexer.index_topk, "index_heads": indexer.num_heads, "index_dim": indexer.head_dim}
        index["index_projected"] = _width(indexer, "kv_proj")
    rate, window, projected = compressor.compress_rate, attention.sliding_window, _width(compressor, "kv_proj")
    return Compressed(heads, 1, dim, dim, dim, dim, rate=rate, window_tokens=window, projected=projected, **index)


def _blocks(attention: Any, config: Any) -> ChosenBlocks:
    """Return MiniMax-M3's or Qwen4-Exp's attention."""
    indexer, dim = attention.indexer, attention.head_dim
    heads, kv = config.num_attention_heads, config.num_key_value_heads
    if hasattr(indexer, "token_budget"):
        block, turned = indexer.compress_ratio, int(dim * config.rope_parameters.get("partial_rotary_factor", 1.0))
        return ChosenBlocks(
            heads, kv, dim, dim, width=2 * kv * dim, rank=kv * indexer.token_budget,
            top_k=indexer.token_budget + block - 1, index_heads=indexer.index_n_heads,
            index_dim=indexer.index_head_dim, beside=2 * turned, block=block,
        )  # fmt: skip
    chosen = indexer.topk_blocks
    return ChosenBlocks(
        heads, kv, dim, dim, width=2 * kv * dim, rank=kv * chosen, top_k=chosen * indexer.block_size,
        index_heads=indexer.num_heads, index_dim=indexer.head_dim,
    )  # fmt: skip


def _attention(attention: Any, config: Any, index: int) -> Softmax:
    keys, sinks = _attended_keys(attention, config, index), isinstance(getattr(attention, "sinks", None), nn.Parameter)
    heads = _first(config, "num_attention_heads", "n_head", "n_heads")
    if getattr(config, "kv_lora_rank", None):  # latent attention: DeepSeek
        rope = config.qk_rope_head_dim
        dim = config.qk_nope_head_dim + rope
        return Softmax(heads, heads, dim, config.v_head_dim, keys, config.kv_lora_rank + rope, rope)
    dim = _first(attention, "head_dim", "attention_head_size") or getattr(config, "head_dim", None)
    dim = dim or config.hidden_size // heads
    out = _linear(attention, "o_proj", "out_proj")  # a query projection may hold a gate, too
    heads = getattr(out, "in_features", 0) // dim or _width(attention, "q_proj", "query", "q_lin") // dim or heads
    groups = getattr(attention, "num_key_value_groups", None)
    kv = _width(attention, "k_proj", "key", "k_lin") // dim or (heads // groups if groups else None)
    kv = kv or _first(config, "num_key_value_heads", "num_kv_heads") or heads
    return Softmax(heads, kv, dim, _width(attention, "v_proj", "value", "v_lin") // kv or dim, keys, sinks=sinks)


def _sliceable(attention: Any, config: Any) -> bool:
    """Return whether `longspan.memory.head_slices` can slice the heads: it has a tensor plan, and norms per head."""
    dim = getattr(attention, "head_dim", None)
    norms = (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
    per_head = all(p.shape[0] == dim for norm in norms if norm is not None for p in norm.parameters())
    # The plan of a hybrid may name its MLPs alone.
    planned = any(pattern.endswith((".o_proj", ".dense")) for pattern in tensor_plan_of(config))
    planned = planned and not getattr(config, "num_kv_shared_layers", 0)
    in_float8 = any(float8_layers(attention))
    projections = ("q_proj", "k_proj", "v_proj"), ("qkv_proj",), ("kv_b_proj",), ("query_key_value",)
    cut = any(all(hasattr(attention, name) for name in names) for names in projections)
    return planned and cut and per_head and _linear(attention, "o_proj", "dense") is not None and not in_float8


def _attended_keys(attention: nn.Module, config: Any, index: int) -> AttendedKeys:
    types = getattr(config, "layer_types", None)
    kind = types[index] if types and index < len(types) else None
    window = getattr(attention, "sliding_window", None)
    if kind == "sliding_attention" or (not types and getattr(config, "use_sliding_window", True)):
        window = window or getattr(config, "sliding_window", None)
    if kind == "chunked_attention":
        return Chunk(config.attention_chunk_size)
    if isinstance(window, int) and window > 0 and kind != "full_attention":
        return Window(window)
    return CAUSAL if getattr(attention, "is_causal", True) else Bidirectional()


def _linear(module: nn.Module, *names: str) -> Any:
    return next((getattr(module, name) for name in names if hasattr(module, name)), None)


def _width(module: nn.Module, *names: str) -> int:
    """Return the output width of the first of these linear layers; 0 if there is none."""
    return int(getattr(_linear(module, *names), "out_features", 0))


def _first(owner: Any, *names: str) -> Any:
    return next((getattr(owner, name) for name in names if getattr(owner, name, None) is not None), None)


# ---------------------------------------------------------------------------------------------------------------------
# The MLP.


def _mlp(
    block: nn.Module, config: Any, parameters: tuple[Parameter, ...], name: str
) -> tuple[Mlp, tuple[Parameter, ...]]:
    """Return the MLP of a layer, and all weights of the layer, those of the MLP under the names `mlp....`."""
    mixes = {name.partition(".")[0] for name in (*attention_layers(block), *mixer_layers(block))}
    owners = {p.name.partition(".")[0] for p in parameters if len(p.shape) > 1} - mixes
    parameters = tuple(replace(p, name=_renamed(p.name, owners)) for p in parameters)
    matrices = [p for p in parameters if p.name.startswith("mlp.") and len(p.shape) > 1 and ".lora_" not in p.name]
    return _mlp_of(matrices, block, config, name), parameters


def _renamed(name: str, owners: set[str]) -> str:
    if name.partition(".")[0] not in owners:
        return name
    at = name.find("experts.")
    if at >= 0 and "shared" not in name[:at]:
        return f"mlp.{name[at:]}"
    return f"mlp.{name.partition('.')[2] if len(owners) == 1 else name}"


def _mlp_of(matrices: list[Parameter], block: nn.Module, config: Any, name: str) -> Mlp:
    d = config.hidden_size
    routed = [p for p in matrices if len(p.shape) == 3 or p.name.startswith("mlp.experts.")]
    if not routed:
        return Mlp(*_widths(matrices, d)) if matrices else Mlp(0, gated=False)
    stacked = [p.shape[0] for p in routed if len(p.shape) == 3]
    numbered = {p.name.split(".")[2] for p in routed if len(p.shape) == 2}
    experts = stacked[0] if stacked else len(numbered)
    each = [Parameter(p.name, p.shape[-2:]) for p in routed if len(p.shape) == 3 or p.name.split(".")[2] == "0"]
    ffn, gated = _widths(each, getattr(config, "moe_latent_size", None) or d)
    chosen = _first(config, "num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts", "moe_k")
    tops = (getattr(module, "top_k", None) for module in block.modules())
    chosen = int(chosen or next((top for top in tops if isinstance(top, int)), 1))
    if chosen > experts:
        raise LongspanError(f"{name}: num_experts_per_tok={chosen} is more than the {experts} experts of a layer")
    shared = [p for p in matrices if "shared" in p.name and min(p.shape) > 1]
    return Mlp(ffn, gated, experts, chosen, sum(p.numel for p in shared) // ((3 if gated else 2) * d))


def _widths(matrices: list[Parameter], d: int) -> tuple[int, bool]:
    """Return the intermediate size of an MLP, and whether it is gated: by two matrices, or by one of twice the size."""
    widths = [max(p.shape) if min(p.shape) == d else min(p.shape) if max(p.shape) == d else 0 for p in matrices]
    widest = max(widths, default=0)
    if widest == 0:
        return d, False
    fused = widest % 2 == 0 and widths.count(widest) == 1 and widest // 2 in widths
    return (widest // 2 if fused else widest), fused or widths.count(widest) >= 3


# ---------------------------------------------------------------------------------------------------------------------
# Around the layers.


def _root(model: PreTrainedModel, blocks: list[nn.Module], tied: bool) -> Iterator[Parameter]:
    """Yield the weights outside layers and tower: the embedding first, an untied head last."""
    inside = {p for block in (*blocks, *tower_modules(model)) for p in block.parameters()}
    ids = {p: name for name, p in model.named_parameters() if p not in inside}
    read = {p.name: p for p in _parameters(model)}
    head, first = model.get_output_embeddings(), model.get_input_embeddings().weight
    last = None if head is None or tied else head.weight
    if tied and head is not None and head.weight is not first:
        ids.pop(head.weight, None)
    order = [first, *(p for p in ids if p is not first and p is not last), *([] if last is None else [last])]
    owners = dict(model.named_modules())
    for p in order:
        yield read[_plain_name(ids[p], owners)]


def _tied(model: PreTrainedModel) -> bool:
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None:
        return True
    return head.weight is embedding.weight or bool(getattr(model.config, "tie_word_embeddings", False))


_ATTENDS = re.compile("attn|attention")
"""In the names of weights of a tower's attention."""

_MARKS_FRAMES = re.compile(r"qwen3|glm")
"""Model types whose processor writes text between a video's frames."""


def _tower(model: PreTrainedModel) -> Tower | None:
    """Return the vision tower; None for a language model."""
    modules = tower_modules(model)
    if not modules:
        return None
    core, parts = vision_core(model), (f"{name}_config" for name in ("vision", "vq", "audio"))
    config = next((c for name in parts if (c := getattr(model.config, name, None)) is not None), model.config)
    lists = [m for m in model.modules() if m in modules and isinstance(m, nn.ModuleList)]
    attending = (m for m in lists if any(_ATTENDS.search(name) for name, _ in m.named_parameters()))
    blocks = next(attending, nn.ModuleList())  # Fuyu has one linear layer, and Emu3 convolutions
    block = tuple(_parameters(blocks[0])) if len(blocks) else ()
    in_blocks = {p for p in blocks.parameters()}
    before, after, passed = list[Parameter](), list[Parameter](), False
    for child in (child for child in core.children() if child is not text_part(core)):
        for own, p in zip(_parameters(child), child.parameters(), strict=True):
            passed = passed or p in in_blocks
            if p not in in_blocks:
                (after if passed or blocks not in set(child.modules()) else before).append(own)
    norm = next((p for p in block if len(p.shape) == 1 and "norm" in p.name), None)
    width = norm.shape[0] if norm is not None else model.config.get_text_config().hidden_size
    ffn, gated = _widths([p for p in block if len(p.shape) == 2 and not _ATTENDS.search(p.name)], width)
    patch, frames = _first(config, "patch_size", "spatial_patch_size") or 14, getattr(config, "temporal_patch_size", 1)
    patch = patch if isinstance(patch, int) else patch[0]  # height and width
    window = getattr(config, "window_size", None)
    merge = _merge(model.config, config)
    return Tower(
        depth=len(blocks),
        width=width,
        heads=_first(config, "num_heads", "num_attention_heads", "attention_heads") or 1,
        ffn=ffn,
        gated=gated,
        rms=norm is not None and not any(p.name == norm.name.replace("weight", "bias") for p in block),
        patch=patch,
        frames=frames,
        channels=_first(config, "in_channels", "in_chans", "num_channels") or 3,
        merge=merge,
        out=model.config.get_text_config().hidden_size,
        deepstack=len(getattr(config, "deepstack_visual_indexes", None) or ()),
        window=window // merge // patch * merge if window else None,
        full=frozenset(getattr(config, "fullatt_block_indexes", None) or ()) if window else frozenset(),
        marks_frames=bool(_MARKS_FRAMES.match(model.config.model_type)),
        any_size=hasattr(config, "spatial_merge_size"),
        block=block,
        before=tuple(before),
        after=tuple(after),
    )


def _merge(config: Any, vision: Any) -> int:
    """Return the side in patches of what one embedding covers."""
    side = _first(vision, "spatial_merge_size") or _first(config, "spatial_merge_size", "downsample_factor")
    if side is None and getattr(config, "downsample_ratio", None):
        side = round(1 / config.downsample_ratio)
    if side is None and getattr(config, "mm_tokens_per_image", None):  # Gemma-3
        side = round((vision.image_size // vision.patch_size) / config.mm_tokens_per_image**0.5)
    return side or 1
