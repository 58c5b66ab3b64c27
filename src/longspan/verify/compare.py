"""How far a sharded run is from a reference, and whether that is more than rounding.

The measure everywhere is the relative error `||a - b|| / ||b||` (2-norm, accumulated in fp64), where `b`
is a reference computed in a wider dtype. An error alone says little: in bf16 a correct gradient is off by a
percent. So the same is measured for the *unsharded* run in the sharded run's own dtype, and the sharded run
may be no worse than `FACTOR` times that plus `floor` (see `Criterion`).
"""

from __future__ import annotations

import functools
import math
import operator
import re
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

FACTOR = 4.0
"""How many times the unsharded run's rounding error a correct sharded run may have.

The sharded run rounds as often as the unsharded one, but elsewhere: partial sums over ranks instead of one long sum,
other shapes of matrix products. Measured: 13,752 comparisons of Llama (twice), Qwen2, Qwen3, Mistral, Phi-3, OLMo-2 and
GPT-NeoX (3 layers, width 64, 4 ranks with FSDP, 6 seeds, fp32 and bf16) gave 99 % below 1.6 and 2.8 at most, on the 16
numbers of a cut `k_norm`. Faults in fp32 are hundreds to millions of times the noise.
"""

NUDGES = 2
"""How many more unsharded runs tell how large rounding in fp32 is.

One run is one draw: where a single number near the end of a model (a norm's statistics of one token) makes most of the
error of a gradient, that run may have it right by luck, and its error is then no measure of another's. So it is run
again with weights that differ in their last place, about as one more rounding of each would make them.
"""

FEW = 64
"""Numbers below which the error of a tensor may be small by luck; of more, its norm is never half of what is usual."""

UNIT_ROUNDOFF = {"fp32": 2.0**-24, "bf16": 2.0**-8}

SHARPNESS = 1e-4
"""The relative fault that an fp32 comparison must be able to see.

The limit follows the rounding of the unsharded run, so it is only as small as the machine's arithmetic is good. Where
"fp32" products are computed in bf16 or TF32, by a setting or a library's default, rounding is a thousand times that of
fp32, and a comparison would pass faults of that size.
"""

HALF_STEP = {"int8": 4 / 254, "fp8": 1 / 16}
"""How far a compressed exchange moves a number, relative to its vector: half a step of the code. Of int8 that is 1/254
of the largest number, which is taken to be four times the typical one."""

ROUNDINGS = 8
"""Per layer, of a compressed exchange: q, k, v and the output, and their gradients."""

_CHUNK_ELEMENTS = 1 << 24  # of the reference, sent at a time: 128 MiB in fp64, twice (reference and unsharded)

_GROUPS: tuple[tuple[str, str], ...] = (
    # First match wins, so the order matters: "embed_out" is a head, "query_key_value" is not a query alone.
    ("norms", r"norm|(^|[._])ln(_|\d|\.)"),
    ("lm head", r"(^|\.)(lm_head|embed_out|output)\."),
    ("embeddings", r"embed|wte|wpe"),
    ("attention qkv", r"qkv|query_key_value|c_attn"),
    ("attention q", r"q_proj|\.q_[ab]_|\.(wq|query)\."),
    ("attention k", r"k_proj|\.(wk|key)\."),
    ("attention v", r"v_proj|\.(wv|value)\."),
    ("attention o", r"(attn|attention)\.(o_proj|out_proj|dense|c_proj|wo)"),
    ("mlp", r"mlp|ffn|feed_forward|expert|fc\d|gate|up_proj|down_proj|dense_h_to_4h|dense_4h_to_h"),
)

GROUP_ORDER = (
    "loss",
    "logits",
    "embeddings",
    *("attention qkv", "attention q", "attention k", "attention v", "attention o"),
    *("mlp", "norms", "lm head", "other"),
)


def group_of(name: str) -> str:
    """The kind of parameter `name` (as in `named_parameters()`) is: `"attention k"`, `"norms"`...

    A name that no rule knows is in the group `"other"`, so that no parameter is left out.
    """
    return next((group for group, pattern in _GROUPS if re.search(pattern, name)), "other")


