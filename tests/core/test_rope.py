"""Positions of a model: what its config allows, the values that allow more, and how they are set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from longspan.compat.reading import positions_of
from longspan.core.errors import LongspanError
from longspan.core.rope import merged, positions_in, settings_of
from longspan.hf.model.pretrained import read_model_config
from tests.models import build
from tests.train.training import write_config

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192, "rope_theta": 500000.0,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        "original_max_position_embeddings": 4096, "rope_theta": 150000.0}  # fmt: skip
LINEAR = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
LOCAL = {"rope_type": "default", "rope_theta": 1e4}

#: Family, positions in its config, context; the extended rotary table and max_position_embeddings.
CASES: list[tuple[str, dict[str, Any], int, dict[str, Any], int]] = [
    ("Llama", {"max_position_embeddings": 4096, "rope_parameters": LOCAL}, 10_000,
     {**LOCAL, "rope_type": "yarn", "factor": 3.0, "original_max_position_embeddings": 4096}, 12_288),
    ("Llama", {"max_position_embeddings": 131072, "rope_parameters": LLAMA3}, 524_288,
     {"rope_type": "yarn", "factor": 64.0, "original_max_position_embeddings": 8192, "rope_theta": 500000.0}, 524_288),
    ("GptOss", {"max_position_embeddings": 131072, "rope_parameters": YARN}, 524_288,
     {**YARN, "factor": 128.0}, 524_288),
    ("GPTNeoX", {"max_position_embeddings": 2048}, 5000,
     {"rope_type": "yarn", "factor": 3.0, "original_max_position_embeddings": 2048, "rope_theta": 10000.0,
      "partial_rotary_factor": 0.25}, 6144),
    # Only the table of layers with full attention: distances within a window do not grow.
    ("Gemma3Text", {"max_position_embeddings": 131072, "rope_parameters": {"full_attention": LINEAR,
     "sliding_attention": LOCAL}}, 524_288,
     {"full_attention": {**LINEAR, "factor": 32.0}, "sliding_attention": LOCAL}, 524_288),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_a_config_is_extended(case: Any) -> None:
    """By values that transformers takes: a model of them has other angles."""
    family, own, context, table, limit = case
    config = build(family, **own).config
    positions = positions_of(config)
    with pytest.raises(LongspanError, match=rf"--context {context} is longer than the .* config: rope_parameters: "):
        positions.check(context, "it")
    positions.check(context, "it", extends=True)
    values = positions.extended(context)
    assert values is not None
    found = merged(config.rope_parameters, values["rope_parameters"])
    assert found == table and values["max_position_embeddings"] == limit
    changed = type(config).from_dict(config.to_dict(), rope_parameters=found, max_position_embeddings=limit)
    assert positions_of(changed).reach == limit >= context
    plain, extended = (transformers.AutoModelForCausalLM.from_config(each) for each in (config, changed))
    angles = [name for name, _ in plain.named_buffers() if name.endswith("inv_freq")]
    changed_angles = any(not torch.equal(plain.get_buffer(name), extended.get_buffer(name)) for name in angles)
    assert changed_angles == (family != "GPTNeoX")  # this one has a single fast angle, which YaRN keeps


LEARNT = {"max_position_embeddings": 1024}
OF_WINDOWS_ALONE = {"rope_parameters": {"full_attention": None, "sliding_attention": LOCAL}}


@pytest.mark.parametrize(
    ("config", "rotary", "message"),
    [
        (LEARNT, False, "the 1024 learnt positions of it .*give --context 1024 or less$"),
        ({**LEARNT, **OF_WINDOWS_ALONE}, True, "the 1024 positions of it .*give --context 1024 or less$"),
        ({**LEARNT, "rope_parameters": {"rope_type": "proportional"}}, True, "give --context 1024 or less$"),
        ({**LEARNT, "rope_parameters": LOCAL, "model_type": "phi3"}, True, "give --context 1024 or less$"),
    ],
)
def test_positions_that_nothing_extends_are_refused(config: dict[str, Any], rotary: bool, message: str) -> None:
    positions = positions_in(config, 1024, rotary)
    with pytest.raises(LongspanError, match=message):
        positions.check(2048, "it", extends=True)
    positions.check(1024, "it")


def test_a_dynamic_rope_has_no_limit() -> None:
    positions = positions_in({"rope_parameters": {**LOCAL, "rope_type": "dynamic", "factor": 2.0}}, 1024, rotary=True)
    assert positions.reach is None and positions.extended(4096) is None
    positions.check(1 << 20, "it")


def test_values_of_the_config_are_set_as_transformers_names_them(tmp_path: Path) -> None:
    config = str(write_config(tmp_path, rope_parameters=LOCAL))
    with pytest.raises(LongspanError, match="--context 1024 is longer than the 512 positions of --model") as error:
        read_model_config("--model", config, 1024, weights=False)
    values = positions_of(read_model_config("--model", config, 512, weights=False)).extended(1024)
    assert values is not None and settings_of(values) in str(error.value)
    found = read_model_config("--model", config, 1024, values, weights=False)
    assert found.rope_parameters == {**LOCAL, **values["rope_parameters"]} and found.max_position_embeddings == 1024
    with pytest.raises(LongspanError, match="its config has no rope_factor; leave it out"):
        read_model_config("--model", config, 512, {"rope_factor": 4}, weights=False)
