"""The planner: what fits, which mesh, and what it costs, before anyone rents a GPU. Needs no torch and no GPU.

from longspan.plan import Job, read_hardware, read_model, search

found = search(read_model("llama-2-70b"), Job(context=1_000_000, mode="prefill"), 8, read_hardware("a100-80gb"))
found.recommended.mesh, found.recommended.memory_bytes, found.recommended.comm
"""

from longspan.plan.cost.communication import Collective
from longspan.plan.hardware import CATALOGUE, Hardware, Link, read_hardware
from longspan.plan.job import Job, Mesh
from longspan.plan.models.read import read_model
from longspan.plan.models.shape import LayerShape, ModelShape
from longspan.plan.search import Plan, Search, cost, longest_context, plan_mesh, search

__all__ = [
    "CATALOGUE",
    "Collective",
    "Hardware",
    "Job",
    "LayerShape",
    "Link",
    "Mesh",
    "ModelShape",
    "Plan",
    "Search",
    "cost",
    "longest_context",
    "plan_mesh",
    "read_hardware",
    "read_model",
    "search",
]