def layer_of(name: str) -> int | None:
    """The decoder layer of parameter `name`: the first number among its dotted parts, or `None`."""
    return next((int(part) for part in name.split(".") if part.isdigit()), None)


@dataclass(frozen=True)
class Criterion:
    """When an error is a fault: `sharded > factor * unsharded + floor`, in relative errors.

    A slice of sixteen numbers may be right by luck, or small: `unsharded` is the unsharded run's error on the same
    slice, or what it would be if the noise in the whole tensor were spread evenly, whichever is larger. `floor` is
    likewise relative to the slice, or to the slice that an evenly spread tensor would have.

    Some gradients are zero but for rounding, because their terms cancel: those of a bias of keys, which a softmax does
    not see, or of queries and keys where each token attends to itself alone. An error relative to such a number says
    nothing. What is smaller than `floor` times the gradients of its layer is therefore measured against those: errors
    and the floor are relative to a slice of as many numbers of their typical size (the median of their root mean
    squares). Likewise a slice that is as small beside the rest of its tensor.

    In fp32 `unsharded` is the largest error, number by number, of the unsharded run and of `NUDGES` more whose weights
    were each rounded once more.

    A tensor of fewer than `FEW` numbers may be right by luck as a whole: its `unsharded` is at least the relative error
    that nine tenths of the gradients stay below.
    """

    factor: float
    floor: float

    def lossy(self, code: str, layers: int) -> Criterion:
        """The criterion where the exchange is compressed: as much more as independent half steps add up to, the root of
        their number. An estimate, which tells a coarse code from a fault; it cannot show small ones.
        """
        return Criterion(self.factor, self.floor + HALF_STEP[code] * math.sqrt(ROUNDINGS * max(1, layers)))

    @classmethod
    def of(cls, dtype: Literal["fp32", "bf16"], reference: Literal["fp64", "fp32"]) -> Criterion:
        """The criterion for a run in `dtype` measured against `reference`.

        The floor is for quantities the unsharded run has right by luck (a loss is one number). fp32: 8 unit
        roundoffs, as the sums over tokens themselves are rounded at each step. bf16: 1, as only what is
        stored is rounded, sums are kept in fp32. fp32 against fp32 has no noise to compare with (the
        unsharded run IS the reference), so the floor is fixed at 512 unit roundoffs, 3e-5.
        """
        steps = 1 if dtype == "bf16" else 8 if reference == "fp64" else 512
        return cls(FACTOR, steps * UNIT_ROUNDOFF[dtype])


