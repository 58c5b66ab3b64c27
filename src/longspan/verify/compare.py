"""How far a sharded run is from a reference.

The measure is the relative error `||a - b|| / ||b||` (2-norm, accumulated in fp64); `b` is a reference computed in a
wider dtype. `longspan.verify.judge` decides what error counts as rounding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_CHUNK_ELEMENTS = 1 << 24
"""Elements of the reference that are sent at a time: 128 MiB in fp64, twice (reference and unsharded run)."""


@dataclass(frozen=True)
class ErrorSums:
    """Squared norms of a rank's slice of a tensor: of the errors of both runs, and of the reference. Slices add up."""

    sharded: float = 0.0
    unsharded: float = 0.0
    reference: float = 0.0
    elements: int = 0
    max_abs: float = 0.0  # of the sharded run
    worst_row: int = -1  # with the largest relative error of the sharded run; a row of logits is a token
    worst_row_sharded: float = 0.0  # that error
    worst_row_unsharded: float = 0.0  # the largest of the unsharded run

    def __add__(self, other: ErrorSums) -> ErrorSums:
        worst = max((self, other), key=lambda sums: (sums.worst_row >= 0, nan_as_inf(sums.worst_row_sharded)))
        return ErrorSums(
            self.sharded + other.sharded,
            self.unsharded + other.unsharded,
            self.reference + other.reference,
            self.elements + other.elements,
            _max(self.max_abs, other.max_abs),
            worst.worst_row,
            worst.worst_row_sharded,
            _max(self.worst_row_unsharded, other.worst_row_unsharded),
        )

    @property
    def sharded_error(self) -> float:
        return relative(self.sharded, self.reference)

    @property
    def unsharded_error(self) -> float:
        return relative(self.unsharded, self.reference)


def relative(error2: float, reference2: float) -> float:
    """Return `sqrt(error2 / reference2)`; 0 if both are 0, infinity if only the reference is."""
    if reference2 == 0.0:
        return 0.0 if error2 == 0.0 else math.inf
    return math.sqrt(error2 / reference2) if error2 >= 0.0 else math.nan


def _max(a: float, b: float) -> float:
    return math.nan if math.isnan(a) or math.isnan(b) else max(a, b)


def nan_as_inf(value: float) -> float:
    """Return infinity for NaN, which compares with nothing."""
    return math.inf if math.isnan(value) else value


@dataclass(frozen=True)
class LocalRows:
    """The rows of a tensor that one rank holds, or a part of each row."""

    rows: Tensor  # their indices in dim 0 of the full tensor, int64 `[n]`, ascending
    values: Tensor  # `[n, ...]`
    shape: tuple[int, ...]  # of the full tensor
    rest: tuple[slice, ...] = ()  # of the dimensions after the first


def compare_rows(local: LocalRows, start: int, reference: Tensor, unsharded: Tensor) -> ErrorSums:
    """Compare the local rows in `[start, start + len(reference))`.

    `reference` and `unsharded` are these rows of the full tensor, `[rows, ...]`, in the two unsharded runs.
    """
    held = (local.rows >= start) & (local.rows < start + len(reference))
    if not bool(held.any()):
        return ErrorSums()
    rows, reference, unsharded = local.rows[held], reference[:, *local.rest], unsharded[:, *local.rest]
    want = reference[rows - start].double().reshape(rows.numel(), -1)
    error = local.values[held].double().reshape(rows.numel(), -1) - want
    noise = unsharded[rows - start].double().reshape(rows.numel(), -1) - want
    want2, error2, noise2 = (x.square().sum(1) for x in (want, error, noise))
    # A nonzero row whose reference is zero has an infinite error; 0/0 is 0.
    error_row = torch.where(error2 == 0, 0.0, (error2 / want2).sqrt())
    noise_row = torch.where(noise2 == 0, 0.0, (noise2 / want2).sqrt())
    worst = int(error_row.nan_to_num(nan=math.inf).argmax())
    return ErrorSums(
        float(error2.sum()),
        float(noise2.sum()),
        float(want2.sum()),
        want.numel(),
        float(error.abs().max()),
        int(rows[worst]),
        float(error_row[worst]),
        float(noise_row.max()),
    )


def row_chunks(shape: Sequence[int], elements: int = _CHUNK_ELEMENTS) -> Iterator[tuple[int, int]]:
    """Yield `(start, stop)` chunks of dim 0 with at most `elements` numbers, and at least one row."""
    per_row = math.prod(shape[1:])
    step = max(1, elements // max(1, per_row))
    for start in range(0, shape[0], step):
        yield start, min(start + step, shape[0])
