"""The sharded KV cache of a parallelized model, a `Cache` of transformers.

Each rank holds keys and values of its KV heads (tensor and ulysses axes) and of its tokens (ring axis). With at least
ulysses * tensor KV heads, a rank holds 1 / (ring * ulysses * tensor) of the cache of one process. To transformers, the
cache contains all tokens; it can be reused in the next call, cropped, and reordered.
"""

from __future__ import annotations

import functools
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers.cache_utils import Cache

from longspan.attn.segments import padding_segments
from longspan.cache import folder as files
from longspan.cache.attend import CacheStep, start_step
from longspan.cache.codec import codec_of
from longspan.cache.layer_cache import LayerCache
from longspan.cache.offload import OffloadedLayerCache, Staging
from longspan.comm.arguments import check_module
from longspan.comm.errors import on_every_rank
from longspan.comm.objects import gather_objects
from longspan.comm.shard import shard
from longspan.core.cache_dtype import OFFLOADS, holds_latent
from longspan.core.errors import LongspanError
from longspan.core.heads import split_groups, split_heads
from longspan.core.kv_placement import GENERATED_RUN, KVPlacement
from longspan.core.validation import as_path, check_count, check_flag, check_number, checked_call, format_value
from longspan.hf.batch import SequenceInfo, VisibleKeys, check_cache_position
from longspan.hf.forward.outputs import PickedTokens
from longspan.hf.state import state_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from longspan.cache.latent import LatentLayer
    from longspan.comm.mesh import SequenceSharding
    from longspan.core.layout import Span
    from longspan.core.segments import Segments


@dataclass(frozen=True)
class CachedInfo(SequenceInfo):
    """Facts about a forward with a cache. `length` and `segments` include the cached tokens.

    Attributes:
        cache: the cache.
        step: the forward's new tokens.
        keep: number of last tokens whose logits every rank needs; 0: each rank needs those of its own tokens.
    """

    cache: ShardedCache | None = None
    step: CacheStep | None = None
    keep: int = 0


@dataclass(frozen=True)
class NewTokens:
    """The checked arguments of a forward with a cache.

    Attributes:
        new: number of tokens after the cached ones.
        segments: of the whole sequence; None without padding.
        visible: which keys are real, if the attention mask has zeros between the ones of a row.
        positions: position ids of the new tokens, int64 [1 or rows, new].
        max_position: the largest position; in chunked prefill, that of the whole prompt.
    """

    new: int
    segments: Segments | None
    visible: VisibleKeys | None
    positions: Tensor
    max_position: int


