"""RoPE scaling by flags: the scaled config, what is refused, and sharded runs against one process."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from longspan.core.errors import LongspanError
from longspan.core.rope import AUTO, RopeAsked, RopeChoice, rope_state, scaling_for
from longspan.hf.pretrained import check_language_model, read_model_config
from longspan.verify import VerifyConfig, worker
from tests.choose import confirming
from tests.flags import make
from tests.models import build
from tests.pool import RankPool
from tests.train.training import write_config

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192, "rope_theta": 500000.0,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        "original_max_position_embeddings": 4096, "rope_theta": 150000.0}  # fmt: skip
LINEAR = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
LOCAL = {"rope_type": "default", "rope_theta": 1e4}

#: Family, positions in its config, requested scaling and factor, context; the scaled rotary table and
#: max_position_embeddings.
CASES: list[tuple[str, dict[str, Any], RopeChoice, float | None, int, dict[str, Any], int]] = [
    ("Llama", {"max_position_embeddings": 4096, "rope_parameters": LOCAL}, "yarn", None, 10_000,
     {**LOCAL, "rope_type": "yarn", "factor": 3.0, "original_max_position_embeddings": 4096}, 12_288),
    ("Llama", {"max_position_embeddings": 4096, "rope_parameters": LOCAL}, "dynamic", None, 10_000,
     {**LOCAL, "rope_type": "dynamic", "factor": 3.0}, 4096),
    ("Llama", {"max_position_embeddings": 131072, "rope_parameters": LLAMA3}, "auto", None, 524_288,
     {"rope_type": "yarn", "factor": 64.0, "original_max_position_embeddings": 8192, "rope_theta": 500000.0}, 524_288),
    ("GptOss", {"max_position_embeddings": 131072, "rope_parameters": YARN}, "auto", None, 524_288,
     {**YARN, "factor": 128.0}, 524_288),
    ("GPTNeoX", {"max_position_embeddings": 2048}, "linear", 2.5, 5000,
     {"rope_type": "linear", "factor": 2.5, "rope_theta": 10000.0, "partial_rotary_factor": 0.25}, 5120),
    # Only the table of layers with full attention: distances within a window do not grow.
    ("Gemma3Text", {"max_position_embeddings": 131072, "rope_parameters": {"full_attention": LINEAR,
     "sliding_attention": LOCAL}}, "auto", None, 524_288,
     {"full_attention": {**LINEAR, "factor": 32.0}, "sliding_attention": LOCAL}, 524_288),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[2]}")
def test_a_scaled_config_equals_one_written_by_hand(case: Any, tmp_path: Path) -> None:
    """Also after saving; a model of it computes the same angles."""
    family, positions, kind, factor, context, table, range_ = copy.deepcopy(case)  # transformers writes into them
    model = build(family, **positions)
    scaling = check_language_model("it", model.config, context, RopeAsked(kind, factor))
    assert scaling is not None and model.config.max_position_embeddings == range_
    by_hand = build(family, **{**positions, "max_position_embeddings": range_, "rope_parameters": table})
    model.config.save_pretrained(tmp_path)
    saved = type(model.config).from_pretrained(tmp_path)
    assert model.config.rope_parameters == by_hand.config.rope_parameters == saved.rope_parameters == table
    scaled = transformers.AutoModelForCausalLM.from_config(saved)
    angles = [name for name, _ in scaled.named_buffers() if name.endswith("inv_freq")]
    assert angles
    for name in angles:
        assert torch.equal(scaled.get_buffer(name), by_hand.get_buffer(name))
    assert any(not torch.equal(scaled.get_buffer(n), build(family, **positions).get_buffer(n)) for n in angles) == (
        kind != "dynamic"  # which scales with the sequence alone
    )


def test_longrope_takes_its_factors_from_a_file(tmp_path: Path) -> None:
    file, config = tmp_path / "factors.json", write_config(tmp_path)
    numbers = {"short_factor": [1.0] * 4, "long_factor": [4.0, 5.0, 6.0, 7.0]}
    for held in (numbers, {"rope_scaling": numbers}):
        file.write_text(json.dumps(held))
        asked = RopeAsked("longrope", file=str(file))
        found, scaling = read_model_config("--model", str(config), 1024, asked, weights=False)
        assert found.rope_parameters == {
            **numbers, "rope_type": "longrope", "rope_theta": 10000.0, "factor": 2.0,
            "original_max_position_embeddings": 512,
        }  # fmt: skip
        assert scaling is not None and scaling.settings == {"rope": f"longrope,factor=2,file={file}"}
    with pytest.raises(LongspanError, match=r"has 4 numbers, and a head of .* has 8 angles \(16 rotary dimensions\)"):
        read_model_config("--model", str(write_config(tmp_path, head_dim=16)), 1024, asked, weights=False)
    for held, message in (
        ({"short_factor": [1.0]}, "KeyError: 'long_factor'"),
        ({"short_factor": [1.0], "long_factor": [1.0, 2.0]}, "short_factor has 1 numbers and long_factor 2"),
        ({"short_factor": [1.0], "long_factor": [0]}, "give as many in both, all above 0"),
    ):
        file.write_text(json.dumps(held))
        with pytest.raises(LongspanError, match=message):
            RopeAsked("longrope", file=str(file))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"factor": 4.0}, "as-is,factor=4.0 has options of a scaling; choose one first"),
        ({"scaling": "yarn", "factor": 0.5}, "factor must be at least 1"),
        ({"scaling": "yarn", "factor": math.nan}, "factor must be at least 1 and at most 1,048,576, got nan"),
        ({"scaling": "longrope"}, "give longrope,file=FILE"),
        ({"scaling": "yarn", "file": "x"}, "file=x is for longrope, and the scaling is yarn"),
    ],
)
def test_contradicting_flags_are_refused(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(LongspanError, match=message):
        RopeAsked(**flags)


LEARNT = {"max_position_embeddings": 1024}


@pytest.mark.parametrize(
    ("config", "rotary", "asked", "context", "message"),
    [
        (LEARNT, False, RopeAsked(), 2048, "the 1024 learnt positions of it .*give --context 1024 or less"),
        (LEARNT, False, AUTO, 2048, "RoPE scaling needs rotary ones"),
        (LEARNT, False, RopeAsked("yarn", 2.0), 512, "it has no rotary embeddings"),
        (LEARNT, True, RopeAsked(), 2049, r"or --rope yarn \(x 3 of its 1024 original positions\)"),
        ({**LEARNT, "rope_parameters": {"full_attention": None, "sliding_attention": {"rope_type": "default"}}}, True,
         RopeAsked(), 2049, "longer than the 1024 positions of it"),
        (LEARNT, True, RopeAsked("yarn"), 512, r"512 tokens .* within the positions of it \(1,024\)"),
        (LEARNT, True, RopeAsked("linear", 2.0), 4096,
         "factor=2 x 1024 original positions of it are 2048 positions, .*; give factor=4"),
        ({**LEARNT, "rope_scaling": {"type": "proportional"}}, True, AUTO, 4096, "RoPE of the kind proportional"),
        ({**LEARNT, "model_type": "phi3"}, True, AUTO, 4096, "supports only longrope .*--rope longrope,file=FILE, or"),
        ({}, True, RopeAsked("yarn"), 4096, "has no max_position_embeddings; give --rope yarn,original=N"),
    ],
)  # fmt: skip
def test_impossible_positions_are_refused(
    config: dict[str, Any], rotary: bool, asked: RopeAsked, context: int, message: str
) -> None:
    state = rope_state(config, config.get("max_position_embeddings"), rotary)
    with pytest.raises(LongspanError, match=message):
        scaling_for(state, asked, context, "it")


# In `tests/hf/test_models.py` too, without flags: dynamic and linear.
@pytest.mark.parametrize("kind", ["yarn", "longrope", *confirming(["linear", "dynamic"])])
def test_scaled_ranks_compute_what_one_process_does(pool4: RankPool, tmp_path: Path, kind: RopeChoice) -> None:
    """The first of 4 ranks has no token beyond the original positions: dynamic scaling must use the global length."""
    factors = None
    if kind == "longrope":
        factors = tmp_path / "factors.json"
        factors.write_text(json.dumps({"short_factor": [1.0] * 4, "long_factor": [4.0, 5.0, 6.0, 7.0]}))
    config = make(
        VerifyConfig,
        model=str(write_config(tmp_path, max_position_embeddings=16, rope_parameters=LOCAL)),
        context=64,
        ring=2,
        ulysses=2,
        layout="contiguous",
        rope=RopeAsked(kind, file="" if factors is None else str(factors)),
    )
    config.check()
    report = pool4.run(worker, config)[0]
    assert report.passed, [check.name for check in report.checks if not check.passed]


def test_a_scaling_that_a_config_class_changes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Phi-3's turns "yarn" into "longrope" when it is loaded; the check finds such a class without a list of names."""
    monkeypatch.setattr("longspan.core.rope.ONLY", {})
    config = build("Phi3").config
    with pytest.raises(LongspanError, match=r"transformers does not take it for it \(Phi3Config\)"):
        check_language_model("it", config, 4096, RopeAsked("yarn"))
