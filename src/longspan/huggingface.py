"""The meeting point with transformers: its attention and mask registries, and what a model must be like to be sharded.

One entry named `longspan` is added to each registry, once; nothing that stands there is changed. Which sharding a layer
uses is written on the layer itself, and what a forward must know of its batch travels in that call's keyword
arguments, so two models in one process never meet.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, bidirectional_mask_function, causal_mask_function

from longspan.attention import Kernel, Mask, Scores, attend
from longspan.attention.kernels import choose_kernel
from longspan.errors import LongspanError
from longspan.pretrained import position_range
from longspan.shard import SequenceInfo

if TYPE_CHECKING:
    from longspan.mesh import SequenceSharding

NAME = "longspan"

# What transformers hands to every attention function and what says nothing about the attention itself.
_NO_MEANING = {
    "position_ids",
    "position_embeddings",
    "use_cache",
    "output_hidden_states",
    "output_attentions",
    "output_router_logits",
    "return_dict",
    "num_items_in_batch",
    "cache_position",
    "layer_idx",
}

# Layers that mix tokens by something else than the attention registry.
_MIXERS = re.compile(
    r"Mamba|DeltaNet|LinearAttention|LightningAttention|Rwkv|RWKV|Recurrent|ShortConv|Hyena|Retention|SSM|CrossAttention"
)

# Embeddings that count positions themselves.
_OWN_POSITIONS = re.compile(r"(Learned|Sinusoidal)Positional")


@dataclass
class LayerBinding:
    """What is written on an attention layer: how it is sharded, and whether it has been seen at work."""

    name: str
    sp: SequenceSharding
    kernel: Kernel
    seen: bool = False


@dataclass
class ModelBinding:
    """What one model's hooks share. `max_position` is that of the forward under way."""

    layers: list[LayerBinding] = field(default_factory=list)
    max_position: int = 0


@dataclass(frozen=True)
class MaskRequest:
    """The mask that a model asks the registry for, read back from the function it asks with."""

    causal: bool
    window: int | None = None


def longspan_mask(
    *_: Any, mask_function: Any = causal_mask_function, local_size: int | None = None, **more: Any
) -> MaskRequest:
    """The registry's mask builder: no tensor, only what the model wants.

    A mask function is opaque, so it is compared with what longspan would do on the borders of the window; a mask that
    is neither causal, bidirectional nor a causal sliding window is refused.
    """
    if mask_function is causal_mask_function:
        return MaskRequest(causal=True)
    if mask_function is bidirectional_mask_function:
        return MaskRequest(causal=False)
    if local_size is not None and _is_causal_window(mask_function, local_size):
        return MaskRequest(causal=True, window=local_size)
    name = getattr(mask_function, "__qualname__", repr(mask_function))
    raise LongspanError(
        f"the model asks for the attention mask {name} (local size {local_size}), which is not supported; supported "
        f"are causal, bidirectional and causal sliding-window masks, padding and packed documents"
    )


def _is_causal_window(mask_function: Any, window: int) -> bool:
    at = sorted({0, 1, window - 1, window, window + 1, 2 * window, 3 * window + 1})
    pairs = [(i, j) for i in at for j in {0, i - window - 1, i - window, i - window + 1, i - 1, i, i + 1} if j >= 0]
    i, j = (torch.tensor(column) for column in zip(*pairs, strict=True))
    zero = torch.zeros_like(i)
    return bool(torch.equal(mask_function(zero, zero, i, j).expand_as(i), (j <= i) & (i - j < window)))


