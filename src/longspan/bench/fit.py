"""Fit a latency and a bandwidth to the times of messages. Standard library only."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

_HEADROOM = 10.0
"""The most that the fitted bandwidth may exceed the best measured throughput.

If time hardly grows with the size, the data do not determine a bandwidth; an infinite one would make larger messages
free.
"""


@dataclass(frozen=True)
class Fit:
    """`seconds = latency + sent / bandwidth`.

    Attributes:
        latency: seconds, at least 0.
        bandwidth: bytes per second that each rank sends; positive and finite.
        residual: median over the sizes of |fitted - measured| / measured.
        points: the fitted data, (bytes sent, seconds), by ascending size.
        hidden: share of the seconds that overlaps with computing; None if not measured.
    """

    latency: float
    bandwidth: float
    residual: float
    points: tuple[tuple[float, float], ...] = ()
    hidden: float | None = None

    def seconds(self, sent: float) -> float:
        """Return the fitted time of a collective in which every rank sends `sent` bytes."""
        return self.latency + sent / self.bandwidth


def bytes_sent(op: str, size: float, ranks: int) -> float:
    """Return the bytes that each rank sends in a collective whose whole tensor has `size` bytes.

    The whole tensor is the result of an all_gather and the input of a reduce_scatter; an all_reduce is both in turn;
    p2p shifts it to the next rank. Counted is the least that an algorithm must send: what a library sends in addition
    lowers the bandwidth.
    """
    if op == "p2p":
        return size
    return size * (ranks - 1) / ranks * (2 if op == "all_reduce" else 1)


def size_that_sends(op: str, sent: float, ranks: int) -> float:
    """Return the size of the whole tensor of which each rank sends `sent` bytes: the inverse of `bytes_sent`."""
    return sent / bytes_sent(op, 1.0, ranks)


def fit(sent: Sequence[float], seconds: Sequence[float]) -> Fit:
    """Fit latency and bandwidth by non-negative least squares of the relative errors.

    Absolute errors would let the largest message decide, and its noise would determine the latency.

    Args:
        sent: bytes that every rank sends, positive, at least two distinct values.
        seconds: measured times, positive.
    """
    # Seconds per byte that the link needs at least. Fit the rest, which may be 0.
    least = min(t / x for x, t in zip(sent, seconds, strict=True)) / _HEADROOM
    beyond = [t - least * x for x, t in zip(sent, seconds, strict=True)]
    latency, per_byte = _nonnegative_line(sent, beyond, [t**-2 for t in seconds])
    line = Fit(latency, 1 / (least + per_byte), 0.0)
    errors = [abs(line.seconds(x) - t) / t for x, t in zip(sent, seconds, strict=True)]
    points = tuple(sorted(zip(map(float, sent), seconds, strict=True)))
    return Fit(line.latency, line.bandwidth, statistics.median(errors), points)


def _nonnegative_line(xs: Sequence[float], ys: Sequence[float], weights: Sequence[float]) -> tuple[float, float]:
    """Return a, b >= 0 that minimize `sum(w * (a + b * x - y)**2)`.

    The sum is convex: if its free minimum is not allowed, the constrained one has a = 0 or b = 0.
    """
    terms = list(zip(xs, ys, weights, strict=True))
    s = sum(weights)
    sx, sy = sum(w * x for x, _, w in terms), sum(w * y for _, y, w in terms)
    sxx, sxy = sum(w * x * x for x, _, w in terms), sum(w * x * y for x, y, w in terms)
    determinant = s * sxx - sx * sx
    if determinant > 0:
        a, b = (sxx * sy - sx * sxy) / determinant, (s * sxy - sx * sy) / determinant
        if a >= 0 and b >= 0:
            return a, b
    border = ((0.0, max(0.0, sxy / sxx)), (max(0.0, sy / s), 0.0))
    return min(border, key=lambda line: sum(w * (line[0] + line[1] * x - y) ** 2 for x, y, w in terms))
