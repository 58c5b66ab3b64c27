"""transformers' private and version-bound names."""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
import re
import sys
import types
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AttentionMaskInterface, Cache, PreTrainedModel, masking_utils

from longspan.core.errors import LongspanError

_CACHE_NAMES = "cache", "past_key_values"


def mask_function(kind: str) -> Any:
    """Return transformers' function (batch, head, query, key) of a "causal" or "bidirectional" mask."""
    return getattr(masking_utils, f"{kind}_mask_function")


def has_own_cache(model: PreTrainedModel) -> bool:
    """Return whether a model's file has a cache class of its own, without which its forward refuses `use_cache`
    (MiniMax).
    """
    files = [sys.modules[kind.__module__] for kind in type(model).__mro__ if issubclass(kind, PreTrainedModel)]
    kinds = [(file.__name__, x) for file in files for x in vars(file).values() if isinstance(x, type)]
    return any(issubclass(kind, Cache) and kind.__module__ == file for file, kind in kinds)


def take_cache(arguments: dict[str, Any]) -> Any:
    """Remove the KV cache from the arguments of a forward or of `generate`, and return it; None if there is none.

    transformers still accepts it by its old name, `past_key_values`. Two different caches are returned as a tuple,
    which every caller refuses.
    """
    given = [cache for name in _CACHE_NAMES if (cache := arguments.pop(name, None)) is not None]
    if any(cache is not given[0] for cache in given):
        return tuple(given)
    return given[0] if given else None


def parts_of(function: Any) -> Iterator[Any]:
    """Yield what a mask function closes over: transformers builds masks from functions, tuples of them, and tensors."""
    for cell in getattr(function, "__closure__", None) or ():
        value = cell.cell_contents
        yield from value if isinstance(value, tuple | list) else (value,)


def register_attention(name: str, attention: Any, mask: Any) -> None:
    """Add an attention and a mask to transformers' registries."""
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)


def set_attention(config: Any, name: str) -> None:
    """Let a config use an attention of the registry.

    `PreTrainedModel.set_attn_implementation` also asks each sub-model, and treats shared configs in its own way.
    """
    config._attn_implementation = name


def attention_of(config: Any) -> Any:
    """Return the attention that a config uses; None if it chooses none."""
    return config._attn_implementation


_UNDECLARED = {"biogpt"}


def set_checkpointing(layer: Any, *, on: bool) -> None:
    """Let a layer of transformers recompute its activations in the backward, or not.

    `gradient_checkpointing_enable` does so for all layers of a model.
    """
    layer.gradient_checkpointing = on
    if on:
        layer._gradient_checkpointing_func = functools.partial(checkpoint, use_reentrant=False)


def keep_from_generate(model: Any, keys: Container[str]) -> None:
    """Let `generate` of a model drop these arguments once it has the prompt's positions, and encode no pictures.

    It would encode all of them before the first forward, or refuse pixels and sounds with a prompt in chunks.
    """

    def without(inputs: Any, model_kwargs: dict[str, Any], *_: Any) -> dict[str, Any]:
        return {key: value for key, value in model_kwargs.items() if key not in keys}

    model._maybe_prepare_encoder_kwargs_for_generation = without


def tiles_of_image(height: int, width: int, pinpoints: list[list[int]], tile: int) -> int:
    """Return the number of tiles of `tile` pixels that LLaVA-NeXT's and LLaVA-OneVision's towers cut an image into."""
    from transformers.models.llava_next.modeling_llava_next import image_size_to_num_patches

    return int(image_size_to_num_patches((height, width), pinpoints, tile))


def uses_registry(model: PreTrainedModel) -> bool:
    """Return whether a model's layers take their attention from the registry; some do without declaring it."""
    return bool(model.is_backend_compatible()) or model.config.model_type in _UNDECLARED


