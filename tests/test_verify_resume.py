"""`longspan verify --resume`: a checkpoint's weights, sharded as they are read, compute what one process computes."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from longspan import checkpoint
from longspan.checkpoint import Checkpoint, Ranks
from longspan.checkpoint.damage import format_marker
from longspan.core.errors import LongspanError
from longspan.core.sections import make, replace
from longspan.train import TrainConfig
from longspan.verify import VerifyConfig, run, worker
from longspan.verify.inputs import open_resumed
from longspan.verify.report import Report, as_dict, print_table
from tests.pool import RankError, RankPool
from tests.training import LLAMA, train, write_config


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 2 steps on one rank, with a checkpoint of each, and its export."""
    folder = tmp_path_factory.mktemp("finished")
    write_config(folder)
    (folder / "text.txt").write_text("A text of some length, one line after the other.\n" * 100)
    train(make(TrainConfig,
        data=str(folder / "text.txt"), config=folder / "config.json", context=33, batch=2, steps=2, lr=1e-2,
        dtype="fp32", log_every=1, save_every=1, keep=0, out=folder / "run", shuffle=0,
    ))  # fmt: skip
    return folder


@pytest.fixture
def out(finished: Path, tmp_path: Path) -> Path:
    """A copy of the run's folder."""
    shutil.copytree(finished / "run", tmp_path / "run")
    return tmp_path / "run"


def _config(path: Path, **changes: Any) -> VerifyConfig:
    return replace(make(VerifyConfig, resume=str(path), context=32, ulysses=2), **changes)


def _step(out: Path, step: int) -> Path:
    return out / "checkpoints" / f"step-{step:08d}"


# --- sound checkpoints pass, a wrong load fails


def _with_wrong_rows(load: Callable[..., None]) -> Callable[..., None]:
    """Load the rows of rank 1 in the wrong order, which only the comparison can detect."""

    def call(found: Checkpoint, model: torch.nn.Module, ranks: Ranks) -> None:
        load(found, model, ranks)
        for name, parameter in model.named_parameters():
            if isinstance(parameter, DTensor) and name.endswith("1.mlp.up_proj.weight") and ranks.rank == 1:
                local = parameter.to_local()
                local.data.copy_(local.roll(1, 0).detach().clone())

    return call


def _verify_all(configs: list[VerifyConfig]) -> list[Report]:
    """Verify each, and the first again with a fault in how shards are read."""
    reports = [worker(config) for config in configs]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "load_weights", _with_wrong_rows(checkpoint.load_weights))
        return [*reports, worker(configs[0])]


def _loss(report: Report) -> float:
    (loss,) = (equal for equal in report.equalities if equal.name == "loss")
    return float(loss.values[0])


def test_a_checkpoint_is_verified_with_its_own_weights(
    finished: Path, pool2: RankPool, capsys: pytest.CaptureFixture[str]
) -> None:
    out, hf = finished / "run", make(VerifyConfig, model=str(finished / "run" / "hf"), context=32, ulysses=2)
    configs = [
        _config(out),
        hf,
        _config(_step(out, 1)),
        _config(out / "checkpoints", ring=2, ulysses=1, dtype="bf16"),
        _config(_step(out, 1), data_degree=2, ulysses=1, fsdp=False, config=finished / "config.json"),
    ]
    reports, others = pool2.run(_verify_all, configs, timeout=240)
    assert reports == others
    newest, exported, before, *_, faulty = reports
    for report in reports[:-1]:
        assert report.passed, [check for check in report.checks if not check.passed]
    # The export holds the same weights; those of the step before, and random ones, have another loss.
    loss = _loss(newest)
    assert abs(loss - _loss(exported)) < 1e-4 < abs(loss - _loss(before)), (loss, _loss(exported), _loss(before))
    assert faulty.exit_code == 1
    path = _step(out, 2)
    files = [file for file in path.iterdir() if file.name != checkpoint.MARKER]
    sizes = {"step": 2, "files": len(files), "bytes": sum(file.stat().st_size for file in files)}
    setup = as_dict(newest)["setup"]
    assert (setup["model"], setup["weights"], setup["checkpoint"]) == (str(path), "given", sizes)
    assert exported.setup["checkpoint"] is None
    capsys.readouterr()
    print_table(newest)
    text = " ".join(capsys.readouterr().out.split())
    assert f"checkpoint of step 2: {len(files)} files, {sizes['bytes']:,} bytes, are as they were written" in text


# --- damage


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _never(*_: Any, **__: Any) -> None:
    raise AssertionError("ranks were started")


