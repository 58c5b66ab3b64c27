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

import dataclasses
import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from longspan.attn.indexed import Lists, Packing, attend_to_chosen
from longspan.attn.mask import Mask
from longspan.attn.score import Scores
from longspan.cache.indexed import attend_indexed, in_sequence, whole_of
from longspan.cache.latent import LatentLayer, expand
from longspan.comm.mesh import SequenceSharding
from longspan.compat.torch_api import not_compiled, to_device
from longspan.core.errors import LongspanError
from longspan.core.tile_sizes import INDEXED_TILE, rows_of_tile
from longspan.hf.batch.shard import SequenceInfo
from longspan.hf.cache.kv_cache import CachedInfo
from longspan.hf.forward.attention import MaskRequest, mask_of, padding_sees_itself
from longspan.hf.model.support import HELP


@dataclass(frozen=True)
class IndexedMask(MaskRequest):
    """The mask that a layer hands to its indexer, with the facts of the batch, which the indexer does not get."""

    info: SequenceInfo | None = dataclasses.field(default=None, compare=False)

    def __getitem__(self, index: Any) -> IndexedMask:
        return self  # the indexer gets the mask without its dimension of heads


class IndexedLayer:
    """Lets a layer hand on latent vectors instead of keys and values, and its indexer choose from all ranks' tokens."""

    caches = True

    def __init__(self, layer: Any, name: str, latents: LatentLayer) -> None:
        self.name, self.latents, self.number = name, latents, layer.layer_idx
        layer.register_forward_pre_hook(_add_facts, with_kwargs=True)
        layer.expand_kv = latents.join
        indexer = getattr(layer, "indexer", None)
        if indexer is not None:  # else the layer uses what a layer before it has chosen
            indexer.forward = Indexer(indexer, name)

    def check(self, name: str, info: SequenceInfo) -> None:
        if info.nodes is not None:
            raise LongspanError(
                f"layer {self.name} of {name} chooses the tokens that it attends to from the whole row, and a tree "
                f"(`tin` and `tout`) has paths; give it each sequence by itself"
            )

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
            return expand(attend_indexed(step, store, q, c[:, :, 0], keys, chosen, packing, scores), for_values)
        out = attend_to_chosen(q, info.gather(c), Lists(chosen[:, :, None]), packing, scale, scores.sinks)
        if info.padding is not None:
            out = padding_sees_itself(out, c[..., packing.value], info.padding)
        return expand(out, for_values)


def check_one_document(layer: str, model: str, info: SequenceInfo) -> None:
    """Raise for a layer that counts neighbouring tokens of a row, if rows are not one document with padding behind."""
    one_each = all(len(row) == 1 and row[0][0] == 0 for row in info.segments or ())
    if info.nodes or info.visible or info.bidirectional or not one_each:
        raise LongspanError(
            f"layer {layer} of {model} joins neighbouring tokens of the row in blocks, of whatever document; give one "
            f"document per row, with padding on the right only"
        )


