"""From times of messages to a latency and a bandwidth. Standard library only."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

_HEADROOM = 10.0
"""How many times the best throughput seen the fitted bandwidth may be.

Where time hardly grows over the sizes measured, the data know no bandwidth, and an infinite one would make every larger
message free.
"""


@dataclass(frozen=True)
class Fit:
    """`seconds = latency + sent / bandwidth`.

    Attributes:
        latency: seconds, at least 0.
        bandwidth: bytes per second that each rank sends; positive and finite.
        residual: median over the sizes of |fitted - measured| / measured.
        points: what was fitted, (sent, seconds) by ascending sizes.
        hidden: the share of the seconds that runs beside computing; None where that was not measured.
    """

    latency: float
    bandwidth: float
    residual: float
    points: tuple[tuple[float, float], ...] = ()
    hidden: float | None = None

    def seconds(self, sent: float) -> float:
        """What the fit says of a message of which every rank sends `sent` bytes."""
        return self.latency + sent / self.bandwidth


def bytes_sent(op: str, size: float, ranks: int) -> float:
    """Bytes that each of `ranks` ranks sends for a collective whose whole tensor has `size` bytes.

    An all_gather ends with the whole, each rank's shard of it going to all others; a reduce_scatter begins with it; an
    all_reduce is the one and then the other; p2p is a shift to the next rank. These are the bytes of an algorithm that
    sends the least: what a library sends beyond them shows as a lower bandwidth.
    """
    if op == "p2p":
        return size
    return size * (ranks - 1) / ranks * (2 if op == "all_reduce" else 1)


def size_that_sends(op: str, sent: float, ranks: int) -> float:
    """The inverse of `bytes_sent`: bytes of the whole tensor of which each rank sends `sent`."""
    return sent / bytes_sent(op, 1.0, ranks)


def fit(sent: Sequence[float], seconds: Sequence[float]) -> Fit:
    """Fit latency and bandwidth by non-negative least squares of the relative errors.

    Relative, because otherwise the largest message alone would decide and the latency be what its noise leaves.

    Args:
        sent: bytes that every rank sends, positive, at least two different ones.
        seconds: how long it took, positive.
    """
    # Seconds per byte that the link surely needs. Only what is beyond them is fitted, so that it may come out as 0.
    least = min(t / x for x, t in zip(sent, seconds, strict=True)) / _HEADROOM
    beyond = [t - least * x for x, t in zip(sent, seconds, strict=True)]
    latency, per_byte = _nonnegative_line(sent, beyond, [t**-2 for t in seconds])
    line = Fit(latency, 1 / (least + per_byte), 0.0)
    errors = [abs(line.seconds(x) - t) / t for x, t in zip(sent, seconds, strict=True)]
    points = tuple(sorted(zip(map(float, sent), seconds, strict=True)))
    return Fit(line.latency, line.bandwidth, statistics.median(errors), points)


def _nonnegative_line(xs: Sequence[float], ys: Sequence[float], weights: Sequence[float]) -> tuple[float, float]:
    """The a, b >= 0 with the least `sum(w * (a + b * x - y)**2)`.

    Unless the free minimum is allowed, the minimum lies on the border, a = 0 or b = 0, as the sum is convex.
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
