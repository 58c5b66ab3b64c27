"""A KV cache in the host's memory, planned: bytes on both sides to the byte, the link's seconds, what does not fit."""

from __future__ import annotations

import contextlib
import math
import warnings
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor

import longspan
from longspan.cache.offload import _StagedLayer
from longspan.core.cache import CacheConfig
from longspan.core.errors import LongspanError
from longspan.plan import Job, ParallelConfig, cost
from longspan.plan.cost.peak_memory import staged_bytes
from longspan.plan.from_model import read_model, shape_from_config
from longspan.plan.generation import check_fits
from longspan.plan.hardware import read_hardware
from longspan.plan.job import CostContext
from tests.fakes import fake_world
from tests.generate.generating import offloaded, prompt
from tests.live import CONFIG, MODEL, NOTHING, LiveBytes
from tests.models import build, sharding
from tests.pool import RankPool
from tests.streams import fake_gpus
from tests.syncs import on_gpu, one_gpu

pytestmark = pytest.mark.versions

N, CHUNK = 75, 32


def _held(cases: list[tuple[str, int, str]]) -> list[tuple[Any, ...]]:
    """Bytes on the device at once, after a prompt in chunks and after tokens; bytes in the host's memory."""
    found = []
    for name, ring, code in cases:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            sp = sharding(ring=ring)
            model = longspan.parallelize(build(name).eval(), sp, fsdp=False)
        cache, most = offloaded(model, code), []
        ids = prompt(2, N)["input_ids"]
        with torch.no_grad():
            for part in (*ids.split(CHUNK, 1), ids[:, :1], ids[:, :1]):
                model(input_ids=part, past_key_values=cache, logits_to_keep=1)
                most.append((cache.device_nbytes, cache.nbytes))
        found.append((most[-3], most[-1]))
    return found


