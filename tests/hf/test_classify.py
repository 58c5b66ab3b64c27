"""Classifiers of rows and tokens, reward models: logits, loss and gradients equal those of one process, in fp64."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

import longspan
from longspan.core.errors import LongspanError
from longspan.verify.config import VerifyConfig
from longspan.verify.inputs import model_origin
from tests.choose import confirming
from tests.flags import make
from tests.models import BASE, FAMILIES, gradients, rows_of, sharding
from tests.pool import RankPool

pytestmark = pytest.mark.versions

CLOSE = {"rtol": 1e-9, "atol": 1e-12}

PROBLEMS = {
    "reward": (1, torch.tensor([0.3, -1.0, 2.0, 0.1], dtype=torch.float64)),
    "one of three": (3, torch.tensor([2, -100, 0, 1])),
    "several of three": (3, torch.tensor([[1.0, 0, 1], [0, 0, 1], [1, 1, 1], [0, 0, 0]], dtype=torch.float64)),
}


def build(family: str, kind: str, labels: int, **changes: Any) -> Any:
    options = {**BASE, **FAMILIES[family], "num_labels": labels, **changes}
    config = getattr(transformers, f"{family}Config")(**{k: v for k, v in options.items() if v is not None})
    torch.manual_seed(0)
    return getattr(transformers, f"AutoModelFor{kind}Classification").from_config(config).double()


def padded(side: str, n: int = 21) -> dict[str, Tensor]:
    """Rows of 21, 18, 5 and 20 tokens. Their last tokens are on different ranks."""
    ids = torch.randint(3, 61, (4, n), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    for row, missing in enumerate((0, 3, 16, 1)):
        mask[row, n - missing :] = 0
    mask = mask if side == "right" else mask.flip(1)
    return {"input_ids": ids * mask, "attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp_min(0)}


def preferred(logits: Tensor) -> Tensor:
    """A trainer's loss of a batch: the first rows are preferred to the last ones (Bradley-Terry)."""
    chosen, rejected = logits.sum(-1).chunk(2)
    return -F.logsigmoid(chosen - rejected).mean()


def _rows(family: str, problem: str, side: str, meshes: list[tuple[int, int, bool]], expected: tuple[Any, ...]) -> None:
    count, labels = PROBLEMS[problem]
    logits, loss, of_loss, of_trainer = expected
    for data, ring, fsdp in meshes:
        sp = sharding(data, ring)
        part = labels.chunk(sp.data_size)[sp.data_rank]
        whole = {**rows_of(padded(side), sp.data_rank, sp.data_size), "labels": part}
        model = longspan.parallelize(build(family, "Sequence", count), sp, fsdp=fsdp)
        out = model(**whole)
        torch.testing.assert_close(out.logits, logits.chunk(sp.data_size)[sp.data_rank], **CLOSE)
        torch.testing.assert_close(out.loss, loss, **CLOSE)
        out.loss.backward()
        torch.testing.assert_close(gradients(model), of_loss, **CLOSE)
        if data == 1:  # a custom loss of the logits
            model.zero_grad()
            del whole["labels"]
            preferred(model(**whole).logits).backward()
            torch.testing.assert_close(gradients(model), of_trainer, **CLOSE)


def _plain_rows(family: str, problem: str, side: str) -> tuple[Any, ...]:
    count, labels = PROBLEMS[problem]
    model = build(family, "Sequence", count)
    out = model(**padded(side), labels=labels, use_cache=False)
    out.loss.backward()
    of_loss = gradients(model)
    model.zero_grad()
    preferred(model(**padded(side), use_cache=False).logits).backward()
    return out.logits.detach(), out.loss.detach(), of_loss, gradients(model)


CASES = [("Llama", "one of three", "left"), ("Llama", "several of three", "right"), ("GPT2", "reward", "left"),
         *confirming([("Llama", "reward", "right"), ("Mistral", "one of three", "right")])]  # fmt: skip


@pytest.mark.parametrize(("family", "problem", "side"), CASES)
def test_rows_are_scored_by_their_last_token(
    pool2: RankPool, pool4: RankPool, family: str, problem: str, side: str
) -> None:
    expected = _plain_rows(family, problem, side)
    pool2.run(_rows, family, problem, side, [(1, 1, True)], expected)
    pool4.run(_rows, family, problem, side, [(1, 2, False), (2, 2, True)], expected)


