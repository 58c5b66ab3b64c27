"""Memory of a training step: its peak candidates.

In order: the loss (all activations are saved, logits exist); the head's backward; the backward of the last layer, of
the one before it (activations are still saved, the last layer's gradients are in flight) and of the first (gradients of
all others exist); the gradients of embeddings and head, and the optimizer; the backward of a vision tower. Others, such
as a tiled norm, were below these for every model, mesh and option that was tried.

Letters: b bytes per element, d hidden size, t tensor ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from longspan.core.tile_sizes import HEAD_ROWS, NARROW_PARTS, head_tile
from longspan.plan.cost.saved import (
    freed_per_token,
    mlp_backward_bytes,
    norm_bytes,
    recomputed_per_token,
    saved_in_a_step,
)
from longspan.plan.cost.weights import (
    always_gathered,
    gathered_bytes,
    gathers,
    layer_gradient,
    outer_groups,
    own_head,
    shard_bytes,
    shard_elements,
    tower_elements,
    trained,
    trained_by_all_layers,
    trained_elements,
    trained_elements_of,
)
from longspan.plan.job import CostContext
from longspan.plan.layers.base import Parameter, SavedActivations
from longspan.plan.shape import LayerShape
from longspan.plan.tower import held_by_tower, in_block_backward

Peak = dict[str, int]
"""Bytes by item, at one time in a step; items at rest are added to all of them."""


def training_peaks(c: CostContext, once: bool) -> list[Peak]:
    """Return the peak candidates; `once`: whether gradients of all micro-batches are summed over the ranks once."""
    w, hidden = _Weights(c, once), _hidden_bytes(c)
    at_loss = saved_in_a_step(c)[0] + _tables(c)
    final_norm = SavedActivations(hidden=c.tokens * (norm_bytes(c) + c.d * c.b))
    in_loss, in_head = ({**(at_loss + final_norm).items(), **each, "hidden": hidden} for each in w.loss_and_head())
    in_loss["logits"] = _logits_bytes(c)
    if (teacher := c.teacher) is not None:  # its hidden states and its head
        in_loss["hidden"] += teacher.tokens * teacher.d * c.b // c.hidden_shards
        in_loss["gathered_weights"] += gathered_bytes(teacher, 0, heads=1)
    in_layers = itertools.chain.from_iterable(_in_layers(c, w))
    peaks = [in_loss, in_head, *in_layers, *w.outside_layers(), *w.tower_backward()]
    held = held_by_tower(c)  # the tower's backward is the last
    return [{**peak, "vision": held + peak.get("vision", 0)} for peak in peaks]


def peaks_in_attention(c: CostContext) -> list[int]:
    """Return the peak bytes in the backward of attention: of the last layer, the one before it, and the first."""
    return [sum(phases[-1].values()) for phases in _in_layers(c, _Weights(c, once=False))]


def _in_layers(c: CostContext, w: _Weights) -> Iterator[list[Peak]]:
    """Yield the peak candidates in the backward of the last layer, the one before it, and the first."""
    phases = _layer_phases(c, _hidden_bytes(c))
    for saved, weights in zip(saved_in_a_step(c)[1:], w.around_layers(), strict=True):
        yield [
            {
                **(saved + _tables(c) - freed).items(),
                **weights,
                **items,
                "gradients": weights["gradients"] + items.get("gradients", 0),
            }
            for freed, items in phases
        ]


def _hidden_bytes(c: CostContext) -> int:
    return c.tokens * c.d * c.b // c.hidden_shards


def _tables(c: CostContext) -> SavedActivations:
    """Return the cosines and sines of the rank's positions, which all layers share."""
    dims = (c.model.positions.dims or 0) if c.model.positions.rotary else 0
    return SavedActivations(hidden=2 * dims * c.tokens * c.b)


def accumulated_bytes(c: CostContext, once: bool) -> int:
    """Return the bytes of the gradients of earlier micro-batches."""
    return _Weights(c, once).earlier


