"""What a sharded trainer adds to a step: it stops at values that are not finite, logs speed, and loss by position."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

import longspan
from longspan.core.errors import LongspanError
from longspan.trainers import callbacks, mixin
from longspan.trainers.callbacks import Figures, StepLine
from longspan.trainers.muon import Muon, muon
from tests.models import build
from tests.pool import RankPool
from tests.trainers.fitting import Samples, arguments, as_launched, collate, made
from tests.trainers.nan_fault import NaNFault


class _Fault(transformers.TrainerCallback):  # type: ignore[misc]
    """A value of rank 1 is not finite from step 2 on, or once in a forward."""

    def __init__(self, kind: str) -> None:
        self.kind, self.fault, self.before = kind, None, list[Any]()

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if state.global_step == 1:
            self.before = [p.to_local().clone() for p in model.parameters()]
            self.fault = NaNFault("activation" if self.kind == "once" else self.kind, model, rank=1)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.kind == "once" and self.fault is not None:
            self.fault.remove()


def _stopped(mesh: dict[str, int], out: Path, kind: str) -> str:
    """Return the error of step 2, before which no weight changes."""
    fault = _Fault(kind)
    with as_launched():
        changes = {"max_steps": 4, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}
        trainer = made(mesh, out, **changes, callbacks=[fault])
        with pytest.raises(LongspanError) as error:
            trainer.train()
        assert trainer.state.global_step == 1
        if kind != "weight":
            assert all(
                torch.equal(p.to_local(), x) for p, x in zip(trainer.model.parameters(), fault.before, strict=True)
            )
    return str(error.value)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("activation", "the run has diverged; first not finite: the output of model.layers.1.mlp.up_proj on rank 1"),
        ("gradient", "the run has diverged; first not finite: the gradient of"),
        ("weight", "since the update of step 1, whose gradients were finite"),
        ("once", "finite when the step was repeated from the same state"),
    ],
)
def test_a_step_that_is_not_finite_updates_nothing(pool2: RankPool, tmp_path: Path, kind: str, said: str) -> None:
    for error in pool2.run(_stopped, {"ulysses": 2}, tmp_path, kind):
        assert "at step 2" in error and said in error, error


class _Noisy(transformers.Trainer):  # type: ignore[misc]
    """Draws from a generator of a device."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs) * torch.rand((), generator=_ON_DEVICE)


class _Repeat(transformers.TrainerCallback):  # type: ignore[misc]
    trainer: Any = None

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        losses = torch.stack([loss.detach() for loss in self.trainer.longspan_step.losses])
        torch.testing.assert_close(self.trainer.longspan_repeat_step(), losses.sum())


_ON_DEVICE = torch.Generator()


