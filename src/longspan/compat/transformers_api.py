"""transformers' private and version-bound names."""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
import operator
import re
import sys
import types
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import Any

import transformers
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AttentionMaskInterface, Cache, PreTrainedModel, masking_utils

from longspan.compat.older_mixers import older_forward_with, older_mixer_functions, unwrapped
from longspan.compat.versions import needed
from longspan.core.errors import LongspanError

_CACHE_NAMES = "cache", "past_key_values"

LAYERS_DIFFER: tuple[type[Exception], ...] = ()
"""Errors of a config for a value that differs between its layers (`per_layer_config`).

Versions: transformers 5.13 and newer. When gone: empty, and the config's error is shown.
"""
with contextlib.suppress(ImportError):
    from transformers.integrations.heterogeneity.configuration_utils import AmbiguousGlobalPerLayerAttributeError

    LAYERS_DIFFER = (AmbiguousGlobalPerLayerAttributeError,)


def mask_function(kind: str) -> Any:
    """Return transformers' function (batch, head, query, key) of a "causal" or "bidirectional" mask.

    When gone: LongspanError.
    """
    use = "the mask that a model uses"
    return needed("transformers", masking_utils, f"{kind}_mask_function", "masking_utils", use)


def cache_name(forward: Callable[..., Any]) -> str:
    """Return the name of a forward's argument for its KV cache.

    Versions: transformers 5.24 renamed "past_key_values" to "cache". Public way: this one. When gone: the old name; a
    forward without a cache has neither.
    """
    parameters = inspect.signature(forward).parameters
    return next((name for name in _CACHE_NAMES if name in parameters), _CACHE_NAMES[0])


def has_own_cache(model: PreTrainedModel) -> bool:
    """Return whether a model's file has a cache class of its own, without which its forward refuses `use_cache`
    (MiniMax).

    When gone: False, and the model raises an error of its own.
    """
    files = [sys.modules[kind.__module__] for kind in type(model).__mro__ if issubclass(kind, PreTrainedModel)]
    kinds = [(file.__name__, x) for file in files for x in vars(file).values() if isinstance(x, type)]
    return any(issubclass(kind, Cache) and kind.__module__ == file for file, kind in kinds)


def caches_give_states() -> bool:
    """Return whether recurrent layers ask their cache for states by methods, not for its tensors.

    Versions: transformers 5.24. When gone: False, and generation with recurrent layers is refused.
    """
    return hasattr(Cache, "get_conv_state") and hasattr(Cache, "get_recurrent_state")


def take_cache(arguments: dict[str, Any]) -> Any:
    """Remove the KV cache from the arguments of a forward or of `generate`, and return it; None if there is none.

    Both names are accepted on every version, so that a script runs on all of them. Two different caches are returned as
    a tuple, which every caller refuses. When gone: None.
    """
    given = [cache for name in _CACHE_NAMES if (cache := arguments.pop(name, None)) is not None]
    if any(cache is not given[0] for cache in given):
        return tuple(given)
    return given[0] if given else None


def parts_of(function: Any) -> Iterator[Any]:
    """Yield what a mask function closes over: transformers builds masks from functions, tuples of them, and tensors.

    When gone: nothing; the mask is still compared with the known ones, and refused if it is none of them.
    """
    for cell in getattr(function, "__closure__", None) or ():
        value = cell.cell_contents
        yield from value if isinstance(value, tuple | list) else (value,)


def register_attention(name: str, attention: Any, mask: Any) -> None:
    """Add an attention and a mask to transformers' registries.

    Public way: this one. When gone: an ImportError.
    """
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)


def set_attention(config: Any, name: str) -> None:
    """Let a config use an attention of the registry.

    Public way: `PreTrainedModel.set_attn_implementation`, which also asks each sub-model, and treats configs that are
    shared in its own way. When gone: LongspanError.
    """
    use = "a model's choice of its attention"
    needed("transformers", type(config), "_attn_implementation", "PreTrainedConfig", use)
    config._attn_implementation = name


def attention_of(config: Any) -> Any:
    """Return the attention that a config uses; None if it chooses none. When gone: LongspanError."""
    return needed(
        "transformers", config, "_attn_implementation", "PreTrainedConfig", "a model's choice of its attention"
    )


_UNDECLARED = {"biogpt"}


def set_checkpointing(layer: Any, *, on: bool) -> None:
    """Let a layer of transformers recompute its activations in the backward, or not.

    Public way: `gradient_checkpointing_enable`, for all layers of a model. When gone: nothing is recomputed.
    """
    layer.gradient_checkpointing = on
    if on:
        layer._gradient_checkpointing_func = functools.partial(checkpoint, use_reentrant=False)


