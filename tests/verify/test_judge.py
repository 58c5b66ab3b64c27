"""Errors, limits and groups of `longspan verify`, on plain tensors."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from longspan.verify.judge import (
    Criterion,
    ErrorSums,
    LocalRows,
    compare_rows,
    group_of,
    judge,
    layer_of,
    relative,
    row_chunks,
)

pytestmark = pytest.mark.fast

FP32 = Criterion.of("fp32", "fp64")


def _whole(x: torch.Tensor) -> LocalRows:
    return LocalRows(torch.arange(len(x)), x, tuple(x.shape))


def _sums(sharded: torch.Tensor, reference: torch.Tensor, unsharded: torch.Tensor | None = None) -> ErrorSums:
    return compare_rows(_whole(sharded), 0, reference, reference if unsharded is None else unsharded)


def test_error_is_the_relative_2_norm_in_fp64() -> None:
    reference = torch.randn(6, 5, dtype=torch.float64)
    sharded, unsharded = reference.float() + 1e-3, reference.float()
    sums = _sums(sharded, reference, unsharded)
    assert relative(sums.sharded, sums.reference) == pytest.approx(
        float((sharded.double() - reference).norm() / reference.norm())
    )
    assert relative(sums.unsharded, sums.reference) == pytest.approx(
        float((unsharded.double() - reference).norm() / reference.norm())
    )


def test_chunks_add_up_to_the_full_tensor() -> None:
    reference = torch.randn(11, 3, 2, dtype=torch.float64)
    unsharded = reference + 1e-4 * torch.randn_like(reference)
    rows = torch.tensor([1, 2, 6, 7, 10])
    part = LocalRows(rows, (reference[rows] + 1e-3 * torch.randn(5, 3, 2)).float(), (11, 3, 2))
    whole = compare_rows(part, 0, reference, unsharded)
    total = ErrorSums()
    for start, stop in row_chunks(reference.shape, elements=20):
        total += compare_rows(part, start, reference[start:stop], unsharded[start:stop])
    for field in ("sharded", "unsharded", "reference", "worst_row_sharded", "worst_row_unsharded"):
        assert getattr(total, field) == pytest.approx(getattr(whole, field))
    assert total.worst_row == whole.worst_row and whole.worst_row in rows


def test_row_chunks_cover_every_row_once_and_are_bounded() -> None:
    for shape, elements in [((10, 4), 12), ((3, 100), 7), ((5,), 2), ((0, 4), 8), ((4, 0), 8)]:
        pieces = list(row_chunks(shape, elements))
        assert [row for start, stop in pieces for row in range(start, stop)] == list(range(shape[0]))
        assert all((stop - start) * math.prod(shape[1:]) <= elements or stop - start == 1 for start, stop in pieces)


def test_the_worst_row_is_the_wrong_token() -> None:
    reference = torch.randn(1000, 8, dtype=torch.float64)
    sharded = reference.clone()
    sharded[417] *= 1.01
    sums = _sums(sharded, reference)
    assert sums.worst_row == 417 and sums.worst_row_sharded == pytest.approx(0.01)
    assert relative(sums.sharded, sums.reference) < 1e-3


def test_a_zero_reference_allows_zero_only() -> None:
    zero = torch.zeros(4, 2, dtype=torch.float64)
    assert _sums(zero, zero).sharded == 0.0
    assert _sums(zero, zero).worst_row_sharded == 0.0
    sums = _sums(zero + 1e-30, zero)
    assert relative(sums.sharded, sums.reference) == math.inf
    assert relative(0.0, 0.0) == relative(0.0, 4.0) == 0.0 and relative(1.0, 4.0) == 0.5


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nan_and_infinity_fail_in_every_chunk(bad: float) -> None:
    reference = torch.randn(9, 2, dtype=torch.float64)
    for row in (0, 4, 8):
        sharded = reference.clone()
        sharded[row] = bad
        total = ErrorSums()
        for start, stop in row_chunks(reference.shape, elements=6):
            total += compare_rows(_whole(sharded), start, reference[start:stop], reference[start:stop])
        logits, worst_token = judge({"logits": [total]}, FP32)
        assert not logits.passed and not worst_token.passed
        assert worst_token.worst_row == (row,)


def test_an_infinite_limit_passes_nothing() -> None:
    """The unsharded run is not finite."""
    reference = torch.ones(2, 2, dtype=torch.float64)
    (check,) = judge({"w": [_sums(reference * math.inf, reference, reference * math.inf)]}, FP32)
    assert not check.passed


def test_the_limit_follows_the_noise_of_the_slice_or_of_the_tensor() -> None:
    loud = ErrorSums(sharded=4.0, unsharded=4.0, reference=1e8, elements=300)
    lucky = ErrorSums(sharded=2.0, unsharded=0.0, reference=1e8, elements=100)
    small = ErrorSums(sharded=2.0, unsharded=0.0, reference=1e4, elements=100)
    none = ErrorSums()
    criterion = Criterion(factor=4.0, floor=1e-5)
    (check,) = judge({"w": [loud, lucky, small, none]}, criterion)
    noise2, even2 = 10 / 50 * 4.0, 10 / 50 * (2e8 + 1e4)  # a fifth of the 500 numbers: of noise, of gradient
    assert check.limit == pytest.approx(
        (
            4 * 2.0 / 1e4 + 1e-5 * math.sqrt(3 * even2 / 1e8),
            4 * math.sqrt(noise2) / 1e4 + 1e-5,
            (4 * math.sqrt(noise2) + 1e-5 * math.sqrt(even2)) / 1e2,
            1e-5,
        )
    )
    assert check.passed and check.sharded[3] == 0.0


def test_errors_of_cancelling_terms_are_relative_to_their_layer() -> None:
    right = ErrorSums(sharded=1e-10, unsharded=1e-10, reference=1e4, elements=100)  # rounding of 1e-7
    layer = {f"layers.0.{name}.weight": [right] for name in "abc"}
    for reference in (0.0, 1e-28):  # zero but for the rounding of fp64
        for unsharded in (0.0, 1e-10):  # the unsharded run may be right by chance
            cancelled = ErrorSums(sharded=1e-10, unsharded=unsharded, reference=reference, elements=100)
            check = judge({**layer, "layers.0.key.bias": [cancelled]}, FP32)[-1]
            assert check.passed and check.sharded == pytest.approx((1e-7,))
            wrong = dataclasses.replace(cancelled, sharded=1e-4)  # 1e-4 of its neighbours
            assert not judge({**layer, "layers.0.key.bias": [wrong]}, FP32)[-1].passed
    small = ErrorSums(sharded=1e-18, unsharded=1e-18, reference=1e-4, elements=100)  # small, but no rounding
    assert judge({**layer, "layers.0.small": [small]}, FP32)[-1].sharded == pytest.approx((1e-7,))


def test_few_numbers_may_be_right_by_chance() -> None:
    usual = {f"layers.0.{name}.weight": [ErrorSums(1e-8, 1e-8, 1e4, 1000)] for name in "abc"}  # rounding of 1e-6
    for elements, passes in ((4, True), (1000, False)):  # a thousand are not
        lucky = ErrorSums(sharded=4e-12, unsharded=4e-14, reference=1.0, elements=elements)
        assert judge({**usual, "layers.0.router.bias": [lucky]}, FP32)[-1].passed is passes
    wrong = ErrorSums(sharded=1e-8, unsharded=4e-14, reference=1.0, elements=4)  # 1e-4
    assert not judge({**usual, "layers.0.router.bias": [wrong]}, FP32)[-1].passed


def test_a_zero_slice_is_relative_to_its_tensor() -> None:
    full, none = ErrorSums(1e-10, 1e-10, 1e4, 100), ErrorSums(1e-10, 0.0, 0.0, 100)
    (check,) = judge({"w": [full, none]}, FP32)
    assert check.passed and check.sharded[1] == pytest.approx(math.sqrt(1e-10 / 5e3))
    (check,) = judge({"w": [full, dataclasses.replace(none, sharded=1e-4)]}, FP32)
    assert not check.passed_on(1)


def test_a_slice_smaller_than_rounding_is_relative_to_its_tensor() -> None:
    """A decay that is 0 but for rounding, on one rank of two."""
    full, small = ErrorSums(1e-4, 1e-4, 1e4, 100), ErrorSums(1e-4, 1e-5, 1e-6, 100)
    (check,) = judge({"w": [full, small]}, FP32)
    assert check.passed and check.sharded[1] == pytest.approx(math.sqrt(1e-4 / 5e3))
    (check,) = judge({"w": [full, dataclasses.replace(small, sharded=1e-2)]}, FP32)
    assert not check.passed_on(1)


def test_the_worst_rank_is_furthest_over_its_limit() -> None:
    fine = ErrorSums(sharded=1.0, unsharded=1.0, reference=1e12, elements=1)
    wrong = ErrorSums(sharded=1e6, unsharded=1.0, reference=1e12, elements=1)
    (check,) = judge({"loss": [fine, wrong, fine]}, FP32)
    assert (check.passed, check.worst_rank) == (False, 1)
    assert [check.passed_on(rank) for rank in range(3)] == [True, False, True]


@pytest.mark.parametrize(
    ("dtype", "reference", "fault"),
    [
        ("fp32", "fp64", 2e-6),
        ("fp32", "fp32", 1e-4),  # the unsharded fp32 run is the reference, without error
        ("bf16", "fp64", 2e-2),
        ("bf16", "fp32", 2e-2),
    ],
)
def test_rounding_passes_and_a_fault_does_not(dtype: Any, reference: Any, fault: float) -> None:
    criterion, precision = Criterion.of(dtype, reference), {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    truth = torch.randn(64, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rounded = truth.to(precision)
    lucky = rounded.double()  # the unsharded run is right by chance
    for unsharded, right in ((rounded, truth), (rounded, lucky)):
        for sharded, passes in ((rounded, True), (rounded.double() * (1 + fault), False)):
            (check,) = judge({"w": [_sums(sharded, right, unsharded)]}, criterion)
            assert check.passed is passes, (check.sharded, check.limit)
    noisy = lucky * (1 + criterion.floor / 2 * torch.randn(64, 16, generator=torch.Generator().manual_seed(1)))
    (check,) = judge({"w": [_sums(noisy, lucky, lucky)]}, criterion)
    assert check.passed


@pytest.mark.parametrize(
    ("name", "group", "layer"),
    [
        ("model.embed_tokens.weight", "embeddings", None),
        ("model.layers.11.self_attn.q_proj.bias", "attention q", 11),
        ("model.layers.0.self_attn.k_proj.weight", "attention k", 0),
        ("gpt_neox.layers.3.attention.query_key_value.bias", "attention qkv", 3),
        ("gpt_neox.layers.3.attention.dense.weight", "attention o", 3),
        ("model.layers.2.self_attn.o_proj.weight", "attention o", 2),
        ("model.layers.2.self_attn.q_norm.weight", "norms", 2),
        ("model.layers.2.post_attention_layernorm.weight", "norms", 2),
        ("gpt_neox.layers.1.mlp.dense_4h_to_h.weight", "mlp", 1),
        ("model.layers.1.mlp.experts.3.down_proj.weight", "mlp", 1),
        ("base_model.model.model.layers.1.self_attn.v_proj.lora_A.default.weight", "attention v", 1),
        ("model.layers.0.linear_attn.in_proj_qkvz.weight", "recurrent", 0),
        ("model.layers.0.mixer.dt_proj.bias", "recurrent", 0),
        ("model.layers.4.mixer.q_proj.weight", "attention q", 4),
        ("model.layers.0.mamba.dt_layernorm.weight", "norms", 0),
        ("embed_out.weight", "lm head", None),
        ("model.something_new", "other", None),
    ],
)
def test_groups_and_layers(name: str, group: str, layer: int | None) -> None:
    assert (group_of(name), layer_of(name)) == (group, layer)
