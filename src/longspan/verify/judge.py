"""How far a sharded run is from a reference, and whether that is more than rounding.

The measure is the relative error `||a - b|| / ||b||` (2-norm, accumulated in fp64); `b` is a reference computed in a
wider dtype. An error alone says little: in bf16 a correct gradient is off by a percent. So the *unsharded* run in the
same dtype is measured too, and the sharded run may be no worse than `FACTOR` times that plus `floor` (`Criterion`).
"""

from __future__ import annotations

import functools
import math
import operator
import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

FACTOR = 4.0
"""The most that a correct sharded run's error may be, in units of the unsharded run's.

It rounds as often, but elsewhere. The largest of 13,752 measured comparisons (7 families, fp32 and bf16) was 2.8.
Faults in fp32 are hundreds to millions of times the noise.
"""

NUDGES = 2
"""Additional unsharded fp32 runs, with each weight changed in its last place, which is like one more rounding.

One run is one sample: it may have right by chance the one number that causes most of a gradient's error.
"""

FEW = 64
"""A tensor of fewer numbers may have a small error by chance."""

UNIT_ROUNDOFF = {"fp32": 2.0**-24, "bf16": 2.0**-8}

COARSE = 2.0**-20
"""The relative error from which a product of 256 terms is not in fp32, which has 2e-7; TF32 has 3e-4, bf16 2e-3.

The limit follows the rounding of the unsharded run, and with such products would pass faults of their size.
"""

_GROUPS: tuple[tuple[str, str], ...] = (
    # The first match wins: a tower has layers of its own, "embed_out" is a head, "query_key_value" not a query alone.
    ("projector", r"(^|[._])(merger|projector|connector)(_list)?\."),
    ("vision tower", r"(^|\.)(visual|vision_tower|vision_model)\."),
    ("norms", r"norm|(^|[._])ln(_|\d|\.)"),
    ("lm head", r"(^|\.)(lm_head|embed_out|output)\."),
    ("embeddings", r"embed|wte|wpe"),
    ("recurrent", r"linear_attn|mamba|(^|\.)conv(1d)?\.|A_log|dt_bias|forget_gate|mixer\.(D$|(in|x|dt|out)_proj)"),
    ("attention qkv", r"qkv|query_key_value|c_attn"),
    ("attention q", r"q_proj|\.q_[ab]_|\.(wq|query|to_q)\."),
    ("attention k", r"k_proj|\.(wk|key|to_k)\."),
    ("attention v", r"v_proj|\.(wv|value|to_v)\."),
    ("attention o", r"(attn|attention)\.(o_proj|out_proj|dense|c_proj|wo)|\.to_(add_)?out\."),
    ("mlp", r"mlp|ffn|\.ff(_context)?\.|feed_forward|expert|fc\d|gate|up_proj|down_proj|dense_h_to_4h|dense_4h_to_h"),
)

OUTPUTS = ("loss", "logits", "output")
"""Names that are no gradients. A diffusion transformer has an output instead of logits."""

_CHUNK_ELEMENTS = 1 << 24
"""Elements of the reference that are sent at a time: 128 MiB in fp64, twice (reference and unsharded run)."""


# --- errors


@dataclass(frozen=True)
class ErrorSums:
    """Squared norms of a rank's slice of a tensor: of the errors of both runs, and of the reference. Slices add up."""

    sharded: float = 0.0
    unsharded: float = 0.0
    reference: float = 0.0
    elements: int = 0
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
            worst.worst_row,
            worst.worst_row_sharded,
            _max(self.worst_row_unsharded, other.worst_row_unsharded),
        )


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
        int(rows[worst]),
        float(error_row[worst]),
        float(noise_row.max()),
    )


def product_error(device: torch.device) -> float:
    """Return the relative error of one product of fp32 matrices against fp64, which is large if a setting makes it
    TF32 or bf16.
    """
    draw = torch.Generator().manual_seed(0)
    x, weight = torch.randn(2, 256, 256, generator=draw)
    product = torch.nn.functional.linear(x.to(device), weight.to(device)).cpu()
    exact = x.double() @ weight.double().T
    return float((product - exact).norm() / exact.norm())


