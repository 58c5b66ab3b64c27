"""How large an error may be: every limit on an error of rounding that a test sets is defined here.

How a CPU rounds depends on its kernels (the width of its vectors, the order of its sums), so a limit that is a number
fitted to one CPU fails on the next. A limit here follows from the arithmetic, in one of two ways.

- **By what is summed** (`units`, at most `MARGIN`). Every quantity is a sum of terms, and its error is in proportion to
  the sum of their absolute values, whatever cancels among them: a gradient may be zero, its terms are not.
  `tests.oracle.sizes` carries these sums through the formulas of attention; errors are counted in eps of them.
- **By one device** (`excess`, at most 1). A whole model has no such formula. But the same model on one device, in the
  same dtype and on the same machine, rounds as often as the sharded one, only elsewhere; how far it is from a run in
  fp64 says how large rounding is. One run may be right by luck: it is made several times, with weights that differ in
  their last place (`tests.models.truth_of`).

Either way a fault of 1e-4 relative in one head, one block or one document is far above the limit, unless what it
changes is zero but for rounding: `tests/test_tolerance.py` plants such faults, on whatever CPU it runs.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

MARGIN = 2.0
"""Largest error of a vector, in eps times the size of what is summed for it.

`tests.oracle.sizes` counts each rounding on the way at a whole eps, where it is half of one at most, and as if all had
one sign; against that, a sum of n terms in the worst order is off by n/2 of them. So an error above 1 is hardly
possible, and 2 leaves room for a longer sum or an exponential that is off by more than half an eps. The largest that
`python -m tests.rounding` printed was 0.74, with AVX-512, AVX2 or neither, and 0.83 with MKL held to SSE2.
"""

FACTOR = 4.0
"""How many times the error of one device a sharded run may have.

Both round equally often, elsewhere. Where one is lucky the other need not be: of the 2,598 gradients that
`python -m tests.rounding` compares, the largest ratio was 0.85 among those of `FEW` numbers and more, with any kernels,
and 0.71 at the hundredth part. Of all, none used more than 0.27 of its limit.
"""

FLOOR = {torch.float64: 4.0, torch.float32: 4.0, torch.bfloat16: 0.5}
"""What is added to that, in eps relative to the quantity itself: for what one device has right by luck.

A loss is a single number, and can be. In fp32 the sums over tokens are rounded as well; in bf16 only what is stored is.
"""

FEW = 64
"""Numbers below which one device's error may be small by luck; of more, its norm is never half of what is usual."""

NOT_MORE = 1.2
"""How many times the error of one device a ring may have in bf16, where blocks are added up in fp32.

It then rounds less often than one device does. The rest is luck, which over the thousands of numbers in a norm is
about one part in a hundred.
"""


def eps(dtype: torch.dtype) -> float:
    """The distance from 1 to the next number."""
    return torch.finfo(dtype).eps


def units(found: Tensor, truth: Tensor, size: Tensor, dtype: torch.dtype) -> float:
    """The largest error of a vector along the last dim (of a number, where there is one dim), in eps of its size.

    Args:
        found: what is tested.
        truth: in fp64, of the same shape.
        size: for each number the sum of the absolute values of its terms, of the same shape.
        dtype: that `found` was computed in.

    Returns:
        At most `MARGIN` for what is right; infinite where a number without terms is not exactly 0, or is not finite.
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
    """The error of `found` in units of the largest one that is rounding, in the 2-norm of the whole tensor.

    Args:
        found: of the sharded run.
        single: the same of one device, in the same dtype.
        exact: the same of one device, in fp64.
        rms: size of a number in comparable tensors. Where `exact` is zero but for rounding (the bias of keys: a softmax
            does not see it), the floor is relative to this instead.
        usual: one device's relative error in comparable tensors, for one of fewer than `FEW` numbers.
        dtype: of the computation; by default that of `single`, fp32 if it is a plain number.

    Returns:
        At most 1 for what is right; infinite for what is not finite.
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
    """`excess` of the worst row (the last dim is within a row): one token that is wrong is not lost among many.

    The limit is that of the row in which one device is worst: a single row can be right by luck.
    """
    exact = exact.double()
    apart, noise = ((x.detach().double() - exact).norm(dim=-1) / exact.norm(dim=-1) for x in (found, single))
    worst = float(apart.nan_to_num(nan=torch.inf).max())
    return worst / (FACTOR * float(noise.max()) + FLOOR[single.dtype] * eps(single.dtype))


def excess_of_losses(found: dict[int, float], single: dict[int, float], exact: dict[int, float]) -> float:
    """`excess` of the losses of a training run, by step.

    An optimizer carries errors on from step to step, so one device's error is the largest of any step.
    """
    assert found.keys() == single.keys() == exact.keys(), (found, single)
    noise = max(abs(single[step] - exact[step]) for step in exact)
    return max(excess(found[step], exact[step] + noise, exact[step]) for step in exact)


def roughly(dtype: torch.dtype) -> float:
    """Relative difference up to which two losses may be the same one, computed in `dtype` and in a wider one.

    For telling that they are of one run at all, not that it is exact: a mean over tokens is off by far less than 4 eps.
    """
    return 4 * eps(dtype)


def last_place(number: str) -> float:
    """The unit of the last place of a printed decimal: two numbers that differ by rounding print no further apart."""
    return 10.0 ** -len(number.partition(".")[2])
