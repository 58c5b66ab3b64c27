"""The disk under a run: full, not shared by the ranks, used by another run, or with folders that cannot be removed."""

from __future__ import annotations

import errno
import multiprocessing
import os
import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from longspan import checkpoint
from longspan.checkpoint import DiskFull, Ranks, RunLock
from longspan.core.errors import LongspanError
from tests.chaos.corruption import small_model
from tests.disk import largest_file
from tests.pool import RankError, RankPool


def _save(folder: Path, step: int, keep: int = 0, width: int = 24) -> None:
    checkpoint.save(folder, step, *small_model(step, width), {}, keep=keep)


# --- full


@pytest.mark.parametrize("room", [200, 30000])
def test_a_failed_write_names_the_bytes_and_leaves_nothing(tmp_path: Path, room: int) -> None:
    _save(tmp_path, 1)
    with largest_file(room), pytest.raises(DiskFull) as caught:
        _save(tmp_path, 2, width=200)
    said = str(caught.value)
    assert "step-00000002 cannot be written: rank 0: OSError: [Errno 27] File too large" in said
    needed, free = (int(n.replace(",", "")) for n in re.findall(r"([\d,]+) bytes", said))
    assert 3 * 4 * 200 * 201 < needed < 10 * 4 * 200 * 201 and free > needed
    assert "unexpected pos" not in said
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert checkpoint.newest_undamaged(tmp_path, Ranks())[0] is not None
    _save(tmp_path, 2)


def test_a_checkpoint_that_does_not_fit_is_not_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _save(tmp_path, 1)
    whole = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: whole._replace(free=1000))
    with pytest.raises(DiskFull) as caught:
        _save(tmp_path, 2)
    needed, free, missing = (int(n.replace(",", "")) for n in re.findall(r"([\d,]+) bytes", str(caught.value)))
    assert free == 1000 and missing == needed - free > 0
    # Another process takes the room in the middle of a save.
    monkeypatch.setattr(checkpoint.saving, "check_room", lambda *_: None)
    with largest_file(2000), pytest.raises(DiskFull, match=r"does not fit: it needs [\d,]+ bytes, .* 1,000 bytes free"):
        _save(tmp_path, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


# --- old checkpoints that cannot be removed


def test_links_and_folders_that_cannot_be_removed_do_not_end_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, elsewhere = tmp_path / "checkpoints", tmp_path / "elsewhere"
    _save(folder, 1)
    shutil.move(folder / "step-00000001", elsewhere)
    (folder / "step-00000001").symlink_to(elsewhere)
    _save(folder, 2, keep=1)
    assert [path.name for path in folder.iterdir()] == ["step-00000002"]
    checkpoint.read_verified(elsewhere, Ranks())  # only the link is removed

    remove = shutil.rmtree

    def refuse(path: Path, *args: object, **kwargs: object) -> None:
        if path.name == "step-00000002":
            raise PermissionError(errno.EPERM, "Operation not permitted", str(path))
        remove(path, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(shutil, "rmtree", refuse)
    with pytest.warns(UserWarning, match=r"step-00000002 is no longer needed and cannot be removed: .*not permitted"):
        _save(folder, 3, keep=1)
    assert checkpoint.complete_steps(folder) == [3]


def test_a_save_that_reads_back_damaged_removes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _save(tmp_path, 1)
    read_back = checkpoint.saving._read_back

    def lose_a_bit(making: Path, *args: Any) -> None:
        data = bytearray((making / "__0_0.distcp").read_bytes())
        data[-100] ^= 4
        (making / "__0_0.distcp").write_bytes(data)
        read_back(making, *args)

    monkeypatch.setattr(checkpoint.saving, "_read_back", lose_a_bit)
    with pytest.raises(LongspanError, match=r"__0_0\.distcp is damaged: .* CRC-32 .*: the disk does not hold what was"):
        _save(tmp_path, 2, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_the_old_checkpoint_stays_until_the_new_one_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each rename while a checkpoint is replaced, an older one is complete."""
    _save(tmp_path, 1)
    _save(tmp_path, 2)
    seen: list[list[int]] = []
    renamed: list[str] = []
    rename = Path.rename

    def watch(self: Path, target: Path) -> Path:
        renamed.append(self.name)
        seen.append(checkpoint.complete_steps(tmp_path))
        moved = rename(self, target)
        seen.append(checkpoint.complete_steps(tmp_path))
        return moved

    monkeypatch.setattr(Path, "rename", watch)
    _save(tmp_path, 2, keep=1)
    assert all(1 in steps for steps in seen) and checkpoint.complete_steps(tmp_path) == [2]
    assert renamed[-2:] == ["step-00000002", "making-00000002"]  # the old one of this step is set aside, not removed


# --- one run in a folder


def _hold(folder: Path, held: Any) -> None:
    lock = RunLock(folder)
    held.set()
    time.sleep(120)
    lock.release()


@pytest.mark.launcher
def test_a_lock_lasts_until_its_process_ends(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    held = context.Event()
    other = context.Process(target=_hold, args=(tmp_path, held))
    other.start()
    try:
        assert held.wait(120)
        with pytest.raises(LongspanError, match=rf"in use by process {other.pid} on {os.uname().nodename}: .*another"):
            RunLock(tmp_path)
    finally:
        other.kill()
        other.join()
    with RunLock(tmp_path), pytest.raises(LongspanError, match=rf"in use by process {os.getpid()} on"):
        RunLock(tmp_path)
    RunLock(tmp_path).release()


def test_a_file_system_without_locks_is_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    def none(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    with pytest.warns(UserWarning, match=r"no locks \(No locks available\)"):
        RunLock(tmp_path).release()


# --- one disk for all ranks


def _share(folders: list[Path]) -> None:
    checkpoint.check_shared(folders[0], Ranks(), wait_s=0.3)


def _do_not_share(folders: list[Path]) -> None:
    checkpoint.check_shared(folders[torch.distributed.get_rank()], Ranks(), wait_s=0.3)


def test_a_folder_must_be_the_same_for_all_ranks(tmp_path: Path, pool2: RankPool) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    pool2.run(_share, folders)
    assert list(folders[0].iterdir()) == []
    folders[1].mkdir()
    with pytest.raises(RankError) as caught:
        pool2.run(_do_not_share, folders)
    messages = {failure.message for failure in caught.value.failures.values()}
    assert len(messages) == 1 and len(caught.value.failures) == 2
    host = re.escape(os.uname().nodename)
    expected = rf"rank 1 on {host}, at {folders[1]}, does not see what is written by rank 0 on {host}, at"
    assert re.search(expected, messages.pop())
    assert [list(folder.iterdir()) for folder in folders] == [[], []]
