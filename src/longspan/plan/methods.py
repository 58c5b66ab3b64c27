"""The parallel methods side by side, for the same model, context and GPUs."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from longspan.core.errors import LongspanError
from longspan.plan.cost.communication import communication
from longspan.plan.hardware import Hardware
from longspan.plan.job import CostContext, Job
from longspan.plan.layers import Linear
from longspan.plan.limits import refusal
from longspan.plan.search import Plan, cost
from longspan.plan.shape import ModelShape

SHORT = 128
"""Tokens of a short prompt, at which only latency counts and tensor parallelism may win."""


@dataclass(frozen=True)
class Method:
    """One parallel method on all GPUs."""

    name: str
    plan: Plan | None  # None if it cannot run the job
    reason: str | None = None  # why it cannot
    short_seconds: float | None = None  # of the method's collectives in a layer at `SHORT` tokens
    # of the same in a layer of the job, if every GPU is its own node (with the `inter` link, not with measured ones)
    apart_seconds: float | None = None

    @property
    def ops_per_layer(self) -> str:
        """Collectives of one layer that move activations, as "2 all_to_all"."""
        if self.plan is None:
            return ""
        counts: dict[str, float] = {}
        for c in self.plan.comm:
            if c.method:
                counts[c.op] = counts.get(c.op, 0) + c.count / len(self.plan.model.layers)
        return ", ".join(f"{round(n)} {op}" for op, n in counts.items()) or "none"

    @property
    def method_bytes(self) -> int:
        """Bytes that one GPU sends for the method in a step, without weights."""
        return 0 if self.plan is None else sum(c.bytes_total for c in self.plan.comm if c.method)

    @property
    def method_seconds(self) -> float:
        """Seconds of the method's collectives in a step, overlapped or not."""
        return 0.0 if self.plan is None else sum(c.seconds for c in self.plan.comm if c.method)


def compare(model: ModelShape, job: Job, gpus: int, hardware: Hardware) -> list[Method]:
    """Return each method on all GPUs: its traffic, time and memory, or the reason why it cannot run the job."""
    node = math.gcd(gpus, hardware.gpus_per_node)
    inside = math.gcd(node, model.kv_heads) if node > 1 else 1
    usp = inside if inside < gpus else max(1, gpus // 2)
    alone = job.on(data=1, ring=1, ulysses=1, tensor=1)
    rows = [
        ("TP", alone.on(tensor=gpus)),
        ("Megatron SP", alone.on(tensor=gpus, tensor_style="megatron-sp")),
        # FSDP alone shards no sequence: every GPU has its own.
        ("FSDP only", replace(alone, batch=max(job.batch, gpus)).on(data=gpus)),
        ("Ulysses", alone.on(ulysses=gpus)),
        ("Ring", alone.on(ring=gpus)),
        (f"USP {usp}x{gpus // usp}", alone.on(ring=gpus // usp, ulysses=usp)),
    ]
    methods = [_method(name, model, of_row, hardware) for name, of_row in rows]
    recurrent = [isinstance(layer.mixing, Linear) for layer, _ in model.layer_kinds]
    reason = "is for linear attention layers; this model has softmax attention"
    if any(recurrent):
        reason = "sends the recurrent layers' states in the rows above (LASP-2H); softmax layers need Ulysses or a ring"
    if all(recurrent):
        methods.append(_method("LASP-2", model, alone.on(ring=gpus), hardware))
    else:
        methods.append(Method("LASP-2", None, reason))
    return methods


def _method(name: str, model: ModelShape, job: Job, hardware: Hardware) -> Method:
    try:
        plan = cost(model, job, hardware)
    except LongspanError as error:
        return Method(name, None, str(error))
    short = _seconds_a_layer(model, replace(job, context=SHORT), hardware)
    apart = replace(hardware, gpus_per_node=1, measured={})
    return Method(name, plan, None, short, _seconds_a_layer(model, job, apart))


def _seconds_a_layer(model: ModelShape, job: Job, hardware: Hardware) -> float | None:
    """Return the seconds of the method's collectives in a layer; None if the mesh cannot hold the job."""
    if refusal(model, job) is not None:
        return None
    c = CostContext(model, job)
    seconds = sum(sent.seconds for sent in communication(c, hardware) if sent.method)
    return seconds / len(model.layers) / c.micro_batches