def row_chunks(shape: Sequence[int], elements: int = _CHUNK_ELEMENTS) -> Iterator[tuple[int, int]]:
    """Yield `(start, stop)` chunks of dim 0 with at most `elements` numbers, and at least one row."""
    per_row = math.prod(shape[1:])
    step = max(1, elements // max(1, per_row))
    for start in range(0, shape[0], step):
        yield start, min(start + step, shape[0])


# --- their limits


def group_of(name: str) -> str:
    """Return the group of a parameter by its name, such as "attention k" or "norms"; "other" for an unknown name."""
    return next((group for group, pattern in _GROUPS if re.search(pattern, name)), "other")


def layer_of(name: str) -> int | None:
    """Return the layer of a parameter, or of the tower: the first number in its dotted name, or None."""
    return next((int(part) for part in name.split(".") if part.isdigit()), None)


@dataclass(frozen=True)
class Criterion:
    """When an error is a fault: `sharded > factor * unsharded + floor`, in relative errors.

    - A small slice may be right by chance: `unsharded` is the error of the unsharded run on the slice, or the slice's
      share of the full tensor's error spread evenly, whichever is larger. `floor` likewise.
    - Some gradients are zero up to rounding because their terms cancel, such as those of a key bias, which softmax
      ignores. A gradient smaller than `floor` times the gradients of its layer is measured relative to as many numbers
      of their typical size (the median of their root mean squares). So is a slice that is this small within its tensor,
      or smaller than rounding: it is measured relative to as many numbers of the tensor.
    - In fp32, `unsharded` is the elementwise largest error of the unsharded run and `NUDGES` runs with weights changed
      in the last place.
    - A tensor of fewer than `FEW` numbers may be right by chance as a whole: its `unsharded` is at least the relative
      error that 90 % of the gradients stay below.
    """

    factor: float
    floor: float

    @classmethod
    def of(cls, dtype: Literal["fp32", "bf16"], reference: Literal["fp64", "fp32"]) -> Criterion:
        """Return the criterion for a run in `dtype` measured against `reference`.

        The floor is for quantities that the unsharded run has right by chance (a loss is one number). fp32: 8 unit
        roundoffs, as sums over tokens round at each step. bf16: 1, as sums are in fp32 and only results are rounded.
        fp32 against fp32: 512 unit roundoffs (3e-5), as the unsharded run is the reference and shows no noise.
        """
        steps = 1 if dtype == "bf16" else 8 if reference == "fp64" else 512
        return cls(FACTOR, steps * UNIT_ROUNDOFF[dtype])


@dataclass(frozen=True)
class Check:
    """One tensor compared; tuples are by rank, errors relative."""

    name: str  # "loss", "logits", "logits, worst token", or a parameter for its gradient
    group: str  # row of the table
    layer: int | None
    sharded: tuple[float, ...]
    unsharded: tuple[float, ...]  # of the run in the same dtype, on the same slice
    limit: tuple[float, ...]  # largest `sharded` that counts as rounding
    worst_row: tuple[int, ...]  # for logits the token `batch_row * tokens + position`

    def passed_on(self, rank: int) -> bool:
        """Whether the error on `rank` is finite and within its limit."""
        return math.isfinite(self.sharded[rank]) and self.sharded[rank] <= self.limit[rank]

    @property
    def passed(self) -> bool:
        return all(self.passed_on(rank) for rank in range(len(self.sharded)))

    def severity(self, rank: int) -> float:
        """Return the error on `rank` in units of its limit; infinity for an error that is not finite."""
        return nan_as_inf(self.sharded[rank] / self.limit[rank]) if math.isfinite(self.sharded[rank]) else math.inf

    @property
    def worst_rank(self) -> int:
        return max(range(len(self.sharded)), key=self.severity)


def judge(sums: dict[str, list[ErrorSums]], criterion: Criterion) -> tuple[Check, ...]:
    """Return a check for every tensor, from its sums by rank.

    Outputs are first. "logits" also yields "logits, worst token", as one wrong token among thousands hardly changes
    their norm.
    """
    checks = []
    totals = {name: functools.reduce(operator.add, per_rank) for name, per_rank in sums.items()}
    typical, usual = _typical_squares(totals), _usual_noise(totals)
    for name, per_rank in sorted(sums.items(), key=lambda named: named[0] not in OUTPUTS):
        group, layer = name if name in OUTPUTS else group_of(name), layer_of(name)
        total = totals[name]
        worst_row = tuple(s.worst_row for s in per_rank)
        sizes = [_scale2(s, total, typical.get(_place(name), 0.0), criterion) for s in per_rank]
        errors, noise = (
            tuple(relative(error, size) for error, size in zip(squares, sizes, strict=True))
            for squares in ([s.sharded for s in per_rank], [s.unsharded for s in per_rank])
        )
        least = usual if group not in OUTPUTS and total.elements < FEW else 0.0
        limits = tuple(_limit(s, total, size, criterion, least) for s, size in zip(per_rank, sizes, strict=True))
        checks.append(Check(name, group, layer, errors, noise, limits, worst_row))
        if name == "logits":
            errors = tuple(s.worst_row_sharded for s in per_rank)
            noise = tuple(s.worst_row_unsharded for s in per_rank)
            limits = (criterion.factor * total.worst_row_unsharded + criterion.floor,) * len(per_rank)
            checks.append(Check("logits, worst token", group, layer, errors, noise, limits, worst_row))
    return tuple(checks)


def _place(name: str) -> tuple[bool, int | None]:
    """Return whether a parameter belongs to a vision tower, and its layer."""
    return group_of(name) in ("vision tower", "projector"), layer_of(name)


def _typical_squares(totals: dict[str, ErrorSums]) -> dict[tuple[bool, int | None], float]:
    """Return by layer the median of its gradients' mean squares."""
    squares: dict[tuple[bool, int | None], list[float]] = {}
    for name, total in totals.items():
        if name not in OUTPUTS and total.elements:
            squares.setdefault(_place(name), []).append(total.reference / total.elements)
    return {place: statistics.median(of_place) for place, of_place in squares.items()}


def _scale2(part: ErrorSums, total: ErrorSums, typical: float, criterion: Criterion) -> float:
    """Return the squared norm that a slice's errors are relative to: its own, or a typical one if terms cancel."""
    terms, even = part.elements * typical, _even_share(part.reference, part, total, total.reference)
    negligible = criterion.floor**2
    if even < negligible * terms:
        return terms
    noise = _even_share(part.unsharded, part, total, total.unsharded)
    return even if part.reference < max(negligible * even, noise) else part.reference


def _usual_noise(totals: dict[str, ErrorSums]) -> float:
    """Return the relative error of the unsharded run that 90 % of the gradients stay below."""
    noise = sorted(relative(total.unsharded, total.reference) for name, total in totals.items() if name not in OUTPUTS)
    usual = noise[int(0.9 * (len(noise) - 1))] if noise else 0.0
    return usual if math.isfinite(usual) else 0.0


def _limit(part: ErrorSums, total: ErrorSums, size2: float, criterion: Criterion, usual: float) -> float:
    """Return the largest error of a slice, relative to `size2`, that counts as rounding; see `Criterion`."""
    if size2 == 0.0:
        return criterion.floor
    own = math.sqrt(_even_share(part.unsharded, part, total, total.unsharded))
    noise = criterion.factor * max(own, usual * math.sqrt(size2))
    floor = criterion.floor * math.sqrt(max(size2, _even_share(part.reference, part, total, total.reference)))
    return (noise + floor) / math.sqrt(size2)


def _even_share(mine: float, part: ErrorSums, total: ErrorSums, all_: float) -> float:
    """Return `mine`, or the slice's share of `all_` spread evenly over the tensor, whichever is larger."""
    return max(mine, part.elements / total.elements * all_) if total.elements else mine
