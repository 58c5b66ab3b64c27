"""Random damage to a real checkpoint: it is passed over, and loading it names the file."""

from __future__ import annotations

import os
import random
import shutil
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

from longspan import checkpoint
from longspan.core.errors import LongspanError
from tests.chaos.counts import Budget, Counts

PAGE = 4096


def small_model(seed: int, width: int = 24) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return a model and an optimizer after a step, so that the optimizer has a state."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Linear(width, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, width)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def run(budget: Budget, counts: Counts) -> None:
    """Damage checkpoints in this process."""
    for seed in budget.seeds(10):
        damage_and_load(50, seed, budget.folder / f"{seed}", counts)


def damage_and_load(count: int, seed: int, folder: Path, counts: Counts) -> None:
    """Damage copies of a checkpoint `count` times, and load each."""
    folder.mkdir(exist_ok=True)
    for step in (1, 2):
        state = {"data": {"token": 17 * step}, "tokens": 1000 * step}
        checkpoint.save(folder / "intact", step, *small_model(step), state)
    model, optimizer = small_model(3)
    target = folder / "damaged" / "checkpoint-2"
    for number in range(count):
        rng = random.Random(f"{seed} {number}")
        shutil.rmtree(target.parent, ignore_errors=True)
        shutil.copytree(folder / "intact", target.parent)
        kind = rng.choice(sorted(KINDS))
        what = f"seed {seed}, number {number}: {kind}: {KINDS[kind](target, rng)}"
        try:
            found, problems = checkpoint.newest_undamaged(target.parent)
            checkpoint.load(target, model, optimizer)
        except LongspanError as error:
            names = any(path.name in str(error) for path in _files(folder / "intact" / "checkpoint-2"))
            passes = found is not None and found.step == 1 and len(problems) == 1
            counts.add("refused" if names and passes else "wrong", f"{what}: {error}")
        except Exception:
            counts.add("traceback", f"{what}\n{traceback.format_exc()}")
        else:
            counts.add("silent", what)


# --- kinds of damage: each changes one file, and returns a description


def _files(target: Path) -> list[Path]:
    return sorted(path for path in target.rglob("*") if path.is_file())


def _file(target: Path, rng: random.Random) -> Path:
    return rng.choice([path for path in _files(target) if path.stat().st_size])


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
        data[begin] = 1  # the page was zero
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
    """Swap two correct blocks."""
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
    raise AssertionError(f"all bytes of {path} are equal")


def _older(target: Path, rng: random.Random) -> str:
    """Replace a file by the intact one of the previous step."""
    older = target.with_name("checkpoint-1")
    before = {path: older / path.relative_to(target) for path in _files(target)}
    path = rng.choice([path for path in before if path.read_bytes() != before[path].read_bytes()])
    shutil.copy(before[path], path)
    return path.name


def _remove(target: Path, rng: random.Random) -> str:
    path = rng.choice([p for p in _files(target) if p.name != checkpoint.MARKER])
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
