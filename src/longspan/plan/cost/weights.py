"""Weights, gradients and loss: shards at rest, gathered weights, and what FSDP, gradient sums and the loss send."""

from __future__ import annotations

import functools
import math

from longspan.core.tile_sizes import gradient_buckets, reduces_once
from longspan.plan.cost.tensor import cut_shape
from longspan.plan.hardware import Hardware
from longspan.plan.job import Job, Mesh, micro_batches
from longspan.plan.layers import CostContext, Parameter, Sent
from longspan.plan.models.shape import LayerShape, ModelShape

# ---------------------------------------------------------------------------------------------------------------------
# At rest, and gathered.


@functools.lru_cache(maxsize=4096)
def shard_elements(parameters: tuple[Parameter, ...], ranks: int, tensor: int = 1) -> int:
    """Return the elements of one rank's shard.

    FSDP2 cuts every parameter (a tensor rank's part of it) along its first dimension and pads to equal parts.
    """
    shapes = [cut_shape(p, tensor) for p in parameters]
    return sum(-(-shape[0] // ranks) * math.prod(shape[1:]) for shape in shapes)


def weight_ranks(job: Job, mesh: Mesh) -> int:
    """Return the ranks over which weights are sharded."""
    return mesh.weights if job.weight_sharding else 1


def elements_at_rest(model: ModelShape, job: Job, mesh: Mesh) -> int:
    """Return the elements of all weights on a rank."""
    return _elements_at_rest(model, weight_ranks(job, mesh), mesh.tensor)


@functools.lru_cache(maxsize=1024)
def _elements_at_rest(model: ModelShape, ranks: int, tensor: int) -> int:
    layers = sum(count * shard_elements(layer.parameters, ranks, tensor) for layer, count in model.layer_kinds)
    return layers + shard_elements(model.root, ranks, tensor)


def weights_at_rest(model: ModelShape, job: Job, mesh: Mesh) -> dict[str, int]:
    """Return the bytes of a rank's weights and optimizer state."""
    shard = elements_at_rest(model, job, mesh)
    moments = 8 if job.mode == "train" else 0  # AdamW's two, in fp32
    return {"weights": shard * job.bytes_per_weight, "optimizer": shard * moments}


def on_host(c: CostContext) -> bool:
    """Whether weights, gradients and optimizer states are in the host's memory instead of the GPU's."""
    return c.job.memory.cpu_offload and not c.on_cpu


def gathers(job: Job, mesh: Mesh) -> bool:
    """Whether weights are gathered for compute, because they are sharded or on the host."""
    return weight_ranks(job, mesh) > 1 or job.memory.cpu_offload


def gathered_bytes(model: ModelShape, job: Job, mesh: Mesh, layers: int, heads: int = 0) -> int:
    """Return the bytes of gathered weights: those outside layers that stay gathered, `layers` of the largest layers,
    and `heads` times the head's own FSDP group.
    """
    if not gathers(job, mesh):
        return 0
    largest = max(layer.params for layer, _ in model.layer_kinds)
    return (always_gathered(model) + heads * own_head(model) + layers * largest) // mesh.tensor * job.bytes_per_element


def layer_gradient(layer: LayerShape, job: Job, mesh: Mesh) -> int:
    """Return the bytes of one layer's fp32 gradients on a rank."""
    return 4 * shard_elements(layer.parameters, weight_ranks(job, mesh), mesh.tensor)


@functools.lru_cache(maxsize=64)
def outer_groups(model: ModelShape) -> tuple[tuple[str, tuple[Parameter, ...]], ...]:
    """Return FSDP's groups outside the layers, as `longspan.hf.weights.fsdp` makes them.

    One group if embedding and head are tied; else the embedding, learnt positions if any, and final norm with head.
    """
    if model.tied:
        return (("embeddings and head", model.root),)
    embedding, *rest = model.root
    positions = tuple(p for p in rest if len(p.shape) > 1 and p is not rest[-1])
    head = tuple(p for p in rest if p not in positions)
    groups = (("the embedding", (embedding,)), ("positions", positions), ("final norm and head", head))
    return tuple((what, parameters) for what, parameters in groups if parameters)


@functools.lru_cache(maxsize=64)
def own_head(model: ModelShape) -> int:
    """Return the elements of the head's own FSDP group; 0 for a tied head."""
    return sum(p.numel for what, parameters in outer_groups(model) if what == "final norm and head" for p in parameters)


@functools.lru_cache(maxsize=64)
def always_gathered(model: ModelShape) -> int:
    """Return the elements outside layers that stay gathered all through a step.

    An untied embedding is gathered for its forward only, and an untied head is its own group.
    """
    groups = dict(outer_groups(model))
    return model.root_params - sum(p.numel for p in groups.get("the embedding", ())) - own_head(model)


# ---------------------------------------------------------------------------------------------------------------------
# Sent.


def layer_weights_sent(layer: LayerShape, job: Job, mesh: Mesh) -> list[Sent]:
    """Return FSDP's traffic for one layer: weights gathered for forward and backward, fp32 gradients scattered."""
    f = mesh.weights
    if not job.weight_sharding or f == 1:
        return []
    shard = shard_elements(layer.parameters, f, mesh.tensor)
    gather = Sent("all_gather", "fsdp", "weights of a layer", shard * (f - 1) * job.bytes_per_element, method=False)
    if job.mode != "train":
        return [gather]
    scatter = Sent("reduce_scatter", "fsdp", "gradients of a layer", shard * (f - 1) * 4, method=False)
    return [gather, gather, scatter]


def sums_gradients(sent: Sent) -> bool:
    """Whether a collective sums gradients over the ranks."""
    return sent.axis == "fsdp" and (sent.op == "reduce_scatter" or "gradients" in sent.what)


def sums_gradients_once(model: ModelShape, job: Job, mesh: Mesh, hardware: Hardware) -> bool:
    """Whether a step of several micro-batches sums its gradients over the ranks once, as `longspan train` decides."""
    all_gradients = model.params // mesh.tensor * 4
    sharded = job.weight_sharding and mesh.weights > 1
    return micro_batches(job, mesh) > 1 and reduces_once(sharded, all_gradients, hardware.memory_bytes)


def outer_weights_sent(model: ModelShape, job: Job, mesh: Mesh) -> list[Sent]:
    """Return the traffic of embeddings, head and loss, and without FSDP of the sum of all gradients.

    FSDP gathers each group outside the layers once a step: an embedding's backward needs no weights, and a head's
    backward follows its forward.
    """
    f = mesh.weights
    if mesh.gpus == 1:
        return []
    # Five int64 that describe the batch: the hosts of all ranks compare them before anything else.
    everyone = "fsdp" if f > 1 else "tensor"
    sent = [Sent("all_gather", everyone, "batches compared", 5 * 8 * (mesh.gpus - 1), method=False)]
    if f == 1:
        return sent
    if job.weight_sharding:
        for what, parameters in outer_groups(model):
            shard = shard_elements(parameters, f, mesh.tensor) * (f - 1)
            sent.append(Sent("all_gather", "fsdp", f"weights of {what}", shard * job.bytes_per_element, method=False))
            if job.mode == "train":
                sent.append(Sent("reduce_scatter", "fsdp", f"gradients of {what}", shard * 4, method=False))
    if job.mode == "train":
        # Three fp64 numbers: the sum of the tokens' losses, their count, and the digests of batches on a GPU.
        sent.append(Sent("all_reduce", "fsdp", "loss", 2 * 24 * (f - 1) // f, method=False))
        if not job.weight_sharding:
            sent += _gradient_sum(model, mesh)
    return sent


def _gradient_sum(model: ModelShape, mesh: Mesh) -> list[Sent]:
    """Return one flag per parameter, then fp32 gradients in buckets, as `longspan.hf.weights.gradients` sums them."""
    f = mesh.weights
    buckets, flags = _buckets(model, mesh.tensor)
    sent = [Sent("all_reduce", "fsdp", "which gradients exist", 2 * 4 * flags * (f - 1) // f, method=False)]
    for elements in buckets:
        sent.append(Sent("all_reduce", "fsdp", "gradients", 2 * 4 * elements * (f - 1) // f, method=False))
    return sent


@functools.lru_cache(maxsize=64)
def _buckets(model: ModelShape, tensor: int) -> tuple[tuple[int, ...], int]:
    """Return the elements of every bucket, and the number of parameters; in the order of the model's parameters."""
    first = [p for p in model.root if "embed" in p.name or "wte" in p.name or "wpe" in p.name]
    last = [p for p in model.root if p not in first]
    in_order = [*first, *(p for layer in model.layers for p in layer.parameters), *last]
    sizes = [math.prod(cut_shape(p, tensor)) for p in in_order]
    return tuple(sum(sizes[i] for i in bucket) for bucket in gradient_buckets(sizes)), len(in_order)
