"""Kinds of layers: what mixes tokens (`TokenMixing`) and what follows it (`Mlp`), each with its costs.

The totals in `longspan.plan.cost` ask these objects and name none of them. A new kind of mixing is a subclass of
`TokenMixing` in its own file; `longspan.plan.from_model` then reads it from a module.
"""

from longspan.plan.layers.attended_keys import CAUSAL, AttendedKeys, Bidirectional, Causal, Chunk, Window
from longspan.plan.layers.base import Mlp, Parameter, Sent, TokenMixing
from longspan.plan.layers.indexed import ChosenBlocks, Compressed, Indexed
from longspan.plan.layers.linear import Linear, ShortConv
from longspan.plan.layers.softmax import Parallel, Softmax

__all__ = [
    "CAUSAL",
    "AttendedKeys",
    "Bidirectional",
    "Causal",
    "ChosenBlocks",
    "Chunk",
    "Compressed",
    "Indexed",
    "Linear",
    "Mlp",
    "Parallel",
    "Parameter",
    "Sent",
    "ShortConv",
    "Softmax",
    "TokenMixing",
    "Window",
]