def test_bytes_on_both_sides_are_the_planners(pool4: RankPool) -> None:
    cases = [("Llama", 2, "exact"), ("Llama", 4, "int8"), ("Gemma3Text", 4, "exact"), ("Gemma3Text", 1, "exact")]
    by_rank = pool4.run(_held, cases)
    for at, (name, ring, code) in enumerate(cases):
        shape = shape_from_config(build(name).config.to_dict(), name)
        job = Job(context=N, batch=2, mode="prefill", dtype="fp32", cache=CacheConfig(dtype=code, offload="host"))  # type: ignore
        job, mesh, gpu = (
            replace(job, prefill_chunk=CHUNK),
            ParallelConfig(ring=ring, ulysses=4 // ring),
            read_hardware("h100"),
        )
        prefilled, after = ([max(rank[at][when][side] for rank in by_rank) for side in (0, 1)] for when in (0, 1))
        plan = cost(shape, job.on(**mesh.degrees), gpu)
        assert [plan.memory_bytes["kv_cache"], plan.offloaded.host_bytes["kv_cache"]] == prefilled, (name, ring)
        assert staged_bytes(CostContext(shape, job.on(**mesh.degrees)), generated=2) == after[0], (name, ring)


class _Traced(NamedTuple):
    """Of a forward on a fake GPU: peaks of the staged layers' storages and of all bytes but weights, and what of the
    storages is alive after it; what the cache says of the staged layers."""

    staged: int
    left: int
    all: int
    said: int


@torch.no_grad()
def _traced(mesh: dict[str, int], dtype: Any, n: int, chunk: int) -> list[_Traced]:
    """Return the forwards of a prompt's chunks and of two tokens, through a cache in the host's memory."""
    size, traced = math.prod(mesh.values()), []
    layers = _LiveStorages()
    with (
        fake_world(0, size),
        on_gpu(),
        fake_gpus(size),
        layers.of_staged_layers(),
        mock.patch.multiple(dist, **NOTHING),
    ):
        sp = longspan.SequenceSharding(longspan.init_mesh(**mesh, device_type="cuda")) if mesh else one_gpu()
        with torch.device("cuda"):
            llama = transformers.LlamaConfig(**CONFIG)  # type: ignore[arg-type]
            model = transformers.AutoModelForCausalLM.from_config(llama, dtype=torch.bfloat16)
        longspan.parallelize(model.eval(), sp, fsdp=False, kernel="flash", weights="same", check_batches=0)
        cache = longspan.ShardedCache(model, dtype=dtype, offload="host")
        ids = torch.zeros(1, n, dtype=torch.int64, device="cuda")
        for part in (*ids.split(chunk, 1), ids[:, :1], ids[:, :1]):
            with LiveBytes(model.parameters()) as live:
                model(input_ids=part, past_key_values=cache, logits_to_keep=1)
            traced.append(_Traced(layers.peak, layers.now, live.peak, cache.device_nbytes))
    return traced


class _LiveStorages:
    """Counts the bytes of staged layers until they are freed, whoever holds them."""

    def __init__(self) -> None:
        self.now = self.peak = 0

    @contextlib.contextmanager
    def of_staged_layers(self) -> Iterator[None]:
        start = _StagedLayer.__init__

        def counted(staged: _StagedLayer, parts: list[Tensor]) -> None:
            start(staged, parts)
            for storage in (x.untyped_storage() for x in parts):
                self._add(storage.nbytes())
                weakref.finalize(storage, self._add, -storage.nbytes())

        with mock.patch.object(_StagedLayer, "__init__", counted):
            yield

    def _add(self, nbytes: int) -> None:
        self.now += nbytes
        self.peak = max(self.peak, self.now)


@pytest.mark.parametrize("dtype", ["exact", "int8"])
@pytest.mark.parametrize("mesh", [{}, {"ulysses": 2}, {"ring": 2}])
def test_staged_bytes_on_a_gpu(mesh: dict[str, int], dtype: Any) -> None:
    """What is alive, not only what the cache counts; and all that a decoded token needs but the weights."""
    n, chunk, on = 1 << 16, 1 << 14, ParallelConfig(**mesh)
    job = Job(
        context=n, mode="prefill", dtype="bf16", prefill_chunk=chunk, cache=CacheConfig(dtype=dtype, offload="host")
    )
    *_, prefilled, _, last = _traced(mesh, dtype, n, chunk)
    for traced, generated in ((prefilled, 0), (last, 2)):
        assert (
            traced.staged == traced.said == staged_bytes(CostContext(MODEL, job.on(**on.degrees)), generated=generated)
        )
        assert traced.left == 0
    decode = replace(job, mode="decode", prefill_chunk=None, weight_sharding=False)
    plan = cost(MODEL, decode.on(**on.degrees), read_hardware("h100")).memory_bytes
    planned = sum(plan.values()) - plan["weights"] - plan["reserve"]
    # A tile of a quantized layer is decoded to bf16; not planned: it has at most 134 MB, and the reserve 2 GB.
    decoded = 0 if dtype == "exact" else n * 2 * 32 * 2 * 2 // on.ranks
    assert planned + decoded == pytest.approx(last.all, rel=0.01)


def test_a_token_brings_all_of_it_over_the_hosts_link() -> None:
    """Llama 3.1 8B, 1M tokens: 131,072 bytes a token, of which the GPU has 2 of 32 layers."""
    model, gpu, n = read_model("llama-3.1-8b"), read_hardware("h100"), 1 << 20
    job = Job(context=n, mode="decode", weight_sharding=False, cache=CacheConfig(offload="host"))
    plan, without = (cost(model, one, gpu) for one in (job, replace(job, cache=CacheConfig(offload="none"))))
    assert plan.memory_bytes["kv_cache"] == n * 131072 // 16 and plan.offloaded.host_bytes == {"kv_cache": n * 131072}
    assert plan.fits and not without.fits
    link = n * 131072 / gpu.host_bandwidth
    assert plan.step_seconds == pytest.approx(link, rel=0.01) and plan.offload_seconds < link
    chunks = replace(job, mode="prefill", prefill_chunk=n // 4)  # of 4 chunks three bring what those before them left
    small = replace(gpu, host_bandwidth=1e6)
    moved = cost(model, chunks, small).offload_seconds
    assert moved == pytest.approx(1.5 * n * 131072 / 1e6, rel=0.01)


def test_a_cache_that_the_host_cannot_hold_is_refused() -> None:
    model, gpu = read_model("llama-3.1-8b"), replace(read_hardware("h100"), host_memory=100e9)
    job = Job(context=1 << 20, mode="prefill", weight_sharding=False, cache=CacheConfig(offload="host"))
    with pytest.raises(LongspanError, match=r"137.44 GB of 90.00 GB of host memory per node .*kv_cache 137.4 GB.* fit"):
        check_fits(model, job, gpu, 8192)
    check_fits(model, replace(job, context=1 << 19), gpu, 8192)
