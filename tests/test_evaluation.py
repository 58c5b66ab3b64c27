"""Evaluation between the steps of `longspan train`: exact on every mesh, and without effect on the training."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from longspan import checkpoint
from longspan.core.errors import LongspanError
from longspan.core.sections import replace
from longspan.train import TrainConfig
from longspan.train.evaluation import Evaluated, Progress, buckets, mean_of_tokens
from longspan.train.inputs import open_local
from tests.choose import confirming
from tests.pool import RankPool
from tests.training import losses_of, refused, said_by, small_run, train, train_on, weights_of, write_config

TEXTS = {"books": ["It was a bright cold day in April. " * 9, "x" * 30], "code": ["def f(x): return x + 1\n" * 11]}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    """A run that evaluates on 7 sequences of two sources, which 2 replicas do not divide."""
    folder = tmp_path_factory.mktemp("evaluated")
    for name, texts in TEXTS.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return small_run(
        write_config(folder),
        folder / "run",
        eval_data=tuple(str(folder / f"{name}.jsonl") for name in TEXTS),
        eval_every=2,
        sample_prompt="It was",
        sample_tokens=5,
    )


def _evaluations(out: Path) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in (out / "evaluation.jsonl").read_text().splitlines()]
    return [{name: value for name, value in record.items() if name != "seconds"} for record in records]


@pytest.fixture(scope="module")
def alone(config: TrainConfig) -> TrainConfig:
    """The run, done on one process."""
    train(config)
    return config


def _flat(record: dict[str, Any]) -> dict[str, float]:
    found = {"loss": record["loss"], "perplexity": record["perplexity"], "tokens": record["tokens"]}
    for name, losses in record["sources"].items():
        found |= {f"{name} {key}": value for key, value in losses.items()}
    for of in record["positions"]:
        found |= {f"{of['above']}-{of['to']} {key}": of[key] for key in ("loss", "tokens")}
    return found


def test_losses_are_those_of_a_plain_model(alone: TrainConfig) -> None:
    """Of the exported weights, which are those of the last step: sequence by sequence, from all logits."""
    inputs, model = open_local(alone), AutoModelForCausalLM.from_pretrained(alone.exported, dtype=torch.float64).eval()
    expected: dict[str, list[float]] = {}
    for name in TEXTS:
        for sequence in inputs.evaluation_sequences(name, 61):
            ids = torch.from_numpy(sequence.ids)[None]
            with torch.no_grad():
                log_p = model(ids).logits[0, :-1].log_softmax(-1)
            for seen, loss in enumerate((-log_p.gather(-1, ids[0, 1:, None])[:, 0]).tolist(), start=1):
                span = next(f"{a}-{b}" for a, b in pairwise([0, *buckets(61)]) if a < seen <= b)
                for key in ("all", name, span):
                    expected.setdefault(key, []).append(loss)
    assert len(expected["all"]) == sum(len(list(inputs.evaluation_sequences(n, 61))) * 60 for n in TEXTS) - 70
    last = _evaluations(alone.out)[-1]
    found = {"all": last, **last["sources"], **{f"{of['above']}-{of['to']}": of for of in last["positions"]}}
    assert found.keys() == expected.keys()
    for key, losses in expected.items():
        assert found[key]["tokens"] == len(losses), key
        assert found[key]["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-5), key
        assert found[key]["perplexity"] == pytest.approx(math.exp(found[key]["loss"])), key


@pytest.mark.parametrize("mesh", [*confirming([{"ulysses": 2}]), {"data_degree": 2}, {"tensor": 2, "fsdp": False}])
def test_evaluations_on_two_ranks_are_those_of_one_process(
    alone: TrainConfig, mesh: dict[str, Any], pool2: RankPool, tmp_path: Path
) -> None:
    train_on(pool2, replace(alone, out=tmp_path / "run", **mesh))
    expected, found = _evaluations(alone.out), _evaluations(tmp_path / "run")
    assert [record["step"] for record in found] == [0, 2, 4]
    for one, two in zip(expected, found, strict=True):
        assert _flat(two) == pytest.approx(_flat(one), rel=1e-5)
        assert two["sample"] == one["sample"] and two["best"] == one["best"]


def test_evaluation_changes_no_bit_of_the_training(alone: TrainConfig, pool2: RankPool, tmp_path: Path) -> None:
    without = replace(alone, out=tmp_path / "without", eval_data=(), sample_prompt=None)
    train(without)
    assert losses_of(without.out) == losses_of(alone.out) and _evaluations(without.out) == []
    for name, given in {"with": alone, "plain": without}.items():
        train_on(pool2, replace(given, out=tmp_path / name, ulysses=2, pack="documents", dtype="bf16"))
    assert losses_of(tmp_path / "with") == losses_of(tmp_path / "plain")


def test_a_resumed_run_evaluates_at_the_same_steps_with_the_same_numbers(alone: TrainConfig, tmp_path: Path) -> None:
    resumed = replace(alone, out=tmp_path / "run", eval_every=3)
    train(replace(resumed, steps=4, schedule="constant"))
    whole = replace(resumed, out=tmp_path / "whole", steps=6, schedule="constant")
    train(whole)
    path = resumed.out / "evaluation.jsonl"
    path.write_text(path.read_text().replace('"step": 4', '"step": 5'))  # of a run that was killed after its save
    text = said_by(replace(resumed, steps=6, schedule="constant"))
    assert "resuming after step 4" in text and "eval 6  loss" in text
    assert [record["step"] for record in _evaluations(whole.out)] == [0, 3, 6]
    assert _evaluations(resumed.out) == _evaluations(whole.out)


def test_patience_stops_and_the_best_checkpoint_stays(alone: TrainConfig, tmp_path: Path) -> None:
    # A rate so high that the loss rises.
    config = replace(alone, out=tmp_path / "run", steps=30, eval_every=1, patience=3, keep=1, save_every=0, lr=0.3)
    text = said_by(replace(config, spike=0.0))
    found = _evaluations(config.out)
    best = min(found, key=lambda record: record["loss"])
    last = found[-1]["step"]
    assert 0 < best["step"] == last - 3 < 27
    assert f"stopped after step {last}: 3 evaluations without a lower loss than {best['loss']:.4f}" in text
    assert checkpoint.complete_steps(config.checkpoints) == [best["step"], last]
    assert [r["step"] for r in found if r["best"]] == [
        r["step"] for i, r in enumerate(found) if all(r["loss"] < other["loss"] for other in found[:i])
    ]
    again = said_by(replace(config, spike=0.0))
    assert (
        checkpoint.exported_step(config.exported) == last
        and f"is at step {last} of --steps 30, where --patience 3 stopped it" in again
    )
    assert _evaluations(config.out) == found
    chosen = replace(config, export="best")
    assert f"exporting step {best['step']}, which had the lowest evaluation loss" in said_by(replace(chosen, spike=0.0))
    assert checkpoint.exported_step(config.exported) == best["step"] and _evaluations(config.out) == found
    assert "nothing to do" in said_by(replace(chosen, spike=0.0))
    last_one = str(checkpoint.step_path(config.checkpoints, last))
    with pytest.raises(LongspanError, match="whose checkpoint is not in"):
        train(replace(chosen, resume=last_one, out=config.out.with_name("elsewhere")))
    weights = weights_of(config.out)
    train(replace(config, resume=str(checkpoint.step_path(config.checkpoints, best["step"])), steps=best["step"]))
    assert all(torch.equal(x, weights[name]) for name, x in weights_of(config.out).items())


def test_a_run_whose_evaluations_are_not_finite_stops(
    alone: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "longspan.train.evaluation.mean_of_tokens", lambda _: mean_of_tokens(torch.tensor([math.nan, 5.0]))
    )
    base = replace(alone, out=tmp_path / "run", eval_data=("pydoc",), eval_sequences=1, eval_every=1, patience=2)
    said = said_by(replace(base, sample_prompt=None, export="never"))
    assert "stopped after step 1: 2 evaluations without a finite loss (--patience 2)" in said
    line = Evaluated(1, mean_of_tokens(torch.tensor([495.0, 5.0])), {}, {}, 0.5).lines()[0]
    assert line == "eval 1  loss 99.0000  perplexity 9.89e+42  5 tokens  0.5 s"


def test_losses_of_other_data_are_not_compared() -> None:
    progress = Progress(["a"])
    assert progress.add(0, 2.0) and not progress.add(1, 2.0) and not progress.add(2, math.nan)
    state = {"of": ["a"], "best": 2.0, "step": 0, "since": 2}
    assert Progress.resumed(["a"], state) == progress
    assert Progress.resumed(["b"], state) == Progress(["b"])
    assert Progress.resumed(["a"], None) == Progress(["a"])


def test_buckets_halve_the_context() -> None:
    assert buckets(61) == [16, 31, 61]
    assert buckets(5) == [5]
    assert buckets(1 << 20) == [(1 << 20) >> shift for shift in range(7, -1, -1)]


def test_bad_evaluation_is_refused(config: TrainConfig, tmp_path: Path) -> None:
    base = replace(config, out=tmp_path / "run")
    (tmp_path / "empty.txt").write_text("")
    refused(base, "--eval-data .*nowhere.txt is neither a file", eval_data=(str(tmp_path / "nowhere.txt"),))
    refused(base, r"--eval-data .*empty\.txt is empty", eval_data=(str(tmp_path / "empty.txt"),))
    refused(base, "has a source twice", eval_data=("pydoc", "pydoc"))
    refused(base, "--patience 2 needs an evaluation loss", patience=2, eval_data=())
    refused(base, "--sample-prompt is empty", sample_prompt="")
    refused(base, "--eval-every", eval_every=0)
    refused(base, "--eval-data pydoc=0.5: every source is read once", eval_data=("pydoc=0.5",))
    (tmp_path / "late.jsonl").write_text(json.dumps({"text": "a" * 99}) + "\n{}\n")
    with pytest.raises(LongspanError, match=r"^--eval-data .*late\.jsonl, line 2 has no field 'text'"):
        train(replace(base, eval_data=(str(tmp_path / "late.jsonl"),), sample_prompt=None))


def test_only_the_first_sequences_are_read_if_asked(alone: TrainConfig, tmp_path: Path) -> None:
    config = replace(alone, out=tmp_path / "run", steps=1, eval_sequences=2, sample_prompt=None, eval_data=("pydoc",))
    train(config)
    assert [record["tokens"] for record in _evaluations(config.out)] == [120, 120]