def _logits_bytes(c: CostContext) -> int:
    """Return the bytes of the logits of `longspan.losses.cross_entropy`, tile by tile.

    In fp32 one buffer is logits, then probabilities, then gradient. In bf16 a tile has twice the rows, cast part by
    part.
    """
    rows, vocab = head_tile(c.model.vocab, on_cpu=False), -(-c.model.vocab // c.mesh.tensor)
    if c.b == 4:
        return min(c.tokens, rows) * vocab * 4
    narrow = min(c.tokens, 2 * rows)
    return (narrow * 2 + -(-narrow // NARROW_PARTS) * 4) * vocab


def _layer_phases(c: CostContext, hidden: int) -> list[tuple[SavedActivations, Peak]]:
    """Return the phases of a layer's backward: its recomputed all-to-all, its MLP, its attention.

    Each is of the layer that needs most: what is free of saved activations when it is reached, and its own items.
    `hidden`: bytes of hidden states, or of their gradient.
    """
    layers = [layer for layer, _ in c.model.layer_kinds]
    mlp, sums = max((mlp_backward_bytes(layer, c) for layer in layers), key=sum)
    freed = min((freed_per_token(layer, c) for layer in layers), key=lambda each: each.total) * c.tokens
    buffers = max((layer.mixing.backward_buffers(c) for layer in layers), key=lambda each: each.total)
    phases = [
        (SavedActivations(), {"mlp": mlp, "gradients": sums, "hidden": 2 * hidden}),
        (freed, {"comm_buffers": buffers.comm, "attention_workspace": buffers.workspace, "hidden": hidden}),
    ]
    all_to_all = max(_recomputed_all_to_all(layer, c) for layer in layers)
    if all_to_all:  # the layer has not saved anything yet but its normalised input
        all_to_all -= max(recomputed_per_token(layer, c).total for layer in layers) * c.tokens
        phases.insert(0, (SavedActivations(), {"attention_workspace": all_to_all, "hidden": 2 * hidden}))
    return phases


class _Weights:
    """Gradients and gathered weights, from phase to phase of a step.

    Gradients of a layer are in the compute dtype in its backward, then flat in fp32 for the reduce-scatter, then a
    shard. An untied head is its own FSDP group: it is gathered together with the last layer, and scattered before that
    layer's backward, in which the sent buffer is still held. A tied head's gradient stays to the end.
    """

    def __init__(self, c: CostContext, once: bool) -> None:
        self.c, model, t, sharded = c, c.model, c.mesh.tensor, gathers(c)
        layers = [layer for layer, _ in model.layer_kinds]
        # Trained elements of the head, and of the head's own FSDP group (0 if it is tied or not sharded).
        self.head = model.vocab * c.d // t * model.head.trained
        self.head_apart = own_head(model) > 0 and sharded
        self.own_head = _trained(dict(outer_groups(model)).get("final norm and head", ())) // t * self.head_apart
        # Bytes of gradients at rest on the device; and of earlier micro-batches', not sharded until they are summed.
        self.at_rest = 0 if c.on_host else 4 * trained_elements(c)
        untrained = 0 if c.job.pictures else model.tower_params
        accumulated = 4 * ((trained_by_all_layers(c) - untrained) // t) if once else self.at_rest
        self.earlier = accumulated if c.job.batch > c.mesh.data else 0
        # Bytes of the gradients of a vision tower, which come last.
        self.of_tower = 4 * tower_elements(c) if c.job.pictures and not (c.on_host or self.earlier) else 0
        # Bytes of cast weights: from the host, a layer's fp32 shard before it is cast; from 4 bits, a matrix.
        unpacked = max((p.numel for layer in layers for p in layer.parameters if p.packed), default=0)
        from_host = max(shard_bytes(layer.parameters, c.weight_ranks, 4, t) for layer in layers)
        self.casts = from_host * c.on_host + unpacked * c.b
        # Bytes of the largest layer's gradients: in the compute dtype, with those of a tied head, which stay; flat in
        # fp32, if they are scattered; and their shard, unless earlier micro-batches have made it.
        largest = max(trained_elements_of(layer, c) for layer in layers) // t
        self.of_layer = (largest + (0 if self.head_apart else self.head)) * c.b
        self.flat = 4 * sharded  # bytes per element
        self.layer_flat = largest * self.flat
        self.layer_shard = 0 if self.earlier else max(layer_gradient(layer, c) for layer in layers)

    def loss_and_head(self) -> tuple[Peak, Peak]:
        """Return those in the loss, and in the head's backward.

        From the loss on there are the gradients of the head's weights, in fp32; the backward casts them.
        """
        c, gradients = self.c, self.earlier + self.head * 4
        cast = self.head * c.b if c.b == 2 else 0
        gathered = gathered_bytes(c, 0, heads=2) if self.head_apart else gathered_bytes(c, 1)
        return (
            {"gradients": gradients + min(cast, HEAD_ROWS * c.d * c.b), "gathered_weights": self.casts + gathered},
            {"gradients": gradients + cast, "gathered_weights": self.casts + gathered_bytes(c, 1, heads=1)},
        )

    def around_layers(self) -> tuple[Peak, Peak, Peak]:
        """Return those in the backward of the last layer, of the one before it, and of the first.

        The last layer's has the head's gradients in flight, the next the last layer's. In the first all others are at
        rest, but for an untied embedding's.
        """
        c, sharded = self.c, gathers(self.c)
        head = self.own_head * 4 + (0 if self.earlier else self.own_head * 4 // c.weight_ranks)
        embedding = 0
        if not (self.earlier or c.on_host):
            embedding = 4 * sum(
                shard_elements(trained(parameters), c.weight_ranks, c.mesh.tensor)
                for what, parameters in outer_groups(c.model)
                if what in ("the embedding", "positions")
            )
        own = self.layer_shard if sharded and not c.on_host else 0
        in_first = self.at_rest - self.of_tower - embedding - own + self.of_layer * sharded + self.layer_flat
        gathered = self.casts + gathered_bytes(c, 2)
        computing = self.earlier + self.of_layer
        return (
            {"gradients": computing + head, "gathered_weights": gathered},
            {"gradients": computing + self.layer_flat + self.layer_shard, "gathered_weights": gathered},
            {"gradients": in_first, "gathered_weights": self.casts * c.on_host + gathered_bytes(c, 1)},
        )

    def outside_layers(self) -> Iterator[Peak]:
        """Yield those in the embeddings' backward and the optimizer."""
        model, c, t = self.c.model, self.c, self.c.mesh.tensor
        # The first layer's gradients may still be in flight; a tied table waits for them.
        in_flight = (_trained(model.root) // t - self.own_head) * self.flat + (0 if model.tied else self.layer_flat)
        yield {"gradients": self.at_rest + self.head * c.b * gathers(c) + in_flight}
        if model.tied:  # the table's two gradients and their sum; an fp32 head's gradient becomes the sum
            of_root = shard_elements(trained(model.root), c.weight_ranks, t)
            in_layers = 0 if c.on_host else 4 * (trained_elements(c) - of_root) - self.of_tower
            tables = (2 if c.b == 4 else 3) * self.head * c.b
            gradients = in_layers + tables + self.layer_flat
            yield {"gradients": gradients, "gathered_weights": gathered_bytes(c, 0)}

    def tower_backward(self) -> Iterator[Peak]:
        """Yield those in the backward of a vision tower's last block: all other gradients are at rest."""
        tower, c = self.c.model.tower, self.c
        if tower is None or not c.job.pictures:
            return
        block = sum(p.numel for p in tower.block)
        gradients = self.at_rest - self.of_tower + block * (c.b * gathers(c) + self.flat)
        gathered = (always_gathered(c.model) + 2 * block) * c.b * gathers(c)
        yield {"gradients": gradients, "gathered_weights": self.casts + gathered, "vision": in_block_backward(tower, c)}


def _trained(parameters: tuple[Parameter, ...]) -> int:
    return sum(p.numel for p in trained(parameters))


def _recomputed_all_to_all(layer: LayerShape, c: CostContext) -> int:
    """Return the bytes of a checkpointed layer's recomputed all-to-all, the rank's q, k and v included; 0 if none is.
    With slices: of the last slice, and the outputs of all.

    The larger of sending q, k and v (sent and received buffer), and of receiving the output (what arrived, the output
    in head layout, as received, and in token layout).
    """
    parts = layer.mixing.slices(c)
    if c.job.memory.checkpointing == "none" or (c.mesh.ulysses == 1 and len(parts) == 1):
        return 0
    qkv, out, packed = (max(sizes) for sizes in zip(*(part.forward_buffers(c) for part in parts), strict=True))
    if c.mesh.ulysses == 1:
        packed = 0
    needed: int = max(qkv + 2 * packed, qkv + (packed + 3 * out) * c.job.memory.recomputes_layers)
    if len(parts) > 1:  # the slices' outputs, and their sum; with `tiled` the normed input does not exist
        needed += layer.mixing.saved(c) * c.tokens - out + (0 if c.job.memory.tiled else c.tokens * c.d * c.b)
    return needed