def longspan_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    **more: Any,
) -> tuple[Tensor, None]:
    """The registry's attention function: `[B, heads, L, D]` of my tokens in, `[B, L, heads, D]` out.

    Raises:
        LongspanError: for a layer that was not prepared, a mask that did not come from the registry, or any keyword
            that is not understood; nothing is silently dropped.
    """
    layer = getattr(module, "longspan_layer", None)
    if not isinstance(layer, LayerBinding):
        raise LongspanError(
            f"{type(module).__name__} calls longspan's attention, but longspan.parallelize has not prepared it; pass "
            f"the model through longspan.parallelize"
        )
    info = more.pop("longspan", None)
    if not isinstance(info, SequenceInfo):
        raise LongspanError(
            f"layer {layer.name} does not pass on keyword arguments, so it cannot know its batch; {_HELP}"
        )
    if not isinstance(attention_mask, MaskRequest):
        raise LongspanError(
            f"layer {layer.name} uses a mask of its own ({type(attention_mask).__name__}), not one from the mask "
            f"registry; {_HELP}"
        )
    mask, scores = _mask_and_scores(layer, attention_mask, info, scaling, dropout, more)
    if not layer.seen:
        layer.seen = True
    q, k, v = _one_dtype(query, key, value)
    try:
        out = attend(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            layer.sp,
            mask,
            scores,
            length=info.length,
            kernel=layer.kernel,
        )
    except LongspanError as error:
        raise LongspanError(f"layer {layer.name}: {error}") from error
    return out, None


_HELP = "it cannot be sharded in this version"


def _mask_and_scores(
    layer: LayerBinding,
    request: MaskRequest,
    info: SequenceInfo,
    scale: float | None,
    dropout: float,
    more: dict[str, Any],
) -> tuple[Mask, Scores]:
    given = {name: value for name, value in more.items() if value is not None and value is not False}
    if dropout:
        raise LongspanError(
            f"layer {layer.name}: attention dropout {dropout} is not supported; set it to 0 in the config"
        )
    window = given.pop("sliding_window", None)
    if window is not None and window != request.window and window < info.length:
        raise LongspanError(
            f"layer {layer.name} has sliding_window={window}, but its mask has window={request.window}; {_HELP}"
        )
    softcap, sinks = given.pop("softcap", None), given.pop("s_aux", None)
    is_causal = more.get("is_causal")
    given.pop("is_causal", None)
    if is_causal is not None and is_causal != request.causal:
        raise LongspanError(
            f"layer {layer.name} has is_causal={is_causal}, but its mask has causal={request.causal}; {_HELP}"
        )
    unknown = sorted(given.keys() - _NO_MEANING)
    if unknown:
        raise LongspanError(f"layer {layer.name} passes {', '.join(unknown)} to its attention, not understood; {_HELP}")
    return Mask(request.causal, request.window, rows=info.rows), Scores(scale, softcap, sinks)


def _one_dtype(*xs: Tensor) -> list[Tensor]:
    """Under autocast q, k and v may differ (a rotary embedding in fp32): cast them, as torch's own attention does."""
    device = xs[0].device.type
    if len({x.dtype for x in xs}) > 1 and torch.is_autocast_enabled(device):
        return [x.to(torch.get_autocast_dtype(device)) for x in xs]
    return list(xs)


AttentionInterface.register(NAME, longspan_attention)
AttentionMaskInterface.register(NAME, longspan_mask)


# ---------------------------------------------------------------------------------------------------------------------
# Preparing a model.


