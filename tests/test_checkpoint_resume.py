"""Runs that resume: from the newest undamaged checkpoint, as the same run, in a folder without another run."""

from __future__ import annotations

import errno
import functools
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from longspan import checkpoint
from longspan.checkpoint import DiskFull, RunLock
from longspan.checkpoint.identity import differences
from longspan.core.errors import LongspanError
from longspan.core.sections import make, replace
from longspan.train import TrainConfig, run
from longspan.train.trackers import MetricsLog
from tests.disk import largest_file
from tests.pool import RankError, RankPool
from tests.training import losses_of, refused, said_by, train, write_config


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    """A run of 3 steps on one rank, with a checkpoint of each."""
    folder = tmp_path_factory.mktemp("finished")
    write_config(folder)
    (folder / "text.txt").write_text("A text of some length, one line after the other.\n" * 200)
    config = make(TrainConfig,
        data=str(folder / "text.txt"), config=folder / "config.json", context=33, batch=2, steps=3, lr=1e-2,
        dtype="fp32", log_every=1, save_every=1, keep=0, out=folder / "run", shuffle=0,
    )  # fmt: skip
    train(config)
    return config


@pytest.fixture
def config(finished: TrainConfig, tmp_path: Path) -> TrainConfig:
    """A copy of it."""
    shutil.copytree(finished.out, tmp_path / "run")
    return replace(finished, out=tmp_path / "run")


def _damage(config: TrainConfig, step: int) -> Path:
    """Flip one bit in the middle of the tensors."""
    path = config.checkpoints / f"step-{step:08d}" / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    return path


# --- damage


def test_a_damaged_checkpoint_is_refused_or_passed_over_with_a_warning(config: TrainConfig) -> None:
    whole, path = losses_of(config.out), _damage(config, 3)
    older = config.checkpoints / "step-00000002"
    said = rf"step-00000003/__0_0\.distcp is damaged: .* CRC-32 .*; resume from .* undamaged .*: --resume {older}"
    refused(config, said, resume=str(path.parent))
    shutil.rmtree(config.out / "hf")
    text = said_by(config)
    assert re.search(r"warning: passed over a damaged checkpoint: .*step-00000003/__0_0\.distcp is damaged", text)
    assert "resuming after step 2" in text and losses_of(config.out) == whole
    found, passed_over = checkpoint.newest_undamaged(config.checkpoints, checkpoint.Ranks())
    assert found is not None and (found.step, passed_over) == (3, [])
    for step in (1, 2, 3):
        _damage(config, step)
    with pytest.raises(LongspanError, match=r"holds no undamaged checkpoint: .*00000003.*00000002.*00000001.*another"):
        train(config)


# --- the same run


def test_another_model_or_other_data_is_named_key_by_key(config: TrainConfig, tmp_path: Path) -> None:
    for change, said in {
        ("num_hidden_layers", 1): r"model\.num_hidden_layers was 2, is 1",
        ("num_attention_heads", 2): r"model\.num_attention_heads was 4, is 2",
        ("rms_norm_eps", 1e-3): r"model\.rms_norm_eps was 1e-06, is 0\.001",
        ("hidden_act", "gelu"): r"model\.hidden_act was silu, is gelu",
        ("rope_theta", 5e5): r"model\.rope_parameters\.rope_theta was 10000\.0, is 500000\.0",
    }.items():
        other = write_config(tmp_path, **dict([change]))
        refused(config, said, config=other)
    refused(config, r"pack was stream, is documents", pack="documents")
    # Other text of the same length under the same name.
    changed = tmp_path / "text.txt"
    text = Path(config.data.name).read_text()
    changed.write_text(text[:5000] + "X" + text[5001:])
    refused(config, r"differ: changed: text\.txt \(as long, with other text\); give the same", data=str(changed))
    # The same tokenizer but for one rule, with as many ids.
    tokenizers = [_tokenizer(tmp_path / name, lower) for name, lower in (("plain", False), ("lower", True))]
    first = replace(config, out=tmp_path / "words", tokenizer=tokenizers[0], steps=1, export="never")
    train(first)
    refused(first, r"tokenizer\.content was [0-9a-f]{16}, is [0-9a-f]{16}; give the same", tokenizer=tokenizers[1])


def test_only_changed_files_are_named(config: TrainConfig, tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    (folder / "deep").mkdir(parents=True)
    for i in range(40):
        (folder / "deep" / f"{i:02}.txt").write_text(f"The text of file {i:02}.\n" * 20)
    first = replace(config, data=str(folder), out=tmp_path / "files", steps=1, export="never")
    train(first)
    (folder / "README.md").write_text("not read, so no difference")
    run(first)
    (folder / "deep" / "03.txt").unlink()
    (folder / "new.txt").write_text("another")
    for i in range(10, 18):
        (folder / "deep" / f"{i}.txt").write_text("longer\n" * 100)
    said = (
        r"the files of --data \S+/texts differ: new: new\.txt; gone: deep/03\.txt; changed: deep/10\.txt "
        r"\(420 bytes then, 700 now\), .*, deep/15\.txt \(420 bytes then, 700 now\) and 2 more; give the same"
    )
    with pytest.raises(LongspanError, match=said) as refused:
        run(replace(first, steps=2))
    assert "04.txt" not in str(refused.value) and len(str(refused.value)) < 900


def test_changed_settings_are_named_in_one_line(config: TrainConfig) -> None:
    more = replace(config, steps=4, lr=1e-4, schedule="linear", export="never")
    line = "lr was 0.01, is 0.0001, schedule was cosine, is linear, steps was 3, is 4 from step 4 on"
    assert line in said_by(more).splitlines()
    text = said_by(replace(more, steps=5, schedule="constant"))
    assert "schedule was linear, is constant from step 5 on" in text.splitlines()
    text = said_by(replace(more, steps=6, schedule="constant"))
    assert "resuming after step 5" in text and " was " not in text


def _tokenizer(folder: Path, lower: bool) -> str:
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"[UNK]": 0, "</s>": 1, "text": 2, "line": 3}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    if lower:
        words.normalizer = normalizers.Lowercase()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]", eos_token="</s>").save_pretrained(folder)
    return str(folder)


