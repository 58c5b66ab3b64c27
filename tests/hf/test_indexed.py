"""Indexed attention: every number equals one process's, whichever of equal scores of the indexer that one takes."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import transformers

import longspan
from longspan import Memory
from longspan.core.memory import LONGEST
from longspan.hf.forward import indexed
from longspan.plan import Job
from longspan.plan.from_model import shape_from_config
from longspan.plan.job import CostContext
from tests.choose import confirming
from tests.fuzz.cases import Case
from tests.fuzz.run import judge
from tests.generate.generating import NEW, PROMPT, check_generated, generated, made, parallelized, plain, prompt
from tests.models import (
    COMPRESSED,
    INDEXED,
    Truth,
    build,
    compare,
    inputs_of,
    meshes,
    packed,
    padded,
    sharding,
    truth_of,
    with_holes,
)
from tests.pool import RankPool

pytestmark = pytest.mark.versions

SMALL = (1 << 8, 1 << 8)  # several blocks of queries
Mesh = tuple[int, int, str]  # data, ring, layout


def _in_small_blocks() -> None:
    from longspan.attn import indexed as attention

    attention.INDEXED_TILE = indexed.INDEXED_TILE = SMALL


def _adapted(family: str, lora: bool, **changes: Any) -> Any:
    model = build(family, **changes)
    if not lora:
        return model
    import peft

    torch.manual_seed(3)
    targets = ["kv_proj", "q_b_proj"] if family in COMPRESSED else ["kv_b_proj", "q_a_proj", "wk"]
    config = peft.LoraConfig(r=3, target_modules=targets, init_lora_weights=False)
    return peft.get_peft_model(model, config)


def _run(family: str, cases: list[tuple[Mesh, dict[str, Any]]], whole: Any, truth: Truth, lora: bool) -> None:
    _in_small_blocks()
    for (data, ring, layout), options in cases:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of adapters
            sp = sharding(data, ring, layout)
            compare(truth, longspan.parallelize(_adapted(family, lora), sp, **options), whole, sp)


LEFT = functools.partial(padded, side="left")
RIGHT = functools.partial(padded, side="right")
FSDP, REPLICATED = {"fsdp": True}, {"fsdp": False}
CASES: list[Any] = [
    (4, "DeepseekV32", packed, [((1, 2, "zigzag"), FSDP)], False),
    (4, "GlmMoeDsa", packed, [((1, 4, "contiguous"), REPLICATED)], False),
    (4, "AXK2", RIGHT, [((2, 2, "zigzag"), FSDP)], False),
    (4, "HYV4", with_holes, [((1, 1, "auto"), FSDP)], False),
    (4, "Qwen4ExpText", LEFT, [((1, 2, "zigzag"), REPLICATED)], False),
    (4, "DeepseekV4", RIGHT, [((1, 2, "zigzag"), FSDP)], False),
    (4, "MiniMaxM3VLText", RIGHT, [((1, 4, "zigzag"), FSDP)], False),
    (2, "GlmMoeDsa", inputs_of, [((1, 2, "zigzag"), {"memory": Memory(checkpointing="grouped")}),
                                 ((1, 1, "auto"), {"memory": LONGEST})], True),
]  # fmt: skip
EVERYWHERE = [
    *(
        (ranks, f, inputs_of, [(mesh, FSDP) for mesh in meshes(ranks)], False)
        for f in (*INDEXED, *COMPRESSED)
        for ranks in (2, 4)
    ),
    *((8, f, RIGHT, [((1, 4, "zigzag"), FSDP)], False) for f in (*INDEXED, *COMPRESSED)),
    (2, "DeepseekV4", inputs_of, [((1, 2, "contiguous"), {"memory": Memory(checkpointing="full")})], True),
    *((4, f, inputs, [((1, 2, "zigzag"), FSDP)], False) for f in INDEXED for inputs in (packed, LEFT, with_holes)),
    (
        4,
        "HYV4",
        packed,
        [((1, 2, "zigzag"), {"memory": Memory(checkpointing=x)}) for x in ("full", "selective")],
        True,
    ),
]


@pytest.mark.parametrize(("ranks", "family", "inputs", "cases", "lora"), [*CASES, *confirming(EVERYWHERE)])
def test_one_process(
    get_pool: Callable[[int], RankPool],
    ranks: int,
    family: str,
    inputs: Callable[[str], dict[str, Any]],
    cases: list[tuple[Mesh, dict[str, Any]]],
    lora: bool,
) -> None:
    whole = inputs(family)
    truth = truth_of(_adapted(family, lora), whole)
    get_pool(ranks).run(_run, family, cases, whole, truth, lora, timeout=240)


WITH_PICTURES = ("hy_v4_vl", "dots3_note", "minimax_m3_vl", "qwen4_exp", "glm5_next")
EACH_MESH = [
    ({"ring": 2}, "contiguous"), ({"ring": 2}, "zigzag"), ({"ulysses": 2, "ring": 2}, "zigzag"),
    ({"ring": 4}, "contiguous"), ({"ulysses": 2, "ring": 4}, "zigzag"),
]  # fmt: skip


@pytest.mark.parametrize(("family", "mesh", "layout"), confirming((f, *m) for f in WITH_PICTURES for m in EACH_MESH))
def test_one_process_with_pictures(
    get_pool: Callable[[int], RankPool], family: str, mesh: dict[str, int], layout: str
) -> None:
    [outcome] = judge([Case(f"types/{family}", mesh=mesh, sharding={"layout": layout})], get_pool)
    assert outcome.kind == "equal", outcome.text


@pytest.mark.parametrize(
    ("family", "mesh"),
    [
        ("glm5_next", {"ring": 2}),
        *confirming([("glm5_next", {"ulysses": 2}), ("qwen4_exp", {"ring": 2}), ("qwen4_exp", {"ulysses": 2})]),
    ],
)
def test_generated_with_pictures(get_pool: Callable[[int], RankPool], family: str, mesh: dict[str, int]) -> None:
    chunks = {"max_new_tokens": 4, "prefill_chunk_size": 18}
    case = Case(f"types/{family}", mesh=mesh, job="generate", generation=chunks, padding="left", length=21)
    [outcome] = judge([case], get_pool)
    assert outcome.kind == "equal", outcome.text


def test_many_scores_of_the_small_indexers_are_equal() -> None:
    """Otherwise the tests above would not see which of them is taken."""
    model, tied = build("DeepseekV32"), list[bool]()
    topk = torch.Tensor.topk

    def spied(scores: Any, k: int, *args: Any, **more: Any) -> Any:
        if scores.dim() == 3 and k == model.config.index_topk:
            values = topk(scores, k + 1, -1).values
            tied.append(bool(((values[..., k - 1] == values[..., k]) & values[..., k].isfinite()).any()))
        return topk(scores, k, *args, **more)

    with mock.patch.object(torch.Tensor, "topk", spied):
        model(**inputs_of("DeepseekV32"))
    assert tied == [True] * 3


def _generates(cases: list[tuple[str, int, bool, Any]]) -> None:
    _in_small_blocks()
    for name, ring, chunked, expected in cases:
        model, sp = parallelized(name, ring, fsdp=ring == 2)
        cache = longspan.ShardedCache(model)
        inputs = {**prompt(1 if chunked else 3, padded=not chunked), "past_key_values": cache}
        check_generated(generated(model, inputs, **({"prefill_chunk_size": 16} if chunked else {})), expected)
        config = model.config
        vector = config.kv_lora_rank + config.qk_rope_head_dim
        kinds = getattr(config, "indexer_types", ["full"] * 3)
        elements = sum(vector + config.index_head_dim * (kind == "full") for kind in kinds)
        rows = inputs["input_ids"].shape[0]
        assert cache.nbytes == 4 * rows * cache.kv_placement.count(sp.ring_rank) * elements
        cache.crop(PROMPT - 1)
        if chunked:
            check_generated(generated(model, inputs), expected)


def test_generated_tokens_and_bytes_of_the_cache(pool4: RankPool) -> None:
    names = ("DeepseekV32", 4, False), ("GlmMoeDsa", 2, True), ("HYV4", 1, False)
    chunks = (("prefill_chunk_size", 16),)
    cases = [
        (name, ring, chunked, plain(name, 1, False, chunks) if chunked else plain(name, 3, True))
        for name, ring, chunked in names
    ]
    pool4.run(_generates, cases, timeout=120)


@pytest.mark.parametrize("name", ["GlmMoeDsa", "DeepseekV4", "Qwen4ExpText"])
def test_a_saved_cache_loads_on_another_mesh(get_pool: Any, tmp_path: Any, name: str) -> None:
    model = made(name)
    cache = transformers.DynamicCache(config=model.config)  # without it, longer rows would choose among equal scores
    first = generated(model, {**prompt(), "past_key_values": cache}, **CHUNKS)
    second = torch.cat([first[0], prompt(n=9, seed=8)["input_ids"]], 1)
    expected = generated(model, {**_all_real(second), "past_key_values": cache})
    get_pool(4).run(_saved, name, tmp_path / "cache", first)
    get_pool(2).run(_loaded, name, tmp_path / "cache", second, expected)


CHUNKS = {"prefill_chunk_size": 17}  # longer than `FEW` tokens on each of 4 ranks, and the last chunk not


def _saved(name: str, folder: Any, expected: Any) -> None:
    _in_small_blocks()
    model, _ = parallelized(name, 4, False)
    cache = longspan.ShardedCache(model)
    check_generated(generated(model, {**prompt(), "past_key_values": cache}, **CHUNKS), expected)
    cache.save(folder)


def _loaded(name: str, folder: Any, second: Any, expected: Any) -> None:
    model, _ = parallelized(name, 2, False)
    cache = longspan.ShardedCache.load(folder, model)
    check_generated(generated(model, {**_all_real(second), "past_key_values": cache}), expected)


def _all_real(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


GENERATED: list[dict[str, Any]] = [{}, CHUNKS, {"prefill_chunk_size": 5}, {"num_beams": 3}, {"max_new_tokens": 70}]


def _generates_each(name: str, rings: list[int], expected: list[Any]) -> None:
    for ring in rings:
        model, _ = parallelized(name, ring, False)
        for options, each in zip(GENERATED, expected, strict=True):
            check_generated(generated(model, prompt(2), **options), each)


@pytest.mark.parametrize(
    ("name", "ranks"), confirming((name, n) for name in ("DeepseekV4", "Qwen4ExpText") for n in (2, 4))
)
def test_generated_on_every_mesh(get_pool: Any, name: str, ranks: int) -> None:
    expected = [plain(name, 2, False, tuple(options.items())) for options in GENERATED]
    rings = [ring for ring in (1, 2, 4) if ring <= ranks]
    get_pool(ranks).run(_generates_each, name, rings, expected, timeout=240)


def test_bytes_and_limits_of_a_cache_of_entries(pool2: RankPool) -> None:
    pool2.run(_caches_entries)


def _caches_entries() -> None:
    model, sp = parallelized("DeepseekV4", 2, False)
    cache = longspan.ShardedCache(model)
    ids = prompt()["input_ids"]
    generated(model, {"input_ids": ids, "past_key_values": cache})
    shape = shape_from_config(model.config.to_dict(), "test")
    c = CostContext(shape, Job(context=PROMPT, mode="prefill", dtype="fp32").on(ring=2))
    planned = [layer.mixing.cache_by_rank(c, generated=NEW - 1)[sp.rank] for layer in shape.layers]
    assert cache.nbytes == sum(planned)
    with pytest.raises(longspan.LongspanError, match="layers.1.self_attn compresses .* state after 44 tokens cannot"):
        cache.crop(PROMPT)
    with pytest.raises(longspan.LongspanError, match="layers.1.self_attn of .* joins neighbouring tokens"):
        generated(model, prompt(2, padded=True))


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"index_topk": 0}, {}, r"index_topk=0 in the config .* at least 1"),
        ({}, {"kernel": "flash"}, "kernel='flash': .* indexer chooses"),
    ],
)
def test_refused(changes: dict[str, Any], options: dict[str, Any], message: str) -> None:
    sp = longspan.SequenceSharding(longspan.init_mesh())
    with pytest.raises(longspan.LongspanError, match=message):
        longspan.parallelize(build("DeepseekV32", **changes), sp, **options)


def test_refused_with_a_model() -> None:
    model = longspan.parallelize(build("DeepseekV32", index_topk=1000), longspan.SequenceSharding(longspan.init_mesh()))
    reference = build("DeepseekV32", index_topk=1000)  # more than there are tokens: all of them
    torch.testing.assert_close(model(**inputs_of("")).loss, reference(**inputs_of("")).loss)
    for options in ({"dtype": "int8"}, {"latent": False}, {"offload": "host"}):
        with pytest.raises(longspan.LongspanError, match="caches them with index keys, exactly and on the device"):
            longspan.ShardedCache(model, **options)
    compressed = longspan.parallelize(build("DeepseekV4"), longspan.SequenceSharding(longspan.init_mesh()))
    with pytest.raises(longspan.LongspanError, match="layers.1.self_attn of .* joins neighbouring tokens"):
        compressed(**packed("DeepseekV4"))
    blocks = longspan.parallelize(build("MiniMaxM3VLText"), longspan.SequenceSharding(longspan.init_mesh()))
    with pytest.raises(longspan.LongspanError, match="layers.0.self_attn attends to chosen blocks"):
        blocks.eval().generate(prompt()["input_ids"], max_new_tokens=2)
    ids = inputs_of("")["input_ids"][:1]
    tin = torch.zeros_like(ids)
    with pytest.raises(longspan.LongspanError, match="chooses the tokens that it attends to from the whole row"):
        model(input_ids=ids, tin=tin, tout=tin + 1)
