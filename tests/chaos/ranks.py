"""Seeded faults of the ranks of real jobs: killed, stopped, leaving early, or started differently.

Each fault strikes a job of 4 ranks at a random moment (start, steps, saves, export). The job must end within the limit,
with a message that names the rank. After a kill, a stop or an early exit it continues from its last checkpoint (by
--max-restarts, or by the same command), to exactly the losses and exported weights of a job without a fault.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pickle
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from longspan.cli import main as cli_main
from longspan.ranks.job import VARIABLES
from longspan.train import command
from tests.chaos.counts import Budget, Counts, Outcome
from tests.train.training import Job, small_job

ROOT = Path(__file__).parents[2]
LIMIT_S = 180.0
"""Seconds after a fault when a job counts as hung."""
TIMEOUT_S = 20
"""--timeout of the jobs."""
START_S = 120
"""--start_timeout of the jobs, which ends one whose rank stops before the watch begins."""
KINDS = ("kill", "stop", "leave", "mismatch")
CHANGES: list[dict[str, Any]] = [
    {"learning_rate": 0.5},
    {"max_grad_norm": 9.0},
    {"weight_decay": 0.7},
    {"warmup_steps": 2},
    {"max_steps": 5},
    {"save_steps": 1},
    {"seed": 3},
    {"context": "59"},
    {"layout": "contiguous"},
    {"ring": 4, "ulysses": 1},
    {"shard_weights": False},
    {"data_seed": 7},
    {"bf16": True},
]


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault: `kind` is "kill", "stop", "leave" or "mismatch", with details in `how`.

    A kill or a stop comes `after_s` seconds after `lines` reported steps; a rank leaves in step `lines`.
    """

    kind: str
    rank: int
    lines: int = 0
    after_s: float = 0.0
    how: Any = None


def draw(rng: random.Random, kind: str, config: Job) -> Fault:
    """Return a random fault of a kind."""
    rank, lines = rng.randrange(config.ring * config.ulysses), rng.randrange(config.max_steps)
    if kind == "mismatch":
        return Fault(kind, rank, how=rng.choice(CHANGES))
    if kind == "leave":
        return Fault(kind, rank, lines, how=rng.choice(["sys.exit(0)", "os._exit(0)", "os._exit(3)"]))
    return Fault(kind, rank, lines, rng.uniform(0, 1.5), how=rng.choice(["restart", "again"]))


def base_config(folder: Path, **changes: Any) -> Job:
    """Return a small job that saves often."""
    base: dict[str, Any] = {"ring": 2, "ulysses": 2, "max_steps": 8, "save_total_limit": 2}
    base |= {"timeout": TIMEOUT_S, "start_timeout": START_S}
    return small_job(folder, folder / "faultless", **base | changes)


# --- the job with its fault, in its processes


def run_here(path: Path) -> int:
    """Run a job as the command line does, with its fault."""
    argv, fault = pickle.loads(path.read_bytes())
    command.train = _Rank(fault, path.parent)  # type: ignore[assignment]
    return cli_main(["train", *argv])


_train = command.train  # before it is replaced


@dataclasses.dataclass(frozen=True)
class _Rank:
    """Replaces the function that every rank runs."""

    fault: Fault | None
    folder: Path

    def __call__(self, argv: list[str]) -> None:
        rank = int(os.environ["RANK"])
        (self.folder / f"rank-{rank}").write_text(str(os.getpid()))
        fault = self.fault
        if fault is not None and fault.rank == rank and fault.kind == "mismatch":
            argv = [*argv, *(word for key, value in fault.how.items() for word in (f"--{key}", str(value)))]
        if fault is not None and fault.rank == rank and fault.kind == "leave":
            _leave_in_step(fault)
        _train(argv)


def _leave_in_step(fault: Fault) -> None:
    from longspan.trainers.mixin import TrainerMixin

    plain = TrainerMixin.training_step

    def training_step(self: TrainerMixin, *args: Any, **kwargs: Any) -> Any:
        if self.state.global_step == fault.lines:
            if fault.how == "sys.exit(0)":
                sys.exit(0)
            os._exit(int(fault.how[-2]))
        return plain(self, *args, **kwargs)

    TrainerMixin.training_step = training_step  # type: ignore[method-assign]


# --- the campaign


def environment() -> dict[str, str]:
    """Return the environment of a job's process: this tree's code, one thread, offline, no other job."""
    path = f"{ROOT / 'src'}:{ROOT}"
    mine = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return {name: value for name, value in mine.items() if name not in VARIABLES}


