"""longspan's entries in the attention and mask registries of transformers.

`AttentionLayers` (binding.py) names them in a copy of the model's config, so transformers calls `longspan_mask` once
per kind of mask, and `longspan_attention` in each layer.

A layer's sharding is an attribute of the layer, and facts about a batch come in the call's keyword arguments, so two
models in one process do not interfere. A mask function is opaque: which mask it is, is found by calling it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from longspan.attn.kernels.base import KernelRequest, returns_lse
from longspan.attn.kernels.choice import AnyKernel, Choice, as_kernel, choose_kernel
from longspan.attn.mask import Mask
from longspan.attn.methods.base import SavedAttentions
from longspan.attn.prepare import AttentionPlan, prepare
from longspan.attn.score import Scores
from longspan.attn.segments import chunk_segments
from longspan.attn.shapes import Shapes
from longspan.cache.attend import attend, first_visible_token
from longspan.cache.latent import LatentLayer, expand
from longspan.compat.torch_api import not_compiled
from longspan.compat.transformers_api import mask_function as transformers_mask
from longspan.compat.transformers_api import parts_of, register_attention
from longspan.core.errors import LongspanError
from longspan.core.memory import FASTEST, Memory
from longspan.hf.batch.shard import SequenceInfo, take_info
from longspan.hf.cache.kv_cache import CachedInfo
from longspan.hf.model.support import HELP
from longspan.memory.head_slices import SliceCall

NAME = "longspan"

_CHOSEN = "indices", "block_indices"
"""Arguments in which a layer passes on what its indexer has chosen."""

# Arguments that transformers passes to every attention function, and that do not change the attention.
_NO_MEANING = {
    "position_ids",
    "position_embeddings",
    "use_cache",
    "output_hidden_states",
    "output_attentions",
    "output_router_logits",
    "return_dict",
    "num_items_in_batch",
    "logits_to_keep",
    "cache_position",
    "layer_idx",
}


class Chooser(Protocol):
    """The attention of a layer whose queries attend to chosen keys (indexed.py, blocks.py, compressed.py)."""

    caches: bool  # whether it generates with a sharded cache
    no_rollback: str  # why its cache cannot go back to fewer tokens; "" if it can

    def check(self, name: str, info: SequenceInfo) -> None:
        """Raise for a batch from which one process would choose otherwise; `name` is the model's."""

    def attend(
        self, qkv: tuple[Tensor, Tensor, Tensor], chosen: Any, request: MaskRequest, scores: Scores, info: SequenceInfo
    ) -> Tensor:
        """Return the attention of my tokens, `[B, L, heads, D]`."""


@dataclass
class LayerBinding:
    """How an attention layer is sharded; its attribute `longspan_layer`."""

    name: str  # of the module
    kernel: AnyKernel
    memory: Memory = FASTEST
    # Saves the attention of the checkpointed layer or the slice of heads that runs now.
    layer_call: SavedAttentions | None = None
    choice: Choice | None = None  # the kernel of the last forward
    latents: LatentLayer | None = None  # captures the latent vectors of DeepSeek's attention
    causal: bool = True
    chooser: Chooser | None = None  # of a layer whose queries attend to chosen keys

    @property
    def saves_lse(self) -> bool:
        """Whether its kernel can return log-sum-exps, which slices of heads save with their outputs."""
        return self.kernel == "auto" or returns_lse(as_kernel(self.kernel))

    def check_mask(self, info: SequenceInfo) -> None:
        """Raise if a requested kernel cannot compute a batch's mask; "auto" falls back on one that can."""
        if self.kernel == "auto":
            return
        mask, sp, lse = mask_of(MaskRequest(self.causal), info), info.sp, self.memory.recompute_all_to_all
        # Autocast may change the dtype, so assume one that every kernel supports.
        request = KernelRequest(mask, Scores(), sp.device, ring=sp.ring_size, dtype=torch.bfloat16, lse=lse)
        try:
            choose_kernel(self.kernel, request)
        except LongspanError as error:
            raise LongspanError(f"layer {self.name}: {error}") from error


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
    """Compute attention of my tokens in the registry's layout: `[B, heads, L, D]` in, `[B, L, heads, D]` out."""
    layer = getattr(module, "longspan_layer", None)
    if not isinstance(layer, LayerBinding):
        raise LongspanError(
            f"{type(module).__name__} calls longspan's attention, but longspan.parallelize has not prepared it; pass "
            f"the model through longspan.parallelize"
        )
    info = take_info(layer.name, more)
    request = attention_mask  # transformers passes on what `longspan_mask` returned
    if not isinstance(request, MaskRequest):
        raise LongspanError(
            f"layer {layer.name} uses a mask of its own ({type(request).__name__}), not one from the mask registry; "
            f"{HELP}"
        )
    chosen = [x for x in (more.pop(name, None) for name in _CHOSEN) if x is not None]
    scores = _scores(layer, request, info, scaling, dropout, more)
    if layer.chooser is not None:
        layer.choice = _INDEXED
        q, k, v = (x.transpose(1, 2) for x in _one_dtype(query, key, value))
        return layer.chooser.attend((q, k, v), chosen[0] if chosen else None, request, scores, info), None
    if chosen:
        raise LongspanError(f"layer {layer.name} attends to keys that an indexer chooses; {HELP}")
    latents = None if layer.latents is None else layer.latents.take()
    q, k, v = (x.transpose(1, 2) for x in _one_dtype(query, key, value))
    if isinstance(info, CachedInfo):
        number = info.cache.take_updated_layer(module.layer_idx)  # type: ignore[arg-type]
        out = _with_cache(layer, number, request, info, (q, k, v), scores, latents)
        return _viewable(out), None
    try:
        plan = _plan(layer, request, info, Shapes.of(q, k, v, scores), scores)
    except LongspanError as error:
        raise LongspanError(f"layer {layer.name}: {error}") from error
    layer.choice = plan.choice
    out = plan(q, k, v, scores, layer.layer_call)
    return _viewable(out if info.padding is None else padding_sees_itself(out, v, info.padding)), None


