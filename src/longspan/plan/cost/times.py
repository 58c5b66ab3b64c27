"""The seconds of a step: computing, and what communication adds because nothing hides it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from longspan.plan.cost.communication import between, layer_method
from longspan.plan.cost.compute import LayerSeconds, head_work, layer_seconds, loss_seconds, speed
from longspan.plan.cost.local import micro_batches, mixing_passes, runs_between
from longspan.plan.cost.tensor import around_tensor, layer_tensor
from longspan.plan.cost.weights import around_the_layers, layer_weights, sums_gradients, sums_gradients_once

if TYPE_CHECKING:
    from longspan.plan.cost.ring import RingSchedule
    from longspan.plan.cost.sent import Sent
    from longspan.plan.hardware import Hardware
    from longspan.plan.job import Job, Mesh
    from longspan.plan.models.shape import ModelShape


def step_times(model: ModelShape, job: Job, mesh: Mesh, hardware: Hardware) -> tuple[float, float]:
    """Seconds of computing, and of communication that nothing hides, in one step (the optimizer left out)."""
    computing = [layer_seconds(model, layer, job, mesh, hardware) for layer, _ in model.layer_kinds]
    compute = sum(
        count * (seconds.forward + seconds.backward)
        for (_, count), seconds in zip(model.layer_kinds, computing, strict=True)
    )
    head = head_work(model, job, mesh) / speed(hardware, job) * (3 if job.mode == "train" else 1)
    head += loss_seconds(model, job, mesh, hardware)
    micro = micro_batches(job, mesh)
    summed = 1 if sums_gradients_once(model, job, mesh, hardware) else micro
    exposed = summed * _exposed(model, job, mesh, hardware, computing, sums=True)
    if micro > summed:
        exposed += (micro - summed) * _exposed(model, job, mesh, hardware, computing, sums=False)
    return micro * (compute + head), exposed


def _exposed(
    model: ModelShape, job: Job, mesh: Mesh, hardware: Hardware, of_layers: list[LayerSeconds], sums: bool
) -> float:
    """Seconds of communication that nothing hides in one micro-batch; `sums`: whether gradients are summed after it."""
    exposed = first_gather = 0.0
    for (layer, count), computing in zip(model.layer_kinds, of_layers, strict=True):
        sents = layer_method(model, layer, job, mesh)
        sharded = [sent for sent in layer_weights(layer, job, mesh) if sums or not sums_gradients(sent)]
        weights = [job.forwards * _seconds([sent], mesh, hardware)["fsdp"] for sent in sharded]
        if not hardware.overlaps:
            exposed += count * (sum(_seconds(sents, mesh, hardware).values()) + sum(weights))
            continue
        # A ring's next block travels while the current one computes; an exchange or an all-gather waits for its data.
        ring = [sent for sent in sents if sent.op == "p2p"]
        waits = [sent for sent in sents if sent.op != "p2p"]
        exposed += count * sum(_seconds(waits, mesh, hardware).values())
        exposed -= count * _hidden_exchange(waits, computing, job, mesh, hardware)
        schedule = layer.mixer.ring_schedule(job, mesh) if ring else None
        if schedule is not None:
            exposed += count * _not_hidden(ring, computing, schedule, job, mesh, hardware)
        # Weights of the next layer are gathered, gradients of the last one scattered, while this one computes.
        gather, *rest = weights or [0.0]
        exposed += count * (max(0.0, gather - computing.forward) + max(0.0, sum(rest) - computing.backward))
        # Before the first layer there is nothing to hide its gather.
        first_gather = max(first_gather, min(gather, computing.forward))
    # An input that nobody keeps is made again at once: only a ring has its attention beside it.
    again = between(model, job, mesh)
    sends = sum(_seconds([sent for sent in again if sent.op != "p2p"], mesh, hardware).values())
    rings = sum(_seconds([sent for sent in again if sent.op == "p2p"], mesh, hardware).values())
    beside = of_layers[0].attention_forward * runs_between(len(model.layers), job) if hardware.overlaps else 0.0
    exposed += sends + max(0.0, rings - beside)
    around = [sent for sent in around_the_layers(model, job, mesh) if sums or not sums_gradients(sent)]
    # What the tensor axis sends beside the layers' own sums: embeddings, head, softmax, gradients of whole weights.
    tensor = around_tensor(model, job, mesh, hardware.on_cpu)
    for layer, count in model.layer_kinds:
        of_layer = [sent for sent in layer_tensor(model, layer, job, mesh) if not sent.method]
        tensor += [replace(sent, calls=sent.calls * count) for sent in of_layer]
    exposed += sum(_seconds(tensor, mesh, hardware).values())
    return exposed + first_gather + job.forwards * sum(_seconds(around, mesh, hardware).values())


def _hidden_exchange(sents: list[Sent], computing: LayerSeconds, job: Job, mesh: Mesh, hardware: Hardware) -> float:
    """Seconds of one layer's exchanges that the attention of other chunks of heads hides, forwards and backwards.

    Of n equal chunks the first one's way there and the last one's way home are beside nothing: at the best n - 1 of n
    parts of an exchange run beside as many parts of the attention.
    """
    ways = {name: [sent for sent in sents if sent.op == "all_to_all" and sent.what.endswith(name)] for name in _WAYS}
    n = len(ways["O to tokens"])
    if n < 2 or job.exchange_chunks == 1:
        return 0.0
    forwards, backwards = mixing_passes(job)
    seconds = {name: _seconds(way, mesh, hardware).get("ulysses", 0.0) for name, way in ways.items()}
    forward = seconds["Q, K, V to heads"] + seconds["O to tokens"]
    backward = seconds["dO to heads"] + seconds["dQ, dK, dV to tokens"]
    part = (n - 1) / n
    hidden = min(forward * part, forwards * computing.attention_forward * part)
    return hidden + min(backward * part, backwards * computing.attention_backward * part)


_WAYS = ("Q, K, V to heads", "O to tokens", "dO to heads", "dQ, dK, dV to tokens")


def _not_hidden(
    ring: list[Sent], computing: LayerSeconds, schedule: RingSchedule, job: Job, mesh: Mesh, hardware: Hardware
) -> float:
    """Seconds of a ring's messages that the attention beside them does not hide, in one layer's forwards and backwards.

    Args:
        ring: the rows of `layer_method`, of each piece of the heads two: keys and values, gradients.
        computing: of the layer.
        schedule: how its KV blocks go round.
        job: the job.
        mesh: the mesh.
        hardware: on what.
    """
    rounds = schedule.routes.rounds
    if rounds == 0:
        return 0.0
    forwards, backwards = mixing_passes(job)
    # Pieces one after the other are as one with messages of all of them: both sides of `waiting` grow alike.
    kv, gradient = (sum(_seconds(rows, mesh, hardware).values()) / rounds for rows in (ring[::2], ring[1::2]))
    kv, gradient = kv / (forwards + backwards), gradient / max(1, backwards)
    forward = waiting(kv, 0.0, computing.attention_forward, schedule.own, rounds)
    return forwards * forward + backwards * waiting(kv, gradient, computing.attention_backward, schedule.own, rounds)


def waiting(kv: float, gradient: float, attention: float, own: float, rounds: int) -> float:
    """Seconds in which a rank of a ring waits for messages, in one forward or backward of an attention.

    Round 0 computes the rank's own block, each further round one that has come. While a round computes, the next
    round's block arrives, and from round 2 on a gradient of the round before. In a backward half of the own block waits
    until the end, to hide the last gradient.

    Args:
        kv: seconds of a message of keys and values.
        gradient: seconds of a message of gradients, 0 in a forward.
        attention: seconds of computing, all rounds together.
        own: the share of it that is round 0's.
        rounds: hops of the block that travels furthest, at least 1.
    """
    first, each = attention * own * (0.5 if gradient else 1.0), attention * (1 - own) / rounds
    arriving = [kv - first] + [kv - each] * (rounds > 1) + [gradient - each] * (rounds > 1) + [gradient - first]
    between = max(0, rounds - 2) * max(0.0, kv + gradient - each)
    return sum(max(0.0, wait) for wait in arriving) + between


def _seconds(sents: list[Sent], mesh: Mesh, hardware: Hardware) -> dict[str, float]:
    """Seconds by axis."""
    by_axis: dict[str, float] = {"fsdp": 0.0}
    for sent in sents:
        each = hardware.seconds(sent.op, sent.axis, sent.bytes, mesh.stride(sent.axis), mesh.size(sent.axis))
        by_axis[sent.axis] = by_axis.get(sent.axis, 0.0) + sent.calls * each
    return by_axis
