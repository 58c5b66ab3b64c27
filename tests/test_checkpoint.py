"""Checkpoints are complete or not there, and what is damaged is named. (Resuming is tested in test_train.)"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from longspan import checkpoint
from longspan.checkpoint import MARKER, Checkpoint
from longspan.errors import LongspanError
from tests.pool import RankError, RankPool


def _model(width: int = 3, seed: int = 0) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Linear(width, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, width)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def _save(folder: Path, step: int, keep: int = 0) -> None:
    checkpoint.save(folder, step, *_model(seed=step), {"step times two": 2 * step}, keep=keep)


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    _save(tmp_path, 5)
    found = checkpoint.latest(tmp_path)
    assert found is not None and (found.step, found.state) == (5, {"step times two": 10})
    model, optimizer = _model(seed=1)
    checkpoint.load(found, model, optimizer)
    expected_model, expected_optimizer = _model(seed=5)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected_model.parameters(), strict=True))
    for a, b in zip(model.parameters(), expected_model.parameters(), strict=True):
        for name, value in expected_optimizer.state[b].items():
            assert torch.equal(optimizer.state[a][name], value)


def test_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        _save(tmp_path, step, keep=2)
    assert checkpoint.complete_steps(tmp_path) == [3, 4]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000004"]


def test_checkpoints_of_an_abandoned_future_are_removed(tmp_path: Path) -> None:
    for step in (1, 2, 3, 2):
        _save(tmp_path, step)
    assert checkpoint.complete_steps(tmp_path) == [1, 2]


def test_what_a_killed_save_left_is_no_checkpoint(tmp_path: Path) -> None:
    _save(tmp_path, 1)
    shutil.copytree(tmp_path / "step-00000001", tmp_path / "making-00000002")
    shutil.copytree(tmp_path / "step-00000001", tmp_path / "step-00000003")
    (tmp_path / "step-00000003" / MARKER).unlink()
    assert checkpoint.complete_steps(tmp_path) == [1]
    found = checkpoint.latest(tmp_path)
    assert found is not None and found.step == 1
    with pytest.raises(
        LongspanError, match=r"step-00000003 is not complete: it has no complete\.json; resume from an older"
    ):
        Checkpoint.at(tmp_path / "step-00000003")
    _save(tmp_path, 2)
    assert not (tmp_path / "making-00000002").exists()


def test_no_checkpoint_is_none(tmp_path: Path) -> None:
    assert checkpoint.latest(tmp_path / "nothing") is None
    with pytest.raises(
        LongspanError, match=r"does not exist; there is no other one beside it; start again with another"
    ):
        Checkpoint.at(tmp_path / "step-00000001")


def test_damage_is_named_with_the_way_out(tmp_path: Path) -> None:
    _save(tmp_path, 1)
    _save(tmp_path, 2)
    newest = tmp_path / "step-00000002"
    way_out = r"; resume from an older one: --resume .*step-00000001$"
    data = newest / "__0_0.distcp"
    whole = data.read_bytes()
    data.write_bytes(whole[:100])
    with pytest.raises(LongspanError, match=rf"__0_0\.distcp has 100 bytes instead of {len(whole)}{way_out}"):
        checkpoint.latest(tmp_path)
    data.unlink()
    with pytest.raises(LongspanError, match=rf"__0_0\.distcp is missing{way_out}"):
        checkpoint.latest(tmp_path)
    data.write_bytes(whole)
    (newest / MARKER).write_text("{")
    with pytest.raises(LongspanError, match=rf"complete\.json cannot be read: .*{way_out}"):
        checkpoint.latest(tmp_path)
    (newest / MARKER).write_text(json.dumps({"step": 2}))
    with pytest.raises(LongspanError, match=rf"complete\.json cannot be read: 'state'{way_out}"):
        checkpoint.latest(tmp_path)


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_overwritten_content_is_noticed_when_it_is_read(tmp_path: Path, name: str) -> None:
    _save(tmp_path, 1)
    _save(tmp_path, 2)
    file = tmp_path / "step-00000002" / name
    file.write_bytes(os.urandom(file.stat().st_size))
    found = checkpoint.latest(tmp_path)
    assert found is not None
    with pytest.raises(LongspanError, match=r"step-00000002 cannot be read: .*; resume from an older one: .*00000001"):
        checkpoint.load(found, *_model())


def test_the_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    _save(tmp_path, 1)
    found = checkpoint.latest(tmp_path)
    assert found is not None
    with pytest.raises(
        LongspanError, match=r"another model: 0\.weight has the shape \(4, 4\), there it has .*\(3, 3\)"
    ):
        checkpoint.load(found, *_model(width=4))
    model = torch.nn.Sequential(*_model()[0], torch.nn.Linear(1, 1))
    with pytest.raises(LongspanError, match=r"another model: 2\.weight .*it has none of this name"):
        checkpoint.load(found, model, torch.optim.AdamW(model.parameters()))


def _save_where_rank_1_cannot(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if torch.distributed.get_rank() == 1:
            patch.setattr("torch.distributed.checkpoint.FileSystemWriter.write_data", _no_space)
        _save(folder, 7)


def _no_space(*_: object) -> None:
    raise OSError(28, "No space left on device")


def test_a_rank_that_cannot_write_makes_all_say_so(tmp_path: Path, pool2: RankPool) -> None:
    with pytest.raises(RankError) as caught:
        pool2.run(_save_where_rank_1_cannot, tmp_path, timeout=240)
    messages = {failure.message for failure in caught.value.failures.values()}
    assert len(caught.value.failures) == 2
    assert all("step-00000007 cannot be written: rank 1: OSError: [Errno 28]" in message for message in messages)
    assert checkpoint.complete_steps(tmp_path) == []
