"""A family of models as data: how transformers builds one `model_type`. The registry, and the config it reads.

To add a family:

1. Open transformers' `modeling_NAME.py` and `configuration_NAME.py`, and `families.py`.
2. Write a `Family` from the blocks in `blocks.py`: `mixers` (one per layer type), `mlp`, and the config class's
   `defaults`. Give `types`, `order`, `root` only if they differ from Llama's. A weight that no block yields is a small
   generator of `Parameter`s, named and ordered as in transformers.
3. Register it: an entry in `families.py` or a file beside it, or `register("model_type", FAMILY)` in your own code.
4. Compare every weight with transformers' own module, as `tests/test_plan_shapes.py` does: a missing bias is a silent
   error.

`docs/how-to/extend.md` does it for Cohere's Command R7B.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from longspan.core.errors import LongspanError
from longspan.core.validation import LARGEST_COUNT, check_number
from longspan.plan.layers import Parameter

if TYPE_CHECKING:
    from longspan.plan.models.tower import Tower

_MOST_LAYERS = 1 << 14

EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Keys that count a layer's routed experts."""


@dataclass(frozen=True)
class Config:
    """A `config.json` with the defaults of its config class. Its methods check what they read."""

    values: Mapping[str, Any]  # keys of the file
    defaults: Mapping[str, Any]  # of the config class
    spellings: Mapping[str, tuple[str, ...]]  # names of a key, the usual one first
    where: str  # name of the config in messages

    def find(self, key: str) -> tuple[str, Any]:
        """Return the spelling of `key` that the config has, and the value or its default."""
        names = EXPERT_COUNTS if key == "num_experts" else self.spellings.get(key, (key,))
        for name in names:
            if name in self.values:
                return name, self.values[name]
        return names[0], self.defaults.get(key)

    def optional(self, key: str, minimum: int = 1) -> int | None:
        """Return an integer, or None for null."""
        name, given = self.find(key)
        value: int | None = given
        if value is not None:
            most = _MOST_LAYERS if key == "num_hidden_layers" else LARGEST_COUNT
            check_number(f"{self.where}: {name}", value, minimum, most, whole=True)
        return value

    def count(self, key: str, minimum: int = 1) -> int:
        """Return an integer."""
        value = self.optional(key, minimum)
        if value is None:
            raise LongspanError(f"{self.where}: {self.find(key)[0]} is null; it must be an integer, at least {minimum}")
        return value

    def flag(self, key: str) -> bool:
        """Return a boolean; null is False."""
        name, value = self.find(key)
        if value is not None and not isinstance(value, bool):
            raise LongspanError(f"{self.where}: {name}={value!r} must be true or false")
        return bool(value)

    @cached_property
    def d(self) -> int:
        """Hidden size."""
        return self.count("hidden_size")

    @cached_property
    def ffn(self) -> int:
        """Intermediate size; GPT-2 may leave it out."""
        return self.optional("intermediate_size") or 4 * self.d

    @cached_property
    def experts(self) -> int:
        """Routed experts of a sparse layer."""
        return self.count("num_experts", minimum=0)

    def divides(self, key: str, by: str, whole: int, parts: int) -> None:
        """Raise unless `parts`, the value of `by`, divides `whole`, the value of `key`."""
        if whole % parts:
            near = [str(n * parts) for n in (whole // parts, whole // parts + 1) if n]
            name = self.find(by)[0]
            default = "" if name in self.values else " (the default)"
            raise LongspanError(
                f"{self.where}: {self.find(key)[0]}={whole} does not divide by {name}={parts}{default}; "
                f"use {' or '.join(near)}"
            )


@dataclass(frozen=True)
class Part:
    """How a family makes a part of its layers."""

    # returns the part from a config: a `Mixer`; or an `Mlp`, from the config and the number of the layer
    build: Callable[..., Any]
    # yields its weights in the module's order, from the config and the part
    weights: Callable[[Config, Any], Iterator[Parameter]]


@dataclass(frozen=True)
class Family:
    """How transformers builds one model type.

    Attributes:
        mixers: the mixer of each layer type, as `layer_types` in a config spells it.
        mlp: the MLPs.
        defaults: of the config class, if not None; a config need not state a size that has a default.
        spellings: other names of a key, the usual one of this model type first.
        types: returns the layer type of layer number i, if the config lists none.
        listed: whether transformers reads `layer_types`.
        order: the parts of a layer in the order of its parameters; parts other than the attention and the MLP are
            norms.
        root: names of the embedding, the learnt positions ("" for none), and the final norm.
        norm_bias: norms have a bias (LayerNorm) or not (RMSNorm).
        rotary: positions are rotary, unless `root` names learnt ones; if not, there are none.
        config: returns a config with the keys that transformers makes of it when it reads one.
        tower: returns the vision tower, from the `vision_config` and a name for messages; None if the family has none,
            or the planner does not know it.
    """

    mixers: Mapping[str, Part]
    mlp: Part
    defaults: Mapping[str, Any] = field(default_factory=dict)
    spellings: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    types: Callable[[Config, int], str] = lambda c, layer: "full_attention"
    listed: bool = False
    order: tuple[str, ...] = ("attention", "mlp", "input_layernorm", "post_attention_layernorm")
    root: tuple[str, str, str] = ("model.embed_tokens", "", "model.norm")
    norm_bias: bool = False
    rotary: bool = True
    config: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict
    tower: Callable[[Any, str], Tower] | None = None

    def missing(self, config: Mapping[str, Any]) -> list[str]:
        """Return the sizes that the config must state and does not."""
        required = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
        spellings = [self.spellings.get(key, (key,)) for key in required if key not in self.defaults]
        return [names[0] for names in spellings if all(config.get(name) is None for name in names)]


FAMILIES: dict[str, Family] = {}
"""By `model_type`."""


def register(model_type: str, family: Family) -> None:
    """Add a family to those that `read_model` and `shape_from_config` know.

    Args:
        model_type: as in its `config.json` (text part of a multimodal model: without "_text").
        family: how transformers builds it.

    Raises:
        LongspanError: if another family has that name.
    """
    if FAMILIES.setdefault(model_type, family) is not family:
        raise LongspanError(f"model_type {model_type!r} is registered already; give the family another name")
