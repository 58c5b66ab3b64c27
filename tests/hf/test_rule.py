"""Multimodal models without an entry in `FAMILIES`: found by rule, checked on a small copy, equal on ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import longspan
from longspan.compat.reading import vision_core
from longspan.core.errors import LongspanError
from longspan.hf.model import rule
from longspan.hf.model.examples import example
from longspan.hf.model.vision import encoders_of
from tests.choose import confirming
from tests.fuzz import multimodal
from tests.fuzz.cases import Case
from tests.fuzz.families import build
from tests.fuzz.run import judge
from tests.models import Truth, compare, sharding, truth_of
from tests.pool import RankPool, on_ranks


def _model(model_type: str) -> Any:
    return build(f"types/{model_type}", {}, 0)


def _on_ranks(model_type: str, ring: int, fsdp: bool, truth: Truth) -> None:
    sp = sharding(ring=ring)
    model = longspan.parallelize(_model(model_type), sp, fsdp=fsdp, memory="auto")
    compare(truth, model, multimodal.batch(_model(model_type)), sp)


# Images, videos and sounds, some padded; pictures that may be padding; images and sounds with axes.
ON_RANKS = [("gemma4", 2, True), ("smolvlm", 1, True), ("lighton_ocr", 1, True), ("qwen2_5_omni_thinker", 2, False)]


@pytest.mark.parametrize(("model_type", "ring", "fsdp"), [ON_RANKS[0], *confirming(ON_RANKS[1:])])
def test_one_process(pool2: RankPool, model_type: str, ring: int, fsdp: bool) -> None:
    truth = truth_of(_model(model_type), multimodal.batch(_model(model_type)))
    pool2.run(_on_ranks, model_type, ring, fsdp, truth)


SOUNDS = (
    "audioflamingo3", "dots3_note", "fun_asr_nano", "gemma4", "glmasr", "granite_speech", "granite_speech_plus",
    "moss_transcribe_diarize", "muse_spark", "qwen2_5_omni_thinker", "qwen3_asr", "qwen3_omni_moe_thinker", "voxtral",
)  # fmt: skip
WITH_SOUNDS = {
    4: ({"ring": 2, "ulysses": 2}, {"ulysses": 4}),
    8: ({"ring": 4, "ulysses": 2}, {"ring": 2, "ulysses": 4}, {"data": 2, "ring": 2, "ulysses": 2}),
}
"""Meshes by their number of ranks. Small models have four heads."""


def check_sounds(get_pool: Callable[[int], RankPool], ranks: int, model_type: str) -> None:
    """Assert that a type with sounds trains and generates like one process on these meshes, in each layout."""
    for mesh in WITH_SOUNDS[ranks]:
        layouts = ({"layout": "contiguous"}, {"layout": "zigzag"}) if "ring" in mesh else ({},)
        shared: Any = {"family": f"types/{model_type}", "mesh": mesh}
        generates = {"job": "generate", "generation": {"max_new_tokens": 3}, "padding": "left"}
        cases = [Case(**shared, sharding=x, **job) for x in layouts for job in ({}, generates)]
        for case, outcome in zip(cases, judge(cases, get_pool), strict=True):
            assert outcome.kind == "equal", f"{case}: {outcome.kind}: {outcome.text}"


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("ranks", "model_type"), confirming((n, x) for n in WITH_SOUNDS for x in SOUNDS))
def test_sounds_on_meshes(get_pool: Callable[[int], RankPool], ranks: int, model_type: str) -> None:
    check_sounds(get_pool, ranks, model_type)


def _replicas(model_type: str) -> None:
    """Both replicas have a picture, then the first alone."""
    sp = sharding(data=2)
    whole = multimodal.batch(_model(model_type))
    plain = _model(model_type)(**whole).loss
    model = longspan.parallelize(_model(model_type), sp)
    found = model(**multimodal.batch(_model(model_type), (sp.data_rank, 2))).loss
    torch.testing.assert_close(found, plain, rtol=1e-4, atol=1e-5)
    mine = multimodal.batch(_model(model_type), (sp.data_rank, 2))
    if sp.data_rank:
        text = torch.full_like(mine["input_ids"], 5)
        mine = {"input_ids": text, "labels": text, "attention_mask": mine["attention_mask"]}
    model(**mine).loss.backward()  # runs the encoder on a small picture where there is none
    mine = multimodal.batch(_model(model_type), (sp.data_rank, 2))
    if sp.data_rank == 0:
        token = getattr(model.config, encoders_of(_model(model_type))[0].token)
        mine["input_ids"] = torch.where(mine["input_ids"] == token, 5, mine["input_ids"])
    with pytest.raises(LongspanError, match="has 0 image placeholders .* gives"):  # on both ranks
        model(**mine)


def test_replicas(pool2: RankPool) -> None:
    for model_type in ("got_ocr2", "smolvlm"):
        pool2.run(_replicas, model_type)


@pytest.mark.parametrize("model_type", ["got_ocr2", "smolvlm"])
def test_units(model_type: str) -> None:
    model = _model(model_type)
    core, (encoder,) = vision_core(model), encoders_of(model)
    given = example(core, "image", torch.Generator().manual_seed(0))
    assert given is not None
    units = encoder.units(core, given)
    assert units.rows == ((8,) if model_type == "smolvlm" else (1, 1))
    if model_type == "smolvlm":
        given["pixel_values"][0, 1] = 0  # fills up a row
        assert encoder.units(core, given).rows == (4,)
    assert units.patches == ((32,) if model_type == "smolvlm" else (16, 16))


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("omniasr", "otherwise than as embeddings"),
        ("paligemma", "see each other"),
        *confirming([("blip-2", "does not run on a part"), ("instructblip", "in a way that longspan does not know")]),
    ],
)
def test_refused(model_type: str, reason: str) -> None:
    with pytest.raises(LongspanError, match=reason):
        encoders_of(_model(model_type))


@pytest.mark.parametrize(
    ("planted", "reason"),
    [
        (lambda rows: rows.roll(1, 0), "otherwise than as embeddings"),
        (lambda rows: rows.flip(0), "otherwise than as embeddings"),
    ],
)
def test_the_check_sees_other_rows(monkeypatch: pytest.MonkeyPatch, planted: Any, reason: str) -> None:
    """Rows shifted by one, and placeholders filled by rows of another picture."""
    model, joined = _model("lighton_ocr"), rule.with_rows
    monkeypatch.setattr(rule, "with_rows", lambda output, rows: joined(output, planted(rows)))
    rule._checked.cache_clear()
    with pytest.raises(LongspanError, match=reason):
        encoders_of(model)
    rule._checked.cache_clear()


@on_ranks(2)
def test_wrong_numbers() -> None:
    model = longspan.parallelize(_model("smolvlm"), sharding())
    whole = multimodal.batch(_model("smolvlm"))
    token = getattr(model.config, encoders_of(_model("smolvlm"))[0].token)
    ids = whole["input_ids"].clone()
    ids[0, ids[0] == token] = torch.tensor([5, *[token] * 7])
    with pytest.raises(LongspanError, match=r"7 image placeholders .* gives 8 embeddings"):
        model(**{**whole, "input_ids": ids})
    with pytest.raises(LongspanError, match=r"8 image placeholders .*, and no `pixel_values` fills"):
        model(**{key: x for key, x in whole.items() if "pixel" not in key and "sizes" not in key})
