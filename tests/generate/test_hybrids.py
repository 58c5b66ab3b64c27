"""Generation with recurrent layers and short convolutions: tokens and logits equal those of one process."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import longspan
from longspan.core.cache import CacheConfig
from longspan.plan import Job, ParallelConfig
from longspan.plan.cost.peak_memory import cache_on_device, key_value_bytes, state_bytes
from longspan.plan.from_model import shape_from_config
from longspan.plan.job import CostContext
from longspan.plan.layers import messages
from tests.choose import confirming
from tests.counting import count_sent
from tests.generate.generating import (
    PROMPT,
    check_generated,
    each_row_alone,
    generated,
    made,
    parallelized,
    plain,
    prompt,
)
from tests.models import HYBRIDS
from tests.pool import RankPool, on_ranks

# Rows of one length or padded on the left, read at once or in chunks: of 3 tokens, some rows begin after the first
# ones, and four ranks do not shard a chunk.
KINDS = {"whole": (1, None), "padded": (3, None), "chunks": (1, 11), "padded chunks": (3, 3)}
Case = tuple[dict[str, Any], Any, tuple[Tensor, Tensor]]


def _case(family: str, kind: str) -> Case:
    rows, chunk = KINDS[kind]
    options = {} if chunk is None else {"prefill_chunk_size": chunk}
    if family == "MiniMax" and rows > 1:  # with a cache, plain MiniMax reads the padding of a batch
        whole = prompt(rows, padded=True)
        return options, whole, each_row_alone(made(family), whole)
    return options, prompt(rows, padded=rows > 1), plain(family, rows, rows > 1)


def _greedy(family: str, meshes: list[tuple[int, bool]], cases: list[Case]) -> None:
    for ring, fsdp in meshes:
        model, _ = parallelized(family, ring, fsdp)
        for options, inputs, expected in cases:
            check_generated(generated(model, inputs, **options), expected)


EVERY = [(family, ring, kind) for family in HYBRIDS for ring in (1, 2) for kind in KINDS]
CHOSEN = [(f, 1 + i % 2, [*KINDS][(i // 2) % 4]) for i, f in enumerate(HYBRIDS)]


@pytest.mark.parametrize(
    ("family", "ring", "kind"), [*CHOSEN, *confirming(case for case in EVERY if case not in CHOSEN)]
)
def test_greedy(pool2: RankPool, family: str, ring: int, kind: str) -> None:
    fsdp = ([*HYBRIDS].index(family) + ring) % 3 == 0
    pool2.run(_greedy, family, [(ring, fsdp)], [_case(family, kind)])


@pytest.mark.parametrize("family", ["Qwen3Next", *confirming(f for f in HYBRIDS if f != "Qwen3Next")])
def test_greedy_on_4_ranks(pool4: RankPool, family: str) -> None:
    cases = [_case(family, kind) for kind in ("whole", "padded chunks")]
    pool4.run(_greedy, family, [(1, True), (2, False), (4, False)], cases)


BEAMS: tuple[tuple[str, Any], ...] = (("num_beams", 3), ("num_return_sequences", 2))


def test_beams(pool2: RankPool) -> None:
    """Bamba, with rows of different lengths: beams reorder the states' rows."""
    pool2.run(_greedy, "Bamba", [(2, False)], [(dict(BEAMS), prompt(3, padded=True), plain("Bamba", 3, True, BEAMS))])


# ---------------------------------------------------------------------------------------------------------------------
# A cache of the user's.


def _followed(ids: Tensor, more: Tensor) -> dict[str, Tensor]:
    """Return a second turn; with a mask, as generated tokens may be the padding's."""
    both = torch.cat([ids, more], 1)
    return {"input_ids": both, "attention_mask": torch.ones_like(both)}


def _turns(family: str, more: Tensor, second: tuple[Tensor, Tensor], options: dict[str, Any]) -> list[int]:
    """Generate twice with one cache; return its bytes, and check that states are equal on every rank."""
    model, sp = parallelized(family, 2, False)
    cache = longspan.ShardedCache(model, **options)
    first, _ = generated(model, {**prompt(), "past_key_values": cache})
    check_generated(generated(model, {**_followed(first, more), "past_key_values": cache}), second)
    for layer in cache.recurrent_layers.values():
        for x in layer.tensors.values():
            every = [torch.empty_like(x) for _ in range(sp.size)]
            dist.all_gather(every, x)
            assert torch.equal(*every)
    return [cache.nbytes, cache.device_nbytes]


@pytest.mark.parametrize("family", ["KimiLinear", "Jamba", "Lfm2", *confirming(["Bamba", "Zamba", "Mamba", "MiniMax"])])
def test_a_second_turn(pool2: RankPool, family: str) -> None:
    """Plain transformers reads the second turn from the beginning: with its cache, Mamba's scan forgets the state."""
    more = prompt(1, 5, seed=8)["input_ids"]
    second = generated(made(family), _followed(plain(family)[0], more))
    pool2.run(_turns, family, more, second, {"offload": "host"} if family == "Jamba" else {})


def _saved(folder: Path, family: str) -> None:
    model, _ = parallelized(family, 2, False)
    cache = longspan.ShardedCache(model)
    generated(model, {**prompt(), "past_key_values": cache})
    cache.save(folder)


