"""The fuzzer of models reports a planted fault, and a case can be read back from its text."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from longspan.hf.batch.shard import read_batch
from tests.fuzz.cases import MESHES, Case, drawn
from tests.fuzz.families import build, families
from tests.fuzz.run import judge
from tests.pool import RankPool

FOUND = [
    '{"family": "causal/jetmoe", "mesh": {"ring": 2}, "options": {"memory": {"head_slices": 0}}}',
    '{"family": "causal/opt", "mesh": {"ring": 2}, "job": "generate", "generation": {"max_new_tokens": 2}}',
    '{"family": "causal/hrm_text", "mesh": {"ring": 2}, "options": {"memory": "longest"}}',
]
"""Cases that once failed and have no other test."""

ALONE = (
    '{"family": "causal/minimax_m3_vl_text", "mesh": {}, "length": 9, "job": "trainer", '
    '"generation": {"gradient_checkpointing": true}}'
)
"""An indexer's weights get no gradient, and torchrun has started one rank."""

PADDED = Case("causal/llama", rows=2, length=11, padding="left", mesh={"ring": 2})


@contextlib.contextmanager
def _padding_forgotten() -> Iterator[None]:
    def forgetful(batch: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        return read_batch({key: value for key, value in batch.items() if key != "attention_mask"}, *args, **kwargs)

    with mock.patch("longspan.hf.forward.shard_batch.read_batch", forgetful):
        yield


@contextlib.contextmanager
def _one_rank_refuses() -> Iterator[None]:
    import torch.distributed as dist

    from longspan import LongspanError

    if dist.get_rank() == 1:
        raise LongspanError("not here")
    with mock.patch("longspan.init_mesh", side_effect=LongspanError("not here either")):
        yield


def test_a_planted_fault_is_reported(get_pool: Callable[[int], RankPool]) -> None:
    generated = Case("causal/llama", length=5, job="generate", mesh={"ring": 2}, generation={"max_new_tokens": 2})
    # Generation from a cache would be silently wrong.
    twice = dataclasses.replace(generated, family="causal/diffllama")
    unknown = Case("causal/xlstm", length=5, mesh={"ring": 2})
    refused, cached, *equal = judge([unknown, twice, PADDED, generated, *map(Case.read, FOUND)], get_pool)
    assert cached.kind == "refused" and "calls its attention twice" in cached.text
    assert [outcome.kind for outcome in equal] == ["equal"] * len(equal), equal
    assert refused.kind == "refused" and "xLSTM" in refused.text
    assert [outcome.kind for outcome in judge([Case.read(ALONE)], get_pool)] == ["equal"]
    (wrong,) = judge([PADDED], get_pool, _padding_forgotten)
    assert wrong.kind == "failed" and "of the limit" in wrong.text
    (differs,) = judge([PADDED], get_pool, _one_rank_refuses)
    assert differs.kind == "failed" and "another text on each rank" in differs.text


def test_a_case_is_read_back_from_its_text() -> None:
    for number in range(200):
        case = drawn(random.Random(number), "causal/llama", MESHES[4][number % 9])
        assert Case.read(str(case)) == case and case.ranks == 4


def test_families_are_those_of_transformers() -> None:
    names = families()
    assert {"causal/llama", "causal/gpt_oss", "masked/bert", "causal/gemma3_text"} <= set(names)
    for family, kinds in (
        ("causal/gemma3_text", {"sliding_attention", "full_attention"}),
        ("causal/qwen3_moe", set[Any]()),
    ):
        model = build(family, {"vocab_size": 61}, seed=0)
        assert sum(p.numel() for p in model.parameters()) < 200_000 and model.config.vocab_size == 61
        assert kinds <= set(getattr(model.config, "layer_types", None) or [])
