"""Generation with a cache over the ranks: tokens and logits are those of one process."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig

import longspan
from tests.models import build, sharding
from tests.pool import RankPool

PROMPT, NEW = 37, 8
GENERATED = ["Llama", "Qwen3", "Mistral", "Gemma3Text", "GptOss", "GPT2", "Llama4Text", "Mixtral"]


def _prompt(rows: int = 1, n: int = PROMPT, padded: bool = False) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(7)
    ids = torch.randint(3, 61, (rows, n), generator=g)
    mask = torch.ones_like(ids)
    if padded:
        for row in range(rows):
            mask[row, : 5 * row] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def _generate(model: Any, inputs: dict[str, Tensor], **more: Any) -> tuple[Tensor, Tensor]:
    """Ids, and the logits of every new token."""
    options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0, **more}
    out = model.generate(
        **inputs, generation_config=GenerationConfig(**options, return_dict_in_generate=True, output_logits=True)
    )
    return out.sequences, torch.stack(out.logits, 1)


@functools.cache
def _plain(family: str, rows: int = 1, padded: bool = False, sampled: bool = False) -> tuple[Tensor, Tensor]:
    model = build(family).eval()
    torch.manual_seed(3)
    return _generate(model, _prompt(rows, padded=padded), **(SAMPLED if sampled else {}))


SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9}


def _check(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    assert torch.equal(found[0], expected[0])
    torch.testing.assert_close(found[1], expected[1], rtol=1e-5, atol=1e-5 * float(expected[1].abs().max()))


def _on_meshes(family: str, meshes: list[tuple[int, bool]], cases: list[tuple[dict[str, Any], Any, Any]]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of ranks without heads
        for ring, fsdp in meshes:
            sp = sharding(ring=ring)
            model = longspan.parallelize(build(family).eval(), sp, fsdp=fsdp)
            for options, inputs, expected in cases:
                torch.manual_seed(3 if sp.rank == 0 else 4)
                _check(_generate(model, inputs, **options), expected)


def _cases(family: str) -> list[tuple[dict[str, Any], Any, Any]]:
    return [
        ({}, _prompt(), _plain(family)),
        ({"prefill_chunk_size": 11}, _prompt(), _plain(family)),
        ({}, _prompt(3, padded=True), _plain(family, 3, True)),
    ]


@pytest.mark.parametrize("family", GENERATED)
def test_greedy_on_4_ranks(pool4: RankPool, family: str) -> None:
    pool4.run(_on_meshes, family, [(1, True), (2, False), (4, False)], _cases(family))