_INDEXED = Choice("indexed", "blocks of queries read the tokens that the indexer chose, as matrix products")


def _viewable(out_BLHD: Tensor) -> Tensor:
    """Return the output so that models can view it as `[B, L, H * D]`: a copy after chunks of heads or padding."""
    return out_BLHD if out_BLHD.stride(-2) == out_BLHD.shape[-1] else out_BLHD.contiguous()


def padding_sees_itself(out_BLHD: Tensor, v_BLKD: Tensor, padding_BL: Tensor) -> Tensor:
    """Replace the output of padding by its own value, not 0: a model may divide by its attention's output."""
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
    """Attend from new tokens to all cached tokens and the new ones."""
    if not request.causal:
        raise LongspanError(f"layer {layer.name} is not causal, so it has no KV cache; call the model without one")
    if number in info.step.stored_layers:
        raise LongspanError(
            f"layer {layer.name} calls its attention twice, and the KV cache holds the keys and values of one call; "
            f"this model can be trained and scored, not generate: call it without a cache"
        )
    info.step.stored_layers.add(number)
    mask = info.step.masks.get(request)
    if mask is None:
        if info.step.static is None:
            mask = replace(mask_of(request, info), q_start=info.step.past)
        else:  # it knows where each row starts
            mask = Mask(True, request.window, request.chunk_size, q_start=info.step.past)
        info.step.masks[request] = mask
    back = info.cache.rollback
    length = info.length if back is None else min(back, info.length)
    first = first_visible_token(length, request.window, request.chunk_size)
    if request.chunk_size is not None and mask.segments is not None:  # chunks count from where a row's padding ends
        first = 0 if back is not None else min((row[-1][0] for row in mask.segments if row), default=info.length)
    store = info.cache.layer_cache(number, request.window or request.chunk_size)
    try:
        if layer.latents is None or not info.cache.holds_latents(store, layer.latents, qkv):
            out, layer.choice = attend(info.step, store, *qkv, mask, scores, layer.kernel, first)
            return out
        if c_BLR is None:
            raise LongspanError(f"kv_b_proj was not called before the attention; {HELP}")
        scores = replace(scores, scale=scores.scale_of(qkv[0].shape[3]))
        q, k, v, for_values = layer.latents.absorb(c_BLR, *qkv, first=store.rows is None)
        # Flash attention does not support heads as wide as latent vectors; no other kernel was tested with them.
        kernel = "tiled" if layer.kernel == "auto" else layer.kernel
        out, layer.choice = attend(info.step, store, q, k, v, mask, scores, kernel, first)
    except LongspanError as error:
        raise LongspanError(f"layer {layer.name}: {error}") from error
    return expand(out, for_values)


def _plan(
    layer: LayerBinding, request: MaskRequest, info: SequenceInfo, shapes: Shapes, scores: Scores
) -> AttentionPlan:
    """Return the attention plan of this batch for layers of this kind, prepared by the first of them."""
    # A slice saves the output of its heads on this rank, after the all-to-all: the plan never recomputes it.
    recomputes, sliced = layer.memory.recompute_all_to_all, isinstance(layer.layer_call, SliceCall)
    key = request, shapes, scores.kind, sliced
    plan = info.prepared.get(key)
    if plan is None:
        plan = prepare(
            shapes,
            info.sp,
            mask_of(request, info),
            scores,
            (info.length, info.length),
            layer.kernel,
            recompute_all_to_all=recomputes and not sliced,
            saves=sliced,
        )
        info.prepared[key] = plan
    return plan


