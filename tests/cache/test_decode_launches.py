"""What a decoded token costs on a fake GPU (`tests/syncs.py`): operators of a layer, and what makes the host wait."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import longspan
from longspan.attn.kernels import flash
from longspan.attn.mask import Mask
from longspan.attn.score import Scores
from longspan.cache.attend import attend, start_step
from longspan.cache.layer_cache import LayerCache
from longspan.comm.weights import ReplicaCheck
from longspan.core.cache import CacheDtype, KVPlacement
from longspan.hf.batch import compare
from tests.fakes import fake_world
from tests.syncs import Seen, gpu_llama, on_gpu, one_gpu

H, K, D = 32, 8, 128


@torch.no_grad()
def _second_layer(
    ring: int, ulysses: int, rows: int = 1, sinks: bool = False, dtype: CacheDtype = "exact", past: int = 4096
) -> tuple[Counter[str], Seen]:
    """Return the launches of the second layer of a token on the first rank, and what waits."""
    launches: Counter[str] = Counter()

    def sent(*_: Any, **__: Any) -> None:
        launches["collective"] += 1

    names = ("all_gather_into_tensor", "all_gather_single", "all_to_all_single")
    nothing: dict[str, Any] = {name: sent for name in names if hasattr(dist, name)}
    with fake_world(0, ring * ulysses), mock.patch.multiple(dist, **nothing), on_gpu() as seen:
        sp = longspan.SequenceSharding(longspan.init_mesh(ring=ring, ulysses=ulysses, device_type="cpu"))
        placement, caches = KVPlacement(ring), [LayerCache(past + 200, dtype) for _ in range(2)]
        scores = Scores(sinks=torch.empty(H, device="cuda") if sinks else None)
        for new in (past, 1, 1):
            step = start_step(sp, placement, new)
            mask = Mask(q_start=step.past)
            for cache in caches:
                n = new if new == 1 else past // sp.size
                q, k, v = (torch.empty(rows, n, h, D, dtype=torch.bfloat16, device="cuda") for h in (H, K, K))
                seen.clear()
                seen.launches.clear()
                launches.clear()
                seen.largest = 0
                with mock.patch.object(flash, "_flash", wraps=flash._flash) as call:
                    out, choice = attend(step, cache, q, k, v, mask, scores)
                assert out.shape == q.shape and choice.name == "flash"
                args, options = call.call_args  # FA2 packs the query heads of a KV head if no limit is given
                assert args[8] or ring > 1, args
                assert options["window_size_left"] == options["window_size_right"] == -1, options
    return launches + seen.launches, seen


@pytest.mark.parametrize(
    ("ring", "ulysses", "rows", "sinks", "most"),
    [
        (1, 1, 1, False, 3),
        (1, 1, 2, True, 7),
        (1, 8, 1, False, 4),
        (1, 8, 2, False, 5),
        (8, 1, 1, False, 15),
        (2, 4, 1, False, 15),
        (2, 4, 2, True, 17),
    ],
)
def test_launches_of_a_layer_and_token(ring: int, ulysses: int, rows: int, sinks: bool, most: int) -> None:
    """Append (2), attention, gather; a ring packs (2) and merges."""
    launches, waits = _second_layer(ring, ulysses, rows, sinks)
    assert waits == []
    assert launches.total() == most, launches


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_a_quantized_cache_is_decoded_tile_by_tile(dtype: CacheDtype) -> None:
    """No tensor is larger than the stored bytes of the keys: not even the keys in bf16, let alone fp32."""
    past = 1 << 18
    launches, seen = _second_layer(1, 1, dtype=dtype, past=past)
    assert seen == [] and seen.largest == (past + 200) * K * D
    assert launches["_flash_attention_forward"] == 9 and launches.total() <= 161
    launches, _ = _second_layer(1, 1, dtype=dtype)
    assert launches["_flash_attention_forward"] == 1 and launches.total() == (14 if dtype == "int8" else 15), launches


# ---------------------------------------------------------------------------------------------------------------------
# A whole model.


@torch.no_grad()
def test_a_token_makes_the_host_wait_for_nothing() -> None:
    ids = torch.zeros(2, 300, dtype=torch.int64)
    with on_gpu() as seen:
        model, ids = gpu_llama(one_gpu()), ids.to("cuda", non_blocking=True)
        for generating in (False, True):
            cache = longspan.ShardedCache(model)
            seen.clear()
            model(input_ids=ids, past_key_values=cache, logits_to_keep=1)
            for length in range(301, 304):
                more = {}
                if generating:  # transformers gives mask and positions of every token
                    cache.generated_from = 300
                    more = {
                        "attention_mask": torch.ones(2, length, device="cuda"),
                        "position_ids": torch.empty(2, 1, dtype=torch.int64, device="cuda"),
                        "cache_position": torch.empty(1, dtype=torch.int64, device="cuda"),
                    }
                seen.launches.clear()
                model(input_ids=ids[:, :1], past_key_values=cache, logits_to_keep=1, **more)
            assert seen == []
            assert seen.launches.total() <= 105, seen.launches  # of these longspan's: 2 x 3, and 3 of the token


def test_the_host_does_not_read_values_in_each_forward() -> None:
    model = torch.nn.Linear(1, 1)
    with fake_world(0, 2), on_gpu() as seen:
        sp = longspan.SequenceSharding(longspan.init_mesh(ulysses=2, device_type="cpu"))
        check = compare.BatchCheck(sp, None, ReplicaCheck(0))
        check.forward = compare.FIRST
        batch = {"input_ids": torch.empty(1, 1, dtype=torch.int64, device="cuda")}
        with mock.patch("longspan.comm.agree.gather_numbers", lambda mine, *_, **__: [mine] * 2):
            check.compare(model, {**batch, "labels": batch["input_ids"]}, False, None, check.sp)
            assert seen == [] and not seen.launches
