"""Kinds of layers as objects: what mixes tokens (`Mixer`) and what follows it (`Mlp`), each with its costs.

The totals in `longspan.plan.cost` ask these objects and know none of them by name. A new kind is a subclass of `Mixer`
in a file of its own, and is used by naming it in a family (`longspan.plan.models.family`).
"""

from longspan.plan.layers.attended_keys import CAUSAL, Bidirectional, Causal, Chunk, Reach, Window
from longspan.plan.layers.base import Mixer
from longspan.plan.layers.linear import Linear
from longspan.plan.layers.mlp import Dense, Experts, Mlp
from longspan.plan.layers.softmax import Softmax

__all__ = [
    "CAUSAL",
    "Bidirectional",
    "Causal",
    "Chunk",
    "Dense",
    "Experts",
    "Linear",
    "Mixer",
    "Mlp",
    "Reach",
    "Softmax",
    "Window",
]
