"""MiniMax-M3's, Qwen4-Exp's and GLM-5.3's layers: each query attends to the blocks of keys that a small indexer picks.

Queries stay on their rank; keys and values of all tokens are gathered to it, and so are index keys. The model's own
indexer scores a block of my queries at a time, with the keys of all ranks in the order of the sequence.

Blocks of MiniMax-M3 (for each KV head) and GLM-5.3 count tokens of the row, of whatever document, so packed documents
are refused, and for MiniMax-M3 padding on the left. Qwen4-Exp cuts what a query sees into blocks.

Shape suffixes: B batch, L my tokens, Q queries of a block, N all tokens, I heads of the indexer, T chosen blocks or
tokens, K KV heads, D elements.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from longspan.attn.indexed import BlocksOfKeys, Lists, Packing, attend_to_chosen
from longspan.attn.score import Scores
from longspan.cache.indexed import attend_indexed, keys_to_score
from longspan.cache.latent import LatentLayer
from longspan.compat.torch_api import to_device
from longspan.core.errors import LongspanError
from longspan.core.tile_sizes import INDEXED_TILE, rows_of_tile
from longspan.hf.batch.shard import SequenceInfo
from longspan.hf.cache.kv_cache import CachedInfo
from longspan.hf.forward.attention import MaskRequest, mask_of, padding_sees_itself
from longspan.hf.forward.indexed import (
    CapturedKeys,
    ChoosersMask,
    ChoosingLayer,
    IndexedLayer,
    my_positions,
    my_spans,
    refuse_tree,
)
from longspan.hf.model.support import HELP


class BlockLayer(ChoosingLayer):
    """Binds an attention layer with an indexer of blocks."""

    def __init__(self, layer: Any, name: str) -> None:
        super().__init__(layer, name, layer.indexer, torch.no_grad()(self._choose))

    def attend(
        self, qkv: tuple[Tensor, Tensor, Tensor], chosen: Any, request: MaskRequest, scores: Scores, info: SequenceInfo
    ) -> Tensor:
        """Attend from my tokens to the visible tokens of the chosen blocks, int [B, I, L, T]."""
        q, k, v = qkv
        if not isinstance(chosen, Tensor) or k.shape[2] % chosen.shape[1]:
            raise LongspanError(
                f"the indexer of layer {self.name} chose no blocks for its {k.shape[2]} KV heads; {HELP}"
            )
        blocks_BLKT = chosen.transpose(1, 2).repeat_interleave(k.shape[2] // chosen.shape[1], 2)
        positions = info.sp.positions(info.length)
        lists = BlocksOfKeys(blocks_BLKT, self.part.block_size, positions)
        return _attend(q, k, v, lists, scores, info)

    def _choose(
        self, hidden_BLD: Tensor, embeddings: tuple[Tensor, Tensor], cache: None, position_ids: Tensor
    ) -> Tensor:
        """Return the blocks that my queries attend to, [B, I, L, T]; -1 for none."""
        info, parts = self.facts(), list[Tensor]()
        mine = self.captured_keys(hidden_BLD, embeddings, _Keys(None), position_ids)
        keys = _Keys(info.gather(mine[:, 0])[:, None])
        elements = len(hidden_BLD) * info.length * self.part.num_heads
        each = rows_of_tile(INDEXED_TILE, elements, hidden_BLD.device.type == "cpu")
        for start in range(0, hidden_BLD.shape[1], each):
            block = slice(start, start + each)
            cos_sin = tuple(x[:, block] for x in embeddings)
            parts.append(self.own(hidden_BLD[:, block], cos_sin, keys, position_ids[:, block]))
        return torch.cat(parts, 2)


class SelectedLayer(ChoosingLayer):
    """Binds an attention layer whose indexer returns a mask of chosen tokens (Qwen4-Exp), and keeps them as lists."""

    caches = True

    def __init__(self, layer: Any, name: str) -> None:
        super().__init__(layer, name, layer.indexer, torch.no_grad()(self._choose))
        self.number = layer.layer_idx

    def check(self, name: str, info: SequenceInfo) -> None:
        refuse_tree(self.name, name, info)

    def attend(
        self, qkv: tuple[Tensor, Tensor, Tensor], _: Any, request: MaskRequest, scores: Scores, info: SequenceInfo
    ) -> Tensor:
        """Attend from my tokens to those that the layer's mask has chosen."""
        chosen = getattr(request, "chosen", None)
        if not isinstance(chosen, Tensor):
            raise LongspanError(f"layer {self.name} did not overlay its mask with the chosen tokens; {HELP}")
        (q, k, v), dim = qkv, qkv[1].shape[3]
        if isinstance(info, CachedInfo):
            kv, scores = info.gather(torch.cat([k, v], 3)), dataclasses.replace(scores, scale=scores.scale_of(dim))
            store, keys = info.cache.layer_cache(self.number), info.step.index_keys.pop(self.number)
            packing = Packing(slice(0, dim), slice(dim, kv.shape[3]))
            return attend_indexed(info.step, store, q, kv, keys, chosen, packing, scores)
        return _attend(q, k, v, Lists(chosen[:, :, None].expand(-1, -1, k.shape[2], -1)), scores, info)

    def _choose(
        self, hidden_BLD: Tensor, embeddings: tuple[Tensor, Tensor], request: MaskRequest, cache: None
    ) -> Tensor:
        """Return the tokens that my queries attend to, int32 [B, L, T]; -1 for none."""
        info, part = self.facts(), self.part
        mine = self.captured_keys(hidden_BLD, embeddings, None, _Keys(None))
        B, N, R = len(mine), info.length, embeddings[0].shape[2]
        packed = info.gather(torch.cat([mine, *(x.expand(B, -1, -1) for x in embeddings)], 2))
        if isinstance(info, CachedInfo):  # whole: a block may have tokens of several ranks
            store = info.cache.layer_cache(self.number)
            packed = keys_to_score(info.step, store, self.number, packed, whole=True)
        keys, *rotary = packed.split([mine.shape[2], R, R], 2)  # a block's key is turned by its first token's position
        mask, i = mask_of(request, info), to_device(my_positions(info), mine.device)
        width = min(N, part.token_budget + part.compress_ratio - 1)
        each = rows_of_tile(INDEXED_TILE, B * N * part.index_n_heads, mine.device.type == "cpu")
        parts = list[Tensor]()
        for start in range(0, hidden_BLD.shape[1], each):
            block = slice(start, start + each)
            seen = mask.dense(B, 1, i[block], torch.arange(N, device=i.device)).expand(B, 1, -1, -1)
            turns = tuple(
                torch.cat([x, own[:, block].expand(B, -1, -1)], 1) for x, own in zip(rotary, embeddings, strict=True)
            )
            chosen_BQN = self.own(hidden_BLD[:, block], turns, seen, _Keys(keys.to(mine.dtype)))[:, 0]
            taken, token = chosen_BQN.byte().topk(width, -1)
            parts.append(token.masked_fill(taken == 0, -1).int())
        return torch.cat(parts, 1)


