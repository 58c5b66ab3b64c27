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
from longspan.core.errors import LongspanError
from longspan.core.tile_sizes import INDEXED_TILE, rows_of_tile
from longspan.hf.batch.shard import SequenceInfo
from longspan.hf.forward.attention import MaskRequest, padding_sees_itself
from longspan.hf.forward.indexed import CapturedKeys, ChoosingLayer
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
        dim = k.shape[3]
        kv = info.gather(torch.cat([k, v], 3))
        blocks_BLKT = chosen.transpose(1, 2).repeat_interleave(k.shape[2] // chosen.shape[1], 2)
        positions = info.sp.positions(info.length)
        lists = BlocksOfKeys(blocks_BLKT, self.part.block_size, positions)
        packing = Packing(slice(0, dim), slice(dim, kv.shape[3]))
        out = attend_to_chosen(q, kv, lists, packing, scores.scale_of(dim), scores.sinks)
        return out if info.padding is None else padding_sees_itself(out, v, info.padding)

    def _choose(
        self, hidden_BLD: Tensor, embeddings: tuple[Tensor, Tensor], cache: None, position_ids: Tensor
    ) -> Tensor:
        """Return the blocks that my queries attend to, [B, I, L, T]; -1 for none."""
        info, parts = self.facts(), list[Tensor]()
        try:
            self.own(hidden_BLD, embeddings, _Keys(None), position_ids)
            raise LongspanError(f"the indexer of layer {self.name} did not pass its keys to the cache; {HELP}")
        except CapturedKeys as captured:
            keys = _Keys(info.gather(captured.keys[:, 0])[:, None])
        elements = len(hidden_BLD) * info.length * self.part.num_heads
        each = rows_of_tile(INDEXED_TILE, elements, hidden_BLD.device.type == "cpu")
        for start in range(0, hidden_BLD.shape[1], each):
            block = slice(start, start + each)
            cos_sin = tuple(x[:, block] for x in embeddings)
            parts.append(self.own(hidden_BLD[:, block], cos_sin, keys, position_ids[:, block]))
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