def keep_from_generate(model: Any, keys: Container[str]) -> None:
    """Let `generate` of a model drop these arguments once it has the prompt's positions, and encode no pictures.

    It would encode all of them before the first forward, and refuse pixels with a prompt in chunks. Versions:
    transformers 5.24 does so. Public way: none. When gone: `generate` passes the arguments to the first forward.
    """

    def without(model_kwargs: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in model_kwargs.items() if key not in keys}

    model._prepare_multimodal_encoder_kwargs_for_generation = without


def tiles_of_image(height: int, width: int, pinpoints: list[list[int]], tile: int) -> int:
    """Return the number of tiles of `tile` pixels that LLaVA-NeXT's and LLaVA-OneVision's towers cut an image into.

    Public way: none; models call this function. When gone: ImportError.
    """
    from transformers.models.llava_next.modeling_llava_next import image_size_to_num_patches

    return int(image_size_to_num_patches((height, width), pinpoints, tile))


def uses_registry(model: PreTrainedModel) -> bool:
    """Return whether a model's layers take their attention from the registry; some do without declaring it.

    Public way: this one, undocumented. When gone: LongspanError.
    """
    use = "how a model calls its attention"
    declared = needed("transformers", model, "is_backend_compatible", "PreTrainedModel", use)
    return bool(declared()) or model.config.model_type in _UNDECLARED


def calls_registry(layer: Any) -> bool:
    """Return whether an attention layer's code looks its attention up in the registry; hybrid models do not declare it.

    When gone: False, so that the model is refused.
    """
    return "ALL_ATTENTION_FUNCTIONS" in _globals_of(inspect.unwrap(type(layer).forward))


