"""`longspan train` and `longspan verify` on a tensor axis: the losses of one process, also resumed on another mesh."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import longspan
from longspan import train as training
from longspan import verify as verifying
from longspan.checkpoint import Ranks
from longspan.checkpoint.saving import _collect
from longspan.comm.tensor import TensorGroup
from longspan.compat.torch_checkpoint import flat_names
from longspan.core.errors import LongspanError
from longspan.core.sections import make, replace
from longspan.ranks import launch
from longspan.train import TrainConfig
from longspan.verify import VerifyConfig, worker
from longspan.verify.report import Report
from tests.models import build
from tests.pool import RankPool
from tests.training import (
    cut_after,
    log_of,
    losses_of,
    losses_on,
    near,
    small_run,
    train,
    weights_of,
    write_config,
)


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    """4 steps of 4 sequences of 60 tokens; clipped, so that a wrong norm shows in the losses."""
    return small_run(write_config(tmp_path, vocab_size=385), tmp_path / "alone")


def test_losses_equal_those_of_one_process_and_a_run_resumes_on_any_mesh(
    config: TrainConfig, pool2: RankPool, pool4: RankPool, tmp_path: Path
) -> None:
    train(config)
    plain = losses_of(config.out)
    assert plain[4] < plain[1] - 0.1
    other: dict[str, Any] = {"tensor_style": "tp", "export": "never"}
    both = replace(config, out=tmp_path / "both", tensor=2, ulysses=2, tensor_style="megatron-sp")
    assert near(losses_on(pool4, both), plain)
    line = log_of(both.out)[-1]
    assert line["tokens"] == 4 * 4 * 61  # a tensor group's tokens count once
    ours, theirs = weights_of(both.out), weights_of(config.out)
    assert ours.keys() == theirs.keys()
    assert all((ours[name] - theirs[name]).abs().max() < 1e-4 for name in theirs)

    same = cut_after(both, 2, tmp_path / "same", export="never")
    assert losses_on(pool4, same) == losses_of(both.out)  # to the bit
    # From one process to a tensor group without FSDP, and from four ranks to a Ulysses group.
    pair = cut_after(config, 2, tmp_path / "pair", **other, ulysses=1, tensor=2)
    ulysses = cut_after(both, 2, tmp_path / "ulysses", **other, ulysses=2, tensor=1)
    assert near(losses_on(pool2, pair), plain) and near(losses_on(pool2, ulysses), plain)

    # Each rank reads its shards of the export.
    verified = make(VerifyConfig, model=str(both.exported), context=64, tensor=2, ulysses=2, tensor_style="megatron-sp")
    _check_passed(pool4.run(worker, verified, timeout=240)[0])
    resumed = make(VerifyConfig, resume=str(both.out), context=64, tensor=2)
    _check_passed(pool2.run(worker, resumed, timeout=240)[0])


def _check_passed(report: Report) -> None:
    assert report.passed, [check for check in report.checks if not check.passed]
    assert len(report.checks) == 3 + 21 and report.setup["tensor"] == 2  # the gradients of 21 parameters


def _without_a_sum(config: VerifyConfig) -> Report:
    """Leave out the sum of gradients over the ranks' heads and features."""
    copy_in = TensorGroup.copy_in
    TensorGroup.copy_in = lambda self, x: x.clone() if x.shape[-1:] == (32,) else copy_in(self, x)  # type: ignore[method-assign]
    try:
        return worker(config)
    finally:
        TensorGroup.copy_in = copy_in  # type: ignore[method-assign]


def test_verify_detects_a_missing_sum_over_the_axis(pool4: RankPool, tmp_path: Path) -> None:
    config = make(VerifyConfig, config=write_config(tmp_path), context=64, tensor=2, ulysses=2, fsdp=False)
    report = pool4.run(_without_a_sum, config, timeout=240)[0]
    failed = {check.group for check in report.checks if not check.passed}
    assert not report.passed and {"attention q", "mlp"} <= failed and "lm head" not in failed


def _room_for_a_checkpoint(folder: Path) -> tuple[int, int]:
    sp = longspan.SequenceSharding(longspan.init_mesh(tensor=2, ulysses=2))
    model = longspan.parallelize(build("Llama", vocab_size=64), sp, fsdp=False)
    optimizer = torch.optim.AdamW(model.parameters())
    tensors, needed = _collect(folder, model, optimizer, Ranks())
    return needed - 2048 * 4 * len(flat_names(tensors)), 3 * 4 * sum(p.numel() for p in model.parameters())


def test_replicated_weights_need_room_once(pool4: RankPool, tmp_path: Path) -> None:
    for needed, whole in pool4.run(_room_for_a_checkpoint, tmp_path):
        assert whole <= needed < 1.01 * whole  # weights and two states, and each weight's count of steps


# ---------------------------------------------------------------------------------------------------------------------
# Errors before any rank starts.


@pytest.mark.parametrize(
    ("how", "changes", "tensor", "said"),
    [
        ("train", {}, 8, ("tensor=8", "4 query heads", "tensor=4")),
        ("dry run", {"intermediate_size": 5}, 4, ("5 features", "tensor=2")),
        ("verify", {}, 8, ("tensor=8", "4 query heads", "tensor=4")),
    ],
)
def test_an_axis_that_is_too_large_is_refused_before_ranks_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, changes: dict[str, Any], tensor: int, said: Any
) -> None:
    monkeypatch.setattr(launch, "launch", lambda *_, **__: pytest.fail("ranks were started"))
    path = write_config(tmp_path, **changes)
    with pytest.raises(LongspanError) as error:
        if how == "verify":
            verifying.run(make(VerifyConfig, config=path, context=64, tensor=tensor))
        else:
            given = make(TrainConfig, data="pydoc", config=path, context=64, tensor=tensor, out=tmp_path / "run")
            training.run(replace(given, dry_run=how == "dry run"))
    assert all(part in str(error.value) for part in said), error.value
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tensor": 2, "grad_dtype": "bf16"}, ("--grad-dtype bf16", "--tensor")),
        ({"tensor": 2, "ulysses": 2, "optimizer": "adamw8bit"}, ("--tensor 2", "--ulysses 4")),
        ({"tensor": 0}, ("--tensor",)),
    ],
)
def test_options_that_exclude_the_axis_are_refused(config: TrainConfig, changes: dict[str, Any], said: Any) -> None:
    with pytest.raises(LongspanError) as error:
        replace(config, **changes).check()
    assert all(part in str(error.value) for part in said), error.value


def test_the_ranks_of_an_axis_share_sequences(config: TrainConfig) -> None:
    given = replace(config, data_degree=3, ring=2, ulysses=2, tensor=2)
    assert (given.parallel.ranks, given.parallel.fsdp_ranks, given.sequences) == (24, 12, 4)
    assert given.parallel.flags.endswith("--tensor 2")
    # A tensor group alone shards nothing by FSDP, so its gradients need no sum after the backward.
    replace(config, tensor=2, fsdp=False, optimizer_in_backward=True, clip=0, micro_batch=4).check()
