"""One mesh costed, and all meshes searched: what fits, how long it takes, why not."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from longspan.errors import LongspanError
from longspan.plan.communication import (
    Collective,
    Sent,
    around_the_layers,
    communication,
    heads_of,
    layer_method,
    layer_weights,
    micro_batches,
)
from longspan.plan.compute import (
    head_work,
    layer_seconds,
    loss_seconds,
    model_flops,
    optimizer_seconds,
    speed,
)
from longspan.plan.job import AXES, RUNS, Job, Mesh
from longspan.plan.memory import cache_bytes, memory

if TYPE_CHECKING:
    from longspan.plan.hardware import Hardware
    from longspan.plan.shapes import LayerShape, ModelShape

GB = 1e9


@dataclass(frozen=True)
class Plan:
    """One job on one mesh, costed.

    Attributes:
        model: what runs.
        job: the job.
        mesh: the mesh.
        hardware: on what.
        memory_bytes: of the GPU that holds most, item by item (`longspan.plan.memory.ITEMS`).
        comm: every collective of a step.
        compute_seconds: of a step, communication and waiting left out.
        exposed_seconds: communication that nothing hides.
        step_seconds: of a whole step: computing, exposed communication, optimizer.
        notes: what the user should know (replicated KV heads, positions that end early, what this version runs).
    """

    model: ModelShape
    job: Job
    mesh: Mesh
    hardware: Hardware
    memory_bytes: dict[str, int]
    comm: tuple[Collective, ...]
    compute_seconds: float
    exposed_seconds: float
    step_seconds: float
    notes: tuple[str, ...] = ()

    @property
    def memory_total_bytes(self) -> int:
        """All items together."""
        return sum(self.memory_bytes.values())

    @property
    def headroom_bytes(self) -> int:
        """What is left of the GPU's memory; below 0 where it does not fit."""
        return int(self.hardware.memory_bytes) - self.memory_total_bytes

    @property
    def fits(self) -> bool:
        """Whether it fits in the GPU's memory."""
        return self.headroom_bytes >= 0

    @property
    def runs(self) -> bool:
        """Whether this version of longspan runs the mesh and what the job asks for."""
        return not _not_in_this_version(self.model, self.job, self.mesh)

    @property
    def comm_seconds(self) -> float:
        """All collectives of a step, hidden or not."""
        return sum(c.seconds for c in self.comm)

    @cached_property
    def comm_bytes_per_gpu_per_layer(self) -> float:
        """Bytes that one GPU sends for the sequence and tensor methods, per layer and micro-batch."""
        method = sum(c.bytes_total for c in self.comm if c.method)
        return method / len(self.model.layers) / micro_batches(self.job, self.mesh)

    @property
    def tokens_per_second(self) -> float:
        """Of the whole job."""
        tokens = self.job.batch * (1 if self.job.mode == "decode" else self.job.context)
        return tokens / self.step_seconds

    @property
    def mfu(self) -> float:
        """Model FLOP utilisation: FLOPs that the step needs over what all GPUs could do in its time."""
        return model_flops(self.model, self.job) / (self.step_seconds * self.hardware.flops * self.mesh.gpus)

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why it does not fit, and the notes."""
        if self.fits:
            return self.notes
        largest = sorted(self.memory_bytes, key=lambda name: -self.memory_bytes[name])[:2]
        spelled = ", ".join(f"{name} {self.memory_bytes[name] / GB:.1f} GB" for name in largest)
        short = (
            f"needs {self.memory_total_bytes / GB:.1f} GB of {self.hardware.memory_bytes / GB:.1f} GB per GPU "
            f"(most of it: {spelled})"
        )
        return (short, *self.notes)

    @cached_property
    def max_context(self) -> int:
        """The longest context that fits on this mesh, the rest of the job unchanged; 0 where none does."""
        return longest_context(self.model, self.job, self.mesh, self.hardware)


@dataclass(frozen=True)
class Search:
    """All meshes of so many GPUs.

    Attributes:
        plans: every legal mesh: those that fit first, the fastest first.
        rejected: the meshes that cannot be, each with its reason.
        recommended: the fastest that fits, of those that this version runs if any; None where nothing fits.
    """

    plans: tuple[Plan, ...]
    rejected: tuple[tuple[Mesh, str], ...]
    recommended: Plan | None = None


def cost(model: ModelShape, job: Job, mesh: Mesh, hardware: Hardware) -> Plan:
    """Memory, communication and time of one job on one mesh.

    Raises:
        LongspanError: if the mesh cannot hold the job; see `refusal`.
    """
    problem = refusal(model, job, mesh)
    if problem is not None:
        raise LongspanError(problem)
    compute, exposed = _times(model, job, mesh, hardware)
    optimizer = optimizer_seconds(model, job, mesh, hardware)
    return Plan(
        model=model,
        job=job,
        mesh=mesh,
        hardware=hardware,
        memory_bytes=memory(model, job, mesh, hardware),
        comm=communication(model, job, mesh, hardware),
        compute_seconds=compute + optimizer,
        exposed_seconds=exposed,
        step_seconds=compute + optimizer + exposed,
        notes=tuple(_notes(model, job, mesh)),
    )


def search(model: ModelShape, job: Job, gpus: int, hardware: Hardware) -> Search:
    """Every mesh of `gpus` GPUs, ranked: what fits before what does not, then by the time of a step, then by memory.

    Raises:
        LongspanError: if `gpus` is below 1.
    """
    if isinstance(gpus, bool) or not isinstance(gpus, int) or gpus < 1:
        raise LongspanError(f"gpus={gpus!r} must be an integer of at least 1")
    plans: list[Plan] = []
    rejected: list[tuple[Mesh, str]] = []
    for mesh in meshes(gpus):
        problem = refusal(model, job, mesh)
        if problem is None:
            plans.append(cost(model, job, mesh, hardware))
        else:
            rejected.append((mesh, problem))
    plans.sort(key=lambda p: (not p.fits, p.step_seconds if p.fits else p.memory_total_bytes, p.memory_total_bytes))
    fitting = [p for p in plans if p.fits]
    running = [p for p in fitting if p.runs]
    best = next(iter(running or fitting), None)
    return Search(tuple(plans), tuple(rejected), best)


def meshes(gpus: int) -> Iterator[Mesh]:
    """Every way to write `gpus` as data x ring x ulysses x tensor."""
    for data in _divisors(gpus):
        for ring in _divisors(gpus // data):
            for ulysses in _divisors(gpus // data // ring):
                yield Mesh(data, ring, ulysses, gpus // data // ring // ulysses)


def _divisors(n: int) -> list[int]:
    small = [i for i in range(1, math.isqrt(n) + 1) if n % i == 0]
    return sorted({*small, *(n // i for i in small)})


# ---------------------------------------------------------------------------------------------------------------------
# What cannot be, and what to know.


def refusal(model: ModelShape, job: Job, mesh: Mesh) -> str | None:
    """Why a mesh cannot hold a job, whatever the memory; None where it can."""
    if job.batch % mesh.data:
        return (
            f"data={mesh.data} needs a batch that is a multiple of {mesh.data}, the batch is {job.batch}; "
            f"try batch={mesh.data} or data={math.gcd(job.batch, mesh.data)}"
        )
    if mesh.sequence > job.context and job.mode != "decode":
        return f"ring={mesh.ring} x ulysses={mesh.ulysses} is more ranks than the context has tokens ({job.context})"
    for layer, _ in model.layer_kinds:
        problem = _heads_refusal(layer, job, mesh)
        if problem is not None:
            return problem
    return None


def _heads_refusal(layer: LayerShape, job: Job, mesh: Mesh) -> str | None:
    q, kv, t, u = layer.q_heads, layer.kv_heads, mesh.tensor, mesh.ulysses
    if q % t or (kv % t and t % kv):
        return f"tensor={t} does not divide the model's {q} query and {kv} KV heads; try tensor={math.gcd(q, t)}"
    width = layer.ffn or layer.expert_ffn
    if width % t:
        return f"tensor={t} does not divide the MLP's intermediate size {width}; try tensor={math.gcd(width, t)}"
    if layer.kind == "linear":
        return None
    if u > q // t:
        held = f"tensor={t} leaves {q // t}" if t > 1 else f"the model has {q}"
        ring = -(-u * mesh.ring * t // q)
        return f"ulysses={u} needs at least {u} query heads, {held}; try ulysses={q // t}, ring={ring}"
    if u > max(1, kv // t) and not job.kv_replication:
        return (
            f"ulysses={u} needs {u} KV heads or replication, the model has {max(1, kv // t)}; try "
            f"ulysses={max(1, kv // t)}, ring={u * mesh.ring // max(1, kv // t)}, or allow KV replication"
        )
    return None


def _notes(model: ModelShape, job: Job, mesh: Mesh) -> Iterator[str]:
    replicated = [(count, _replicated_bytes(layer, job, mesh)) for layer, count in model.layer_kinds]
    once = job.mode == "train" and job.activation_checkpointing  # then one layer's K and V exist at a time
    extra = max(each for _, each in replicated) if once else sum(count * each for count, each in replicated)
    kv = max(1, model.kv_heads // mesh.tensor)
    if extra > 0:
        kept = "KV cache" if job.mode != "train" else "K and V of a layer" if once else "K and V of all layers"
        yield (
            f"ulysses={mesh.ulysses} needs {mesh.ulysses} KV heads or replication, the model has {kv}: replicated, "
            f"+{extra / GB:.1f} GB {kept} per GPU"
        )
    if model.max_position is not None and job.context > model.max_position:
        yield f"the model's positions end at {model.max_position}: this context needs RoPE scaling"
    if model.assumption:
        yield model.assumption
    if job.mode != "train":
        yield f"`longspan generate` is not in this version: {job.mode} is planned from its formulas"
    yield from _not_in_this_version(model, job, mesh)


def _replicated_bytes(layer: LayerShape, job: Job, mesh: Mesh) -> float:
    """K and V that a GPU holds beyond an even share, because a KV head lies on several ranks."""
    kv, u = max(1, layer.kv_heads // mesh.tensor), mesh.ulysses
    if layer.kind == "linear" or layer.latent_dim or u <= kv:
        return 0.0
    most = max(share.kv_heads for share in heads_of(layer.q_heads, layer.kv_heads, mesh.tensor, u))
    held = cache_bytes(layer, replace(job, mode="prefill", batch=mesh.data), mesh)
    return held * (1 - kv / u / most)


def _not_in_this_version(model: ModelShape, job: Job, mesh: Mesh) -> list[str]:
    said = [
        f"{axis}={getattr(mesh, axis)} is planned from its formulas: this version of longspan does not run it"
        for axis in AXES
        if getattr(mesh, axis) > 1 and axis not in RUNS
    ]
    kinds = sorted({layer.kind for layer in model.layers} - {"full", "sliding"})
    said += [f"{kind} attention layers are refused by longspan.parallelize in this version" for kind in kinds]
    if any(layer.sinks for layer in model.layers):
        said.append(
            "attention sinks need kernel='eager' in this version, whose memory grows with the square of the tokens"
        )
    if job.mode != "train":
        return said
    asked = {"tiled MLP": job.tiled_mlp > 1, "tiled loss": job.tiled_loss, "activation offload": job.activation_offload}
    said += [
        f"{name} is planned, `longspan train` does not have it in this version" for name, on in asked.items() if on
    ]
    if job.optimizer != "adamw":
        said.append(f"`longspan train` has AdamW only, not {job.optimizer}")
    return said


# ---------------------------------------------------------------------------------------------------------------------
# Time.


def _times(model: ModelShape, job: Job, mesh: Mesh, hardware: Hardware) -> tuple[float, float]:
    """Seconds of computing, and of communication that nothing hides, in one step (the optimizer left out)."""
    compute = exposed = 0.0
    first_gather = 0.0
    for layer, count in model.layer_kinds:
        computing = layer_seconds(model, layer, job, mesh, hardware)
        compute += count * (computing.forward + computing.backward)
        method = _seconds(layer_method(model, layer, job, mesh), mesh, hardware)
        weights = [_seconds([sent], mesh, hardware)["fsdp"] for sent in layer_weights(layer, job, mesh)]
        if not hardware.overlaps:
            exposed += count * (sum(method.values()) + sum(weights))
            continue
        # The ring's next block travels while the current one computes; the exchange waits for its data.
        ring = method.pop("ring", 0.0) if job.mode != "decode" else 0.0
        exposed += count * (sum(method.values()) + max(0.0, ring - computing.attention))
        # Weights of the next layer are gathered, gradients of the last one scattered, while this one computes.
        gather, *rest = weights or [0.0]
        exposed += count * (max(0.0, gather - computing.forward) + max(0.0, sum(rest) - computing.backward))
        # Before the first layer there is nothing to hide its gather.
        first_gather = max(first_gather, min(gather, computing.forward))
    head = head_work(model, job, mesh) / speed(hardware, job) * (3 if job.mode == "train" else 1)
    head += loss_seconds(model, job, mesh, hardware)
    around = sum(_seconds(around_the_layers(model, job, mesh), mesh, hardware).values())
    micro = micro_batches(job, mesh)
    return micro * (compute + head), micro * (exposed + around + first_gather)


def _seconds(sents: list[Sent], mesh: Mesh, hardware: Hardware) -> dict[str, float]:
    """Seconds by axis."""
    by_axis: dict[str, float] = {"fsdp": 0.0}
    for sent in sents:
        each = hardware.seconds(sent.op, sent.axis, sent.bytes, mesh.stride(sent.axis), mesh.size(sent.axis))
        by_axis[sent.axis] = by_axis.get(sent.axis, 0.0) + sent.calls * each
    return by_axis


# ---------------------------------------------------------------------------------------------------------------------
# The longest context.


def longest_context(model: ModelShape, job: Job, mesh: Mesh, hardware: Hardware, limit: int = 1 << 34) -> int:
    """The largest context whose memory fits, by bisection: memory never falls as the context grows.

    Args:
        limit: where to stop looking.
    """

    def fits(context: int) -> bool:
        return sum(memory(model, replace(job, context=context), mesh, hardware).values()) <= hardware.memory_bytes

    low, high = 0, max(1, mesh.sequence)
    while high < limit and fits(high):
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
