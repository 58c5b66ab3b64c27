"""A disk that becomes full while a job runs: a seeded, bounded campaign.

    python -m tests.chaos.disks --seed 1 --tries 5          # as root, on Linux: the disk is a small tmpfs

At a random moment a file takes all of the disk under --out but for a random rest. The job has to go on or to end by the
rule in docs/how-to/train.md ("A full disk"): code 0 with the right bits, or code 2 with a message that says how many
bytes are missing. Its checkpoints have to be whole, nothing partial may be left, and the same command, once there is
room, has to come to the same bits.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from longspan import checkpoint
from longspan.checkpoint.folder import MAKING
from longspan.core.errors import LongspanError
from longspan.core.sections import replace
from longspan.train import TrainConfig
from tests.chaos.counts import run_part
from tests.chaos.ranks import LIMIT_S, ROOT, base_config, environment, flags, result, wait_for

DISK_BYTES = 16 << 20
PREFIX = "longspan-disk-"
#: A checkpoint of the job takes about half of this, its export an eighth.
MOST_LEFT_BYTES = 1 << 20


class CannotMount(RuntimeError):
    """There can be no small disk here; the message says why."""


@dataclasses.dataclass(frozen=True)
class Full:
    """The disk has `left` bytes from `after_s` seconds after `lines` reported steps on."""

    lines: int
    after_s: float
    left: int


@dataclasses.dataclass
class Outcome:
    """What became of one full disk.

    `verdict`: "refused" (code 2, with the bytes or the place), "survived" (code 0, right bits, warned or not touched),
    "silent" (code 0, but other bits, or lines missing without a word), "damaged" (a checkpoint is not whole, or
    something partial is left), "unclear" (another end), "traceback", "hung". `recovered`: whether the job came to the
    same bits with room.
    """

    full: Full
    verdict: str
    said: str
    recovered: bool | None = None


def draw(rng: random.Random, config: TrainConfig) -> Full:
    """A random full disk."""
    left = rng.choice([0, rng.randrange(MOST_LEFT_BYTES), rng.randrange(MOST_LEFT_BYTES)])
    return Full(rng.randrange(config.steps), rng.uniform(0, 0.5), left)


def small_config(folder: Path) -> TrainConfig:
    """The job: two ranks that save often."""
    return base_config(folder, ring=1, steps=30, save_every=5)


@contextlib.contextmanager
def small_disk(folder: Path, size: int = DISK_BYTES) -> Iterator[Path]:
    """A file system of its own in a new folder under `folder`, unmounted and removed at the end.

    Raises:
        CannotMount: where this user or system cannot.
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
    """What a killed process has left."""
    for path, pid in re.findall(rf" (/\S*/{PREFIX}(\d+)) ", Path("/proc/self/mounts").read_text()):
        if not Path(f"/proc/{pid}").exists():
            _unmount(Path(path))
            with contextlib.suppress(OSError):
                Path(path).rmdir()


def run_job(config: TrainConfig, full: Full | None, filler: Path) -> tuple[int | None, str]:
    """Run a job whose disk becomes full; its exit code (None if it hung) and all it said."""
    command = [sys.executable, "-m", "longspan", "train", *flags(config)]
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(command, env=environment(), cwd=ROOT, stdout=said, stderr=subprocess.STDOUT)
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
        said.seek(0)
        return code, said.read()


def fill(filler: Path, left: int) -> None:
    """Leave so many bytes of the disk, or a page less."""
    with filler.open("ab", buffering=0) as file:
        while (more := shutil.disk_usage(filler.parent).free - left) > 0:
            try:
                file.write(bytes(min(more, 1 << 20)))
            except OSError:
                return


def attempt(config: TrainConfig, full: Full, disk: Path, whole: Any) -> Outcome:
    """Let the disk run full once, judge how the job ends, make room, go on, and compare with `whole`."""
    mine, filler = replace(config, out=disk / "run"), disk / "filler"
    code, said = run_job(mine, full, filler)
    outcome = Outcome(full, verdict(code, said, mine, whole), said)
    filler.unlink(missing_ok=True)
    if outcome.verdict not in ("hung", "survived"):
        code, said = run_job(mine, None, filler)
        outcome.recovered = code == 0 and _same(mine.out, whole, say_missing=True)
        outcome.said += "" if outcome.recovered else f"\nwith room, code {code}: {said}"
    shutil.rmtree(mine.out, ignore_errors=True)
    return outcome


def verdict(code: int | None, said: str, config: TrainConfig, whole: Any) -> str:
    """Judge a job by its exit code, its words, and what is in its folder."""
    if code is None:
        return "hung"
    if "Traceback (most recent call last)" in said:
        return "traceback"
    if damage := _damage(config.out):
        print(damage, flush=True)
        return "damaged"
    if code == 0:
        return "survived" if _same(config.out, whole, say_missing="steps are missing" in said) else "silent"
    last = said.strip().splitlines()[-1]
    clear = code == 2 and re.search(r"make room|[\d,]+ bytes|No space left on device|disk is full", last)
    return "refused" if clear else "unclear"


def _damage(out: Path) -> str:
    """A checkpoint that is not whole, or what is left of one that was begun."""
    folder = out / "checkpoints"
    if not folder.exists():
        return ""
    partial = [path.name for path in folder.iterdir() if not re.fullmatch(r"step-\d+", path.name)]
    partial += [path.name for path in out.iterdir() if path.name.startswith((".shared", MAKING))]
    try:
        _, passed_over = checkpoint.choose(folder, checkpoint.Ranks())
    except LongspanError as error:
        return str(error)
    return f"left: {partial}, passed over: {passed_over}" if partial or passed_over else ""


def _same(out: Path, whole: Any, *, say_missing: bool) -> bool:
    """Whether losses and weights are those of `whole`; `say_missing`: lines of metrics may be left out, never other."""
    losses, weights = result(out)
    expected, expected_weights = whole
    fewer = losses.items() <= expected.items() if say_missing else losses == expected
    return fewer and weights == expected_weights


def campaign(seed: int, tries: int, folder: Path, more: Callable[[], bool] = lambda: True) -> list[Outcome]:
    """So many full disks, one job after the other, as long as `more` says so.

    Raises:
        CannotMount: where there can be no small disk.
    """
    rng, config = random.Random(seed), small_config(folder)
    outcomes: list[Outcome] = []
    with small_disk(folder) as disk:
        mine = replace(config, out=disk / "whole")
        code, said = run_job(mine, None, disk / "filler")
        assert code == 0, said
        whole = result(mine.out)
        shutil.rmtree(mine.out)
        for _ in range(tries):
            if outcomes and not more():
                break
            outcomes.append(attempt(config, draw(rng, config), disk, whole))
            last = outcomes[-1]
            print(f"{last.verdict:9} recovered: {last.recovered} {last.full}", flush=True)
            if not good(last):
                print(last.said, flush=True)
    return outcomes


def good(outcome: Outcome) -> bool:
    """Whether it ended as it should."""
    return outcome.verdict in ("refused", "survived") and outcome.recovered is not False


def main() -> int:
    """Run the campaign, print its counts; 0 if every full disk was survived, or refused and recovered from."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tries", type=int, default=8)
    args = parser.parse_args()
    return run_part(args.seed, lambda folder: campaign(args.seed, args.tries, folder), good, CannotMount)


if __name__ == "__main__":
    sys.exit(main())