def test_damage_is_refused_with_file_and_newest_undamaged_checkpoint(
    out: Path, pool2: RankPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    newest, older = _step(out, 2), _step(out, 1)
    hint = rf"; resume from the newest undamaged checkpoint: --resume {re.escape(str(older))}"
    _flip(newest / "__0_0.distcp")
    # The ranks share the files to read. A run's folder means its newest checkpoint and no other.
    for path in (out, newest):
        with pytest.raises(RankError, match="2 of 2 ranks failed") as caught:
            pool2.run(worker, _config(path))
        for failure in caught.value.failures.values():
            assert re.search(rf"step-00000002/__0_0\.distcp is damaged: .* CRC-32 .*{hint}", failure.message)
    # Names and sizes are checked before any rank starts.
    monkeypatch.setattr("longspan.ranks.launch.launch", _never)
    (newest / "__0_0.distcp").write_bytes(b"short")
    with pytest.raises(LongspanError, match=rf"__0_0\.distcp has 5 bytes instead of \d+{hint}"):
        run(_config(out))
    (newest / checkpoint.MARKER).unlink()
    for path in (out, out / "checkpoints", newest):
        with pytest.raises(LongspanError, match=rf"step-00000002 is not complete: it has no complete\.json{hint}"):
            run(_config(path))
    for path, said in {
        out / "checkpoints" / "step-00000009": r"step-00000009 does not exist; ",
        out / "hf": r"--resume .*hf holds no checkpoint; give a run's folder \(OUT\)",
        out / "none": r"--resume .*none does not exist; give a run's folder",
    }.items():
        with pytest.raises(LongspanError, match=said):
            run(_config(path))


def test_nan_in_a_checkpoint_is_named(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No save writes NaN, unless its check is switched off."""
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.saving, "check_finite", lambda *_, **__: None)
        model = torch.nn.Linear(2, 2)
        torch.nn.init.constant_(model.weight, float("nan"))
        checkpoint.save(out / "checkpoints", 3, model, torch.optim.AdamW(model.parameters()), {})
    found = checkpoint.newest_verified(out, Ranks())
    assert found.step == 3 and found.verified
    with pytest.raises(LongspanError, match=r"step-00000003 cannot be used: weight holds nan \(4 of 4 .*an older one"):
        checkpoint.load_weights(found, torch.nn.Linear(2, 2))


# --- the model


def test_another_model_is_refused_key_by_key(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longspan.ranks.launch.launch", _never)
    other = tmp_path / "config.json"
    other.write_text(json.dumps({**LLAMA, "num_hidden_layers": 1, "rope_theta": 5e5}))
    said = (
        r"--config .*config\.json is of another model than checkpoint .*step-00000002: "
        r"model\.num_hidden_layers was 2, is 1; model\.rope_parameters\.rope_theta was 10000\.0, is 500000\.0; give the"
    )
    with pytest.raises(LongspanError, match=said):
        run(_config(finished / "run", config=other))
    with pytest.raises(LongspanError, match=r"--resume .* and --model x both name weights; give one"):
        run(_config(finished / "run", model="x"))
    with pytest.raises(LongspanError, match=r"--context 600 is longer than the 512 positions of checkpoint .*00002"):
        run(_config(finished / "run", context=600))


def _replace_state(path: Path, state: dict[str, Any]) -> None:
    """Write another state with the right checksum, as another program may."""
    found = Checkpoint.read(path)
    (path / checkpoint.MARKER).write_text(format_marker(found.step, state, found.files))


def test_a_checkpoint_without_a_usable_config_needs_the_flag(finished: Path, out: Path) -> None:
    path, own = _step(out, 2), finished / "config.json"
    identity = Checkpoint.read(path).state["identity"]
    llama = identity["model"]
    for state, said in [
        ({}, r"has no model config, so `longspan train` did not write it; give .*--config FILE"),
        ({"identity": {"model": "llama"}}, r"has no model config"),
        (
            {"identity": {"model": {**llama, "model_type": "llama99"}}},
            r"no config of the saved model type llama99.*--config",
        ),
        (
            {"identity": {**identity, "model": {**llama, "rope_parameters": None}}},
            r"does not make the saved config: .*rope_theta was None, is 10000\.0; .*give .*--config FILE",
        ),
    ]:
        _replace_state(path, state)
        with pytest.raises(LongspanError, match=said):
            open_resumed(_config(out), Ranks())
    _replace_state(path, {})  # as a custom training loop saves it
    report = worker(_config(out, config=own, ulysses=1))  # on one process without a group
    assert report.passed and report.setup["checkpoint"]["step"] == 2
