"""Weights, gradients and loss: what FSDP, or the sum of gradients, and the loss send, and the shards they leave."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from longspan.core.buckets import gradient_buckets
from longspan.plan.cost.sent import Sent

if TYPE_CHECKING:
    from longspan.plan.job import Job, Mesh
    from longspan.plan.models.shape import LayerShape, ModelShape, Parameter


@functools.lru_cache(maxsize=4096)
def shard_elements(parameters: tuple[Parameter, ...], ranks: int, tensor: int = 1) -> int:
    """Elements of one rank's shard, as FSDP2 cuts: every parameter along its first dimension, padded to equal parts."""
    return sum(-(-p.shape[0] // ranks) * (p.numel // p.shape[0]) for p in parameters) // tensor


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


def around_the_layers(model: ModelShape, job: Job, mesh: Mesh) -> list[Sent]:
    """Embeddings, head, loss; without FSDP the sum of all gradients.

    FSDP keeps embeddings and head gathered from their forward to their backward.
    """
    f = mesh.weights
    if f == 1:
        return []
    # Five int64: what a batch is, compared by the hosts of all ranks before anything else.
    sent = [Sent("all_gather", "fsdp", "batches compared", 5 * 8 * (f - 1), method=False)]
    if job.weight_sharding:
        root = shard_elements(model.root, f, mesh.tensor)
        gathered = root * (f - 1) * job.bytes_per_element
        sent.append(Sent("all_gather", "fsdp", "weights of embeddings and head", gathered, method=False))
        if job.mode == "train":
            sent.append(
                Sent("reduce_scatter", "fsdp", "gradients of embeddings and head", root * (f - 1) * 4, method=False)
            )
    if job.mode == "train":
        # Three fp64 numbers: the sum of the tokens' losses, their count, and the digests of batches on a GPU.
        sent.append(Sent("all_reduce", "fsdp", "loss", 2 * 24 * (f - 1) // f, method=False))
        if not job.weight_sharding:
            sent += _gradient_sum(model, mesh)
    return sent


def _gradient_sum(model: ModelShape, mesh: Mesh) -> list[Sent]:
    """One flag per parameter, then the gradients in fp32 in buckets: what `longspan.hf.gradients.GradientSum` does."""
    f = mesh.weights
    buckets, flags = _buckets(model)
    sent = [Sent("all_reduce", "fsdp", "which gradients exist", 2 * 4 * flags * (f - 1) // f, method=False)]
    for elements in buckets:
        size = 2 * 4 * (elements // mesh.tensor) * (f - 1) // f
        sent.append(Sent("all_reduce", "fsdp", "gradients", size, method=False))
    return sent


@functools.lru_cache(maxsize=64)
def _buckets(model: ModelShape) -> tuple[tuple[int, ...], int]:
    """Elements of every bucket, and the number of parameters; in the order of the model's parameters."""
    first = [p for p in model.root if "embed" in p.name or "wte" in p.name or "wpe" in p.name]
    last = [p for p in model.root if p not in first]
    in_order = [*first, *(p for layer in model.layers for p in layer.parameters), *last]
    sizes = [p.numel for p in in_order]
    return tuple(sum(sizes[i] for i in bucket) for bucket in gradient_buckets(sizes)), len(in_order)
