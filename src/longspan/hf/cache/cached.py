"""The stage of a forward with a KV cache: a chunk of a prompt, or generated tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from longspan.attn.segments import Segments, padding_segments
from longspan.comm.shard import shard
from longspan.comm.weights import is_on_cpu
from longspan.compat.torch_api import not_compiled
from longspan.core.errors import LongspanError
from longspan.core.validation import format_value
from longspan.hf.batch.documents import VisibleKeys, tokens_of
from longspan.hf.batch.shard import WIDTH, SequenceInfo, check_cache_position, rotary_positions
from longspan.hf.cache.kv_cache import CachedInfo, KnownTokens
from longspan.hf.forward.logits import SelectedTokens
from longspan.hf.forward.shard_batch import check_ids, check_positions
from longspan.hf.forward.stage import ForwardCall, Stage
from longspan.hf.model.pretrained import position_range
from longspan.hf.model.vision import image_spans

if TYPE_CHECKING:
    from longspan.hf.forward.tensor import TensorParallel


class CachedTokens(Stage):
    """Shard the new tokens and append them to the cache.

    The arguments are `input_ids` or `inputs_embeds` of the new tokens, equal on every rank of the sequence group, and
    optionally their `position_ids` and an `attention_mask` [B, all tokens].
    """

    def __init__(self, tensor: TensorParallel | None) -> None:
        self.tensor = tensor
        self.known: KnownTokens | None = None  # with the new tokens
        self.positions: Tensor | None = None  # of the new tokens, int64 [1 or rows, new]
        self.position_range: tuple[int | None, ...] = ()  # of the config, read for the first tokens of a cache: slow
        self.info: CachedInfo | None = None

    def reset(self) -> None:
        self.known = self.positions = self.info = None

    def check(self, call: ForwardCall) -> None:
        assert call.cache is not None
        batch, cache = call.batch, call.cache
        _refuse(batch)
        cache.check_complete()
        tokens, past = tokens_of(batch), cache.kv_placement.length
        rows, new = tokens.shape[:2]
        if not new:
            raise LongspanError(
                f"there is no new token behind the {past} that the cache holds; give those that follow, or crop it"
            )
        if cache.batch_size not in (-1, rows):
            raise LongspanError(f"the cache holds {cache.batch_size} rows, the batch has {rows}; make a new cache")
        segments, visible, largest = self._read(call, past, new)
        images = _image_spans(batch, call.traits.image_types, past, new)
        if is_on_cpu(batch):
            check_ids(call.model, batch, call.traits)
        largest = max(largest, cache.announced - 1)  # in chunked prefill, that of the whole prompt
        if not past or not self.position_range:
            self.position_range = (position_range(call.model.config),)
        check_positions(self.position_range[0], largest)
        call.info = SequenceInfo(call.sp, rows, past + new, segments, largest, visible=visible, bidirectional=images)

    def _read(self, call: ForwardCall, past: int, new: int) -> tuple[Segments | None, VisibleKeys | None, int]:
        """Return padding, visible keys and the largest position; read from the batch, this waits for a GPU."""
        assert call.cache is not None
        batch, (rows, *_), known = call.batch, tokens_of(call.batch).shape, call.cache.known_after(new)
        mask = batch.get("attention_mask")
        if known is None:
            check_cache_position(batch.get("cache_position"), past, new)
            segments, visible = _segments(mask, rows, past + new)
        else:
            segments, visible = known.segments, VisibleKeys(batch["attention_mask"].bool()) if known.holes else None
        positions = call.traits.positions(batch, past)
        counted = positions is None and segments is None
        if positions is None:
            positions = _positions(None if segments is None else mask, past, new, tokens_of(batch).device)
        self.known, self.positions = known, positions if positions.dim() > 1 else positions[None]
        if positions.shape[-1] != new:
            raise LongspanError(
                f"`position_ids` has the shape {tuple(positions.shape)}, the {rows} rows have {new} new tokens behind "
                f"{past} in the cache"
            )
        if known is not None:
            return segments, visible, known.last_position
        largest = last = past + new - 1
        if not counted:
            rotary = rotary_positions(self.positions)
            largest, last = torch.stack([rotary.max(), rotary[..., -1].max()]).tolist()
        if segments is None or all(segments):
            self.known = KnownTokens(past + new, segments, visible is not None, last)
        return segments, visible, largest

    def before(self, call: ForwardCall) -> None:
        assert call.cache is not None
        batch, cache = call.batch, call.cache
        step = cache.begin(tokens_of(batch).shape[1], self._row_starts(call))
        cache.known = self.known
        # `generate` reads the last logits alone, also of a model that it cannot ask for those.
        last = step.sharded and cache.generated_from is not None and not call.traits.accepts("logits_to_keep")
        keep = batch.get("logits_to_keep") or int(last)
        call.info = self.info = CachedInfo(**vars(call.info), cache=cache, step=step, keep=keep)
        parts = {name: batch.get(name) for name in ("input_ids", "inputs_embeds", "token_type_ids")}
        parts["position_ids"] = self.positions
        if call.traits.image_types is not None:
            parts[call.traits.image_types] = None
        call.inputs = {key: value for key, value in batch.items() if key not in (*parts, "cache_position", WIDTH)}
        dims = {"position_ids": -1}  # they may have axes
        call.inputs |= {
            key: shard(x, call.sp, dims.get(key, 1)) if step.sharded else x for key, x in parts.items() if x is not None
        }
        call.inputs |= {"attention_mask": None, "cache": cache, "use_cache": not call.traits.own_cache}

    def _row_starts(self, call: ForwardCall) -> tuple[int, ...] | None:
        """Return the first real token of each row; None for what a step of constant shapes cannot contain."""
        ids, info = call.batch.get("input_ids"), call.info
        if ids is None or ids.shape[1] > 1 or self.known is None or info.visible is not None:
            return None
        return (0,) * len(ids) if info.segments is None else tuple(row[0][0] for row in info.segments)

    def after(self, call: ForwardCall, output: Any) -> Any:
        assert call.cache is not None
        call.cache.end()
        if not isinstance(output, tuple) and not hasattr(output, "cache"):
            output.cache = call.cache  # `generate` reads it
        return output

    @not_compiled
    def keep_last(self, decoder: nn.Module, args: Any, output: Any) -> Any:
        """Hook behind the decoder: return hidden states of the last tokens only, if only their logits are needed."""
        info = self.info
        if info is None or not info.keep:
            return output
        hidden = (last_tokens if self.tensor is None else self.tensor.last_tokens)(output[0], info)
        if isinstance(output, tuple):
            return hidden, *output[1:]
        output["last_hidden_state"] = hidden
        return output


def last_tokens(hidden: Tensor, info: CachedInfo) -> Tensor:
    """Return the hidden states of the last `info.keep` new tokens, `[B, keep, D]`, on every rank of the group.

    `hidden` are those of my new tokens `[B, L, D]` if they are sharded, else of all.
    """
    sp, new = info.sp, info.new
    if not info.sharded:
        return hidden[:, -info.keep :]
    if info.keep == 1:  # one rank's token, sent once
        owner, at = sp.layout.locate_token(new, new - 1)
        last = hidden[:, at : at + 1].contiguous() if owner == sp.rank else torch.empty_like(hidden[:, :1])
        assert sp.group is not None
        dist.broadcast(last, group=sp.group, group_src=owner)
        return last
    return SelectedTokens(range(max(0, new - info.keep), new), new, sp).gather(hidden)


def _image_spans(batch: Mapping[str, Any], key: str | None, past: int, new: int) -> Segments | None:
    """Return the images among the new tokens; raise if one may begin among the cached tokens."""
    types = None if key is None else batch.get(key)
    if types is None:
        return None
    if types.dim() != 2 or types.shape[1] not in (new, past + new):
        raise LongspanError(
            f"`{key}` has the shape {tuple(types.shape)}; it has an entry for each of the {new} new tokens, or for "
            f"each of the {past + new} with the cached ones"
        )
    spans = image_spans(types[:, -new:])
    cut = [b for b, row in enumerate(spans or ()) if past and row and row[0][0] == 0]
    if cut:
        raise LongspanError(
            f"row {cut[0]}: the new tokens behind {past} in the cache begin with an image, and the cached part of "
            f"an image would not have seen them; begin chunks with text, before the token that opens an image"
        )
    return spans and tuple(tuple((past + a, past + b) for a, b in row) for row in spans)


def _refuse(batch: Mapping[str, Any]) -> None:
    if torch.is_grad_enabled():
        raise LongspanError(
            "a forward with a KV cache has no gradients on a parallelized model; call it under torch.no_grad(), or "
            "without a cache"
        )
    if batch.get("labels") is not None:
        raise LongspanError("a forward with a KV cache gives no loss; leave labels out, or call it without a cache")
    if batch.get("tin") is not None:
        raise LongspanError("a KV cache holds the tokens of one path, no tree (`tin` and `tout`); call without a cache")
    if batch.get("output_attentions"):
        raise LongspanError("output_attentions=True is not supported on a parallelized model; leave it out")
    keep = batch.get("logits_to_keep")
    if keep is not None and not (isinstance(keep, int) and keep >= 0):
        raise LongspanError(
            f"logits_to_keep={format_value(keep)} with a cache: give a number of last tokens, or leave it out"
        )
    if (batch.get("input_ids") is None) == (batch.get("inputs_embeds") is None):
        raise LongspanError("a batch needs `input_ids` or `inputs_embeds`, one of them")


def _segments(mask: Tensor | None, rows: int, length: int) -> tuple[Segments | None, VisibleKeys | None]:
    """Return each row's real tokens (none in a row of padding alone) and the visible keys; None if all are real."""
    if mask is None:
        return None, None
    if mask.dim() != 2 or tuple(mask.shape) != (rows, length):
        raise LongspanError(
            f"`attention_mask` has the shape {tuple(mask.shape)}; with a cache it covers the tokens that it holds and "
            f"the new ones: ({rows}, {length})"
        )
    segments, _ = padding_segments(mask)
    if segments is None:
        return None, None
    # Zeros after the first 1 are hidden keys: if a chunk ends in a hole, more ones may follow.
    counts = mask.bool().sum(-1).tolist()
    holes = any(row and count < length - row[0][0] for row, count in zip(segments, counts, strict=True))
    segments = tuple(((row[0][0], length),) if row else () for row in segments)
    return segments, VisibleKeys(mask.bool()) if holes else None


def _positions(mask: Tensor | None, past: int, new: int, device: torch.device) -> Tensor:
    """Return position ids as `generate` makes them, int64 [1 or rows, new]: padding is not counted."""
    if mask is None:
        return torch.arange(past, past + new, device=device)[None]
    return (mask.to(device).long().cumsum(-1) - 1).clamp(min=0)[:, past:]
