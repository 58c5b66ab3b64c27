"""The MLP of a layer: dense, or routed experts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from longspan.plan.layers.base import CostContext, Parameter


@dataclass(frozen=True)
class Mlp(ABC):
    """The part of a layer that follows the mixer.

    Attributes:
        ffn: intermediate size of the dense MLP, or of each routed expert.
        gated: three matrices (SwiGLU and its like) rather than two.
        experts: routed experts; 1 without a router.
        per_token: routed experts per token.
    """

    ffn: int
    gated: bool = True
    experts: int = 1
    per_token: int = 1

    @property
    @abstractmethod
    def width(self) -> int:
        """Intermediate elements of one token, over all experts that compute it."""

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
        return p.numel

    @abstractmethod
    def saved(self, c: CostContext) -> int:
        """Return the saved bytes per token."""


@dataclass(frozen=True)
class Dense(Mlp):
    """One MLP for all tokens."""

    @property
    def width(self) -> int:
        return self.ffn

    def saved(self, c: CostContext) -> int:
        return self.saved_intermediates * c.b * self.ffn


@dataclass(frozen=True)
class Experts(Mlp):
    """A router, routed experts, and shared experts.

    Attributes:
        shared_ffn: intermediate size of all shared experts together.
    """

    shared_ffn: int = 0

    @property
    def width(self) -> int:
        return self.shared_ffn + self.per_token * self.ffn

    def active(self, p: Parameter) -> int:
        # Routed experts are stacked along the first dimension.
        return p.numel // self.experts * self.per_token if p.name.startswith("mlp.experts.") else p.numel

    def saved(self, c: CostContext) -> int:
        """Return an estimate: the intermediates, and the input and output of each chosen expert."""
        routed = self.per_token * (self.saved_intermediates * c.b * self.ffn + 2 * c.b * c.d)
        return self.saved_intermediates * c.b * self.shared_ffn + routed
