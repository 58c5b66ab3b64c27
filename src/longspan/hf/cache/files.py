"""Save and load a sharded KV cache: a file of keys and values per rank, and an index that is written last.

    folder/index.json             the model's facts; the tokens and heads of each file
    folder/part-0.safetensors     rank 0's keys and values, layer by layer, and the states of recurrent layers

Everything is written into `folder.partial`, which is renamed when every file is on the disk: a crash leaves a folder
with another name, or without an index.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from itertools import accumulate, product
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from longspan.comm.agree import gather_objects, on_every_rank
from longspan.core.cache import runs_of_entries
from longspan.core.errors import LongspanError, os_errors_as_longspan_errors
from longspan.core.heads import split_groups, split_heads
from longspan.hf.model.support import heads_of

if TYPE_CHECKING:
    from pathlib import Path

    from longspan.cache.layer_cache import LayerCache
    from longspan.comm.mesh import SequenceSharding
    from longspan.core.layout import Span
    from longspan.hf.cache.kv_cache import ShardedCache

INDEX = "index.json"

_STATES = "recurrent "
"""Begins the names of the states of recurrent layers: then the layer's module, and what it is."""


def save(cache: ShardedCache, path: Path) -> None:
    """Write a cache to a folder; see `ShardedCache.save`. Collective in the sequence group."""
    sp, layers = cache.sp, cache.layer_caches
    rank, group, partial = sp.model_rank, sp.model_group, path.with_name(f"{path.name}.partial")

    @os_errors_as_longspan_errors()
    def begin() -> None:
        cache.check_complete()
        if not cache.is_initialized:
            raise LongspanError("the cache holds no tokens; save it after a forward")
        if rank == 0:
            if path.exists() and not (path / INDEX).is_file() and (not path.is_dir() or any(path.iterdir())):
                raise LongspanError(f"{path} exists and is not a cache; use a new or empty folder")
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)

    @os_errors_as_longspan_errors()
    def write() -> dict[str, Any]:
        tensors = {f"{i}.{n}": x.contiguous() for i, store in layers.items() for n, x in enumerate(store.parts)}
        if rank == 0:  # states are equal on every rank
            for name, layer in cache.recurrent_layers.items():
                tensors |= {f"{_STATES}{name}.{kind}": x.contiguous() for kind, x in layer.tensors.items()}
        file = partial / f"part-{rank}.safetensors"
        try:
            save_file(tensors, file)
        except SafetensorError as error:  # safetensors raises its own type for disk errors too
            raise LongspanError(f"{file} cannot be written ({error}); make room, or save to another disk") from error
        heads = {str(i): _model_heads(cache, store)[1] for i, store in layers.items()}
        return {"file": file.name, "runs": cache.kv_placement.runs[sp.ring_rank], "heads": heads}

    @os_errors_as_longspan_errors()
    def end() -> None:
        if rank:
            return
        facts = {
            str(i): {
                "heads": _model_heads(cache, store)[0],
                "start": store.start,
                "shared": store.shared,
                "rate": store.rate,
            }
            for i, store in layers.items()
        }
        placed = cache.kv_placement.length
        index: dict[str, Any] = {"length": placed, "dtype": cache.dtype, "model": _facts(cache.config)}
        if cache.position_deltas is not None:
            deltas, length = cache.position_deltas
            index["position_deltas"] = [deltas.tolist(), length]
        (partial / INDEX).write_text(json.dumps({**index, "layers": facts, "parts": parts}, indent=1))
        old = path.with_name(f"{path.name}.old")
        if path.exists():
            path.rename(old)
        partial.rename(path)
        shutil.rmtree(old, ignore_errors=True)

    on_every_rank(begin, group)
    parts = gather_objects(on_every_rank(write, group), group)
    on_every_rank(end, group)


@contextlib.contextmanager
def _refusing_damage(path: Path) -> Iterator[None]:
    try:
        with os_errors_as_longspan_errors():
            yield
    except LongspanError:
        raise
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise LongspanError(f"{path} is damaged or incomplete ({error!r}); save the cache again") from error


def read_index(path: Path, config: Any, sp: SequenceSharding) -> dict[str, Any]:
    """Return the index of a saved cache of this model. Collective."""

    @_refusing_damage(path)
    def read() -> dict[str, Any]:
        if not (path / INDEX).is_file():
            raise LongspanError(f"{path} is not a complete cache: it has no {INDEX}, which is written last")
        index: dict[str, Any] = json.loads((path / INDEX).read_text())
        saved, mine = dict(index["model"]), _facts(config)
        differ = sorted(key for key in mine.keys() | saved.keys() if mine.get(key) != saved.get(key))
        if differ:
            listed = ", ".join(f"{key}: {saved.get(key)} there, {mine.get(key)} here" for key in differ[:5])
            raise LongspanError(f"{path} is the cache of another model: {listed}")
        return index

    return on_every_rank(read, sp.model_group)


