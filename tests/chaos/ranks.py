"""Ranks that are killed, stopped, that leave early or were told something else: a seeded, bounded campaign.

    python -m tests.chaos.ranks --seed 1 --tries 10
    python -m tests.chaos.ranks --seed 1 --tries 100 --kinds kill

Every fault is put into a real job of 4 ranks at a random moment (start-up, steps, saves, export). A job must end by
itself within the limit, with a message that names the rank; after a kill, a stop or an early exit, the job goes on from
its last checkpoint (by --max-restarts, or by the same command) and must come to the same losses and the same exported
weights, to the bit, as a job that nothing happened to.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import pickle
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from longspan.cli import main as cli_main
from longspan.core.sections import make, replace, values
from longspan.ranks.job import VARIABLES
from longspan.train import TrainConfig
from longspan.train import job as train_job
from tests.training import write_config

ROOT = Path(__file__).parents[2]
LIMIT_S = 180.0
"""A job that has not ended by then, after its fault, hangs."""
TIMEOUT_S = 20
"""--timeout of the jobs."""
KINDS = ("kill", "stop", "leave", "mismatch")
CHANGES: list[dict[str, Any]] = [
    {"lr": 0.5},
    {"clip": 9.0},
    {"weight_decay": 0.7},
    {"warmup": 2},
    {"steps": 5},
    {"save_every": 1},
    {"seed": 3},
    {"context": 59},
    {"layout": "contiguous"},
    {"ring": 4, "ulysses": 1},
    {"fsdp": False},
    {"shuffle": 7},
    {"dtype": "bf16"},
]


@dataclasses.dataclass(frozen=True)
class Fault:
    """What happens to a job: `kind` is "kill", "stop", "leave" or "mismatch"; `how` says more of it.

    A kill or a stop comes `after_s` seconds after `lines` reported steps; a rank leaves in step `lines`.
    """

    kind: str
    rank: int
    lines: int = 0
    after_s: float = 0.0
    how: Any = None


def draw(rng: random.Random, kind: str, config: TrainConfig) -> Fault:
    """A random fault of a kind."""
    rank, lines = rng.randrange(config.parallel.ranks), rng.randrange(config.steps)
    if kind == "mismatch":
        return Fault(kind, rank, how=rng.choice(CHANGES))
    if kind == "leave":
        return Fault(kind, rank, lines, how=rng.choice(["sys.exit(0)", "os._exit(0)", "os._exit(3)"]))
    return Fault(kind, rank, lines, rng.uniform(0, 1.5), how=rng.choice(["restart", "again"]))


def base_config(folder: Path, **changes: Any) -> TrainConfig:
    """A small job that saves often."""
    path = write_config(folder)
    config = make(
        TrainConfig,
        data="pydoc",
        config=path,
        context=61,
        ring=2,
        ulysses=2,
        batch=2,
        steps=8,
        lr=1e-2,
        warmup=1,
        dtype="fp32",
        log_every=1,
        save_every=2,
        keep=2,
        timeout=TIMEOUT_S,
        out=folder / "whole",
    )
    return replace(config, **changes)


# --- the job with its fault, in processes of its own


def _run_job(path: Path) -> int:
    """What the process of a job runs: as the command line does, but for the fault."""
    config, fault = pickle.loads(path.read_bytes())
    train_job._train_rank = _Rank(fault, path.parent)  # type: ignore[assignment]
    sys.modules["longspan.train"].run = lambda _: train_job.run(config)  # type: ignore[attr-defined]
    return cli_main(["train"])


@dataclasses.dataclass(frozen=True)
class _Rank:
    """Stands in for the function that every rank runs."""

    fault: Fault | None
    folder: Path

    def __call__(self, config: TrainConfig) -> None:
        rank = int(os.environ["RANK"])
        (self.folder / f"rank-{rank}").write_text(str(os.getpid()))
        fault = self.fault
        if fault is not None and fault.rank == rank and fault.kind == "mismatch":
            config = replace(config, **fault.how)
        if fault is not None and fault.rank == rank and fault.kind == "leave":
            _leave_in_step(fault)
        train_job._train_rank(config)  # the plain one: only the launcher's is replaced


def _leave_in_step(fault: Fault) -> None:
    from longspan.train.loop import Trainer

    plain = Trainer._update

    def update(self: Trainer, batch: Any) -> tuple[float, float]:
        if self.step == fault.lines:
            if fault.how == "sys.exit(0)":
                sys.exit(0)
            os._exit(int(fault.how[-2]))
        return plain(self, batch)

    Trainer._update = update  # type: ignore[method-assign]


# --- the campaign


@dataclasses.dataclass
class Outcome:
    """What became of one fault. `verdict` is "named", "not named", "silent" (code 0 with the fault in it), "hung", or
    "too late" (all was done before the fault came); `recovered` whether the job came to the same bits after it."""

    fault: Fault
    verdict: str
    said: str
    recovered: bool | None = None


def environment() -> dict[str, str]:
    """Of a job's process: this tree's code, one thread, no hub, and no other job."""
    path = f"{ROOT / 'src'}:{ROOT}"
    mine = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return {name: value for name, value in mine.items() if name not in VARIABLES}


def run_job(config: TrainConfig, fault: Fault | None, folder: Path) -> tuple[int | None, str]:
    """Run a job with a fault; its exit code (None if it hung) and what it said on stderr."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "job.pickle").write_bytes(pickle.dumps((config, fault)))
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.chaos.ranks", "--job", str(folder / "job.pickle")],
        env=environment(),
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        if fault is not None and fault.kind in ("kill", "stop"):
            _strike(process, config, fault, folder)
        _, said = process.communicate(timeout=LIMIT_S)
        return process.returncode, said
    except subprocess.TimeoutExpired:
        process.kill()
        return None, process.communicate()[1]
    finally:
        process.kill()


