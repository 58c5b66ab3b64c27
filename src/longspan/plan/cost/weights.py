"""Weights, gradients and loss: shards at rest, gathered weights, and what FSDP, gradient sums and the loss send."""

from __future__ import annotations

import functools
import math
import re
from dataclasses import replace

from longspan.core.tile_sizes import gradient_buckets, reduces_once
from longspan.plan.hardware import Hardware
from longspan.plan.job import CostContext
from longspan.plan.layers.base import Parameter, Sent
from longspan.plan.shape import LayerShape, ModelShape

# ---------------------------------------------------------------------------------------------------------------------
# What the tensor axis cuts.

COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")
ROWS = ("o_proj", "down_proj")


@functools.lru_cache(maxsize=4096)
def cut_shape(p: Parameter, tensor: int) -> tuple[int, ...]:
    """Return the shape of one tensor rank's part of a weight."""
    dim = cut_dim(p.name)
    if tensor == 1 or dim is None or dim >= len(p.shape):
        return p.shape
    return (*p.shape[:dim], -(-p.shape[dim] // tensor), *p.shape[dim + 1 :])


def cut_dim(name: str) -> int | None:
    """Return the dimension along which the tensor axis cuts a weight, or None."""
    owner, _, own = name.rpartition(".")
    last = owner.rpartition(".")[2]
    if last in ("lora_A", "lora_B"):  # with its layer: B's rows, or A's columns
        dim = cut_dim(f"{owner.rpartition('.')[0]}.weight")
        return dim if dim == (last == "lora_A") else None
    if "shared_expert" in name:
        return None
    if ".experts." in name or own == "sinks" or last in COLUMNS:
        return 0
    return 1 if last in ROWS and own == "weight" else None


def can_cut(layer: LayerShape) -> bool:
    """Whether `longspan.hf.weights.tensor_rules` can cut such a layer: separate projections, norms per head."""
    owners = {p.name.rpartition(".")[0].rpartition(".")[2]: p for p in layer.parameters}
    dim = getattr(layer.mixing, "head_dim", 0)
    per_head = all(owners[name].shape[0] == dim for name in ("q_norm", "k_norm") if name in owners)
    gated = "experts" in owners or {"gate_proj", "up_proj", "down_proj"} <= owners.keys()
    return per_head and gated and {"q_proj", "k_proj", "v_proj", "o_proj"} <= owners.keys()


# ---------------------------------------------------------------------------------------------------------------------
# At rest, and gathered.


@functools.lru_cache(maxsize=4096)
def trained(parameters: tuple[Parameter, ...]) -> tuple[Parameter, ...]:
    """Return the weights that have gradients."""
    return tuple(p for p in parameters if p.trained)


@functools.lru_cache(maxsize=4096)
def gather_bytes(parameters: tuple[Parameter, ...], ranks: int, width: int, tensor: int = 1) -> int:
    """Return the bytes of one rank's shard as FSDP gathers it: in float8, or as `shard_bytes`."""
    in_float8 = tuple(p for p in parameters if p.in_float8)
    others = tuple(p for p in parameters if not p.in_float8)
    return shard_elements(in_float8, ranks, tensor) + shard_bytes(others, ranks, width, tensor)


@functools.lru_cache(maxsize=4096)
def shard_bytes(parameters: tuple[Parameter, ...], ranks: int, width: int, tensor: int = 1) -> int:
    """Return the bytes of one rank's shard, with `width` bytes per element that is not packed in 4 bits."""
    packed = sum(-(-_packed_bytes(p) // ranks) for p in parameters if p.packed)
    return packed + width * shard_elements(tuple(p for p in parameters if not p.packed), ranks, tensor)


def _packed_bytes(p: Parameter) -> int:
    return -(-p.numel // 2)


def _scale_bytes(parameters: tuple[Parameter, ...]) -> int:
    """Return the bytes of the scales of packed weights, which every rank holds: 1 for 64 elements, 4 for 64 * 256."""
    return sum(-(-p.numel // 64) + 4 * -(-p.numel // (64 * 256)) for p in parameters if p.packed)


@functools.lru_cache(maxsize=4096)
def shard_elements(parameters: tuple[Parameter, ...], ranks: int, tensor: int = 1) -> int:
    """Return the elements of one rank's shard.

    FSDP2 cuts every parameter (a tensor rank's part of it) along its first dimension and pads to equal parts.
    """
    shapes = [cut_shape(p, tensor) for p in parameters]
    return sum(-(-shape[0] // ranks) * math.prod(shape[1:]) for shape in shapes)


def trained_elements(c: CostContext) -> int:
    """Return the elements of all weights on a rank that have gradients: without pictures not those of a tower."""
    ranks, t = c.weight_ranks, c.mesh.tensor
    language = sum(n * shard_elements(trained(parameters), ranks, t) for parameters, n in c.model.groups)
    return language + (tower_elements(c) if c.job.pictures else 0)


def tower_elements(c: CostContext) -> int:
    """Return the elements of a vision tower's weights on a rank; 0 for a language model."""
    tower, ranks = c.model.tower, c.weight_ranks
    if tower is None:
        return 0
    return tower.depth * shard_elements(tower.block, ranks) + shard_elements(tower.outside, ranks)


def weights_at_rest(c: CostContext) -> dict[str, int]:
    """Return the bytes of a rank's weights and optimizer state."""
    train, ranks, t = c.job.mode == "train", c.weight_ranks, c.mesh.tensor
    width = 4 if train else c.b  # training stores fp32, and two moments of AdamW
    weights = sum((shard_bytes(p, ranks, width, t) + _scale_bytes(p)) * n for p, n in c.model.groups)
    weights += width * tower_elements(c)
    if c.teacher is not None:
        weights += weights_at_rest(c.teacher)["weights"]
    return {"weights": weights, "optimizer": trained_elements(c) * 8 * train}


def gathers(c: CostContext) -> bool:
    """Whether weights are gathered for compute, because they are sharded or on the host."""
    return c.weight_ranks > 1 or c.job.memory.cpu_offload


def gathered_bytes(c: CostContext, layers: int, heads: int = 0) -> int:
    """Return the bytes of gathered weights: those outside layers that stay gathered, `layers` of the largest layers,
    and `heads` times the head's own FSDP group.
    """
    if not gathers(c):
        return 0
    largest = max(gather_bytes(computed(layer, c), 1, c.b) for layer, _ in c.model.layer_kinds)
    outside = (always_gathered(c.model) + heads * own_head(c.model)) * c.b
    return (outside + layers * largest) // c.mesh.tensor


def computed(layer: LayerShape, c: CostContext) -> tuple[Parameter, ...]:
    """Return the weights of a layer that a rank computes with: of sharded experts only its own."""
    if c.experts == 1 or not layer.mlp.experts:
        return layer.parameters
    others, of_experts = split_experts(layer)
    held = c.expert_layout(layer.mlp.experts).held
    return (*others, *(replace(p, shape=(held, *p.shape[1:])) for p in of_experts))


def trained_elements_of(layer: LayerShape, c: CostContext) -> int:
    """Return the elements of a layer's trained weights that a rank computes with."""
    return sum(p.numel for p in computed(layer, c) if p.trained)


def trained_by_all_layers(c: CostContext) -> int:
    """Return the elements of all trained weights with which a rank computes in a step, and of a vision tower's."""
    layers = sum(count * trained_elements_of(layer, c) for layer, count in c.model.layer_kinds)
    return c.model.tower_params + sum(p.numel for p in trained(c.model.root)) + layers


@functools.lru_cache(maxsize=256)
def split_experts(layer: LayerShape) -> tuple[tuple[Parameter, ...], tuple[Parameter, ...]]:
    """Return a layer's other weights, and those that stack experts; LoRA on these is gathered whole."""
    stacked = tuple(p for p in layer.parameters if ".experts." in p.name and ".lora_" not in p.name)
    return tuple(p for p in layer.parameters if p not in stacked), stacked


def layer_gradient(layer: LayerShape, c: CostContext) -> int:
    """Return the bytes of one layer's fp32 gradients on a rank."""
    return 4 * shard_elements(trained(layer.parameters), c.weight_ranks, c.mesh.tensor)


TOWER_ENDS = "the ends of the vision tower"


@functools.lru_cache(maxsize=64)
def outer_groups(model: ModelShape) -> tuple[tuple[str, tuple[Parameter, ...]], ...]:
    """Return FSDP's groups outside the layers, as `longspan.hf.weights.fsdp` makes them.

    One group if embedding and head are tied; else the embedding, learnt positions if any, and final norm with head.
    What is outside the blocks of a vision tower is a group, or part of the one.
    """
    around_tower = () if model.tower is None else model.tower.outside
    if model.tied:
        return (("embeddings and head", (*model.root, *around_tower)),)
    embedding, *rest = model.root
    # What joins the streams of hyper-connections is gathered with the rest, not with the norm behind it.
    positions = tuple(
        p for p in rest if (len(p.shape) > 1 or re.search(r"\.hc_head\.|\.hyper_", p.name)) and p is not rest[-1]
    )
    head = tuple(p for p in rest if p not in positions)
    groups = (
        ("the embedding", (embedding,)),
        ("positions", positions),
        (TOWER_ENDS, around_tower),
        ("final norm and head", head),
    )
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
    gathered_for_a_forward = ("the embedding", "final norm and head")
    groups = (parameters for what, parameters in outer_groups(model) if what not in gathered_for_a_forward)
    return sum(p.numel for parameters in groups for p in parameters)


# ---------------------------------------------------------------------------------------------------------------------
# Sent.


def layer_weights_sent(layer: LayerShape, c: CostContext) -> list[Sent]:
    """Return FSDP's traffic for one layer: weights gathered for forward and backward, fp32 gradients scattered."""
    c, f = c.of_layer(layer), c.mesh.fsdp_ranks
    if not c.job.weight_sharding or f == 1:
        return []
    groups = [("fsdp", f, "a layer", layer.parameters)]
    if c.experts > 1:
        others, stacked = split_experts(layer)
        groups = [("fsdp", f, "a layer", others), ("replicas", f // c.experts, "a layer's experts", stacked)]
    sent = []
    for axis, ranks, what, parameters in groups:
        received = gather_bytes(parameters, f, c.b, c.mesh.tensor) * (ranks - 1)
        gather = Sent("all_gather", axis, f"weights of {what}", received, method=False)
        gathers = 2 if c.job.mode == "train" else 1
        sent += [gather] * gathers
        if in_float8 := sum(p.in_float8 for p in parameters):  # of the stored weights, in fp32
            calls = gathers * in_float8
            sent.append(
                Sent("all_reduce", axis, "scales of weights", 2 * 4 * (ranks - 1) // ranks, calls, method=False)
            )
        if c.job.mode == "train" and trained(parameters):
            received = shard_elements(trained(parameters), f, c.mesh.tensor) * (ranks - 1) * 4
            sent.append(Sent("reduce_scatter", axis, f"gradients of {what}", received, method=False))
    return sent


def block_weights_sent(c: CostContext) -> list[Sent]:
    """Return FSDP's traffic for all blocks and pictures: weights gathered for forward and backward, fp32 gradients."""
    tower, f, passes = c.model.tower, c.mesh.fsdp_ranks, len(c.job.pictures)
    if tower is None or not passes or not c.job.weight_sharding or f == 1:
        return []
    shard = shard_elements(tower.block, f) * (f - 1)
    gather = Sent("all_gather", "fsdp", "weights of a tower block", shard * c.b, tower.depth * passes, method=False)
    if c.job.mode != "train":
        return [gather]
    # FSDP sums the gradients of both passes, of images and of video, and scatters them once.
    scatter = Sent("reduce_scatter", "fsdp", "gradients of a tower block", shard * 4, tower.depth, method=False)
    return [gather, gather, scatter]


def sums_gradients(sent: Sent) -> bool:
    """Whether a collective sums gradients over the ranks."""
    return sent.axis in ("fsdp", "replicas") and (sent.op == "reduce_scatter" or "gradients" in sent.what)


def sums_gradients_once(c: CostContext, hardware: Hardware) -> bool:
    """Whether a step of several micro-batches sums its gradients over the ranks once, as `longspan train` decides."""
    all_gradients = trained_by_all_layers(c) // c.mesh.tensor * 4
    return c.micro_batches > 1 and reduces_once(c.weight_ranks > 1, all_gradients, hardware.memory_bytes)


def outer_weights_sent(c: CostContext) -> list[Sent]:
    """Return the traffic of embeddings, head and loss, and without FSDP of the sum of all gradients.

    FSDP gathers each group outside the layers once a step: an embedding's backward needs no weights, and a head's
    backward follows its forward.
    """
    f, train = c.mesh.fsdp_ranks, c.job.mode == "train"
    if c.mesh.ranks == 1:
        return []
    # Four int64 that describe the batch: the hosts of all ranks compare them before anything else.
    everyone = "fsdp" if f > 1 else "tensor"
    sent = [Sent("all_gather", everyone, "batches compared", 4 * 8 * (c.mesh.ranks - 1), method=False)]
    if f == 1:
        return sent
    if c.job.weight_sharding:
        untrained = () if c.model.tower is None or c.job.pictures else c.model.tower.outside
        for what, parameters in outer_groups(c.model):
            shard = shard_elements(parameters, f, c.mesh.tensor) * (f - 1)
            sent.append(Sent("all_gather", "fsdp", f"weights of {what}", shard * c.b, method=False))
            mine = tuple(p for p in trained(parameters) if p not in untrained)
            if train and mine:
                shard = shard_elements(mine, f, c.mesh.tensor) * (f - 1)
                sent.append(Sent("reduce_scatter", "fsdp", f"gradients of {what}", shard * 4, method=False))
    if train:
        # Two fp64 numbers: the sum of the tokens' losses, and their count.
        sent.append(Sent("all_reduce", "fsdp", "loss", 2 * 16 * (f - 1) // f, method=False))
    if train and not c.job.weight_sharding:
        # A flag per parameter, then fp32 gradients in buckets, as `longspan.hf.weights.gradients` sums them.
        buckets, flags = _buckets(c.model, c.mesh.tensor, bool(c.job.pictures))
        for what, elements in (("which gradients exist", flags), *(("gradients", each) for each in buckets)):
            sent.append(Sent("all_reduce", "fsdp", what, 2 * 4 * elements * (f - 1) // f, method=False))
    return sent


@functools.lru_cache(maxsize=64)
def _buckets(model: ModelShape, tensor: int, pictures: bool) -> tuple[tuple[int, ...], int]:
    """Return the elements of every bucket, and the number of parameters; in the order of the model's parameters.

    `pictures`: whether a vision tower has gradients.
    """
    tower = () if model.tower is None else model.tower.parameters
    first = [p for p in model.root if "embed" in p.name or "wte" in p.name or "wpe" in p.name]
    last = [p for p in model.root if p not in first]
    language = [*first, *(p for layer in model.layers for p in layer.parameters), *last]
    counted = [*tower, *trained(tuple(language))]
    sizes = [math.prod(cut_shape(p, tensor)) for p in (counted if pictures else counted[len(tower) :])]
    # An indexer's weights may ask for a gradient, and get none.
    asks = model.tuning.lora is None and not model.tuning.freeze
    never = sum(".indexer." in p.name for p in language) if asks else 0
    return tuple(sum(sizes[i] for i in bucket) for bucket in gradient_buckets(sizes)), len(counted) + never
