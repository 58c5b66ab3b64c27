"""longspan: train and run Transformers on sequences longer than one GPU can hold, exactly.

Names are imported on first use, so that `import longspan` costs nothing and the planner needs no torch.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from longspan import exchange as exchange
    from longspan.attention import attention as attention
    from longspan.attention import explain_kernel as explain_kernel
    from longspan.batch import shard_batch as shard_batch
    from longspan.errors import LongspanError as LongspanError
    from longspan.loss import causal_lm_loss as causal_lm_loss
    from longspan.mesh import SequenceSharding as SequenceSharding
    from longspan.mesh import init_mesh as init_mesh
    from longspan.nonfinite import find_nonfinite as find_nonfinite
    from longspan.parallelize import parallelize as parallelize

__version__ = "0.1.0"

_HOME = {
    "LongspanError": "longspan.errors",
    "SequenceSharding": "longspan.mesh",
    "attention": "longspan.attention",
    "causal_lm_loss": "longspan.loss",
    "explain_kernel": "longspan.attention",
    "find_nonfinite": "longspan.nonfinite",
    "init_mesh": "longspan.mesh",
    "parallelize": "longspan.parallelize",
    "shard_batch": "longspan.batch",
}
_MODULES = ("exchange",)

__all__ = [*sorted(_HOME), *_MODULES]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"longspan.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'longspan' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*globals(), *__all__]


class _Package(types.ModuleType):
    """Keeps `longspan.attention` and `longspan.parallelize` the functions that they are by contract.

    The modules that hold them have the same names, and Python binds an imported submodule in its package, whoever
    imports it and whenever. What is bound here instead is the function in it.
    """

    def __setattr__(self, name: str, value: object) -> None:
        if name in _HOME and isinstance(value, types.ModuleType):
            value = getattr(value, name)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
