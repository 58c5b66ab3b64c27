"""The methods side by side, on equal terms: the same model, context and GPUs."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from longspan.errors import LongspanError
from longspan.plan.hardware import Hardware
from longspan.plan.job import Job, Mesh
from longspan.plan.search import Plan, cost
from longspan.plan.shapes import ModelShape

SHORT = 128
"""Tokens of the short prompt at which tensor parallelism may win: a start-up time is all that counts."""


@dataclass(frozen=True)
class Method:
    """One way to use all GPUs on a job.

    Attributes:
        name: the method.
        plan: costed; None where it cannot be.
        reason: why it cannot be.
    """

    name: str
    plan: Plan | None
    reason: str | None = None

    @property
    def ops_per_layer(self) -> str:
        """The collectives of one layer that move activations, as "2 all_to_all"."""
        if self.plan is None:
            return ""
        counts: dict[str, float] = {}
        for c in self.plan.comm:
            if c.method:
                counts[c.op] = counts.get(c.op, 0) + c.count / len(self.plan.model.layers)
        return ", ".join(f"{round(n)} {op}" for op, n in counts.items()) or "none"

    @property
    def method_bytes(self) -> int:
        """Bytes that one GPU sends for the method in a step, weights left out."""
        return 0 if self.plan is None else sum(c.bytes_total for c in self.plan.comm if c.method)

    @property
    def method_seconds(self) -> float:
        """Their time, hidden or not."""
        return 0.0 if self.plan is None else sum(c.seconds for c in self.plan.comm if c.method)


def compare(model: ModelShape, job: Job, gpus: int, hardware: Hardware) -> list[Method]:
    """Each method on all GPUs: what it sends, how long that takes, what it holds, or why it cannot be."""
    node = math.gcd(gpus, hardware.gpus_per_node)
    inside = math.gcd(node, model.kv_heads) if node > 1 else 1
    usp = inside if inside < gpus else max(1, gpus // 2)
    linear = all(layer.kind == "linear" for layer in model.layers)
    return [
        _method("TP", model, job, Mesh(tensor=gpus), hardware),
        _method("Megatron SP", model, replace(job, tensor_style="megatron-sp"), Mesh(tensor=gpus), hardware),
        # FSDP alone shards no sequence: every GPU has one of its own.
        _method("FSDP only", model, replace(job, batch=max(job.batch, gpus)), Mesh(data=gpus), hardware),
        _method("Ulysses", model, job, Mesh(ulysses=gpus), hardware),
        _method("Ring", model, job, Mesh(ring=gpus), hardware),
        _method(f"USP {usp}x{gpus // usp}", model, job, Mesh(ring=gpus // usp, ulysses=usp), hardware),
        _method("LASP-2", model, job, Mesh(ring=gpus), hardware)
        if linear
        else Method("LASP-2", None, "is for linear attention layers; this model's layers are softmax attention"),
    ]


def _method(name: str, model: ModelShape, job: Job, mesh: Mesh, hardware: Hardware) -> Method:
    try:
        return Method(name, cost(model, job, mesh, hardware))
    except LongspanError as error:
        return Method(name, None, str(error))