class PooledLayer(IndexedLayer):
    """An `IndexedLayer` whose indexer scores pools of keys, and whose layer makes a mask of its choice (GLM-5.3)."""

    counts_padding, check = False, ChoosingLayer.check

    def __init__(self, layer: Any, name: str, latents: LatentLayer) -> None:
        super().__init__(layer, name, latents)
        layer.build_attention_mask_from_topk = lambda topk_indices, **_: ChoosersMask(True, chosen=topk_indices)

    def attend(
        self, qkv: tuple[Tensor, Tensor, Tensor], _: Any, request: MaskRequest, scores: Scores, info: SequenceInfo
    ) -> Tensor:
        return super().attend(qkv, getattr(request, "chosen", None), request, scores, info)

    def _choose(self, hidden_states: Tensor, q_resid: Tensor, attention_mask: Tensor, cache: None) -> Tensor:
        info, parts = self.facts(), list[Tensor]()
        if info.segments is not None:
            real_BN = torch.zeros(info.rows, info.length, dtype=torch.bool)
            for row, spans in zip(real_BN, info.segments, strict=True):
                for start, stop in spans:
                    row[start:stop] = True
            attention_mask = to_device(real_BN[:, my_positions(info)], hidden_states.device)
        keys = info.gather(self.captured_keys(hidden_states, q_resid, attention_mask, _Keys(None)))
        if isinstance(info, CachedInfo):  # whole: a pool may have tokens of several ranks
            keys = keys_to_score(info.step, info.cache.layer_cache(self.number), self.number, keys, whole=True)
        elements = len(keys) * info.length * max(1, self.part.n_heads // self.part.index_kpool)
        each, at = rows_of_tile(INDEXED_TILE, elements, keys.device.type == "cpu"), 0
        for first, last in my_spans(info):
            for start in range(first, last, each):
                stop = min(last, start + each)
                mine = slice(at + start - first, at + stop - first)
                given = (x[:, mine] for x in (hidden_states, q_resid, attention_mask))
                parts.append(self.own(*given, _Keys(keys, stop)))
            at += last - first
        return torch.cat(parts, 1)


def _attend(q: Tensor, k: Tensor, v: Tensor, lists: Lists, scores: Scores, info: SequenceInfo) -> Tensor:
    dim = k.shape[3]
    kv = info.gather(torch.cat([k, v], 3))
    packing = Packing(slice(0, dim), slice(dim, kv.shape[3]))
    out = attend_to_chosen(q, kv, lists, packing, scores.scale_of(dim), scores.sinks)
    return out if info.padding is None else padding_sees_itself(out, v, info.padding)


class _Keys:
    """Stands for the cache of a layer's index keys: returns those of all tokens, or captures mine.

    `length` is the number of tokens up to the last query.
    """

    def __init__(self, whole: Tensor | None, length: int = 0) -> None:
        self.whole, self.keys, self.length = whole, whole, length

    def get_seq_length(self) -> int:
        return self.length

    @property
    def layers(self) -> Any:
        return self

    def __getitem__(self, layer: int) -> Any:
        return self

    def update_index(self, keys: Tensor, *_: Any) -> Tensor:
        if self.whole is None:
            raise CapturedKeys(keys)
        return self.whole

    update_indexer = update_index
