"""Point a model's attention layers at longspan's attention, and correct what depends on the whole sequence."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from longspan.attn.kernels.choice import AnyKernel
from longspan.attn.tree import Trees, along_paths, path_lengths
from longspan.cache.latent import LatentLayer, latent_layer_of
from longspan.comm.shard import shard
from longspan.compat.reading import attention_layers, is_indexed, tower_modules
from longspan.compat.torch_api import to_device
from longspan.compat.transformers_api import attention_of, set_attention
from longspan.core.errors import LongspanError
from longspan.core.memory import FASTEST, Memory
from longspan.hf.batch.documents import tokens_of
from longspan.hf.batch.shard import SequenceInfo, rotary_positions
from longspan.hf.cache.kv_cache import CachedInfo
from longspan.hf.forward.attention import NAME, Chooser, LayerBinding
from longspan.hf.forward.blocks import BlockLayer, PooledLayer, SelectedLayer
from longspan.hf.forward.compressed import CompressedLayer
from longspan.hf.forward.indexed import IndexedLayer
from longspan.hf.forward.stage import ForwardCall, Stage
from longspan.hf.model.support import HELP


class AttentionLayers(Stage):
    """The attention layers of a model, which are pointed at longspan; raise if one bypassed it.

    The model's config is copied first: another model may share it.

    Attributes:
        layers: in the order of the model.
        counts_tokens: whether a layer scales its queries by one list of positions for all rows.
        ropes_of_length: kind and original positions of each RoPE whose frequencies depend on the length.
        max_position: the largest position id of the forward in progress, for these.
        alone: of an elastic batch, the largest position of each kind of document and its places among my tokens.
    """

    def __init__(self, model: PreTrainedModel, kernel: AnyKernel, memory: Memory = FASTEST) -> None:
        self.layers, self.counts_tokens, self.max_position = list[LayerBinding](), False, 0
        self.ropes_of_length, self.alone = set[tuple[str, int]](), list[tuple[int, Tensor]]()
        memo: dict[int, Any] = {}
        configured = [m for m in model.modules() if isinstance(m.__dict__.get("config"), PreTrainedConfig)]
        for module in configured:
            module.config = copy.deepcopy(module.config, memo)
        towers = tower_modules(model)
        text = {id(m.config): m.config for m in configured if m not in towers}
        plain = [(m.config, attention_of(m.config)) for m in configured if id(m.config) not in text]
        for config in text.values():
            set_attention(config, NAME)
        for config, name in plain:  # a model's config sets its tower's, too
            set_attention(config, name)
        for path, layer in attention_layers(model).items():
            bound = LayerBinding(path, kernel, memory)
            bound.causal = getattr(layer, "is_causal", True)
            bound.latents = latent_layer_of(layer, getattr(layer, "config", None))
            bound.chooser = _chooser_of(layer, path, bound.latents)
            layer.longspan_layer = bound  # type: ignore[assignment]
            self.layers.append(bound)
            if getattr(layer, "attn_temperature_tuning", False):
                self.counts_tokens = True
                layer.register_forward_pre_hook(_count_global_positions, with_kwargs=True)
                layer.register_forward_hook(_check_counted, with_kwargs=True)
        for module in model.modules():
            found = ropes_of_length(module)
            if found:
                self.ropes_of_length |= found
                module.forward = self._for_whole_batch(module.forward)

    def check(self, call: ForwardCall) -> None:
        """Raise for documents and trees that the layers would refuse, on the ranks that have them."""
        info, name = call.info, call.traits.name
        for chooser in (layer.chooser for layer in self.layers if layer.chooser is not None):
            chooser.check(name, info)
        if call.cache is not None:
            return
        rows = info.nodes or (info.segments if info.elastic else None) or ()
        if self.counts_tokens and len(set(rows)) > 1:
            raise LongspanError(
                f"{name} scales the tokens of all rows by one list of positions, and the documents or trees of "
                f"these rows differ; give one row (longspan.pack_tree makes one)"
            )
        if info.nodes is not None:
            if not all(layer.causal for layer in self.layers):
                raise LongspanError(f"the layers of {name} attend in both directions, and a tree (`tin` and "
                                    f"`tout`) has paths; give it each sequence by itself")  # fmt: skip
            self._check_lengths(name, info.nodes)
        if info.nodes or info.segments or info.visible or info.bidirectional:
            for layer in {layer.causal: layer for layer in reversed(self.layers)}.values():
                layer.check_mask(info)

    def _check_lengths(self, name: str, trees: Trees) -> None:
        """Raise for paths that would get different frequencies: they share their prefixes."""
        for kind, original in self.ropes_of_length:
            lengths = sorted(n for row in trees for n in path_lengths(row))
            low, high = lengths[0], lengths[-1]
            if high > original and (low != high if kind == "dynamic" else low <= original):
                raise LongspanError(
                    f"the paths of this tree have {low} to {high} tokens, and {name} ({kind} RoPE) gives "
                    f"sequences beyond its {original} original positions other frequencies, so they share no prefix; "
                    f"pack long sequences in trees of their own, or leave out shared_prefixes"
                )

    def before(self, call: ForwardCall) -> None:
        self.max_position = call.info.max_position
        self.alone = []
        if call.info.elastic and self.ropes_of_length:
            mine = shard(_last_positions(call), call.info.sp)
            last, kinds, counts = mine.unique(return_inverse=True, return_counts=True)
            device = tokens_of(call.inputs).device
            places = [to_device(x, device) for x in kinds.flatten().argsort().split(counts.tolist())]
            self.alone = list(zip(last.tolist(), places, strict=True))

    def after(self, call: ForwardCall, output: Any) -> Any:
        bypassed = [layer.name for layer in self.layers if layer.choice is None]
        if bypassed:
            raise LongspanError(
                f"layer {bypassed[0]} of {call.traits.name} ({len(bypassed)} of {len(self.layers)} layers) did not "
                f"call its attention through transformers' registry; it cannot be sharded in this version",
                code="LS201",
            )
        return output

    def _for_whole_batch(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return the forward of a RoPE that gets its length from the whole batch instead of this rank's positions."""

        def rotate(x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
            def of(positions: Tensor, last: int) -> Any:
                longer = torch.cat([positions, positions.new_full((*positions.shape[:-1], 1), last)], -1)
                out = forward(x, longer, *args, **kwargs)
                return out[:, :-1] if isinstance(out, Tensor) else tuple(y[:, :-1] for y in out)

            if not self.alone:
                return of(position_ids, self.max_position)
            rows = x.shape[0]
            positions, parts = position_ids.expand(rows, -1).flatten(), list[Any]()
            for last, places in self.alone:
                of(positions[None, :1] * 0, 0)  # dynamic NTK forgets the longest sequence so far
                parts.append(of(positions[None, places], last))
            order = torch.cat([places for _, places in self.alone]).argsort()

            def in_order(parts: Sequence[Tensor]) -> Tensor:
                joined: Tensor = torch.cat(list(parts), 1)[0, order].unflatten(0, (rows, -1))
                return joined

            return in_order(parts) if isinstance(parts[0], Tensor) else tuple(map(in_order, zip(*parts, strict=True)))

        return rotate


def _chooser_of(layer: Any, path: str, latents: LatentLayer | None) -> Chooser | None:
    """Bind a layer whose queries attend to chosen keys; None for another one."""
    if latents is not None and is_indexed(layer):
        return (PooledLayer if hasattr(layer.config, "index_kpool") else IndexedLayer)(layer, path, latents)
    if getattr(layer, "compressor", None) is not None:
        return CompressedLayer(layer, path)
    if getattr(layer, "indexer", None) is None:
        return None
    return SelectedLayer(layer, path) if hasattr(layer.indexer, "token_budget") else BlockLayer(layer, path)


def _last_positions(call: ForwardCall) -> Tensor:
    """Return for each token the largest position of its document, int64 [B, n], on the host; 0 for padding."""
    info, positions = call.info, call.whole.get("position_ids")
    if positions is None:
        positions = torch.arange(info.length)[None]
    positions = rotary_positions(positions)
    positions = (positions.amax(0) if positions.dim() == 3 else positions).expand(info.rows, -1)
    last = torch.zeros_like(positions)
    for b, row in enumerate(info.segments or (((0, info.length),),) * info.rows):
        for start, stop in row:
            last[b, start:stop] = positions[b, start:stop].max()
    return last


def ropes_of_length(module: nn.Module) -> set[tuple[str, int]]:
    """Return kind and original positions of a RoPE's tables whose frequencies depend on the length of the batch."""
    kinds, found = getattr(module, "rope_type", None), set[tuple[str, int]]()
    for table, kind in kinds.items() if isinstance(kinds, dict) else [(None, kinds)]:
        if kind in ("dynamic", "longrope"):
            tables: Any = module.config.rope_parameters  # type: ignore[union-attr]
            stated = (tables if table is None else tables[table]).get("original_max_position_embeddings")
            found.add((kind, int(stated if kind == "longrope" else module.original_max_seq_len)))  # type: ignore[arg-type]
    return found


class _TokensBefore:
    """Replaces a layer's KV cache, stores nothing: layers that count tokens from its length get global positions."""

    def __init__(self, positions: Tensor) -> None:
        self.before = positions - torch.arange(len(positions), device=positions.device)
        self.called = False

    def get_seq_length(self, *_: Any) -> Tensor:
        self.called = True
        return self.before

    def update(self, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        self.called = True
        return key, value


def _count_global_positions(layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """Hook of layers that scale queries by the token's position (Llama-4's attention temperature)."""
    info, positions = kwargs.get("longspan"), None
    if isinstance(info, CachedInfo):
        if info.step.sharded:
            positions = info.step.past + info.sp.positions(info.step.new)
        elif info.step.static is not None:
            positions = info.step.static.index
    elif isinstance(info, SequenceInfo):
        key = "global positions"
        positions = info.prepared[key] = info.prepared[key] if key in info.prepared else _positions_in_sequences(info)
    return args, kwargs if positions is None else {**kwargs, "cache": _TokensBefore(positions)}


def _positions_in_sequences(info: SequenceInfo) -> Tensor:
    """Return the positions of my tokens in the whole sequence, in a document of an elastic batch, or along a path."""
    positions = info.sp.positions(info.length)
    if info.nodes is not None:
        return along_paths(info.nodes, positions)[0][0]
    if info.elastic and info.segments and info.segments[0]:  # packed, but counted as if each were alone
        starts = to_device(torch.tensor([start for start, _ in info.segments[0]]), positions.device)
        positions = positions - starts[torch.searchsorted(starts, positions, right=True) - 1]
    return positions


def _check_counted(layer: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
    tokens = kwargs.get("cache")
    if isinstance(tokens, _TokensBefore) and not tokens.called:
        raise LongspanError(
            f"layer {layer.longspan_layer.name} did not use its cache, so it would count this rank's tokens instead of "
            f"the whole sequence's; {HELP}"
        )
