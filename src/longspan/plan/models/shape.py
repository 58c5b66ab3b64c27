"""The shape of a causal language model: its layers and every weight. Sizes are elements, not bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from longspan.core.rope import AUTO, UNSTATED, RopeAsked, RopeScaling, RopeState, furthest, scaling_for

if TYPE_CHECKING:
    from longspan.plan.layers import Mixer, Mlp


@dataclass(frozen=True)
class Parameter:
    """One weight tensor."""

    name: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements of the tensor."""
        return math.prod(self.shape)


@dataclass(frozen=True, eq=False)
class LayerShape:
    """One decoder layer. Equal layers of a model are one object, so that what is computed for one serves all.

    Attributes:
        mixer: the attention, or what takes its place.
        mlp: what follows it.
        parameters: every weight, named relative to the layer, in the order of the module's own.
    """

    mixer: Mixer
    mlp: Mlp
    parameters: tuple[Parameter, ...] = ()

    @property
    def kind(self) -> str:
        """The mixer's kind, in reports."""
        return self.mixer.name

    @property
    def window(self) -> int | None:
        """Tokens of the mixer's window or chunk; None where there is no limit."""
        return self.mixer.window

    @cached_property
    def params(self) -> int:
        """Elements of all weights."""
        return sum(p.numel for p in self.parameters)

    @cached_property
    def active_params(self) -> int:
        """Elements of the weights that one token meets: of the routed experts, only those chosen for it."""
        return sum(self.mlp.active(p) for p in self.parameters)

    @cached_property
    def matmul_params_active(self) -> int:
        """Of `active_params`, what is multiplied with each token: matrices and convolutions, not norms, biases, sinks.

        A forward pass computes 2 FLOPs per token with each, besides the attention itself.
        """
        return sum(self.mlp.active(p) for p in self.parameters if len(p.shape) > 1 and not p.name.endswith("bias"))

    @cached_property
    def mlp_params(self) -> int:
        """Elements of the MLP's matrices, experts that a token does not meet included."""
        return sum(p.numel for p in self.parameters if p.name.startswith("mlp.") and len(p.shape) > 1)

    @property
    def kv_elements_per_token(self) -> int:
        """Elements that the cache holds for one token; 0 in a linear layer, whose state does not grow."""
        return self.mixer.cached_per_token


@dataclass(frozen=True, eq=False)
class ModelShape:
    """A causal language model.

    Attributes:
        name: as asked for.
        d_model: hidden size.
        vocab: rows of the embedding.
        tied: whether the head is the embedding.
        max_position: tokens the model is made for, None where the config does not say.
        layers: in order; repeated layers are the same object.
        root: weights outside the layers: embeddings, learnt positions, final norm, and the head unless tied.
        assumption: what had to be assumed to read the config, None where nothing was.
        positions: what the config says of them.
        rope: the RoPE scaling that is asked for.
        refused: what of it this version does not train, in words.
    """

    name: str
    d_model: int
    vocab: int
    tied: bool
    max_position: int | None
    layers: tuple[LayerShape, ...]
    root: tuple[Parameter, ...]
    assumption: str | None = None
    positions: RopeState = UNSTATED
    rope: RopeAsked = AUTO
    refused: tuple[str, ...] = ()

    def scaling(self, context: int) -> RopeScaling | None:
        """The RoPE scaling that a context needs, as `longspan train` decides it; None where positions suffice.

        Raises:
            LongspanError: where the model cannot be given such positions, with the way out.
        """
        reach, asked = self.positions.reach, self.rope
        if asked.scaling != "as-is" and asked.factor is None and (reach is None or context <= reach):
            return None
        return scaling_for(self.positions, asked, context, self.name)

    @property
    def furthest(self) -> int | None:
        """The longest context that its positions reach with the scaling that is asked for; None: there is no end."""
        return furthest(self.positions, self.rope)

    @cached_property
    def root_params(self) -> int:
        """Elements of the weights outside the layers."""
        return sum(p.numel for p in self.root)

    @cached_property
    def params(self) -> int:
        """Elements of all weights; a tied head counts once."""
        return self.root_params + sum(layer.params * count for layer, count in self.layer_kinds)

    @cached_property
    def active_params(self) -> int:
        """Elements of the weights that one token meets, embedding and head included."""
        return self.root_params + sum(layer.active_params * count for layer, count in self.layer_kinds)

    @cached_property
    def layer_kinds(self) -> list[tuple[LayerShape, int]]:
        """Distinct layers in order of first appearance, and how often each occurs."""
        counts: dict[LayerShape, int] = {}
        for layer in self.layers:
            counts[layer] = counts.get(layer, 0) + 1
        return list(counts.items())

    @cached_property
    def q_heads(self) -> int:
        """Largest number of query heads of a softmax attention layer; of any layer where there is no such."""
        return max(mixer.q_heads for mixer in self._dealt)

    @cached_property
    def kv_heads(self) -> int:
        """Largest number of key and value heads, of the same layers as `q_heads`."""
        return max(mixer.kv_heads for mixer in self._dealt)

    @property
    def _dealt(self) -> list[Mixer]:
        distinct = [layer.mixer for layer, _ in self.layer_kinds]
        return [mixer for mixer in distinct if mixer.deals_heads] or distinct
