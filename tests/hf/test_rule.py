"""Multimodal models without an entry in `FAMILIES`: found by rule, checked on a small copy, equal on ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from transformers import AutoModel
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.gemma3n import modeling_gemma3n
from transformers.utils import is_timm_available

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
    "moss_transcribe_diarize", "muse_spark", "omniasr", "qwen2_5_omni_thinker", "qwen3_asr",
    "qwen3_omni_moe_thinker", "voxtral",
)  # fmt: skip
WITH_SOUNDS = {
    4: ({"ring": 2, "ulysses": 2}, {"ulysses": 4}),
    8: ({"ring": 4, "ulysses": 2}, {"ring": 2, "ulysses": 4}, {"data": 2, "ring": 2, "ulysses": 2}),
}
"""Meshes by their number of ranks. Small models have four heads."""


def check_sounds(get_pool: Callable[[int], RankPool], ranks: int, model_type: str) -> None:
    """Assert that a type with sounds trains and generates like one process on these meshes, in each layout."""
    for mesh in WITH_SOUNDS[ranks]:
        check_mesh(get_pool, mesh, model_type)


def check_mesh(get_pool: Callable[[int], RankPool], mesh: dict[str, int], model_type: str) -> None:
    layouts = ({"layout": "contiguous"}, {"layout": "zigzag"}) if "ring" in mesh else ({},)
    shared: Any = {"family": f"types/{model_type}", "mesh": mesh}
    generates = {"job": "generate", "generation": {"max_new_tokens": 3}, "padding": "left"}
    cases = [Case(**shared, sharding=x, **job) for x in layouts for job in ({}, generates)]
    for case, outcome in zip(cases, judge(cases, get_pool), strict=True):
        assert outcome.kind == "equal", f"{case}: {outcome.kind}: {outcome.text}"


@pytest.mark.parametrize("model_type", ["voxtral", *confirming(x for x in SOUNDS if x != "voxtral")])
def test_a_prompt_with_sounds_is_read_in_chunks(get_pool: Callable[[int], RankPool], model_type: str) -> None:
    """Transformers refuses raw inputs with a prompt in chunks, where it does not encode them first."""
    chunks = {"max_new_tokens": 2, "prefill_chunk_size": 7}
    case = Case(f"types/{model_type}", mesh={"ulysses": 2}, job="generate", generation=chunks, padding="left")
    [outcome] = judge([case], get_pool)
    assert outcome.kind == "equal", outcome.text


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("ranks", "model_type"), confirming((n, x) for n in WITH_SOUNDS for x in SOUNDS))
def test_sounds_on_meshes(get_pool: Callable[[int], RankPool], ranks: int, model_type: str) -> None:
    check_sounds(get_pool, ranks, model_type)


class _Tower(nn.Module):
    """Output of the shape of the picture tower that Gemma-3n takes from timm."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, config.hidden_size, 4, 4)

    def forward(self, pixel_values: torch.Tensor, **_: Any) -> BaseModelOutputWithPooling:
        return BaseModelOutputWithPooling(last_hidden_state=self.conv(pixel_values.to(self.conv.weight.dtype)))


class _Models:
    @staticmethod
    def from_config(config: Any) -> Any:
        return _Tower(config) if config.model_type == "gemma3n_vision" else AutoModel.from_config(config)


without_timm = mock.patch.object(modeling_gemma3n, "AutoModel", _Models)


def _with_inputs(model: Any, modalities: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """Return rows of text with inputs of these modalities alone."""
    whole = multimodal.batch(model)
    for encoder in encoders_of(model):
        if encoder.modality not in modalities:
            whole["input_ids"] = whole["input_ids"].masked_fill(
                whole["input_ids"] == getattr(model.config, encoder.token), 5
            )
            whole = {key: x for key, x in whole.items() if key not in encoder.all_keys}
    return whole


def _greedy(model: Any) -> torch.Tensor:
    options = {"max_new_tokens": 4, "do_sample": False, "suppress_tokens": list(range(40, 64)), "eos_token_id": None}
    whole = _with_inputs(_model("gemma3n"), ("image", "audio"))
    found: torch.Tensor = model.eval().generate(**{k: x for k, x in whole.items() if k != "labels"}, **options)
    return found


Mesh = tuple[int, int, str]


@without_timm
def _gemma3n_on_ranks(mesh: Mesh, fsdp: bool, truths: dict[tuple[str, ...], Truth], ids: torch.Tensor) -> None:
    sp = sharding(*mesh)
    model = longspan.parallelize(_model("gemma3n"), sp, fsdp=fsdp, memory="auto").train()
    for modalities, truth in truths.items():
        compare(truth, model, _with_inputs(_model("gemma3n"), modalities), sp)
        model.zero_grad()
    assert torch.equal(_greedy(model), ids)


EVERY_INPUT = (("image", "audio"), ("audio",), ("image",), ())
RINGS: list[tuple[int, Mesh, bool]] = [
    (2, (1, 2, "zigzag"), True), (2, (1, 1, "auto"), False), (4, (1, 2, "zigzag"), False),
    (4, (1, 2, "contiguous"), True), (4, (1, 1, "auto"), True), (4, (1, 4, "zigzag"), True),
    (8, (1, 4, "zigzag"), True), (8, (1, 2, "contiguous"), True),
]  # fmt: skip
"""Numbers of ranks, data, ring and layout, and whether weights are sharded."""


@pytest.mark.parametrize(("ranks", "mesh", "fsdp"), [RINGS[0], *confirming(RINGS[1:])])
@without_timm
def test_rows_that_a_forward_adds(get_pool: Callable[[int], RankPool], ranks: int, mesh: Mesh, fsdp: bool) -> None:
    """Gemma-3n's forward fills up the embeddings of each sound to one number; then also batches without sounds."""
    model = _model("gemma3n")
    assert [(x.modality, x.inside) for x in encoders_of(model)] == [("image", False), ("audio", True)]
    truths = {x: truth_of(_model("gemma3n"), _with_inputs(model, x)) for x in EVERY_INPUT}
    get_pool(ranks).run(_gemma3n_on_ranks, mesh, fsdp, truths, _greedy(model), timeout=120)


@pytest.mark.skipif(not is_timm_available(), reason="Gemma-3n's own picture tower needs timm and torchvision")
@pytest.mark.parametrize("ranks", confirming([2, 4]))
def test_gemma3n_with_timm(get_pool: Callable[[int], RankPool], ranks: int) -> None:
    meshes: list[dict[str, int]] = [{"ulysses": ranks}, {"ring": ranks}]
    for mesh in [*meshes, {"ring": 2, "ulysses": 2}][: 1 + ranks // 2]:
        check_mesh(get_pool, mesh, "gemma3n")


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
