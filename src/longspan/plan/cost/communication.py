"""Every collective of a step.

Tests compare Ulysses, ring, tensor parallelism, Megatron SP, FSDP, gradient sum and loss with the running code to the
byte. LASP-2 is a formula, with its source.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from longspan.core.tile_sizes import layers_per_checkpoint
from longspan.plan.cost.tensor import layer_tensor_sent, outer_tensor_sent
from longspan.plan.cost.weights import layer_weights_sent, outer_weights_sent, sums_gradients, sums_gradients_once
from longspan.plan.hardware import Hardware
from longspan.plan.job import Job, Mesh, micro_batches, recomputed_inputs
from longspan.plan.layers import Sent
from longspan.plan.models.shape import LayerShape, ModelShape


@dataclass(frozen=True)
class Collective:
    """Equal collectives of a step.

    Attributes:
        op: one of `longspan.plan.hardware.OPS`.
        axis: mesh axis; `fsdp` is data x ring x ulysses together, `sequence` ring x ulysses.
        what: what is sent.
        bytes_per_gpu: sent by one GPU in one call, max over ranks.
        count: calls in a step.
        seconds: of all calls together.
        link: "intra" or "inter": whether the group stays inside a node.
        overlaps_with: the computation that it overlaps with ("attention", "computing"); "" for none.
        method: whether the sequence or tensor method sends it, rather than weights, gradients and loss.
    """

    op: str
    axis: str
    what: str
    bytes_per_gpu: int
    count: int
    seconds: float
    link: str
    overlaps_with: str
    method: bool

    @property
    def bytes_total(self) -> int:
        """Bytes that one GPU sends in a step."""
        return self.bytes_per_gpu * self.count


def communication(model: ModelShape, job: Job, mesh: Mesh, hardware: Hardware) -> tuple[Collective, ...]:
    """Return every collective of one step in the order of the forward; equal ones are counted together."""
    calls: dict[Sent, int] = {}
    for sent in _step(model, job, mesh, once=sums_gradients_once(model, job, mesh, hardware), on_cpu=hardware.on_cpu):
        if sent.bytes and sent.calls and mesh.size(sent.axis) > 1:
            key = replace(sent, calls=1)
            calls[key] = calls.get(key, 0) + sent.calls
    return tuple(_timed(sent, count, mesh, hardware) for sent, count in calls.items())


def _timed(sent: Sent, count: int, mesh: Mesh, hardware: Hardware) -> Collective:
    stride, size = mesh.stride(sent.axis), mesh.size(sent.axis)
    return Collective(
        op=sent.op,
        axis=sent.axis,
        what=sent.what,
        bytes_per_gpu=sent.bytes,
        count=count,
        seconds=count * hardware.seconds(sent.op, sent.axis, sent.bytes, stride, size),
        link=hardware.link_of(stride, size),
        overlaps_with=_overlapped_with(sent) if hardware.hideable(sent.op, sent.axis) else "",
        method=sent.method,
    )


def _overlapped_with(sent: Sent) -> str:
    if sent.op == "p2p":
        return "attention"
    return "computing" if sent.what in ("weights of a layer", "gradients of a layer") else ""


def _times(sent: Sent, times: int) -> Sent:
    return replace(sent, calls=sent.calls * times)


def _step(model: ModelShape, job: Job, mesh: Mesh, once: bool, on_cpu: bool) -> Iterator[Sent]:
    micro = micro_batches(job, mesh)
    sums = 1 if once else micro
    for layer, layers in model.layer_kinds:
        outside_method = [sent for sent in layer_tensor_sent(model, layer, job, mesh) if not sent.method]
        for sent in (*method_sent(model, layer, job, mesh), *outside_method, *layer_weights_sent(layer, job, mesh)):
            forwards = 1 if sent.method else job.forwards
            yield _times(sent, layers * (sums if sums_gradients(sent) else micro) * forwards)
    for sent in (*input_recompute_sent(model, job, mesh), *outer_tensor_sent(model, job, mesh, on_cpu)):
        yield _times(sent, micro)
    for sent in outer_weights_sent(model, job, mesh):
        yield _times(sent, sums if sums_gradients(sent) else micro * job.forwards)


def input_recompute_sent(model: ModelShape, job: Job, mesh: Mesh) -> list[Sent]:
    """Return what recomputing layers' inputs sends in a micro-batch (`Memory.layers_per_checkpoint`).

    All layers but the last of each group run a further forward. Their weights are gathered for it, except for the layer
    whose backward comes next.
    """
    layers = model.layers
    recomputed: list[Sent] = []
    if not recomputed_inputs(len(layers), job):
        return recomputed
    group = layers_per_checkpoint(len(layers), job.memory.layers_per_checkpoint)
    last_of_group = [min(at // group * group + group, len(layers)) - 1 for at in range(len(layers))]
    # Equal layers send the same: cost each kind once.
    runs = Counter(
        (layer, at < last - 1) for at, (layer, last) in enumerate(zip(layers, last_of_group, strict=True)) if at < last
    )
    for (layer, gathers), count in runs.items():
        forward = replace(job, mode="prefill", batch=mesh.data)
        sent = layer_tensor_sent(model, layer, forward, mesh)
        if job.memory.checkpointing == "full":
            sent += [each for each in layer.mixer.sent(forward, mesh) if each.calls]
        if gathers:
            sent += layer_weights_sent(layer, job, mesh)[:1]
        recomputed += [_times(each, count) for each in sent]
    return recomputed


@functools.lru_cache(maxsize=4096)
def method_sent(model: ModelShape, layer: LayerShape, job: Job, mesh: Mesh) -> tuple[Sent, ...]:
    """Return what the sequence and tensor methods send for one layer and one micro-batch, forward and backward."""
    return (*layer.mixer.sent(job, mesh), *(s for s in layer_tensor_sent(model, layer, job, mesh) if s.method))