def _loads(folder: Path, expected: tuple[Any, ...]) -> None:
    sp = sharding(1, 2)
    model = longspan.from_pretrained(str(folder), sp, dtype=torch.float64).train()
    out = model(**padded("left"), labels=PROBLEMS["reward"][1])
    out.loss.backward()
    torch.testing.assert_close((out.logits, out.loss, gradients(model)), expected[:3], **CLOSE)


def test_a_reward_model_loads_sharded(pool2: RankPool, tmp_path: Path) -> None:
    build("Llama", "Sequence", 1).save_pretrained(tmp_path)
    pool2.run(_loads, tmp_path, _plain_rows("Llama", "reward", "left"))
    config = make(VerifyConfig, model=str(tmp_path))
    with pytest.raises(LongspanError, match="is a LlamaForSequenceClassification; longspan verify compares language"):
        model_origin(config, transformers.AutoConfig.from_pretrained(tmp_path))


def _tokens(family: str, expected: tuple[Any, ...]) -> None:
    logits, loss, grads = expected
    for data, ring, fsdp in [(1, 2, True), (2, 1, False)]:
        sp = sharding(data, ring)
        whole = rows_of(padded("right") | {"labels": _token_labels()}, sp.data_rank, sp.data_size)
        model = longspan.parallelize(build(family, "Token", 3, classifier_dropout=0.0), sp, fsdp=fsdp)
        out = model(**whole)
        found = sp.gather(out.logits.detach(), length=21)
        real = whole["attention_mask"].bool()
        torch.testing.assert_close(found[real], logits.chunk(sp.data_size)[sp.data_rank][real], **CLOSE)
        torch.testing.assert_close(out.loss, loss, **CLOSE)
        out.loss.backward()
        torch.testing.assert_close(gradients(model), grads, **CLOSE)


def _token_labels() -> Tensor:
    labels = torch.randint(0, 3, (4, 21), generator=torch.Generator().manual_seed(2))
    labels[1, :9] = -100
    return labels.masked_fill(padded("right")["attention_mask"] == 0, -100)


@pytest.mark.parametrize("family", ["Llama", "Bert"])
def test_token_classifiers(pool4: RankPool, family: str) -> None:
    model = build(family, "Token", 3, classifier_dropout=0.0)
    out = model(**padded("right"))
    loss = F.cross_entropy(out.logits.flatten(0, 1), _token_labels().flatten())
    loss.backward()
    pool4.run(_tokens, family, (out.logits.detach(), loss.detach(), gradients(model)))


def test_one_device_and_errors() -> None:
    sp = longspan.SequenceSharding(longspan.init_mesh())
    logits, loss, of_loss, _ = _plain_rows("Llama", "reward", "right")
    model = longspan.parallelize(build("Llama", "Sequence", 1), sp)
    out = model(**padded("right"), labels=PROBLEMS["reward"][1].double())
    out.loss.backward()
    torch.testing.assert_close((out.logits, out.loss, gradients(model)), (logits, loss, of_loss), **CLOSE)
    for change, message in [
        ({"labels": torch.zeros(3)}, r"one entry for each of 4 rows, got \(3,\)"),
        ({"output_router_logits": True}, "output_router_logits=True asks LlamaForSequenceClassification"),
    ]:
        with pytest.raises(LongspanError, match=message):
            model(**padded("right"), **change)
    without = copy.deepcopy(build("Llama", "Sequence", 2))
    without.config.pad_token_id = None
    with pytest.raises(LongspanError, match="each of 4 rows by the padding token"):
        longspan.parallelize(without, sp)(**padded("right"))
    with pytest.raises(LongspanError, match="`labels` holds 2, the model has 2 labels: 0 to 1"):
        longspan.parallelize(build("Llama", "Sequence", 2), sp)(**padded("right"), labels=torch.tensor([0, 1, 2, 1]))


def test_pooling_before_the_head_raises() -> None:
    options = {name: value for name, value in {**BASE, **FAMILIES["ModernBert"]}.items() if value is not None}
    model = transformers.AutoModelForSequenceClassification.from_config(transformers.ModernBertConfig(**options))
    with pytest.raises(
        LongspanError, match=r"pools hidden states of its tokens.*whose head `score` scores every token"
    ):
        longspan.parallelize(model, longspan.SequenceSharding(longspan.init_mesh()))