def test_a_step_is_repeated_with_the_random_numbers_of_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else NaN that dropout on a GPU causes would not occur again, and be called a fault of the machine."""
    monkeypatch.setattr(mixin, "get_device_states", lambda *_: ([0], [_ON_DEVICE.get_state()]))
    monkeypatch.setattr(mixin, "set_device_states", lambda ids, states: _ON_DEVICE.set_state(states[0]))
    sp, repeat = longspan.SequenceSharding(longspan.init_mesh()), _Repeat()
    given = arguments(tmp_path, max_steps=2)
    sharded = longspan.trainer(_Noisy)
    repeat.trainer = sharded(build("Llama"), given, collate, Samples(8, 1), callbacks=[repeat], sp=sp)  # type: ignore[call-arg,arg-type]
    repeat.trainer.train()
    assert repeat.trainer.state.global_step == 2


# ---------------------------------------------------------------------------------------------------------------------
# Figures in the log.


class _Between(transformers.TrainerCallback):  # type: ignore[misc]
    """Whether micro-batches but the last leave gradients unreduced."""

    reduced = False

    def on_substep_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.reduced = self.reduced or any(p.grad is not None for p in model.parameters())


def _logged(mesh: dict[str, int], out: Path) -> tuple[list[dict[str, Any]], str, int, bool, int]:
    """Return the log, what is printed, the tokens of the first step, and the weights that a token multiplies."""
    printed, between = io.StringIO(), _Between()
    read = mock.patch.object(callbacks, "shape_of", wraps=callbacks.shape_of)
    peak = mock.patch.object(callbacks, "peak_flops", return_value=1e9)  # a CPU has none in the catalogue
    with as_launched(), contextlib.redirect_stdout(printed), read as shape_of, peak:
        changes = {"max_steps": 2, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}
        trainer = made(mesh, out, **changes, eval_strategy="steps", eval_steps=2, callbacks=[between])
        trainer.add_callback(figures := Figures(trainer))
        StepLine.replace_printer(trainer)
        take, tokens = figures.take, list[float]()

        def spied() -> dict[str, float]:
            seconds = figures.seconds
            found = take()
            tokens.append(found["tokens_per_second"] * seconds)
            return found

        figures.take = spied  # type: ignore[method-assign]
        trainer.train()
        assert shape_of.call_count == 1  # it builds a model
        # In your own loop afterwards, nothing multiplies a loss by the number of replicas.
        batch = collate([Samples(4, 3)[at] for at in range(4)])
        labelled = 2 * int((batch["labels"][:, 1:] != -100).sum())
        mean, divided = trainer.model(**batch).loss, trainer.model(**batch, num_items_in_batch=labelled).loss
        assert float(mean.detach()) == pytest.approx(float(divided.detach()))
    llama = build("Llama").named_parameters()
    matrices = sum(p.numel() for name, p in llama if p.dim() == 2 and "embed" not in name)
    return trainer.state.log_history, printed.getvalue(), round(tokens[0]), between.reduced, matrices


def test_a_step_logs_its_speed_in_a_line(pool4: RankPool, tmp_path: Path) -> None:
    runs = pool4.run(_logged, {"data": 2, "ulysses": 2}, tmp_path)
    for log, _, tokens, reduced, matrices in runs:
        steps = [record for record in log if "loss" in record]
        assert len(steps) == 2 and not reduced
        for record in steps:
            assert record["tokens_per_second"] > 0 and record["memory_gib"] > 0 and 0 < record["communication"] < 1
            weights = (
                record["mfu"] * 4 * 1e9 / record["tokens_per_second"] / 6
            )  # FLOPs are 6 a weight and token, and more
            assert 1 < weights / matrices < 1.5
        assert tokens == runs[0][2] and 4 * 5 <= tokens <= 4 * 23
    lines = runs[0][1].splitlines()
    assert lines[0].startswith("1/2  loss ") and lines[0].endswith("%") and "tok/s" in lines[0]
    assert lines[2].startswith("eval 2  loss ") and lines[3].startswith("2 steps in ")
    assert all(len(line) <= 80 for line in lines) and not any(said for _, said, *_ in runs[1:])


def test_lines_fit() -> None:
    logs = {"loss": 12.34567, "grad_norm": 1234.5, "learning_rate": 1e-5, "tokens_per_second": 123456.7, "mfu": 0.41,
            "memory_gib": 71.25, "communication": 0.12, "epoch": 1.0}  # fmt: skip
    (line,) = StepLine().lines(12000, 200000, logs)
    assert len(line) <= 80 and line.startswith("12000/200000  loss 12.3457  grad 1.23e+03  lr 1.0e-05  123,457 tok/s")
    by_position = {f"eval_loss_to_{1024 << i}": 2.5 for i in range(8)}
    lines = StepLine().lines(3, 9, {"eval_loss": 2.5, **by_position})
    assert lines[0] == "eval 3  loss 2.5000  perplexity 12.18" and len(lines) > 2
    assert all(len(line) <= 80 for line in lines) and "to 131,072: 2.5000" in lines[-1]


# ---------------------------------------------------------------------------------------------------------------------
# Loss by position.


def _by_position(mesh: dict[str, int], out: Path) -> dict[str, float]:
    with as_launched():
        trainer = made(mesh, out, loss_by_position=40)
        return dict(trainer.evaluate(Samples(10, 2, longest=40)))


def test_losses_by_position_are_those_of_one_process(pool4: RankPool, tmp_path: Path) -> None:
    batch = collate([Samples(10, 2, longest=40)[at] for at in range(10)])
    labels = batch["labels"][:, 1:]
    losses = F.cross_entropy(build("Llama")(**batch).logits[:, :-1].mT, labels, reduction="none").detach()
    positions = torch.arange(1, 1 + losses.shape[1]).expand_as(losses)[labels != -100]
    for found in pool4.run(_by_position, {"data": 2, "ring": 2}, tmp_path):
        for above, to in ((0, 20), (20, 40)):
            within = (above < positions) & (positions <= to)
            expected = float(losses[labels != -100][within].mean())
            assert found[f"eval_loss_to_{to}"] == pytest.approx(expected, rel=1e-5)
        assert sum(key.startswith("eval_loss_to") for key in found) == 2


# ---------------------------------------------------------------------------------------------------------------------
# Muon.


def _muon_steps() -> None:
    """3 steps on sharded weights, one of a single row and one that 2 ranks do not divide, to the bit of torch's own."""
    mesh = init_device_mesh("cpu", (2,))
    whole = [torch.nn.Parameter(torch.randn(shape)) for shape in ((6, 10), (11, 6), (1, 8), (7,))]
    sharded = [torch.nn.Parameter(distribute_tensor(p.detach().clone(), mesh)) for p in whole]
    torchs = torch.optim.Muon(whole[:3], lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(whole[3:], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    others, matrices = [{"params": sharded[3:]}], [{"params": sharded[:3], "weight_decay": 0.1}]
    ours = Muon(others, matrices, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    for _ in range(3):
        for p, mine in zip(whole, sharded, strict=True):
            p.grad = torch.randn_like(p)
            mine.grad = distribute_tensor(p.grad, mesh)
        for optimizer in (torchs, adamw, ours):
            optimizer.step()
    for p, mine in zip(whole, sharded, strict=True):
        assert torch.equal(mine.full_tensor(), p)  # type: ignore[attr-defined]


def test_muon_on_shards_is_torchs_on_whole_matrices(pool2: RankPool) -> None:
    pool2.run(_muon_steps)


def _losses_with_muon(mesh: dict[str, int] | None, out: Path, changes: dict[str, Any]) -> list[float]:
    given = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3, **changes}
    chosen = (muon, {"lr": 1e-2, "weight_decay": 0.1})
    if mesh is None:
        trainer = transformers.Trainer(
            build("Llama"), arguments(out, **given), collate, Samples(64, 1), optimizer_cls_and_kwargs=chosen
        )  # type: ignore[arg-type]
        trainer.train()
    else:
        with as_launched():
            trainer = made(mesh, out, **given, optimizer_cls_and_kwargs=chosen)
            trainer.train(resume_from_checkpoint=changes.get("resume_from_checkpoint"))
    return [record["loss"] for record in trainer.state.log_history if "loss" in record]


def test_muon_trains_as_on_one_process_and_resumes(pool2: RankPool, tmp_path: Path) -> None:
    """Steps of small gradients amplify rounding: Muon computes in bf16."""
    expected = _losses_with_muon(None, tmp_path / "plain", {})
    for found in pool2.run(_losses_with_muon, {"ring": 2}, tmp_path / "out", {}):
        assert found == pytest.approx(expected, rel=2e-3)
    resume = {"resume_from_checkpoint": str(tmp_path / "out" / "checkpoint-3")}
    for found in pool2.run(_losses_with_muon, {"ulysses": 2}, tmp_path / "again", resume):
        assert found == pytest.approx(expected, rel=2e-3)


def _refused(out: Path) -> None:
    with as_launched():
        trainer = made({"ulysses": 2, "tensor": 2}, out, optimizer_cls_and_kwargs=(muon, {"lr": 1e-2}))
        with pytest.raises(LongspanError, match="tensor=2 shards it a second time; .*ulysses=4"):
            trainer.create_optimizer()


def test_muon_is_refused_where_matrices_are_sharded_twice(pool4: RankPool, tmp_path: Path) -> None:
    pool4.run(_refused, tmp_path)
