"""The planner: what fits, which mesh, and what it costs, before anyone rents a GPU. Only `read_model` imports torch.

from longspan.plan import Job, read_hardware, read_model, search

found = search(read_model("llama-2-70b"), Job(context=1_000_000, mode="prefill"), 8, read_hardware("a100-80gb"))
found.recommended.mesh, found.recommended.memory_bytes, found.recommended.comm
"""

from typing import TYPE_CHECKING, Any

from longspan.core.parallel import ParallelConfig
from longspan.plan.cost.communication import Collective
from longspan.plan.hardware import CATALOGUE, Hardware, Link, read_hardware
from longspan.plan.job import Job
from longspan.plan.search import Plan, Search, cost, longest_context, search
from longspan.plan.shape import LayerShape, ModelShape

if TYPE_CHECKING:
    from longspan.plan.from_model import read_model

__all__ = [
    "CATALOGUE",
    "Collective",
    "Hardware",
    "Job",
    "LayerShape",
    "Link",
    "ModelShape",
    "ParallelConfig",
    "Plan",
    "Search",
    "cost",
    "longest_context",
    "read_hardware",
    "read_model",
    "search",
]


def __getattr__(name: str) -> Any:
    if name == "read_model":
        from longspan.core.errors import require

        require("the planner", "transformers")
        from longspan.plan.from_model import read_model

        return read_model
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
