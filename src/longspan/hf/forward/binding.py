"""Point a model's attention layers at longspan's attention, and correct what depends on the whole sequence."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from longspan.attn.kernels.choice import AnyKernel
from longspan.cache.latent import latent_layer_of
from longspan.compat.transformers_api import cache_name, set_attention
from longspan.core.errors import LongspanError
from longspan.core.memory import FASTEST, Memory
from longspan.hf.batch import SequenceInfo
from longspan.hf.forward.kv_cache import CachedInfo
from longspan.hf.forward.registry import NAME, LayerBinding
from longspan.hf.pretrained import position_range
from longspan.hf.support import HELP, attention_layers

if TYPE_CHECKING:
    from longspan.comm.mesh import SequenceSharding


@dataclass
class ModelBinding:
    """The attention layers of a model, and the largest position of the forward in progress."""

    layers: list[LayerBinding] = field(default_factory=list)
    max_position: int = 0


def bind_layers(
    model: PreTrainedModel, sp: SequenceSharding, kernel: AnyKernel, memory: Memory = FASTEST
) -> ModelBinding:
    """Point a model's attention layers at longspan. Copy its config first: another model may share it."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        config = module.__dict__.get("config")
        if isinstance(config, PreTrainedConfig):
            module.config = copy.deepcopy(config, memo)
    set_attention(model.config, NAME)
    for module in model.modules():
        config = module.__dict__.get("config")
        if isinstance(config, PreTrainedConfig):
            set_attention(config, NAME)
    binding, model_key = ModelBinding(), object()
    for path, layer in attention_layers(model).items():
        bound = LayerBinding(path, sp, kernel, model_key, memory)
        bound.latents = latent_layer_of(layer, getattr(layer, "config", None))
        layer.longspan_layer = bound  # type: ignore[assignment]
        binding.layers.append(bound)
        if getattr(layer, "attn_temperature_tuning", False):
            cache = cache_name(layer.forward)
            layer.register_forward_pre_hook(_count_in_the_whole(sp, cache), with_kwargs=True)
            layer.register_forward_hook(_check_counted(path, cache), with_kwargs=True)
    for module in _length_dependent_ropes(model):
        module.register_forward_pre_hook(_LongestPosition(binding), with_kwargs=True)
        module.register_forward_hook(_drop_last_position)
    return binding


def _length_dependent_ropes(model: nn.Module) -> Iterator[nn.Module]:
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        kinds = set(kind.values()) if isinstance(kind, dict) else {kind}
        if kinds & {"dynamic", "longrope"}:
            yield module


class _LongestPosition:
    """Append the batch's largest position to this rank's, for a RoPE that scales with the length."""

    def __init__(self, binding: ModelBinding) -> None:
        self.binding = binding

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args_list = list(args)
        positions = kwargs["position_ids"] if "position_ids" in kwargs else args_list[1]
        last = positions.new_full((positions.shape[0], 1), self.binding.max_position)
        longer = torch.cat([positions, last], -1)
        if "position_ids" in kwargs:
            kwargs["position_ids"] = longer
        else:
            args_list[1] = longer
        return tuple(args_list), kwargs


def _drop_last_position(module: nn.Module, args: Any, output: Tensor | tuple[Tensor, ...]) -> Any:
    return output[:, :-1] if isinstance(output, Tensor) else tuple(x[:, :-1] for x in output)


class _TokensBefore:
    """Replaces a layer's KV cache, so that a layer that counts tokens from the cache's length gets global positions.

    It stores nothing.
    """

    def __init__(self, places: Tensor) -> None:
        self.before = places - torch.arange(len(places), device=places.device)
        self.asked = False

    def get_seq_length(self, *_: Any) -> Tensor:
        self.asked = True
        return self.before

    def update(self, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        self.asked = True
        return key, value


def _count_in_the_whole(sp: SequenceSharding, cache: str) -> Callable[..., Any]:
    """Return a hook for layers that scale queries by the token's position (Llama-4's attention temperature)."""

    def hook(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        info = kwargs.get("longspan")
        places = None
        if isinstance(info, CachedInfo):
            if info.step is not None and info.step.sharded:
                places = info.step.past + sp.positions(info.step.new)
        elif isinstance(info, SequenceInfo):
            places = sp.with_layout(info.layout).positions(info.length)
        return args, kwargs if places is None else {**kwargs, cache: _TokensBefore(places)}

    return hook


def _check_counted(name: str, cache: str) -> Callable[..., None]:
    def hook(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        stand_in = kwargs.get(cache)
        if isinstance(stand_in, _TokensBefore) and not stand_in.asked:
            raise LongspanError(
                f"layer {name} did not use its cache ({cache}), so it would count this rank's tokens instead of the "
                f"whole sequence's; {HELP}"
            )

    return hook


def check_positions(model: PreTrainedModel, max_position: int) -> None:
    """Raise for positions beyond the model's range.

    Args:
        model: the model.
        max_position: the largest position id of the batch.

    Raises:
        LongspanError: with the range and the fix.
    """
    limit = position_range(model.config)
    if limit is None or max_position < limit:
        return
    raise LongspanError(
        f"the batch has positions up to {max_position}, the model's range is {limit} (max_position_embeddings); "
        f"shorten the context to {limit}, or give the config a RoPE scaling and a larger max_position_embeddings"
    )
