"""What one call of a collective sends, before a link is known."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sent:
    """Bytes of one call.

    Attributes:
        op: one of `longspan.plan.hardware.OPS`.
        axis: the mesh axis it runs over; `fsdp` is data x ring x ulysses together, `sequence` ring x ulysses.
        what: what is sent.
        bytes: that one GPU sends in one call (the GPU that sends most, where they differ).
        calls: how often.
        method: whether the sequence or tensor method sends it, rather than weights, gradients and loss.
    """

    op: str
    axis: str
    what: str
    bytes: int
    calls: int = 1
    method: bool = True
