"""Generation from pictures and video: the tokens equal those of one process, which reads the prompt at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import longspan
from tests.choose import confirming
from tests.hf.pictures import FAMILIES, ROWS, Rows, batch, build, rows_for
from tests.models import sharding
from tests.pool import RankPool, on_ranks


def _prompt(family: str, rows: Rows | None = None, **more: Any) -> dict[str, torch.Tensor]:
    """Return a batch that is padded on the left, with several pictures in a row, and rows without any."""
    return {key: x for key, x in batch(family, rows or rows_for(family), **more).items() if key != "labels"}


def _generated(model: Any, prompt: dict[str, torch.Tensor], **options: Any) -> torch.Tensor:
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0} | options
    torch.manual_seed(0)
    tokens: torch.Tensor = model.eval().generate(**prompt, **options)
    return tokens


def _chunk(prompt: dict[str, torch.Tensor]) -> int:
    """Return a chunk size such that the last of four chunks has 2 tokens; a chunk of Gemma-3's ends before an image."""
    return (prompt["input_ids"].shape[1] - 2) // 3


def _logits(model: Any, prompt: dict[str, torch.Tensor], **options: Any) -> torch.Tensor:
    """Return those of all new tokens, which differ where the tokens of a wrong mask would be the same."""
    out: Any = _generated(model, prompt, output_logits=True, return_dict_in_generate=True, **options)
    return torch.stack(out.logits)


