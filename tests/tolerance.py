"""All limits of rounding errors in tests.

A CPU's rounding depends on its kernels (the width of vectors, the order of sums), so a limit fitted to one CPU fails on
the next. The limits follow from the arithmetic, in one of two ways.

- **By the terms** (`units`, at most `MARGIN`). Every quantity is a sum of terms, and its error is proportional to the
  sum of their absolute values, even if they cancel: a gradient may be zero, its terms are not. `tests.oracle.sizes`
  computes these sums for attention; errors are in eps of them.
- **By one device** (`excess`, at most 1). A whole model has no such formula. But the same model on one device, in the
  same dtype and on the same machine, rounds as often as the sharded one, only in other places. Its distance from a run
  in fp64 measures rounding. One run may be right by luck, so there are several, with weights that differ in the last
  place (`tests.models.truth_of`).

Either way a relative fault of 1e-4 in one head, block or document is far above the limit, unless it changes a quantity
that is zero but for rounding: `tests/attn/test_tolerance.py` plants such faults.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

MARGIN = 2.0
"""Largest error of a vector, in eps times the sum of its terms' absolute values.

`tests.oracle.sizes` counts each rounding as one eps, although it is at most half of one, and all with the same sign; on
the other hand, the error of a sum of n terms in the worst order is n/2 of them. So an error above 1 is hardly possible,
and 2 allows for a longer sum, or an exponential with an error above half an eps. The largest that
`python -m tests.attn.rounding` printed was 0.74, with AVX-512, AVX2 or neither, and 0.83 with MKL held to SSE2.
"""

FACTOR = 4.0
"""Largest error of a sharded run, relative to one device's.

Both round equally often, in other places, and one may be lucky: of the 2,598 gradients that
`python -m tests.attn.rounding` compares, the largest ratio was 0.85 among those of `FEW` numbers and more, with any
kernels, and 0.71 at the hundredth part. Of all, none used more than 0.27 of its limit.
"""

FLOOR = {torch.float64: 4.0, torch.float32: 4.0, torch.bfloat16: 0.5}
"""Added to that, in eps relative to the quantity itself, in case one device is right by luck, as a loss can be.

In fp32 the sums over tokens are rounded too; in bf16 only stored values are.
"""

FEW = 64
"""In a tensor of fewer numbers one device's error may be small by luck; in larger ones it is near the usual one."""

NOT_MORE = 1.2
"""Largest error of a ring in bf16, which sums blocks in fp32, relative to one device's.

It rounds less often than one device. The rest is luck, about 1 % in a norm of thousands of numbers.
"""


def eps(dtype: torch.dtype) -> float:
    """Return the distance from 1 to the next number."""
    return torch.finfo(dtype).eps


def units(found: Tensor, truth: Tensor, size: Tensor, dtype: torch.dtype) -> float:
    """Return the largest error of a vector along the last dim (of a number, if there is one dim), in eps of its size.

    Args:
        found: the result.
        truth: in fp64, of the same shape.
        size: for each number the sum of the absolute values of its terms, of the same shape.
        dtype: that `found` was computed in.

    Returns:
        At most `MARGIN` for a right result; infinite if a number without terms is not exactly 0, or is not finite.
    """
    apart, size = (found.detach().double() - truth.double()).abs(), size.double()
    assert apart.shape == size.shape, (apart.shape, size.shape)
    if apart.dim() > 1:
        apart, size = apart.norm(dim=-1), size.norm(dim=-1)
    ratio = torch.where(apart == 0, 0.0, apart / size)
    return float(ratio.nan_to_num(nan=torch.inf).max()) / eps(dtype) if ratio.numel() else 0.0


def excess(
    found: Tensor | float,
    single: Tensor | float,
    exact: Tensor | float,
    rms: float = 0.0,
    usual: float = 0.0,
    dtype: torch.dtype | None = None,
) -> float:
    """Return the error of `found` relative to the limit for rounding, in the 2-norm of the whole tensor.

    Args:
        found: of the sharded run.
        single: the same of one device, in the same dtype.
        exact: the same of one device, in fp64.
        rms: size of a number in comparable tensors. If `exact` is zero but for rounding (the bias of keys, which a
            softmax does not see), the floor is relative to this.
        usual: one device's relative error in comparable tensors, for one of fewer than `FEW` numbers.
        dtype: of the computation; by default that of `single`, fp32 if it is a plain number.

    Returns:
        At most 1 for a right result; infinite if it is not finite.
    """
    dtype = dtype or (single.dtype if isinstance(single, Tensor) else torch.float32)
    truth = torch.as_tensor(exact).detach().double()
    apart, noise = (float((torch.as_tensor(x).detach().double() - truth).norm()) for x in (found, single))
    floor, size, terms = FLOOR[dtype] * eps(dtype), float(truth.norm()), rms * math.sqrt(truth.numel())
    if size < floor * terms:
        size = terms
    if truth.numel() < FEW:
        noise = max(noise, usual * size)
    if apart == 0:
        return 0.0
    limit = FACTOR * noise + floor * size
    return apart / limit if math.isfinite(apart) and limit > 0 else math.inf


def excess_of_rows(found: Tensor, single: Tensor, exact: Tensor) -> float:
    """Return `excess` of the worst row (along the last dim), so that one wrong token is not averaged away.

    The limit is that of one device's worst row, as a single row can be right by luck. 0 without rows.
    """
    if not exact.numel():
        return 0.0
    exact = exact.double()
    apart, noise = ((x.detach().double() - exact).norm(dim=-1) / exact.norm(dim=-1) for x in (found, single))
    worst = float(apart.nan_to_num(nan=torch.inf).max())
    return worst / (FACTOR * float(noise.max()) + FLOOR[single.dtype] * eps(single.dtype))


def excess_of_losses(found: dict[int, float], single: dict[int, float], exact: dict[int, float]) -> float:
    """Return `excess` of the losses of a training run, by step.

    An optimizer propagates errors from step to step, so one device's error is the largest of any step.
    """
    assert found.keys() == single.keys() == exact.keys(), (found, single)
    noise = max(abs(single[step] - exact[step]) for step in exact)
    return max(excess(found[step], exact[step] + noise, exact[step]) for step in exact)


def roughly(dtype: torch.dtype) -> float:
    """Return the relative difference of a loss computed in `dtype` and in a wider one, generously.

    It tests that both are of one run, not that it is exact: the error of a mean over tokens is far below 4 eps.
    """
    return 4 * eps(dtype)


def last_place(number: str) -> float:
    """Return the unit of the last place of a printed decimal, the difference that rounding may cause."""
    return 10.0 ** -len(number.partition(".")[2])
