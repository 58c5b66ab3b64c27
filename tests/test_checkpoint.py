"""A checkpoint is complete or absent, and damage is detected and named. (test_checkpoint_resume resumes runs.)"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from longspan import checkpoint
from longspan.checkpoint import MARKER, Ranks
from longspan.checkpoint.damage import _parse, format_marker
from longspan.checkpoint.folder import FileRecord
from longspan.core.errors import LongspanError
from tests.chaos import corruption
from tests.chaos.counts import Counts
from tests.pool import RankError, RankPool


def _model(width: int = 3, seed: int = 0) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    return corruption.small_model(seed, width)


def _save(folder: Path, step: int, keep: int = 0) -> None:
    checkpoint.save(folder, step, *_model(seed=step), {"step times two": 2 * step}, keep=keep)


def test_a_saved_checkpoint_loads(tmp_path: Path) -> None:
    _save(tmp_path, 5)
    found = checkpoint.newest_verified(tmp_path)
    assert (found.step, found.state) == (5, {"step times two": 10})
    expected_model, expected_optimizer = _model(seed=5)
    expected = list(expected_model.parameters())
    model, optimizer = _model(seed=1)
    checkpoint.load(found, model, optimizer)
    for a, b in zip(model.parameters(), expected, strict=True):
        assert torch.equal(a, b)
        for name, value in expected_optimizer.state[b].items():
            assert torch.equal(optimizer.state[a][name], value)
    for dtype in (torch.float32, torch.bfloat16):
        model = _model(seed=1)[0].to(dtype)
        checkpoint.load_weights(found, model)
        assert all(torch.equal(a, b.to(dtype)) for a, b in zip(model.parameters(), expected, strict=True))


def test_the_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    _save(tmp_path, 5)
    found = checkpoint.newest_verified(tmp_path)
    small = _model()[0]
    for model, said in (
        (_model(width=4)[0], r"another model: 0\.weight has the shape \(4, 4\), there it has .*\(3, 3\)"),
        (torch.nn.Sequential(*small, torch.nn.Linear(1, 1)), r"another model: 2\.weight .*it has none of this name"),
        (torch.nn.Sequential(small[0]), r"this model lacks \d+ of its tensors, 1\.bias of the shape \(1,\)"),  # type: ignore[index]
    ):
        with pytest.raises(LongspanError, match=said):
            checkpoint.load_weights(found, model)
        with pytest.raises(LongspanError, match=said):
            checkpoint.load(found, model, torch.optim.AdamW(model.parameters()))


def test_a_state_that_is_not_json_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LongspanError, match=r"saved as JSON, and this one is not: .*PosixPath"):
        checkpoint.save(tmp_path, 1, *_model(), {"path": tmp_path})
    assert list(tmp_path.iterdir()) == []


def test_old_checkpoints_and_those_of_later_steps_are_removed(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        _save(tmp_path, step, keep=2)
    assert checkpoint.complete_steps(tmp_path) == [3, 4]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000004"]
    _save(tmp_path, 3)  # the run went back
    assert checkpoint.complete_steps(tmp_path) == [3]


def test_a_killed_save_leaves_no_checkpoint(tmp_path: Path) -> None:
    _save(tmp_path, 1)
    shutil.copytree(tmp_path / "step-00000001", tmp_path / "making-00000002")
    shutil.copytree(tmp_path / "step-00000001", tmp_path / "step-00000003")
    (tmp_path / "step-00000003" / MARKER).unlink()
    assert checkpoint.complete_steps(tmp_path) == [1]
    with pytest.raises(
        LongspanError, match=r"step-00000003 is not complete: it has no complete\.json; resume from the newest"
    ):
        checkpoint.read_verified(tmp_path / "step-00000003")
    chosen, passed_over = checkpoint.newest_undamaged(tmp_path, Ranks())
    assert chosen is not None and chosen.step == 1 and chosen.verified
    assert len(passed_over) == 1 and "step-00000003 has no complete.json" in passed_over[0]
    _save(tmp_path, 2)
    assert not (tmp_path / "making-00000002").exists()


def test_random_damage_is_detected_and_named(tmp_path: Path) -> None:
    """`python -m tests.chaos --only corruption` damages more."""
    counts = Counts("corruption")
    corruption.damage_and_load(16, 1, tmp_path, counts)
    assert counts["refused"] == counts["tried"] == 16, counts.notes


def test_a_changed_marker_is_damaged(tmp_path: Path) -> None:
    _save(tmp_path, 2)
    marker = tmp_path / "step-00000002" / MARKER
    text = marker.read_text()
    for changed in (
        text.replace('"step": 2', '"step": 3'),
        text.replace('"format"', '"fnrmat"'),  # a bit of the key, which makes it no marker of another version
        text.replace('"format": 2', '"format": 3'),
        text.replace('two": 4', 'two": 5'),
        text + " ",
    ):
        assert changed != text
        marker.write_text(changed)
        with pytest.raises(LongspanError, match=r"complete\.json is damaged: .*text does not match its checksum"):
            checkpoint.newest_verified(tmp_path)
    marker.write_text(json.dumps({"step": 2}))
    with pytest.raises(LongspanError, match=r"damaged: KeyError: 'crc32'; no other checkpoint next to it is undamaged"):
        checkpoint.newest_verified(tmp_path)
    marker.write_text(text)
    (tmp_path / "step-00000002").rename(tmp_path / "step-00000009")  # sound, but of another step
    with pytest.raises(LongspanError, match=r"complete\.json is damaged: .*it is that of step 2"):
        checkpoint.newest_verified(tmp_path)
    pipe = checkpoint.step_path(tmp_path, 3)
    pipe.mkdir()
    os.mkfifo(pipe / MARKER)
    with pytest.raises(LongspanError, match=r"complete\.json is damaged: it is no regular file"):
        checkpoint.read_verified(pipe)
    assert checkpoint.complete_steps(tmp_path) == [9]


class _Bomb:
    """A pickle that runs a command when it is opened."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (f"touch {self.path}",)


