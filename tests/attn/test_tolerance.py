"""The limits of `tests/tolerance.py` find a fault of 1e-4 anywhere."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.attn.attention import CASES, one_device, run
from tests.choose import confirming
from tests.models import batch, build, check_gradients, gradient_excess, truth_of
from tests.oracle import Case, errors, sizes_of
from tests.oracle import truth_of as oracle_of
from tests.tolerance import MARGIN, eps, excess, excess_of_losses, excess_of_rows, units

pytestmark = [pytest.mark.fast, pytest.mark.rounding]

FAULT = 1 + 1e-4


def _slices(case: Case, name: str, x: Tensor) -> Iterator[tuple[str, Any]]:
    """Each head of x `[B, n, H, D]` (or `[H]`), each quarter of its tokens, each document."""
    if x.dim() == 1:
        yield from ((f"head {h}", h) for h in range(len(x)))
        return
    yield from ((f"head {h}", (slice(None), slice(None), h)) for h in range(x.shape[2]))
    quarter = -(-x.shape[1] // 4)
    yield from ((f"block at {i}", (slice(None), slice(i, i + quarter))) for i in range(0, x.shape[1], quarter))
    documents = case.kv_documents if case.kv_documents is not None and name in ("dk", "dv") else case.documents
    if documents is not None:
        ids = torch.tensor(documents)
        ids = ids[case.q_start : case.q_start + case.n] if name in ("out", "dq") else ids
        yield from ((f"document {d}", (slice(None), ids == d)) for d in set(documents) - {-1} if (ids == d).any())


@pytest.mark.parametrize("name", CASES)
def test_a_fault_in_one_head_block_or_document_of_attention(name: str) -> None:
    case = CASES[name]
    found, truth, sizes = run(case, one_device()), oracle_of(case), sizes_of(case)
    planted = 0
    for tensor, right in found.items():
        for where, index in _slices(case, tensor, right):
            if float(truth[tensor][index].norm()) <= eps(torch.float32) * float(sizes[tensor][index].norm()):
                continue  # zero up to rounding
            wrong = right.clone()
            wrong[index] *= FAULT
            planted += 1
            assert errors(case, {tensor: wrong})[tensor] > MARGIN, (tensor, where)
    assert planted >= 3


@pytest.mark.parametrize("family", ["Llama", *confirming(["Bert", "Mixtral"])])
def test_a_fault_in_one_head_or_token_of_a_model(family: str) -> None:
    truth = truth_of(build(family), batch())
    found = {name: grad.clone() for name, grad in truth.single.gradients.items()}
    check_gradients(found, truth)
    for name, grad in found.items():
        if name.endswith("key.bias"):
            continue  # softmax cancels it: its gradient is zero up to rounding
        heads = 4 if grad.dim() == 2 and grad.shape[0] % 4 == 0 else 1
        for head in grad.tensor_split(heads):
            original = head.clone()
            head.mul_(FAULT)
            if bool(head.ne(original).any()):
                assert gradient_excess(found, truth)[name] > 1, (name, heads)
            head.copy_(original)
    wrong = truth.single.logits.clone()
    wrong[2, 7] *= FAULT
    assert excess_of_rows(wrong, truth.single.logits, truth.exact.logits) > 1
    assert excess(truth.single.loss * FAULT, truth.single.loss, truth.exact.loss) > 1
    losses = {1: truth.single.loss}
    assert excess_of_losses({1: losses[1] * FAULT}, losses, {1: truth.exact.loss}) > 1


def test_nonfinite_values_and_errors_of_zeros_exceed_every_limit() -> None:
    one, zero = torch.ones(2, 3), torch.zeros(2, 3)
    for bad in (torch.nan, torch.inf):
        wrong = one.clone()
        wrong[1, 2] = bad
        assert units(wrong, one, one, torch.float32) == torch.inf
        assert excess(wrong, one, one) == torch.inf
        assert excess_of_rows(wrong, one, one) == torch.inf
    assert units(zero, zero, zero, torch.float32) == 0.0 == excess(zero, zero, zero)
    assert units(zero + 1e-30, zero, zero, torch.float32) == torch.inf == excess(zero + 1e-30, zero, zero)


def test_the_limit_of_cancelling_terms_is_that_of_the_terms() -> None:
    """A softmax over one key: dq and dk are zero, and each is a difference of two equal numbers."""
    case = CASES["window of one"]
    sizes, truth = sizes_of(case), oracle_of(case)
    for name in ("dq", "dk"):
        rounding = eps(torch.float32) * sizes[name]
        assert float(truth[name].norm()) < 1e-9 * float(rounding.norm())
        assert errors(case, {name: rounding})[name] <= MARGIN
        assert errors(case, {name: 10 * rounding})[name] > MARGIN
