"""The loss of given logits: the exact mean of the global batch, against torch's own cross entropy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import longspan
from longspan.comm.mesh import MeshGroups
from longspan.core.errors import LongspanError
from longspan.hf.batch.shard import IGNORE
from longspan.losses import cross_entropy as loss_module
from longspan.losses.tile_gradients import TileGradients
from tests.choose import pairwise
from tests.pool import on_ranks
from tests.tolerance import MARGIN, units

pytestmark = [pytest.mark.fast, pytest.mark.rounding]


def _data(dtype: torch.dtype, batch: int = 4, n: int = 12, vocab: int = 33) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(3)
    logits = (4 * torch.randn(batch, n, vocab, generator=g)).to(dtype)
    labels = torch.randint(0, vocab, (batch, n), generator=g)
    labels[0] = IGNORE  # a row without labels
    labels[1, : n // 2] = IGNORE  # a row whose first rank has no labels
    return logits, labels


def _sizes(logits: torch.Tensor, labels: torch.Tensor, items: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sums of absolute terms of the loss and of its gradient, which bound their rounding errors."""
    x, valid = logits.detach().double(), labels != IGNORE
    lse = x.logsumexp(-1, keepdim=True)
    target = F.one_hot(labels.clamp_min(0), x.shape[-1])
    loss = (lse.abs() + (x.abs() * target).sum(-1, keepdim=True))[valid].sum() / items
    grad = ((x - lse).exp() * (1 + x.abs() + lse.abs()) + target) * valid[..., None] / items
    return loss.reshape(1), grad


@pytest.mark.parametrize(("data", "dtype", "items"), pairwise([1, 2, 4], [torch.float32, torch.bfloat16], [None, 100]))
@on_ranks(4)
def test_mean_of_the_global_batch(data: int, dtype: torch.dtype, items: int | None) -> None:
    sp = longspan.SequenceSharding(longspan.init_mesh(data=data, ulysses=dist.get_world_size() // data))
    whole, labels = _data(dtype)
    truth_leaf = whole.double().requires_grad_()
    truth = F.cross_entropy(truth_leaf.flatten(0, 1), labels.flatten(), reduction="sum")
    divisor = items or int((labels != IGNORE).sum())
    truth = truth / divisor
    truth.backward()
    assert truth_leaf.grad is not None
    rows = slice(sp.data_rank * 4 // data, (sp.data_rank + 1) * 4 // data)
    leaf = whole.clone().requires_grad_()
    loss = longspan.causal_lm_loss(sp.shard(leaf[rows]), sp.shard(labels[rows], pad_value=IGNORE), sp, items)
    loss.backward()
    assert leaf.grad is not None
    of_loss, of_grad = _sizes(whole, labels, divisor)
    # The sum is in fp32 whatever the logits are; each logit's gradient is rounded to their dtype.
    assert units(loss.reshape(1), truth.detach().reshape(1), of_loss, torch.float32) <= MARGIN
    grad = leaf.grad.double()
    dist.all_reduce(grad)  # every rank's part, averaged
    grad /= dist.get_world_size()
    assert units(grad, truth_leaf.grad, of_grad, dtype) <= MARGIN


@pytest.mark.parametrize("tile", [1, 100, 1 << 24])
def test_the_size_of_a_tile_changes_nothing(monkeypatch: pytest.MonkeyPatch, tile: int) -> None:
    monkeypatch.setattr(loss_module, "LOSS_TILE", (tile, tile))
    sp = longspan.SequenceSharding(MeshGroups("cpu"))
    logits, labels = _data(torch.float64)
    logits.requires_grad_()
    truth = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    (expected,) = torch.autograd.grad(truth, logits)
    loss = longspan.causal_lm_loss(logits, labels, sp)
    (grad,) = torch.autograd.grad(loss, logits)
    of_loss, of_grad = _sizes(logits, labels, int((labels != IGNORE).sum()))
    assert units(loss.reshape(1), truth.detach().reshape(1), of_loss, torch.float64) <= MARGIN
    assert units(grad, expected, of_grad, torch.float64) <= MARGIN


def test_the_loss_without_labels_is_zero() -> None:
    sp = longspan.SequenceSharding(MeshGroups("cpu"))
    logits = torch.randn(1, 3, 5, requires_grad=True)
    loss = longspan.causal_lm_loss(logits, torch.full((1, 3), IGNORE), sp)
    loss.backward()
    assert loss.item() == 0 and logits.grad is not None and not logits.grad.any()


def test_shapes_must_match() -> None:
    sp: Any = longspan.SequenceSharding(MeshGroups("cpu"))
    with pytest.raises(LongspanError, match=r"logits of shape \(1, 3, 5\) do not belong to labels of shape \(1, 4\)"):
        longspan.causal_lm_loss(torch.zeros(1, 3, 5), torch.zeros(1, 4, dtype=torch.int64), sp)


def test_parameters_that_share_a_gradient_have_their_own_sums() -> None:
    """Autograd returns one tensor as the gradient of both inputs of an addition, and the sums are changed in place."""
    hidden, weight, delta = torch.randn(6, 4), torch.randn(5, 4), torch.randn(5, 4)
    gradients = TileGradients(hidden, {"weight": weight, "delta": delta}, (True, True, True))
    for start in range(0, 6, 2):
        span = slice(start, start + 2)
        x = gradients.leaf(hidden[span])
        out = F.linear(x, gradients.stand_ins["weight"] + gradients.stand_ins["delta"])
        gradients.add(span, x, [out], [torch.ones_like(out)])
    of_weight, of_delta = gradients.of_parameters()
    assert of_weight is not None and of_delta is not None
    assert of_weight.untyped_storage().data_ptr() != of_delta.untyped_storage().data_ptr()
    truth = hidden.sum(0).expand(5, 4)
    torch.testing.assert_close(of_weight, truth)
    torch.testing.assert_close(of_delta, truth)
