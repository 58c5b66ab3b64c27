"""Generation with a sharded KV cache: tokens and logits equal those of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

import longspan
from longspan.core.cache import KVPlacement, tokens_per_rank
from longspan.core.layout import Layout
from tests.choose import confirming
from tests.generate.generating import FAMILY, NEW, PROMPT, check_generated, generated, made, parallelized, plain, prompt
from tests.pool import RankPool

pytestmark = pytest.mark.versions

GENERATED = ["Llama", "Qwen3", "Mistral", "Gemma3Text", "GptOss", "GPT2", "Llama4Text", "Mixtral", "DeepseekV3"]
SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9}
BEAMS: dict[str, Any] = {"num_beams": 3, "num_return_sequences": 2}


def _on_meshes(name: str, meshes: list[tuple[int, bool]], cases: list[tuple[dict[str, Any], Any, Any]]) -> None:
    for ring, fsdp in meshes:
        model, sp = parallelized(name, ring, fsdp)
        for options, inputs, expected in cases:
            if name == "dynamic":  # transformers uses the frequencies of the longest sequence so far
                model, sp = parallelized(name, ring, fsdp)
            torch.manual_seed(3 if sp.rank == 0 else 4)
            check_generated(generated(model, inputs, **options), expected)


def _cases(name: str) -> list[tuple[dict[str, Any], Any, Any]]:
    chunks = {"prefill_chunk_size": 11}
    if name in FAMILY:  # positions of the whole prompt decide the frequencies
        return [(chunks, prompt(), plain(name)), (chunks, _all_padded(), generated(made(name), _all_padded()))]
    padded = prompt(3, padded=True)
    return [({}, prompt(), plain(name)), (chunks, prompt(), plain(name)), ({}, padded, plain(name, 3, True))]


# Their caches are those of others; the windows are Mistral's and Gemma-3's.
CONFIRMING = ("Qwen3", "Mixtral", "GPT2")


def _all_padded() -> dict[str, Any]:
    """Rows that all have padding: of 37 tokens at most 32 are real, which decides the frequencies."""
    return {key: rows[1:] for key, rows in prompt(3, padded=True).items()}


@pytest.mark.parametrize("name", [*(n for n in [*GENERATED, *FAMILY] if n not in CONFIRMING), *confirming(CONFIRMING)])
def test_greedy_on_4_ranks(pool4: RankPool, name: str) -> None:
    """Llama on three meshes, each other model on the ring of two and on one more."""
    meshes, cases = [(2, False), (4, False), (1, True)], _cases(name)
    if name == "Llama":
        pool4.run(_on_meshes, name, meshes, cases)
        return
    pool4.run(_on_meshes, name, meshes[:1], cases if name in FAMILY else cases[1:])
    if name not in FAMILY:
        pool4.run(_on_meshes, name, meshes[1 + GENERATED.index(name) % 2 :][:1], cases[:2])


def _ways(name: str) -> list[tuple[dict[str, Any], Any, Any]]:
    """Sampling, beams, and an end-of-sequence token that stops some rows early."""
    ends = int(plain(name, 3, True)[0][0, PROMPT + 2])
    stopped = {"eos_token_id": ends}
    return [
        (options, prompt(3, padded=True), plain(name, 3, True, tuple(options.items())))
        for options in (SAMPLED, BEAMS, stopped)
    ]


def _drafted(name: str, ring: int, repeated: Any, expected: Tensor) -> None:
    """Prompt lookup, a plain assistant and a parallelized one, then `cache_implementation`."""
    model, _ = parallelized(name, ring, fsdp=ring == 1)
    for options in (
        {"prompt_lookup_num_tokens": 3},
        {"assistant_model": made(name)},
        {"assistant_model": parallelized(name, ring, fsdp=False)[0]},
        {"cache_implementation": "static"},
    ):
        cache = longspan.ShardedCache(model)
        out = model.generate(**repeated, past_key_values=cache, do_sample=False, max_new_tokens=20, **options)
        assert torch.equal(out, expected), (options, out, expected)


@pytest.mark.parametrize(("name", "ring"), [("Llama", 1), ("Gemma3Text", 2)])
def test_drafted_tokens_and_cache_implementations(pool4: RankPool, name: str, ring: int) -> None:
    """The tokens equal those of one process without drafts, also after drafted tokens were rejected."""
    repeated = {key: rows.repeat(1, 2)[:, :41] for key, rows in prompt(1, 17).items()}
    pool4.run(_drafted, name, ring, repeated, made(name).generate(**repeated, do_sample=False, max_new_tokens=20))


@pytest.mark.parametrize("name", ["Gemma3Text", "Llama4Text", *confirming(["Llama"])])
def test_padding_that_covers_chunks_and_masks_with_holes(pool4: RankPool, name: str) -> None:
    short = prompt(3)
    short["attention_mask"][0, :30], short["attention_mask"][1, :13], short["attention_mask"][2, 20:24] = 0, 0, 0
    chunks = {"prefill_chunk_size": 11}
    cases: list[Any] = [(chunks, short, generated(made(name), short, **chunks))]
    both = {key: rows[:2] for key, rows in short.items()}  # the first chunk is padding in every row
    cases.append((chunks, both, generated(made(name), both, **chunks)))
    pool4.run(_on_meshes, name, [(1, True), (2, False)], cases)


@pytest.mark.parametrize(("ranks", "meshes"), [(1, [(1, False)]), (2, [(2, True)]), (8, [(2, False)])])
def test_ways_of_generating_on_more_meshes(get_pool: Any, ranks: int, meshes: list[tuple[int, bool]]) -> None:
    get_pool(ranks).run(_on_meshes, "Llama", meshes, _ways("Llama") if ranks < 8 else _ways("Llama")[:1])
    if ranks == 2:
        get_pool(ranks).run(_on_meshes, "GptOss", meshes, _cases("GptOss")[1:])


class _Recorder(BaseStreamer):
    def __init__(self) -> None:
        self.tokens: list[Tensor] = []
        self.ended = False

    def put(self, value: Tensor) -> None:
        self.tokens.append(value)

    def end(self) -> None:
        self.ended = True


def _turns(expected: list[tuple[Tensor, Tensor]], more: Tensor) -> None:
    """Reuse a cache in a second turn, crop it to the middle of the first, and continue; on three meshes."""
    for ring in (1, 2, 4):
        model, _ = parallelized("Llama", ring, False)
        cache, streamer = longspan.ShardedCache(model), _Recorder()
        first = generated(model, {**prompt(), "past_key_values": cache}, streamer)
        check_generated(first, expected[0])
        assert streamer.ended and torch.equal(torch.cat([x.view(-1) for x in streamer.tokens]), first[0][0])
        assert cache.get_seq_length() == PROMPT + NEW - 1 and cache.is_croppable
        second = torch.cat([first[0], more], 1)
        check_generated(generated(model, {"input_ids": second, "past_key_values": cache}), expected[1])
        cache.crop(0)
        assert cache.get_seq_length() == PROMPT + 2 * NEW + more.shape[1] - 1
        cache.crop(-30)
        cache.crop(20)
        assert cache.get_seq_length() == 20
        check_generated(generated(model, {**prompt(), "past_key_values": cache}), expected[0])


def test_turns_of_a_conversation(pool4: RankPool) -> None:
    more = prompt(n=9, seed=8)["input_ids"]
    first = plain("Llama")
    second = generated(made("Llama"), {"input_ids": torch.cat([first[0], more], 1)})
    pool4.run(_turns, [first, second], more)


def _replicas(fsdp: bool, prompts: list[Any], expected: list[Any]) -> None:
    """Two replicas with prompts of different lengths, of which one ends early."""
    model, sp = parallelized("Llama", 1, fsdp, data=2)
    mine = sp.data_rank
    new = (NEW, 3)[mine]
    for chunk in (None, 16, 8):  # the second prompt cannot be cut into as many chunks of 8 as the first
        check_generated(generated(model, prompts[mine], max_new_tokens=new, prefill_chunk_size=chunk), expected[mine])


def test_replicas_with_different_prompts(pool4: RankPool) -> None:
    prompts = [prompt(), prompt(n=2, seed=9)]
    model = made("Llama")
    expected = [generated(model, p, max_new_tokens=new) for p, new in zip(prompts, (NEW, 3), strict=True)]
    for fsdp in (True, False):
        pool4.run(_replicas, fsdp, prompts, expected)


def _refusals() -> list[str]:
    model, sp = parallelized("Llama", 2, False)
    other = longspan.ShardedCache(model)
    ids = prompt()["input_ids"]
    messages = []

    def refused(**batch: Any) -> None:
        with torch.no_grad(), pytest.raises(longspan.LongspanError) as error:
            model(**batch)
        messages.append(str(error.value))

    refused(input_ids=ids, cache=longspan.ShardedCache(model), past_key_values=other)
    with torch.no_grad():
        model(ids, None, None, other)  # by position
        if sp.rank == 3:
            other.crop(-5)
    refused(input_ids=ids[:, :1], past_key_values=other)
    cache = longspan.ShardedCache(model)
    refused(input_ids=(ids + (sp.rank == 1)) % 61, cache=cache)
    layer = model.model.layers[1]
    hook = layer.register_forward_pre_hook(lambda *_: 1 / 0)
    with torch.no_grad(), pytest.raises(ZeroDivisionError):
        model(input_ids=ids, past_key_values=cache)
    hook.remove()
    with torch.no_grad():
        model(input_ids=ids)  # another forward does not repair the cache
    refused(input_ids=ids[:, :1], past_key_values=cache)
    refused(input_ids=ids[:, :0], past_key_values=longspan.ShardedCache(model))
    return messages


def test_different_or_incomplete_caches_raise(pool4: RankPool) -> None:
    two, lengths, prompts, broken, nothing = zip(*pool4.run(_refusals), strict=True)
    assert all("is a tuple: a parallelized model keeps its keys and values" in text for text in two)
    assert len(set(lengths)) == len(set(prompts)) == 1
    assert "a cache of 37 tokens in 1 rows' on ranks 0, 1, 2" in lengths[0] and "of 32 tokens" in lengths[0]
    assert "ranks 1 were given another one than ranks 0, 2, 3" in prompts[0]
    assert all("it broke off behind 0 tokens" in text for text in broken)
    assert all("there is no new token behind the 0" in text for text in nothing)


@pytest.mark.parametrize(("ring", "ulysses", "kind"), [(2, 2, "zigzag"), (3, 1, "contiguous"), (1, 4, "contiguous")])
def test_tokens_per_rank_in_closed_form(ring: int, ulysses: int, kind: str) -> None:
    """Compare with placing every token, for prompts of few and many chunks and several starts."""
    layout = Layout(ring, ulysses, kind)
    for chunk in (11, 48, 96):
        for tokens in (1, 7, 48, 203, 480):
            for more in (0, 5, 70, 300):
                placement, rest = KVPlacement(ring), tokens
                while rest:
                    placement.add(layout, min(chunk, rest))
                    rest -= min(chunk, rest)
                for _ in range(more):
                    placement.grow(1)
                for start in (0, 3, tokens // 2, tokens - 1, tokens, tokens + more // 2):
                    counted = tuple(placement.count(rank, start) for rank in range(ring))
                    assert tokens_per_rank(layout, tokens, more, start, chunk) == counted