def calls_registry(layer: Any) -> bool:
    """Return whether an attention layer's code looks its attention up in the registry; hybrid models do not declare
    it.
    """
    return "ALL_ATTENTION_FUNCTIONS" in _globals_of(inspect.unwrap(type(layer).forward))


def reads(module: Any, attribute: str) -> bool:
    """Return whether a module's forward names an attribute; True if its code is not Python's."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is None or attribute in code.co_names


def reads_weight(module: Any, child: str) -> bool:
    """Return whether a module of transformers uses the weight of a child itself, and not its dtype or device alone."""
    if not type(module).__module__.startswith("transformers.models."):
        return False
    pattern = re.compile(rf"self\.{re.escape(child)}\.weight\b(?!\.(?:dtype|device))")
    functions = [inspect.unwrap(x) for x in vars(type(module)).values() if inspect.isfunction(x)]
    reading = [f for f in functions if {child, "weight"} <= set(f.__code__.co_names)]
    return any(pattern.search(inspect.getsource(f)) for f in reading)


def new_model(cls: Any, config: Any, dtype: Any = None) -> Any:
    """Return a model of class `cls` as `from_config` makes it (an `AutoModel` would choose the class itself).

    The config may be changed; it says the dtype if there is none. `cls(config)` uses torch's default dtype.
    """
    return cls._from_config(config) if dtype is None else cls._from_config(config, dtype=dtype)


def keys_in_model(model: PreTrainedModel, keys: Iterable[str]) -> dict[str, str] | None:
    """Return the model's names for the keys of a folder's files: key -> name, which the model may lack.

    None if any weight is converted (split, merged, transposed) and not only renamed. The model may be on the meta
    device. `from_pretrained` does this while it reads.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    mapping = get_model_conversion_mapping(model)
    renamings = [x for x in mapping if isinstance(x, WeightRenaming)]
    converters = [x for x in mapping if isinstance(x, WeightConverter)]
    if len(renamings) + len(converters) != len(mapping):
        return None
    own = model.state_dict()
    found = {key: rename_source_key(key, renamings, converters, model.base_model_prefix, own) for key in sorted(keys)}
    if any(pattern is not None for _, pattern in found.values()):
        return None
    # As transformers does, keep a key that a rule would rename to a name outside of the model.
    return {key: key if name not in own and key in own else name for key, (name, _) in found.items()}


def generation_config(name: str, model: PreTrainedModel) -> Any:
    """Return the generation config that `from_pretrained` gives a model of this name: from its own file or config.json.

    `GenerationConfig.from_pretrained` alone reads the first of the two.
    """
    from transformers import GenerationConfig

    for options in ({}, {"config_file_name": "config.json", "_from_auto": False, "_from_model_config": True}):
        with contextlib.suppress(OSError):
            return GenerationConfig.from_pretrained(name, **options)
    return GenerationConfig.from_model_config(model.config)


def output_dir_of(trainer: Any, trial: Any) -> str:
    """Return the folder that a Trainer saves checkpoints in; a hyperparameter search does not use `args.output_dir`."""
    return str(trainer._get_output_dir(trial=trial))


_COUNTS_IN_ROWS = "BioGptLearnedPositionalEmbedding"
_COUNTS_THE_MASK = "OPTLearnedPositionalEmbedding"

Positions = Callable[[Mapping[str, Any], int], Tensor | None]