def fill(cache: ShardedCache, path: Path, index: dict[str, Any]) -> None:
    """Read this rank's tokens and heads into an empty cache. Collective in the sequence group."""
    sp = cache.sp
    cache.kv_placement.add(sp.layout, index["length"])
    if "position_deltas" in index:
        deltas, length = index["position_deltas"]
        cache.position_deltas = torch.tensor(deltas, device=sp.device), length

    @_refusing_damage(path)
    def read() -> None:
        for layer, facts in index["layers"].items():
            # A layer with a window has discarded older tokens, and needs no room for them.
            start, rate = facts["start"], facts["rate"]
            store = cache.layer_cache(int(layer), 0 if start else None, rate)
            store.shared = facts["shared"]
            q_heads, kv_heads = facts["heads"]
            group = split_groups(q_heads, kv_heads, sp.tensor_size)[sp.tensor_rank]
            store.heads = group.q_heads, group.kv_heads
            mine = split_heads(*store.heads, sp.ulysses_size)[sp.ulysses_rank]
            store.local_kv_heads = mine.kv_start, mine.kv_stop
            runs, heads = cache.kv_placement.runs[sp.ring_rank], _model_heads(cache, store)[1]
            targets = _stored(runs, start, rate)
            tensors = (1 if store.shared else 2) * (1 if cache.dtype == "exact" else 2)
            stored = [_read(path, index["parts"], layer, n, facts, targets, heads) for n in range(tensors)]
            store.fill(stored if cache.staging is not None else [x.to(sp.device) for x in stored], start)
        with safe_open(path / index["parts"][0]["file"], "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (no dict)
                if name.startswith(_STATES):
                    layer, _, kind = name.removeprefix(_STATES).rpartition(".")
                    setattr(cache.recurrent_layer(layer), kind, opened.get_tensor(name).to(sp.device))

    on_every_rank(read, sp.model_group)


def _read(
    path: Path,
    parts: list[dict[str, Any]],
    layer: str,
    number: int,
    facts: dict[str, Any],
    targets: list[Span],
    heads: Span,
) -> Tensor:
    """Return `[B, heads, tokens, width]` of a layer's tensor from files that any mesh wrote.

    `facts` are the layer's; `targets` the token runs of this rank, ascending; `heads` its KV heads [start, stop).
    """
    out: Tensor | None = None
    for part in parts:
        first, stop = part["heads"][layer]
        low, high = max(first, heads[0]), min(stop, heads[1])
        moves = _overlaps(_stored(part["runs"], facts["start"], facts["rate"]), targets) if low < high else []
        if out is not None and not moves:
            continue
        with safe_open(path / part["file"], "pt") as opened:
            stored = opened.get_slice(f"{layer}.{number}")
            if out is None:
                rows, _, _, width = stored.get_shape()
                tokens = sum(b - a for a, b in targets)
                out = torch.empty(rows, heads[1] - heads[0], tokens, width, dtype=stored[:0].dtype)
            for source, target, count in moves:
                piece = stored[:, low - first : high - first, source : source + count]
                out[:, low - heads[0] : high - heads[0], target : target + count] = piece
    assert out is not None
    return out


def _stored(runs: list[Span], start: int, rate: int) -> list[Span]:
    """Return the runs that a layer stores of a rank's token runs: from `start` on, or of entries of `rate` tokens."""
    return [(max(a, start), b) for a, b in runs_of_entries(runs, rate) if b > start]


def _overlaps(sources: list[Span], targets: list[Span]) -> list[tuple[int, int, int]]:
    """Return (index among the source tokens, index among the target tokens, count) of every run in both."""
    at_sources, at_targets = (accumulate((b - a for a, b in runs), initial=0) for runs in (sources, targets))
    pairs = product(zip(at_sources, sources, strict=False), zip(at_targets, targets, strict=False))
    found = [(i - a, j - c, max(a, c), min(b, d)) for (i, (a, b)), (j, (c, d)) in pairs]
    return [(low + source, low + target, high - low) for source, target, low, high in found if low < high]


def _model_heads(cache: ShardedCache, store: LayerCache) -> tuple[tuple[int, int], Span]:
    """Return a layer's query and KV heads in the model, and the KV heads of this rank; a cache numbers them within its
    tensor rank.
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
    keys = {key: value for key, value in config.get_text_config().to_dict().items() if key not in ignored}
    return {key: json.dumps(value, sort_keys=True, default=str) for key, value in keys.items()}
