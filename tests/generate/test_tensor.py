"""Generation on a tensor axis: the tokens of one process, with weights, heads and cache sharded over its ranks."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import longspan
from longspan.core.parallel import ParallelConfig
from longspan.hf.weights.tensor_rules import TensorStyle
from longspan.plan.from_model import shape_from_config
from longspan.plan.job import CostContext, Job
from tests.choose import confirming
from tests.generate.generating import PROMPT, check_generated, generated, prompt
from tests.models import UNEVEN, build
from tests.pool import RankPool

pytestmark = pytest.mark.versions

Cut = tuple[dict[str, int], TensorStyle, bool]

SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9}
BEAMS: dict[str, Any] = {"num_beams": 3, "num_return_sequences": 2}
WIDE = {"vocab_size": 64}

# ParallelConfig, style, and whether FSDP shards the rest. There are two KV heads: with four ranks, two share each.
MESHES: dict[str, list[Cut]] = {
    "Llama": [
        ({"tensor": 4}, "tp", False),
        ({"tensor": 2, "ulysses": 2}, "megatron-sp", True),
        ({"tensor": 2, "ring": 2}, "tp", True),
    ],
    "Qwen3": [({"tensor": 4}, "megatron-sp", False)],
    "Gemma3Text": [({"tensor": 2, "ring": 2}, "megatron-sp", False)],
    "GptOss": [({"tensor": 2, "ulysses": 2}, "tp", False), ({"tensor": 4}, "megatron-sp", True)],
    "Mixtral": [({"tensor": 2, "ring": 2}, "tp", True)],
    "uneven": [({"tensor": 4}, "tp", False)],
    "Olmo2": [({"tensor": 4}, "megatron-sp", True)],
    "Phi3": [({"tensor": 2, "ring": 2}, "tp", False)],
    "DeepseekV3": [({"tensor": 4}, "tp", False)],
    "Llama4Text": [({"tensor": 2, "ulysses": 2}, "tp", False)],
}


def _made(name: str) -> Any:
    return (build("Llama", **UNEVEN) if name == "uneven" else build(name, **WIDE)).eval()


def _cut(name: str, mesh: dict[str, int], style: TensorStyle, fsdp: bool) -> tuple[Any, longspan.SequenceSharding]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of ranks without heads
        sp = longspan.SequenceSharding(longspan.init_mesh(**mesh))
        return longspan.parallelize(_made(name), sp, fsdp=fsdp, tensor_style=style), sp


def _on_meshes(name: str, meshes: list[Cut], cases: list[tuple[dict[str, Any], Any, Any]]) -> None:
    """Compare every other case on the first mesh, the others on the next, and so on."""
    for at, (mesh, style, fsdp) in enumerate(meshes):
        model, sp = _cut(name, mesh, style, fsdp)
        for options, inputs, expected in cases[at % 2 :: 2] if len(meshes) > 1 else cases:
            torch.manual_seed(3 + sp.model_rank)  # the first rank's counts
            check_generated(generated(model, inputs, **options), expected)


def _cases(name: str) -> list[tuple[dict[str, Any], Any, Any]]:
    """Whole prompts, prompts in chunks of which the last has fewer tokens than there are ranks, rows with padding."""
    model, padded = _made(name), prompt(3, padded=True)
    one = generated(model, prompt())
    cases: list[Any] = [({}, prompt(), one), ({"prefill_chunk_size": 12}, prompt(), one)]
    for options in ({}, SAMPLED, BEAMS) if name == "Llama" else ({},):
        torch.manual_seed(3)
        cases.append((options, padded, generated(model, padded, **options)))
    return cases


CONFIRMING = ("Mixtral", "Olmo2", "Phi3", "Llama4Text")  # sharded like others


@pytest.mark.parametrize("name", [*(name for name in MESHES if name not in CONFIRMING), *confirming(CONFIRMING)])
def test_tokens_equal_those_of_one_process(pool4: RankPool, name: str) -> None:
    pool4.run(_on_meshes, name, MESHES[name], _cases(name))


def test_two_ranks_and_two_data_ranks(get_pool: Any) -> None:
    cases = _cases("Llama")[1:]
    get_pool(2).run(_on_meshes, "Llama", [({"tensor": 2}, "tp", True), ({"tensor": 2}, "megatron-sp", False)], cases)
    get_pool(4).run(_on_meshes, "Llama", [({"data": 2, "tensor": 2}, "tp", True)], cases[1:3])


def _reuses(folder: Path, expected: list[Any], more: Any) -> None:
    """Crop a cache and use it again; save it, and load it on meshes with the axis or without. Compare its bytes with
    the planner's.
    """
    model, sp = _cut("Llama", {"tensor": 2, "ring": 2}, "tp", False)
    cache = longspan.ShardedCache(model)
    check_generated(generated(model, {**prompt(), "past_key_values": cache}), expected[0])
    first = expected[0][0]
    cache.crop(PROMPT)
    cache.save(folder)
    shape = shape_from_config(model.config.to_dict(), "test")
    job, mesh = Job(context=PROMPT, dtype="fp32", mode="decode"), ParallelConfig(tensor=2, ring=2)
    held = [layer.mixing.cache_by_rank(CostContext(shape, job.on(**mesh.degrees))) for layer in shape.layers]
    assert cache.nbytes == sum(of_layer[sp.rank] for of_layer in held)
    second = torch.cat([first, more], 1)
    check_generated(generated(model, {"input_ids": second, "past_key_values": cache}), expected[1])
    others: list[Cut] = [({"tensor": 4}, "tp", False), ({"ring": 2, "ulysses": 2}, "tp", False)]
    for cut in others:
        other, _ = _cut("Llama", *cut)
        loaded = longspan.ShardedCache.load(folder, other)
        assert loaded.get_seq_length() == PROMPT
        check_generated(generated(other, {"input_ids": second, "past_key_values": loaded}), expected[1])
    other, _ = _cut("Llama", {"ring": 4}, "tp", False)
    loaded = longspan.ShardedCache.load(folder, other)
    loaded.save(folder)
    again = longspan.ShardedCache.load(folder, model)
    check_generated(generated(model, {"input_ids": second, "past_key_values": again}), expected[1])


def test_a_cache_is_reused_on_meshes_with_the_axis_and_without(pool4: RankPool, tmp_path: Path) -> None:
    more, model = prompt(n=9, seed=8)["input_ids"], _made("Llama")
    first = generated(model, prompt())
    second = generated(model, {"input_ids": torch.cat([first[0], more], 1)})
    pool4.run(_reuses, tmp_path / "cache", [first, second], more)


def _refused() -> list[str]:
    model, sp = _cut("Llama", {"tensor": 2}, "megatron-sp", False)
    said = []
    ids = prompt()["input_ids"]
    with torch.no_grad():
        for batch in ({"input_ids": ids, "output_hidden_states": True}, {"input_ids": ids + (sp.tensor_rank == 1)}):
            with pytest.raises(longspan.LongspanError) as error:
                model(**batch, past_key_values=longspan.ShardedCache(model))
            said.append(str(error.value))
    return said


def test_hidden_states_and_other_ids_on_a_rank_are_refused(pool2: RankPool) -> None:
    said = pool2.run(_refused)
    assert said[0] == said[1]
    assert "output_hidden_states=True: with tensor_style='megatron-sp'" in said[0][0]
    assert "ranks 1 were given another one than ranks 0" in said[0][1]