def _on_ranks(family: str, expected: torch.Tensor) -> None:
    """At once, and in chunks that end within a picture; the last one of 2 tokens is not sharded."""
    prompt = _prompt(family)
    chunk = _chunk(prompt)
    for ring, fsdp in ((1, True), (2, False)):
        model = longspan.parallelize(build(family), sharding(ring=ring), fsdp=fsdp)
        torch.testing.assert_close(_logits(model, prompt), expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(_logits(model, prompt, prefill_chunk_size=chunk), expected, rtol=1e-4, atol=1e-4)


GENERATING = ("Qwen3VL", "Gemma3", "LlavaOnevision")


@pytest.mark.parametrize("family", [*GENERATING, *confirming(f for f in FAMILIES if f not in GENERATING)])
def test_greedy_tokens(pool2: RankPool, family: str) -> None:
    pool2.run(_on_ranks, family, _logits(build(family), _prompt(family)))


MESHES = {4: ((1, 1), (1, 2), (1, 4), (2, 2)), 8: ((1, 1), (1, 2), (1, 8), (2, 4))}
"""Data and ring by number of ranks; the others are Ulysses, up to twice as many as heads."""


def _on_meshes(family: str, rows: Rows, expected: torch.Tensor) -> None:
    for number, (data, ring) in enumerate(MESHES[dist.get_world_size()]):
        sp = sharding(data, ring)
        at = range(sp.data_rank * len(rows) // data, (sp.data_rank + 1) * len(rows) // data)
        prompt = _prompt(family, rows, keep=at)
        chunk = _chunk(prompt)
        model = longspan.parallelize(build(family), sp, fsdp=number % 2 == 0)
        for size in (None, chunk):
            found = _generated(model, prompt, prefill_chunk_size=size)
            assert torch.equal(found, expected[list(at)]), f"data={data}, ring={ring}, chunks of {size}"


@pytest.mark.parametrize(("ranks", "family"), confirming((ranks, family) for ranks in MESHES for family in FAMILIES))
def test_greedy_tokens_on_meshes(get_pool: Callable[[int], RankPool], ranks: int, family: str) -> None:
    """Of two replicas the second one has a row without pictures."""
    rows = (*rows_for(family), (12,))[:4]
    get_pool(ranks).run(_on_meshes, family, rows, _generated(build(family), _prompt(family, rows)), timeout=300)


LONG: Rows = ((3, ("video", 9, 4, 4), 4), (("image", 1, 4, 4), 2, ("video", 4, 4, 4), 1))


def _chunks_on_4(expected: torch.Tensor) -> None:
    for ring in (1, 2, 4):
        model = longspan.parallelize(build("Qwen2_5_VL"), sharding(ring=ring), fsdp=ring == 2)
        encoded = []
        model.model.visual.patch_embed.register_forward_hook(
            lambda _, args, out, encoded=encoded: encoded.append(len(args[0]))
        )
        assert torch.equal(_generated(model, _prompt("Qwen2_5_VL", LONG), prefill_chunk_size=8), expected)
        # Of 13 frames and an image of 16 patches a rank encodes one or two at a time, whatever the video's length.
        assert len(encoded) >= 5 and max(encoded) <= 32


def test_chunks_encode_the_units_that_they_need(pool4: RankPool) -> None:
    pool4.run(_chunks_on_4, _generated(build("Qwen2_5_VL"), _prompt("Qwen2_5_VL", LONG)))


def _long_video(expected: torch.Tensor) -> None:
    """171 tokens of a model for 128 positions, of which the video takes few."""
    model = longspan.parallelize(build("Qwen2_5_VL"), sharding(ring=2), fsdp=False)
    for chunk in (None, 50):
        assert torch.equal(_generated(model, _prompt("Qwen2_5_VL", VIDEO), prefill_chunk_size=chunk), expected)


VIDEO: Rows = ((5, ("video", 10, 8, 8), 4),)


def test_positions_of_a_video_are_fewer_than_its_tokens(pool2: RankPool) -> None:
    pool2.run(_long_video, _generated(build("Qwen2_5_VL"), _prompt("Qwen2_5_VL", VIDEO)))


def _replicas(expected: torch.Tensor) -> None:
    """The second replica's row has no pictures, and runs the tower for the weights that both hold."""
    sp = sharding(data=2)
    row = sp.data_rank
    model = longspan.parallelize(build("Qwen2_5_VL"), sp)
    mine = _prompt("Qwen2_5_VL", (*LONG[:1], (expected.shape[1] - 6,)), keep=(row,))
    mine.pop("attention_mask", None)
    assert torch.equal(_generated(model, mine, prefill_chunk_size=8), expected[row : row + 1])


def test_replicas_with_other_pictures(pool4: RankPool) -> None:
    length = _prompt("Qwen2_5_VL", LONG[:1])["input_ids"].shape[1]
    pool4.run(_replicas, _generated(build("Qwen2_5_VL"), _prompt("Qwen2_5_VL", (*LONG[:1], (length,)))))


COPIES: tuple[dict[str, Any], ...] = (
    {"num_beams": 3},
    {"num_beams": 2, "num_return_sequences": 2},
    {"num_return_sequences": 2, "do_sample": True},
)


def _repeated_rows(family: str, expected: list[torch.Tensor]) -> None:
    model = longspan.parallelize(build(family), sharding(), fsdp=False)
    for options, tokens in zip(COPIES, expected, strict=True):
        for chunk in (None, 9):
            assert torch.equal(_generated(model, _prompt(family), prefill_chunk_size=chunk, **options), tokens)


@pytest.mark.parametrize("family", ["Qwen2_5_VL", *confirming(["Qwen3VL", "Llava"])])
def test_beams_and_samples(pool2: RankPool, family: str) -> None:
    pool2.run(_repeated_rows, family, [_generated(build(family), _prompt(family), **options) for options in COPIES])


# ---------------------------------------------------------------------------------------------------------------------
# Conversations: a prompt that begins with what a cache holds.


def _second_turn(family: str, first: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the prompt of another image, behind a first turn and its answer."""
    turns, answer = [batch(family, (row,)) for row in (ROWS[0], ROWS[2])], first[:, -6:]
    turns[0]["input_ids"] = first
    turns[0]["mm_token_type_ids"] = torch.nn.functional.pad(turns[0]["mm_token_type_ids"], (0, answer.shape[1]))
    both = {key: [turn[key] for turn in turns if key in turn] for key in turns[0] if key != "labels"}
    return {key: torch.cat(xs, 1 if key in ("input_ids", "mm_token_type_ids") else 0) for key, xs in both.items()}


def _conversation(family: str, expected: list[torch.Tensor], folder: Path) -> None:
    first, second, text = expected
    model = longspan.parallelize(build(family), sharding(), fsdp=False)
    cache = longspan.ShardedCache(model)
    prompt = _prompt(family, ROWS[:1])
    assert torch.equal(_generated(model, prompt, past_key_values=cache), first)
    cache.save(folder)
    _generated(model, _prompt(family, ROWS[2:]))  # another conversation, whose positions differ
    # Text alone follows: positions are those behind the cache's pictures.
    assert torch.equal(_generated(model, {"input_ids": text[:, :-6]}, past_key_values=cache), text)

    encoded = []
    model.model.visual.register_forward_hook(lambda *_: encoded.append(1))
    for turn, chunk in ((second, None), (second, 9), (text, None)):
        loaded = longspan.ShardedCache.load(folder, model)
        whole = _second_turn(family, first) if turn is second else {"input_ids": text[:, :-6]}
        found = _generated(model, whole, past_key_values=loaded, prefill_chunk_size=chunk)
        assert torch.equal(found, turn)
    assert len(encoded) == 1 + 2  # the second turn's images, never the first turn's video

    cache.crop(10)
    with pytest.raises(longspan.LongspanError, match=r"was cropped to 10 of the \d+ tokens of a prompt with pictures"):
        _generated(model, {"input_ids": text[:, :-6]}, past_key_values=cache)
    assert torch.equal(_generated(model, prompt, past_key_values=cache), first)


@pytest.mark.parametrize("family", ["Qwen2_5_VL", *confirming(["Qwen3VL"])])
def test_second_turn(pool2: RankPool, family: str, tmp_path: Path) -> None:
    first = _generated(build(family), _prompt(family, ROWS[:1]))
    second = _generated(build(family), _second_turn(family, first))
    whole = _prompt(family, ROWS[:1])
    whole["input_ids"] = torch.cat([first, torch.arange(3, 10)[None]], 1)
    kinds = whole["mm_token_type_ids"]
    whole["mm_token_type_ids"] = torch.nn.functional.pad(kinds, (0, whole["input_ids"].shape[1] - kinds.shape[1]))
    pool2.run(_conversation, family, [first, second, _generated(build(family), whole)], tmp_path)


def _whole_conversation(family: str, first: torch.Tensor, turns: list[dict[str, torch.Tensor]]) -> Any:
    """Return both turns as one prompt, with the answer to the first between them."""
    before, after = turns
    answered = first.shape[1] - before["input_ids"].shape[1]
    both = {key: [x, after[key]] for key, x in before.items() if key in after}
    both["input_ids"][0] = first
    if "token_type_ids" in both:
        both["token_type_ids"][0] = torch.nn.functional.pad(before["token_type_ids"], (0, answered))
    return {key: torch.cat(xs, 1 if key in ("input_ids", "token_type_ids") else 0) for key, xs in both.items()}


def _with_a_second_image(family: str, turns: list[dict[str, torch.Tensor]], expected: list[Any]) -> None:
    """Pixels of both images, or of the new one alone, which is all that transformers takes behind its own cache."""
    (first, logits), second = expected
    whole, sp = _whole_conversation(family, first, turns), sharding(data=2)
    model = longspan.parallelize(build(family), sp)
    for pixels, chunk in ((whole["pixel_values"], None), (whole["pixel_values"], 14), (whole["pixel_values"][1:], 6)):
        cache = longspan.ShardedCache(model)
        sizes = chunk and chunk + sp.data_rank  # the replicas' prompts need different numbers of chunks
        found = _logits(model, turns[0], past_key_values=cache, prefill_chunk_size=sizes)
        torch.testing.assert_close(found, logits, rtol=1e-4, atol=1e-4)
        prompt = whole | {"pixel_values": pixels}
        found = _logits(model, prompt, past_key_values=cache, prefill_chunk_size=sizes)
        torch.testing.assert_close(found, second, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["Gemma3", *confirming(["Llava"])])
def test_second_turn_with_an_image(pool4: RankPool, family: str) -> None:
    """No chunk of a Gemma-3 cuts an image, counted from the cached tokens."""
    turns = [_prompt(family, ((n, ("image", 1, 4, 4), m),), seed=n) for n, m in ((12, 9), (7, 5))]
    model = build(family)
    first = _generated(model, turns[0])
    second = _logits(model, _whole_conversation(family, first, turns))
    pool4.run(_with_a_second_image, family, turns, [(first, _logits(model, turns[0])), second])


@on_ranks(2)
def test_refusals() -> None:
    model, prompt = longspan.parallelize(build("Qwen2_5_VL"), sharding(), fsdp=False), _prompt("Qwen2_5_VL")
    embedded = {key: x for key, x in prompt.items() if key != "input_ids"}
    with pytest.raises(longspan.LongspanError, match=r"`pixel_values` with `inputs_embeds`"):
        _generated(model, embedded | {"inputs_embeds": torch.zeros(*prompt["input_ids"].shape, 32)})
    with pytest.raises(longspan.LongspanError, match=r"`pixel_values` without a prompt"):
        _generated(model, {"pixel_values": prompt["pixel_values"]})
    with pytest.raises(longspan.LongspanError, match=r"`pixel_values` holds 59 patches, the 3 grids of `image_grid_th"):
        _generated(model, prompt | {"pixel_values": prompt["pixel_values"][1:]}, prefill_chunk_size=9)
    if sharding().rank:
        prompt["pixel_values"] = prompt["pixel_values"] + 1
    with pytest.raises(
        longspan.LongspanError, match=r"ranks 1 were given another one than ranks 0 .same shapes, other"
    ):
        _generated(model, prompt, prefill_chunk_size=9)
    grids = prompt["image_grid_thw"] * (1 + sharding().rank)  # transformers raises before the first forward
    with pytest.raises((longspan.LongspanError, RuntimeError), match=r"rank 1 failed: RuntimeError|^shape mismatch"):
        _generated(model, prompt | {"image_grid_thw": grids})
