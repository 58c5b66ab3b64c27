"""Losses that users write count as in DDP and FSDP: a term that all ranks compute alike once, own means as shares."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from torch.distributed.tensor import DTensor

import longspan
from longspan.core.errors import LongspanError
from tests.models import (
    Run,
    Truth,
    batch,
    build,
    check_gradients,
    check_loss,
    gradients,
    on_mesh,
    rows_of,
    truth_by,
)
from tests.pool import RankPool
from tests.trainers.fitting import Samples, arguments, as_launched, collate, quiet

LENGTH = 24  # which 2 and 4 ranks share evenly, where a mean of one rank's tokens is compared


def _penalty(model: Any) -> Tensor:
    """Return a penalty on the head's weights, as a user writes it with and without FSDP or a tensor axis."""
    square: Tensor = model.lm_head.weight.square().sum()
    return 0.1 * (square.full_tensor() if isinstance(square, DTensor) else square)


def _of_weights(model: Any, whole: dict[str, Any]) -> Tensor:
    out = model(**whole, use_cache=False)
    loss: Tensor = out.loss + _penalty(model)
    return loss


def _of_hidden(model: Any, whole: dict[str, Any]) -> Tensor:
    out = model(**whole, use_cache=False, output_hidden_states=True)
    loss: Tensor = out.loss + out.hidden_states[-1].square().mean()
    return loss


LOSSES = {"weights": _of_weights, "hidden": _of_hidden}
FAMILIES = {"Llama": {}, "Mixtral": {"router_aux_loss_coef": 0.1, "output_router_logits": True}}
CASES: list[tuple[str, str, dict[str, int], dict[str, Any]]] = [
    ("Llama", "weights", {"ulysses": 4}, {}),
    ("Llama", "weights", {"data": 2, "ring": 2}, {"fsdp": False}),
    ("Llama", "weights", {"ulysses": 2, "tensor": 2}, {}),
    ("Llama", "hidden", {"data": 2, "ulysses": 2}, {}),
    ("Mixtral", "weights", {"data": 2, "ulysses": 2}, {"experts": 2}),
]


def _added(case: int, truth: Truth) -> None:
    family, kind, mesh, options = CASES[case]
    sp = on_mesh(mesh)
    model = longspan.parallelize(build(family, **FAMILIES[family]), sp, **options)
    loss = LOSSES[kind](model, rows_of(batch(n=LENGTH), sp.data_rank, sp.data_size))
    loss.backward()
    check_gradients(gradients(model), truth)
    if kind == "weights":  # the mean of the ranks' values
        check_loss(float(loss.detach()), truth)


@pytest.mark.parametrize("case", range(len(CASES)))
def test_terms_added_to_the_loss(pool4: RankPool, case: int) -> None:
    family, kind, _, _ = CASES[case]

    def run(model: Any) -> Run:
        loss = LOSSES[kind](model, batch(n=LENGTH))
        loss.backward()
        return Run(float(loss.detach()), torch.zeros(1), gradients(model), None)

    pool4.run(_added, case, truth_by(build(family, **FAMILIES[family]), run))


def _global_mean() -> None:
    sp = on_mesh({"data": 2, "ulysses": 2})
    rank = dist.get_rank()
    x = torch.arange(rank * 3.0, requires_grad=True)  # 0, 3, 6 and 9 entries
    weight = torch.ones((), requires_grad=True)
    mask = x.detach() != 1
    mean = longspan.global_mean(weight * x, sp, mask=mask)
    mean.backward()
    entries = torch.cat([torch.arange(3.0 * r) for r in range(4)])
    entries = entries[entries != 1]
    torch.testing.assert_close(mean.detach(), entries.mean())
    torch.testing.assert_close(x.grad, mask * 4.0 / len(entries))
    assert weight.grad is not None
    grad = weight.grad.clone()
    dist.all_reduce(grad)
    torch.testing.assert_close(grad / 4, entries.mean())  # the average of the ranks' gradients
    none = longspan.global_mean(torch.full((2,), torch.nan, requires_grad=True), sp, torch.zeros(2, dtype=torch.bool))
    assert float(none.detach()) == 0
    for wrong, said in (((x.long(), sp), "floating"), ((x, sp, mask.int()), "bool tensor of the shape")):
        with pytest.raises(LongspanError, match=said):
            longspan.global_mean(*wrong)


def test_the_global_mean_of_uneven_shares(pool4: RankPool) -> None:
    pool4.run(_global_mean)


class _Penalized(transformers.Trainer):  # type: ignore[misc]
    """Adds a penalty to the model's loss, or to that of the Trainer."""

    calls_trainer = False

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        if self.calls_trainer:
            return super().compute_loss(model, inputs, False, num_items_in_batch) + _penalty(self.model)
        return model(**inputs).loss + _penalty(self.model)


class _PenalizedTrainer(_Penalized):
    calls_trainer = True


def _logged(cls: Any, out: Path, rows: int, **sharding: Any) -> tuple[float, float]:
    quiet()
    args = arguments(out, max_steps=1, per_device_train_batch_size=rows)
    trainer = cls(build("Llama"), args, collate, Samples(64, 1), **sharding)
    trainer.train()
    first = trainer.state.log_history[0]
    return first["loss"], first["grad_norm"]


def _logged_on_mesh(cls: Any, mesh: dict[str, int], out: Path) -> tuple[float, float]:
    with as_launched():
        sp = on_mesh(mesh)
        return _logged(longspan.trainer(cls), out, 4 // sp.data_size, sp=sp)


@pytest.mark.parametrize(("cls", "mesh"), [
    (_Penalized, {"data": 2, "ulysses": 2}), (_PenalizedTrainer, {"data": 2, "ring": 2}),
])  # fmt: skip
def test_a_trainer_that_adds_to_the_loss(pool4: RankPool, tmp_path: Path, cls: Any, mesh: dict[str, int]) -> None:
    expected = _logged(cls, tmp_path / "one", 4)
    for found in pool4.run(_logged_on_mesh, cls, mesh, tmp_path / "ranks"):
        assert found == pytest.approx(expected, rel=2e-4)
