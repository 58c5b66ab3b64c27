"""A KV cache in the host's memory, planned: bytes on both sides to the byte, the link's seconds, what does not fit."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch

import longspan
from longspan.core.errors import LongspanError
from longspan.plan import Job, Mesh, cost
from longspan.plan.cost.memory import staged_bytes
from longspan.plan.generation import check_fits
from longspan.plan.hardware import read_hardware
from longspan.plan.job import CostContext
from longspan.plan.models import shape_from_config
from longspan.plan.models.read import read_model
from tests.generating import prompt
from tests.models import build, sharding
from tests.pool import RankPool

N, CHUNK = 75, 32


def _held(cases: list[tuple[str, int, str]]) -> list[tuple[Any, ...]]:
    """Bytes on the device at once, after a prompt in chunks and after tokens; bytes in the host's memory."""
    found = []
    for name, ring, code in cases:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            sp = sharding(ring=ring)
            model = longspan.parallelize(build(name).eval(), sp, fsdp=False)
        cache, most = longspan.ShardedCache(model, dtype=code, offload="host"), []
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
        job = Job(context=N, batch=2, mode="prefill", dtype="fp32", cache=code, cache_offload="host")  # type: ignore
        job, mesh, gpu = replace(job, prefill_chunk=CHUNK), Mesh(ring=ring, ulysses=4 // ring), read_hardware("h100")
        prefilled, after = ([max(rank[at][when][side] for rank in by_rank) for side in (0, 1)] for when in (0, 1))
        plan = cost(shape, job, mesh, gpu)
        assert [plan.memory_bytes["kv_cache"], plan.offloaded.host_bytes["kv_cache"]] == prefilled, (name, ring)
        assert staged_bytes(CostContext(shape, job, mesh), generated=2) == after[0], (name, ring)
        on_cpu = cost(shape, job, mesh, read_hardware("cpu"))
        assert on_cpu.memory_bytes["kv_cache"] == sum(prefilled) and not on_cpu.offloaded.host_bytes


def test_a_token_brings_all_of_it_over_the_hosts_link() -> None:
    """Llama 3.1 8B, 1M tokens: 131,072 bytes a token, of which the GPU has 2 of 32 layers."""
    model, gpu, n = read_model("llama-3.1-8b"), read_hardware("h100"), 1 << 20
    job = Job(context=n, mode="decode", weight_sharding=False, cache_offload="host")
    plan, without = (cost(model, one, Mesh(), gpu) for one in (job, replace(job, cache_offload="none")))
    assert plan.memory_bytes["kv_cache"] == n * 131072 // 16 and plan.offloaded.host_bytes == {"kv_cache": n * 131072}
    assert plan.fits and not without.fits
    link = n * 131072 / gpu.host_bandwidth
    assert plan.step_seconds == pytest.approx(link, rel=0.01) and plan.offload_seconds < link
    chunks = replace(job, mode="prefill", prefill_chunk=n // 4)  # of 4 chunks three bring what those before them left
    small = replace(gpu, host_bandwidth=1e6)
    moved = cost(model, chunks, Mesh(), small).offload_seconds
    assert moved == pytest.approx(1.5 * n * 131072 / 1e6, rel=0.01)


def test_a_cache_that_the_host_cannot_hold_is_refused() -> None:
    model, gpu = read_model("llama-3.1-8b"), replace(read_hardware("h100"), host_memory=100e9)
    job = Job(context=1 << 20, mode="prefill", weight_sharding=False, cache_offload="host")
    with pytest.raises(LongspanError, match=r"137.44 GB of 90.00 GB of host memory per node .*kv_cache 137.4 GB.* fit"):
        check_fits(model, job, Mesh(), gpu, 8192)
    check_fits(model, replace(job, context=1 << 19), Mesh(), gpu, 8192)
