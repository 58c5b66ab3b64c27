"""A checkpoint is complete or absent, loads on any mesh, and damage is detected and named."""

from __future__ import annotations

import contextlib
import errno
import json
import multiprocessing
import os
import re
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import longspan
from longspan import checkpoint
from longspan.checkpoint import MARKER, Checkpoint, DiskFull, Saver, locked
from longspan.compat.torch_checkpoint import low_bit_adamw
from longspan.core.errors import LongspanError
from tests.chaos import corruption
from tests.chaos.counts import Counts
from tests.checkpoint.disk import largest_file
from tests.models import batch, build
from tests.pool import RankError, RankPool

pytestmark = pytest.mark.fast


def _model(width: int = 3, seed: int = 0) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    return corruption.small_model(seed, width)


def _save(folder: Path, step: int, keep: int = 0) -> None:
    checkpoint.save(folder, step, *_model(seed=step), {"step times two": 2 * step}, keep=keep)


def _steps(folder: Path) -> list[int]:
    """Return the steps that can be loaded, the newest first."""
    found = []
    for path in folder.iterdir():
        with contextlib.suppress(LongspanError):
            found.append(Checkpoint.read(path).step)
    return sorted(found)


def test_a_saved_checkpoint_loads(tmp_path: Path) -> None:
    _save(tmp_path, 5)
    found, problems = checkpoint.newest_undamaged(tmp_path)
    assert found is not None and (found.step, found.state, problems) == (5, {"step times two": 10}, [])
    files = [path for path in found.path.rglob("*") if path.is_file()]
    assert {path.suffix for path in files} == {".safetensors", ".json"}  # nothing that runs code
    expected_model, expected_optimizer = _model(seed=5)
    expected = list(expected_model.parameters())
    model, optimizer = _model(seed=1)
    optimizer.param_groups[0].update(lr=7.0, betas=(0.1, 0.2))
    checkpoint.load(found, model, optimizer)
    for a, b in zip(model.parameters(), expected, strict=True):
        assert torch.equal(a, b)
        for name, value in expected_optimizer.state[b].items():
            assert torch.equal(optimizer.state[a][name], value)
    group = optimizer.param_groups[0]
    assert (group["lr"], group["betas"]) == (0.1, (0.9, 0.999))
    for dtype in (torch.float32, torch.bfloat16):
        model = _model(seed=1)[0].to(dtype)
        checkpoint.load_weights(found, model)
        assert all(torch.equal(a, b.to(dtype)) for a, b in zip(model.parameters(), expected, strict=True))


def test_the_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    _save(tmp_path, 5)
    found = checkpoint.read_verified(tmp_path / "checkpoint-5")
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
    assert _steps(tmp_path) == [3, 4]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-3", "checkpoint-4"]
    _save(tmp_path, 3)  # the run went back
    assert _steps(tmp_path) == [3]


def test_a_killed_save_leaves_no_checkpoint(tmp_path: Path) -> None:
    _save(tmp_path, 1)
    shutil.copytree(tmp_path / "checkpoint-1" / "longspan", tmp_path / "checkpoint-3" / "longspan")
    with pytest.raises(LongspanError, match=r"checkpoint-3 is not complete: it has no complete\.json"):
        checkpoint.read_verified(tmp_path / "checkpoint-3")
    chosen, passed_over = checkpoint.newest_undamaged(tmp_path)
    assert chosen is not None and chosen.step == 1 and chosen.verified
    assert len(passed_over) == 1 and "checkpoint-3 is not complete" in passed_over[0]
    shutil.rmtree(tmp_path / "checkpoint-1")
    assert checkpoint.newest_undamaged(tmp_path) == (None, passed_over)  # of the first save of a run
    _save(tmp_path, 3)
    assert _steps(tmp_path) == [3]


def test_random_damage_is_detected_and_named(tmp_path: Path) -> None:
    """`python -m tests.chaos --only corruption` damages more."""
    counts = Counts("corruption")
    corruption.damage_and_load(16, 1, tmp_path, counts)
    assert counts["refused"] == counts["tried"] == 16, counts.notes


