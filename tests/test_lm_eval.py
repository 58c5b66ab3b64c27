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
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from examples.ruler import needles
from longspan.lm_eval.scorer import Leader, end, serve, until
from tests.models import BASE, build
from tests.pool import RankPool

ROOT = Path(__file__).parents[1]
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


def _encoded() -> list[tuple[list[int], list[int]]]:
    encode = _tokenizer().encode
    return [(encode(context) if context else [1], encode(continuation)) for context, continuation in PAIRS]


def _greedy(folder: Path, pairs: list[Any]) -> list[Any]:
    """Add the greedy continuation, and one that differs in its last token."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    context = _tokenizer().encode(TEXTS[0])
    out = model.generate(torch.tensor([context]), max_new_tokens=5, do_sample=False, eos_token_id=None)
    own = out[0, len(context) :].tolist()
    return [*pairs, (context, own), (context, [*own[:-1], (own[-1] + 1) % 61])]


@torch.no_grad()
def _by_logits(folder: Path, pairs: list[Any], max_length: int) -> list[tuple[float, bool]]:
    model, found = AutoModelForCausalLM.from_pretrained(folder).eval(), []
    for context, continuation in pairs:
        ids = torch.tensor([(context + continuation)[-max_length - 1 :]])
        logits = model(ids[:, :-1]).logits[0, -len(continuation) :]
        chosen = ids[0, -len(continuation) :]
        log_p = logits.log_softmax(-1).gather(-1, chosen[:, None]).sum()
        found.append((float(log_p), bool((logits.argmax(-1) == chosen).all())))
    return found


@torch.no_grad()
def _by_generate(folder: Path, prompts: list[list[int]], stops: list[str], room: int) -> list[str]:
    model, found = AutoModelForCausalLM.from_pretrained(folder).eval(), []
    for prompt in prompts:
        ids = torch.tensor([prompt[-room:]])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=9, do_sample=False)
        found.append(until(_tokenizer().decode(out[0, ids.shape[1] :], skip_special_tokens=True), stops))
    return found


def _from_the_first_rank(meshes: list[dict[str, int]], pretrained: str, pairs: Any, prompts: Any, stops: Any) -> Any:
    answers = []
    for mesh in meshes:
        if dist.get_rank() != 0:
            serve()
            continue
        leader = Leader(pretrained=pretrained, dtype="float32", max_length=60, **mesh)
        log_p = leader.ask("loglikelihoods", pairs=pairs)
        answers.append((log_p, leader.ask("generate", prompts=prompts, stops=stops, max_new=9, do_sample=False)))
        end()
    return answers


def test_ranks_answer_as_one_process(pool4: RankPool, folder: Path) -> None:
    """Also with contexts cut to the model's length, and batches of different lengths."""
    pairs, prompts = _greedy(folder, _encoded()), [_tokenizer().encode(text) for text in TEXTS]
    whole = _by_generate(folder, prompts, [], 51)
    stops = [whole[0][4:6], whole[3][2]]  # texts of two tokens and of one, which stop some rows and not others
    log_p, texts = _by_logits(folder, pairs, 60), _by_generate(folder, prompts, stops, 51)
    assert {greedy for _, greedy in log_p} == {True, False} and texts[0] == whole[0][:4] != whole[0]
    meshes = [{"ring": 2, "ulysses": 2}, {"ulysses": 4, "batch_size": 3}]
    answers = pool4.run(_from_the_first_rank, meshes, str(folder), pairs, prompts, stops)[0]
    for likelihoods, generated in answers:
        assert [greedy for _, greedy in likelihoods] == [greedy for _, greedy in log_p]
        assert [x for x, _ in likelihoods] == pytest.approx([x for x, _ in log_p], rel=1e-5)
        assert generated == texts


def test_results_equal_the_harness_model(folder: Path) -> None:
    """Log-likelihoods, also of texts longer than the model, and generation up to stops."""
    pytest.importorskip("lm_eval")
    from lm_eval.api.registry import get_model
    from lm_eval.models.huggingface import HFLM

    from longspan.lm_eval.model import LongspanLM

    assert get_model("longspan") is LongspanLM
    options = {"pretrained": str(folder), "dtype": "float32", "max_length": 60}
    ours, theirs = LongspanLM(**options, batch_size="2"), HFLM(**options, batch_size=2, device="cpu")

    def asked(*args: Any) -> Any:
        return SimpleNamespace(args=args)

    pairs = [asked(*pair) for pair in PAIRS]
    for mine, its in zip(ours.loglikelihood(pairs), theirs.loglikelihood(pairs), strict=True):
        assert mine == (pytest.approx(its[0], rel=1e-5), its[1])
    rolling = [asked(text) for text in TEXTS]
    assert ours.loglikelihood_rolling(rolling) == pytest.approx(theirs.loglikelihood_rolling(rolling), rel=1e-5)
    ways: list[dict[str, Any]] = [{"until": ["a", "e"], "max_gen_toks": 9}, {"until": [], "max_gen_toks": 5}]
    generation = [asked(text, {**way, "do_sample": False}) for text in TEXTS for way in ways]
    assert ours.generate_until(generation) == theirs.generate_until(generation)


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