def test_keys_that_one_library_version_lacks_are_not_compared() -> None:
    before = {"transformers": "5.5", "model": {"size": 3, "gone": 1}, "batch": 2}
    now = {"transformers": "5.23", "model": {"size": 3, "new": None, "other": 7}, "batch": 2}
    assert differences(before, now) == {}
    assert differences(before, {**now, "model": {"size": 4}}) == {"model.size": (3, 4)}
    assert differences(before, {**now, "transformers": "5.5"}).keys() == {"model.gone", "model.other"}


def test_another_batch_needs_its_flag(config: TrainConfig) -> None:
    more = replace(config, steps=4, export="never")
    refused(more, r"made with 2 sequences per step, now there would be 4 .*--batch 2, or --change-batch", batch=4)
    refused(more, r"now there would be 1 \(--batch, or else --micro-batch x --data-degree\)", batch=None)
    train(replace(more, batch=4, change_batch=True))
    last = checkpoint.newest_verified(config.checkpoints)
    assert last.state["data"]["sequences"] == 3 * 2 + 4


def test_unused_weights_in_a_folder_are_warned_of(config: TrainConfig, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "hf"
    shutil.copytree(config.out / "hf", folder)
    weights = {k: v.clone() for k, v in load_file(folder / "model.safetensors").items()}  # not the file's own memory
    save_file({**weights, "value_head.weight": torch.ones(3)}, folder / "model.safetensors", {"format": "pt"})
    with pytest.warns(UserWarning, match=r"holds 1 weights that its config has no place for.*: value_head\.weight"):
        train(replace(config, config=None, model=str(folder), out=tmp_path / "new", steps=1, export="never"))


# --- the folder


def test_a_folder_in_use_or_with_other_files_is_refused_before_the_start(config: TrainConfig, tmp_path: Path) -> None:
    with RunLock(config.out):
        refused(config, r"run is in use by process \d+ on .*another --out")
        with pytest.raises(LongspanError, match=r"run is in use by process \d+"):
            train(config)
    (config.out / "hf" / "mine.bin").write_text("x")
    refused(config, r"hf holds 1 files that longspan did not write \(mine\.bin, .*--export never")
    train(replace(config, export="never"))
    assert (config.out / "hf" / "mine.bin").exists()


def _train_apart(config: TrainConfig) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "check_shared", functools.partial(checkpoint.check_shared, wait_s=0.3))
        # A relative path that is another folder on each rank.
        here = config.out / str(torch.distributed.get_rank())
        here.mkdir(parents=True)
        patch.chdir(here)
        train(replace(config, out=Path("run")))


def test_disks_that_ranks_do_not_share_are_refused_at_the_start(config: TrainConfig, pool2: RankPool) -> None:
    with pytest.raises(RankError) as caught:
        pool2.run(_train_apart, replace(config, ulysses=2), timeout=240)
    assert len(caught.value.failures) == 2
    for failure in caught.value.failures.values():
        assert re.search(r"ranks do not share a folder: rank 1 on .* does not see .* rank 0 on", failure.message)


# --- full disks


def test_a_full_disk_ends_a_run_only_at_its_last_save(config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = replace(config, out=config.out.with_name("fresh"))
    create = checkpoint.tensors.RecordedFiles.create_stream

    def full(self: Any, path: Path, mode: str) -> Any:
        if "making-00000001" not in str(path):
            raise OSError(errno.ENOSPC, "No space left on device")
        return create(self, path, mode)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.tensors.RecordedFiles, "create_stream", full)
        with pytest.raises(LongspanError, match=r"step-00000003 cannot be written: .* resumes from step 1$") as caught:
            train(fresh)
        assert not isinstance(caught.value, DiskFull)
    assert sorted(path.name for path in fresh.checkpoints.iterdir()) == ["step-00000001"]
    assert sorted(losses_of(fresh.out)) == [1, 2, 3]
    text = said_by(fresh)
    assert "resuming after step 1" in text and losses_of(fresh.out) == losses_of(config.out)


def test_a_metrics_line_without_room_is_left_out(config: TrainConfig, capsys: pytest.CaptureFixture[str]) -> None:
    write = MetricsLog.write
    with pytest.MonkeyPatch.context() as patch:

        def full(self: MetricsLog, metrics: Any) -> None:
            with largest_file((config.out / "metrics.jsonl").stat().st_size + 20 if metrics.step == 4 else 1 << 40):
                write(self, metrics)

        patch.setattr(MetricsLog, "write", full)
        train(replace(config, steps=5, export="never"))
    assert sorted(losses_of(config.out)) == [1, 2, 3, 5]
    said = r"warning: .*metrics\.jsonl cannot be written: File too large \([\d,]+ bytes free\); the run goes on"
    assert re.search(said, capsys.readouterr().out)
