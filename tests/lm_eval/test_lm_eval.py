"""Log-likelihoods and generation for lm-evaluation-harness: those of one process, and of the harness's own model."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from examples.ruler import needles
from tests.models import BASE, build
from tests.pool import RankPool

pytestmark = pytest.mark.versions

ROOT = Path(__file__).parents[2]
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ .,\n"  # and three special tokens before: 59 of 61
TEXTS = ["The quick brown fox", "jumps over", "a", " the lazy dog, and on. " * 4]
PAIRS = [(TEXTS[0], " jumps"), (TEXTS[1], "."), (TEXTS[2], " lazy dog, and on"), (TEXTS[3], "fox"), ("", "fox")]


@functools.cache
def _tokenizer() -> Any:
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<s>", "</s>", *LETTERS, "<a>", "<b>"])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    assert len(vocabulary) == BASE["vocab_size"]
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", pad_token="<pad>")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama whose greedy tokens depend on the context, and a tokenizer of single characters."""
    path = tmp_path_factory.mktemp("lm-eval") / "model"
    model = build("Llama").eval()
    torch.manual_seed(1)
    for p in model.parameters():
        if p.dim() > 1:
            torch.nn.init.normal_(p, std=0.4)
    model.save_pretrained(path)
    _tokenizer().save_pretrained(path)
    return path


def _asked(*args: Any) -> Any:
    return SimpleNamespace(args=args)


def _answers(model: Any) -> tuple[list[Any], list[float], list[str]]:
    """Return log-likelihoods, also of texts longer than the model, and generation up to stops."""
    ways: list[dict[str, Any]] = [{"until": ["a", "e"], "max_gen_toks": 9}, {"until": [], "max_gen_toks": 5}]
    generation = [_asked(text, {**way, "do_sample": False}) for text in TEXTS for way in ways]
    pairs = [_asked(*pair) for pair in PAIRS]
    rolling = [_asked(text) for text in TEXTS]
    return model.loglikelihood(pairs), model.loglikelihood_rolling(rolling), model.generate_until(generation)


def _same(ours: Any, theirs: Any) -> bool:
    return (
        [greedy for _, greedy in ours[0]] == [greedy for _, greedy in theirs[0]]
        and [x for x, _ in ours[0]] == pytest.approx([x for x, _ in theirs[0]], rel=1e-5)
        and ours[1] == pytest.approx(theirs[1], rel=1e-5)
        and ours[2] == theirs[2]
    )


def _on_ranks(folder: str, meshes: list[dict[str, int]]) -> list[Any]:
    from longspan.lm_eval.model import LongspanLM, end, follow

    answers = []
    for mesh in meshes:
        if dist.get_rank() != 0:
            follow()
            continue
        answers.append(_answers(LongspanLM(folder, dtype="float32", max_length=60, **mesh)))
        end()
    return answers


def test_ranks_answer_as_the_harness_model(pool4: RankPool, folder: Path) -> None:
    pytest.importorskip("lm_eval")
    from lm_eval.api.registry import get_model
    from lm_eval.models.huggingface import HFLM

    from longspan.lm_eval.model import LongspanLM

    assert get_model("longspan") is LongspanLM
    theirs = _answers(HFLM(str(folder), dtype="float32", max_length=60, batch_size=2, device="cpu"))
    assert len({text[:1] for text in theirs[2]}) > 1
    assert _same(_answers(LongspanLM(str(folder), dtype="float32", max_length=60, batch_size="2")), theirs)
    meshes = [{"ring": 2, "ulysses": 2}, {"ulysses": 4, "batch_size": 3}]
    for ours in pool4.run(_on_ranks, str(folder), meshes)[0]:
        assert _same(ours, theirs)


class _Lines:
    """A tokenizer that counts words."""

    def encode(self, text: str) -> list[str]:
        return text.split()


@pytest.mark.parametrize(("keys", "values"), [(1, 1), (4, 1), (1, 4)])
def test_needles_are_in_documents_of_the_requested_length(keys: int, values: int) -> None:
    line = len(needles.NOISE.split())
    for length in (400, 3000):
        made = needles.documents(_Lines(), length, keys, values, samples=5)
        assert made == needles.documents(_Lines(), length, keys, values, samples=5)
        assert len({doc["input"] for doc in made}) == 5
        for doc in made:
            words = len(f"{doc['input']} {doc['gen_prefix']}".split()) + needles.ANSWER_TOKENS
            assert length - line < words <= length
            asked = doc["gen_prefix"].split(" for ")[1].split()[0]
            assert [f"for {asked} is: {value}." in doc["input"] for value in doc["outputs"]] == [True] * values
            assert doc["input"].count("special magic numbers for") == keys + values - 1 + 1
            said = " and ".join(doc["outputs"][:-1] or doc["outputs"])
            assert needles.process_results(doc, [said]) == {"recall": max(1, values - 1) / values}
    with pytest.raises(ValueError, match="100 tokens are too few"):
        needles.documents(_Lines(), 100, keys, values, samples=1)


def test_the_harness_runs_the_needle_tasks(folder: Path, tmp_path: Path) -> None:
    """With a random model: every document is asked about and scored."""
    lm_eval = pytest.importorskip("lm_eval")
    from lm_eval.tasks import TaskManager

    from longspan.lm_eval.model import LongspanLM

    longer = shutil.copytree(folder, tmp_path / "longer")
    config = json.loads((longer / "config.json").read_text())
    (longer / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 1024}))
    metadata = {"pretrained": str(longer), "max_seq_lengths": [800, 900], "samples": 2}
    tasks = TaskManager(include_path=str(ROOT / "examples" / "ruler"), include_defaults=False, metadata=metadata)
    model = LongspanLM(pretrained=str(longer), dtype="float32", max_length=1024)
    found = lm_eval.simple_evaluate(model, tasks=["longspan_needles"], task_manager=tasks, bootstrap_iters=0)
    assert sorted(found["results"]) == [f"longspan_needle_{kind}" for kind in ("multikey", "multivalue", "single")]
    assert all(row["recall,none"] == 0 for row in found["results"].values())
    for samples in found["samples"].values():
        assert len(samples) == 4 and all(sample["resps"][0][0] for sample in samples)
