"""What follows a finished run: its result goes to the Hugging Face hub, and lm-evaluation-harness evaluates it.

All that can be refused is refused before the training starts.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from longspan.checkpoint import exported_step
from longspan.core.errors import LongspanError, require
from longspan.lm_eval.__main__ import main as run_harness
from longspan.ranks import launch
from longspan.train.config import TrainConfig


def check_ahead(config: TrainConfig) -> None:
    """Raise if what is to follow the run would fail: no token for the hub, no such task."""
    if config.checkpoint.push_to_hub is not None:
        _check_hub(config.checkpoint.push_to_hub)
    if config.evaluation.eval_tasks:
        _check_tasks(config)


def follow(config: TrainConfig, run_harness: Callable[[list[str]], int] = run_harness) -> int:
    """Push the result of a run and evaluate it, as asked; return the exit code. For one process of the job."""
    if config.checkpoint.push_to_hub is not None:
        _push(config, config.checkpoint.push_to_hub)
    if not config.evaluation.eval_tasks:
        return 0
    parallel, out = config.parallel, config.out / "lm_eval"
    mesh = f"ring={parallel.ring},ulysses={parallel.ulysses},tensor={parallel.tensor}"
    print(f"evaluating {config.exported} on {config.evaluation.eval_tasks}; the results go to {out}", flush=True)
    model = ["--model", "longspan", "--model_args", f"pretrained={config.exported},{mesh}"]
    return run_harness(["run", *model, "--tasks", config.evaluation.eval_tasks, "--output_path", str(out)])


def _check_hub(name: str) -> None:
    from huggingface_hub import HfApi, constants, get_token
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    flag = f"--push-to-hub {name}"
    try:
        validate_repo_id(name)
    except ValueError as error:
        raise LongspanError(f"{flag} is no name of a repository (NAME or OWNER/NAME): {error}") from error
    if constants.HF_HUB_OFFLINE:
        raise LongspanError(f"{flag} needs the hub, and HF_HUB_OFFLINE is set; unset it, or push OUT/hf yourself")
    if get_token() is None:
        raise LongspanError(f"{flag} needs a token that may write; run `hf auth login`, or set HF_TOKEN")
    try:
        HfApi().whoami()
    except Exception as error:  # the hub's own errors, and those of the network
        raise LongspanError(f"{flag}: the hub does not accept the token, or cannot be reached: {error}") from error


def _push(config: TrainConfig, name: str) -> None:
    from huggingface_hub import HfApi

    try:
        api: Any = HfApi()
        made = api.create_repo(name, private=config.checkpoint.hub_private, exist_ok=True)
        api.upload_folder(
            repo_id=made.repo_id,
            folder_path=config.exported,
            commit_message=f"longspan train, step {exported_step(config.exported)}",
            ignore_patterns=["longspan.json"],
        )
    except Exception as error:  # the hub's own errors, and those of the network
        raise LongspanError(
            f"--push-to-hub {name}: {config.exported} is complete and could not be pushed: {error}; the same command "
            "tries again"
        ) from error
    print(f"pushed {config.exported} to {made}", flush=True)


def _check_tasks(config: TrainConfig) -> None:
    flag = f"--eval-tasks {config.evaluation.eval_tasks}"
    require(flag, "lm_eval")
    if launch.under_torchrun():
        raise LongspanError(
            f"{flag} starts ranks of its own after the run, which torchrun does not; leave it out, and run "
            "python -m longspan.lm_eval afterwards"
        )
    from lm_eval.tasks import TaskManager

    known = TaskManager()
    for task in config.evaluation.eval_tasks.split(","):
        if not known.match_tasks([task]) and not Path(task).is_file():
            raise LongspanError(f"{flag}: lm-evaluation-harness has no task {task!r}; `lm_eval ls tasks` lists them")
