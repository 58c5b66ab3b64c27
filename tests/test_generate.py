"""Generation with a cache over the ranks: tokens and logits are those of one process."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer

import longspan
from longspan.core.layout import Layout
from longspan.core.places import Places, tokens_held
from tests.models import build, sharding
from tests.pool import RankPool

PROMPT, NEW = 37, 8
GENERATED = ["Llama", "Qwen3", "Mistral", "Gemma3Text", "GptOss", "GPT2", "Llama4Text", "Mixtral", "DeepseekV3"]
CHANGES: dict[str, dict[str, Any]] = {
    "DeepseekV3": {
        "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
        "v_head_dim": 6, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
        "first_k_dense_replace": 1, "moe_intermediate_size": 24, "n_shared_experts": 1,
    },
    "dynamic": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
                "max_position_embeddings": 16},
    "longrope": {"rope_parameters": {
        "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [3.0] * 4,
        "original_max_position_embeddings": 16, "factor": 4.0}},
}  # fmt: skip
FAMILY = {"dynamic": "Llama", "longrope": "Llama"}
SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9}
BEAMS: dict[str, Any] = {"num_beams": 3, "num_return_sequences": 2}


def _model(name: str) -> Any:
    return build(FAMILY.get(name, name), **CHANGES.get(name, {})).eval()


def _prompt(rows: int = 1, n: int = PROMPT, padded: bool = False, seed: int = 7) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 61, (rows, n), generator=g)
    mask = torch.ones_like(ids)
    if padded:
        for row in range(rows):
            mask[row, : 5 * row] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def _generate(model: Any, inputs: dict[str, Any], streamer: Any = None, **more: Any) -> tuple[Tensor, Tensor]:
    """Ids, and the logits of every new token."""
    options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0, **more}
    config = GenerationConfig(**options, return_dict_in_generate=True, output_logits=True)
    out = model.generate(**inputs, generation_config=config, streamer=streamer)
    return out.sequences, torch.stack(out.logits, 1)


@functools.cache
def _plain(name: str, rows: int = 1, padded: bool = False, options: tuple[tuple[str, Any], ...] = ()) -> Any:
    model = _model(name)
    torch.manual_seed(3)
    return _generate(model, _prompt(rows, padded=padded), **dict(options))


def _check(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    assert torch.equal(found[0], expected[0]), (found[0], expected[0])
    torch.testing.assert_close(found[1], expected[1], rtol=1e-5, atol=1e-5 * float(expected[1].abs().max()))


def _parallelized(name: str, ring: int, fsdp: bool, data: int = 1) -> tuple[Any, longspan.SequenceSharding]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of ranks without heads
        sp = sharding(data=data, ring=ring)
        return longspan.parallelize(_model(name), sp, fsdp=fsdp), sp


def _on_meshes(name: str, meshes: list[tuple[int, bool]], cases: list[tuple[dict[str, Any], Any, Any]]) -> None:
    for ring, fsdp in meshes:
        model, sp = _parallelized(name, ring, fsdp)
        for options, inputs, expected in cases:
            if name == "dynamic":  # transformers' frequencies are those of the longest sequence that it has seen
                model, sp = _parallelized(name, ring, fsdp)
            torch.manual_seed(3 if sp.rank == 0 else 4)
            _check(_generate(model, inputs, **options), expected)


def _cases(name: str) -> list[tuple[dict[str, Any], Any, Any]]:
    return [
        ({}, _prompt(), _plain(name)),
        ({"prefill_chunk_size": 11}, _prompt(), _plain(name)),
        ({}, _prompt(3, padded=True), _plain(name, 3, True)),
    ]


@pytest.mark.parametrize("name", [*GENERATED, *FAMILY])
def test_greedy_on_4_ranks(pool4: RankPool, name: str) -> None:
    pool4.run(_on_meshes, name, [(1, True), (2, False), (4, False)], _cases(name))


def _ways(name: str) -> list[tuple[dict[str, Any], Any, Any]]:
    """Sampling, beams, an end of sequence that stops some rows early."""
    ends = int(_plain(name, 3, True)[0][0, PROMPT + 2])
    stopped = {"eos_token_id": ends}
    return [
        (options, _prompt(3, padded=True), _plain(name, 3, True, tuple(options.items())))
        for options in (SAMPLED, BEAMS, stopped)
    ]


@pytest.mark.parametrize(("ranks", "meshes"), [(1, [(1, False)]), (2, [(2, True)]), (8, [(2, False), (8, True)])])
def test_ways_of_generating_on_more_meshes(get_pool: Any, ranks: int, meshes: list[tuple[int, bool]]) -> None:
    for name in ("Llama", "Gemma3Text") if ranks == 8 else ("Llama", "GptOss"):
        cases = _cases(name)[1:] + (_ways(name) if name == "Llama" else [])
        get_pool(ranks).run(_on_meshes, name, meshes, cases)


class _Kept(BaseStreamer):
    def __init__(self) -> None:
        self.tokens: list[Tensor] = []
        self.ended = False

    def put(self, value: Tensor) -> None:
        self.tokens.append(value)

    def end(self) -> None:
        self.ended = True


def _turns(expected: list[tuple[Tensor, Tensor]], more: Tensor) -> None:
    """A cache kept for a second turn, cropped to the middle of the first, and gone on with; on three meshes."""
    for ring in (1, 2, 4):
        model, _ = _parallelized("Llama", ring, False)
        cache, kept = longspan.ShardedCache(model), _Kept()
        first = _generate(model, {**_prompt(), "past_key_values": cache}, kept)
        _check(first, expected[0])
        assert kept.ended and torch.equal(torch.cat([x.view(-1) for x in kept.tokens]), first[0][0])
        assert cache.get_seq_length() == PROMPT + NEW - 1 and cache.is_croppable
        second = torch.cat([first[0], more], 1)
        _check(_generate(model, {"input_ids": second, "past_key_values": cache}), expected[1])
        cache.crop(0)
        assert cache.get_seq_length() == PROMPT + 2 * NEW + more.shape[1] - 1
        cache.crop(-30)
        cache.crop(20)
        assert cache.get_seq_length() == 20
        _check(_generate(model, {**_prompt(), "past_key_values": cache}), expected[0])


def test_turns_of_a_conversation(pool4: RankPool) -> None:
    more = _prompt(n=9, seed=8)["input_ids"]
    first = _plain("Llama")
    second = _generate(_model("Llama"), {"input_ids": torch.cat([first[0], more], 1)})
    pool4.run(_turns, [first, second], more)


def _replicas(fsdp: bool, prompts: list[Any], expected: list[Any]) -> str:
    """Two replicas with prompts of other lengths, of which one ends early."""
    model, sp = _parallelized("Llama", 1, fsdp, data=2)
    mine = sp.data_rank
    new = (NEW, 3)[mine]
    for chunk in (None, 16):
        _check(_generate(model, prompts[mine], max_new_tokens=new, prefill_chunk_size=chunk), expected[mine])
    short = {"input_ids": torch.full((1, (PROMPT, 2)[mine]), 5)}
    with pytest.raises(longspan.LongspanError) as error:
        _generate(model, short, prefill_chunk_size=8)
    return str(error.value)


def test_replicas_with_prompts_of_their_own(pool4: RankPool) -> None:
    prompts = [_prompt(), _prompt(n=21, seed=9)]
    model = _model("Llama")
    expected = [_generate(model, p, max_new_tokens=new) for p, new in zip(prompts, (NEW, 3), strict=True)]
    for fsdp in (True, False):
        said = set(pool4.run(_replicas, fsdp, prompts, expected))
        assert said == {
            "the replicas' prompts come in 5 chunks, since one of them has 37 tokens, and 2 tokens (rank 2) are not "
            "cut into so many; give the replicas prompts of about one length, or a larger prefill_chunk_size"
        }


def _refusals() -> list[str]:
    """What every rank is told."""
    model, sp = _parallelized("Llama", 2, False)
    other = longspan.ShardedCache(model)
    ids = _prompt()["input_ids"]
    said = []

    def refused(**batch: Any) -> None:
        with torch.no_grad(), pytest.raises(longspan.LongspanError) as error:
            model(**batch)
        said.append(str(error.value))

    with torch.no_grad():
        model(input_ids=ids, past_key_values=other)
        if sp.rank == 3:
            other.crop(-5)
    refused(input_ids=ids[:, :1], past_key_values=other)
    cache = longspan.ShardedCache(model)
    refused(input_ids=(ids + (sp.rank == 1)) % 61, past_key_values=cache)
    layer = model.model.layers[1]
    hook = layer.register_forward_pre_hook(lambda *_: 1 / 0)
    with torch.no_grad(), pytest.raises(ZeroDivisionError):
        model(input_ids=ids, past_key_values=cache)
    hook.remove()
    with torch.no_grad():
        model(input_ids=ids)  # another forward does not make it whole
    refused(input_ids=ids[:, :1], past_key_values=cache)
    refused(input_ids=ids[:, :0], past_key_values=longspan.ShardedCache(model))
    return said


def test_caches_that_differ_or_broke_off_are_refused(pool4: RankPool) -> None:
    lengths, prompts, broken, nothing = zip(*pool4.run(_refusals), strict=True)
    assert len(set(lengths)) == len(set(prompts)) == 1
    assert "a cache of 37 tokens in 1 rows' on ranks 0, 1, 2" in lengths[0] and "of 32 tokens" in lengths[0]
    assert "ranks 1 were given another one than ranks 0, 2, 3" in prompts[0]
    assert all("it broke off behind 0 tokens" in text for text in broken)
    assert all("there is no new token behind the 0" in text for text in nothing)


def _with_adapters(inputs: Any, expected: Any) -> None:
    model, _ = _adapted(), None
    model = longspan.parallelize(model, sharding(ring=2), fsdp=False)
    _check(_generate(model, inputs), expected)


def _adapted() -> Any:
    import peft

    torch.manual_seed(5)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    return peft.get_peft_model(_model("Llama"), config).eval()


def test_adapters(pool2: RankPool) -> None:
    expected = _generate(_adapted(), _prompt())
    assert not torch.equal(expected[1], _plain("Llama")[1])
    pool2.run(_with_adapters, _prompt(), expected)


@pytest.mark.parametrize(("ring", "ulysses", "kind"), [(2, 2, "zigzag"), (3, 1, "contiguous"), (1, 4, "contiguous")])
def test_what_a_rank_holds_in_closed_form(ring: int, ulysses: int, kind: str) -> None:
    """Against placing every token, for prompts of few and many chunks and starts in all parts of them."""
    layout = Layout(ring, ulysses, kind)
    for chunk in (11, 24, 48, 96):
        for prompt in (1, 7, 48, 150, 203, 480):
            for generated in (0, 5, 70, 300):
                places, rest = Places(ring), prompt
                while rest:
                    places.add(layout, min(chunk, rest))
                    rest -= min(chunk, rest)
                for _ in range(generated):
                    places.grow(1)
                for start in (0, 3, prompt // 2, prompt - 1, prompt, prompt + generated // 2):
                    counted = tuple(places.count(rank, start) for rank in range(ring))
                    assert tokens_held(layout, prompt, generated, start, chunk) == counted
