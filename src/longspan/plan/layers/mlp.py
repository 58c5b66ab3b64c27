"""The MLP of a layer: dense, or routed experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from longspan.plan.layers.base import CostContext, Parameter


@dataclass(frozen=True)
class Mlp:
    """The part of a layer that follows the mixer.

    Attributes:
        ffn: intermediate size of a dense MLP, or of each routed expert.
        gated: three matrices (SwiGLU and its like) rather than two.
        experts: routed experts; 0 for a dense MLP.
        per_token: routed experts per token.
        shared_ffn: intermediate size of all shared experts together.
    """

    ffn: int
    gated: bool = True
    experts: int = 0
    per_token: int = 1
    shared_ffn: int = 0

    @property
    def width(self) -> int:
        """Intermediate elements of one token, over all experts that compute it."""
        return self.shared_ffn + self.per_token * self.ffn

    @property
    def matrices(self) -> int:
        """Matrices of one MLP."""
        return 3 if self.gated else 2

    @property
    def saved_intermediates(self) -> int:
        """Tensors of the intermediate size that autograd saves.

        Half of them, the activation function's result and the input of the last product, follow from the others.
        """
        return 4 if self.gated else 2

    def active(self, p: Parameter) -> int:
        """Return the elements of one weight that one token uses."""
        # Routed experts are stacked along the first dimension.
        return p.numel // self.experts * self.per_token if p.name.startswith("mlp.experts.") else p.numel

    def saved(self, c: CostContext) -> int:
        """Return the saved bytes per token: the intermediates; of experts, an estimate, each one's input and output
        too.
        """
        of_experts = 2 * c.b * c.d * self.per_token if self.experts else 0
        return self.saved_intermediates * c.b * self.width + of_experts
