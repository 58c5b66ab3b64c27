"""A family of models as data: how transformers builds one model type, and the registry of all that are known."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from longspan.core.errors import LongspanError
from longspan.plan.layers import Mixer, Mlp
from longspan.plan.models.config import Config
from longspan.plan.models.shape import Parameter


@dataclass(frozen=True)
class MixerOf:
    """The mixer of one layer type.

    Attributes:
        build: the mixer that a config describes.
        weights: its weights, in the order of the module's own; given the config and the mixer.
    """

    build: Callable[[Config], Mixer]
    weights: Callable[[Config, Any], Iterator[Parameter]]


@dataclass(frozen=True)
class MlpOf:
    """The MLP of the layers.

    Attributes:
        build: the MLP, or the experts, of a layer by its number.
        weights: its weights, given the config and the MLP.
    """

    build: Callable[[Config, int], Mlp]
    weights: Callable[[Config, Any], Iterator[Parameter]]


@dataclass(frozen=True)
class Family:
    """How transformers builds one model type.

    Attributes:
        mixers: the mixer by layer type, as `layer_types` in a config spells it.
        mlp: the MLP.
        defaults: of the config class, where they are not None; a size with a default need not be stated.
        spellings: other names of a key, the usual one of this model type first.
        types: the layer type of each layer, where the config lists none.
        listed: whether transformers reads `layer_types`.
        order: the parts of a layer in the order of its parameters; what is not the attention or the MLP is a norm.
        root: names of the embedding, the learnt positions if any, and the final norm.
        norm_bias: whether norms have a bias (LayerNorm) or not (RMSNorm).
    """

    mixers: Mapping[str, MixerOf]
    mlp: MlpOf
    defaults: Mapping[str, Any] = field(default_factory=dict)
    spellings: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    types: Callable[[Config, int], str] = lambda c, layer: "full_attention"
    listed: bool = False
    order: tuple[str, ...] = ("attention", "mlp", "input_layernorm", "post_attention_layernorm")
    root: tuple[str, str, str] = ("model.embed_tokens", "", "model.norm")
    norm_bias: bool = False

    def missing(self, config: Mapping[str, Any]) -> list[str]:
        """Sizes that the config must state and does not."""
        required = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
        spellings = [self.spellings.get(key, (key,)) for key in required if key not in self.defaults]
        return [names[0] for names in spellings if all(config.get(name) is None for name in names)]


FAMILIES: dict[str, Family] = {}
"""By `model_type`."""


def register(model_type: str, family: Family) -> None:
    """Make a family known to `read_model` and `shape_from_config`.

    Args:
        model_type: as its `config.json` says it (of a multimodal model's text part without "_text").
        family: how it is built.

    Raises:
        LongspanError: if there is another family of that name.
    """
    if FAMILIES.setdefault(model_type, family) is not family:
        raise LongspanError(f"model_type {model_type!r} is registered already; give the family a name of its own")
