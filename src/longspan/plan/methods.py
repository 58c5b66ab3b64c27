"""The parallel methods side by side, for the same model, context and GPUs."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from longspan.core.errors import LongspanError
from longspan.core.formatting import size
from longspan.plan.cost.communication import communication
from longspan.plan.hardware import Hardware
from longspan.plan.job import CostContext, Job, Mesh
from longspan.plan.layers import Linear
from longspan.plan.layers.linear import STATE_BYTES, STATES
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
    rows = [
        ("TP", job, Mesh(tensor=gpus)),
        ("Megatron SP", replace(job, tensor_style="megatron-sp"), Mesh(tensor=gpus)),
        # FSDP alone shards no sequence: every GPU has its own.
        ("FSDP only", replace(job, batch=max(job.batch, gpus)), Mesh(data=gpus)),
        ("Ulysses", job, Mesh(ulysses=gpus)),
        ("Ring", job, Mesh(ring=gpus)),
        (f"USP {usp}x{gpus // usp}", job, Mesh(ring=gpus // usp, ulysses=usp)),
    ]
    methods = [_method(name, model, of_row, mesh, hardware) for name, of_row, mesh in rows]
    recurrent = [isinstance(layer.mixer, Linear) for layer, _ in model.layer_kinds]
    reason = "is for linear attention layers; this model has softmax attention"
    if any(recurrent):
        reason = "sends the recurrent layers' states in the rows above (LASP-2H); softmax layers need Ulysses or a ring"
    if all(recurrent):
        methods.append(_method("LASP-2", model, job, Mesh(ring=gpus), hardware))
    else:
        methods.append(Method("LASP-2", None, reason))
    methods.append(_dimension_switches(methods, model, job, gpus))
    scan = _pipelined_scan(model, job, gpus)
    return [*methods, *([] if scan is None else [Method("ZeCO", None, scan)])]


def switch_bytes(tokens: int, width: int, ranks: int, element: int) -> int:
    """Return the bytes that a rank sends when DSP (arXiv:2403.10266) shards hidden states along another dimension.

    A stack of blocks that each attend along one dimension sends this where the dimension changes, and nothing else:
    `longspan.dsp`.
    """
    return element * tokens * width // ranks * (ranks - 1) // ranks


def _dimension_switches(methods: list[Method], model: ModelShape, job: Job, gpus: int) -> Method:
    """Return what DSP would send if the model's blocks attended along one dimension each; no planned model does."""
    c = CostContext(model, job, Mesh(ulysses=gpus))
    tokens = c.sequences * c.micro_batches * (1 if job.mode == "decode" else job.context)
    passes = 2 if job.mode == "train" else 1
    change = passes * switch_bytes(tokens, model.d_model, gpus, c.b)
    plan = next(method.plan for method in methods if method.name == "Ulysses")
    layer = 0.0 if plan is None else plan.comm_bytes_per_gpu_per_layer * c.micro_batches
    reason = (
        f"is for blocks that each attend along one dimension, such as a video's frames or a frame's patches. For as "
        f"many tokens, each change of the sharded dimension would send {size(change)} per GPU and step"
    )
    if plan is not None:
        reason += f", and nothing else; Ulysses sends {size(int(layer))} per layer"
    return Method("DSP", None, reason)


def _pipelined_scan(model: ModelShape, job: Job, gpus: int) -> str | None:
    """Return what ZeCO (arXiv:2507.01004) would send instead of the all-gather of states; None without states.

    Each GPU passes one state on, in pieces, without the transition beside it.
    """
    c = CostContext(model, job, Mesh(ring=gpus))
    mixers = [layer.mixer for layer in model.layers if isinstance(layer.mixer, Linear)]
    gathered = sum(next((x.bytes for x in mixer.sent(c) if x.what == STATES), 0) for mixer in mixers)
    scanned = STATE_BYTES * c.sequences * sum(mixer.state_elements for mixer in mixers)
    if not gathered:
        return None
    return (
        f"on paper only: a pipelined scan would send {size(scanned)} per GPU in a forward, where the all-gather "
        f"of states sends {size(gathered)}"
    )


def _method(name: str, model: ModelShape, job: Job, mesh: Mesh, hardware: Hardware) -> Method:
    try:
        plan = cost(model, job, mesh, hardware)
    except LongspanError as error:
        return Method(name, None, str(error))
    short = _seconds_a_layer(model, replace(job, context=SHORT), mesh, hardware)
    apart = replace(hardware, gpus_per_node=1, measured={})
    return Method(name, plan, None, short, _seconds_a_layer(model, job, mesh, apart))


def _seconds_a_layer(model: ModelShape, job: Job, mesh: Mesh, hardware: Hardware) -> float | None:
    """Return the seconds of the method's collectives in a layer; None if the mesh cannot hold the job."""
    if refusal(model, job, mesh) is not None:
        return None
    c = CostContext(model, job, mesh)
    seconds = sum(sent.seconds for sent in communication(c, hardware) if sent.method)
    return seconds / len(model.layers) / c.micro_batches
