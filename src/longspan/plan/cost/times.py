"""The seconds of a step: computing, and what communication adds because nothing hides it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from longspan.plan.cost.communication import between, layer_method
from longspan.plan.cost.compute import LayerSeconds, head_work, layer_seconds, loss_seconds, speed
from longspan.plan.cost.per_rank import micro_batches, mixing_passes, runs_between
from longspan.plan.cost.tensor import around_tensor, layer_tensor
from longspan.plan.cost.weights import around_the_layers, layer_weights, sums_gradients, sums_gradients_once

if TYPE_CHECKING:
    from collections.abc import Sequence

    from longspan.plan.cost.collective import Sent
    from longspan.plan.cost.ring import RingSchedule
    from longspan.plan.hardware import Hardware
    from longspan.plan.job import Job, Mesh
    from longspan.plan.models.shape import LayerShape, ModelShape


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
        exposed += count * layer_exposed(model, layer, computing, job, mesh, hardware)
        sharded = [sent for sent in layer_weights(layer, job, mesh) if sums or not sums_gradients(sent)]
        exposed += count * job.forwards * _never_hidden(sharded, mesh, hardware)
        # Weights of the next layer are gathered, gradients of the last one scattered, while this one computes.
        gather, *rest = [job.forwards * _hideable([sent], mesh, hardware) for sent in sharded] or [0.0]
        exposed += count * (max(0.0, gather - computing.forward) + max(0.0, sum(rest) - computing.backward))
        # Before the first layer there is nothing to hide its gather.
        first_gather = max(first_gather, min(gather, computing.forward))
    # An input that nobody keeps is made again at once: only a ring has its attention beside it.
    ring, waits = _ring_and_rest(between(model, job, mesh))
    beside = of_layers[0].attention_forward * runs_between(len(model.layers), job)
    exposed += seconds_of(waits, mesh, hardware) + _never_hidden(ring, mesh, hardware)
    exposed += max(0.0, _hideable(ring, mesh, hardware) - beside)
    around = [sent for sent in around_the_layers(model, job, mesh) if sums or not sums_gradients(sent)]
    # What the tensor axis sends beside the layers' own sums: embeddings, head, softmax, gradients of whole weights.
    tensor = around_tensor(model, job, mesh, hardware.on_cpu)
    for layer, count in model.layer_kinds:
        of_layer = [sent for sent in layer_tensor(model, layer, job, mesh) if not sent.method]
        tensor += [replace(sent, calls=sent.calls * count) for sent in of_layer]
    exposed += seconds_of(tensor, mesh, hardware)
    return exposed + first_gather + job.forwards * seconds_of(around, mesh, hardware)


def layer_exposed(
    model: ModelShape, layer: LayerShape, computing: LayerSeconds, job: Job, mesh: Mesh, hardware: Hardware
) -> float:
    """Seconds that one layer's sequence and tensor methods communicate and nothing hides, in one micro-batch.

    A ring's next block travels while the current one computes, and a chunk of heads while another does; an exchange of
    all heads or an all-gather waits for its data. What of a message takes the cores (`Hardware.hideable`) is exposed
    whatever computes meanwhile.

    Args:
        model: the model.
        layer: one of its layers.
        computing: of the layer.
        job: the job.
        mesh: the mesh.
        hardware: on what.
    """
    ring, waits = _ring_and_rest(layer_method(model, layer, job, mesh))
    exposed = seconds_of(waits, mesh, hardware) - _hidden_exchange(waits, computing, job, mesh, hardware)
    exposed += _never_hidden(ring, mesh, hardware)
    schedule = layer.mixer.ring_schedule(job, mesh) if ring else None
    return exposed + (_not_hidden(ring, computing, schedule, job, mesh, hardware) if schedule is not None else 0.0)


def _ring_and_rest(sents: list[Sent]) -> tuple[list[Sent], list[Sent]]:
    return [sent for sent in sents if sent.op == "p2p"], [sent for sent in sents if sent.op != "p2p"]


def _hidden_exchange(sents: list[Sent], computing: LayerSeconds, job: Job, mesh: Mesh, hardware: Hardware) -> float:
    """Seconds of one layer's exchanges that the attention of other chunks of heads hides, forwards and backwards.

    Of n chunks the first one's way there and the last one's way home are beside nothing; the others' run beside at the
    best n - 1 of n parts of the attention. Where chunks share a KV head, it goes there with the first of them and its
    gradient home with the last, so that these messages are larger than an n-th.
    """
    exchanges = [sent for sent in sents if sent.op == "all_to_all"]
    ways = {
        name: [_hideable([sent], mesh, hardware) for sent in exchanges if sent.what.endswith(name)] for name in _WAYS
    }
    n = len(ways["O to tokens"])
    if n < 2 or job.overlap_chunks == 1:
        return 0.0
    forwards, backwards = mixing_passes(job)
    forward = sum(ways["Q, K, V to heads"][1:]) + sum(ways["O to tokens"][:-1])
    backward = sum(ways["dO to heads"][1:]) + sum(ways["dQ, dK, dV to tokens"][:-1])
    part = (n - 1) / n
    hidden = min(forward, forwards * computing.attention_forward * part)
    return hidden + min(backward, backwards * computing.attention_backward * part)


_WAYS = ("Q, K, V to heads", "O to tokens", "dO to heads", "dQ, dK, dV to tokens")


def _not_hidden(
    ring: list[Sent], computing: LayerSeconds, schedule: RingSchedule, job: Job, mesh: Mesh, hardware: Hardware
) -> float:
    """Of the seconds of a ring's messages that can be hidden, those that the attention beside them does not hide, in
    one layer's forwards and backwards.

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
    kv, gradient = (_hideable(rows, mesh, hardware) / rounds for rows in (ring[::2], ring[1::2]))
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


def seconds_of(sents: Sequence[Sent], mesh: Mesh, hardware: Hardware) -> float:
    """Seconds in all."""
    return sum(sent.calls * _each(sent, mesh, hardware) for sent in sents)


def _hideable(sents: Sequence[Sent], mesh: Mesh, hardware: Hardware) -> float:
    """Of these the seconds that can run beside computing."""
    return sum(sent.calls * _each(sent, mesh, hardware) * hardware.hideable(sent.op, sent.axis) for sent in sents)


def _never_hidden(sents: Sequence[Sent], mesh: Mesh, hardware: Hardware) -> float:
    """Of these the seconds that no computing hides: the rest."""
    return sum(sent.calls * _each(sent, mesh, hardware) * (1 - hardware.hideable(sent.op, sent.axis)) for sent in sents)


def _each(sent: Sent, mesh: Mesh, hardware: Hardware) -> float:
    """Seconds of one call."""
    return hardware.seconds(sent.op, sent.axis, sent.bytes, mesh.stride(sent.axis), mesh.size(sent.axis))