class ShardedCache(Cache):  # type: ignore[misc]
    """A KV cache sharded over the ranks of a parallelized model.

    `model.generate(...)` makes one itself. Make it first to reuse it in the next turn of a conversation:

        cache = longspan.ShardedCache(model)
        model.generate(ids, past_key_values=cache)
        model.generate(more_ids, past_key_values=cache)  # `ids`, what was generated, and what follows

    Args:
        model: what `longspan.parallelize` returned.
        room: tokens to allocate at the start; a full layer grows by an eighth.
        dtype: "exact": store keys and values as computed; generation equals that of one process. "int8", "fp8": a byte
            per element and an fp32 scale per head and token; its error is in docs/how-to/inference.md.
        offload: "none": on the device. "host": in host memory. Each layer is copied to the device when it runs, while
            the next one is prefetched, so the device holds at most two layers.
        latent: for DeepSeek's attention (MLA), store latent vectors on every Ulysses rank if they are smaller than the
            keys and values of its heads. False: never.

    Attributes:
        kv_placement: which ring rank holds which tokens.
        layer_caches: each layer's keys and values on this rank.
        rooms: device buffers, with `offload="host"`; else None.

    Raises:
        LongspanError: for a model that is not parallelized or has a lossy wire dtype; an unknown dtype or offload.
    """

    @checked_call(model=check_module, room=check_count, latent=check_flag)
    def __init__(
        self, model: Any, room: int = 0, dtype: str = "exact", offload: str = "none", latent: bool = True
    ) -> None:
        state = state_of(model)
        if state.sp.wire_dtype != "exact":
            raise LongspanError(
                f"wire_dtype={state.sp.wire_dtype!r} is for training and scoring: what a model with a KV cache "
                f"exchanges is exact; to generate, parallelize it with a sharding of wire_dtype='exact'"
            )
        super().__init__(layers=[])
        self.config = state.config
        self.sp: SequenceSharding = state.sp
        self.kv_placement = KVPlacement(self.sp.ring_size)
        self.codec = codec_of(dtype)
        if offload not in OFFLOADS:
            raise LongspanError(f"offload={offload!r} of a cache is unknown; choose {', '.join(OFFLOADS)}")
        self.latent = latent
        self.staging = Staging.on(self.sp.device) if offload == "host" else None
        self.room = (
            -(-room // self.sp.ring_size) + GENERATED_RUN if room else 0
        )  # ranks differ by what is generated in a run
        self.layer_caches: dict[int, LayerCache] = {}
        self.announced = 0
        self.rollback: int | None = None  # length that a crop may go back to, while drafted tokens may be rejected
        self._step: CacheStep | None = None  # of the forward under way

    # --- what a forward does

    def read(self, batch: Mapping[str, Any]) -> NewTokens:
        """Check the arguments of a forward with this cache; change nothing.

        They are `input_ids` or `inputs_embeds` of the new tokens, equal on every rank of the sequence group, and
        optionally their `position_ids` and an `attention_mask` [B, all tokens].

        Raises:
            LongspanError: for arguments that do not fit the cache, or need a forward without one.
        """
        _refuse(batch)
        self.check_sound()
        tokens: Tensor = batch["input_ids"] if batch.get("input_ids") is not None else batch["inputs_embeds"]
        rows, new = tokens.shape[:2]
        past = self.kv_placement.length
        if not new:
            raise LongspanError(
                f"there is no new token behind the {past} that the cache holds; give those that follow, or crop it"
            )
        if self.batch_size not in (-1, rows):
            raise LongspanError(f"the cache holds {self.batch_size} rows, the batch has {rows}; make a new cache")
        mask = batch.get("attention_mask")
        segments, visible = _segments(mask, rows, past + new)
        check_cache_position(batch.get("cache_position"), past, new)
        positions = batch.get("position_ids")
        if positions is None:
            positions = _positions(None if segments is None else mask, past, new, tokens.device)
        positions = positions if positions.dim() > 1 else positions[None]
        if positions.shape[-1] != new:
            raise LongspanError(
                f"`position_ids` has the shape {tuple(positions.shape)}, the {rows} rows have {new} new tokens behind "
                f"{past} in the cache"
            )
        return NewTokens(new, segments, visible, positions, max(int(positions.max()), self.announced - 1))

    def begin(self, batch: Mapping[str, Any], tokens: NewTokens) -> tuple[dict[str, Any], CachedInfo]:
        """Shard the new tokens, add them to the cache's length, and return this rank's inputs and the `CachedInfo`."""
        sp, past = self.sp, self.kv_placement.length
        step = start_step(sp, self.kv_placement, tokens.new)
        cut = step.sharded
        keep = batch.get("logits_to_keep")
        info = CachedInfo(
            length=past + tokens.new,
            segments=tokens.segments,
            max_position=tokens.max_position,
            layout=sp.layout,
            visible=tokens.visible,
            cache=self,
            step=step,
            keep=keep or 0,
        )
        parts = {name: batch.get(name) for name in ("input_ids", "inputs_embeds", "token_type_ids")}
        parts["position_ids"] = tokens.positions
        out = {key: value for key, value in batch.items() if key not in (*parts, "cache_position")}
        out |= {key: shard(x, sp) if cut else x for key, x in parts.items() if x is not None}
        out |= {"longspan": info, "attention_mask": None, "use_cache": True}
        self._step = step
        if self.staging is not None:
            self.staging.clear()
            self.staging.prefetch(0, sum(b - a for a, b in step.local_spans))
        return out, info

    def check_sound(self) -> None:
        """Raise if a forward failed half-way, so that some layers contain more tokens than others.

        Raises:
            LongspanError: with the number of tokens that all layers contain.
        """
        if self._step is not None:
            raise LongspanError(
                f"a forward with this cache did not end (it broke off behind {self._step.past} tokens), so its layers "
                f"may differ; make a new one, or reset it"
            )

    def end(self) -> None:
        """Mark the forward as complete."""
        self._step = None

    def store(self, layer: int, reach: int | None = None) -> LayerCache:
        """Return the store of a layer's keys and values on this rank.

        Args:
            layer: its number.
            reach: size of its window or chunk, if it has one.
        """
        if layer not in self.layer_caches:
            room = self.room if reach is None else min(self.room, reach)
            if self.staging is None:
                self.layer_caches[layer] = LayerCache(room, self.codec)
            else:
                self.layer_caches[layer] = OffloadedLayerCache(self.staging, room, self.codec)
        return self.layer_caches[layer]

    def holds_latents(self, store: LayerCache, latents: LatentLayer, qkv: tuple[Tensor, Tensor, Tensor]) -> bool:
        """Return whether a layer stores latent vectors; `longspan.core.cache_dtype.holds_latent` decides at first use.

        Args:
            store: the layer's.
            latents: of the layer.
            qkv: of new tokens, `[B, L, heads, head_dim]`.
        """
        if store.rows is None:
            sp, (q, k, v) = self.sp, qkv
            shards = split_heads(q.shape[2], k.shape[2], sp.ulysses_size, kv_replication=sp.kv_replication)
            most, elements = max(shard.kv_heads for shard in shards), k.shape[3] + v.shape[3]
            shared = self.latent and sp.tensor_size == 1 and (sp.ulysses_size == 1 or sp.kv_replication)
            store.shared = latents.rank if holds_latent(latents.width, most, elements, shared) else 0
        return store.shared > 0

    def describe(self) -> str:
        """Return what must be equal on every rank, as text."""
        rows = "" if self.batch_size < 0 else f" in {self.batch_size} rows"
        code = "" if self.codec.name == "exact" else f", {self.codec.name}"
        code += "" if self.staging is None else ", in the host's memory"
        code += "" if self.latent else ", without latent vectors"
        broken = "" if self._step is None else ", in which a forward broke off"
        return f"a cache of {self.kv_placement.length} tokens{rows}{code}{broken}"

    # --- the interface of transformers.Cache

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the new keys and values: attention stores them after the all-to-all."""
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the tokens of all ranks; during a forward those before it."""
        return self.kv_placement.length if self._step is None else self._step.past

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Return the size of a mask, though none is made."""
        return self.get_seq_length() + query_length, 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Return the tokens before the new ones."""
        return self.get_seq_length()

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """No limit."""
        return -1

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        """No limit."""
        return -1

    @property
    def batch_size(self) -> int:
        """Rows; -1 while empty."""
        return next((store.rows for store in self.layer_caches.values() if store.rows is not None), -1)

    @property
    def is_compileable(self) -> bool:
        """No."""
        return False

    @property
    def is_initialized(self) -> bool:
        """Whether it holds anything."""
        return self.kv_placement.length > 0

    @property
    def is_croppable(self) -> bool:
        """Whether every layer holds all tokens."""
        return all(store.start == 0 for store in self.layer_caches.values())

    @property
    def is_sliding(self) -> list[bool]:
        """Masks are asked for by what a layer is, not by its cache."""
        return [False]

    is_linear = is_dummy = is_sliding

    def __len__(self) -> int:
        return len(self.layer_caches)

    def reset(self) -> None:
        """Remove all tokens."""
        self.kv_placement, self.layer_caches, self._step, self.rollback = KVPlacement(self.sp.ring_size), {}, None, None
        if self.staging is not None:
            self.staging.reset()

    @checked_call(max_length=functools.partial(check_number, whole=True))
    def crop(self, max_length: int) -> None:
        """Keep only the first tokens, on every rank.

        Args:
            max_length: above 0: tokens to keep; below 0: minus the tokens to remove; 0: do nothing (as transformers).

        Raises:
            LongspanError: if a layer's sliding window has discarded tokens that it would need again, or after a
                forward that failed.
        """
        past = self.kv_placement.length
        length = min(past, max_length if max_length > 0 else max(0, past + max_length))
        kept = self.rollback is not None and length >= self.rollback
        if self.rollback is not None:
            self.rollback = length
        if length == past:
            return
        self.check_sound()
        behind = None if kept else next((layer for layer, store in self.layer_caches.items() if store.start), None)
        if behind is not None:
            raise LongspanError(
                f"layer {behind} has a sliding window and stores no tokens before {self.layer_caches[behind].start}: "
                f"the cache of {past} tokens cannot be cropped to {length}; make a new one for the first {length}"
            )
        self.kv_placement.crop(length)
        for store in self.layer_caches.values():
            store.crop(self.kv_placement.count(self.sp.ring_rank, store.start))

    def activate_past_recording(self) -> None:
        """Until the next `crop`, keep tokens that have left a sliding window (assisted generation)."""
        if self.rollback is None:
            self.rollback = self.kv_placement.length

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder the rows."""
        for store in self.layer_caches.values():
            store.select_rows(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some rows."""
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row."""
        rows = torch.arange(max(0, self.batch_size)).repeat_interleave(repeats)
        self.reorder_cache(rows)

    # --- on a disk

    @checked_call(folder=as_path)
    def save(self, folder: str | Path) -> None:
        """Write the cache to a folder, a file per rank; `load` reads it on any mesh. Collective in the sequence group.

        Args:
            folder: new, empty, or a saved cache, which is replaced once this one is complete. All ranks of a replica
                see it; each replica needs its own.

        Raises:
            LongspanError: on every rank: for a cache that is empty or incomplete, a folder with other content, or an
                I/O error.
        """
        path, rank, group = Path(folder), self.sp.replica_rank, self.sp.replica_group

        @files.os_errors_as_longspan_errors()
        def begin_writing() -> None:
            self.check_sound()
            if not self.is_initialized:
                raise LongspanError("the cache holds no tokens; save it after a forward")
            if rank == 0:
                files.check_target(path)
                shutil.rmtree(files.partial(path), ignore_errors=True)
                files.partial(path).mkdir(parents=True)

        @files.os_errors_as_longspan_errors()
        def write() -> files.CacheFile:
            tensors = {f"{i}.{n}": x for i, store in self.layer_caches.items() for n, x in enumerate(store.parts)}
            written = files.write_file(path, rank, tensors)
            heads = {str(i): self._of_all(store)[1] for i, store in self.layer_caches.items()}
            return files.CacheFile(*written, tuple(self.kv_placement.runs[self.sp.ring_rank]), heads)

        @files.os_errors_as_longspan_errors()
        def end() -> None:
            if rank == 0:
                each = {str(i): (self._of_all(store)[0], store.start) for i, store in self.layer_caches.items()}
                layers = {
                    i: {"heads": heads, "start": start, "shared": self.layer_caches[int(i)].shared}
                    for i, (heads, start) in each.items()
                }
                index = {"length": self.kv_placement.length, "rows": self.batch_size, "dtype": self.codec.name}
                files.publish(path, {**index, "model": _facts(self.config), "layers": layers}, parts)

        on_every_rank(begin_writing, group)
        parts = gather_objects(on_every_rank(write, group), group)
        on_every_rank(end, group)

    def _of_all(self, store: LayerCache) -> tuple[tuple[int, int], Span]:
        """Return a layer's query and KV heads in the whole model, and the KV heads of this rank.

        A store numbers heads within its tensor rank.
        """
        (q_heads, kv_heads), (start, stop) = store.heads, store.local_kv_heads
        if self.sp.tensor_size > 1:
            config = self.config.get_text_config()
            q_heads = config.num_attention_heads
            kv_heads = getattr(config, "num_key_value_heads", None) or q_heads
            first = split_groups(q_heads, kv_heads, self.sp.tensor_size)[self.sp.tensor_rank].kv_start
            start, stop = start + first, stop + first
        return (q_heads, kv_heads), (start, stop)

    @classmethod
    @checked_call(folder=as_path, model=check_module, room=check_count)
    def load(cls, folder: str | Path, model: Any, room: int = 0, offload: str = "none") -> ShardedCache:
        """Load a saved cache onto this model's mesh. Collective in the sequence group.

        Args:
            folder: where `save` wrote it.
            model: with the same config and weights as the saving one; weights are not compared.
            room: as for a new cache.
            offload: as for a new cache.

        Raises:
            LongspanError: on every rank: for missing or damaged files, or a model with another config, naming the
                difference.
        """
        path, empty = Path(folder), cls(model, offload=offload)
        sp = empty.sp

        @files.os_errors_as_longspan_errors()
        def check() -> tuple[dict[str, Any], list[files.CacheFile]]:
            index, parts = files.read_index(path)
            mine, saved = _facts(empty.config), index["model"]
            differ = sorted(key for key in mine.keys() | saved.keys() if mine.get(key) != saved.get(key))
            if differ:
                shown = ", ".join(f"{key}: {saved.get(key)} there, {mine.get(key)} here" for key in differ[:5])
                raise LongspanError(f"{path} is the cache of another model: {shown}")
            for part in parts[sp.replica_rank :: sp.size * sp.tensor_size]:
                files.check_file(path, part)
            return index, parts

        index, parts = on_every_rank(check, sp.replica_group)
        cache = cls(model, room=max(room, index["length"]), dtype=index["dtype"], offload=offload)
        cache.kv_placement.add(sp.layout, index["length"])

        @files.os_errors_as_longspan_errors()
        def read() -> None:
            for layer, facts in index["layers"].items():
                # A layer with a window has discarded older tokens, and needs no room for them.
                store, (q_heads, kv_heads) = cache.store(int(layer), 0 if facts["start"] else None), facts["heads"]
                store.shared = facts.get("shared", 0)  # a folder of an older version has none
                parts_of_one = (1 if store.shared else 2) * (1 if cache.codec.name == "exact" else 2)
                names = [str(n) for n in range(parts_of_one)]
                here = split_groups(q_heads, kv_heads, sp.tensor_size)[sp.tensor_rank]
                store.heads = here.q_heads, here.kv_heads
                shards = split_heads(*store.heads, sp.ulysses_size, kv_replication=sp.kv_replication)
                mine = shards[sp.ulysses_rank]
                store.local_kv_heads = mine.kv_start, mine.kv_stop
                runs = tuple(cache.kv_placement.runs[sp.ring_rank])
                heads = cache._of_all(store)[1]
                tensors = files.read_layer(path, parts, layer, names, facts["start"], runs, heads)
                filled = tensors if cache.staging is not None else [x.to(sp.device) for x in tensors]
                store.fill(filled, facts["start"])

        on_every_rank(read, sp.replica_group)
        return cache

    @property
    def tokens_here(self) -> int:
        """New tokens that this rank computes in the forward in progress, including padding."""
        step = self._step
        assert step is not None
        return self.sp.layout.local_length(step.new) if step.sharded else step.new

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values that this rank holds, on the device or in the host's memory."""
        return sum(store.nbytes for store in self.layer_caches.values())

    @property
    def device_nbytes(self) -> int:
        """Peak bytes of keys and values on the device with offload; else `nbytes`."""
        return self.nbytes if self.staging is None else self.staging.peak_bytes


def last_tokens(hidden: Tensor, info: CachedInfo, sp: SequenceSharding) -> Tensor:
    """Return the hidden states of the last `info.keep` new tokens, `[B, keep, D]`, on every rank of the group.

    Args:
        hidden: of my new tokens `[B, L, D]` if they are sharded, else of all.
        info: of the forward.
        sp: the sharding.
    """
    step = info.step
    assert step is not None
    if not step.sharded:
        return hidden[:, -info.keep :]
    if info.keep == 1:  # one rank's token, sent once
        owner, at = sp.layout.locate_token(step.new, step.new - 1)
        found = hidden[:, at : at + 1].contiguous() if owner == sp.rank else torch.empty_like(hidden[:, :1])
        assert sp.group is not None
        dist.broadcast(found, group=sp.group, group_src=owner)
        return found
    return PickedTokens(range(max(0, step.new - info.keep), step.new), step.new, sp).gather(hidden)


def _facts(config: Any) -> dict[str, str]:
    """Return the config keys that must equal those of a saved cache."""
    apart = {"_name_or_path", "transformers_version", "architectures", "use_cache"}
    found = config.get_text_config().to_dict()
    return {key: json.dumps(value, sort_keys=True, default=str) for key, value in found.items() if key not in apart}


def _refuse(batch: Mapping[str, Any]) -> None:
    if torch.is_grad_enabled():
        raise LongspanError(
            "a forward with a KV cache has no gradients on a parallelized model; call it under torch.no_grad(), or "
            "without a cache"
        )
    if batch.get("labels") is not None:
        raise LongspanError("a forward with a KV cache gives no loss; leave labels out, or call it without a cache")
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
