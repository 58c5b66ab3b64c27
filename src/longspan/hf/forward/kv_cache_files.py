"""Save and load a sharded KV cache: what each rank writes and reads. `longspan.cache.folder` has the format."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import torch

from longspan.cache import folder as files
from longspan.comm.objects import gather_objects, on_every_rank
from longspan.core.errors import LongspanError, os_errors_as_longspan_errors
from longspan.core.heads import split_groups, split_heads
from longspan.hf.support import heads_of

if TYPE_CHECKING:
    from pathlib import Path

    from longspan.cache.layer_cache import LayerCache
    from longspan.comm.mesh import SequenceSharding
    from longspan.core.layout import Span
    from longspan.hf.forward.kv_cache import ShardedCache


_STATES = "recurrent "
"""Begins the names of the states of recurrent layers: then the layer's module, and what it is."""


def save(cache: ShardedCache, path: Path) -> None:
    """Write a cache to a folder; see `ShardedCache.save`. Collective in the sequence group."""
    sp, layers = cache.sp, cache.layer_caches
    rank, group = sp.replica_rank, sp.replica_group

    @os_errors_as_longspan_errors()
    def begin() -> None:
        cache.check_complete()
        if not cache.is_initialized:
            raise LongspanError("the cache holds no tokens; save it after a forward")
        if rank == 0:
            files.check_target(path)
            shutil.rmtree(files.partial(path), ignore_errors=True)
            files.partial(path).mkdir(parents=True)

    @os_errors_as_longspan_errors()
    def write() -> files.CacheFile:
        tensors = {f"{i}.{n}": x for i, store in layers.items() for n, x in enumerate(store.parts)}
        if rank == 0:  # states are equal on every rank
            for name, layer in cache.recurrent_layers.items():
                tensors |= {f"{_STATES}{name}.{kind}": x for kind, x in layer.tensors.items()}
        written = files.write_file(path, rank, tensors)
        heads = {str(i): _model_heads(cache, store)[1] for i, store in layers.items()}
        return files.CacheFile(*written, tuple(cache.kv_placement.runs[sp.ring_rank]), heads)

    @os_errors_as_longspan_errors()
    def end() -> None:
        if rank == 0:
            facts = {
                str(i): {"heads": _model_heads(cache, store)[0], "start": store.start, "shared": store.shared}
                for i, store in layers.items()
            }
            index: dict[str, Any] = {
                "length": cache.kv_placement.length,
                "rows": cache.batch_size,
                "dtype": cache.dtype,
            }
            if cache.position_deltas is not None:
                deltas, length = cache.position_deltas
                index["position_deltas"] = [deltas.tolist(), length]
            files.publish(path, {**index, "model": _facts(cache.config), "layers": facts}, parts)

    on_every_rank(begin, group)
    parts = gather_objects(on_every_rank(write, group), group)
    on_every_rank(end, group)


def read_index(path: Path, config: Any, sp: SequenceSharding) -> tuple[dict[str, Any], list[files.CacheFile]]:
    """Return the index of a saved cache of this model, and its files, each checked by one rank. Collective."""

    @os_errors_as_longspan_errors()
    def check() -> tuple[dict[str, Any], list[files.CacheFile]]:
        index, parts = files.read_index(path)
        mine, saved = _facts(config), index["model"]
        differ = sorted(key for key in mine.keys() | saved.keys() if mine.get(key) != saved.get(key))
        if differ:
            listed = ", ".join(f"{key}: {saved.get(key)} there, {mine.get(key)} here" for key in differ[:5])
            raise LongspanError(f"{path} is the cache of another model: {listed}")
        for part in parts[sp.replica_rank :: sp.size * sp.tensor_size]:
            files.check_file(path, part)
        return index, parts

    return on_every_rank(check, sp.replica_group)


def fill(cache: ShardedCache, path: Path, index: dict[str, Any], parts: list[files.CacheFile]) -> None:
    """Read this rank's tokens and heads into an empty cache. Collective in the sequence group."""
    sp = cache.sp
    cache.kv_placement.add(sp.layout, index["length"])
    if "position_deltas" in index:
        deltas, length = index["position_deltas"]
        cache.position_deltas = torch.tensor(deltas, device=sp.device), length

    @os_errors_as_longspan_errors()
    def read() -> None:
        for layer, facts in index["layers"].items():
            # A layer with a window has discarded older tokens, and needs no room for them.
            store, start = cache.layer_cache(int(layer), 0 if facts["start"] else None), facts["start"]
            store.shared = facts.get("shared", 0)  # a folder of an older version has none
            q_heads, kv_heads = facts["heads"]
            group = split_groups(q_heads, kv_heads, sp.tensor_size)[sp.tensor_rank]
            store.heads = group.q_heads, group.kv_heads
            mine = split_heads(*store.heads, sp.ulysses_size, kv_replication=sp.kv_replication)[sp.ulysses_rank]
            store.local_kv_heads = mine.kv_start, mine.kv_stop
            tensors = (1 if store.shared else 2) * (1 if cache.dtype == "exact" else 2)
            names, runs = [str(n) for n in range(tensors)], tuple(cache.kv_placement.runs[sp.ring_rank])
            stored = files.read_layer(path, parts, layer, names, start, runs, _model_heads(cache, store)[1])
            store.fill(stored if cache.staging is not None else [x.to(sp.device) for x in stored], start)
        for name, x in files.read_tensors(path, parts[0], _STATES).items():
            layer, _, kind = name.rpartition(".")
            setattr(cache.recurrent_layer(layer), kind, x.to(sp.device))

    on_every_rank(read, sp.replica_group)


def _model_heads(cache: ShardedCache, store: LayerCache) -> tuple[tuple[int, int], Span]:
    """Return a layer's query and KV heads in the model, and the KV heads of this rank.

    A layer's cache numbers heads within its tensor rank.
    """
    (q_heads, kv_heads), (start, stop), sp = store.heads, store.local_kv_heads, cache.sp
    if sp.tensor_size > 1:
        q_heads, kv_heads = heads_of(cache.config)
        first = split_groups(q_heads, kv_heads, sp.tensor_size)[sp.tensor_rank].kv_start
        start, stop = start + first, stop + first
    return (q_heads, kv_heads), (start, stop)


def _facts(config: Any) -> dict[str, str]:
    """Return the config keys that must equal those of a saved cache."""
    ignored = {"_name_or_path", "transformers_version", "architectures", "use_cache"}
    settings = config.get_text_config().to_dict()
    return {
        key: json.dumps(value, sort_keys=True, default=str) for key, value in settings.items() if key not in ignored
    }