def start(job: Path) -> subprocess.Popen[str]:
    """Start the command of a job, which writes `stdout` next to it."""
    with (job.parent / "stdout").open("w") as stdout:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.chaos.ranks", str(job)],
            env=environment(),
            cwd=ROOT,
            stdout=stdout,
            stderr=subprocess.PIPE,
            text=True,
        )


def run_job(
    config: Job, fault: Fault | None, folder: Path, start: Callable[[Path], Any] = start
) -> tuple[int | None, str]:
    """Run a job with a fault; return its exit code (None if it hung) and stderr."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "job.pickle").write_bytes(pickle.dumps((config.argv, fault)))
    process = start(folder / "job.pickle")
    try:
        if fault is not None and fault.kind in ("kill", "stop"):
            _strike(process, fault, folder)
        _, stderr = process.communicate(timeout=LIMIT_S)
        return process.returncode, stderr
    except subprocess.TimeoutExpired:
        process.kill()
        return None, process.communicate()[1]
    finally:
        process.kill()


def _strike(process: Any, fault: Fault, folder: Path) -> None:
    pid = folder / f"rank-{fault.rank}"
    if wait_for(process, folder / "stdout", fault.lines, fault.after_s, lambda: pid.exists() and bool(pid.read_text())):
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid.read_text()), signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)


def wait_for(
    process: Any,
    output: Path,
    lines: int,
    after_s: float,
    started: Callable[[], bool] = lambda: True,
) -> bool:
    """Wait until `output` reports `lines` steps, then `after_s` seconds; return whether the process still runs."""
    end = time.monotonic() + LIMIT_S
    while not started() or _lines(output) < lines:
        if process.poll() is not None or time.monotonic() > end:
            return False
        time.sleep(0.02)
    time.sleep(after_s)
    return process.poll() is None


def _lines(output: Path) -> int:
    """Return the steps that an output reports."""
    return len(re.findall(r"\bloss\b", output.read_text())) if output.exists() else 0


def result(out: Path) -> tuple[dict[int, float], dict[str, bytes]]:
    """Return a job's losses by step, and the files of its exported weights."""
    newest = max(out.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    history = json.loads((newest / "trainer_state.json").read_text())["log_history"]
    weights = {path.name: path.read_bytes() for path in sorted(out.glob("*.safetensors"))}
    return {entry["step"]: entry["loss"] for entry in history if "loss" in entry}, weights


def attempt(config: Job, fault: Fault, folder: Path, expected: Any, start: Callable[[Path], Any] = start) -> Outcome:
    """Run a job with a fault, judge its end, and, if it can continue, compare its result with the expected one."""
    again = fault.how != "restart"
    mine = config.but(output_dir=str(folder / "run"), max_restarts=0 if again else 1)
    code, output = run_job(mine, fault, folder, start)
    outcome = Outcome(fault, verdict(fault, code, output), output)
    if fault.kind != "mismatch" and outcome.verdict in ("refused", "wrong"):
        if again:
            code, _ = run_job(mine.but(max_restarts=0), None, folder, start)
        outcome.recovered = code == 0 and result(mine.out) == expected
    return outcome


def verdict(fault: Fault, code: int | None, output: str) -> str:
    """Judge a job by its exit code and its output, which must name the rank, and the setting that differs."""
    if code is None:
        return "hung"
    restarted = fault.how == "restart" and "restart 1 of 1" in output
    if code == 0 and not restarted:
        return "silent" if fault.kind in ("leave", "mismatch") else "harmless"
    key = next(iter(fault.how)) if fault.kind == "mismatch" else ""
    return "refused" if f"rank {fault.rank}" in output and f" {key}" in output else "wrong"


def run(budget: Budget, counts: Counts) -> None:
    """Run a job with a fault of each kind, by several seeds."""
    config = base_config(budget.folder)
    code, output = run_job(config, None, budget.folder / "first")
    assert code == 0, output
    expected = result(config.out)
    for seed in budget.seeds(3):
        rng = random.Random(seed)
        for kind in KINDS:
            if counts["tried"] and not budget.more():
                return
            fault = draw(rng, kind, config)
            counts.add_job(seed, attempt(config, fault, budget.folder / f"{seed}-{kind}", expected))


if __name__ == "__main__":
    sys.exit(run_here(Path(sys.argv[1])))
