"""Prompts and models for generation, and the output of one process."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

import longspan
from longspan.cache.offload import Staging
from longspan.generate.config import GenerateConfig
from longspan.generate.job import open_fitting_prompt
from longspan.generate.rank import generate
from longspan.generate.score import ScoreConfig, open_text, score
from longspan.ranks import launch
from tests.memory.side_stream import LateCopy, LateSide
from tests.models import MORE, build, sharding

PROMPT, NEW = 37, 8
CHANGES: dict[str, dict[str, Any]] = {
    "DeepseekV3": MORE["DeepseekV3"],
    "DeepseekV2": {**MORE["DeepseekV2"], "q_lora_rank": 24},
    "dynamic": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
                "max_position_embeddings": 16},
    "longrope": {"rope_parameters": {
        "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [3.0] * 4,
        "original_max_position_embeddings": 16, "factor": 4.0}},
}  # fmt: skip
# With their own initial weights, these predict the last token, or forget a state, before it changes a logit by 1e-5.
_RANGES = {
    "Mamba": 0.3, "Mamba2": 0.3, "FalconMamba": 0.3, "Lfm2": 0.3, "Lfm2Moe": 0.3, "Zamba": 0.1, "Zamba2": 0.1,
    "Bamba": 0.3, "NemotronH": 0.3, "FalconH1": 0.3, "GraniteMoeHybrid": 0.3, "Jamba": 0.3,
}  # fmt: skip
CHANGES |= {name: {"tie_word_embeddings": False, "initializer_range": x} for name, x in _RANGES.items()}
FAMILY = {"dynamic": "Llama", "longrope": "Llama"}


def made(name: str) -> Any:
    return build(FAMILY.get(name, name), **CHANGES.get(name, {})).eval()


def prompt(rows: int = 1, n: int = PROMPT, padded: bool = False, seed: int = 7) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 61, (rows, n), generator=g)
    mask = torch.ones_like(ids)
    if padded:
        for row in range(rows):
            mask[row, : 5 * row] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def generated(model: Any, inputs: dict[str, Any], streamer: Any = None, **more: Any) -> tuple[Tensor, Tensor]:
    """Return ids, and the logits of every new token."""
    options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0, **more}
    config = GenerationConfig(**options, return_dict_in_generate=True, output_logits=True)
    out = model.generate(**inputs, generation_config=config, streamer=streamer)
    return out.sequences, torch.stack(out.logits, 1)


@functools.cache
def plain(name: str, rows: int = 1, padded: bool = False, options: tuple[tuple[str, Any], ...] = ()) -> Any:
    model = made(name)
    torch.manual_seed(3)
    return generated(model, prompt(rows, padded=padded), **dict(options))


def run_generate(config: GenerateConfig) -> dict[str, Any]:
    """Return the report of `longspan generate`, on this rank."""
    return launch.run_rank(config, open_fitting_prompt, generate)  # type: ignore[no-any-return]


def run_score(config: ScoreConfig) -> dict[str, Any]:
    """Return the report of `longspan score`, on this rank."""
    return launch.run_rank(config, open_text, score)  # type: ignore[no-any-return]


def check_generated(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    assert torch.equal(found[0], expected[0]), (found[0], expected[0])
    torch.testing.assert_close(found[1], expected[1], rtol=1e-5, atol=1e-5 * float(expected[1].abs().max()))


def each_row_alone(model: Any, inputs: dict[str, Tensor], **more: Any) -> tuple[Tensor, Tensor]:
    """Return what `generated` does for each row without its padding, padded again."""
    rows = []
    for ids, mask in zip(inputs["input_ids"], inputs["attention_mask"].bool(), strict=True):
        rows.append(generated(model, {"input_ids": ids[mask][None], "attention_mask": mask[mask][None].long()}, **more))
    longest = max(ids.shape[1] for ids, _ in rows)
    ids = torch.cat([torch.nn.functional.pad(ids, (longest - ids.shape[1], 0)) for ids, _ in rows])
    return ids, torch.cat([logits for _, logits in rows])


def parallelized(name: str, ring: int, fsdp: bool, data: int = 1) -> tuple[Any, longspan.SequenceSharding]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of ranks without heads
        sp = sharding(data=data, ring=ring)
        return longspan.parallelize(made(name), sp, fsdp=fsdp), sp


class Poisoned(LateSide):
    """Fill targets with NaN until their copy is waited for."""

    def begin(self, source: Tensor, into: Tensor) -> LateCopy:
        assert source.is_contiguous() and into.is_contiguous()  # one run of bytes each
        into.view(torch.uint8).fill_(0xFF)
        return super().begin(source, into)


def offloaded(model: Any, dtype: str = "exact") -> longspan.ShardedCache:
    """A cache whose copies are executed as late as possible."""
    cache = longspan.ShardedCache(model, dtype=dtype, offload="host")
    cache.staging = Staging(Poisoned(), torch.device("cpu"))
    return cache
