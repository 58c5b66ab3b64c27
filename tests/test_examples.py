"""The examples run as they say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pool import THREADS
from tests.tolerance import last_place

ROOT = Path(__file__).parents[1]


@pytest.mark.launcher
def test_the_loop_of_ones_own_runs_and_does_not_depend_on_the_ranks() -> None:
    runs, losses = [], []
    for ranks in (1, 2):
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        flags = ["--context", "201", "--steps", "2", "--ulysses", str(ranks)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": THREADS}
        command = [*torchrun, str(ROOT / "examples" / "finetune.py"), *flags]
        pipe = subprocess.PIPE
        runs.append(subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment))
    for run in runs:
        stdout, stderr = run.communicate(timeout=240)
        assert run.returncode == 0, stderr
        losses.append(re.findall(r"loss ([\d.]+)", stdout))
    assert len(losses[0]) == len(losses[1]) == 2
    for one, two in zip(*losses, strict=True):
        assert abs(float(one) - float(two)) < 1.5 * last_place(one), losses  # the same, or the next decimal


@pytest.mark.launcher
@pytest.mark.parametrize("example", ["trainer", "sft"])
def test_the_trainers_run_as_they_say(example: str, tmp_path: Path) -> None:
    if example == "sft":
        pytest.importorskip("trl")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    flags = ["--context", "201", "--steps", "2", "--ulysses", "2", "--out", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": THREADS}
    command = [*torchrun, str(ROOT / "examples" / f"{example}.py"), *flags]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"'loss': '?[\d.]+", done.stdout)) == 2, done.stdout
    assert (tmp_path / "model.safetensors").is_file()