def mask_of(request: MaskRequest, info: SequenceInfo) -> Mask:
    """Return the mask that a model requests, with what the batch adds to it."""
    segments, chunk_size = info.segments, request.chunk_size
    if info.nodes is not None:  # windows and chunks count along paths
        more: Any = {"segments": segments, "mask_mod": info.visible, "nodes": info.nodes}
        return Mask(request.causal, request.window, chunk_size, **more)
    if segments is not None and chunk_size is not None:
        # Chunks count from the start of a document, or from the end of left-hand padding.
        segments, chunk_size = chunk_segments(segments, chunk_size, info.starts), None
    spans = info.bidirectional if request.causal else None
    return Mask(
        request.causal, request.window, chunk_size, segments=segments, mask_mod=info.visible, bidirectional=spans
    )


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
    is_causal, _ = more.get("is_causal"), given.pop("is_causal", None)
    if is_causal is not None and is_causal != request.causal:
        raise LongspanError(
            f"layer {layer.name} has is_causal={is_causal}, but its mask has causal={request.causal}; {HELP}"
        )
    unknown = sorted(given.keys() - _NO_MEANING)
    if unknown:
        raise LongspanError(f"layer {layer.name} passes {', '.join(unknown)} to its attention, not understood; {HELP}")
    return Scores(scale, softcap, sinks)


def _one_dtype(*xs: Tensor) -> list[Tensor]:
    """Cast q, k and v to the autocast dtype if theirs differ (a RoPE in fp32), as torch's attention does."""
    device = xs[0].device.type
    if len({x.dtype for x in xs}) > 1 and torch.is_autocast_enabled(device):
        return [x.to(torch.get_autocast_dtype(device)) for x in xs]
    return list(xs)


_CAUSAL, _BIDIRECTIONAL = (transformers_mask(kind) for kind in ("causal", "bidirectional"))


class _NoTensor(LongspanError, AttributeError):
    """A model uses its mask as a tensor. `hasattr` and `getattr` still see a missing attribute."""


@dataclass(frozen=True)
class MaskRequest:
    """The mask that a model requests, in terms of `Mask`."""

    causal: bool
    window: int | None = None
    chunk_size: int | None = None

    def __getattr__(self, name: str) -> Any:
        raise _NoTensor(f"a layer uses .{name} of its attention mask, so it derives another mask from it; {HELP}")

    def __getitem__(self, index: Any) -> Any:
        raise LongspanError(f"a layer slices its attention mask, so it derives another mask from it; {HELP}")

    def allows(self, i: Tensor, j: Tensor) -> Tensor:
        """Return whether tokens i may attend to tokens j, of the same shape."""
        return Mask(self.causal, self.window, self.chunk_size).pairwise(i, j)


@not_compiled  # it reads closures, and returns no tensor
def longspan_mask(
    *_: Any,
    mask_function: Any = _CAUSAL,
    local_size: int | None = None,
    device: torch.device | str = "cpu",
    **more: Any,
) -> MaskRequest:
    """Return the mask that a model requests from the registry, without building a tensor.

    A mask function is opaque, so compare it with each supported mask, on tokens around the borders of windows and
    chunks. It sees no padding or documents: `ShardBatch` removes them from the inputs.
    """
    if local_size is not None and local_size < 1:  # a window that no layer uses (Qwen2-MoE), and that `Mask` refuses
        return MaskRequest(causal=True, window=local_size)
    if mask_function is _CAUSAL:
        return MaskRequest(causal=True)
    if mask_function is _BIDIRECTIONAL:
        return MaskRequest(causal=False)
    requests = [MaskRequest(causal=True), MaskRequest(causal=False)]
    if local_size is not None:
        requests = [
            MaskRequest(causal=True, window=local_size),
            MaskRequest(causal=True, chunk_size=local_size),
            MaskRequest(causal=False, window=local_size + 1),  # |i - j| <= size, in transformers' encoders
            MaskRequest(causal=False, window=local_size),
        ]
    tensors = list(_tensors_in(mask_function))
    if not any(x.dim() > 1 for x in tensors):  # otherwise it depends on the tokens
        i, j = _around(local_size or 1, device if tensors else "cpu")
        try:
            zero = torch.zeros_like(i)
            allowed = mask_function(zero, zero, i, j).bool().expand_as(i)
        except Exception:  # a function of another form may raise anything
            requests = []
        for request in requests:
            if torch.equal(allowed, request.allows(i, j)):
                return request
    raise LongspanError(
        f"the model asks for the attention mask {_name(mask_function)} (local size {local_size}), which is not "
        f"supported; supported are causal and bidirectional masks, sliding windows of both, causal chunks, padding and "
        f"packed documents"
    )


def _around(size: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Return pairs of tokens on both sides of every border that a window or chunk of `size` may have."""
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


def _name(function: Any) -> str:
    """Return the name of a mask function, with those that it combines."""
    name = str(getattr(function, "__qualname__", repr(function))).split(".<locals>")[0]
    parts = [_name(value) for value in parts_of(function) if callable(value) and not isinstance(value, Tensor)]
    return f"{name}({', '.join(parts)})" if parts else name


register_attention(NAME, longspan_attention, longspan_mask)
