"""The sharded KV cache of a parallelized model, a `Cache` of transformers.

Each rank holds keys and values of its KV heads (tensor and ulysses axes) and of its tokens (ring axis). With at least
ulysses * tensor KV heads, a rank holds 1 / (ring * ulysses * tensor) of the cache of one process. To transformers, the
cache contains all tokens; it can be reused in the next call, cropped, and reordered. Every rank holds the states of
recurrent layers whole; these cannot be cropped.

`longspan.hf.cache.cached` is the stage of a forward with it, and `longspan.cache.attend` its attention.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from longspan.attn.segments import Segments
from longspan.cache.attend import CacheStep, start_step
from longspan.cache.latent import LatentLayer
from longspan.cache.layer_cache import LayerCache
from longspan.cache.offload import OffloadedLayerCache, Staging
from longspan.cache.recurrent import RecurrentLayer
from longspan.cache.static import StaticDecode
from longspan.comm.mesh import SequenceSharding
from longspan.core.cache import GENERATED_RUN, CacheConfig, KVPlacement, holds_latent
from longspan.core.errors import LongspanError
from longspan.core.heads import split_heads
from longspan.core.validation import as_path, check_number
from longspan.hf.batch.shard import SequenceInfo
from longspan.hf.cache import files
from longspan.hf.state import ParallelState, state_of

if TYPE_CHECKING:
    from longspan.hf.forward.vision import PromptPictures


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class CachedInfo(SequenceInfo):
    """Facts about a forward with a cache. `length` and `segments` include the cached tokens."""

    cache: ShardedCache
    step: CacheStep  # the forward's new tokens
    keep: int  # last tokens whose logits every rank needs; 0: each rank needs those of its own tokens

    @property
    def sharded(self) -> bool:  # type: ignore[override]
        return self.step.sharded

    @property
    def new(self) -> int:
        return self.step.new

    def gather(self, x_BL: Tensor) -> Tensor:
        """Return `[B, new, ...]` of all new tokens, on every rank."""
        return self.sp.gather(x_BL, dim=1, length=self.new) if self.sharded else x_BL

    @property
    def new_segments(self) -> Segments | None:
        """Each row's real tokens among the new ones; None if all are real."""
        if self.segments is None:
            return None
        past, new = self.step.past, self.step.new
        return tuple(((max(0, row[0][0] - past), new),) if row else () for row in self.segments)

    @functools.cached_property
    def updates_states(self) -> bool:
        """Whether recurrent layers compute the step by their own update: one real token per row after others.

        A prompt's last chunk of one token is computed as the whole prompt is: Nemotron-H's update differs by 1e-4.
        """
        one = self.step.new == 1 and self.step.past >= max(1, self.cache.generated_from or 0) and not self.step.sharded
        return one and all(row and row[0][0] <= self.step.past for row in self.segments or ())


@dataclass(frozen=True)
class KnownTokens:
    """What the host knows of the tokens of a cache, so that it need not read mask and positions of generated ones."""

    length: int
    segments: Segments | None  # as in `SequenceInfo`; every row has a real token
    holes: bool  # a row has padding between real tokens
    last_position: int  # the largest position id of the rows' last tokens

    def followed(self, length: int) -> KnownTokens:
        """Return the same for a length that differs by generated tokens: all real, with consecutive positions."""
        segments = None if self.segments is None else tuple(((row[0][0], length),) for row in self.segments)
        return KnownTokens(length, segments, self.holes, self.last_position + length - self.length)


class _Layers(list[Any]):
    """No layers; Qwen4-Exp asks one for the positions of cached tokens, which are stored with their index keys."""

    indexer_position_ids = property(lambda _: None, lambda *_: None)

    def __getitem__(self, layer: Any) -> Any:
        return self


