"""The KV cache that a parallelized model generates with: transformers' interface, sharded keys and values.

Each rank holds the keys and values of its KV heads (the tensor axis, and of a tensor rank's heads the Ulysses axis) and
of its tokens (the ring axis), so that a cache takes 1 / (ring * ulysses * tensor) of what it takes on one process,
where there are as many KV heads as ulysses * tensor. To transformers it is a `Cache`: it counts all tokens, and can be
kept from one call to the next, cropped, and reordered.
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
from longspan.cache.attend import Step, begin
from longspan.cache.codec import codec_of
from longspan.cache.offload import OffloadedStore, Rooms
from longspan.cache.store import Store
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

if TYPE_CHECKING:
    from collections.abc import Mapping

    from longspan.cache.latent import Latents
    from longspan.comm.mesh import SequenceSharding
    from longspan.core.layout import Span
    from longspan.core.segments import Segments


@dataclass(frozen=True)
class CachedInfo(SequenceInfo):
    """What one rank must know of a forward with a cache. `length` and `segments` are those of the whole sequence.

    Attributes:
        cache: the cache.
        step: the forward's new tokens.
        keep: the number of last tokens whose logits every rank needs; 0: each rank those of its own tokens.
    """

    cache: ShardedCache | None = None
    step: Step | None = None
    keep: int = 0


@dataclass(frozen=True)
class NewTokens:
    """What a model was called with, read and checked.

    Attributes:
        new: tokens behind those of the cache.
        segments: of the whole sequence; None where there is no padding.
        visible: which keys are real, if the attention mask has zeros between the ones of a row.
        positions: position ids of the new tokens, int64 [1 or rows, new].
        max_position: the largest, or of a prompt that comes in chunks that of all of it.
    """

    new: int
    segments: Segments | None
    visible: VisibleKeys | None
    positions: Tensor
    max_position: int


class ShardedCache(Cache):  # type: ignore[misc]
    """A KV cache over the ranks of a parallelized model.

    `model.generate(...)` makes one by itself. Make it beforehand to keep it for the next turn of a conversation:

        cache = longspan.ShardedCache(model)
        model.generate(ids, past_key_values=cache)
        model.generate(more_ids, past_key_values=cache)  # `ids`, what was generated, and what follows

    Args:
        model: what `longspan.parallelize` returned.
        room: tokens to have room for from the start; without it a layer's room grows by an eighth when it is full.
        dtype: "exact": keys and values are held as the model computes them, and what is generated is what one process
            generates. "int8", "fp8": a byte per element, and an fp32 scale per head and token; an approximation
            (docs/how-to/inference.md has its error).
        offload: "none": on the device. "host": keys and values lie in the host's memory; each layer's come to the
            device when it runs, the next one's meanwhile, so that the device never has more than two layers'.
        latent: of DeepSeek's attention (MLA), hold the vectors that keys and values are made of, on every Ulysses rank,
            where they take less there than keys and values of its heads. False: never.

    Attributes:
        kv_placement: which ring rank holds which tokens.
        stores: each layer's keys and values on this rank.
        rooms: what is on the device where they lie in the host's memory; else None.

    Raises:
        LongspanError: for a model that is not parallelized, or whose exchange is lossy; an unknown dtype or offload.
    """

    @checked_call(model=check_module, room=check_count, latent=check_flag)
    def __init__(
        self, model: Any, room: int = 0, dtype: str = "exact", offload: str = "none", latent: bool = True
    ) -> None:
        hooks = next((m.longspan_hooks for m in model.modules() if hasattr(m, "longspan_hooks")), None)
        if hooks is None:
            raise LongspanError(
                f"{type(model).__name__} is not parallelized; a ShardedCache lies over the ranks of a model that "
                f"longspan.parallelize returned"
            )
        if hooks.sp.wire_dtype != "exact":
            raise LongspanError(
                f"wire_dtype={hooks.sp.wire_dtype!r} is for training and scoring: what a model with a KV cache "
                f"exchanges is exact; to generate, parallelize it with a sharding of wire_dtype='exact'"
            )
        super().__init__(layers=[])
        self.config = hooks.config
        self.sp: SequenceSharding = hooks.sp
        self.kv_placement = KVPlacement(self.sp.ring_size)
        self.codec = codec_of(dtype)
        if offload not in OFFLOADS:
            raise LongspanError(f"offload={offload!r} of a cache is unknown; choose {', '.join(OFFLOADS)}")
        self.latent = latent
        self.rooms = Rooms.on(self.sp.device) if offload == "host" else None
        self.room = (
            -(-room // self.sp.ring_size) + GENERATED_RUN if room else 0
        )  # ranks differ by what is generated in a run
        self.stores: dict[int, Store] = {}
        self.announced = 0
        self.rollback: int | None = None  # length that a crop may go back to, while drafted tokens may be rejected
        self._step: Step | None = None  # of the forward under way

    # --- what a forward does

    def read(self, batch: Mapping[str, Any]) -> NewTokens:
        """What a model was called with: `input_ids` or `inputs_embeds` of the new tokens, alike on every rank of the
        sequence group; as wanted `position_ids` of them, and an `attention_mask` [B, all tokens], whose zeros are
        padding at the left end. Nothing is changed.

        Raises:
            LongspanError: for what does not fit the cache, or is not computed with one.
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
        """Return this rank's part of new tokens, without the cache, and what it must know of all of them.

        From now on the cache counts them.
        """
        sp, past = self.sp, self.kv_placement.length
        step = begin(sp, self.kv_placement, tokens.new)
        cut = step.cut
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
        if self.rooms is not None:
            self.rooms.clear()
            self.rooms.expect(0, sum(b - a for a, b in step.owned))
        return out, info

    def check_sound(self) -> None:
        """Refuse a cache in which some layers hold more tokens than others.

        Raises:
            LongspanError: with the tokens that all of them hold.
        """
        if self._step is not None:
            raise LongspanError(
                f"a forward with this cache did not end (it broke off behind {self._step.past} tokens), so its layers "
                f"may differ; make a new one, or reset it"
            )

    def end(self) -> None:
        """The forward has ended."""
        self._step = None

    def store(self, layer: int, reach: int | None = None) -> Store:
        """A layer's keys and values on this rank.

        Args:
            layer: its number.
            reach: tokens of its window or chunk, where it has one.
        """
        if layer not in self.stores:
            room = self.room if reach is None else min(self.room, reach)
            rooms, codec = self.rooms, self.codec
            self.stores[layer] = Store(room, codec) if rooms is None else OffloadedStore(rooms, room, codec)
        return self.stores[layer]

    def holds_latents(self, store: Store, latents: Latents, qkv: tuple[Tensor, Tensor, Tensor]) -> bool:
        """Whether a layer's store holds latent vectors: as it does already, or by
        `longspan.core.cache_dtype.holds_latent`.

        Args:
            store: the layer's.
            latents: what its keys and values are made of.
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
        """What must be alike on every rank."""
        rows = "" if self.batch_size < 0 else f" in {self.batch_size} rows"
        code = "" if self.codec.name == "exact" else f", {self.codec.name}"
        code += "" if self.rooms is None else ", in the host's memory"
        code += "" if self.latent else ", without latent vectors"
        broken = "" if self._step is None else ", in which a forward broke off"
        return f"a cache of {self.kv_placement.length} tokens{rows}{code}{broken}"

    # --- what transformers asks

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """The new tokens' own: the attention stores them, when they have come to the ranks of their heads."""
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """All tokens, of all ranks; in a forward those before it."""
        return self.kv_placement.length if self._step is None else self._step.past

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """What masks would be made for; none are."""
        return self.get_seq_length() + query_length, 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Tokens before the new ones."""
        return self.get_seq_length()

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """No limit."""
        return -1

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        """No limit."""
        return -1

    @property
    def batch_size(self) -> int:
        """Rows; -1 while there are none."""
        return next((store.rows for store in self.stores.values() if store.rows is not None), -1)

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
        return all(store.start == 0 for store in self.stores.values())

    @property
    def is_sliding(self) -> list[bool]:
        """Masks are asked for by what a layer is, not by its cache."""
        return [False]

    is_linear = is_dummy = is_sliding

    def __len__(self) -> int:
        return len(self.stores)

    def reset(self) -> None:
        """Forget all tokens."""
        self.kv_placement, self.stores, self._step, self.rollback = KVPlacement(self.sp.ring_size), {}, None, None
        if self.rooms is not None:
            self.rooms.reset()

    @checked_call(max_length=functools.partial(check_number, whole=True))
    def crop(self, max_length: int) -> None:
        """Keep the first tokens alone, on every rank alike.

        Args:
            max_length: below 0: remove so many; 0: nothing is done (both as in transformers); above 0: keep so many.

        Raises:
            LongspanError: for a layer whose sliding window has left behind what it would need again, or after a
                forward that broke off.
        """
        past = self.kv_placement.length
        length = min(past, max_length if max_length > 0 else max(0, past + max_length))
        kept = self.rollback is not None and length >= self.rollback
        if self.rollback is not None:
            self.rollback = length
        if length == past:
            return
        self.check_sound()
        behind = None if kept else next((layer for layer, store in self.stores.items() if store.start), None)
        if behind is not None:
            raise LongspanError(
                f"layer {behind} has a sliding window and holds the tokens from {self.stores[behind].start} on alone: "
                f"the cache of {past} tokens cannot be cropped to {length}; make a new one for the first {length}"
            )
        self.kv_placement.crop(length)
        for store in self.stores.values():
            store.crop(self.kv_placement.count(self.sp.ring_rank, store.start))

    def activate_past_recording(self) -> None:
        """Until the next `crop`, keep tokens that have left a sliding window (assisted generation)."""
        if self.rollback is None:
            self.rollback = self.kv_placement.length

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Rows of the batch in another order."""
        for store in self.stores.values():
            store.select_rows(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Some rows of the batch."""
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row so many times."""
        rows = torch.arange(max(0, self.batch_size)).repeat_interleave(repeats)
        self.reorder_cache(rows)

    # --- on a disk

    @checked_call(folder=as_path)
    def save(self, folder: str | Path) -> None:
        """Write it to a folder, a file per rank; collective in the sequence group. `load` reads it on any mesh.

        Args:
            folder: new or empty, or of a cache, which is replaced when this one is whole; seen by all ranks, and of
                each replica its own.

        Raises:
            LongspanError: on every rank: for a cache that is empty or broke off, a folder that holds something else,
                or a disk's error.
        """
        path, rank, group = Path(folder), self.sp.replica_rank, self.sp.replica_group

        @files.in_words()
        def begin_writing() -> None:
            self.check_sound()
            if not self.is_initialized:
                raise LongspanError("the cache holds no tokens; save it after a forward")
            if rank == 0:
                files.check_target(path)
                shutil.rmtree(files.partial(path), ignore_errors=True)
                files.partial(path).mkdir(parents=True)

        @files.in_words()
        def write() -> files.Part:
            tensors = {f"{i}.{n}": x for i, store in self.stores.items() for n, x in enumerate(store.held)}
            written = files.write_part(path, rank, tensors)
            heads = {str(i): self._of_all(store)[1] for i, store in self.stores.items()}
            return files.Part(*written, tuple(self.kv_placement.runs[self.sp.ring_rank]), heads)

        @files.in_words()
        def end() -> None:
            if rank == 0:
                each = {str(i): (self._of_all(store)[0], store.start) for i, store in self.stores.items()}
                layers = {
                    i: {"heads": heads, "start": start, "shared": self.stores[int(i)].shared}
                    for i, (heads, start) in each.items()
                }
                index = {"length": self.kv_placement.length, "rows": self.batch_size, "dtype": self.codec.name}
                files.finish(path, {**index, "model": _facts(self.config), "layers": layers}, parts)

        on_every_rank(begin_writing, group)
        parts = gather_objects(on_every_rank(write, group), group)
        on_every_rank(end, group)

    def _of_all(self, store: Store) -> tuple[tuple[int, int], Span]:
        """Query and KV heads of a layer of the whole model, and which of the KV heads this rank holds.

        A store counts the heads of a tensor rank.
        """
        (q_heads, kv_heads), (start, stop) = store.heads, store.mine
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
        """A cache that was saved, on this model's mesh; collective in the sequence group.

        Args:
            folder: where `save` wrote it.
            model: with the config, and the weights, of the one that it was saved of. Weights are not compared.
            room: as for a new cache.
            offload: as for a new cache, wherever the saved one lay.

        Raises:
            LongspanError: on every rank: for files that are missing or damaged, or a model of another config, naming
                what differs.
        """
        path, empty = Path(folder), cls(model, offload=offload)
        sp = empty.sp

        @files.in_words()
        def check() -> tuple[dict[str, Any], list[files.Part]]:
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

        @files.in_words()
        def read() -> None:
            for layer, facts in index["layers"].items():
                # A window's layer has let go of what lay before: it needs room for what it holds alone.
                store, (q_heads, kv_heads) = cache.store(int(layer), 0 if facts["start"] else None), facts["heads"]
                store.shared = facts.get("shared", 0)  # a folder of an older version has none
                parts_of_one = (1 if store.shared else 2) * (1 if cache.codec.name == "exact" else 2)
                names = [str(n) for n in range(parts_of_one)]
                here = split_groups(q_heads, kv_heads, sp.tensor_size)[sp.tensor_rank]
                store.heads = here.q_heads, here.kv_heads
                shards = split_heads(*store.heads, sp.ulysses_size, kv_replication=sp.kv_replication)
                mine = shards[sp.ulysses_rank]
                store.mine = mine.kv_start, mine.kv_stop
                runs = tuple(cache.kv_placement.runs[sp.ring_rank])
                heads = cache._of_all(store)[1]
                tensors = files.gather_parts(path, parts, layer, names, facts["start"], runs, heads)
                filled = tensors if cache.rooms is not None else [x.to(sp.device) for x in tensors]
                store.fill(filled, facts["start"])

        on_every_rank(read, sp.replica_group)
        return cache

    @property
    def tokens_here(self) -> int:
        """Of the forward under way the new tokens that this rank computes, padding included."""
        step = self._step
        assert step is not None
        return self.sp.layout.local_length(step.new) if step.cut else step.new

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values that this rank holds, on the device or in the host's memory."""
        return sum(store.nbytes for store in self.stores.values())

    @property
    def device_nbytes(self) -> int:
        """Of an offloaded cache: the most bytes of keys and values that the device had at once; else `nbytes`."""
        return self.nbytes if self.rooms is None else self.rooms.most


def last_tokens(hidden: Tensor, info: CachedInfo, sp: SequenceSharding) -> Tensor:
    """Return the hidden states of the last `info.keep` new tokens, `[B, keep, D]`, on every rank of the group.

    Args:
        hidden: of the new tokens: of mine `[B, L, D]` where they are cut, else of all.
        info: of the forward.
        sp: the sharding.
    """
    step = info.step
    assert step is not None
    if not step.cut:
        return hidden[:, -info.keep :]
    if info.keep == 1:  # one rank's token, sent once
        owner, at = sp.layout.locate_token(step.new, step.new - 1)
        found = hidden[:, at : at + 1].contiguous() if owner == sp.rank else torch.empty_like(hidden[:, :1])
        assert sp.group is not None
        dist.broadcast(found, group=sp.group, group_src=owner)
        return found
    return PickedTokens(range(max(0, step.new - info.keep), step.new), step.new, sp).gather(hidden)


def _facts(config: Any) -> dict[str, str]:
    """What a model must have in common with that of a saved cache."""
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
    """Position ids as `generate` makes them, int64 [1 or rows, new]: padding is not counted."""
    if mask is None:
        return torch.arange(past, past + new, device=device)[None]
    return (mask.to(device).long().cumsum(-1) - 1).clamp(min=0)[:, past:]