def reads(module: Any, attribute: str) -> bool:
    """Return whether a module's forward names an attribute. When gone: True, so that the caller assumes so."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is None or attribute in code.co_names


def new_model(cls: Any, config: Any, dtype: Any = None) -> Any:
    """Return a model of class `cls` as `from_config` makes it (an `AutoModel` would choose the class itself).

    The config may be changed; it says the dtype if there is none. Public way: `cls(config)`, in torch's default dtype.
    When gone: LongspanError.
    """
    make = needed("transformers", cls, "_from_config", "PreTrainedModel", "an unsharded model for the export")
    return make(config) if dtype is None else make(config, dtype=dtype)


def keys_in_model(model: PreTrainedModel, keys: Iterable[str]) -> dict[str, str] | None:
    """Return the model's names for the keys of a folder's files: key -> name, which the model may lack.

    None if any weight is converted (split, merged, transposed) and not only renamed. The model may be on the meta
    device. Public way: none; `from_pretrained` does it while it reads. When gone: None, so that transformers reads the
    files.
    """
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

        mapping = get_model_conversion_mapping(model)
        renamings = [x for x in mapping if isinstance(x, WeightRenaming)]
        converters = [x for x in mapping if isinstance(x, WeightConverter)]
        if len(renamings) + len(converters) != len(mapping):
            return None
        own = model.state_dict()
        found = {
            key: rename_source_key(key, renamings, converters, model.base_model_prefix, own) for key in sorted(keys)
        }
    except (ImportError, AttributeError, TypeError):
        return None
    if any(pattern is not None for _, pattern in found.values()):
        return None
    # As transformers does, keep a key that a rule would rename to a name outside of the model.
    return {key: key if name not in own and key in own else name for key, (name, _) in found.items()}


def generation_config(name: str, model: PreTrainedModel) -> Any:
    """Return the generation config that `from_pretrained` gives a model of this name: from its own file or config.json.

    Public way: `GenerationConfig.from_pretrained`, for the first of the two. When gone: one made of the model's config.
    """
    from transformers import GenerationConfig

    for options in ({}, {"config_file_name": "config.json", "_from_auto": False, "_from_model_config": True}):
        try:
            return GenerationConfig.from_pretrained(name, **options)
        except (OSError, TypeError):
            continue
    return GenerationConfig.from_model_config(model.config)


def output_dir_of(trainer: Any, trial: Any) -> str:
    """Return the folder that a Trainer saves checkpoints in.

    Public way: `args.output_dir`, which a hyperparameter search does not use. When gone: that.
    """
    own = getattr(trainer, "_get_output_dir", None)
    return str(trainer.args.output_dir if own is None else own(trial=trial))


@functools.cache
def counts_repeated_tokens_once() -> bool:
    """Return whether the Trainer divides the number of labelled tokens by the ranks that see the same batch.

    Versions: transformers 5.19 and newer divide by `get_tp_size()`. When gone: True.
    """
    from transformers import Trainer  # needs accelerate

    count = getattr(Trainer, "_get_num_items_in_batch", None)
    return count is None or "get_tp_size" in inspect.getsource(count)


_COUNTS_IN_ROWS = "BioGptLearnedPositionalEmbedding"
_COUNTS_THE_MASK = "OPTLearnedPositionalEmbedding"

Positions = Callable[[Mapping[str, Any], int], Tensor | None]


def own_positions(model: PreTrainedModel) -> Positions | None:
    """Return how a model computes missing position ids from a batch, behind cached tokens; `count_mask` if it counts
    real tokens. None if it counts 0, 1, 2, ... along the row, or is refused.

    When gone: None, and `makes_positions` refuses such a module.
    """
    core = getattr(model, "model", model)
    if hasattr(core, "compute_3d_position_ids"):
        return functools.partial(_rotary_3d, core)
    for module in model.modules():
        name, kind = "create_position_ids_from_input_ids", type(module)
        if kind.__name__ == _COUNTS_THE_MASK:
            return count_mask
        made: Any = getattr(module, name, getattr(sys.modules[kind.__module__], name, None))
        from_embeds: Any = getattr(module, "create_position_ids_from_inputs_embeds", None)
        if made is None or from_embeds is None or getattr(module, "position_embedding_type", "") == "rotary":
            continue
        return functools.partial(_count_tokens, made, from_embeds, module.padding_idx)
    return None


def count_mask(batch: Mapping[str, Any], past: int) -> Tensor | None:
    """Count the real tokens of an attention mask; padding has -1. When gone: `own_positions` returns None."""
    mask: Tensor | None = batch.get("attention_mask")
    return None if mask is None else (mask.long().cumsum(-1) * mask.long() - 1)[:, past:]


def _rotary_3d(core: Any, batch: Mapping[str, Any], past: int) -> Tensor | None:
    """Return positions of time, height and width, `[3, B, n]`; None if the batch has no pictures: then tokens count.

    The model keeps `rope_deltas`, by which the positions of generated tokens differ from their number.
    """
    if past:
        deltas: Tensor | None = getattr(core, "rope_deltas", None)
        if deltas is not None and bool(deltas.any()):
            raise LongspanError(
                f"position ids after pictures differ from the number of tokens, here by {deltas.flatten().tolist()}; "
                f"give the `position_ids` of tokens that follow {past} in the cache, as `generate` does"
            )
        return None
    accepted = inspect.signature(core.compute_3d_position_ids).parameters
    given = {name: batch.get(name) for name in accepted if name not in _CACHE_NAMES}
    positions: Tensor | None = core.compute_3d_position_ids(**given, **{cache_name(core.forward): None})
    return positions


def _count_tokens(from_ids: Any, from_embeds: Any, pad: Any, batch: Mapping[str, Any], past: int) -> Any:
    if batch.get("input_ids") is None:
        return from_embeds(batch["inputs_embeds"], *([pad] if _takes(from_embeds, "padding_idx") else []))
    counts_past = len(inspect.signature(from_ids).parameters) > 2
    return from_ids(batch["input_ids"], pad, *([past] if counts_past else []))


def makes_positions(module: Any) -> bool:
    """Return whether a module makes positions from its tokens or mask in a way that `own_positions` does not know.

    When gone: True, so that the model is refused.
    """
    kind = type(module)
    from_tokens = any(name.startswith("create_position_ids_from") for name in dir(kind))
    if (
        getattr(module, "position_embedding_type", "") == "rotary" and from_tokens
    ):  # ESM's, in versions whose forward takes no positions
        rotary = getattr(sys.modules[kind.__module__], "RotaryEmbedding", None) or getattr(
            sys.modules[kind.__module__], f"{kind.__name__.removesuffix('Embeddings')}RotaryEmbedding", None
        )
        return rotary is None or not _takes(rotary.forward, "position_ids")
    counts = re.search(r"(Learned|Sinusoidal)Positional", kind.__name__) is not None
    known = from_tokens or kind.__name__ in (_COUNTS_IN_ROWS, _COUNTS_THE_MASK)
    return (counts or from_tokens) and not (known and _takes(module.forward, "position_ids"))


def _takes(function: Any, name: str) -> bool:
    return name in inspect.signature(function).parameters


MIXER_FUNCTIONS = {
    "causal_conv1d_fn",
    "torch_chunk_gated_delta_rule",
    "chunk_kimi_delta_attention",
    "mamba2_chunk_scan",
    "mamba_selective_scan",
    "mamba2_split_conv1d_scan_combined",
    "mamba_inner_fn",
    "MiniMaxLightningAttention.forward",
    "RecurrentGemmaRecurrentBlock.conv_1d.forward",
    "RecurrentGemmaRecurrentBlock.rg_lru.forward",
    "RecurrentGemmaRecurrentBlock.rg_lru._rnn_scan",
    "RwkvSelfAttention.forward",
    "RwkvSelfAttention.time_shift.forward",
    "RwkvFeedForward.time_shift.forward",
}  # fmt: skip
"""Functions through which tokens mix in recurrent layers and short convolutions: of modelling files, or methods.

