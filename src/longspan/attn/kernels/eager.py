"""Kernel "eager": the formula with its scores materialized; what `methods/reference.py` computes, on any mesh."""

from __future__ import annotations

from longspan.attn.kernels.base import Kernel, KernelRequest, register


class EagerKernel(Kernel):
    """Every mask and score, with gradients for learnt biases; memory grows with the square of the tokens."""

    name = "eager"

    def refuses(self, need: KernelRequest) -> str | None:
        """Nothing."""
        return None

    def describe(self, need: KernelRequest) -> str:
        """What it does."""
        return "the formula with its scores materialized; its memory grows with the square of the tokens"


EAGER = EagerKernel()
register(EAGER)
