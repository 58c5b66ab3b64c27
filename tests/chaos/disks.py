"""Seeded full disks under a real job (root and Linux: the disk is a small tmpfs).

At a random moment a file fills the disk under --out but for a random rest. The job must continue or end as
docs/how-to/train.md says ("A full disk"): code 0 with the expected result, or code 2 with the missing bytes. Its
checkpoints must be complete, no partial file may be left, and the same command, with room, must come to the same
result.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from longspan import checkpoint
from longspan.checkpoint.folder import MAKING
from longspan.core.errors import LongspanError
from longspan.core.sections import replace
from longspan.train import TrainConfig
from tests.chaos.counts import Budget, Counts, Outcome
from tests.chaos.ranks import LIMIT_S, ROOT, base_config, environment, flags, result, wait_for

DISK_BYTES = 16 << 20
PREFIX = "longspan-disk-"
#: A checkpoint of the job takes about half of this, its export an eighth.
MOST_LEFT_BYTES = 1 << 20


class CannotMount(RuntimeError):
    """A small disk cannot be mounted; the message has the reason."""


@dataclasses.dataclass(frozen=True)
class Full:
    """The disk has `left` bytes from `after_s` seconds after `lines` reported steps on."""

    lines: int
    after_s: float
    left: int


def draw(rng: random.Random, config: TrainConfig) -> Full:
    """Return a random full disk."""
    left = rng.choice([0, rng.randrange(MOST_LEFT_BYTES), rng.randrange(MOST_LEFT_BYTES)])
    return Full(rng.randrange(config.steps), rng.uniform(0, 0.5), left)


def small_config(folder: Path) -> TrainConfig:
    """Return a job of two ranks that saves often."""
    return base_config(folder, ring=1, steps=30, save_every=5)


@contextlib.contextmanager
def small_disk(folder: Path, size: int = DISK_BYTES) -> Iterator[Path]:
    """Mount a file system in a new folder under `folder`; unmount and remove it at the end.

    Raises:
        CannotMount: if this user or system cannot.
    """
    if not sys.platform.startswith("linux") or shutil.which("mount") is None or os.geteuid() != 0:
        raise CannotMount(f"a small disk needs Linux, mount and root; this is user {os.geteuid()} on {sys.platform}")
    _unmount_stale()
    path = folder / f"{PREFIX}{os.getpid()}"
    path.mkdir()
    try:
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)], capture_output=True, text=True
        )
        if done.returncode:
            raise CannotMount(f"a small disk cannot be mounted: {done.stderr.strip()}")
        try:
            yield path
        finally:
            _unmount(path)
    finally:
        path.rmdir()


def _unmount(path: Path) -> None:
    if subprocess.run(["umount", str(path)], capture_output=True).returncode:
        subprocess.run(["umount", "--lazy", str(path)], check=True)  # a process that is ending has a file open there


def _unmount_stale() -> None:
    """Unmount what killed processes have left."""
    for path, pid in re.findall(rf" (/\S*/{PREFIX}(\d+)) ", Path("/proc/self/mounts").read_text()):
        if not Path(f"/proc/{pid}").exists():
            _unmount(Path(path))
            with contextlib.suppress(OSError):
                Path(path).rmdir()


def run_job(config: TrainConfig, full: Full | None, filler: Path) -> tuple[int | None, str]:
    """Run a job whose disk becomes full; return its exit code (None if it hung) and output."""
    command = [sys.executable, "-m", "longspan", "train", *flags(config)]
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, env=environment(), cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
        code = None
        try:
            if full is not None and wait_for(process, config, full.lines, full.after_s):
                fill(filler, full.left)
            code = process.wait(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            pass
        finally:
            process.kill()
            process.wait()
        output.seek(0)
        return code, output.read()


def fill(filler: Path, left: int) -> None:
    """Leave `left` bytes of the disk, or a page less."""
    with filler.open("ab", buffering=0) as file:
        while (more := shutil.disk_usage(filler.parent).free - left) > 0:
            try:
                file.write(bytes(min(more, 1 << 20)))
            except OSError:
                return


def attempt(config: TrainConfig, full: Full, disk: Path, expected: Any) -> Outcome:
    """Fill the disk once, judge how the job ends, make room, continue, and compare with the expected result."""
    mine, filler = replace(config, out=disk / "run"), disk / "filler"
    code, output = run_job(mine, full, filler)
    outcome = Outcome(full, verdict(code, output, mine, expected), output)
    filler.unlink(missing_ok=True)
    if outcome.verdict not in ("hung", "survived"):
        code, output = run_job(mine, None, filler)
        outcome.recovered = code == 0 and _same(mine.out, expected, allow_missing=True)
        outcome.output += "" if outcome.recovered else f"\nwith room, code {code}: {output}"
    shutil.rmtree(mine.out, ignore_errors=True)
    return outcome


def verdict(code: int | None, output: str, config: TrainConfig, expected: Any) -> str:
    """Judge a job by its exit code, its output and its files."""
    if code is None:
        return "hung"
    if "Traceback (most recent call last)" in output:
        return "traceback"
    if damage := _damage(config.out):
        print(damage, flush=True)
        return "wrong"
    if code == 0:
        return "survived" if _same(config.out, expected, allow_missing="steps are missing" in output) else "silent"
    last = output.strip().splitlines()[-1]
    clear = code == 2 and re.search(r"make room|[\d,]+ bytes|No space left on device|disk is full", last)
    return "refused" if clear else "wrong"


def _damage(out: Path) -> str:
    """Describe an incomplete checkpoint, or files of one that was begun; "" if there are none."""
    folder = out / "checkpoints"
    if not folder.exists():
        return ""
    partial = [path.name for path in folder.iterdir() if not re.fullmatch(r"step-\d+", path.name)]
    partial += [path.name for path in out.iterdir() if path.name.startswith((".shared", MAKING))]
    try:
        _, passed_over = checkpoint.newest_undamaged(folder, checkpoint.Ranks())
    except LongspanError as error:
        return str(error)
    return f"left: {partial}, passed over: {passed_over}" if partial or passed_over else ""


def _same(out: Path, expected: Any, *, allow_missing: bool) -> bool:
    """Return whether losses and weights are the expected ones; lines of metrics may be missing if allowed."""
    losses, weights = result(out)
    fewer = losses.items() <= expected[0].items() if allow_missing else losses == expected[0]
    return fewer and weights == expected[1]


def run(budget: Budget, counts: Counts) -> None:
    """Fill disks; skipped if none can be mounted."""
    rng, config = random.Random(budget.seed), small_config(budget.folder)
    try:
        with small_disk(budget.folder) as disk:
            mine = replace(config, out=disk / "faultless")
            code, output = run_job(mine, None, disk / "filler")
            assert code == 0, output
            expected = result(mine.out)
            shutil.rmtree(mine.out)
            for _ in range(budget.times(8)):
                if counts["tried"] and not budget.more():
                    return
                counts.add_job(budget.seed, attempt(config, draw(rng, config), disk, expected))
    except CannotMount as error:
        counts.add("skipped", str(error))