def _sign(folder: Path) -> None:
    """Make the marker agree with the files, as an attacker does."""
    found = _parse(folder, (folder / MARKER).read_bytes())
    files = {name: FileRecord.of(folder / name) for name in found.files}
    (folder / MARKER).write_text(format_marker(found.step, found.state, files))


def test_nothing_in_a_checkpoint_is_executed(tmp_path: Path) -> None:
    _save(tmp_path, 1)
    folder, ran = tmp_path / "step-00000001", tmp_path / "ran"
    pickle.loads(pickle.dumps(_Bomb(ran)))
    assert ran.exists(), "the bomb works"
    ran.unlink()
    whole = {path.name: path.read_bytes() for path in folder.iterdir()}

    (folder / ".metadata").write_bytes(pickle.dumps(_Bomb(ran)))
    _sign(folder)
    found = checkpoint.newest_verified(tmp_path)
    checkpoint.load(found, *_model())  # torch's own metadata is not opened

    # The index sends the reader to any bytes of any file in the folder, as a tensor or as a plain value.
    bomb = io.BytesIO()
    torch.save(_Bomb(ran), bomb)
    for kind, name in (("tensors", "model.0.weight"), ("values", "optimizer.param_groups.0.lr")):
        (folder / "__0_0.distcp").write_bytes(whole["__0_0.distcp"] + bomb.getvalue())
        index = json.loads(whole["index.json"])
        place = index["tensors"][name]["pieces"][0] if kind == "tensors" else index["values"][name]
        place[-2:] = [len(whole["__0_0.distcp"]), len(bomb.getvalue())]
        (folder / "index.json").write_text(json.dumps(index))
        _sign(folder)
        found = checkpoint.newest_verified(tmp_path)
        with pytest.raises(LongspanError, match=r"step-00000001 cannot be read: .*[Ww]eights.only"):
            checkpoint.load(found, *_model())
    assert not ran.exists()


def test_an_index_that_points_outside_is_refused(tmp_path: Path) -> None:
    _save(tmp_path, 1)
    folder = tmp_path / "step-00000001"
    whole = (folder / "index.json").read_text()
    for text, said in (
        (whole.replace("__0_0.distcp", "../secret"), r"not in a file '\.\./secret'"),
        (whole.replace('"float32"', '"nn"'), r"has no dtype 'nn'"),
        (whole.replace("[3,3]", "[3,-3]"), r"\[3, -3\] are no sizes"),
        (whole.replace('"shape":[3,3]', '"shape":[2,3]'), r"a piece of .* is not inside it"),
        ("[]", "index.json is damaged"),
    ):
        assert text != whole
        (folder / "index.json").write_text(text)
        _sign(folder)
        found = checkpoint.newest_verified(tmp_path)
        with pytest.raises(LongspanError, match=said):
            checkpoint.load(found, *_model())


