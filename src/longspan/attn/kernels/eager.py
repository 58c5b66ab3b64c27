"""Kernel "eager": the formula with materialized scores, on any mesh; computed by `methods/reference.py`."""

from __future__ import annotations

from longspan.attn.kernels.base import Kernel, KernelRequest, register


class EagerKernel(Kernel):
    """Every mask and score, with gradients for learnt biases; memory grows with the square of the tokens."""

    name = "eager"

    def refuses(self, request: KernelRequest) -> str | None:
        return None

    def describe(self, request: KernelRequest) -> str:
        return "the formula with its scores materialized; its memory grows with the square of the tokens"


EAGER = EagerKernel()
register(EAGER)