def _loaded(folder: Path, family: str, second: dict[str, Tensor], expected: Any) -> None:
    model, _ = parallelized(family, 1, False)
    cache = longspan.ShardedCache.load(folder, model)
    assert cache.get_seq_length() == plain(family)[0].shape[1] - 1
    check_generated(generated(model, {**second, "past_key_values": cache}), expected)


@pytest.mark.parametrize("family", ["Bamba", *confirming(["Mamba", "Lfm2", "Zamba"])])
def test_a_saved_cache_loads_on_another_mesh(get_pool: Any, tmp_path: Path, family: str) -> None:
    get_pool(2).run(_saved, tmp_path / "cache", family)
    second = _followed(plain(family)[0], prompt(1, 5, seed=8)["input_ids"])
    expected = generated(made(family), second)
    get_pool(1).run(_loaded, tmp_path / "cache", family, second, expected)


def _as_planned(families: list[str]) -> None:
    """Bytes on each rank, also with keys and values in host memory; what a chunk and a token send."""
    for family, ring in zip(families, itertools.cycle((1, 2)), strict=False):
        model, sp = parallelized(family, ring, False)
        shape, mesh = (
            shape_from_config(model.config.to_dict(), family),
            ParallelConfig(ring=ring, ulysses=sp.ulysses_size),
        )
        job = Job(
            context=PROMPT, batch=2, mode="prefill", dtype="fp32", prefill_chunk=32, cache=CacheConfig(offload="host")
        )
        cache, ids = longspan.ShardedCache(model, offload="host"), prompt(2)["input_ids"]
        cache.compare_from = 1000  # the hosts do not compare their batches
        chunk = CostContext(shape, replace(job, context=32).on(**mesh.degrees))
        for tokens, mode in ((ids[:, :32], "prefill"), (ids[:, 32:], None), (ids[:, :1], "decode")):
            with torch.no_grad(), count_sent() as sent:
                model(input_ids=tokens, past_key_values=cache, logits_to_keep=1)
            if mode is None:
                c = CostContext(shape, job.on(**mesh.degrees))
                held = torch.tensor([cache.state_nbytes, cache.nbytes, cache.device_nbytes])
                dist.all_reduce(held, dist.ReduceOp.MAX)
                planned_bytes = [state_bytes(c), state_bytes(c) + key_value_bytes(c), cache_on_device(c)]
                assert held.tolist() == planned_bytes, (family, held, planned_bytes)
                continue
            planned: Counter[tuple[str, int]] = Counter()
            for mixing in [layer.mixing for layer in shape.layers]:
                one = replace(chunk, job=replace(chunk.job, mode=mode))
                if mixing.shards_heads and mode == "prefill":
                    each = messages.prompt_chunk(mixing, one, 32, sp.ulysses_rank)
                else:
                    each = messages.decode(mixing, one) if mixing.shards_heads else mixing.sent(one)
                planned.update({(x.op, x.bytes): x.calls for x in each if x.calls})
            # The last token's hidden state is broadcast.
            of_layers = Counter((x.op, x.bytes) for x in sent if x.op != "broadcast")
            assert of_layers == planned, (family, mode, of_layers, planned)


PLANNED = ["Qwen3Next", "NemotronH", "KimiLinear", "Lfm2"]


@pytest.mark.parametrize("families", [PLANNED, *confirming([["Bamba", "MiniMax", "OlmoHybrid", "GraniteMoeHybrid"]])])
def test_bytes_and_collectives_are_the_planners(pool2: RankPool, families: list[str]) -> None:
    pool2.run(_as_planned, families)


def _sent_by_a_token() -> list[str]:
    model, _ = parallelized("Mamba", 2, False)
    cache = longspan.ShardedCache(model)
    with torch.no_grad():
        model(**prompt(), past_key_values=cache)
        cache.compare_from = 1000  # the hosts do not compare their batches
        with count_sent() as log:
            model(input_ids=torch.tensor([[5]]), past_key_values=cache)
    return [entry.op for entry in log]


def test_a_token_sends_nothing(pool2: RankPool) -> None:
    assert pool2.run(_sent_by_a_token) == [[], []]


# ---------------------------------------------------------------------------------------------------------------------
# What is refused.


@on_ranks(2)
def test_refusals() -> None:
    model, _ = parallelized("Lfm2", 2, False)
    layer = r"layer model\.layers\.0\.conv"
    for options in ({"prompt_lookup_num_tokens": 3}, {"assistant_model": made("Llama")}):
        with pytest.raises(longspan.LongspanError, match=rf"{layer} is recurrent, .* cannot forget drafted tokens"):
            model.generate(**prompt(), **options)
    llama, _ = parallelized("Llama", 2, False)
    with pytest.raises(longspan.LongspanError, match=rf"{layer} of assistant_model is recurrent"):
        llama.generate(**prompt(), assistant_model=model)
    with pytest.raises(longspan.LongspanError, match="needs softmax attention in every layer"):
        longspan.ShardedCache(model, cuda_graph=True)
    cache = longspan.ShardedCache(model)
    model.generate(**prompt(), past_key_values=cache, max_new_tokens=2)
    assert not cache.is_croppable
    with pytest.raises(longspan.LongspanError, match=rf"{layer} is recurrent, and its state after 38 tokens"):
        cache.crop(20)
    cache.reset()
    holes = prompt(2)
    holes["attention_mask"][1, 20:24] = 0
    with pytest.raises(longspan.LongspanError, match="has zeros between the ones of a row"):
        model.generate(**holes, past_key_values=cache, max_new_tokens=2)
