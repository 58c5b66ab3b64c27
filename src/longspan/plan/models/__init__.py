"""Models: from a `config.json` to the shape of every layer and weight.

`read.py` reads a config into a `ModelShape` (`shape.py`), by the `Family` (`family.py`, which says how to add one) of
its model type. The files named `families.py` or `..._families.py` hold the built-in families, made of `blocks.py`;
`catalogue.py` holds the built-in configs.
"""

from longspan.plan.layers import Parameter
from longspan.plan.models import families, hybrid_families, mamba_families
from longspan.plan.models.catalogue import CONFIGS
from longspan.plan.models.family import FAMILIES, Family, Part, register
from longspan.plan.models.read import is_family, plans_tower, read_model, shape_from_config, shape_from_layers
from longspan.plan.models.shape import LayerShape, ModelShape

__all__ = [
    "CONFIGS",
    "FAMILIES",
    "Family",
    "LayerShape",
    "ModelShape",
    "Parameter",
    "Part",
    "is_family",
    "plans_tower",
    "read_model",
    "register",
    "shape_from_config",
    "shape_from_layers",
]

for _module in (families, hybrid_families, mamba_families):
    for _model_type, _family in _module.FAMILIES.items():
        register(_model_type, _family)
