"""Checkpoints that are written while the training goes on: the state at the call, complete or absent."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard

from longspan import checkpoint
from longspan.checkpoint import DiskFull, Ranks, Saver
from longspan.core.errors import LongspanError
from tests.chaos.corruption import small_model
from tests.pool import RankPool


def _step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 24)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def _numbers(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    found = [*model.parameters(), *(x for p in model.parameters() for x in optimizer.state[p].values())]
    return [getattr(x, "full_tensor", lambda x=x: x)().detach().clone() for x in found]


def _train_on_while_it_is_written(folder: Path, background: bool, sharded: bool) -> tuple[bool, bool, list[int]]:
    """Save, and change the weights before the first byte is written.

    Returns:
        Whether `start` returned before it was written, whether the state at the call was saved, the complete steps.
    """
    model, optimizer = small_model(0)
    if sharded:
        fully_shard(model, mesh=torch.distributed.init_device_mesh("cpu", (2,)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    _step(model, optimizer)
    may_write = threading.Event()
    write = checkpoint.saving.write

    def wait(*args: Any) -> Path:
        assert not background or may_write.wait(60)
        return write(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint.saving, "write", wait)
        saver = Saver(background=background)
        expected = _numbers(model, optimizer)
        saver.start(folder, 1, model, optimizer, {"a": 1})
        returned_before = saver.written is None
        _step(model, optimizer)
        may_write.set()
        path = saver.finish()
        assert path == folder / "step-00000001" and saver.finish() is None
        other = small_model(5)
        checkpoint.load(path, *other)
        same = all(torch.equal(a, b) for a, b in zip(expected, _numbers(*other), strict=True))
        saver.start(folder, 2, model, optimizer, {}, keep=1)
        with pytest.raises(RuntimeError, match="not finished"):
            saver.start(folder, 3, model, optimizer, {})
        saver.finish()
    return returned_before, same, checkpoint.complete_steps(folder)


@pytest.mark.parametrize("background", [True, False])
def test_the_state_at_the_call_is_saved(tmp_path: Path, pool2: RankPool, background: bool) -> None:
    expected = (background, True, [2])
    assert _train_on_while_it_is_written(tmp_path / "alone", background, sharded=False) == expected
    for name, sharded in (("whole", False), ("sharded", True)):
        results = pool2.run(_train_on_while_it_is_written, tmp_path / name, background, sharded, timeout=240)
        assert [tuple(result) for result in results] == [expected] * 2


def test_without_memory_for_a_copy_it_is_written_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint.saving, "free_memory", lambda: 1000)
    saver = Saver()
    saver.start(tmp_path, 1, *small_model(0), {})
    assert saver.written == tmp_path / "step-00000001"


def _full_on_rank_1(folder: Path) -> tuple[str, str]:
    import errno

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    model, optimizer = small_model(0)
    saver = Saver()
    with pytest.MonkeyPatch.context() as patch:
        if torch.distributed.get_rank() == 1:
            patch.setattr(checkpoint.tensors.RecordedFiles, "create_stream", full)
        fully_shard(model, mesh=torch.distributed.init_device_mesh("cpu", (2,)))
        optimizer = torch.optim.AdamW(model.parameters())
        saver.start(folder, 1, model, optimizer, {})
        try:
            saver.finish()
        except DiskFull as error:
            said = str(error)
    with torch.no_grad():
        next(iter(model.parameters())).fill_(float("nan"))
    try:
        saver.start(folder, 2, model, optimizer, {})
    except LongspanError as error:
        return said, str(error)
    raise AssertionError


def test_all_ranks_raise_if_one_cannot_save(tmp_path: Path, pool2: RankPool) -> None:
    first, second = pool2.run(_full_on_rank_1, tmp_path, timeout=240)
    assert first == second
    assert "step-00000001 cannot be written: rank 1: OSError: [Errno 28] No space left on device" in first[0]
    assert "0.weight holds nan" in first[1]
    assert list(tmp_path.iterdir()) == []


def _be_killed(folder: Path, place: str) -> None:
    model, optimizer = small_model(0)
    saver = Saver()
    saver.start(folder, 1, model, optimizer, {})
    saver.finish()
    name = {"tensors": "_read_back", "marker": "put_in_place", "name": "prune"}[place]
    setattr(checkpoint.saving, name, _die)
    saver.start(folder, 2, model, optimizer, {}, keep=1)
    time.sleep(60)


def _die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.launcher
@pytest.mark.parametrize(("place", "newest"), [("tensors", 1), ("marker", 1), ("name", 2)])
def test_a_killed_save_leaves_the_earlier_checkpoints(tmp_path: Path, place: str, newest: int) -> None:
    process = multiprocessing.get_context("forkserver").Process(target=_be_killed, args=(tmp_path, place))
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    found, passed_over = checkpoint.newest_undamaged(tmp_path, Ranks())
    assert found is not None and (found.step, passed_over) == (newest, [])
    checkpoint.save(tmp_path, 3, *small_model(0), {}, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]