def _add_facts(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    request, info = kwargs.get("attention_mask"), kwargs.get("longspan")
    if isinstance(request, MaskRequest) and isinstance(info, SequenceInfo):
        asked = {field.name: getattr(request, field.name) for field in dataclasses.fields(MaskRequest)}
        kwargs = {**kwargs, "attention_mask": IndexedMask(**asked, info=info)}
    return args, kwargs


class Indexer:
    """Replaces the forward of a model's indexer by one that chooses from the tokens of all ranks.

    It returns int32 [B, L, T]: indices in the whole sequence, and -1 where a query sees fewer than T tokens.
    """

    def __init__(self, indexer: Any, name: str) -> None:
        self.indexer, self.name, self.scores = indexer, name, indexer.forward
        self.signature = inspect.signature(self.scores)
        self._chooses = not_compiled(torch.no_grad()(self._choose))

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        given = self.signature.bind(*args, **kwargs).arguments
        mask = given["attention_mask"]
        if not isinstance(mask, IndexedMask) or mask.info is None:
            raise LongspanError(f"the indexer of layer {self.name} did not get its batch; {HELP}")
        chosen: Tensor = self._chooses({**given, "attention_mask": None}, mask, mask.info)
        return chosen

    def _choose(self, given: dict[str, Any], request: IndexedMask, info: SequenceInfo) -> Tensor:
        mask, keys_BLD = mask_of(request, info), self._keys(given)
        if not isinstance(info, CachedInfo):
            return self._best(given, info.gather(keys_BLD), mask, my_positions(info.sp, info.length))
        step, store = info.step, info.cache.layer_cache(self.indexer.layer_idx)
        past = None if store.rows is None else store.read(keys_BLD.dtype)[0][:, 0, :, -keys_BLD.shape[2] :]
        i = step.past + (my_positions(info.sp, step.new) if step.sharded else torch.arange(step.new))
        if step.sharded:
            keys_BLD = info.sp.gather(keys_BLD, dim=1, length=step.new)
        spans = step.kv_placement.held(step.sp.ring_rank, step.past)
        mine = torch.cat([keys_BLD[:, :0], *(keys_BLD[:, a - step.past : b - step.past] for a, b in spans)], 1)
        step.index_keys[self.indexer.layer_idx] = mine
        if step.sharded:
            return self._best(given, whole_of(step, past, keys_BLD), mask, i)
        here = mine if past is None else torch.cat([past, mine], 1)
        scores_BTL = self._scores(given, here).transpose(1, 2)
        return self._top(in_sequence(step, scores_BTL, step.kv_placement.length).transpose(1, 2), mask, i)

    def _best(self, given: dict[str, Any], keys_BND: Tensor, mask: Mask, i: Tensor) -> Tensor:
        """Choose for my queries, at the positions `i` (on the host), from the keys of the whole sequence, by blocks."""
        B, N, _ = keys_BND.shape
        looks_ahead = not mask.causal or mask.prefix is not None or mask.bidirectional is not None
        last = [N] * len(i) if looks_ahead else (i + 1).clamp(max=N).tolist()
        each = rows_of_tile(INDEXED_TILE, B * N * self.indexer.n_heads, keys_BND.device.type == "cpu")
        parts = list[Tensor]()
        for start in range(0, len(i), each):
            block = slice(start, start + each)
            seen = max(last[block])
            mine = {key: _of_queries(x, block) for key, x in given.items()}
            scores_BQN = self._scores(mine, keys_BND[:, :seen])
            rest = scores_BQN.new_full((*scores_BQN.shape[:2], N - seen), -math.inf)
            parts.append(self._top(torch.cat([scores_BQN, rest], 2), mask, i[block]))
        return torch.cat(parts, 1)

    def _top(self, scores_BQN: Tensor, mask: Mask, i: Tensor) -> Tensor:
        (B, _, N), device = scores_BQN.shape, scores_BQN.device
        allowed_BQN = mask.dense(B, 1, to_device(i, device), torch.arange(N, device=device))[:, 0].expand(B, -1, -1)
        best = scores_BQN.masked_fill(~allowed_BQN, -math.inf).topk(min(self.indexer.index_topk, N), -1).indices
        return best.masked_fill(~allowed_BQN.gather(-1, best), -1).int()

    def _keys(self, given: Mapping[str, Any]) -> Tensor:
        """Return the index keys of my tokens, `[B, L, D]`. By blocks: an indexer computes its wide queries first."""
        some = next(x for x in given.values() if isinstance(x, Tensor))
        B, L = some.shape[:2]
        indexer, parts = self.indexer, list[Tensor]()
        each = rows_of_tile(INDEXED_TILE, B * indexer.n_heads * indexer.head_dim, some.device.type == "cpu")
        for start in range(0, L, each):
            block = slice(start, start + each)
            try:
                self.scores(**{key: _of_queries(x, block) for key, x in given.items()} | {"cache": _StopAtKeys()})
            except CapturedKeys as captured:
                parts.append(captured.keys)
            else:
                raise LongspanError(f"the indexer of layer {self.name} did not pass its keys to the cache; {HELP}")
        return torch.cat(parts, 1)

    def _scores(self, given: Mapping[str, Any], keys_BND: Tensor) -> Tensor:
        """Return the scores that the model's indexer gives all keys, up to its `topk`: `[B, L, N]`."""
        everything = torch.ones(1, 1, 1, dtype=torch.bool, device=keys_BND.device)
        scored = _Scored(keys_BND)
        with scored:
            self.scores(**{**given, "attention_mask": everything, "cache": scored})
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


def my_positions(sp: SequenceSharding, n: int) -> Tensor:
    """Return what `sp.positions` does, on the host: a layer must not wait for a GPU."""
    spans = sp.layout.padded_spans(n, sp.rank)
    return torch.cat([torch.arange(*span) for span in spans]).clamp_(max=n - 1)


def _of_queries(x: Any, block: slice) -> Any:
    """Return the part of an argument that belongs to some of my queries: tensors are [rows, tokens, ...]."""
    if isinstance(x, tuple):
        return tuple(_of_queries(part, block) for part in x)
    return x[:, block] if isinstance(x, Tensor) else x