def test_nan_and_infinity_are_never_saved(tmp_path: Path) -> None:
    _save(tmp_path, 1)
    model, optimizer = _model()
    with torch.no_grad():
        model[1].weight[0, 1] = float("nan")  # type: ignore[index]
    with pytest.raises(LongspanError, match=r"step-00000002 is not written: 1\.weight holds nan \(1 of 3 numbers\)"):
        checkpoint.save(tmp_path, 2, model, optimizer, {})
    model, optimizer = _model()
    optimizer.state[next(model.parameters())]["exp_avg_sq"][:] = float("inf")
    with pytest.raises(LongspanError, match=r"the optimizer's .*0\.weight\.exp_avg_sq holds inf \(9 of 9"):
        checkpoint.save(tmp_path, 2, model, optimizer, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001"]


# --- several ranks


def _verify(path: Path) -> str:
    try:
        checkpoint.read_verified(path, Ranks())
    except LongspanError as error:
        return str(error)
    return ""


def _on_two_ranks(folder: Path) -> dict[str, object]:
    """Return what every rank refuses."""
    rank = torch.distributed.get_rank()
    _save(folder, 1)
    _save(folder, 2)
    said: dict[str, object] = {"whole": _verify(folder / "step-00000002")}
    # Rank 1 has another disk, with an older checkpoint and half of the newest.
    mine = folder if rank == 0 else folder.with_name("other")
    if rank == 1:
        shutil.copytree(folder / "step-00000001", mine / "step-00000001")
        shutil.copytree(folder / "step-00000002", mine / "step-00000002")
        (mine / "step-00000002" / "__1_0.distcp").unlink(missing_ok=True)
        (mine / "step-00000002" / "__0_0.distcp").unlink()
    said["half"] = _verify(mine / "step-00000002")
    found, passed_over = checkpoint.newest_undamaged(mine, Ranks())
    said["chosen"] = (found.step if found else None, len(passed_over))
    if rank == 1:
        shutil.rmtree(mine / "step-00000002")
    said["none"] = _verify(mine / "step-00000002")
    # One rank's weights are not finite.
    model, optimizer = _model()
    if rank == 1:
        with torch.no_grad():
            model[0].bias.fill_(float("inf"))  # type: ignore[union-attr, operator]
    try:
        checkpoint.save(folder, 3, model, optimizer, {})
    except LongspanError as error:
        said["infinite"] = str(error)
    said["steps"] = checkpoint.complete_steps(folder)
    return said


def test_ranks_agree_on_which_checkpoint_is_undamaged(tmp_path: Path, pool2: RankPool) -> None:
    first, second = pool2.run(_on_two_ranks, tmp_path / "run", timeout=240)
    assert first == second
    assert first["whole"] == ""
    assert re.search(
        r"rank 1 on .*: checkpoint file .*__0_0\.distcp is missing|^checkpoint file .* is missing", first["half"]
    )
    assert first["chosen"] == (1, 1)
    assert re.search(r"^rank 1 on .*step-00000002 does not exist", first["none"])
    assert re.search(r"0\.bias holds inf \(3 of 3 numbers\) on rank 1", first["infinite"])
    assert first["steps"] == [1, 2]


def _save_where_rank_1_loses_what_it_wrote(folder: Path) -> None:
    original = checkpoint.tensors.RecordedFiles.create_stream

    @contextlib.contextmanager
    def create(self: object, path: Path, mode: str) -> Iterator[object]:
        with original(self, path, mode) as stream:  # type: ignore[arg-type]
            yield stream
        if torch.distributed.get_rank() == 1 and path.name.startswith("__1"):
            path.unlink()  # as on another disk

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint.tensors.RecordedFiles, "create_stream", create)
        model, optimizer = _model()
        mesh = torch.distributed.init_device_mesh("cpu", (2,))
        torch.distributed.fsdp.fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters())
        checkpoint.save(folder, 7, model, optimizer, {})


def test_a_file_that_other_ranks_do_not_see_is_detected(tmp_path: Path, pool2: RankPool) -> None:
    with pytest.raises(RankError) as caught:
        pool2.run(_save_where_rank_1_loses_what_it_wrote, tmp_path, timeout=240)
    assert len(caught.value.failures) == 2
    for failure in caught.value.failures.values():
        assert re.search(r"__1_0\.distcp is missing: the disk does not hold .* do not share it", failure.message)
    assert list(tmp_path.iterdir()) == []


def _saves_on_some_ranks(folder: str) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters()) if dist.get_rank() == 0 else None
    checkpoint.save(folder, 1, model, optimizer, {})  # type: ignore[arg-type]


def test_an_argument_that_is_wrong_on_one_rank_is_refused_on_all(pool2: RankPool, tmp_path: Path) -> None:
    with pytest.raises(RankError) as error:
        pool2.run(_saves_on_some_ranks, str(tmp_path))
    messages = {failure.message for failure in error.value.failures.values()}
    assert len(error.value.failures) == 2 and len(messages) == 1
    assert "rank 1 failed: `optimizer` must be a torch.optim.Optimizer" in messages.pop()
