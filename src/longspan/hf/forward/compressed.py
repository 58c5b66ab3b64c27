"""DeepSeek-V4's layers: a window of tokens, and entries that each compress some neighbouring tokens of the sequence.

A compressor makes an entry of every `compress_rate` tokens. A query attends to its window, and to the entries whose
tokens it sees: to all of them, or to those that an indexer chooses by entries of its own. Queries stay on their rank.
What the compressors project from my tokens, and the keys of the window, are gathered; every rank makes all entries.

The model's own modules compute entries and scores. An entry counts tokens of the row, whatever documents they belong
to, so packed documents and padding on the left, which one process does not separate either, are refused.

With a cache, a rank stores the entries of its tokens (`longspan.cache.indexed`). Every rank stores the keys of the last
window, and what the compressors projected from the tokens of windows that are not complete.

Shape suffixes: B batch, L my tokens, Q queries of a block, N all tokens, C entries, T chosen entries, D elements.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from longspan.attn.indexed import Packing, WindowAndEntries, attend_to_chosen
from longspan.attn.score import Scores
from longspan.cache.attend import CacheStep
from longspan.cache.indexed import attend_compressed, keys_to_score, whole_scores
from longspan.cache.layer_cache import LayerCache
from longspan.cache.recurrent import RecurrentLayer
from longspan.compat.torch_api import to_device
from longspan.core.errors import LongspanError
from longspan.core.tile_sizes import INDEXED_TILE, rows_of_tile
from longspan.hf.batch.shard import SequenceInfo
from longspan.hf.cache.kv_cache import CachedInfo
from longspan.hf.forward.attention import MaskRequest, padding_sees_itself
from longspan.hf.forward.indexed import ChoosingLayer, my_positions, replaced
from longspan.hf.model.support import HELP


class CompressedLayer(ChoosingLayer):
    """Binds an attention layer with a compressor; holds what its call in progress attends to."""

    caches, no_rollback = True, "compresses neighbouring tokens"

    def __init__(self, layer: Any, name: str) -> None:
        super().__init__(layer, name, layer.compressor, self._compress)
        self.window, self.number = int(layer.sliding_window), layer.layer_idx
        self.chosen: tuple[Tensor | None, Tensor] | None = None

    def attend(
        self, qkv: tuple[Tensor, Tensor, Tensor], _: Any, request: MaskRequest, scores: Scores, info: SequenceInfo
    ) -> Tensor:
        """Attend from my tokens to their windows and to entries, which follow my tokens' keys; keys are values."""
        (q, k, _), chosen, self.chosen = qkv, self.chosen, None
        if chosen is None:
            raise LongspanError(f"the compressor of layer {self.name} was not called before its attention; {HELP}")
        mine, entries = k[:, : q.shape[1]], k[:, q.shape[1] :]
        if isinstance(info, CachedInfo):
            return self._attend_with_cache(q, info.gather(mine)[:, :, 0], entries[:, :, 0], chosen, scores, info)
        positions, kv = info.sp.positions(info.length), torch.cat([info.gather(mine), entries], 1)
        lists = WindowAndEntries(positions, info.rows, self.window, info.length, entries.shape[1], *chosen)
        both = slice(0, kv.shape[3])
        out = attend_to_chosen(q, kv, lists, Packing(both, both), scores.scale_of(q.shape[3]), scores.sinks)
        return out if info.padding is None else padding_sees_itself(out, mine, info.padding)

    def _attend_with_cache(
        self,
        q: Tensor,
        kv_BND: Tensor,
        entries_BCD: Tensor,
        chosen: tuple[Tensor | None, Tensor],
        scores: Scores,
        info: CachedInfo,
    ) -> Tensor:
        """Store all new keys and entries, and attend as `attend` does."""
        step, state = info.step.of_entries(self.part.compress_rate), info.cache.recurrent_layer(self.name)
        near = kv_BND if state.conv is None else torch.cat([state.conv, kv_BND], 1)
        state.conv = near[:, max(0, near.shape[1] - self.window + 1) :].clone()
        N, C = near.shape[1], step.kv_placement.length
        positions = to_device(my_positions(info), q.device) - info.length + N
        lists = WindowAndEntries(positions, info.rows, self.window, N, C, *chosen)
        keys = step.index_keys.pop(self.number, None)
        return attend_compressed(step, self._store(info), q, near, entries_BCD, keys, lists, scores)

    def _store(self, info: CachedInfo) -> LayerCache:
        return info.cache.layer_cache(self.number, rate=self.part.compress_rate)

    def _compress(
        self, hidden_BLD: Tensor, q_BLD: Tensor, position_ids: Tensor, cache: None, layer_idx: int
    ) -> tuple[Tensor, None]:
        """Return the entries of the whole sequence, `[B, 1, C, D]`; with a cache, the new ones."""
        info = self.facts()
        indexer = getattr(self.part, "indexer", None)
        one = hidden_BLD[:, :1], q_BLD[:, :1], position_ids[:, :1], self._windows(self.part, info), layer_idx
        with contextlib.ExitStack() as stack:
            stack.enter_context(_gathered(self.part, hidden_BLD, info))
            if indexer is not None:
                nothing = torch.zeros(len(hidden_BLD), 1, 0, dtype=torch.int64, device=hidden_BLD.device)
                stack.enter_context(replaced(indexer, lambda *_: nothing))
            entries, _ = self.own(*one)
        seen_BL = (position_ids + 1) // self.part.compress_rate  # entries whose tokens a query sees
        seen_BL = seen_BL.expand(info.rows, -1)
        best = None
        if indexer is not None:
            with torch.no_grad():
                best = self._choose(indexer, hidden_BLD, q_BLD, position_ids, seen_BL, info)
        self.chosen = best, seen_BL
        return entries, None

    def _windows(self, part: Any, info: SequenceInfo) -> _Windows | None:
        """Return what stands for the cache of a compressor, or of its indexer."""
        if not isinstance(info, CachedInfo):
            return None
        name = "compressor" if part is self.part else "indexer"
        return _Windows(info.cache.recurrent_layer(f"{self.name}.{name}"), part, info.step.past)

    def _choose(
        self, indexer: Any, hidden_BLD: Tensor, q_BLD: Tensor, position_ids: Tensor, seen_BL: Tensor, info: SequenceInfo
    ) -> Tensor:
        """Return the entries that my queries attend to, int32 [B, L, T], -1 for none."""
        scorer, found = indexer.scorer, dict[str, Tensor]()
        score = scorer.forward

        def capture(q: Tensor, keys_BCD: Tensor, hidden: Tensor) -> Tensor:
            found["keys"] = keys_BCD
            return hidden.new_zeros(*hidden.shape[:2], keys_BCD.shape[1])

        windows = self._windows(indexer, info)
        with _gathered(indexer, hidden_BLD, info), replaced(scorer, capture):
            indexer(hidden_BLD[:, :1], q_BLD[:, :1], position_ids[:, :1], windows, 0)

        (B, L, _), C = hidden_BLD.shape, found["keys"].shape[1]
        step: CacheStep | None = None
        if isinstance(info, CachedInfo):
            step = info.step.of_entries(self.part.compress_rate)
            found["keys"] = keys_to_score(step, self._store(info), self.number, found["keys"])
            C = step.kv_placement.length

        def scored(q: Tensor, _: Tensor, hidden: Tensor) -> Tensor:
            scores: Tensor = score(q, found["keys"], hidden)
            found["scores"] = scores if step is None else whole_scores(step, scores)
            return scores[..., :0]

        entry_C = torch.arange(C, device=hidden_BLD.device)
        each = rows_of_tile(INDEXED_TILE, B * max(1, C) * indexer.num_heads, hidden_BLD.device.type == "cpu")
        parts = list[Tensor]()
        for start in range(0, L, each):
            block = slice(start, start + each)
            hidden, q, positions = hidden_BLD[:, block], q_BLD[:, block], position_ids[:, block]
            none = hidden.new_zeros(B, 0, 2 * indexer.head_dim)
            with (
                replaced(indexer.kv_proj, lambda _, none=none: none),
                replaced(indexer.gate_proj, lambda _, none=none: none),
                replaced(scorer, scored),
            ):
                indexer(hidden, q, positions, None, 0)
            future_BQC = entry_C >= seen_BL[:, block, None]
            best = found["scores"].masked_fill(future_BQC, -math.inf).topk(min(indexer.index_topk, C), -1).indices
            parts.append(best.masked_fill(best >= seen_BL[:, block, None], -1).int())
        return torch.cat(parts, 1)


