"""The meeting point with transformers: its attention and mask registries, and what a model must be like to be sharded.

One entry named `longspan` is added to each registry, once; nothing that stands there is changed. Which sharding a layer
uses is written on the layer itself, and what a forward must know of its batch travels in that call's keyword
arguments, so two models in one process never meet.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from longspan.attn.kernels.choice import AnyKernel, Choice
from longspan.attn.mask import Mask
from longspan.attn.prepare import AttentionPlan, Shapes, prepare
from longspan.attn.score import Scores
from longspan.cache.attend import attend, kept_from
from longspan.cache.latent import Latents, expand, latents_of
from longspan.compat.torch_api import not_compiled
from longspan.compat.transformers_api import cache_name, parts_of, register_attention, set_attention
from longspan.compat.transformers_api import mask_function as transformers_mask
from longspan.core.errors import LongspanError
from longspan.core.memory import FASTEST, Memory
from longspan.core.segments import chunk_segments
from longspan.hf.batch import SequenceInfo
from longspan.hf.forward.kv_cache import CachedInfo
from longspan.hf.pretrained import position_range
from longspan.hf.support import HELP, attention_layers
from longspan.hf.support import check_model as check_model
from longspan.memory.checkpointing import LayerCall, kept_attention

if TYPE_CHECKING:
    from longspan.comm.mesh import SequenceSharding

NAME = "longspan"

_CAUSAL, _BIDIRECTIONAL = (transformers_mask(kind) for kind in ("causal", "bidirectional"))

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


@dataclass
class LayerBinding:
    """What is written on an attention layer: how it is sharded, by which kernel, and whether it has been seen at work.

    `model` is one object for all layers of a model: plans of a batch that two models are called with are not mixed up.
    `memory` says whether attention recomputes its all-to-all, and in how many head chunks; `keeper` is there while a
    checkpointed layer runs that keeps what its attention computes. `choice` is the kernel of the last forward.
    `latents` are what the layer makes its keys and values of, where it is DeepSeek's.
    """

    name: str
    sp: SequenceSharding
    kernel: AnyKernel
    model: object
    memory: Memory = FASTEST
    keeper: LayerCall | None = None
    choice: Choice | None = None
    seen: bool = False
    latents: Latents | None = None


@dataclass
class ModelBinding:
    """What one model's hooks share. `max_position` is that of the forward under way."""

    layers: list[LayerBinding] = field(default_factory=list)
    max_position: int = 0


class _NoTensor(LongspanError, AttributeError):
    """A model takes its mask for a tensor; to `hasattr` and `getattr` it is still an attribute that is not there."""


@dataclass(frozen=True)
class MaskRequest:
    """The mask that a model asks the registry for, read back from the function it asks with; as `Mask` says it."""

    causal: bool
    window: int | None = None
    chunk: int | None = None

    def __getattr__(self, name: str) -> Any:
        raise _NoTensor(f"a layer uses .{name} of its attention mask, so it makes a mask of its own out of it; {HELP}")

    def __getitem__(self, index: Any) -> Any:
        raise LongspanError(f"a layer cuts its attention mask, so it makes a mask of its own out of it; {HELP}")

    def allows(self, i: Tensor, j: Tensor) -> Tensor:
        """Whether tokens i may attend to tokens j; all of one shape."""
        return Mask(self.causal, self.window, self.chunk).pairwise(i, j)


@not_compiled  # it reads closures, and returns no tensor
def longspan_mask(
    *_: Any,
    mask_function: Any = _CAUSAL,
    local_size: int | None = None,
    device: torch.device | str = "cpu",
    **more: Any,
) -> MaskRequest:
    """The registry's mask builder: no tensor, only what the model wants.

    A mask function is opaque, so it is compared with what longspan would do, on tokens around the borders of windows
    and chunks. Padding and documents do not show here: the hook before the forward keeps them back.

    Raises:
        LongspanError: for a mask that is none of causal, bidirectional, a sliding window of either, or causal chunks.
    """
    if local_size is not None and local_size < 1:  # a window that no layer uses (Qwen2-MoE); `Mask` refuses it
        return MaskRequest(causal=True, window=local_size)
    if mask_function is _CAUSAL:
        return MaskRequest(causal=True)
    if mask_function is _BIDIRECTIONAL:
        return MaskRequest(causal=False)
    requests = [MaskRequest(causal=True), MaskRequest(causal=False)]
    if local_size is not None:
        requests = [
            MaskRequest(causal=True, window=local_size),
            MaskRequest(causal=True, chunk=local_size),
            MaskRequest(causal=False, window=local_size + 1),  # |i - j| <= size, as transformers' encoders have it
            MaskRequest(causal=False, window=local_size),
        ]
    tensors = list(_tensors_in(mask_function))
    if not any(x.dim() > 1 for x in tensors):  # else it depends on what the tokens are
        i, j = _around(local_size or 1, device if tensors else "cpu")
        try:
            zero = torch.zeros_like(i)
            asked = mask_function(zero, zero, i, j).bool().expand_as(i)
        except Exception:  # a function that is not of transformers' form raises whatever it will
            requests = []
        for request in requests:
            if torch.equal(asked, request.allows(i, j)):
                return request
    raise LongspanError(
        f"the model asks for the attention mask {_format_value(mask_function)} (local size {local_size}), which is not "
        f"supported; supported are causal and bidirectional masks, sliding windows of both, causal chunks, padding and "
        f"packed documents"
    )