def _strike(process: subprocess.Popen[str], config: TrainConfig, fault: Fault, folder: Path) -> None:
    pid = folder / f"rank-{fault.rank}"
    if wait_for(process, config, fault.lines, fault.after_s, lambda: pid.exists() and bool(pid.read_text())):
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid.read_text()), signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)


def wait_for(
    process: subprocess.Popen[Any],
    config: TrainConfig,
    lines: int,
    after_s: float,
    started: Callable[[], bool] = lambda: True,
) -> bool:
    """Wait until so many steps are reported, and some seconds; whether the process is still there then."""
    log, end = config.out / "metrics.jsonl", time.monotonic() + LIMIT_S
    while not started() or _lines(log) < lines:
        if process.poll() is not None or time.monotonic() > end:
            return False
        time.sleep(0.02)
    time.sleep(after_s)
    return process.poll() is None


def _lines(log: Path) -> int:
    return len(log.read_text().splitlines()) if log.exists() else 0


def flags(config: TrainConfig) -> list[str]:
    """What `longspan train` needs to be told to have this config."""
    told: list[str] = []
    defaults = values(TrainConfig())
    for field, value in values(config).items():
        name = field.replace("_", "-")
        if value == defaults[field]:
            continue
        told += [f"--{'' if value else 'no-'}{name}"] if isinstance(value, bool) else [f"--{name}", str(value)]
    return told


def result(out: Path) -> tuple[dict[int, float], dict[str, bytes]]:
    """A job's losses by step, and the files of its exported weights."""
    records = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    weights = {path.name: path.read_bytes() for path in sorted((out / "hf").glob("*.safetensors"))}
    return {record["step"]: record["loss"] for record in records}, weights


def attempt(config: TrainConfig, fault: Fault, folder: Path, whole: Any) -> Outcome:
    """Put one fault into a job, judge how it ends, and, where it can, go on and compare with `whole`."""
    again = fault.how != "restart"
    mine = replace(config, out=folder / "run", max_restarts=0 if again else 1)
    code, said = run_job(mine, fault, folder)
    outcome = Outcome(fault, _verdict(fault, code, said), said)
    if fault.kind != "mismatch" and outcome.verdict in ("named", "not named"):
        if again:
            code, _ = run_job(replace(mine, max_restarts=0), None, folder)
        outcome.recovered = code == 0 and result(mine.out) == whole
    return outcome


def _verdict(fault: Fault, code: int | None, said: str) -> str:
    if code is None:
        return "hung"
    restarted = fault.how == "restart" and "restart 1 of 1" in said
    if code == 0 and not restarted:
        return "silent" if fault.kind in ("leave", "mismatch") else "too late"
    key = next(iter(fault.how)) if fault.kind == "mismatch" else ""
    return "named" if f"rank {fault.rank}" in said and f" {key}" in said else "not named"


def campaign(seed: int, tries: dict[str, int], folder: Path, more: Callable[[], bool] = lambda: True) -> list[Outcome]:
    """So many faults of each kind, one job after the other, as long as `more` says so."""
    rng, config = random.Random(seed), base_config(folder)
    code, said = run_job(config, None, folder / "first")
    assert code == 0, said
    whole, outcomes = result(config.out), []
    for kind, number in tries.items():
        for count in range(number):
            if outcomes and not more():
                return outcomes
            fault = draw(rng, kind, config)
            outcomes.append(attempt(config, fault, folder / f"{kind}-{count}", whole))
            print(f"{outcomes[-1].verdict:9} recovered: {outcomes[-1].recovered} {fault}", flush=True)
            if outcomes[-1].verdict not in ("named", "too late") or outcomes[-1].recovered is False:
                print(outcomes[-1].said, flush=True)
    return outcomes


def table(outcomes: list[Outcome]) -> str:
    """Counts by kind of fault."""
    lines = [
        f"{'fault':10}{'tried':>7}{'named':>7}{'recovered':>11}{'too late':>10}{'hung':>6}{'silent':>8}{'unnamed':>9}"
    ]
    for kind in dict.fromkeys(outcome.fault.kind for outcome in outcomes):
        mine = [outcome for outcome in outcomes if outcome.fault.kind == kind]
        seen = Counter(outcome.verdict for outcome in mine)
        recovered = sum(outcome.recovered is True for outcome in mine)
        of = sum(outcome.recovered is not None for outcome in mine)
        counts = f"{len(mine):7}{seen['named']:7}{f'{recovered}/{of}':>11}{seen['too late']:10}{seen['hung']:6}"
        lines.append(f"{kind:10}{counts}{seen['silent']:8}{seen['not named']:9}")
    return "\n".join(lines)


def main() -> int:
    """Run the campaign, print its table; 0 if every fault was named and every job recovered."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tries", type=int, default=5, help="faults of each kind")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--job", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        return _run_job(args.job)
    print(f"seed {args.seed}")
    with tempfile.TemporaryDirectory(prefix="longspan-chaos-") as folder:
        outcomes = campaign(args.seed, dict.fromkeys(args.kinds, args.tries), Path(folder))
    print(table(outcomes))
    good = all(o.verdict in ("named", "too late") and o.recovered is not False for o in outcomes)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
