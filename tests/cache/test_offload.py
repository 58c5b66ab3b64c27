"""A KV cache in host memory: copies are in order, and it generates what a cache on the device does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import longspan
from longspan.cache import offload
from longspan.cache.layer_cache import LayerCache
from longspan.cache.offload import OffloadedLayerCache, Staging
from tests.generate.generating import PROMPT, Poisoned, generated, made, offloaded, parallelized, prompt
from tests.memory.side_stream import LateCopy
from tests.pool import RankPool

pytestmark = pytest.mark.versions

CPU = torch.device("cpu")


def _layer(g: torch.Generator, rows: int, tokens: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 2, tokens, 4, generator=g), torch.randn(rows, 2, tokens, 3, generator=g)


def _same(store: LayerCache, plain: LayerCache) -> None:
    assert (store.count, store.start, store.nbytes) == (plain.count, plain.start, plain.nbytes)
    for found, expected in zip(store.parts, plain.parts, strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", ["exact", "int8"])
def test_every_copy_is_waited_for_as_late_as_possible(dtype: Any) -> None:
    """Three layers, the middle one with a window of 9: chunks, tokens, beams, a crop, growth.

    While a layer attends, the next one's keys and values are in flight, and nothing has waited for them.
    """
    g, side = torch.Generator().manual_seed(0), Poisoned()
    staging = Staging(side, CPU)
    stores = [OffloadedLayerCache(staging, dtype=dtype) for _ in range(3)]
    plain = [LayerCache(dtype=dtype) for _ in range(3)]
    past, most = 0, 0
    for step, tokens in enumerate([40, 11, *[1] * 20, 70, 1, 0, 1]):
        for i, (store, same) in enumerate(zip(stores, plain, strict=True)):
            new = _layer(g, 2, tokens)
            begun = len(side.begun)
            store.append(*new)
            same.append(*new)
            for found, expected in zip(store.read(torch.float32), same.read(torch.float32), strict=True):
                assert torch.equal(found, expected)
            coming = [copy for copy in side.begun[begun:] if not copy.away]
            if step and i < 2:
                assert coming and not any(copy.executed for copy in coming[-len(store._parts) :])
            store.release()
            if step and i < 2:
                assert side.waiting  # new tokens are written before the next layer is read: only they are waited for
            if i == 1:
                for one in (store, same):
                    one.drop_before(max(0, past + tokens - 8), min(8, past + tokens))
            each = [one.nbytes for one in plain]
            most = max(most, each[i])
        past += tokens
        if step == 5:
            for one in (*stores, *plain):
                one.select_rows(torch.tensor([1, 1]))
        if step == 9:
            past -= 7
            for one in (stores[0], stores[2], plain[0], plain[2]):
                one.crop(past)
            for one in (stores[1], plain[1]):  # as if it had been filled again
                one.crop(one.count)
    for store, same in zip(stores, plain, strict=True):
        _same(store, same)
    staging.clear()
    assert most < staging.peak_bytes <= 2 * most


def test_the_host_waits_before_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """`join` orders streams only; the host must `wait` before it reads its memory (a save, beams, growth)."""
    waited: list[LateCopy] = []
    monkeypatch.setattr(LateCopy, "wait", lambda self: waited.append(self))
    g, side = torch.Generator().manual_seed(0), Poisoned()
    store = OffloadedLayerCache(Staging(side, CPU))
    for reads in (lambda: store.parts, lambda: store.select_rows(torch.tensor([1, 0])), lambda: store._reallocate(200)):
        store.append(*_layer(g, 2, 5))
        store.release()
        last = [copy for copy in side.begun if copy.away][-1]
        reads()
        assert waited[-1] is last


FEW = {"max_new_tokens": 3}
BEAMS = {"num_beams": 3, "num_return_sequences": 2}
RUNS: list[tuple[str, int, int, str, dict[str, Any]]] = [
    ("Llama", 2, 3, "exact", {"prefill_chunk_size": 11}),
    ("Llama", 2, 3, "exact", BEAMS),
    ("Gemma3Text", 4, 1, "int8", {"prefill_chunk_size": 11}),
    ("GptOss", 1, 3, "exact", {}),
]
"""Model, ranks of the ring (of 4), rows (several are padded at the left), dtype, options of generate."""


def _equal_to_a_cache_on_the_device(folder: Path) -> None:
    """Ids and logits bit for bit; bytes; a crop, a second turn, a cache on a disk."""
    for name, ring, rows, dtype, options in RUNS:
        model, _ = parallelized(name, ring, False)
        inputs = prompt(rows, padded=rows > 1)
        plain, late = longspan.ShardedCache(model, dtype=dtype), offloaded(model, dtype)
        expected = generated(model, {**inputs, "past_key_values": plain}, **FEW, **options)
        found = generated(model, {**inputs, "past_key_values": late}, **FEW, **options)
        assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1]), (name, ring)
        assert late.nbytes == plain.nbytes and late.device_nbytes > 0
    _more_turns(folder)


def _more_turns(folder: Path) -> None:
    model, _ = parallelized("Llama", 2, False)
    caches = longspan.ShardedCache(model), offloaded(model)
    first = [generated(model, {**prompt(), "past_key_values": cache}, **FEW)[0] for cache in caches]
    for cache in caches:
        cache.crop(PROMPT - 5)
    second = torch.cat([first[0][:, : PROMPT - 5], prompt(n=9, seed=8)["input_ids"]], 1)
    outs = [generated(model, {"input_ids": second, "past_key_values": cache}, **FEW) for cache in caches]
    assert torch.equal(outs[0][0], outs[1][0]) and torch.equal(outs[0][1], outs[1][1])
    caches[1].save(folder / "cache")
    other, _ = parallelized("Llama", 4, False)
    third, turns = torch.cat([outs[0][0], prompt(n=3, seed=9)["input_ids"]], 1), []
    for where in ("none", "host"):
        cache = longspan.ShardedCache.load(folder / "cache", other, offload=where)
        turns.append(generated(other, {"input_ids": third, "past_key_values": cache}, **FEW))
    assert torch.equal(turns[0][0], turns[1][0]) and torch.equal(turns[0][1], turns[1][1])
    assert cache.get_seq_length() == third.shape[1] + FEW["max_new_tokens"] - 1
    cache.reset()
    assert torch.equal(generated(other, {**prompt(), "past_key_values": cache}, **FEW)[0], first[0])


def test_equal_to_a_cache_on_the_device(pool4: RankPool, tmp_path: Path) -> None:
    pool4.run(_equal_to_a_cache_on_the_device, tmp_path, timeout=120)


def test_one_device_and_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    model = longspan.parallelize(made("Llama"), longspan.SequenceSharding(longspan.init_mesh()), fsdp=False)
    with pytest.raises(longspan.LongspanError, match="offload='tape' is unknown; choose 'none' or 'host'"):
        longspan.ShardedCache(model, offload="tape")
    with pytest.raises(
        longspan.LongspanError, match="'int4' is unknown; did you mean 'int8'.* Choose 'exact', 'int8' or 'fp8'"
    ):
        longspan.ShardedCache(model, dtype="int4")
    cache = longspan.ShardedCache(model, offload="host")
    found = generated(model, {**prompt(), "past_key_values": cache})
    expected = generated(model, prompt())
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
    assert 0 < cache.device_nbytes <= cache.nbytes
    monkeypatch.setattr(offload, "free_memory", lambda: 1000)
    store = OffloadedLayerCache(Staging(Poisoned(), CPU))
    with pytest.raises(longspan.LongspanError, match=r"2,048 bytes more, and 1,000 bytes are free .* dtype='int8'"):
        store.append(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4))