def test_a_changed_marker_is_damaged(tmp_path: Path) -> None:
    _save(tmp_path, 2)
    folder = tmp_path / "checkpoint-2"
    marker = folder / MARKER
    text = marker.read_text()
    for changed in (
        text.replace('"step": 2', '"step": 3'),
        text.replace('"format"', '"fnrmat"'),  # a bit of the key, which makes it no marker of another version
        text.replace('"format": 4', '"format": 2'),
        text.replace('two": 4', 'two": 5'),
        text + " ",
    ):
        assert changed != text
        marker.write_text(changed)
        with pytest.raises(LongspanError, match=r"complete\.json is damaged: .*text does not match its checksum"):
            checkpoint.read_verified(folder)
    marker.write_text(json.dumps({"step": 2}))
    with pytest.raises(LongspanError, match=r"damaged: KeyError: 'crc32'"):
        checkpoint.read_verified(folder)
    marker.write_text(text)
    folder.rename(tmp_path / "checkpoint-9")  # sound, but of another step
    with pytest.raises(LongspanError, match=r"no undamaged checkpoint: .*complete\.json is damaged: .*of step 2"):
        checkpoint.newest_undamaged(tmp_path)
    pipe = checkpoint.step_path(tmp_path, 3)
    pipe.mkdir()
    os.mkfifo(pipe / MARKER)
    with pytest.raises(LongspanError, match=r"complete\.json is damaged: it is no regular file"):
        checkpoint.read_verified(pipe)


def test_the_newest_whole_checkpoint_is_loaded_and_the_damaged_one_is_named(tmp_path: Path) -> None:
    _save(tmp_path, 1)
    _save(tmp_path, 2)
    shard = next((tmp_path / "checkpoint-2").rglob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1])
    model, optimizer = _model(seed=3)
    with pytest.warns(UserWarning, match=rf"passed over a damaged checkpoint: .*{shard.name} has \d+ bytes instead"):
        checkpoint.load(tmp_path, model, optimizer)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), _model(seed=1)[0].parameters(), strict=True))
    with pytest.raises(LongspanError, match=r"none holds no checkpoint; give a checkpoint, or the folder"):
        checkpoint.load(tmp_path / "none", model, optimizer)


