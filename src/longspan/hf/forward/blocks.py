"""MiniMax-M3's layers: each query attends to the blocks of keys that a small indexer picks, for each KV head its own.

Queries stay on their rank; keys and values of all tokens are gathered to it, and so are index keys. The model's own
indexer scores a block of my queries at a time, with the keys of all ranks in the order of the sequence. It counts
tokens of the row, whatever documents they belong to, so packed documents and padding on the left are refused.

Shape suffixes: B batch, L my tokens, N all tokens, I heads of the indexer, T chosen blocks, K KV heads, D elements.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from longspan.attn.indexed import BlocksOfKeys, Packing, attend_to_chosen
from longspan.attn.score import Scores
from longspan.compat.torch_api import not_compiled
from longspan.core.errors import LongspanError
from longspan.core.tile_sizes import INDEXED_TILE, rows_of_tile
from longspan.hf.batch.shard import SequenceInfo
from longspan.hf.forward.attention import MaskRequest, padding_sees_itself
from longspan.hf.forward.indexed import CapturedKeys, check_one_document
from longspan.hf.model.support import HELP


class BlockLayer:
    """Binds an attention layer with an indexer of blocks; holds the facts of its call in progress."""

    caches = False

    def __init__(self, layer: Any, name: str) -> None:
        self.name, self.indexer = name, layer.indexer
        self.scores, self.info = self.indexer.forward, list[SequenceInfo]()
        self.indexer.forward = not_compiled(torch.no_grad()(self._choose))
        layer.register_forward_pre_hook(self._take_facts, with_kwargs=True)

    def check(self, name: str, info: SequenceInfo) -> None:
        check_one_document(self.name, name, info)

    def attend(
        self, qkv: tuple[Tensor, Tensor, Tensor], chosen: Any, request: MaskRequest, scores: Scores, info: SequenceInfo
    ) -> Tensor:
        """Attend from my tokens to the visible tokens of the chosen blocks, int [B, I, L, T]."""
        q, k, v = qkv
        if not isinstance(chosen, Tensor) or k.shape[2] % chosen.shape[1]:
            raise LongspanError(
                f"the indexer of layer {self.name} chose no blocks for its {k.shape[2]} KV heads; {HELP}"
            )
        dim = k.shape[3]
        kv = info.gather(torch.cat([k, v], 3))
        blocks_BLKT = chosen.transpose(1, 2).repeat_interleave(k.shape[2] // chosen.shape[1], 2)
        positions = info.sp.positions(info.length)
        lists = BlocksOfKeys(blocks_BLKT, self.indexer.block_size, positions)
        packing = Packing(slice(0, dim), slice(dim, kv.shape[3]))
        out = attend_to_chosen(q, kv, lists, packing, scores.scale_of(dim), scores.sinks)
        return out if info.padding is None else padding_sees_itself(out, v, info.padding)

    def _take_facts(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        info = kwargs.get("longspan")
        self.info = [info] if isinstance(info, SequenceInfo) else []

    def _choose(
        self, hidden_BLD: Tensor, embeddings: tuple[Tensor, Tensor], cache: None, position_ids: Tensor
    ) -> Tensor:
        """Return the blocks that my queries attend to, [B, I, L, T]; -1 for none."""
        if not self.info:
            raise LongspanError(
                f"layer {self.name} does not pass on keyword arguments, so it cannot know its batch; {HELP}"
            )
        info, parts = self.info.pop(), list[Tensor]()
        try:
            self.scores(hidden_BLD, embeddings, _Keys(None), position_ids)
            raise LongspanError(f"the indexer of layer {self.name} did not pass its keys to the cache; {HELP}")
        except CapturedKeys as captured:
            keys = _Keys(info.gather(captured.keys[:, 0])[:, None])
        elements = len(hidden_BLD) * info.length * self.indexer.num_heads
        each = rows_of_tile(INDEXED_TILE, elements, hidden_BLD.device.type == "cpu")
        for start in range(0, hidden_BLD.shape[1], each):
            block = slice(start, start + each)
            cos_sin = tuple(x[:, block] for x in embeddings)
            parts.append(self.scores(hidden_BLD[:, block], cos_sin, keys, position_ids[:, block]))
        return torch.cat(parts, 2)


class _Keys:
    """Stands for the cache of a layer's index keys: returns those of all tokens, or captures mine."""

    def __init__(self, whole_B1ND: Tensor | None) -> None:
        self.whole = whole_B1ND

    @property
    def layers(self) -> Any:
        return self

    def __getitem__(self, layer: int) -> Any:
        return self

    def update_index(self, keys_B1LD: Tensor) -> Tensor:
        if self.whole is None:
            raise CapturedKeys(keys_B1LD)
        return self.whole
