"""Seeded full disks under a real job (root and Linux: the disk is a small tmpfs).

At a random moment a file fills the disk under output_dir but for a random rest. The job must end with code 0 and the
expected result, or with code 2 and a reason. The same command, with room, must come to the same result.
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

from longspan.checkpoint import newest_undamaged
from longspan.core.errors import LongspanError
from tests.chaos.counts import Budget, Counts, Outcome
from tests.chaos.ranks import LIMIT_S, ROOT, base_config, environment, result, wait_for
from tests.train.training import Job

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


def draw(rng: random.Random, config: Job) -> Full:
    """Return a random full disk."""
    left = rng.choice([0, rng.randrange(MOST_LEFT_BYTES), rng.randrange(MOST_LEFT_BYTES)])
    return Full(rng.randrange(config.max_steps), rng.uniform(0, 0.5), left)


def small_config(folder: Path) -> Job:
    """Return a job of two ranks that saves often."""
    return base_config(folder, ring=1, max_steps=30, save_steps=5)


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


def run_job(config: Job, full: Full | None, filler: Path) -> tuple[int | None, str]:
    """Run a job whose disk becomes full; return its exit code (None if it hung) and output."""
    command = [sys.executable, "-m", "longspan", "train", *config.argv]
    with tempfile.NamedTemporaryFile("w+") as output:
        process = subprocess.Popen(command, env=environment(), cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
        code = None
        try:
            if full is not None and wait_for(process, Path(output.name), full.lines, full.after_s):
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


def attempt(config: Job, full: Full, disk: Path, expected: Any) -> Outcome:
    """Fill the disk once, judge how the job ends, make room, continue, and compare with the expected result."""
    mine, filler = config.but(output_dir=str(disk / "run")), disk / "filler"
    code, output = run_job(mine, full, filler)
    outcome = Outcome(full, verdict(code, output, mine, expected), output)
    filler.unlink(missing_ok=True)
    if outcome.verdict not in ("hung", "survived"):
        code, output = run_job(mine, None, filler)
        outcome.recovered = code == 0 and result(mine.out) == expected
        outcome.output += "" if outcome.recovered else f"\nwith room, code {code}: {output}"
    shutil.rmtree(mine.out, ignore_errors=True)
    return outcome


def verdict(code: int | None, output: str, config: Job, expected: Any) -> str:
    """Judge a job by its exit code, its output and its files."""
    if code is None:
        return "hung"
    if "Traceback (most recent call last)" in output:
        return "traceback"
    if damage := _damage(config.out):
        print(damage, flush=True)
        return "wrong"
    if code == 0:
        return "survived" if result(config.out) == expected else "silent"
    last = output.strip().splitlines()[-1]
    clear = code == 2 and re.search(r"make room|[\d,]+ bytes|No space left on device|disk is full", last)
    return "refused" if clear else "wrong"


def _damage(out: Path) -> str:
    """Say why no checkpoint can be used, if there are any; "" if one can."""
    try:
        newest_undamaged(out)
    except LongspanError as error:
        return str(error)
    return ""


def run(budget: Budget, counts: Counts) -> None:
    """Fill disks; skipped if none can be mounted."""
    rng, config = random.Random(budget.seed), small_config(budget.folder)
    try:
        with small_disk(budget.folder) as disk:
            mine = config.but(output_dir=str(disk / "faultless"))
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