class ShardedCache(Cache):  # type: ignore[misc]
    """A KV cache sharded over the ranks of a parallelized model.

    `model.generate(...)` makes one itself. Make it first to reuse it in the next turn of a conversation:

        cache = longspan.ShardedCache(model)
        model.generate(ids, cache=cache)
        model.generate(more_ids, cache=cache)  # `ids`, what was generated, and what follows

    Args:
        model: what `longspan.parallelize` returned.
        room: tokens to allocate at the start; a full layer grows by an eighth.
        dtype: "exact": store keys and values as computed; generation equals that of one process. "int8", "fp8": a byte
            per element and an fp32 scale per head and token; its error is in docs/how-to/inference.md.
        offload: "none": on the device. "host": in host memory. Each layer is copied to the device when it runs, while
            the next one is prefetched, so the device holds at most two layers.
        latent: for DeepSeek's attention (MLA), store latent vectors on every Ulysses rank if they are smaller than the
            keys and values of its heads. False: never.
        cuda_graph: run generated tokens, one per row and forward, as a CUDA graph: a step then costs the host one
            launch. Its kernel is flash attention, or the formula where flash does not fit. Other forwards run as
            usual. Needs a GPU, an exact cache on it, and weights that FSDP does not shard; beams are refused.

    Raises:
        LongspanError: for a model that is not parallelized; an unknown dtype or offload;
            `cuda_graph` where a step cannot be captured.
    """

    def __init__(
        self,
        model: Any,
        room: int = 0,
        dtype: str = "exact",
        offload: str = "none",
        latent: bool = True,
        cuda_graph: bool = False,
    ) -> None:
        state = state_of(model)
        if not state.traits.accepts("cache"):
            raise LongspanError(
                f"{state.traits.name} takes no cache, so it cannot generate sharded; it can be trained and scored; to "
                f"generate, load it without longspan.parallelize"
            )
        choosers = [(layer.name, layer.chooser) for layer in state.attention.layers if layer.chooser is not None]
        for layer, chooser in choosers:
            if not chooser.caches:
                raise LongspanError(
                    f"layer {layer} attends to chosen blocks, which a sharded cache does not hold in this version; "
                    f"this model can be trained and scored; to generate, load it without longspan.parallelize"
                )
            if dtype != "exact" or offload != "none" or not latent:
                raise LongspanError(
                    f"layer {layer} attends to chosen tokens or entries, and caches them with index keys, exactly and "
                    f"on the device; got dtype={dtype!r}, offload={offload!r}, latent={latent}: leave them out"
                )
        super().__init__(layers=_Layers())
        self.config = state.config
        self.sp: SequenceSharding = state.sp
        self.kv_placement = KVPlacement(self.sp.ring_size)  # which ring rank holds which tokens
        stored = CacheConfig(dtype, offload, latent)  # type: ignore[arg-type]  # checks them
        self.dtype, self.latent = stored.dtype, stored.latent
        self.staging = Staging.on(self.sp.device) if offload == "host" else None
        # Ranks differ by a run of generated tokens.
        self.room = -(-room // self.sp.ring_size) + GENERATED_RUN if room else 0
        self.layer_caches: dict[int, LayerCache] = {}
        # The first layer whose state cannot go back to fewer tokens, and why.
        kinds = [f"{x.name} is recurrent" for x in state.mixers.layers]
        kinds += [f"{x} {chooser.no_rollback}" for x, chooser in choosers if chooser.no_rollback]
        self.no_rollback = next(iter(kinds), None)
        self.recurrent_layers: dict[str, RecurrentLayer] = {}  # by the name of the module
        self.updated_layer: int | None = None  # of the attention in progress
        self.announced = 0  # tokens of the whole prompt, if it is read in chunks
        # In `generate`: tokens of the prompt, padding included; transformers makes mask and positions of later ones.
        self.generated_from: int | None = None
        self.pictures: PromptPictures | None = None  # in `generate` of a vision-language model
        # What to add to token counts for the positions of tokens behind pictures, `[B, 1]`, and how many tokens the
        # prompt had from which it is known.
        self.position_deltas: tuple[Tensor, int] | None = None
        self.known: KnownTokens | None = None  # None if a forward must read the cached tokens' mask and positions
        self.compare_from = 0  # the ranks do not compare the batches of forwards that end before this token
        self.rollback: int | None = None  # length that a crop may go back to, while drafted tokens may be rejected
        self.step: CacheStep | None = None  # the forward in progress
        self.static: StaticDecode | None = None  # runs generated tokens with `cuda_graph`
        if cuda_graph:
            check_capturable(state, self.dtype, offload)
            self.static = StaticDecode(self.sp.device)
            state.forward.replay_decode_steps()

    # --- one forward

    def begin(self, new: int, starts: tuple[int, ...] | None = None) -> CacheStep:
        """Append the forward's `new` tokens to `kv_placement`, and return its step.

        `starts`: the first real token of each row, if the step may have constant shapes.
        """
        self.step = start_step(self.sp, self.kv_placement, new)
        if self.static is not None:
            first = self.rollback is not None or not self.layer_caches
            self.step = self.static.begin(self.step, list(self.layer_caches.values()), None if first else starts)
        if self.staging is not None:
            self.staging.clear()
            self.staging.prefetch(0, sum(b - a for a, b in self.step.local_spans))
        return self.step

    def check_complete(self) -> None:
        """Raise if a forward failed half-way, so that some layers contain more tokens than others."""
        if self.step is not None:
            raise LongspanError(
                f"a forward with this cache did not end (it broke off behind {self.step.past} tokens), so its layers "
                f"may differ; make a new one, or reset it"
            )

    def end(self) -> None:
        self.step = None

    def known_after(self, new: int) -> KnownTokens | None:
        """Return what is known with `new` more tokens; None if they are not generated."""
        past = self.kv_placement.length
        if self.known is None or self.generated_from is None or past < self.generated_from:
            return None
        return self.known.followed(past + new)

    def layer_cache(self, layer: int, reach: int | None = None, rate: int = 1) -> LayerCache:
        """Return a layer's keys and values on this rank.

        `reach`: size of its window or chunk, if it has one. `rate`: tokens that each stored one stands for.
        """
        if layer not in self.layer_caches:
            room = (self.room if reach is None else min(self.room, reach)) // rate
            staging = self.staging
            made = LayerCache(room, self.dtype) if staging is None else OffloadedLayerCache(staging, room, self.dtype)
            made.rate = rate
            self.layer_caches[layer] = made
        return self.layer_caches[layer]

    def recurrent_layer(self, name: str) -> RecurrentLayer:
        """Return the state of a recurrent layer, by the name of its module."""
        return self.recurrent_layers.setdefault(name, RecurrentLayer())

    @property
    def _stores(self) -> list[LayerCache | RecurrentLayer]:
        return [*self.layer_caches.values(), *self.recurrent_layers.values()]

    def holds_latents(self, store: LayerCache, latents: LatentLayer, qkv: tuple[Tensor, Tensor, Tensor]) -> bool:
        """Return whether a layer stores latent vectors; `longspan.core.cache.holds_latent` decides at first use.

        `qkv` are of new tokens, `[B, L, heads, head_dim]`.
        """
        if store.rows is None:
            sp, (q, k, v) = self.sp, qkv
            shards = split_heads(q.shape[2], k.shape[2], sp.ulysses_size)
            most, elements = max(shard.kv_heads for shard in shards), k.shape[3] + v.shape[3]
            shared = self.latent and sp.tensor_size == 1
            store.shared = latents.rank if holds_latent(latents.width, most, elements, shared) else 0
        return store.shared > 0

    def describe(self) -> str:
        """Return what must be equal on every rank, as text."""
        rows = "" if self.batch_size < 0 else f" in {self.batch_size} rows"
        storage = "" if self.dtype == "exact" else f", {self.dtype}"
        storage += "" if self.staging is None else ", in the host's memory"
        storage += "" if self.latent else ", without latent vectors"
        storage += "" if self.static is None else ", with a CUDA graph"
        broken = "" if self.step is None else ", in which a forward broke off"
        return f"a cache of {self.kv_placement.length} tokens{rows}{storage}{broken}"

    # --- the interface of transformers.Cache

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the new keys and values: attention stores them after the all-to-all."""
        self.updated_layer = layer_idx
        return key_states, value_states

    def take_updated_layer(self, default: int) -> int:
        """Return the layer of the last `update` since the last call, or `default`.

        Layers may share one attention module (Zamba), whose own `layer_idx` is then that of one of them.
        """
        number, self.updated_layer = self.updated_layer, None
        return default if number is None else number

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the tokens of all ranks; during a forward those before it."""
        return self.kv_placement.length if self.step is None else self.step.past

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1  # no limit

    get_max_cache_shape = get_max_length

    @property
    def batch_size(self) -> int:
        """Rows; -1 while empty."""
        return next((store.rows for store in self._stores if store.rows is not None), -1)

    @property
    def is_initialized(self) -> bool:
        return self.kv_placement.length > 0

    @property
    def is_croppable(self) -> bool:
        return self.no_rollback is None and all(store.start == 0 for store in self.layer_caches.values())

    @property
    def is_sliding(self) -> list[bool]:
        return [False]  # transformers then requests each layer's mask by the layer's type

    is_linear = is_dummy = is_sliding

    def __len__(self) -> int:
        return len(self.layer_caches)

    def reset(self) -> None:
        """Remove all tokens."""
        self.kv_placement, self.layer_caches, self.step, self.rollback = KVPlacement(self.sp.ring_size), {}, None, None
        self.known, self.recurrent_layers, self.position_deltas = None, {}, None
        if self.staging is not None:
            self.staging.reset()

    def crop(self, max_length: int) -> None:
        """Keep only the first tokens, on every rank.

        Args:
            max_length: above 0: tokens to keep; below 0: minus the tokens to remove; 0: do nothing (as transformers).

        Raises:
            LongspanError: if a layer's sliding window has discarded tokens that it would need again, for a model with
                recurrent layers, or after a forward that failed.
        """
        check_number("max_length", max_length, whole=True)
        past = self.kv_placement.length
        length = min(past, max_length if max_length > 0 else max(0, past + max_length))
        all_stored = self.rollback is not None and length >= self.rollback
        if self.rollback is not None:
            self.rollback = length
        if length == past:
            return
        self.check_complete()
        if self.no_rollback is not None:
            raise LongspanError(
                f"layer {self.no_rollback}, and its state after {past} tokens cannot go back to {length}; "
                f"make a new cache for the first {length}"
            )
        discarded = next((layer for layer, store in self.layer_caches.items() if store.start and not all_stored), None)
        if discarded is not None:
            raise LongspanError(
                f"layer {discarded} has a sliding window and stores no tokens before "
                f"{self.layer_caches[discarded].start}: the cache of {past} tokens cannot be cropped to {length}; "
                f"make a new one for the first {length}"
            )
        self.kv_placement.crop(length)
        for store in self.layer_caches.values():
            store.crop(self.kv_placement.count(self.sp.ring_rank, store.start))

    def activate_past_recording(self) -> None:
        """Until the next `crop`, keep tokens that have left a sliding window (assisted generation)."""
        if self.no_rollback is not None:
            raise LongspanError(
                f"layer {self.no_rollback}, and its state cannot forget drafted tokens that are rejected; "
                f"generate without assistant_model and prompt_lookup_num_tokens"
            )
        if self.rollback is None:
            self.rollback = self.kv_placement.length

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.static is not None:
            raise LongspanError(
                "cuda_graph=True does not support beam search, which reorders the rows of the cache at every token; "
                "use longspan.ShardedCache(model) without it"
            )
        self.known = None  # padding of the rows
        if self.position_deltas is not None:
            deltas, length = self.position_deltas
            self.position_deltas = deltas[beam_idx.to(deltas.device)], length
        for store in self._stores:
            store.select_rows(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.reorder_cache(torch.arange(max(0, self.batch_size)).repeat_interleave(repeats))

    # --- on disk, and sizes

    def save(self, folder: str | Path) -> None:
        """Write the cache to a folder, a file per rank; `load` reads it on any mesh. Collective in the sequence group.

        Args:
            folder: new, empty, or a saved cache, which is replaced once this one is complete. All ranks of a replica
                see it; each replica needs its own.

        Raises:
            LongspanError: on every rank: for a cache that is empty or incomplete, a folder with other content, or an
                I/O error.
        """
        files.save(self, as_path("folder", folder))

    @classmethod
    def load(
        cls, folder: str | Path, model: Any, room: int = 0, offload: str = "none", cuda_graph: bool = False
    ) -> ShardedCache:
        """Load a saved cache onto this model's mesh. Collective in the sequence group.

        Args:
            folder: where `save` wrote it.
            model: with the same config and weights as the saving one; weights are not compared.
            room: as for a new cache.
            offload: as for a new cache.
            cuda_graph: as for a new cache.

        Raises:
            LongspanError: on every rank: for missing or damaged files, or a model with another config, naming the
                difference.
        """
        path, state = as_path("folder", folder), state_of(model)
        cls(model, offload=offload)  # refuse the arguments before the files are read
        index = files.read_index(path, state.config, state.sp)
        cache = cls(
            model, room=max(room, index["length"]), dtype=index["dtype"], offload=offload, cuda_graph=cuda_graph
        )
        files.fill(cache, path, index)
        return cache

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values and states that this rank holds, on the device or in the host's memory."""
        return sum(store.nbytes for store in self._stores)

    @property
    def state_nbytes(self) -> int:
        """Bytes of the states of recurrent layers, which every rank holds whole."""
        return sum(layer.nbytes for layer in self.recurrent_layers.values())

    @property
    def device_nbytes(self) -> int:
        """Peak bytes of keys, values and states on the device with offload; else `nbytes`."""
        return self.nbytes if self.staging is None else self.staging.peak_bytes + self.state_nbytes


def check_capturable(state: ParallelState, dtype: str, offload: str) -> None:
    """Raise where a CUDA graph cannot replay a decode step of this model and cache."""
    kernels = {layer.kernel for layer in state.attention.layers}
    recurrent = next((layer.name for layer in state.mixers.layers), None)
    reasons = {
        f"softmax attention in every layer; {recurrent} is recurrent": recurrent is not None,
        "attention to all tokens; this model's indexer chooses some": any(x.chooser for x in state.attention.layers),
        "a CUDA GPU; this model is on another device": state.sp.device.type != "cuda",
        f"dtype='exact'; this is {dtype!r}": dtype != "exact",
        f"offload='none'; this is {offload!r}": offload != "none",
        "weights on every rank or over the tensor axis; FSDP shards these (fsdp=False, --weights replicated)": (
            state.forward.shards_weights
        ),
        "kernel='auto' or 'flash'": not kernels <= {"auto", "flash"},
        "a RoPE that does not depend on the length": bool(state.attention.ropes_of_length),
    }
    missing = next((reason for reason, applies in reasons.items() if applies), None)
    if missing is not None:
        raise LongspanError(f"cuda_graph=True needs {missing}; leave it out")
