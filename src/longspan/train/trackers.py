"""Where a run's metrics go: `metrics.jsonl`, `evaluation.jsonl`, and the trackers of --track by name.

Where and under which project they log is set by their own environment variables (WANDB_PROJECT, MLFLOW_TRACKING_URI,
...). A resumed run continues the same run of a tracker: its id is in OUT/trackers.json.
"""

from __future__ import annotations

import contextlib
import dataclasses
import html
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from longspan.core.errors import LongspanError, is_full, require

if TYPE_CHECKING:
    from longspan.train.evaluation import Evaluated
    from longspan.train.metrics import StepMetrics

PROJECT = "longspan"
"""The project, where a tracker's environment variable names no other."""

Settings = Mapping[str, Any]


class Tracker(Protocol):
    """Where metrics go besides `metrics.jsonl`; on the first rank only.

    It is made for the run in a folder, whose name it has, after a step, with the flags as plain values, and the id of
    the run that is resumed, if any.
    """

    id: str | None  # by which a later process finds the run again, if it needs one

    def log(self, values: Mapping[str, float], step: int) -> None: ...

    def log_text(self, name: str, text: str, step: int) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Event files in OUT/tensorboard."""

    id: str | None = None

    def __init__(self, folder: Path, settings: Settings, step: int, id: str | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._board: Any = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._board.add_scalar(name, value, step)

    def log_text(self, name: str, text: str, step: int) -> None:
        self._board.add_text(name, text, step)

    def close(self) -> None:
        self._board.close()


class Wandb:
    """Weights & Biases; WANDB_MODE=offline writes to OUT/wandb alone."""

    def __init__(self, folder: Path, settings: Settings, step: int, id: str | None) -> None:
        import wandb

        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=folder.name,
            dir=str(folder),
            config=dict(settings),
            id=id,
            resume="allow",
            settings=wandb.Settings(console="off"),
        )
        # W&B's own steps only grow, and a resumed run repeats some: plot over ours.
        self._run.define_metric("*", step_metric="step")
        self.id: str | None = self._run.id

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log({**values, "step": step})

    def log_text(self, name: str, text: str, step: int) -> None:
        import wandb

        self._run.log({name: wandb.Html(f"<pre>{html.escape(text)}</pre>"), "step": step})

    def close(self) -> None:
        self._run.finish()


class Trackio:
    """trackio: a local database, or a Space named by TRACKIO_SPACE_ID."""

    def __init__(self, folder: Path, settings: Settings, step: int, id: str | None) -> None:
        import trackio

        self.id: str | None = id or f"{folder.name}-{os.urandom(3).hex()}"
        self._run: Any = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", PROJECT),
            name=self.id,
            config=dict(settings),
            resume="allow",
            embed=False,
        )

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def log_text(self, name: str, text: str, step: int) -> None:
        import trackio

        self._run.log({name: trackio.Markdown(text)}, step=step)

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """MLflow, at MLFLOW_TRACKING_URI; without it in OUT/mlflow.db."""

    def __init__(self, folder: Path, settings: Settings, step: int, id: str | None) -> None:
        import mlflow

        if not mlflow.is_tracking_uri_set():
            mlflow.set_tracking_uri(f"sqlite:///{folder.resolve() / 'mlflow.db'}")
        self._client: Any = mlflow.MlflowClient()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        if id is None:
            experiment = self._client.get_experiment_by_name(name)
            of = self._client.create_experiment(name) if experiment is None else experiment.experiment_id
            self.id: str | None = self._client.create_run(of, run_name=folder.name).info.run_id
            for key, value in settings.items():
                self._client.log_param(self.id, key, value)
        else:
            self.id = id
            self._client.update_run(self.id, status="RUNNING")

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._client.log_metric(self.id, name, value, step=step)

    def log_text(self, name: str, text: str, step: int) -> None:
        self._client.log_text(self.id, text, f"{name}/{step}.txt")

    def close(self) -> None:
        self._client.set_terminated(self.id)


TRACKERS: dict[str, Callable[[Path, Settings, int, str | None], Tracker]] = {
    "tensorboard": TensorBoard,
    "trackio": Trackio,
    "wandb": Wandb,
    "mlflow": MLflow,
}


def names_of(track: str) -> list[str]:
    """Return the names in a value of --track. Raise for an unknown one."""
    names = [] if track == "none" else track.split(",")
    for name in names:
        if name not in TRACKERS or names.count(name) > 1:
            raise LongspanError(f"--track {track}: give names out of {', '.join(TRACKERS)}, with commas, or none")
    return names


def check_installed(track: str) -> None:
    """Raise if a tracker of --track is not installed, naming the extra to install."""
    for name in names_of(track):
        require(f"--track {name}", name)


def start(track: str, folder: Path, settings: Settings, step: int) -> dict[str, Tracker]:
    """Start the trackers of --track for a run after `step`, and remember their ids in the folder."""
    path = folder / "trackers.json"
    try:
        ids: dict[str, str] = json.loads(path.read_text()) if path.exists() and step else {}
    except ValueError as error:
        raise LongspanError(f"{path} cannot be read: {error}; remove it, and the trackers start new runs") from error
    started: dict[str, Tracker] = {}
    for name in names_of(track):
        try:
            started[name] = TRACKERS[name](folder, settings, step, ids.get(name))
        except Exception as error:  # each raises its own: no network, no login, no such run, a full disk
            raise LongspanError(f"--track {name} cannot start: {type(error).__name__}: {error}") from error
    found = {name: tracker.id for name, tracker in started.items() if tracker.id is not None}
    if found and found != ids:
        path.write_text(json.dumps(ids | found) + "\n")
    return started


class Records:
    """A JSONL file with a record per step. A resumed run appends to it, without the steps after the resumed one."""

    def __init__(self, path: Path, resumed_step: int) -> None:
        self.path = path
        if path.exists():
            before = path.read_text()
            complete = [line for line in before.splitlines(keepends=True) if line.endswith("\n")]
            # A run from the beginning writes step 0 again.
            text = "".join(line for line in complete if resumed_step and json.loads(line)["step"] <= resumed_step)
            if text != before:
                rewritten = path.with_name(f"{path.name}.new")  # a full disk leaves the old file unchanged
                rewritten.write_text(text)
                rewritten.replace(path)
        self._file = path.open("ab", buffering=0)

    def write(self, record: dict[str, Any]) -> None:
        """Append one record. Of a line that the disk has no room for, no part is written."""
        line = (json.dumps(record) + "\n").encode()
        before = os.fstat(self._file.fileno()).st_size
        try:
            done = 0
            while done < len(line):
                done += self._file.write(line[done:]) or 0
        except OSError:
            with contextlib.suppress(OSError):
                self._file.truncate(before)
            raise

    def close(self) -> None:
        self._file.close()


class MetricsLog:
    """Writes a run's records, and tells the trackers; on the first rank only. A full disk does not end the run."""

    def __init__(
        self,
        folder: Path,
        resumed_step: int = 0,
        track: str = "tensorboard",
        settings: Settings | None = None,
        warn: Callable[[str], None] = print,
    ) -> None:
        self._warn, self._lost = warn, False
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._steps = Records(folder / "metrics.jsonl", resumed_step)
            self._evaluations = Records(folder / "evaluation.jsonl", resumed_step)
            self._trackers = start(track, folder, settings or {}, resumed_step)
        except OSError as error:
            raise LongspanError(f"the metrics of --out {folder} cannot be written: {error}") from error

    def write(self, metrics: StepMetrics) -> None:
        """Append one step."""
        values = dataclasses.asdict(metrics)
        known = {f"train/{name}": value for name, value in values.items() if name != "step" and value is not None}
        self._write(self._steps, values, known)

    def write_evaluation(self, evaluated: Evaluated) -> None:
        """Append an evaluation."""
        self._write(self._evaluations, evaluated.record(), evaluated.scalars(), evaluated.sample)

    def _write(
        self, records: Records, record: dict[str, Any], values: dict[str, float], sample: str | None = None
    ) -> None:
        try:
            records.write(record)
        except OSError as error:
            if not is_full(error):
                raise
            if not self._lost:
                free = shutil.disk_usage(records.path.parent).free
                self._warn(
                    f"warning: {records.path} cannot be written: {error.strerror} ({free:,} bytes free); the run goes "
                    "on, steps are missing there until there is room"
                )
            self._lost = True
            return
        for name, tracker in list(self._trackers.items()):
            try:
                if values:
                    tracker.log(values, record["step"])
                if sample is not None:
                    tracker.log_text("eval/sample", sample, record["step"])
            except Exception as error:  # a tracker does not end the run, whatever it raises
                self._warn(f"warning: --track {name} failed and is left out from step {record['step']} on: {error}")
                del self._trackers[name]

    def close(self) -> None:
        """Close the files and the trackers. TensorBoard's files may lack steps on a full disk."""
        self._steps.close()
        self._evaluations.close()
        for name, tracker in self._trackers.items():
            try:
                tracker.close()
            except Exception as error:
                self._warn(f"warning: --track {name} could not finish: {error}")
