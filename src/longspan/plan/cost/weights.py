"""Weights, gradients and loss: what FSDP, or the sum of gradients, and the loss send, and the shards they leave."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

from longspan.core.accumulation import sums_once
from longspan.core.tile_sizes import gradient_buckets
from longspan.plan.cost.collective import Sent
from longspan.plan.cost.per_rank import micro_batches
from longspan.plan.cost.tensor import cut_shape

if TYPE_CHECKING:
    from longspan.plan.hardware import Hardware
    from longspan.plan.job import Job, Mesh
    from longspan.plan.models.shape import LayerShape, ModelShape, Parameter


@functools.lru_cache(maxsize=4096)
def shard_elements(parameters: tuple[Parameter, ...], ranks: int, tensor: int = 1) -> int:
    """Elements of one rank's shard, as FSDP2 cuts: every parameter (a tensor rank's part of it) along its
    first dimension, padded to equal parts."""
    shapes = [cut_shape(p, tensor) for p in parameters]
    return sum(-(-shape[0] // ranks) * math.prod(shape[1:]) for shape in shapes)


def layer_gradient(layer: LayerShape, job: Job, mesh: Mesh) -> int:
    """Bytes of one layer's gradients on a rank: fp32, of its shard where weights are sharded."""
    return 4 * shard_elements(layer.parameters, mesh.weights if job.weight_sharding else 1, mesh.tensor)


def layer_weights(layer: LayerShape, job: Job, mesh: Mesh) -> list[Sent]:
    """FSDP, for one layer: gathered for the forward and again for the backward, gradients scattered in fp32."""
    f = mesh.weights
    if not job.weight_sharding or f == 1:
        return []
    shard = shard_elements(layer.parameters, f, mesh.tensor)
    gathered = shard * (f - 1) * job.bytes_per_element
    sent = [Sent("all_gather", "fsdp", "weights of a layer", gathered, method=False)]
    if job.mode == "train":
        sent += [
            Sent("all_gather", "fsdp", "weights of a layer", gathered, method=False),
            Sent("reduce_scatter", "fsdp", "gradients of a layer", shard * (f - 1) * 4, method=False),
        ]
    return sent


@functools.lru_cache(maxsize=64)
def outer_groups(model: ModelShape) -> tuple[tuple[str, tuple[Parameter, ...]], ...]:
    """FSDP's groups outside the layers, as `longspan.hf.weights.fsdp` makes them: all one where embedding and head are
    tied, else the embedding, learnt positions if there are any, final norm and head.
    """
    if model.tied:
        return (("embeddings and head", model.root),)
    embedding, *rest = model.root
    positions = tuple(p for p in rest if len(p.shape) > 1 and p is not rest[-1])
    head = tuple(p for p in rest if p not in positions)
    groups = (("the embedding", (embedding,)), ("positions", positions), ("final norm and head", head))
    return tuple((what, parameters) for what, parameters in groups if parameters)


def sums_gradients(sent: Sent) -> bool:
    """Whether a collective belongs to the sum of the gradients over the ranks."""
    return sent.axis == "fsdp" and (sent.op == "reduce_scatter" or "gradients" in sent.what)


def sums_gradients_once(model: ModelShape, job: Job, mesh: Mesh, hardware: Hardware) -> bool:
    """Whether a step of several micro-batches sums its gradients over the ranks once, as `longspan train` decides."""
    whole = model.params // mesh.tensor * 4
    sharded = job.weight_sharding and mesh.weights > 1
    return micro_batches(job, mesh) > 1 and sums_once(sharded, whole, hardware.memory_bytes)


def around_the_layers(model: ModelShape, job: Job, mesh: Mesh) -> list[Sent]:
    """Embeddings, head, loss; without FSDP the sum of all gradients.

    FSDP gathers each of their groups once a step: an embedding's backward needs no weights, a head's comes right after
    its forward.
    """
    f = mesh.weights
    if mesh.gpus == 1:
        return []
    # Five int64: what a batch is, compared by the hosts of all ranks before anything else.
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
    """One flag per parameter, then the gradients in fp32 in buckets: what `longspan.hf.weights.gradients.GradientSum`
    does.
    """
    f = mesh.weights
    buckets, flags = _buckets(model, mesh.tensor)
    sent = [Sent("all_reduce", "fsdp", "which gradients exist", 2 * 4 * flags * (f - 1) // f, method=False)]
    for elements in buckets:
        size = 2 * 4 * elements * (f - 1) // f
        sent.append(Sent("all_reduce", "fsdp", "gradients", size, method=False))
    return sent


@functools.lru_cache(maxsize=64)
def _buckets(model: ModelShape, tensor: int) -> tuple[tuple[int, ...], int]:
    """Elements of every bucket, and the number of parameters; in the order of the model's parameters."""
    first = [p for p in model.root if "embed" in p.name or "wte" in p.name or "wpe" in p.name]
    last = [p for p in model.root if p not in first]
    in_order = [*first, *(p for layer in model.layers for p in layer.parameters), *last]
    sizes = [math.prod(cut_shape(p, tensor)) for p in in_order]
    return tuple(sum(sizes[i] for i in bucket) for bucket in gradient_buckets(sizes)), len(in_order)
