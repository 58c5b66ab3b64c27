"""The fuzzer of whole models: it reports a planted fault, and what it draws comes back from its text."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from tests.fuzz.cases import Case, drawn
from tests.fuzz.families import build, families
from tests.fuzz.run import judge
from tests.pool import RankPool

PADDED = Case("causal/llama", rows=2, length=11, padding="left", mesh={"ring": 2})


@contextlib.contextmanager
def _padding_forgotten() -> Iterator[None]:
    with mock.patch("longspan.hf.batch.padding_segments", lambda *_: None):
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
    assert judge(PADDED, get_pool).kind == "equal"
    wrong = judge(PADDED, get_pool, _padding_forgotten)
    assert wrong.kind == "failed" and "of the limit" in wrong.text
    differs = judge(PADDED, get_pool, _one_rank_refuses)
    assert differs.kind == "failed" and "another text on each rank" in differs.text
    refused = judge(Case("causal/mamba", length=5), get_pool)
    assert refused.kind == "refused" and "Mamba" in refused.text
    assert (
        judge(Case("causal/llama", length=5, job="generate", generation={"max_new_tokens": 2}), get_pool).kind
        == "equal"
    )


def test_cases_come_back_from_their_text() -> None:
    for number in range(200):
        case = drawn(random.Random(number), "causal/llama", 1 + number % 4)
        assert Case.read(str(case)) == case and case.ranks == 1 + number % 4


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