A method is named by the class of the layer, then the path from an instance of it.
Versions: transformers 5.15 and newer; before, see `older_mixers`. When gone: `mixer_functions` finds none, and the
model is refused.
"""


def mixer_functions(module: Any) -> dict[str, Any]:
    """Return those of `MIXER_FUNCTIONS` that a module has or calls, by name; empty if it is no such layer.

    When gone: empty, and the model is refused.
    """
    kind: Any = type(module)
    with contextlib.suppress(AttributeError):
        found = {name: operator.attrgetter(path)(module) for name, path in _methods(kind).items()}
        return found or _called_functions(kind) or older_mixer_functions(module)
    return {}


def is_hybrid(model: Any) -> bool:
    """Return whether a model's family has recurrent layers, even if its config chooses none.

    When gone: False, and a model that does not declare its attention is refused.
    """
    defined = {name for kind in type(model).__mro__ for name in vars(sys.modules[kind.__module__])}
    return any(name.partition(".")[0] in defined for name in MIXER_FUNCTIONS)


def add_mixer_function(name: str) -> None:
    """Add the name of a function to `MIXER_FUNCTIONS`. When gone: as there."""
    MIXER_FUNCTIONS.add(name)
    _methods.cache_clear()
    _called_functions.cache_clear()


@functools.lru_cache(maxsize=256)
def _methods(kind: Any) -> dict[str, str]:
    return {name: path for name in MIXER_FUNCTIONS if (path := name.removeprefix(f"{kind.__name__}.")) != name}


@functools.lru_cache(maxsize=256)
def _called_functions(kind: Any) -> dict[str, Any]:
    forward: Any = unwrapped(kind.forward)
    names = _globals_of(forward) & MIXER_FUNCTIONS
    return {name: f for name in names if callable(f := forward.__globals__.get(name))}


def _globals_of(function: Any) -> set[str]:
    """Return the names of the globals that a function reads."""
    return {step.argval for step in dis.get_instructions(function) if step.opname == "LOAD_GLOBAL"}


def mixers_hint() -> str:
    """Return the end of the error for a recurrent layer: which transformers to install.

    When gone (5.15 and newer): empty.
    """
    found = re.match(r"(\d+)\.(\d+)", transformers.__version__)
    if found is None or (int(found[1]), int(found[2])) >= (5, 15):
        return ""
    return f" (most recurrent layers can with transformers 5.15 or newer; this is {transformers.__version__})"


def forward_with(module: Any, functions: dict[str, Any]) -> Any:
    """Return a module's forward that calls other functions instead of its file's, without the decorators around it.

    Methods, whose names are as in `MIXER_FUNCTIONS`, are replaced on the instance.
    Public way: none but kernels of the Hub, for a whole process. When gone: a layer that calls none of the functions
    raises in its first forward.
    """
    for name, function in functions.items():
        _, _, path = name.partition(".")
        if path:
            owner, _, method = path.rpartition(".")
            setattr(module.get_submodule(owner), method, function)
    kind: Any = type(module)
    if f"{kind.__name__}.forward" in functions:
        return module.forward
    if older_mixer_functions(module) and not _called_functions(kind):
        return older_forward_with(module, functions)
    forward: Any = unwrapped(kind.forward)
    copied = types.FunctionType(
        forward.__code__, {**forward.__globals__, **functions}, forward.__name__, forward.__defaults__,
        forward.__closure__,
    )  # fmt: skip
    copied.__kwdefaults__ = forward.__kwdefaults__
    return types.MethodType(copied, module)


def router_loss(model: PreTrainedModel) -> Any:
    """Return a family's own load-balancing loss, (router logits, experts, top_k, mask) -> scalar; None if it has none.

    When gone: None, so that a request for the router loss is refused.
    """
    modules = [sys.modules.get(kind.__module__) for kind in type(model).__mro__]
    return next((f for m in modules if (f := getattr(m, "load_balancing_loss_func", None)) is not None), None)


def has_no_sdpa(error: BaseException | None) -> bool:
    """Return whether a model could not be made because it has no `scaled_dot_product_attention`.

    Public way: none but the text of the error. When gone: False, and the error is shown.
    """
    return isinstance(error, ValueError) and "scaled_dot_product_attention" in str(error)