class _Windows:
    """Stands for a compressor's cache: completes its windows by cached projections, and caches those of open windows.

    Where windows overlap, the last complete one is cached, too, and its entry made a second time.
    """

    def __init__(self, state: RecurrentLayer, part: Any, past: int) -> None:
        self.state, self.past, self.rate, self.head_dim = state, past, part.compress_rate, part.head_dim
        self.again = 0  # entries that were made before

    @property
    def layers(self) -> Any:
        return self

    def __getitem__(self, layer: int) -> Any:
        return self

    def store_compression_weights(self, _: str, kv: Tensor, gate: Tensor) -> tuple[Tensor, Tensor, int]:
        rate, width, past, end = self.rate, kv.shape[2], self.past, self.past + kv.shape[1]
        both = torch.cat([kv, gate], 2)
        if self.state.conv is not None:
            both = torch.cat([self.state.conv, both], 1)
        first, complete = end - both.shape[1], end // rate * rate  # tokens
        self.again = past // rate - first // rate
        kept = complete - rate if width > self.head_dim else complete
        self.state.conv = both[:, max(0, kept - first) :].clone()
        ready = both[:, : complete - first if complete > past else 0]
        return ready[..., :width], ready[..., width:], first

    def update_overlap_state(self, *_: Any) -> tuple[None, None]:
        return None, None

    def update_compressor_states(self, _: str, entries_BCD: Tensor) -> Tensor:
        return entries_BCD[:, self.again :]


@contextlib.contextmanager
def _gathered(module: Any, hidden_BLD: Tensor, info: SequenceInfo) -> Iterator[None]:
    """Let a compressor's projections return those of all tokens; with a cache, of all new ones."""
    kv, gate = (info.gather(linear(hidden_BLD)) for linear in (module.kv_proj, module.gate_proj))
    with replaced(module.kv_proj, lambda _: kv), replaced(module.gate_proj, lambda _: gate):
        yield