@dataclass(frozen=True)
class Sums:
    """Squared norms over one rank's slice of one tensor, its largest absolute error, and how many numbers it has.

    `worst_row_*` are the largest relative errors of a single row (for logits a row is a token), and
    `worst_row` the sharded run's one, or -1 when the slice is empty.
    """

    sharded: float = 0.0
    unsharded: float = 0.0
    reference: float = 0.0
    elements: int = 0
    max_abs: float = 0.0
    worst_row: int = -1
    worst_row_sharded: float = 0.0
    worst_row_unsharded: float = 0.0

    def __add__(self, other: Sums) -> Sums:
        worst = max((self, other), key=lambda sums: (sums.worst_row >= 0, _nan_as_inf(sums.worst_row_sharded)))
        return Sums(
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
        """Relative error of the sharded run."""
        return relative(self.sharded, self.reference)

    @property
    def unsharded_error(self) -> float:
        """Relative error of the unsharded run in the same dtype."""
        return relative(self.unsharded, self.reference)


def relative(error2: float, reference2: float) -> float:
    """`sqrt(error2 / reference2)`; 0 when both are 0, infinite when only the reference is."""
    if reference2 == 0.0:
        return 0.0 if error2 == 0.0 else math.inf
    return math.sqrt(error2 / reference2) if error2 >= 0.0 else math.nan


def _max(a: float, b: float) -> float:
    return math.nan if math.isnan(a) or math.isnan(b) else max(a, b)


def _nan_as_inf(value: float) -> float:
    return math.inf if math.isnan(value) else value


@dataclass(frozen=True)
class Part:
    """What one rank holds of a tensor: `values[i]` is row `rows[i]` of the whole (rows are dim 0), or what `rest` takes
    of the dimensions after it.
    """

    rows: Tensor  # int64 [n], rising
    values: Tensor  # [n, ...]
    rest: tuple[slice, ...] = ()


def compare_rows(part: Part, start: int, reference: Tensor, unsharded: Tensor) -> Sums:
    """Compare the rows of `part` that lie in `[start, start + len(reference))`.

    `reference` and `unsharded` are `[rows, ...]`, that piece of the whole tensor in both unsharded runs.
    """
    held = (part.rows >= start) & (part.rows < start + len(reference))
    if not bool(held.any()):
        return Sums()
    rows, reference, unsharded = part.rows[held], reference[:, *part.rest], unsharded[:, *part.rest]
    want = reference[rows - start].double().reshape(rows.numel(), -1)
    apart = part.values[held].double().reshape(rows.numel(), -1) - want
    noise = unsharded[rows - start].double().reshape(rows.numel(), -1) - want
    want2, apart2, noise2 = (x.square().sum(1) for x in (want, apart, noise))
    # A row that should be zero and is not is infinitely wrong; one that is zero in both is right (0/0 -> 0).
    apart_row = torch.where(apart2 == 0, 0.0, (apart2 / want2).sqrt())
    noise_row = torch.where(noise2 == 0, 0.0, (noise2 / want2).sqrt())
    worst = int(apart_row.nan_to_num(nan=math.inf).argmax())
    return Sums(
        float(apart2.sum()),
        float(noise2.sum()),
        float(want2.sum()),
        want.numel(),
        float(apart.abs().max()),
        int(rows[worst]),
        float(apart_row[worst]),
        float(noise_row.max()),
    )


def row_pieces(shape: Sequence[int], elements: int = _CHUNK_ELEMENTS) -> Iterator[tuple[int, int]]:
    """Cut dim 0 of `shape` into `(start, stop)` pieces of at most `elements` numbers (at least one row)."""
    per_row = math.prod(shape[1:])
    step = max(1, elements // max(1, per_row))
    for start in range(0, shape[0], step):
        yield start, min(start + step, shape[0])


@dataclass(frozen=True)
class Check:
    """One tensor compared, on every rank.

    Attributes:
        name: `"loss"`, `"logits"`, `"logits, worst token"` or the parameter whose gradient it is.
        group: its line in the table.
        layer: decoder layer, or `None`.
        sharded: relative error of the sharded run, per rank.
        unsharded: relative error of the unsharded run in the same dtype on the same slice, per rank.
        limit: the largest `sharded` that counts as rounding, per rank.
        max_abs: largest absolute error of the sharded run, per rank.
        worst_row: per rank the row (of logits: the token, `batch_row * tokens + position`) that is most wrong.
    """

    name: str
    group: str
    layer: int | None
    sharded: tuple[float, ...]
    unsharded: tuple[float, ...]
    limit: tuple[float, ...]
    max_abs: tuple[float, ...]
    worst_row: tuple[int, ...]

    def passed_on(self, rank: int) -> bool:
        """Whether the error on `rank` is finite and within its limit."""
        return math.isfinite(self.sharded[rank]) and self.sharded[rank] <= self.limit[rank]

    @property
    def passed(self) -> bool:
        """Whether it passed on every rank."""
        return all(self.passed_on(rank) for rank in range(len(self.sharded)))

    def severity(self, rank: int) -> float:
        """How many times its limit the error on `rank` is; infinite for what is not finite."""
        return _nan_as_inf(self.sharded[rank] / self.limit[rank]) if math.isfinite(self.sharded[rank]) else math.inf

    @property
    def worst_rank(self) -> int:
        """The rank where the error is largest in units of its limit."""
        return max(range(len(self.sharded)), key=self.severity)


def judge(sums: dict[str, list[Sums]], criterion: Criterion) -> tuple[Check, ...]:
    """Turn the measured `sums` (tensor name to one `Sums` per rank) into checks with limits.

    `"logits"` also yields `"logits, worst token"`: one token wrong among thousands hardly moves the norm
    of them all.
    """
    checks = []
    totals = {name: functools.reduce(operator.add, per_rank) for name, per_rank in sums.items()}
    typical, usual = _typical_squares(totals), _usual_noise(totals)
    for name, per_rank in sums.items():
        group = name if name in ("loss", "logits") else group_of(name)
        whole = totals[name]
        sizes = [_size2(s, whole, typical.get(layer_of(name), 0.0), criterion) for s in per_rank]
        errors, noise = (
            [relative(error, size) for error, size in zip(squares, sizes, strict=True)]
            for squares in ([s.sharded for s in per_rank], [s.unsharded for s in per_rank])
        )
        luck = usual if group not in ("loss", "logits") and whole.elements < FEW else 0.0
        limits = tuple(_limit(s, whole, size, criterion, luck) for s, size in zip(per_rank, sizes, strict=True))
        checks.append(_check(name, group, errors, noise, limits, per_rank))
        if name == "logits":
            errors, noise = [s.worst_row_sharded for s in per_rank], [s.worst_row_unsharded for s in per_rank]
            limits = (criterion.factor * whole.worst_row_unsharded + criterion.floor,) * len(noise)
            checks.append(_check("logits, worst token", group, errors, noise, limits, per_rank))
    return tuple(checks)


def unsharp(checks: Iterable[Check]) -> float | None:
    """The median limit of the gradients, where that is too wide for a fault of `SHARPNESS` in most of them; or None."""
    limits = [max(check.limit) for check in checks if check.group not in ("loss", "logits")]
    median = statistics.median(limits) if limits else 0.0
    return median if median > SHARPNESS else None


def _typical_squares(totals: dict[str, Sums]) -> dict[int | None, float]:
    """Per layer (None for what is in no layer), the median over its gradients of the mean square of their numbers."""
    squares: dict[int | None, list[float]] = {}
    for name, whole in totals.items():
        if name not in ("loss", "logits") and whole.elements:
            squares.setdefault(layer_of(name), []).append(whole.reference / whole.elements)
    return {layer: statistics.median(found) for layer, found in squares.items()}


def _size2(part: Sums, whole: Sums, typical: float, criterion: Criterion) -> float:
    """The square of what errors in one rank's `part` are relative to: its reference, or where terms cancel, theirs."""
    terms, even = part.elements * typical, _even_share(part.reference, part, whole, whole.reference)
    negligible = criterion.floor**2
    if even < negligible * terms:
        return terms
    return even if part.reference < negligible * even else part.reference


def _usual_noise(totals: dict[str, Sums]) -> float:
    """The relative error of the unsharded run that nine tenths of the gradients stay below."""
    noise = sorted(whole.unsharded_error for name, whole in totals.items() if name not in ("loss", "logits"))
    found = noise[int(0.9 * (len(noise) - 1))] if noise else 0.0
    return found if math.isfinite(found) else 0.0


def _limit(part: Sums, whole: Sums, size2: float, criterion: Criterion, usual: float) -> float:
    """The largest error of one rank's `part`, relative to `size2`, that still counts as rounding; see `Criterion`."""
    if size2 == 0.0:
        return criterion.floor
    own = math.sqrt(_even_share(part.unsharded, part, whole, whole.unsharded))
    noise = criterion.factor * max(own, usual * math.sqrt(size2))
    floor = criterion.floor * math.sqrt(max(size2, _even_share(part.reference, part, whole, whole.reference)))
    return (noise + floor) / math.sqrt(size2)


def _even_share(mine: float, part: Sums, whole: Sums, all_: float) -> float:
    """`mine`, or what `part` would have of `all_` if that were spread evenly over the tensor, whichever is larger."""
    return max(mine, part.elements / whole.elements * all_) if whole.elements else mine


def _check(
    name: str,
    group: str,
    sharded: Iterable[float],
    unsharded: Iterable[float],
    limits: tuple[float, ...],
    per_rank: list[Sums],
) -> Check:
    return Check(
        name,
        group,
        layer_of(name),
        tuple(sharded),
        tuple(unsharded),
        limits,
        tuple(s.max_abs for s in per_rank),
        tuple(s.worst_row for s in per_rank),
    )
