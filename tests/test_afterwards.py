"""What follows a run of `longspan train`: a push to the hub, and lm-evaluation-harness."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import huggingface_hub
import pytest

from longspan.core.errors import LongspanError
from longspan.core.sections import replace
from longspan.train import TrainConfig, run
from longspan.train.afterwards import follow
from tests.training import refused, small_run, write_config


class Hub:
    """The hub's API; it records what is pushed."""

    token: str | None = "secret"
    pushed: list[Any]
    fails: str | None = None

    def whoami(self) -> None:
        if self.token != "secret":
            raise ValueError("401 Unauthorized")

    def create_repo(self, name: str, *, private: bool, exist_ok: bool) -> huggingface_hub.RepoUrl:
        assert exist_ok
        self.pushed.append((name, private))
        return huggingface_hub.RepoUrl(f"https://huggingface.co/me/{name}")

    def upload_folder(self, *, repo_id: str, folder_path: Path, commit_message: str, ignore_patterns: Any) -> None:
        if self.fails:
            raise ConnectionError(self.fails)
        names = {path.name for path in folder_path.iterdir()} - set(ignore_patterns)
        self.pushed.append((repo_id, names, commit_message))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> type[Hub]:
    made = type("OneHub", (Hub,), {"pushed": []})
    monkeypatch.setattr(huggingface_hub, "HfApi", made)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: made.token)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    return made


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    return small_run(write_config(tmp_path), tmp_path / "run", steps=1, push_to_hub="toy")


def test_the_export_is_pushed(config: TrainConfig, hub: type[Hub], capsys: pytest.CaptureFixture[str]) -> None:
    hub.fails = "no network"
    with pytest.raises(LongspanError, match=r"run/hf is complete and could not be pushed: no network; the same comm"):
        run(config)
    hub.fails, hub.pushed = None, []
    assert run(replace(config, hub_private=False)) == 0  # nothing to train, and pushed
    (made, (name, files, message)) = hub.pushed
    assert made == ("toy", False) and name == "me/toy" and message == "longspan train, step 1"
    assert {"config.json", "model.safetensors", "tokenizer_config.json"} <= files and "longspan.json" not in files
    assert "pushed" in capsys.readouterr().out


def test_a_push_that_would_fail_is_refused_before_the_training(
    config: TrainConfig, hub: type[Hub], monkeypatch: pytest.MonkeyPatch
) -> None:
    refused(config, "--push-to-hub a/b/c is no name of a repository", push_to_hub="a/b/c")
    refused(config, "--push-to-hub toy pushes the export; leave --export never out", export="never")
    hub.token = "expired"
    refused(config, "--push-to-hub toy: the hub does not accept the token, or cannot be reached: 401")
    hub.token = None
    refused(config, "--push-to-hub toy needs a token that may write; run `hf auth login`, or set HF_TOKEN")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    refused(config, "--push-to-hub toy needs the hub, and HF_HUB_OFFLINE is set")
    assert not config.out.exists() and hub.pushed == []


def test_tasks_are_evaluated_on_the_mesh_of_a_replica(config: TrainConfig) -> None:
    given: list[str] = []

    def harness(args: list[str]) -> int:
        given.extend(args)
        return 1

    config = replace(config, push_to_hub=None, eval_tasks="arc_easy,ruler", data_degree=2, ring=2, ulysses=3)
    assert follow(config, harness) == 1
    assert given[given.index("--model_args") + 1] == f"pretrained={config.exported},ring=2,ulysses=3,tensor=1"
    assert given[given.index("--tasks") + 1] == "arc_easy,ruler"
    assert given[given.index("--output_path") + 1] == str(config.out / "lm_eval")
    assert follow(replace(config, eval_tasks=""), harness) == 0


def test_unknown_tasks_are_refused_before_the_training(config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util
    import sys

    class TaskManager:
        def match_tasks(self, names: list[str]) -> list[str]:
            return [name for name in names if name == "known"]

    config = replace(config, push_to_hub=None)
    find = importlib.util.find_spec
    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "lm_eval" else find(name, *a))
        refused(config, r"--eval-tasks known needs lm-eval, .* extra 'eval'", eval_tasks="known")
        patch.setattr(importlib.util, "find_spec", lambda name, *a: object())
        for name in ("lm_eval", "lm_eval.tasks"):
            patch.setitem(sys.modules, name, ModuleType(name))
        sys.modules["lm_eval.tasks"].TaskManager = TaskManager  # type: ignore[attr-defined]
        refused(config, "harness has no task 'unknown'", eval_tasks="known,unknown")
    refused(config, "--eval-tasks known evaluates the export", eval_tasks="known", export="never")
    assert not config.out.exists()
