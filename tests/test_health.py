"""Non-finite numbers, spikes and zero gradients in `longspan train`: errors with the place and a fix, or warnings."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from longspan.checkpoint import complete_steps
from longspan.core.errors import LongspanError
from longspan.core.sections import make, replace
from longspan.train import TrainConfig
from longspan.train.metrics import Health
from tests.nan_fault import NaNFault, poison
from tests.pool import RankError, RankPool
from tests.training import small_run, write_config


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    changes: dict[str, Any] = {"batch": 2, "lr": 1e-3, "warmup": 0, "clip": 1.0, "save_every": 1, "export": "never"}
    return small_run(write_config(tmp_path), tmp_path / "run", **changes)


def _train(config: TrainConfig, fault: str, passing: bool) -> str:
    """Train with a fault on the last rank from the third step on; return the error, or the output."""
    from longspan.train.loop import Trainer

    trainer = Trainer(config)
    plain, planted = trainer._accumulate, list[Any]()

    def accumulate(batch: Any) -> Any:
        repeated = bool(planted)
        if trainer.step == 2 and not repeated and fault != "weight":
            planted.append(NaNFault(fault, trainer.model, dist.get_world_size() - 1))
        if repeated and passing:
            planted[0].remove()
        return plain(batch)

    trainer._accumulate = accumulate  # type: ignore[method-assign]
    if fault == "weight":
        step = trainer.optimizer.step

        def faulty(*args: Any) -> Any:
            step(*args)
            if trainer.step == 1:
                NaNFault("weight", trainer.model, dist.get_world_size() - 1)

        trainer.optimizer.step = faulty  # type: ignore[method-assign]
    message = ""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            trainer.run()
        except LongspanError as error:
            message = str(error)
    assert fault == "weight" or all(bool(p.isfinite().all()) for p in map(_full, trainer.model.parameters()))
    return message or out.getvalue()


def _full(p: Any) -> torch.Tensor:
    return p.full_tensor().detach() if hasattr(p, "full_tensor") else p.detach()


@pytest.mark.parametrize("mesh", [{"ulysses": 2}, {"ring": 2, "fsdp": False}, {"data_degree": 2, "fsdp": False}])
def test_a_nonfinite_step_is_repeated_and_its_source_named(
    config: TrainConfig, pool2: RankPool, mesh: dict[str, Any], tmp_path: Path
) -> None:
    faults = ["activation", "gradient"] if "ulysses" in mesh else ["parameter"]
    for fault in faults:
        run = replace(config, out=tmp_path / fault, **mesh)
        first, second = pool2.run(_train, run, fault, False, timeout=240)
        assert first == second
        assert "at step 3: the run has diverged; first not finite: the " in first
        assert "model.layers.1.mlp" in first and "on rank 1 (" in first and "smaller --lr (now 0.001)" in first
        assert complete_steps(run.checkpoints) == [1, 2]


def test_a_transient_fault_is_named_as_one(config: TrainConfig, pool2: RankPool) -> None:
    for said in pool2.run(_train, replace(config, ulysses=2), "activation", True, timeout=240):
        assert "finite when the step was repeated from the same state: a transient fault of a machine" in said
        assert "--lr" not in said
    assert complete_steps(config.checkpoints) == [1, 2]
    first, _ = pool2.run(_train, replace(config, ulysses=2), "none", False, timeout=240)
    assert "resuming after step 2" in first and complete_steps(config.checkpoints) == [1, 2, 3, 4]


def test_nonfinite_weights_suggest_no_other_learning_rate(config: TrainConfig, pool2: RankPool) -> None:
    run = replace(config, ulysses=2, save_every=0)
    for message in pool2.run(_train, run, "weight", False, timeout=240):
        assert "at step 3: weight model.layers.1.self_attn.k_proj.weight on rank 1 (1 of " in message
        assert "since the update of step 2" in message and "smaller --lr" not in message
    assert complete_steps(run.checkpoints) == []


def test_a_divergence_on_one_device_is_named(config: TrainConfig) -> None:
    from longspan.train.loop import Trainer

    with pytest.raises(
        LongspanError, match=r"at step 2: the run has diverged; first not finite: .* on rank 0 \(.*--lr"
    ):
        Trainer(replace(config, lr=1e30, warmup=0, save_every=0)).run()


def test_a_rank_whose_weights_change_at_rest_is_named(config: TrainConfig, pool2: RankPool) -> None:
    with pytest.raises(RankError) as error:
        pool2.run(_flip, replace(config, ulysses=2, check_at_rest=True), timeout=240)
    assert len(error.value.failures) == 2
    for failure in error.value.failures.values():
        assert "rank 1 refused its batch: the weights of model.norm.weight on this rank changed" in failure.message


def _flip(config: TrainConfig) -> None:
    from longspan.train.loop import Trainer

    trainer = Trainer(config)
    plain = trainer._update

    def update(batch: Any) -> Any:
        if trainer.step == 2 and dist.get_rank() == 1:
            trainer.model.model.norm.weight.to_local().data.view(torch.int32)[1] ^= 1
        return plain(batch)

    trainer._update = update  # type: ignore[method-assign]
    trainer.run()


def test_spikes_and_gradients_of_zero() -> None:
    config = make(TrainConfig, data="x", config=Path("x"), spike=2.0, zero_gradients=3)
    health = Health(config)
    for step in range(1, 31):
        assert health.look(step, 3.0 + step % 2, 1.0) is None
    warning = health.look(31, 7.5, 1.0) or ""
    assert warning.startswith("warning: step 31: loss 7.5000 is 2.1 times the median") and "3.5" in warning
    assert health.look(32, 8.0, 1.0) is None  # warned once
    assert health.look(33, 3.0, 1.0) is None
    assert health.look(34, 8.0, 0.0) is not None and health.look(35, 3.0, 0.0) is None
    assert health.look(36, 3.0, 1.0) is None  # not in a row
    assert [health.look(step, 3.0, 0.0) for step in (37, 38)] == [None, None]
    with pytest.raises(LongspanError, match=r"exactly 0 in 3 steps in a row, up to step 39: .* --zero-gradients 0"):
        health.look(39, 3.0, 0.0)
    stopping = Health(replace(config, on_spike="stop", zero_gradients=0))
    assert [stopping.look(step, 3.0, 0.0) for step in range(1, 9)] == [None] * 8
    with pytest.raises(
        LongspanError, match=r"step 9: loss 6.1000 is 2.0 times .*more than --spike 2; .*--on-spike warn"
    ):
        stopping.look(9, 6.1, 0.0)
    off = Health(replace(config, spike=0.0, on_spike="stop"))
    assert all(off.look(step, 1.0 + 50 * (step == 15), 1.0) is None for step in range(20))
    early = Health(replace(config, on_spike="stop"))
    assert [early.look(step, 10.0**step, 1.0) for step in range(1, 5)] == [None] * 4  # too few losses for a median


def test_negative_settings_are_refused(config: TrainConfig) -> None:
    for name in ("spike", "zero_gradients", "check_weights"):
        with pytest.raises(LongspanError, match=rf"--{name.replace('_', '-')} must be at least 0, got -1"):
            replace(config, **{name: -1}).check()
    assert poison(torch.zeros(5)).isnan().sum() == 1