def causal_lm_of(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside: `model` itself, or what a PEFT wrapper holds.

    Raises:
        LongspanError: if there is none.
    """
    unwrap: Any = getattr(model, "get_base_model", None)
    inner = model if unwrap is None else unwrap()
    if not isinstance(inner, PreTrainedModel):
        raise LongspanError(
            f"parallelize needs a transformers model (or a PEFT model around one), got {type(model).__name__}; with a "
            f"model of your own, call longspan.attention in it and cut its batch with longspan.shard_batch"
        )
    return inner


def attention_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The attention modules by name: the innermost ones whose class says so."""
    named = {
        name: module
        for name, module in model.named_modules()
        if "Attention" in type(module).__name__ and hasattr(module, "layer_idx")
    }
    return {n: m for n, m in named.items() if not any(other.startswith(n + ".") for other in named)}


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks: the elements of every list of modules in which each element holds an attention layer."""
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) > 0]
    return [layer for blocks in lists if all(attention_layers(b) for b in blocks) for layer in blocks]


def check_model(model: PreTrainedModel, sp: SequenceSharding, kernel: Kernel) -> None:
    """Refuse a model that would not compute the same when its sequence is sharded.

    Raises:
        LongspanError: naming the layer and the reason.
    """
    config = model.config.get_text_config()
    name = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False):
        raise LongspanError(f"{name} is an encoder-decoder: its cross attention has another length of keys; {_HELP}")
    for path, module in model.named_modules():
        if isinstance(module, PreTrainedModel):
            continue
        if hasattr(module, "create_position_ids_from_input_ids") or _OWN_POSITIONS.search(type(module).__name__):
            raise LongspanError(
                f"layer {path} ({type(module).__name__}) of {name} makes positions of its own from tokens or mask, "
                f"which are cut here; {_HELP}"
            )
        if _MIXERS.search(type(module).__name__) or isinstance(module, nn.Conv1d | nn.Conv2d | nn.RNNBase):
            raise LongspanError(
                f"layer {path} ({type(module).__name__}) of {name} mixes tokens without going through attention; "
                f"{_HELP}"
            )
    for index, kind in enumerate(getattr(config, "layer_types", None) or []):
        if kind not in ("full_attention", "sliding_attention"):
            raise LongspanError(f"layer {index} of {name} is of the type {kind}; {_HELP}")
    if getattr(config, "alibi", False) or config.model_type in ("bloom", "mpt"):
        raise LongspanError(f"every attention layer of {name} adds ALiBi biases to its scores; {_HELP}")
    if getattr(config, "output_router_logits", False):
        raise LongspanError(
            f"{name} adds a router loss over all tokens (output_router_logits=True), which is not summed over ranks "
            f"yet; set output_router_logits=False in its config"
        )
    if getattr(model.config, "output_attentions", False):
        raise LongspanError(
            f"{name} has output_attentions=True in its config; attention weights are never made here, set it False"
        )
    layers = attention_layers(model)
    if not layers or not getattr(model, "_supports_attention_backend", False):
        which = f"layer {next(iter(layers))} of {name}" if layers else name
        raise LongspanError(f"{which} does not go through transformers' attention registry; {_HELP}")
    if model.loss_type not in (None, "ForCausalLM"):
        raise LongspanError(f"{name} has the loss {model.loss_type}; longspan.parallelize takes causal language models")
    for path, layer in layers.items():
        _check_layer(path, layer, config, kernel, sp)


def _check_layer(path: str, layer: nn.Module, config: Any, kernel: Kernel, sp: SequenceSharding) -> None:
    sinks = getattr(layer, "sinks", None)
    softcap = getattr(layer, "attn_logit_softcapping", None) or getattr(config, "attn_logit_softcapping", None)
    scores = Scores(softcap=softcap, sinks=sinks if isinstance(sinks, Tensor) else None)
    try:
        choose_kernel(kernel, Mask(), scores, device=sp.device, grad=False, ring=sp.ring_size)
    except LongspanError as error:
        raise LongspanError(f"layer {path}: {error}") from error


def bind_layers(model: PreTrainedModel, sp: SequenceSharding, kernel: Kernel) -> ModelBinding:
    """Point this one model's attention layers at longspan. Its config is copied first: another model may share it."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        config = module.__dict__.get("config")
        if isinstance(config, PreTrainedConfig):
            module.config = copy.deepcopy(config, memo)
    model.config._attn_implementation = NAME
    for module in model.modules():
        config = module.__dict__.get("config")
        if isinstance(config, PreTrainedConfig):
            config._attn_implementation = NAME
    binding = ModelBinding()
    for path, layer in attention_layers(model).items():
        bound = LayerBinding(path, sp, kernel)
        layer.longspan_layer = bound  # type: ignore[assignment]
        binding.layers.append(bound)
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
    """Appends the batch's largest position to this rank's: a RoPE that scales with the length must see all of it."""

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


def _drop_last_position(module: nn.Module, args: Any, output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(x[:, :-1] for x in output)


def check_positions(model: PreTrainedModel, info: SequenceInfo) -> None:
    """Refuse positions beyond the model's range.

    Raises:
        LongspanError: with the range and the way out.
    """
    limit = position_range(model.config)
    if limit is None or info.max_position < limit:
        return
    raise LongspanError(
        f"the batch has positions up to {info.max_position}, the model's range is {limit} (max_position_embeddings); "
        f"shorten the context to {limit}, or give the config a RoPE scaling and a larger max_position_embeddings"
    )