def test_nan_and_infinity_are_never_saved(tmp_path: Path) -> None:
    _save(tmp_path, 1)
    model, optimizer = _model()
    with torch.no_grad():
        model[1].weight[0, 1] = float("nan")  # type: ignore[index]
    with pytest.raises(LongspanError, match=r"checkpoint-2 is not written: 1\.weight holds nan \(1 of 3 numbers\)"):
        checkpoint.save(tmp_path, 2, model, optimizer, {})
    model, optimizer = _model()
    optimizer.state[next(model.parameters())]["exp_avg_sq"][:] = float("inf")
    with pytest.raises(LongspanError, match=r"the optimizer's .*0\.weight\.exp_avg_sq holds inf \(9 of 9"):
        checkpoint.save(tmp_path, 2, model, optimizer, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-1"]


# --- several ranks


def _verify(path: Path) -> str:
    try:
        checkpoint.read_verified(path)
    except LongspanError as error:
        return str(error)
    return ""


def _on_two_ranks(folder: Path) -> dict[str, object]:
    """Return what every rank refuses."""
    rank = torch.distributed.get_rank()
    _save(folder, 1)
    _save(folder, 2)
    said: dict[str, object] = {"whole": _verify(folder / "checkpoint-2")}
    # Rank 1 has another disk, with an older checkpoint and half of the newest.
    mine = folder if rank == 0 else folder.with_name("other")
    if rank == 1:
        shutil.copytree(folder / "checkpoint-1", mine / "checkpoint-1")
        shutil.copytree(folder / "checkpoint-2", mine / "checkpoint-2")
        next((mine / "checkpoint-2").rglob("*.safetensors")).unlink()
    said["half"] = _verify(mine / "checkpoint-2")
    found, passed_over = checkpoint.newest_undamaged(mine)
    said["chosen"] = (found.step if found else None, len(passed_over))
    if rank == 1:
        shutil.rmtree(mine / "checkpoint-2")
    said["none"] = _verify(mine / "checkpoint-2")
    # One rank's weights are not finite.
    model, optimizer = _model()
    if rank == 1:
        with torch.no_grad():
            model[0].bias.fill_(float("inf"))  # type: ignore[union-attr, operator]
    try:
        checkpoint.save(folder, 3, model, optimizer, {})
    except LongspanError as error:
        said["infinite"] = str(error)
    said["steps"] = _steps(folder)
    return said


def test_ranks_agree_on_which_checkpoint_is_undamaged(tmp_path: Path, pool2: RankPool) -> None:
    first, second = pool2.run(_on_two_ranks, tmp_path / "run", timeout=240)
    assert first == second
    assert first["whole"] == ""
    assert re.search(r"^(rank 1 on .*: )?checkpoint file .*\.safetensors is missing", first["half"])
    assert first["chosen"] == (1, 1)
    assert re.search(r"^rank 1 on .*checkpoint-2 does not exist", first["none"])
    assert re.search(r"0\.bias holds inf \(3 of 3 numbers\) on rank 1", first["infinite"])
    assert first["steps"] == [1, 2]


def _save_where_rank_1_loses_what_it_wrote(folder: Path) -> None:
    record = checkpoint.saving.FileRecord.of

    def of(path: Path) -> Any:
        found = record(path)
        if path.name.startswith("shard-00002"):
            path.unlink()  # as on another disk
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint.saving.FileRecord, "of", of)
        model, optimizer = _model()
        fully_shard(model, mesh=dist.init_device_mesh("cpu", (2,)))
        optimizer = torch.optim.AdamW(model.parameters())
        checkpoint.save(folder, 7, model, optimizer, {})


def test_a_file_that_other_ranks_do_not_see_is_detected(tmp_path: Path, pool2: RankPool) -> None:
    with pytest.raises(RankError) as caught:
        pool2.run(_save_where_rank_1_loses_what_it_wrote, tmp_path, timeout=240)
    assert len(caught.value.failures) == 2
    for failure in caught.value.failures.values():
        assert re.search(r"shard-00002.*\.safetensors is missing: the ranks do not share the folder", failure.message)
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


# --- other meshes


