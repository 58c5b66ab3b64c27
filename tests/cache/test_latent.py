"""A cache of latent vectors (DeepSeek's attention) generates what one process generates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import longspan
from tests.generate.generating import NEW, PROMPT, check_generated, generated, made, parallelized, plain, prompt
from tests.models import sharding
from tests.pool import RankPool

pytestmark = pytest.mark.versions

WIDTH, RANK = 16 + 4, 16
HEAD = 12 + 6  # elements of an expanded key and value


# Ring of 4 ranks, and options of a cache. A rank's latent vectors are smaller than its 4 or 2 heads, but not than one.
CACHES: dict[str, list[tuple[int, list[dict[str, Any]]]]] = {
    "DeepseekV3": [(4, [{}]), (2, [{"offload": "host"}, {"latent": False}]), (1, [{}])],
    "DeepseekV2": [(2, [{}])],
}


def _generates(name: str, expected: Any) -> None:
    for ring, caches in CACHES[name]:
        heads = ring
        model, sp = parallelized(name, ring, fsdp=ring == 4)
        for options in caches:
            cache = longspan.ShardedCache(model, **options)
            check_generated(generated(model, {**prompt(3, padded=True), "past_key_values": cache}), expected)
            latent = heads > 1 and options.get("latent", True)
            assert [store.shared for store in cache.layer_caches.values()] == [RANK if latent else 0] * 2
            held = 2 * 3 * cache.kv_placement.count(sp.ring_rank) * 4
            assert cache.nbytes == held * (WIDTH if latent else heads * HEAD)


def _in_int8(name: str, expected: Any) -> None:
    model, _ = parallelized(name, 2, False)
    cache = longspan.ShardedCache(model, dtype="int8")
    logits = generated(model, {**prompt(), "past_key_values": cache}, max_new_tokens=1)[1]
    error = float((logits - expected[1][:, :1]).norm() / expected[1][:, :1].norm())
    assert 1e-5 < error < 0.02
    assert cache.layer_caches[0].nbytes == cache.kv_placement.count(cache.sp.ring_rank) * (WIDTH + 4)


@pytest.mark.parametrize("name", CACHES)
def test_generated_tokens_and_bytes(pool4: RankPool, name: str) -> None:
    pool4.run(_generates, name, plain(name, 3, True))


def test_in_int8(pool4: RankPool) -> None:
    pool4.run(_in_int8, "DeepseekV3", plain("DeepseekV3"))


def _saved(folder: Path, ring: int) -> None:
    model, _ = parallelized("DeepseekV3", ring, False)
    cache = longspan.ShardedCache(model)
    generated(model, {**prompt(), "past_key_values": cache})
    cache.save(folder)


def _loaded(folder: Path, shared: int, first: Any, second: Tensor, expected: Any) -> None:
    for ring in (1, 2):
        model, _ = parallelized("DeepseekV3", ring, False)
        cache = longspan.ShardedCache.load(folder, model)
        assert cache.get_seq_length() == PROMPT + NEW - 1 and cache.layer_caches[0].shared == shared
        check_generated(generated(model, {"input_ids": second, "past_key_values": cache}), expected)
        cache.crop(PROMPT - 1)
        check_generated(generated(model, {**prompt(), "past_key_values": cache}), first)


@pytest.mark.parametrize(("ring", "shared"), [(4, RANK), (1, 0)])
def test_a_saved_cache_loads_on_another_mesh(get_pool: Any, tmp_path: Path, ring: int, shared: int) -> None:
    """Saved as latent vectors, and as keys and values where these are smaller."""
    more = prompt(n=9, seed=8)["input_ids"]
    second = torch.cat([plain("DeepseekV3")[0], more], 1)
    expected = generated(made("DeepseekV3"), {"input_ids": second})
    get_pool(4).run(_saved, tmp_path / "cache", ring)
    get_pool(2).run(_loaded, tmp_path / "cache", shared, plain("DeepseekV3"), second, expected)


def _adapted() -> Any:
    import peft

    torch.manual_seed(5)
    config = peft.LoraConfig(r=4, target_modules=["kv_b_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    return peft.get_peft_model(made("DeepseekV3"), config).eval()


def _with_adapters(expected: Any) -> str:
    model = longspan.parallelize(_adapted(), sharding(ring=2), fsdp=True)
    check_generated(generated(model, prompt()), expected)
    other, _ = parallelized("DeepseekV3", 2, False)
    projection = other.model.layers[1].self_attn.kv_b_proj
    projection.register_forward_hook(lambda module, args, out: 1.1 * out)
    with pytest.raises(longspan.LongspanError) as error:
        generated(other, prompt())
    return str(error.value)


def test_adapters_expand_vectors_and_another_expansion_is_refused(pool2: RankPool) -> None:
    expected = generated(_adapted(), prompt())
    assert not torch.equal(expected[1], plain("DeepseekV3")[1])
    for message in pool2.run(_with_adapters, expected):
        assert "layers.1.self_attn: DeepseekV3Attention does not compute its keys and values from the input" in message
        assert "use longspan.ShardedCache(model, latent=False)" in message
