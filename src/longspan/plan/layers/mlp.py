"""The MLP of a layer: dense, or experts of which a router chooses a few for each token."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from longspan.plan.cost.saved import Scale
    from longspan.plan.models.shape import Parameter


@dataclass(frozen=True)
class Mlp(ABC):
    """What follows the mixer of a layer.

    Attributes:
        ffn: intermediate size of one MLP: the dense one, or each of the routed experts.
        gated: whether it has three matrices (SwiGLU and its like) or two.
        experts: routed experts; 1 where there is no router.
        per_token: routed experts that compute one token.
    """

    ffn: int
    gated: bool = True
    experts: int = 1
    per_token: int = 1

    @property
    @abstractmethod
    def width(self) -> int:
        """Elements of one token's intermediate, over all experts that compute it."""

    @property
    def matrices(self) -> int:
        """Three if gated, else two."""
        return 3 if self.gated else 2

    @property
    def saved_intermediates(self) -> int:
        """Tensors of the intermediate size that autograd saves: gated four, else two. Half of them, the activation
        function's result and what goes into the last product, follow from the others.
        """
        return 4 if self.gated else 2

    def active(self, p: Parameter) -> int:
        """Elements of one of the layer's weights that one token meets."""
        return p.numel

    @abstractmethod
    def saved(self, s: Scale) -> int:
        """Saved activations in bytes per token."""


@dataclass(frozen=True)
class Dense(Mlp):
    """One MLP for all tokens."""

    @property
    def width(self) -> int:
        return self.ffn

    def saved(self, s: Scale) -> int:
        return self.saved_intermediates * s.b * self.ffn


@dataclass(frozen=True)
class Experts(Mlp):
    """A router, the experts it chooses from, and those that see every token.

    Attributes:
        shared_ffn: intermediate size of the experts that see every token, together.
    """

    shared_ffn: int = 0

    @property
    def width(self) -> int:
        return self.shared_ffn + self.per_token * self.ffn

    def active(self, p: Parameter) -> int:
        # Routed experts are stacked along the first dimension.
        return p.numel // self.experts * self.per_token if p.name.startswith("mlp.experts.") else p.numel

    def saved(self, s: Scale) -> int:
        """An estimate: besides the intermediates, what goes into each chosen expert and comes out of it."""
        routed = self.per_token * (self.saved_intermediates * s.b * self.ffn + 2 * s.b * s.d)
        return self.saved_intermediates * s.b * self.shared_ffn + routed