def own_positions(model: PreTrainedModel) -> Positions | None:
    """Return how a model computes missing position ids from a batch, behind cached tokens; `count_mask` if it counts
    real tokens. None if it counts 0, 1, 2, ... along the row, or is refused (`makes_positions`).
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
    """Count the real tokens of an attention mask; padding has -1."""
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
    sounds = batch.get("feature_attention_mask")
    if "audio_feature_lengths" in given and sounds is not None:  # as the forward of Qwen's omni models does
        given["audio_feature_lengths"] = sounds.sum(-1)
    positions: Tensor | None = core.compute_3d_position_ids(**given, cache=None)
    return positions


def _count_tokens(from_ids: Any, from_embeds: Any, pad: Any, batch: Mapping[str, Any], past: int) -> Any:
    if batch.get("input_ids") is None:
        return from_embeds(batch["inputs_embeds"], *([pad] if _takes(from_embeds, "padding_idx") else []))
    counts_past = len(inspect.signature(from_ids).parameters) > 2
    return from_ids(batch["input_ids"], pad, *([past] if counts_past else []))


def makes_positions(module: Any) -> bool:
    """Return whether a module makes positions from its tokens or mask in a way that `own_positions` does not know."""
    kind: Any = type(module)
    from_tokens = _makes_ids(kind)
    counts = re.search(r"(Learned|Sinusoidal)Positional", kind.__name__) is not None
    known = from_tokens or kind.__name__ in (_COUNTS_IN_ROWS, _COUNTS_THE_MASK)
    return (counts or from_tokens) and not (known and _takes(module.forward, "position_ids"))


@functools.lru_cache(maxsize=1024)
def _makes_ids(kind: Any) -> bool:
    return any(name.startswith("create_position_ids_from") for name in dir(kind))


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
}  # fmt: skip
"""Functions of modelling files through which tokens mix in recurrent layers and convolutions, or a whole layer's."""


def mixer_functions(module: Any) -> dict[str, Any]:
    """Return those of `MIXER_FUNCTIONS` that a module has or calls, by name; empty if it is no such layer."""
    kind: Any = type(module)
    whole = f"{kind.__name__}.forward"
    return {whole: module.forward} if whole in MIXER_FUNCTIONS else _called_functions(kind)


def is_hybrid(model: Any) -> bool:
    """Return whether a model's family has recurrent layers, even if its config chooses none.

    The language model of a multimodal model may be of another file.
    """
    kinds = {kind for m in model.modules() if isinstance(m, PreTrainedModel) for kind in type(m).__mro__}
    defined = {name for kind in kinds for name in vars(sys.modules[kind.__module__])}
    return any(name.partition(".")[0] in defined for name in MIXER_FUNCTIONS)


def add_mixer_function(name: str) -> None:
    """Add the name of a function to `MIXER_FUNCTIONS`."""
    MIXER_FUNCTIONS.add(name)
    _called_functions.cache_clear()


@functools.lru_cache(maxsize=256)
def _called_functions(kind: Any) -> dict[str, Any]:
    forward: Any = inspect.unwrap(kind.forward)
    names = _globals_of(forward) & MIXER_FUNCTIONS
    return {name: f for name in names if callable(f := forward.__globals__.get(name))}


def _globals_of(function: Any) -> set[str]:
    """Return the names of the globals that a function reads."""
    return {step.argval for step in dis.get_instructions(function) if step.opname == "LOAD_GLOBAL"}


def forward_with(module: Any, functions: dict[str, Any]) -> Any:
    """Return a module's forward that calls other functions instead of its file's, without the decorators around it.

    transformers itself replaces them by kernels of the Hub alone, for a whole process.
    """
    kind: Any = type(module)
    if f"{kind.__name__}.forward" in functions:
        return functions[f"{kind.__name__}.forward"]
    forward: Any = inspect.unwrap(kind.forward)
    copied = types.FunctionType(
        forward.__code__, {**forward.__globals__, **functions}, forward.__name__, forward.__defaults__,
        forward.__closure__,
    )  # fmt: skip
    copied.__kwdefaults__ = forward.__kwdefaults__
    return types.MethodType(copied, module)


def router_loss(model: PreTrainedModel) -> Any:
    """Return a family's own load-balancing loss, (router logits, experts, top_k, mask) -> scalar; None if it has
    none.
    """
    modules = [sys.modules.get(kind.__module__) for kind in type(model).__mro__]
    return next((f for m in modules if (f := getattr(m, "load_balancing_loss_func", None)) is not None), None)