def _around(size: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Pairs of tokens on both sides of every border that a window or a chunk of `size` may have."""
    at = {0, 1, size - 1, size, size + 1, 2 * size - 1, 2 * size, 2 * size + 1, 3 * size + 1}
    steps = {d + e for d in (-size, 0, size) for e in (-2, -1, 0, 1, 2)}
    pairs = sorted({(i, j) for i in at for j in at | {i + step for step in steps} if j >= 0})
    i, j = torch.tensor(pairs, device=device).unbind(1)
    return i, j


def _tensors_in(function: Any) -> Iterator[Tensor]:
    for value in parts_of(function):
        if isinstance(value, Tensor):
            yield value
        elif callable(value):
            yield from _tensors_in(value)


def _format_value(function: Any) -> str:
    """A mask function by name, with the functions that it is made of."""
    name = str(getattr(function, "__qualname__", repr(function))).split(".<locals>")[0]
    parts = [_format_value(value) for value in parts_of(function) if callable(value) and not isinstance(value, Tensor)]
    return f"{name}({', '.join(parts)})" if parts else name


@not_compiled  # a plan is made once per batch; a compiler must not move collectives
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
            f"layer {layer.name} does not pass on keyword arguments, so it cannot know its batch; {HELP}"
        )
    if not isinstance(attention_mask, MaskRequest):
        raise LongspanError(
            f"layer {layer.name} uses a mask of its own ({type(attention_mask).__name__}), not one from the mask "
            f"registry; {HELP}"
        )
    scores = _scores(layer, attention_mask, info, scaling, dropout, more)
    layer.seen = True
    latents = None if layer.latents is None else layer.latents.take()
    q, k, v = (x.transpose(1, 2) for x in _one_dtype(query, key, value))
    if isinstance(info, CachedInfo):
        return _with_cache(layer, module.layer_idx, attention_mask, info, (q, k, v), scores, latents), None
    try:
        plan = _plan(layer, attention_mask, info, Shapes.of(q, k, v, scores), scores)
    except LongspanError as error:
        raise LongspanError(f"layer {layer.name}: {error}") from error
    layer.choice = plan.choice
    if layer.keeper is not None and layer.keeper.whole:
        out = kept_attention(plan, q, k, v, scores, layer.keeper)
    else:
        out = plan(q, k, v, scores, layer.keeper)
    out = out if info.padding is None else _padding_sees_itself(out, v, info.padding)
    if out.stride(-2) != out.shape[-1]:  # after chunks of heads or padding: models view the output as [B, L, H * D]
        out = out.contiguous()
    return out, None


def _padding_sees_itself(out_BLHD: Tensor, v_BLKD: Tensor, padding_BL: Tensor) -> Tensor:
    """Give padding the output that a row of one token has, not 0: a model may divide by its attention's output."""
    heads, kv_heads = out_BLHD.shape[2], v_BLKD.shape[2]
    if not heads:
        return out_BLHD
    own = v_BLKD.detach()[:, :, :, None].expand(-1, -1, -1, heads // kv_heads, -1)
    out = out_BLHD.unflatten(2, (kv_heads, heads // kv_heads))
    return torch.where(padding_BL[:, :, None, None, None], own, out).flatten(2, 3)


def _with_cache(
    layer: LayerBinding,
    number: Any,
    request: MaskRequest,
    info: CachedInfo,
    qkv: tuple[Tensor, Tensor, Tensor],
    scores: Scores,
    c_BLR: Tensor | None,
) -> Tensor:
    """Attention of new tokens to all that the cache holds, the new ones included."""
    assert info.step is not None and info.cache is not None
    if not request.causal:
        raise LongspanError(f"layer {layer.name} is not causal, so it has no KV cache; call the model without one")
    if number in info.step.stored:
        raise LongspanError(
            f"layer {layer.name} calls its attention twice, and the KV cache holds the keys and values of one call; "
            f"this model can be trained and scored, not generate: call it without a cache"
        )
    info.step.stored.add(number)
    mask = replace(_mask(request, info), q_start=info.step.past)
    back = info.cache.rollback
    first = kept_from(info.length if back is None else min(back, info.length), request.window, request.chunk)
    if request.chunk is not None and mask.segments is not None:  # chunks that count from where a row's padding ends
        first = 0 if back is not None else min((row[-1][0] for row in mask.segments if row), default=info.length)
    store = info.cache.store(number, request.window or request.chunk)
    try:
        if layer.latents is None or not info.cache.holds_latents(store, layer.latents, qkv):
            out, layer.choice = attend(info.step, store, *qkv, mask, scores, layer.kernel, first)
            return out
        if c_BLR is None:
            raise LongspanError(f"kv_b_proj was not called before the attention; {HELP}")
        scores = replace(scores, scale=scores.scale_of(qkv[0].shape[3]))
        q, k, v, for_values = layer.latents.absorb(c_BLR, *qkv, first=store.rows is None)
        # Heads as wide as latent vectors are no flash attention's, and nothing else has been tried with them.
        kernel = "tiled" if layer.kernel == "auto" else layer.kernel
        out, layer.choice = attend(info.step, store, q, k, v, mask, scores, kernel, first)
    except LongspanError as error:
        raise LongspanError(f"layer {layer.name}: {error}") from error
    return expand(out, for_values)


def _plan(
    layer: LayerBinding, request: MaskRequest, info: SequenceInfo, shapes: Shapes, scores: Scores
) -> AttentionPlan:
    """The plan of this batch for layers like this one: made by the first of them, executed by all."""
    key = layer.model, request, shapes, scores.kind
    compiling = torch.compiler.is_compiling()  # a compiler would take the store's content for constants
    plan = None if compiling else info.plans.get(key)
    if plan is None:
        mask, lengths = _mask(request, info), (info.length, info.length)
        sp, recompute_all_to_all, chunks = (
            layer.sp.with_layout(info.layout),
            layer.memory.recompute_all_to_all,
            layer.memory.head_chunks,
        )
        plan = prepare(
            shapes,
            sp,
            mask,
            scores,
            lengths,
            layer.kernel,
            recompute_all_to_all=recompute_all_to_all,
            head_chunks=chunks,
        )
        if not compiling:
            info.plans[key] = plan
    return plan


def _mask(request: MaskRequest, info: SequenceInfo) -> Mask:
    segments, chunk = info.segments, request.chunk
    if segments is not None and chunk is not None:
        # Chunks count from the start of a document, or of what left-hand padding leaves: not from that of the row (as
        # transformers before 5.23 does where position ids restart).
        segments, chunk = chunk_segments(segments, chunk, info.starts), None
    return Mask(request.causal, request.window, chunk, segments=segments, mod=info.visible)


def _scores(
    layer: LayerBinding,
    request: MaskRequest,
    info: SequenceInfo,
    scale: float | None,
    dropout: float,
    more: dict[str, Any],
) -> Scores:
    given = {name: value for name, value in more.items() if value is not None and value is not False}
    if dropout:
        raise LongspanError(
            f"layer {layer.name}: attention dropout {dropout} is not supported; set it to 0 in the config"
        )
    window = given.pop("sliding_window", None)
    if window is not None and window != request.window and window < info.length:
        raise LongspanError(
            f"layer {layer.name} has sliding_window={window}, but its mask has window={request.window}; {HELP}"
        )
    softcap, sinks = given.pop("softcap", None), given.pop("s_aux", None)
    is_causal = more.get("is_causal")
    given.pop("is_causal", None)
    if is_causal is not None and is_causal != request.causal:
        raise LongspanError(
            f"layer {layer.name} has is_causal={is_causal}, but its mask has causal={request.causal}; {HELP}"
        )
    unknown = sorted(given.keys() - _NO_MEANING)
    if unknown:
        raise LongspanError(f"layer {layer.name} passes {', '.join(unknown)} to its attention, not understood; {HELP}")
    return Scores(scale, softcap, sinks)


def _one_dtype(*xs: Tensor) -> list[Tensor]:
    """Under autocast q, k and v may differ (a rotary embedding in fp32): cast them, as torch's own attention does."""
    device = xs[0].device.type
    if len({x.dtype for x in xs}) > 1 and torch.is_autocast_enabled(device):
        return [x.to(torch.get_autocast_dtype(device)) for x in xs]
    return list(xs)


register_attention(NAME, longspan_attention, longspan_mask)


# ---------------------------------------------------------------------------------------------------------------------
# Preparing a model.


def bind_layers(
    model: PreTrainedModel, sp: SequenceSharding, kernel: AnyKernel, memory: Memory = FASTEST
) -> ModelBinding:
    """Point this one model's attention layers at longspan. Its config is copied first: another model may share it."""
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
        bound.latents = latents_of(layer, getattr(layer, "config", None))
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


def _drop_last_position(module: nn.Module, args: Any, output: Tensor | tuple[Tensor, ...]) -> Any:
    return output[:, :-1] if isinstance(output, Tensor) else tuple(x[:, :-1] for x in output)


class _TokensBefore:
    """Stands where a layer looks for its KV cache: a layer that counts its tokens from what the cache holds counts them
    in the whole sequence. It keeps nothing."""

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
    """For layers that scale their queries by the token's place in the row (Llama-4's attention temperature)."""

    def hook(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        info = kwargs.get("longspan")
        places = None
        if isinstance(info, CachedInfo):
            if info.step is not None and info.step.cut:
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
    """Refuse positions beyond the model's range.

    Args:
        model: the model.
        max_position: the largest position id of the batch.

    Raises:
        LongspanError: with the range and the way out.
    """
    limit = position_range(model.config)
    if limit is None or max_position < limit:
        return
    raise LongspanError(
        f"the batch has positions up to {max_position}, the model's range is {limit} (max_position_embeddings); "
        f"shorten the context to {limit}, or give the config a RoPE scaling and a larger max_position_embeddings"
    )
