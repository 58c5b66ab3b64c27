"""`longspan train --tokens` and `--epochs`: the steps that they come to."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from longspan import checkpoint
from longspan.core.sections import replace
from longspan.train import TrainConfig, run
from tests.training import log_of, losses_of, refused, small_run, write_config

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog"]
LENGTHS = [40, 300, 17, 90, 61, 5, 122]  # bytes, each ended by one more token


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    lines = [json.dumps({"text": (" ".join(WORDS * 9))[:length]}) for length in LENGTHS]
    (tmp_path / "texts.jsonl").write_text("\n".join(lines))
    return small_run(
        write_config(tmp_path), tmp_path / "run", data=str(tmp_path / "texts.jsonl"), steps=None, batch=2, lr=1e-3
    )


def _epoch(out: Path, step: int) -> int:
    """The epoch of the last document that a run had read after a step."""
    found = checkpoint.read_verified(checkpoint.step_path(out / "checkpoints", step), checkpoint.Ranks())
    return int(found.state["data"]["place"]["epoch"])


@pytest.mark.parametrize("pack", ["stream", "best-fit"])
def test_epochs_end_with_the_data(config: TrainConfig, pack: str, capsys: pytest.CaptureFixture[str]) -> None:
    """As many steps as all documents fill twice, and schedules end there."""
    one = {"stream": sum(n + 1 for n in LENGTHS) / 61, "best-fit": 6}[pack]  # 61; 61; 61; 61; 41 + 18; 6
    config = replace(config, epochs=2.0, pack=pack, export="never")
    run(config)
    steps = math.ceil(2 * one / 2)
    assert f"--epochs 2: {steps} steps; an epoch has" in capsys.readouterr().out
    assert list(losses_of(config.out)) == list(range(1, steps + 1))
    by_steps = replace(config, epochs=None, steps=steps, out=config.out.with_name("by-steps"))
    run(by_steps)
    assert losses_of(by_steps.out) == losses_of(config.out)
    if pack == "stream":  # 11 steps of 122 tokens, of two epochs of 642 tokens
        assert [_epoch(config.out, step) for step in (4, 6, 10, 11)] == [0, 1, 1, 2]


def test_tokens_are_trained_on_and_not_many_more(config: TrainConfig) -> None:
    run(replace(config, tokens=5 * 122 - 1))
    assert [record["tokens"] for record in log_of(config.out)] == [122, 244, 366, 488, 610]
    packed = replace(config, tokens=450, pack="best-fit", out=config.out.with_name("packed"))
    run(packed)
    assert 450 <= log_of(packed.out)[-1]["tokens"] < 450 + 122


def test_not_all_data_is_read_to_know_the_tokens_of_a_step(
    config: TrainConfig, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("longspan.train.old_resolve._SAMPLE", 3)
    run(replace(config, tokens=61 * 8, pack="best-fit", shuffle=0, dry_run=True))
    said = "--tokens 488: 5 steps; sequences have 60.3 tokens"  # 59, 61 and 61; then 61, 61 and 6
    assert said in capsys.readouterr().out


def test_a_resumed_run_has_the_same_end(config: TrainConfig, capsys: pytest.CaptureFixture[str]) -> None:
    config = replace(config, tokens=6 * 122, export="never")
    run(config)
    cut = replace(config, out=config.out.with_name("cut"))
    run(replace(cut, tokens=None, steps=4, schedule="constant"))
    assert checkpoint.complete_steps(cut.checkpoints)[-1] == 4
    run(replace(cut, schedule="constant"))
    assert list(losses_of(cut.out)) == list(range(1, 7))
    capsys.readouterr()
    run(config)
    assert "is at step 6 of --steps 6; give more" in capsys.readouterr().out
    run(replace(config, tokens=8 * 122, batch=4, change_batch=True))  # what is left, in steps of 4
    assert [record["tokens"] for record in log_of(config.out)][-2:] == [6 * 122, 8 * 122]


def test_only_one_length_is_accepted(config: TrainConfig) -> None:
    refused(config, "--steps 5 and --tokens 9 all give the length", steps=5, tokens=9)
    refused(config, "--tokens 9 and --epochs 0.5 all give the length", tokens=9, epochs=0.5)
    refused(config, "--epochs", epochs=0.0)
    refused(config, "--tokens", tokens=0)
    refused(config, "--warmup 50 is longer than the run of --steps 1", tokens=9, warmup=50)
    assert not config.out.exists()
