"""Layers whose queries attend to the tokens that a small indexer picks: DeepSeek-V3.2's and its relatives'.

An indexer scores all tokens for each query, and its `top_k` best are attended to. Here queries stay on their rank, and
index keys and latent vectors (`longspan.cache.latent`) of all tokens are gathered to it: two all-gathers per layer, of
the latent vectors with a reduce-scatter of their gradients.

The model's own indexer computes the scores, for a block of my queries at a time. `torch.topk` leaves open which of
several equal scores it takes. On a CPU this depends on the whole row of scores, so a row here has all tokens of the
sequence in their order, as in one process, and the same ones are taken.

Shape suffixes: B batch, L my tokens, Q queries of a block, N all tokens, T chosen tokens, D an index key.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from longspan.attn.indexed import Lists, Packing, attend_to_chosen
from longspan.attn.mask import Mask
from longspan.attn.score import Scores
from longspan.cache.indexed import attend_indexed, keys_to_score, whole_scores
from longspan.cache.latent import LatentLayer, expand
from longspan.compat.torch_api import not_compiled, to_device
from longspan.core.errors import LongspanError
from longspan.core.layout import Span
from longspan.core.tile_sizes import INDEXED_TILE, rows_of_tile
from longspan.hf.batch.shard import SequenceInfo
from longspan.hf.cache.kv_cache import CachedInfo
from longspan.hf.forward.attention import MaskRequest, mask_of, padding_sees_itself
from longspan.hf.model.support import HELP


@dataclass(frozen=True)
class ChoosersMask(MaskRequest):
    """A mask as layers hand it to their indexers; a layer may overlay it with what was chosen."""

    chosen: Any = dataclasses.field(default=None, compare=False)
    dtype: Any = dataclasses.field(default=torch.bool, compare=False)

    def __getitem__(self, index: Any) -> ChoosersMask:
        return self  # without its dimension of heads

    def __and__(self, chosen: Any) -> ChoosersMask:
        return dataclasses.replace(self, chosen=chosen)


class ChoosingLayer:
    """Binds an attention layer and its module that chooses keys, which does not get the facts of a batch itself.

    Attributes:
        part: the module; None for a layer that uses what a layer before it has chosen.
        own: the module's own forward, which `choose` replaces.
        caches: whether the layer generates with a sharded cache.
        no_rollback: why its cache cannot go back to fewer tokens; "" if it can.
        counts_padding: whether the module counts padding on the left, too.
    """

    caches, counts_padding, no_rollback = False, True, ""

    def __init__(self, layer: Any, name: str, part: Any, choose: Callable[..., Any]) -> None:
        self.name, self.part, self._info = name, part, list[Any]()
        if part is not None:
            self.own = part.forward
            part.forward = not_compiled(choose)
            layer.register_forward_pre_hook(self._take_facts, with_kwargs=True)

    def check(self, name: str, info: SequenceInfo) -> None:
        """Raise unless each row is one document, as the module counts neighbouring tokens."""
        one_each = all(
            len(row) == 1 and row[0][0] == 0 if self.counts_padding else len(row) <= 1 for row in info.segments or ()
        )
        if info.nodes or info.visible or info.bidirectional or not one_each:
            raise LongspanError(
                f"layer {self.name} of {name} joins neighbouring tokens of the row in blocks, of whatever document; "
                f"give one document per row{', with padding on the right only' * self.counts_padding}"
            )

    def facts(self) -> Any:
        """Return the `SequenceInfo` of the call in progress, once."""
        info = self._info.pop() if self._info else None
        if not isinstance(info, SequenceInfo):
            raise LongspanError(
                f"layer {self.name} does not pass on keyword arguments, so it cannot know its batch; {HELP}"
            )
        return info

    def captured_keys(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the keys that the module passes to its cache, which raises them as `CapturedKeys`."""
        try:
            self.own(*args, **kwargs)
        except CapturedKeys as captured:
            return captured.keys
        raise LongspanError(f"the indexer of layer {self.name} did not pass its keys to the cache; {HELP}")

    def _take_facts(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._info, request = [kwargs.get("longspan")], kwargs.get("attention_mask")
        if isinstance(request, MaskRequest):
            kwargs = {**kwargs, "attention_mask": ChoosersMask(**vars(request))}
        return args, kwargs


def refuse_tree(layer: str, model: str, info: SequenceInfo) -> None:
    """Raise for a tree of documents; `layer` and `model` are their names."""
    if info.nodes is not None:
        raise LongspanError(
            f"layer {layer} of {model} chooses the tokens that it attends to from the whole row, and a tree "
            f"(`tin` and `tout`) has paths; give it each sequence by itself"
        )


class IndexedLayer(ChoosingLayer):
    """Lets a layer hand on latent vectors instead of keys and values, and its indexer choose from all ranks' tokens.

    The indexer returns int32 [B, L, T]: indices in the whole sequence, and -1 where a query sees fewer than T tokens.
    """

    caches = True

    def __init__(self, layer: Any, name: str, latents: LatentLayer) -> None:
        super().__init__(layer, name, getattr(layer, "indexer", None), torch.no_grad()(self._choose))
        self.latents, self.number = latents, layer.layer_idx
        layer.expand_kv = latents.join

    def check(self, name: str, info: SequenceInfo) -> None:
        refuse_tree(self.name, name, info)

    def attend(
        self, qkv: tuple[Tensor, Tensor, Tensor], chosen: Any, request: MaskRequest, scores: Scores, info: SequenceInfo
    ) -> Tensor:
        """Attend from my tokens to those that the indexer chose, of the whole sequence, by their latent vectors."""
        if not isinstance(chosen, Tensor):
            raise LongspanError(f"the indexer of layer {self.name} chose no tokens; {HELP}")
        (q, c, _), latents = qkv, self.latents
        scale = scores.scale_of(q.shape[3])
        q, for_values = latents.absorb_queries(q)
        packing = Packing.of_latents(latents.rank, latents.width)
        if isinstance(info, CachedInfo):
            step, scores = info.step, dataclasses.replace(scores, scale=scale)
            store, keys = info.cache.layer_cache(self.number), step.index_keys.pop(self.number, None)
            c = info.gather(c)
            return expand(attend_indexed(step, store, q, c, keys, chosen, packing, scores), for_values)
        out = attend_to_chosen(q, info.gather(c), Lists(chosen[:, :, None]), packing, scale, scores.sinks)
        if info.padding is not None:
            out = padding_sees_itself(out, c[..., packing.value], info.padding)
        return expand(out, for_values)

    def _choose(self, *args: Any, **kwargs: Any) -> Tensor:
        given = inspect.signature(self.own).bind(*args, **kwargs).arguments
        request, given["attention_mask"], info = given["attention_mask"], None, self.facts()
        mask, keys_BLD = mask_of(request, info), self._keys(given)
        if not isinstance(info, CachedInfo):
            return self._best(given, info.gather(keys_BLD), mask, my_positions(info))
        step, store = info.step, info.cache.layer_cache(self.part.layer_idx)
        keys_BLD = keys_to_score(step, store, self.part.layer_idx, info.gather(keys_BLD))
        if step.sharded:
            return self._best(given, keys_BLD, mask, my_positions(info))
        return self._top(whole_scores(step, self._scores(given, keys_BLD)), mask, my_positions(info))

    def _best(self, given: dict[str, Any], keys_BND: Tensor, mask: Mask, i: Tensor) -> Tensor:
        """Choose for my queries, at the positions `i` (on the host), from the keys of the whole sequence, by blocks."""
        B, N, _ = keys_BND.shape
        looks_ahead = not mask.causal or mask.prefix is not None or mask.bidirectional is not None
        last = [N] * len(i) if looks_ahead else (i + 1).clamp(max=N).tolist()
        each = rows_of_tile(INDEXED_TILE, B * N * self.part.n_heads, keys_BND.device.type == "cpu")
        parts = list[Tensor]()
        for start in range(0, len(i), each):
            block = slice(start, start + each)
            seen = max(last[block])
            mine = {key: _of_queries(x, block) for key, x in given.items()}
            scores_BQN = self._scores(mine, keys_BND[:, :seen])
            parts.append(self._top(F.pad(scores_BQN, (0, N - seen), value=-math.inf), mask, i[block]))
            del scores_BQN  # before the next block's are made
        return torch.cat(parts, 1)

    def _top(self, scores_BQN: Tensor, mask: Mask, i: Tensor) -> Tensor:
        (B, _, N), device = scores_BQN.shape, scores_BQN.device
        allowed_BQN = mask.dense(B, 1, to_device(i, device), torch.arange(N, device=device))[:, 0].expand(B, -1, -1)
        best = scores_BQN.masked_fill(~allowed_BQN, -math.inf).topk(min(self.part.index_topk, N), -1).indices
        return best.masked_fill(~allowed_BQN.gather(-1, best), -1).int()

    def _keys(self, given: Mapping[str, Any]) -> Tensor:
        """Return the index keys of my tokens, `[B, L, D]`. By blocks, as an indexer makes wide queries first."""
        some = next(x for x in given.values() if isinstance(x, Tensor))
        indexer, parts = self.part, list[Tensor]()
        wide = indexer.n_heads * indexer.head_dim
        each = rows_of_tile(INDEXED_TILE, some.shape[0] * wide, some.device.type == "cpu")
        with replaced(indexer.wq_b, lambda x: x.new_zeros(1).expand(*x.shape[:-1], wide)):  # keys need no queries
            for start in range(0, some.shape[1], each):
                mine = {key: _of_queries(x, slice(start, start + each)) for key, x in given.items()}
                parts.append(self.captured_keys(**mine | {"cache": _StopAtKeys()}))
        return torch.cat(parts, 1)

    def _scores(self, given: Mapping[str, Any], keys_BND: Tensor) -> Tensor:
        """Return the scores that the model's indexer gives all keys, up to its `topk`: `[B, L, N]`."""
        everything = torch.ones(1, 1, 1, dtype=torch.bool, device=keys_BND.device)
        scored = _Scored(keys_BND)
        with scored:
            self.own(**{**given, "attention_mask": everything, "cache": scored})
        if scored.scores_BLN is None or not scored.read:
            raise LongspanError(f"the indexer of layer {self.name} does not score keys of its cache; {HELP}")
        return scored.scores_BLN


class CapturedKeys(Exception):
    """Stops an indexer at its keys."""

    def __init__(self, keys: Tensor) -> None:
        self.keys = keys


class _StopAtKeys:
    """Stands for the cache of an indexer."""

    def update_indexer(self, k_BLD: Tensor, *_: Any) -> Tensor:
        raise CapturedKeys(k_BLD)


class _Scored(TorchFunctionMode):
    """Captures the scores of an indexer, for which it is the cache with the keys of all tokens, too."""

    def __init__(self, whole_BND: Tensor) -> None:
        super().__init__()
        self.whole, self.read = whole_BND, False
        self.scores_BLN: Tensor | None = None

    def update_indexer(self, *_: Any) -> Tensor:
        self.read = True
        return self.whole

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.topk:
            self.scores_BLN = args[0]
            return func(args[0][..., :1], 1, dim=-1)
        return func(*args, **(kwargs or {}))


def my_positions(info: SequenceInfo) -> Tensor:
    """Return the global positions of my tokens, on the host: a layer must not wait for a GPU."""
    return torch.cat([torch.arange(*span) for span in my_spans(info)]).clamp_(max=info.length - 1)


def my_spans(info: SequenceInfo) -> list[Span]:
    """Return the global spans of my tokens; padding goes beyond the last one."""
    spans = info.sp.layout.padded_spans(info.new, info.sp.rank) if info.sharded else ((0, info.new),)
    past = info.length - info.new
    return [(past + a, past + b) for a, b in spans]


def _of_queries(x: Any, block: slice) -> Any:
    """Return the part of an argument that belongs to some of my queries: tensors are [rows, tokens, ...]."""
    if isinstance(x, tuple):
        return tuple(_of_queries(part, block) for part in x)
    return x[:, block] if isinstance(x, Tensor) else x


@contextlib.contextmanager
def replaced(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Let a module compute something else for a while."""
    before = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if before is None:
            del module.__dict__["forward"]
        else:
            module.forward = before
