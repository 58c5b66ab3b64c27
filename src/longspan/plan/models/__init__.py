"""Models: the shape that a `config.json` describes; families as data; the built-in configs.

`family.py` says what a family is and has the registry; `mixing.py` and `weights.py` are what families are made of;
`families/` has them; `read.py` reads; `shape.py` is the result.
"""

from longspan.plan.models.catalogue import CONFIGS
from longspan.plan.models.family import FAMILIES, Family, MixerOf, MlpOf, register
from longspan.plan.models.read import is_family, read_model, shape_from_config, shape_from_layers
from longspan.plan.models.shape import LayerShape, ModelShape, Parameter

__all__ = [
    "CONFIGS",
    "FAMILIES",
    "Family",
    "LayerShape",
    "MixerOf",
    "MlpOf",
    "ModelShape",
    "Parameter",
    "is_family",
    "read_model",
    "register",
    "shape_from_config",
    "shape_from_layers",
]
