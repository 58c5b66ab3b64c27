"""What every collective of a step sends, counted as the code sends it.

The rows for Ulysses, the ring, tensor parallelism, Megatron SP, FSDP, the gradient sum and the loss are compared with
the running code to the byte in the tests. LASP-2 is a formula (its source stands beside it).
"""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from longspan.core.memory import CHECKPOINTING, Memory
from longspan.core.tile_sizes import layers_per_checkpoint
from longspan.plan.cost.collective import Sent
from longspan.plan.cost.per_rank import micro_batches, runs_between
from longspan.plan.cost.tensor import around_tensor, layer_tensor
from longspan.plan.cost.weights import around_the_layers, layer_weights, sums_gradients, sums_gradients_once

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from longspan.plan.hardware import Hardware
    from longspan.plan.job import Job, Mesh
    from longspan.plan.models.shape import LayerShape, ModelShape


@dataclass(frozen=True)
class Collective:
    """One kind of collective in a step.

    Attributes:
        op: one of `longspan.plan.hardware.OPS`.
        axis: the mesh axis it runs over; `fsdp` is data x ring x ulysses together, `sequence` ring x ulysses.
        what: what is sent.
        bytes_per_gpu: bytes that one GPU sends in one call (the GPU that sends most, where they differ).
        count: calls in a step.
        seconds: of all calls together.
        link: "intra" or "inter": whether the group stays inside a node.
        beside: what it runs beside (the attention to the block at hand, a neighbouring layer's computing); "" where
            everything waits for it.
        method: whether the sequence or tensor method sends it, rather than weights, gradients and loss.
    """

    op: str
    axis: str
    what: str
    bytes_per_gpu: int
    count: int
    seconds: float
    link: str
    beside: str
    method: bool

    @property
    def bytes_total(self) -> int:
        """Bytes that one GPU sends in a step."""
        return self.bytes_per_gpu * self.count


def communication(model: ModelShape, job: Job, mesh: Mesh, hardware: Hardware) -> tuple[Collective, ...]:
    """Every collective of one step, in the order of the forward, equal ones counted together."""
    together: dict[tuple[str, str, str, int, bool], int] = {}
    for sent in _step(model, job, mesh, once=sums_gradients_once(model, job, mesh, hardware), on_cpu=hardware.on_cpu):
        if sent.bytes and sent.calls and mesh.size(sent.axis) > 1:
            key = (sent.op, sent.axis, sent.what, sent.bytes, sent.method)
            together[key] = together.get(key, 0) + sent.calls
    return tuple(
        Collective(
            op=op,
            axis=axis,
            what=what,
            bytes_per_gpu=size,
            count=count,
            seconds=count * hardware.seconds(op, axis, size, mesh.stride(axis), mesh.size(axis)),
            link=hardware.link_of(mesh.stride(axis), mesh.size(axis)),
            beside=_beside(op, what) if hardware.hideable(op, axis) else "",
            method=method,
        )
        for (op, axis, what, size, method), count in together.items()
    )


def _beside(op: str, what: str) -> str:
    if op == "p2p":
        return "attention"
    return "computing" if what in ("weights of a layer", "gradients of a layer") else ""


def _step(model: ModelShape, job: Job, mesh: Mesh, once: bool, on_cpu: bool) -> Iterator[Sent]:
    micro = micro_batches(job, mesh)
    summed = 1 if once else micro
    for layer, layers in model.layer_kinds:
        whole = [sent for sent in layer_tensor(model, layer, job, mesh) if not sent.method]
        for sent in (*layer_method(model, layer, job, mesh), *whole, *layer_weights(layer, job, mesh)):
            times = layers * (summed if sums_gradients(sent) else micro) * (1 if sent.method else job.forwards)
            yield Sent(sent.op, sent.axis, sent.what, sent.bytes, sent.calls * times, sent.method)
    for sent in between(model, job, mesh):
        yield replace(sent, calls=sent.calls * micro)
    for sent in around_tensor(model, job, mesh, on_cpu):
        yield replace(sent, calls=sent.calls * micro)
    for sent in around_the_layers(model, job, mesh):
        times = summed if sums_gradients(sent) else micro * job.forwards
        yield Sent(sent.op, sent.axis, sent.what, sent.bytes, sent.calls * times, sent.method)


def between(model: ModelShape, job: Job, mesh: Mesh) -> list[Sent]:
    """What layers send in a micro-batch whose forward runs once more for the inputs of those behind them
    (`Memory.layers_per_checkpoint`). Their weights are gathered for it, but for the layer whose backward comes next.
    """
    layers, found = model.layers, list[Sent]()
    if not runs_between(len(layers), job):
        return found
    group = layers_per_checkpoint(len(layers), job.memory.layers_per_checkpoint)
    lasts = [min(at // group * group + group, len(layers)) - 1 for at in range(len(layers))]
    # Layers of one kind send the same: cost each kind once.
    runs = Counter(
        (layer, at < last - 1) for at, (layer, last) in enumerate(zip(layers, lasts, strict=True)) if at < last
    )
    for (layer, gathers), count in runs.items():
        sent = layer_tensor(model, layer, replace(job, mode="prefill", batch=mesh.data), mesh)
        if job.memory.checkpointing == "full":
            sent += _forward_alone(functools.partial(layer.mixer.sent, mesh=mesh), job)
        if gathers:
            sent += layer_weights(layer, job, mesh)[:1]
        found += [replace(each, calls=each.calls * count) for each in sent]
    return found


def _forward_alone(sent: Callable[[Job], list[Sent]], job: Job) -> list[Sent]:
    """What one forward sends: what a layer that is computed twice sends more than one that is computed once."""
    once, twice = (
        sent(replace(job, memory=Memory(checkpointing=kept, head_chunks=job.memory.head_chunks)))
        for kept in CHECKPOINTING
        if kept in ("none", "full")
    )
    more = ((both, both.calls - one.calls) for one, both in zip(once, twice, strict=True))
    return [replace(both, calls=calls) for both, calls in more if calls]


def layer_method(model: ModelShape, layer: LayerShape, job: Job, mesh: Mesh) -> list[Sent]:
    """What the sequence and tensor methods send for one layer and one micro-batch, forward and backward."""
    return layer.mixer.sent(job, mesh) + [sent for sent in layer_tensor(model, layer, job, mesh) if sent.method]