def _trained(mesh: dict[str, int], what: str, experts: int | None = None) -> tuple[Any, Any]:
    """Return a model after a step of AdamW on two sequences, and its optimizer."""
    sp = longspan.SequenceSharding(longspan.init_mesh(**mesh))
    model = build("Qwen3Moe" if what == "experts" else "Llama")
    if what == "lora":
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(1)
        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "up_proj"], init_lora_weights=False))
    options: dict[str, Any] = {} if experts is None else {"experts": experts}
    model = longspan.parallelize(model, sp, **options).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    whole = batch(seed=3)
    whole["labels"] = whole["labels"].clamp(min=0)
    mine = {name: x.chunk(sp.data_size)[sp.data_rank] for name, x in whole.items()}
    model(**mine).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def _whole(model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    """Return all weights and optimizer states, unsharded."""
    tensors, _ = checkpoint.saving.parts_of(model, optimizer)
    return {name: getattr(x, "full_tensor", lambda x=x: x)().detach().clone() for name, x in tensors.items()}


def _saved(folder: Path, mesh: dict[str, int], what: str, experts: int | None) -> dict[str, torch.Tensor]:
    model, optimizer = _trained(mesh, what, experts)
    checkpoint.save(folder, 2, model, optimizer, {"tokens": 5})
    return _whole(model, optimizer)


def _loaded(folder: Path, meshes: list[tuple[dict[str, int], int | None]], what: str) -> list[dict[str, torch.Tensor]]:
    found = []
    for mesh, experts in meshes:
        model, optimizer = _trained(mesh, what, experts)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(1.0)
        optimizer.param_groups[0]["lr"] = 7.0
        checkpoint.load(folder, model, optimizer)
        assert optimizer.param_groups[0]["lr"] == 0.01
        found.append(_whole(model, optimizer))
    return found


MESHES: dict[str, tuple[dict[str, int], list[dict[str, int]]]] = {
    "adamw": ({"ring": 2, "ulysses": 2}, [{"data": 2, "ring": 2}, {"tensor": 2, "ulysses": 2}]),
    "lora": ({"ulysses": 4}, [{"tensor": 2, "ring": 2}]),
    "tensor": ({"tensor": 2, "ulysses": 2}, [{"data": 4}]),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", MESHES)
def test_weights_and_optimizer_load_on_another_mesh(
    tmp_path: Path, pool2: RankPool, pool4: RankPool, what: str
) -> None:
    """Saved on four ranks, loaded on four, two and one."""
    mesh, others = MESHES[what]
    kind = "adamw" if what == "tensor" else what
    expected = pool4.run(_saved, tmp_path, mesh, kind, None)[0]
    assert any("exp_avg_sq" in name for name in expected)
    fours = pool4.run(_loaded, tmp_path, [(other, None) for other in others], kind)
    twos = pool2.run(_loaded, tmp_path, [({"ring": 2}, None)], kind)
    alone = _loaded(tmp_path, [({}, None)], kind)
    for found in (*(x for rank in (*fours, *twos) for x in rank), *alone):
        assert found.keys() == expected.keys()
        assert all(torch.equal(x, expected[name]) for name, x in found.items())


@pytest.mark.slow
def test_experts_load_with_another_number_of_experts_on_a_rank(tmp_path: Path, pool4: RankPool) -> None:
    expected = pool4.run(_saved, tmp_path, {"ulysses": 4}, "experts", 4)[0]
    for rank in pool4.run(_loaded, tmp_path, [({"ring": 2, "ulysses": 2}, 2), ({"ulysses": 4}, 1)], "experts"):
        for found in rank:
            assert all(torch.equal(x, expected[name]) for name, x in found.items())


# --- optimizer states of 8 and 4 bits


def _few_bits(bits: int, rows: int = 128) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return a model on all ranks after three steps, and its optimizer. Blocks of 256 or 128 values have a scale."""
    optim = pytest.importorskip("torchao.optim")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, rows), torch.nn.Linear(rows, 64))
    if dist.is_initialized():
        fully_shard(model, mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))
    kind = low_bit_adamw(getattr(optim, f"AdamW{bits}bit"))
    optimizer = kind(model.parameters(), lr=0.01)
    for _ in range(3):
        _step_of_few_bits(model, optimizer)
    return model, optimizer


def _step_of_few_bits(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.linspace(-1, 1, 128).view(2, 64)).square().sum().backward()
    with torch.compiler.set_stance("force_eager"):  # compiling takes long
        optimizer.step()
    optimizer.zero_grad()


def _saved_few_bits(folder: Path, bits: int, rows: int = 128) -> dict[str, torch.Tensor]:
    model, optimizer = _few_bits(bits, rows)
    checkpoint.save(folder, 3, model, optimizer, {})
    _step_of_few_bits(model, optimizer)
    return _whole(model, optimizer)


def _resumed_few_bits(folder: Path, bits: int) -> dict[str, torch.Tensor]:
    model, optimizer = _few_bits(bits)
    checkpoint.load(folder, model, optimizer)
    _step_of_few_bits(model, optimizer)
    return _whole(model, optimizer)


@pytest.mark.parametrize("bits", [8, 4])
def test_states_of_few_bits_are_those_of_one_process_and_load_on_another_mesh(
    tmp_path: Path, pool2: RankPool, pool4: RankPool, bits: int
) -> None:
    assert _few_bits(8)[1].tag != _few_bits(4)[1].tag  # type: ignore[attr-defined]  # of compiled code
    expected = _saved_few_bits(tmp_path / "one", bits)
    assert any(name.endswith("exp_avg.codes") for name in expected)
    two = pool2.run(_saved_few_bits, tmp_path / "two", bits)
    others = [_resumed_few_bits(tmp_path / "two", bits), *pool4.run(_resumed_few_bits, tmp_path / "one", bits)]
    for found in (*two, *others):
        assert found.keys() == expected.keys()
        for name, x in found.items():
            torch.testing.assert_close(x, expected[name], rtol=1e-5, atol=1e-6)


def test_states_of_few_bits_are_refused_where_a_shard_is_no_whole_blocks(tmp_path: Path, pool4: RankPool) -> None:
    _saved_few_bits(tmp_path, 8, rows=72)  # four ranks hold 18 rows each, and a block has 4
    with pytest.raises(RankError, match=r"0\.weight\.exp_avg has 8 or 4 bits a value in one of the two only"):
        pool4.run(_load_rows, tmp_path)


def _load_rows(folder: Path) -> None:
    checkpoint.load(folder, *_few_bits(8, rows=72))


# --- while the training goes on


def _step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 24)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def _train_on_while_it_is_written(folder: Path, background: bool) -> tuple[bool, bool, list[int]]:
    """Save, and change the weights before the files are complete.

    Returns:
        Whether `start` returned before it was written, whether the state at the call was saved, the complete steps.
    """
    model, optimizer = corruption.small_model(0)
    if dist.is_initialized():
        fully_shard(model, mesh=dist.init_device_mesh("cpu", (2,)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    _step(model, optimizer)
    may_write = threading.Event()
    complete = checkpoint.saving._complete

    def wait(*args: Any) -> None:
        assert not background or may_write.wait(60)
        complete(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint.saving, "_complete", wait)
        saver = Saver()
        expected = _whole(model, optimizer)
        saver.start(folder, 1, model, optimizer, {"a": 1}, background=background)
        returned_before = not _steps(folder)
        _step(model, optimizer)
        may_write.set()
        saver.finish()
        other = corruption.small_model(5)
        checkpoint.load(folder, *other)
        same = all(torch.equal(x, expected[name]) for name, x in _whole(*other).items())
        saver.start(folder, 2, model, optimizer, {}, background=background)
        saver.start(folder, 3, model, optimizer, {}, background=background, keep=2)  # once the other one is complete
        saver.finish()
    return returned_before, same, _steps(folder)


@pytest.mark.parametrize("background", [True, False])
def test_the_state_at_the_call_is_saved(tmp_path: Path, pool2: RankPool, background: bool) -> None:
    expected = (background, True, [2, 3])
    assert _train_on_while_it_is_written(tmp_path / "alone", background) == expected
    assert pool2.run(_train_on_while_it_is_written, tmp_path / "sharded", background) == [expected] * 2


def test_without_memory_for_a_copy_it_is_written_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint.saving, "free_memory", lambda: 1000)
    saver = Saver()
    saver.start(tmp_path, 1, *corruption.small_model(0), {})
    assert _steps(tmp_path) == [1]


def test_large_weights_are_divided_into_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch serialises a whole file in memory before it writes."""
    monkeypatch.setattr(checkpoint.saving, "_FILE_BYTES", 3000)
    checkpoint.save(tmp_path, 1, *corruption.small_model(0), {})
    assert len(list((tmp_path / "checkpoint-1" / "longspan").glob("shard-00001-model-*"))) == 3
    model, optimizer = corruption.small_model(1)
    checkpoint.load(tmp_path, model, optimizer)
    assert torch.equal(next(model.parameters()), next(corruption.small_model(0)[0].parameters()))


# --- a full disk, a killed save, two runs


@pytest.mark.parametrize("background", [True, False])
def test_a_failed_write_leaves_nothing(tmp_path: Path, background: bool) -> None:
    _save(tmp_path, 1)
    with largest_file(2000), pytest.raises(DiskFull, match=r"checkpoint-2 cannot be written: rank 0: OSError: .*27"):
        saver = Saver()
        saver.start(tmp_path, 2, *corruption.small_model(0, 200), {}, background=background)
        saver.finish()
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]


def _full_on_rank_1(folder: Path) -> str:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    model, _ = _model()
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr("torch.distributed.checkpoint.filesystem.FileSystem.create_stream", full)
        fully_shard(model, mesh=dist.init_device_mesh("cpu", (2,)))
        saver = Saver()
        saver.start(folder, 1, model, torch.optim.AdamW(model.parameters()), {})
        try:
            saver.finish()
        except DiskFull as error:
            return str(error)
    raise AssertionError


def test_all_ranks_raise_if_one_cannot_save(tmp_path: Path, pool2: RankPool) -> None:
    first, second = pool2.run(_full_on_rank_1, tmp_path, timeout=240)
    assert first == second
    assert "checkpoint-1 cannot be written: rank 1: OSError: [Errno 28] No space left on device" in first
    assert list(tmp_path.iterdir()) == []


def test_links_and_folders_that_cannot_be_removed_do_not_end_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, elsewhere = tmp_path / "checkpoints", tmp_path / "elsewhere"
    _save(folder, 1)
    shutil.move(folder / "checkpoint-1", elsewhere)
    (folder / "checkpoint-1").symlink_to(elsewhere)
    _save(folder, 2, keep=1)
    assert [path.name for path in folder.iterdir()] == ["checkpoint-2"]
    checkpoint.read_verified(elsewhere)  # only the link is removed
    remove = shutil.rmtree

    def refuse(path: Path, *args: Any, **kwargs: Any) -> None:
        if path.name == "checkpoint-2":
            raise PermissionError(errno.EPERM, "Operation not permitted", str(path))
        remove(path, *args, **kwargs)

    monkeypatch.setattr(shutil, "rmtree", refuse)
    with pytest.warns(UserWarning, match=r"checkpoint-2 is no longer needed and cannot be removed: .*not permitted"):
        _save(folder, 3, keep=1)
    assert _steps(folder) == [3]


def test_the_old_checkpoint_of_a_step_counts_until_the_new_one_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _save(tmp_path, 2)
    monkeypatch.setattr(Checkpoint, "write_marker", _raise)
    with pytest.raises(LongspanError, match="the disk is gone"):
        _save(tmp_path, 2)
    found, problems = checkpoint.newest_undamaged(tmp_path)
    assert found is not None and (found.path.name, problems) == ("old-checkpoint-2", [])
    monkeypatch.undo()
    _save(tmp_path, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-2"]


def _raise(*_: Any) -> None:
    raise OSError("the disk is gone")


def _be_killed(folder: Path, place: str) -> None:
    saver = Saver()
    saver.start(folder, 1, *_model(), {})
    saver.finish()
    if place == "marker":
        Path.replace = _die  # type: ignore[assignment, method-assign]
    else:
        checkpoint.saving.remove_unneeded = _die
    saver.start(folder, 2, *_model(), {}, keep=1)
    time.sleep(60)


def _die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.launcher
@pytest.mark.parametrize(("place", "newest"), [("marker", 1), ("removal", 2)])
def test_a_save_that_is_killed_leaves_the_earlier_checkpoints(tmp_path: Path, place: str, newest: int) -> None:
    process = multiprocessing.get_context("forkserver").Process(target=_be_killed, args=(tmp_path, place))
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    found, passed_over = checkpoint.newest_undamaged(tmp_path)
    assert found is not None and (found.step, len(passed_over)) == (newest, 2 - newest)
    _save(tmp_path, 2, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-2"]


def _hold(folder: Path, held: Any) -> None:
    with locked(folder):
        held.set()
        time.sleep(120)


@pytest.mark.launcher
def test_a_lock_lasts_until_its_process_ends(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    held = context.Event()
    other = context.Process(target=_hold, args=(tmp_path, held))
    other.start()
    try:
        assert held.wait(120)
        with pytest.raises(LongspanError, match="is in use by another process: .*use another folder"), locked(tmp_path):
            pass
    finally:
        other.kill()
        other.join()
    with locked(tmp_path):
        pass
