"""Random damage to a real checkpoint: every one has to be refused by a message that names a file.

python -m tests.chaos.corruption --count 500 --seed 0
"""

from __future__ import annotations

import argparse
import collections
import os
import random
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from longspan import checkpoint
from longspan.core.errors import LongspanError

PAGE = 4096


@dataclass
class Counts:
    """What became of the attempts. `refused` by kind of damage; of the others what they were, to be tried again."""

    tried: int = 0
    refused: collections.Counter[str] = field(default_factory=collections.Counter)
    silent: list[str] = field(default_factory=list)
    tracebacks: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"tried {self.tried}, refused {self.refused.total()}, silent {len(self.silent)}"]
        lines += [f"  {kind}: {count} refused" for kind, count in sorted(self.refused.items())]
        lines += [f"  SILENT: {what}" for what in self.silent]
        lines += [f"  TRACEBACK: {what}" for what in self.tracebacks]
        return "\n".join(lines)


def small_model(seed: int, width: int = 24) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model with a step behind it, so that the optimizer has a state."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Linear(width, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, width)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def run(count: int, seed: int, folder: Path) -> Counts:
    """Damage copies of a checkpoint `count` times, and try to load each."""
    counts = Counts()
    for step in (1, 2):
        checkpoint.save(
            folder / "whole", step, *small_model(step), {"data": {"token": 17 * step}, "tokens": 1000 * step}
        )
    model, optimizer = small_model(3)
    target = folder / "damaged" / "step-00000002"
    for number in range(count):
        rng = random.Random(f"{seed} {number}")
        shutil.rmtree(target.parent, ignore_errors=True)
        shutil.copytree(folder / "whole", target.parent)
        kind = rng.choice(sorted(KINDS))
        what = f"--seed {seed}, number {number}: {kind}: {KINDS[kind](target, rng)}"
        counts.tried += 1
        try:
            found = checkpoint.latest(target.parent)
            assert found is not None
            checkpoint.load(found, model, optimizer)
        except LongspanError as error:
            names = any(path.name in str(error) for path in (folder / "whole" / "step-00000002").iterdir())
            offers = f"--resume {target.with_name('step-00000001')}" in str(error)
            if names and offers:
                counts.refused[kind] += 1
            else:
                counts.silent.append(f"{what}: the error names no file, or no way out: {error}")
        except Exception:
            counts.tracebacks.append(f"{what}\n{traceback.format_exc()}")
        else:
            counts.silent.append(what)
    return counts


# --- kinds of damage: each changes one file for certain, and says how


def _file(target: Path, rng: random.Random) -> Path:
    return rng.choice(sorted(path for path in target.iterdir() if path.stat().st_size))


def _flip(target: Path, rng: random.Random) -> str:
    path = _file(target, rng)
    data = bytearray(path.read_bytes())
    places = rng.sample(range(8 * len(data)), rng.choice([1, 1, 1, 2, 8]))
    for place in places:
        data[place // 8] ^= 1 << place % 8
    path.write_bytes(data)
    return f"{path.name}, bits {places}"


def _zero_page(target: Path, rng: random.Random) -> str:
    path = _file(target, rng)
    data = bytearray(path.read_bytes())
    begin = rng.randrange(0, len(data), PAGE)
    end = min(begin + PAGE, len(data))
    if not any(data[begin:end]):
        data[begin] = 1  # it was zero: a page of something else
    else:
        data[begin:end] = bytes(end - begin)
    path.write_bytes(data)
    return f"{path.name}, bytes {begin} to {end}"


def _truncate(target: Path, rng: random.Random) -> str:
    path = _file(target, rng)
    size = rng.randrange(path.stat().st_size)
    os.truncate(path, size)
    return f"{path.name} to {size} bytes"


def _append(target: Path, rng: random.Random) -> str:
    path = _file(target, rng)
    with path.open("ab") as file:
        file.write(rng.randbytes(rng.randint(1, 100)))
    return path.name


def _overwrite(target: Path, rng: random.Random) -> str:
    path = _file(target, rng)
    path.write_bytes(rng.randbytes(path.stat().st_size))
    return path.name


def _swap_blocks(target: Path, rng: random.Random) -> str:
    """As many bytes, all of them right, in the wrong order."""
    path = _file(target, rng)
    data = path.read_bytes()
    for _ in range(100):
        size = rng.randint(1, min(512, len(data) // 2))
        begin = rng.randrange(len(data) - 2 * size + 1)
        other = (
            data[:begin] + data[begin + size : begin + 2 * size] + data[begin : begin + size] + data[begin + 2 * size :]
        )
        if other != data:
            path.write_bytes(other)
            return f"{path.name}, {size} bytes at {begin} with the next"
    raise AssertionError(f"{path} is all alike")


def _older(target: Path, rng: random.Random) -> str:
    """A file of the step before, of the same name, which is sound in itself."""
    older = target.with_name("step-00000001")
    changed = [p for p in sorted(target.iterdir()) if p.read_bytes() != (older / p.name).read_bytes()]
    path = rng.choice(changed)
    shutil.copy(older / path.name, path)
    return path.name


def _remove(target: Path, rng: random.Random) -> str:
    path = rng.choice(sorted(p for p in target.iterdir() if p.name != checkpoint.MARKER))
    path.unlink()
    return path.name


KINDS: dict[str, Callable[[Path, random.Random], str]] = {
    "flipped bits": _flip,
    "zeroed page": _zero_page,
    "truncated": _truncate,
    "appended": _append,
    "overwritten": _overwrite,
    "blocks swapped": _swap_blocks,
    "file of an older step": _older,
    "file removed": _remove,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        counts = run(args.count, args.seed, Path(folder))
    print(f"corruption --seed {args.seed}\n{counts}")
    return int(bool(counts.silent or counts.tracebacks))


if __name__ == "__main__":
    sys.exit(main())
