"""Trackers by name, against modules that record what they are told."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from longspan.core.errors import LongspanError
from longspan.train import trackers
from longspan.train.evaluation import Evaluated, mean_of_tokens
from longspan.train.metrics import StepMetrics
from longspan.train.trackers import MetricsLog
from tests.training import refused, small_run, write_config

SETTINGS = {"lr": 1e-3, "fsdp": True, "data": "('pydoc',)"}


class Recorder(ModuleType):
    """A module whose calls are recorded; runs get the id "new"."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.calls: list[tuple[str, Any, Any]] = []
        self.fails = ""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args: Any, **options: Any) -> Any:
            if name == self.fails:
                raise ConnectionError("no network")
            self.calls.append((name, args, options))
            answers = {"get_experiment_by_name": None, "is_tracking_uri_set": False, "create_experiment": "7"}
            if name == "create_run":
                return SimpleNamespace(info=SimpleNamespace(run_id="new"))
            return answers.get(name, self)

        return call

    @property
    def id(self) -> str:
        return next((options["id"] for name, _, options in self.calls if name == "init" and options["id"]), "new")

    def named(self, name: str) -> list[Any]:
        return [(args, options) for called, args, options in self.calls if called == name]


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> dict[str, Recorder]:
    for name in ("WANDB_PROJECT", "TRACKIO_PROJECT", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    made = {name: Recorder(name) for name in ("wandb", "trackio", "mlflow")}
    for name, module in made.items():
        monkeypatch.setitem(sys.modules, name, module)
    return made


def _metrics(step: int) -> StepMetrics:
    options: dict[str, Any] = dict(grad_norm=0.5, lr=1e-3, tokens=100, tokens_per_s=50.0, step_s=2.0)
    return StepMetrics(step, 2.5, **options, communication=0.25, peak_memory_gib=1.5, mfu=None)


def _evaluated(step: int) -> Evaluated:
    means = mean_of_tokens(torch.tensor([20.0, 10.0]))
    return Evaluated(step, means, {"a": means}, {(0, 16): means}, 1.0, "<b> & c")


def _log(folder: Path, step: int, warned: list[str] | None = None) -> None:
    """A run that reports and evaluates the step after `step`, on all trackers."""
    log = MetricsLog(folder, step, ",".join(trackers.TRACKERS), SETTINGS, (warned or []).append)
    log.write(_metrics(step + 1))
    log.write_evaluation(_evaluated(step + 1))
    log.close()


def test_every_tracker_gets_steps_evaluations_and_settings(fakes: dict[str, Recorder], tmp_path: Path) -> None:
    _log(tmp_path / "run", 0)
    wandb, trackio, mlflow = fakes["wandb"], fakes["trackio"], fakes["mlflow"]
    for module in (wandb, trackio):
        ((_, options),) = module.named("init")
        assert options["project"] == "longspan" and options["config"] == SETTINGS
        assert options["name"].startswith("run") and len(module.named("finish")) == 1
    (steps, _), (evaluated, _), (sample, _) = wandb.named("log")
    assert set(sample[0]) == {"eval/sample", "step"} and wandb.named("Html")[0][0] == ("<pre>&lt;b&gt; &amp; c</pre>",)
    assert trackio.named("Markdown")[0][0] == ("<b> & c",)
    assert mlflow.named("log_text") == [(("new", "<b> & c", "eval/sample/1.txt"), {})]
    assert steps[0]["train/loss"] == 2.5 and steps[0]["step"] == 1 and "train/mfu" not in steps[0]
    assert evaluated[0] == {
        **{"eval/loss": 2.0, "eval/perplexity": pytest.approx(7.389, abs=1e-3), "step": 1},
        **{"eval/loss_by_source/a": 2.0, "eval/loss_by_position/16": 2.0},
    }
    assert [options for _, options in trackio.named("log")] == [{"step": 1}] * 3
    assert {args[1:] for args, _ in mlflow.named("log_param")} == set(SETTINGS.items())
    assert (("new", "eval/loss", 2.0), {"step": 1}) in mlflow.named("log_metric")
    assert mlflow.named("set_tracking_uri") == [((f"sqlite:///{tmp_path / 'run' / 'mlflow.db'}",), {})]
    assert mlflow.named("set_terminated") == [(("new",), {})]


def test_a_resumed_run_continues_the_same_runs(fakes: dict[str, Recorder], tmp_path: Path) -> None:
    _log(tmp_path / "run", 0)
    first = {name: module.named("init") for name, module in fakes.items()}
    for module in fakes.values():
        module.calls.clear()
    _log(tmp_path / "run", 1)
    ((_, options),) = fakes["wandb"].named("init")
    assert options["id"] == "new" and options["resume"] == "allow"
    ((_, options),) = fakes["trackio"].named("init")
    assert options["name"] == first["trackio"][0][1]["name"]
    assert fakes["mlflow"].named("create_run") == [] and len(fakes["mlflow"].named("update_run")) == 1
    for module in fakes.values():
        module.calls.clear()
    _log(tmp_path / "run", 0)  # from the beginning again: another run
    assert fakes["wandb"].named("init")[0][1]["id"] is None and len(fakes["mlflow"].named("create_run")) == 1


def test_a_tracker_that_fails_does_not_end_the_run(fakes: dict[str, Recorder], tmp_path: Path) -> None:
    warned: list[str] = []
    fakes["wandb"].fails, fakes["trackio"].fails = "log", "finish"
    log = MetricsLog(tmp_path / "run", 0, "wandb,trackio,mlflow", SETTINGS, warned.append)
    for step in (1, 2):
        log.write(_metrics(step))
    log.close()
    assert warned == [
        "warning: --track wandb failed and is left out from step 1 on: no network",
        "warning: --track trackio could not finish: no network",
    ]
    steps = [options["step"] for args, options in fakes["mlflow"].named("log_metric") if args[1] == "train/loss"]
    assert steps == [1, 2]
    fakes["wandb"].fails = "init"
    with pytest.raises(LongspanError, match="--track wandb cannot start: ConnectionError: no network"):
        trackers.start("wandb", tmp_path / "run", SETTINGS, 0)
    (tmp_path / "run" / "trackers.json").write_text("")  # as a full disk leaves it
    with pytest.raises(LongspanError, match=r"trackers\.json cannot be read: .*; remove it, and the trackers start"):
        trackers.start("mlflow", tmp_path / "run", SETTINGS, 1)


@pytest.mark.parametrize("name", ["trackio", "wandb", "mlflow"])
def test_a_tracker_that_is_not_installed_names_its_extra(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda asked, *a: None if asked == name else found(asked, *a))
    config = small_run(write_config(tmp_path), tmp_path / "run", track=f"tensorboard,{name}")
    refused(config, rf'--track {name} needs {name}, .* extra \'{name}\' \(pip install "\.\[{name}\]"\)')
    assert not config.out.exists()


def test_unknown_names_are_refused(tmp_path: Path) -> None:
    config = small_run(write_config(tmp_path), tmp_path / "run")
    for track in ("comet", "wandb,wandb", "", "tensorboard, wandb"):
        refused(config, f"--track {track}: give names out of tensorboard, trackio, wandb, mlflow", track=track)
    assert trackers.names_of("none") == []
