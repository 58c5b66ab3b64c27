"""Point a model's attention layers at longspan's attention, and correct what depends on the whole sequence."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from longspan.attn.kernels.choice import AnyKernel
from longspan.attn.tree import along_paths
from longspan.cache.latent import latent_layer_of
from longspan.comm.mesh import SequenceSharding
from longspan.compat.transformers_api import attention_of, cache_name, set_attention
from longspan.core.errors import LongspanError
from longspan.core.memory import FASTEST, Memory
from longspan.hf.batch import SequenceInfo
from longspan.hf.forward.kv_cache import CachedInfo
from longspan.hf.forward.registry import NAME, LayerBinding
from longspan.hf.forward.stage import ForwardCall, Stage
from longspan.hf.support import HELP, attention_layers
from longspan.hf.vision import tower_modules


class AttentionLayers(Stage):
    """The attention layers of a model, which are pointed at longspan; raise if one bypassed it.

    The model's config is copied first: another model may share it.
    """

    def __init__(
        self, model: PreTrainedModel, sp: SequenceSharding, kernel: AnyKernel, memory: Memory = FASTEST
    ) -> None:
        self.name, self.layers = type(model).__name__, list[LayerBinding]()  # in the order of the model
        self.max_position = 0  # the largest position id of the forward in progress
        self.rope_of_length = False  # whether a RoPE depends on it
        memo: dict[int, Any] = {}
        configured = [m for m in model.modules() if isinstance(m.__dict__.get("config"), PreTrainedConfig)]
        for module in configured:
            module.config = copy.deepcopy(module.config, memo)
        towers = tower_modules(model)
        text = {id(m.config): m.config for m in configured if m not in towers}
        plain = [(m.config, attention_of(m.config)) for m in configured if id(m.config) not in text]
        for config in text.values():
            set_attention(config, NAME)
        for config, name in plain:  # a model's config sets its tower's, too
            set_attention(config, name)
        model_key = object()
        for path, layer in attention_layers(model).items():
            bound = LayerBinding(path, sp, kernel, model_key, memory)
            bound.latents = latent_layer_of(layer, getattr(layer, "config", None))
            layer.longspan_layer = bound  # type: ignore[assignment]
            self.layers.append(bound)
            if getattr(layer, "attn_temperature_tuning", False):
                cache = cache_name(layer.forward)
                layer.register_forward_pre_hook(_count_global_positions(sp, cache), with_kwargs=True)
                layer.register_forward_hook(_check_counted(path, cache), with_kwargs=True)
        for module in model.modules():
            kind = getattr(module, "rope_type", None)
            if {"dynamic", "longrope"} & (set(kind.values()) if isinstance(kind, dict) else {kind}):
                self.rope_of_length = True
                module.register_forward_pre_hook(self._append_max_position, with_kwargs=True)
                module.register_forward_hook(
                    lambda _, args, out: out[:, :-1] if isinstance(out, Tensor) else tuple(x[:, :-1] for x in out)
                )

    def before(self, call: ForwardCall) -> None:
        self.max_position = call.info.max_position

    def after(self, call: ForwardCall, output: Any) -> Any:
        bypassed = [layer.name for layer in self.layers if layer.choice is None]
        if bypassed:
            raise LongspanError(
                f"layer {bypassed[0]} of {self.name} ({len(bypassed)} of {len(self.layers)} layers) did not call its "
                f"attention through transformers' registry; it cannot be sharded in this version",
                code="LS201",
            )
        return output

    def _append_max_position(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Append the batch's largest position to this rank's, for a RoPE that scales with the length."""
        positions = kwargs["position_ids"] if "position_ids" in kwargs else args[1]
        longer = torch.cat([positions, positions.new_full((*positions.shape[:-1], 1), self.max_position)], -1)
        if "position_ids" in kwargs:
            return args, {**kwargs, "position_ids": longer}
        return (args[0], longer, *args[2:]), kwargs


class _TokensBefore:
    """Replaces a layer's KV cache, stores nothing: layers that count tokens from its length get global positions."""

    def __init__(self, positions: Tensor) -> None:
        self.before = positions - torch.arange(len(positions), device=positions.device)
        self.called = False

    def get_seq_length(self, *_: Any) -> Tensor:
        self.called = True
        return self.before

    def update(self, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        self.called = True
        return key, value


def _count_global_positions(sp: SequenceSharding, cache: str) -> Callable[..., Any]:
    """Return a hook for layers that scale queries by the token's position (Llama-4's attention temperature)."""

    def hook(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        info = kwargs.get("longspan")
        positions = None
        if isinstance(info, CachedInfo):
            if info.step.sharded:
                positions = info.step.past + sp.positions(info.step.new)
            elif info.step.static is not None:
                positions = info.step.static.index
        elif isinstance(info, SequenceInfo):
            positions = sp.of_width(info.layout.size).positions(info.length)
            if info.nodes is not None:
                of_rows = along_paths(info.nodes, positions)[0]
                if len(of_rows.unique(dim=0)) > 1:
                    raise LongspanError(
                        f"{type(layer).__name__} scales the tokens of all rows by one list of positions, and the trees "
                        f"of these rows differ; give one row (longspan.pack_tree makes one)"
                    )
                positions = of_rows[0]
            elif info.elastic and info.segments and info.segments[0]:  # packed, but counted as if each were alone
                starts = positions.new_tensor([start for start, _ in info.segments[0]])
                positions = positions - starts[torch.searchsorted(starts, positions, right=True) - 1]
        return args, kwargs if positions is None else {**kwargs, cache: _TokensBefore(positions)}

    return hook


def _check_counted(name: str, cache: str) -> Callable[..., None]:
    def hook(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        tokens = kwargs.get(cache)
        if isinstance(tokens, _TokensBefore) and not tokens.called:
            raise LongspanError(
                f"layer {name} did not use its cache ({cache}), so it would count this rank's tokens instead of the "
                f"whole sequence's; {HELP}"
            )

    return hook


def check_positions(limit: int | None, max_position: int) -> None:
    """Raise for positions beyond a model's range, which is `position_range(model.config)`."""
    if limit is not None and max_position >= limit:
        raise LongspanError(
            f"the batch has positions up to {max_position}, the model's range is {limit} (max_position_embeddings); "
            f"shorten the context to {limit}, or give the config a RoPE scaling and a larger max_position_embeddings",
            code="LS203",
        )
